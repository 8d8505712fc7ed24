//! `walvisor`: boots Linux guests on write-ahead-logged disks.

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    walvisor::cli::main(Instant::now())
}
