//! `walvisor-bench database`: MariaDB, PostgreSQL and SQLite, which wait for the disk at each
//! commit, on a raw image and on the write-ahead log, with and without writing each page twice; and
//! several guests on one log.
//!
//! ```text
//!   mod.rs: sides in turns ─▶ site.rs ─▶ serve vhost-user: raw-0.img, wal-0.img, ...
//!                              │ jobs, one by one                ▲ /dev/vda, vdb, vdc
//!                              └──▶ guests, user-mode Linux: scripts/database.sh: servers, load
//! ```

mod site;

use std::time::Duration;

use clap::Args;
use serde_json::json;
use walvisor::commands::CommandError;

use crate::bench::{Bench, Matrix, measure_together, sections, settings};
use crate::output::Output;
use crate::session::Session;
use site::DatabaseSite;

const MATRICES: &str = include_str!("../../matrices/database.toml");
/// Estimated time to start a guest's servers.
const START: Duration = Duration::from_secs(20);

/// Arguments of `walvisor-bench database`.
#[derive(Debug, Args)]
pub struct DatabaseArguments {
    /// Only these parts, with commas between
    #[arg(long, value_delimiter = ',', value_name = "PART,PART", value_parser = sections(MATRICES))]
    only: Vec<String>,
    /// Numbers of clients of MariaDB and PostgreSQL, measured in turns, separated by commas
    /// [default: 1,2,4,8,16,32; with --quick 1,16]
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
    let mut given = settings(json!({ "guests": arguments.guests }));
    if !arguments.clients.is_empty() {
        given.insert("clients".to_owned(), json!(arguments.clients));
    }
    let mut bench = Bench::new(MATRICES, output, &arguments.only, &given);
    let session = bench.start()?;
    // One guest has all servers, and its parts take turns. Several guests have one server each.
    let several = bench
        .matrices
        .partition_point(|matrix| matrix.spec.name != "guests");
    let (one, several) = bench.matrices.split_at_mut(several);
    let run = measure(one, 1, output, &session);
    let run = run.and_then(|()| measure(several, arguments.guests.into(), output, &session));
    bench.finish(session, run)
}

/// Measures parts in turns, in the same guests.
fn measure(
    parts: &mut [Matrix],
    guests: usize,
    output: &Output,
    session: &Session,
) -> Result<(), CommandError> {
    if parts.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = parts.iter().map(|part| part.spec.name.as_str()).collect();
    let what = format!("starting servers in user-mode Linux, guests: {guests}");
    let start = || DatabaseSite::start(&output.dir, guests, &names);
    let Some(mut site) = session.step(&what, START * guests as u32, start)? else {
        return Ok(());
    };
    measure_together(parts, session, |side| site.measure(side))
}
