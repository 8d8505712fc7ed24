//! What a comparison tells, for a terminal, for programs and for people: `section.rs` has its tables, `spread.rs` how far rounds scatter, `plot.rs` its plots,
//! `page.rs` the page of both, `machine.rs` where it was measured.

pub mod machine;
pub mod page;
pub mod plot;
mod section;
mod spread;

pub use section::{Cell, Report, Section};
pub use spread::Spread;
