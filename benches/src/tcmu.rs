//! `walvisor-bench tcmu`: the kernel's SCSI target with a handler in user space, compared with its
//! NBD client on the same backend.

use clap::Args;
use walvisor::commands::CommandError;

use crate::bench::{Bench, Settings};
use crate::linux::{self, Kernels, Scripts};
use crate::output::Output;

const MATRICES: &str = include_str!("../matrices/tcmu.toml");
const SCRIPT: &str = include_str!("../scripts/tcmu.sh");
const SCRIPTS: Scripts = Scripts {
    user_mode: SCRIPT,
    machine: SCRIPT,
    guest: "",
    newer: "",
};

/// Arguments of `walvisor-bench tcmu`.
#[derive(Debug, Args)]
pub struct TcmuArguments {
    #[command(flatten)]
    kernels: Kernels,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench tcmu`.
///
/// # Errors
/// If a measurement fails, or a file can't be written.
pub fn run(arguments: &TcmuArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let kernels = arguments.kernels.chosen(output.quick);
    let mut bench = Bench::new(MATRICES, output, &kernels, &Settings::new());
    let session = bench.start()?;
    let mut kernels = bench.matrices.chunks_mut(1);
    let run =
        kernels.try_for_each(|kernel| linux::measure(kernel, &SCRIPTS, &output.dir, &session));
    bench.finish(session, run)
}
