//! Benchmarks, and what they share.

pub mod spread;
pub mod tiny_guest;
