//! x86-64: start states, tables and registers.

pub mod long_mode;
