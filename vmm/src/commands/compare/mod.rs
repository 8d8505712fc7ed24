//! `walvisor compare`: ways to one disk beside each other, in one run.

pub mod notify;
