//! `walvisor compare notify`: what a notification costs, and what a flush costs, on each way to a disk.

mod sample;

pub use sample::Sample;
