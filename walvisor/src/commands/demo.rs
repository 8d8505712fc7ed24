//! `walvisor demo`: the embedded guest on fresh disks. No kernel, no download.

use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use walvisor_vmm::seccomp::Seccomp;

use super::CommandError;
use super::process::seccomp_modes;
use crate::demo;

/// The arguments of `walvisor demo`.
#[derive(Args, Debug)]
pub struct DemoArguments {
    /// Run the conformance cases: what the virtio specification allows, and what it forbids
    #[arg(long)]
    pub conformance: bool,
    /// Seccomp filter against system calls that the VMM does not need: on, log or off
    #[arg(long, value_name = "MODE", default_value = "on", value_parser = seccomp_modes())]
    pub seccomp: Seccomp,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Directory for the temporary disks [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Prints to stdout. A failed write is fine: the reader has closed the pipe.
fn print(text: fmt::Arguments<'_>) {
    let _ = io::stdout().write_fmt(text);
}

fn show(report: &(impl Serialize + fmt::Display), json: bool) -> Result<(), CommandError> {
    if json {
        let text = serde_json::to_string(report).map_err(CommandError::failed)?;
        print(format_args!("{text}\n"));
    } else {
        print(format_args!("\n{report}"));
    }
    Ok(())
}

/// Runs the embedded guest and prints its counts.
///
/// # Errors
/// If the guest cannot run here, or has read a wrong byte.
pub fn run(arguments: &DemoArguments) -> Result<(), CommandError> {
    let parent = arguments.dir.clone().unwrap_or_else(std::env::temp_dir);
    let json = arguments.json;
    let say = move |line: &str| {
        if !json {
            print(format_args!("guest: {line}\n"));
        }
    };
    let failure = if arguments.conformance {
        let report = demo::check_conformance(&parent, arguments.seccomp, say)
            .map_err(CommandError::failed)?;
        show(&report, json)?;
        report.failure()
    } else {
        let report = demo::run(&parent, arguments.seccomp, say).map_err(CommandError::failed)?;
        show(&report, json)?;
        report.failure()
    };
    match failure {
        Some(reason) => Err(CommandError::Failed(reason)),
        None => Ok(()),
    }
}
