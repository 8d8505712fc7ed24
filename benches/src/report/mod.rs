//! The report of a comparison, as text, JSON and a page: `section.rs` has its tables, `spread.rs`
//! the spread of rounds, `plot.rs` its plots, `page.rs` fills the templates of the page and of a
//! plot (`page.html`, `plot.svg`), `machine.rs` describes the machine that was measured.

pub mod machine;
pub mod page;
pub mod plot;
mod section;
mod spread;

pub use section::{Cell, Preference, Report, Section};
pub use spread::Spread;
