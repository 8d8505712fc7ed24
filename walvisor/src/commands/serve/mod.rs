//! `walvisor serve`: serves disks to programs other than this VMM's guests.
//!
//! ```text
//!   Protocol (nbd, vhost-user, tcmu, ublk, or none) ─▶ DaemonArguments::run: the steps of every daemon      daemon.rs
//!                                                    │ --config FILE                                   config.rs, saving.rs
//!                                                    │ the one check of all disks                      pool.rs
//!                                                    ▼
//!                                                  Doors: a Door for each protocol that a disk has     door.rs
//!                                                    │   nbd.rs, vhost_user.rs, tcmu/, ublk.rs
//!                                                    ▼
//!                                                  Hotplug: disks that come and go                     hotplug.rs
//!                                                    ▼
//!                                                  Ending: bounds the time that the end takes          ending.rs
//! ```

pub(super) mod config;
mod daemon;
mod door;
mod ending;
mod hotplug;
pub(super) mod nbd;
mod pool;
pub(super) mod saving;
mod tcmu;
mod ublk;
mod vhost_user;

use std::time::Instant;

use clap::{Args, Subcommand};

pub use daemon::DaemonArguments;

use super::CommandError;
use crate::disk_spec::{DiskArgument, DiskCommand, disk_help};

/// The arguments of `walvisor serve`.
#[derive(Args, Debug)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_long_help = disk_help(DiskCommand::Serve)
)]
pub struct ServeArguments {
    /// The door of disks that name none.
    #[command(subcommand)]
    pub protocol: Option<Protocol>,
    /// The arguments of every daemon.
    #[command(flatten)]
    pub daemon: DaemonArguments,
}

/// The protocols.
#[derive(Debug, Subcommand)]
pub enum Protocol {
    /// Serve NBD until SIGTERM or SIGINT; prints each disk's URI when it is ready
    #[command(
        after_long_help = disk_help(DiskCommand::Nbd),
        mut_arg("disks", |arg| arg
            .value_parser(DiskArgument(DiskCommand::Nbd))
            .help("A disk and where to serve it: path=FILE,socket=PATH or \
                path=FILE,port=N[,address=IP]; may be given several times; 'help' lists the keys"))
    )]
    Nbd(DaemonArguments),
    /// Serve vhost-user-blk and vhost-user-scsi until SIGTERM or SIGINT; prints each disk's socket
    /// when it is ready
    #[command(
        after_long_help = disk_help(DiskCommand::VhostUser),
        mut_arg("disks", |arg| arg
            .value_parser(DiskArgument(DiskCommand::VhostUser))
            .help("A disk and where to serve it: path=FILE,socket=PATH; may be given several \
                times; 'help' lists the keys"))
    )]
    VhostUser(DaemonArguments),
    /// Serve the kernel's SCSI target (TCMU) until SIGTERM or SIGINT; prints each disk's device
    /// when it is ready
    #[command(
        after_long_help = disk_help(DiskCommand::Tcmu),
        mut_arg("disks", |arg| arg
            .required(false)
            .value_parser(DiskArgument(DiskCommand::Tcmu))
            .required_unless_present_any(["list", "remove", "config"])
            .help("A disk: path=FILE[,name=NAME][,fabric=loop|vhost|none][,wwn=naa.N]; may be \
                given several times; 'help' lists the keys"))
    )]
    Tcmu(tcmu::TcmuArguments),
    /// Serve the kernel's user-space block driver (ublk) until SIGTERM or SIGINT; prints each
    /// disk's device when it is ready
    #[command(
        after_long_help = disk_help(DiskCommand::Ublk),
        mut_arg("disks", |arg| arg
            .required(false)
            .value_parser(DiskArgument(DiskCommand::Ublk))
            .required_unless_present_any(["list", "remove", "config"])
            .help("A disk: path=FILE[,queues=N][,queue-size=N]; may be given several times; \
                'help' lists the keys"))
    )]
    Ublk(ublk::UblkArguments),
}

/// Serves until a signal asks to stop.
///
/// # Errors
/// If the disks cannot be served or closed.
pub fn run(arguments: &ServeArguments, started: Instant) -> Result<(), CommandError> {
    match &arguments.protocol {
        None => arguments.daemon.run(DiskCommand::Serve, started),
        Some(Protocol::Nbd(daemon)) => daemon.run(DiskCommand::Nbd, started),
        Some(Protocol::VhostUser(daemon)) => daemon.run(DiskCommand::VhostUser, started),
        Some(Protocol::Tcmu(arguments)) => tcmu::run(arguments, started),
        Some(Protocol::Ublk(arguments)) => ublk::run(arguments, started),
    }
}
