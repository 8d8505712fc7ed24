//! `walvisor serve`: disks for programs other than this monitor's guests.

mod activation;
mod nbd;
mod socket;
mod vhost_user;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::CommandError;
use crate::disk_spec::DiskSpec;
use crate::seccomp::Seccomp;

/// The arguments of `walvisor serve`.
#[derive(Args, Debug)]
pub struct ServeArguments {
    /// How clients reach the disks.
    #[command(subcommand)]
    pub door: Door,
}

/// The protocols.
#[derive(Debug, Subcommand)]
pub enum Door {
    /// NBD, until SIGTERM or SIGINT; prints where each disk is, as a URI, when it can be had
    Nbd(nbd::NbdArguments),
    /// vhost-user-blk, until SIGTERM or SIGINT; prints where each disk is when it can be had
    VhostUser(DaemonArguments),
}

/// What every daemon takes.
#[derive(Args, Debug)]
pub struct DaemonArguments {
    /// A disk and where to serve it: path=FILE,socket=PATH or, NBD only, path=FILE,port=N[,address=IP]; may be given several times
    #[arg(long = "disk", value_name = "SPEC", required = true)]
    pub disks: Vec<DiskSpec>,
    /// Permissions of the sockets, octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode)]
    pub mode: u32,
    /// Write metrics in Prometheus text at the end, to a file or - for stdout
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// What a system call that the daemon has no use for leads to
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub seccomp: Seccomp,
}

/// Parses the argument of `--mode`.
fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "give permissions as three octal digits, such as 660".to_owned())
}

/// Serves until a signal asks to stop.
///
/// # Errors
/// If the disks cannot be served, or not be closed.
pub fn run(arguments: &ServeArguments) -> Result<(), CommandError> {
    match &arguments.door {
        Door::Nbd(arguments) => nbd::run(arguments),
        Door::VhostUser(arguments) => vhost_user::run(arguments),
    }
}
