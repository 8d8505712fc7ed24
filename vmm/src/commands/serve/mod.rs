//! `walvisor serve`: serves disks to programs other than this VMM's guests.

mod daemon;
mod members;
pub(super) mod nbd;
mod tcmu;
mod vhost_user;

use std::time::Instant;

use clap::{Args, Subcommand};

pub use daemon::DaemonArguments;

use super::CommandError;
use crate::disk_spec::{DiskArgument, DiskCommand, disk_help};

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
    /// Serve NBD until SIGTERM or SIGINT; prints each disk's URI when it is ready
    #[command(
        after_long_help = disk_help(DiskCommand::Nbd),
        mut_arg("disks", |arg| arg
            .help("A disk and where to serve it: path=FILE,socket=PATH or path=FILE,port=N[,address=IP]; may be given several times; 'help' lists the keys"))
    )]
    Nbd(nbd::NbdArguments),
    /// Serve vhost-user-blk until SIGTERM or SIGINT; prints each disk's socket when it is ready
    #[command(
        after_long_help = disk_help(DiskCommand::VhostUser),
        mut_arg("disks", |arg| arg
            .value_parser(DiskArgument(DiskCommand::VhostUser))
            .help("A disk and where to serve it: path=FILE,socket=PATH; may be given several times; 'help' lists the keys"))
    )]
    VhostUser(DaemonArguments),
    /// Serve the kernel's SCSI target (TCMU) until SIGTERM or SIGINT; prints each disk's device when it is ready
    #[command(
        after_long_help = disk_help(DiskCommand::Tcmu),
        mut_arg("disks", |arg| arg
            .required(false)
            .value_parser(DiskArgument(DiskCommand::Tcmu))
            .required_unless_present_any(["list", "remove"])
            .help("A disk: path=FILE[,name=NAME][,fabric=loop|vhost|none][,wwn=naa.N]; may be given several times; 'help' lists the keys")),
        mut_arg("mode", |arg| arg.hide(true))
    )]
    Tcmu(tcmu::TcmuArguments),
}

/// Serves until a signal asks to stop.
///
/// # Errors
/// If the disks cannot be served or closed.
pub fn run(arguments: &ServeArguments, started: Instant) -> Result<(), CommandError> {
    match &arguments.door {
        Door::Nbd(arguments) => nbd::run(arguments, started),
        Door::VhostUser(arguments) => vhost_user::run(arguments, started),
        Door::Tcmu(arguments) => tcmu::run(arguments, started),
    }
}
