//! Everything specific to one processor architecture.

pub mod x86_64;
