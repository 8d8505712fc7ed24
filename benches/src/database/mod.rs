//! `walvisor-bench database`: MariaDB, PostgreSQL and SQLite, which wait for the disk at each commit, on a raw image and on
//! the write-ahead log, with and without writing each page twice; and several guests on one log.
//!
//! ```text
//!   mod.rs: cells in turns ──▶ site.rs ──▶ walvisor serve vhost-user: raw-0.img, wal-0.img, single-0.img, raw-1.img, ...
//!    │ cell.rs, section.rs        │ jobs, one by one                ▲ /dev/vda, vdb, vdc
//!    └─▶ tables                   └──▶ guests, user-mode Linux: scripts/database.sh: the servers, their load
//! ```

mod cell;
mod job;
mod section;
mod site;

use std::time::Duration;

use clap::{Args, ValueEnum};

use walvisor::commands::CommandError;

use crate::output::Output;
use crate::report::Section;
use crate::session::Session;
use cell::DatabaseCell;
use site::{DatabaseServer, DatabaseSite};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DatabasePart {
    /// MariaDB, with its doublewrite buffer and without
    Mariadb,
    /// PostgreSQL, with full-page writes and without
    Postgresql,
    /// SQLite, with either journal
    Sqlite,
    /// Several guests with PostgreSQL: raw disks, and disks on one log
    Guests,
}

/// Arguments of `walvisor-bench database`.
#[derive(Debug, Args)]
pub struct DatabaseArguments {
    /// Only these parts, with commas between
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART,PART")]
    only: Vec<DatabasePart>,
    /// Numbers of clients of MariaDB and PostgreSQL, measured in turns, separated by commas [default: 1,2,4,8,16,32; with
    /// --quick 1,16]
    #[arg(long, value_delimiter = ',', value_name = "N,N..", value_parser = clap::value_parser!(u32).range(1..=64))]
    clients: Vec<u32>,
    /// Number of guests in the part with several
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(2..=16))]
    guests: u8,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench database`.
///
/// # Errors
/// If a measurement fails, a file can't be written, or a database is not installed.
pub fn run(arguments: &DatabaseArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let (mut one, mut several) = plan(arguments);
    let rounds = output.rounds(5, 1);
    let expected = [&one, &several].map(|stage| stage.expected(rounds));
    let session = output.start(expected.iter().sum())?;
    let mut failed = None;
    for stage in [&mut one, &mut several] {
        if failed.is_none() {
            failed = stage.measure(rounds, &session, output).err();
        }
    }
    let parts = || one.parts.iter().chain(&several.parts);
    // What was measured before a failure is still reported.
    let measured = |(_, cells): &(_, Vec<DatabaseCell>)| !cells[0].rounds.is_empty();
    if failed.is_none() || parts().any(measured) {
        let sections = parts().map(|(part, cells)| section_of(*part, cells, several.guests));
        let title = "Databases: what a commit costs on a raw image and on the write-ahead log";
        output.write(title, session, sections.collect())?;
    }
    failed.map_or(Ok(()), Err)
}

/// Estimated time to start a guest's servers.
const START: Duration = Duration::from_secs(20);

/// Parts that are measured in turns, in the same guests.
struct Stage {
    guests: usize,
    parts: Vec<(DatabasePart, Vec<DatabaseCell>)>,
}

/// The stage with one guest, and that with several.
fn plan(arguments: &DatabaseArguments) -> (Stage, Stage) {
    let quick = arguments.output.quick;
    let clients = match (&arguments.clients[..], quick) {
        ([], true) => &[1, 16],
        ([], false) => &[1, 2, 4, 8, 16, 32][..],
        (chosen, _) => chosen,
    };
    let stage = |guests: usize, parts: &[DatabasePart]| {
        let wanted =
            |part: &&DatabasePart| arguments.only.is_empty() || arguments.only.contains(part);
        let cells = |part| match part {
            DatabasePart::Mariadb => cell::mariadb(quick, clients),
            DatabasePart::Postgresql => cell::postgresql(quick, clients),
            DatabasePart::Sqlite => cell::sqlite(quick),
            DatabasePart::Guests => cell::guests(quick),
        };
        let parts = parts.iter().filter(wanted);
        Stage {
            guests,
            parts: parts.map(|&part| (part, cells(part))).collect(),
        }
    };
    (
        stage(
            1,
            &[
                DatabasePart::Mariadb,
                DatabasePart::Postgresql,
                DatabasePart::Sqlite,
            ],
        ),
        stage(arguments.guests.into(), &[DatabasePart::Guests]),
    )
}

fn section_of(part: DatabasePart, cells: &[DatabaseCell], guests: usize) -> Section {
    match part {
        DatabasePart::Mariadb => section::mariadb(cells),
        DatabasePart::Postgresql => section::postgresql(cells),
        DatabasePart::Sqlite => section::sqlite(cells),
        DatabasePart::Guests => section::guests(cells, guests),
    }
}

impl Stage {
    fn expected(&self, rounds: usize) -> Duration {
        let jobs = self.parts.iter().flat_map(|(_, cells)| cells);
        let once: Duration = jobs.map(|cell| cell.job.expected()).sum();
        if self.parts.is_empty() {
            return Duration::ZERO;
        }
        START * self.guests as u32 + once * self.guests as u32 * rounds as u32
    }

    /// Measures all cells in turns, `rounds` times, unless the user interrupts it.
    fn measure(
        &mut self,
        rounds: usize,
        session: &Session,
        output: &Output,
    ) -> Result<(), CommandError> {
        if self.parts.is_empty() {
            return Ok(());
        }
        let servers: Vec<_> = self.parts.iter().map(|(part, _)| part.server()).collect();
        let guests = self.guests;
        let what = format!("starting servers in user-mode Linux, guests: {guests}");
        let start = || DatabaseSite::start(&output.dir, guests, &servers);
        let Some(mut site) = session.step(&what, START * guests as u32, start)? else {
            return Ok(());
        };
        for round in 1..=rounds {
            for cell in self.parts.iter_mut().flat_map(|(_, cells)| cells) {
                let job = &cell.job;
                let what = format!(
                    "{} on {}, {} clients, round {round} of {rounds}",
                    job.engine.name(),
                    job.disk.name(),
                    job.clients
                );
                let expected = job.expected() * guests as u32;
                match session.step(&what, expected, || site.measure(job))? {
                    Some(measured) => cell.rounds.push(measured),
                    None => return Ok(()),
                }
            }
        }
        Ok(())
    }
}

impl DatabasePart {
    /// The server that its cells measure.
    fn server(self) -> DatabaseServer {
        match self {
            Self::Mariadb => DatabaseServer::Mariadb,
            Self::Postgresql | Self::Guests => DatabaseServer::Postgresql,
            Self::Sqlite => DatabaseServer::Sqlite,
        }
    }
}
