//! `walvisor-bench database`: MariaDB, PostgreSQL and SQLite, which wait for the disk at each commit, on a raw image and on
//! the write-ahead log, with and without writing each page twice; and several guests on one log.
//!
//! ```text
//!   mod.rs: sides in turns ──▶ site.rs ──▶ walvisor serve vhost-user: raw-0.img, wal-0.img, single-0.img, raw-1.img, ...
//!    │ job.rs, section.rs         │ jobs, one by one                ▲ /dev/vda, vdb, vdc
//!    └─▶ tables                   └──▶ guests, user-mode Linux: scripts/database.sh: the servers, their load
//! ```

mod job;
mod section;
mod site;

use std::time::Duration;

use clap::Args;

use walvisor::commands::CommandError;

use crate::matrix::Matrix;
use crate::output::{Output, chosen};
use crate::session::Session;
use job::{DatabaseJob, DatabasePart};
use site::DatabaseSite;

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
    let clients = match (&arguments.clients[..], output.quick) {
        ([], true) => &[1, 16],
        ([], false) => &[1, 2, 4, 8, 16, 32][..],
        (chosen, _) => chosen,
    };
    let stage = |guests: usize, parts: &[DatabasePart]| {
        let wanted = chosen(&arguments.only).into_iter();
        let wanted = wanted.filter(|part| parts.contains(part));
        Stage {
            guests,
            parts: wanted
                .map(|part| (part, part.matrix(output.quick, clients)))
                .collect(),
        }
    };
    let servers = [
        DatabasePart::Mariadb,
        DatabasePart::Postgresql,
        DatabasePart::Sqlite,
    ];
    let mut stages = [
        stage(1, &servers),
        stage(arguments.guests.into(), &[DatabasePart::Guests]),
    ];
    let rounds = output.rounds(if output.quick { 1 } else { 5 });
    let session = output.start(stages.iter().map(|stage| stage.expected(rounds)).sum())?;
    let mut failed = None;
    for stage in &mut stages {
        if failed.is_none() {
            failed = stage.measure(rounds, &session, output).err();
        }
    }
    let parts = || stages.iter().flat_map(|stage| &stage.parts);
    // What was measured before a failure is still reported.
    if failed.is_none() || parts().any(|(_, matrix)| matrix.is_measured()) {
        let guests = arguments.guests.into();
        let sections = parts().map(|(part, matrix)| section::section(*part, matrix, guests));
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
    parts: Vec<(DatabasePart, Matrix<DatabaseJob>)>,
}

impl Stage {
    fn expected(&self, rounds: usize) -> Duration {
        if self.parts.is_empty() {
            return Duration::ZERO;
        }
        let parts = self.parts.iter();
        let once: Duration = parts
            .map(|(_, matrix)| matrix.expected(DatabaseJob::expected))
            .sum();
        (START + once * rounds as u32) * self.guests as u32
    }

    /// Measures all parts in turns, `rounds` times, unless the user interrupts it.
    fn measure(
        &mut self,
        rounds: usize,
        session: &Session,
        output: &Output,
    ) -> Result<(), CommandError> {
        if self.parts.is_empty() {
            return Ok(());
        }
        let parts: Vec<_> = self.parts.iter().map(|(part, _)| *part).collect();
        let guests = self.guests;
        let what = format!("starting servers in user-mode Linux, guests: {guests}");
        let start = || DatabaseSite::start(&output.dir, guests, &parts);
        let Some(mut site) = session.step(&what, START * guests as u32, start)? else {
            return Ok(());
        };
        for round in 0..rounds {
            for row in self
                .parts
                .iter_mut()
                .flat_map(|(_, matrix)| &mut matrix.rows)
            {
                let expected = |job: &DatabaseJob| job.expected() * guests as u32;
                let turn = |side: &_| site.measure(side);
                if !row.measure((round, rounds), session, expected, turn)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}
