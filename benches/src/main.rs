//! `walvisor-bench`: measures the disks of `walvisor`, alone and beside other programs.

use std::process::ExitCode;

fn main() -> ExitCode {
    walvisor_benches::cli::main()
}
