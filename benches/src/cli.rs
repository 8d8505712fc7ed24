//! The command line of `walvisor-bench`: its grammar (clap). Exit statuses and errors are those of
//! `walvisor`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use walvisor::cli::{WARNINGS, end, report_usage, show_warnings};

use crate::{
    archive, commit, database, drbd, fsync, neighbours, notify, peers, start, store, sustained,
    tcmu,
};

const PROGRAM: &str = "walvisor-bench";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = PROGRAM,
    version,
    about = "Measures the disks of walvisor, as tables, JSON, and a page with plots"
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What to measure.
#[derive(Debug, Subcommand)]
enum Command {
    /// Group commit by clients, sync latencies, waits, disks and media, compared with published
    /// results
    Commit(commit::CommitArguments),
    /// One disk through virtio-mmio, virtio-pci, vhost-user and NBD: what a notification and a
    /// flush cost
    Notify(notify::NotifyArguments),
    /// MariaDB, PostgreSQL and SQLite: what a commit costs on a raw image and on the log, and in
    /// guests that share a log
    Database(database::DatabaseArguments),
    /// The disk compared with those of QEMU, qemu-storage-daemon, qemu-nbd and tcmu-runner
    Peers(peers::PeersArguments),
    /// A disk's commits beside clients that take all they can get, on walvisor and on
    /// qemu-storage-daemon
    Neighbours(neighbours::NeighboursArguments),
    /// What each way to have a disk does with a FLUSH: syncs of the medium, and what kills and
    /// power cuts lose and tear
    Fsync(fsync::FsyncArguments),
    /// Commits of a disk whose log goes to a store that is far away, and that wait for it
    Archive(archive::ArchiveArguments),
    /// TCMU compared with NBD: 2, 4 and 8 fio threads in Linux kernels, and published results
    Tcmu(tcmu::TcmuArguments),
    /// The disk over minutes, compared with qemu-nbd and a raw image: each second's rate, the
    /// longest wait, the time to close
    Sustained(sustained::SustainedArguments),
    /// Group commit on a disk that DRBD replicates, by round trip and clients, and a failover under
    /// load
    Drbd(drbd::DrbdArguments),
    /// Starting a guest with a disk on either transport: the time to its first instruction, and the
    /// memory of the VMM
    Start(start::StartArguments),
    /// The store without a guest, compared with a raw file
    Store(store::StoreArguments),
}

/// Parses the command line, runs the command and returns the exit status: 0 for success, 1 for
/// failure, 2 for wrong usage.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return report_usage::<Cli>(&error),
    };
    show_warnings(WARNINGS);
    let result = match cli.command {
        Command::Commit(arguments) => commit::run(&arguments),
        Command::Notify(arguments) => notify::run(&arguments),
        Command::Database(arguments) => database::run(&arguments),
        Command::Peers(arguments) => peers::run(&arguments),
        Command::Neighbours(arguments) => neighbours::run(&arguments),
        Command::Fsync(arguments) => fsync::run(&arguments),
        Command::Archive(arguments) => archive::run(&arguments),
        Command::Tcmu(arguments) => tcmu::run(&arguments),
        Command::Sustained(arguments) => sustained::run(&arguments),
        Command::Drbd(arguments) => drbd::run(&arguments),
        Command::Start(arguments) => start::run(&arguments),
        Command::Store(arguments) => store::run(&arguments),
    };
    end(PROGRAM, result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn clap_accepts_the_grammar() {
        Cli::command().debug_assert();
    }
}
