//! `walvisor-bench`: measures the disks of `walvisor`, alone and beside others.

use std::process::ExitCode;

fn main() -> ExitCode {
    walvisor_benches::cli::main()
}
