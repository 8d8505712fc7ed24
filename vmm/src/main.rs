//! `walvisor`: boots Linux guests on write-ahead-logged disks.
fn main() {}
