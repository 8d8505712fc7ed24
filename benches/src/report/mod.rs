//! The report of a comparison, as text, JSON and a page: `section.rs` has its tables, `spread.rs` the spread of rounds,
//! `plot.rs` its plots, `scale.rs` their axes, `picture.rs` what all plots have, `page.rs` the page of tables and plots,
//! `machine.rs` the machine that it was measured on.

pub mod machine;
pub mod page;
mod picture;
pub mod plot;
mod scale;
mod section;
mod spread;

pub use section::{Cell, Preference, Report, Section};
pub use spread::Spread;
