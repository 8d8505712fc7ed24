//! `walvisor-bench database`: MariaDB, PostgreSQL and SQLite, which wait for the disk at each
//! commit, on a raw image and on the write-ahead log, with and without writing each page twice;
//! several guests on one log; and etcd, beside noisy neighbours.
//!
//! ```text
//!   mod.rs: sides in turns ─▶ site.rs ─▶ serve vhost-user: raw-0.img, wal-0.img, ...
//!                              │ jobs, one by one                ▲ /dev/vda, vdb, vdc
//!                              └──▶ guests, user-mode Linux: scripts/database.sh: servers, load
//!                            etcd.rs: no guest; serve nbd, for each turn and medium
//! ```

mod etcd;
mod site;

use std::time::Duration;

use clap::Args;
use serde_json::json;
use walvisor::commands::CommandError;

use crate::bench::{Bench, Matrix, measure_together, sections, settings};
use crate::output::Output;
use crate::programs;
use crate::session::Session;
use crate::volume;
use etcd::EtcdMedium;
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
    let guests = |matrix: &Matrix| match matrix.spec.name.as_str() {
        "etcd" => 0,
        "guests" => arguments.guests.into(),
        _ => 1,
    };
    let matrices = &mut bench.matrices;
    let mut parts = matrices.chunk_by_mut(|one, next| guests(one) == guests(next));
    let run = parts.try_for_each(|parts| match guests(&parts[0]) {
        0 => {
            let mut media = parts.iter_mut();
            media.try_for_each(|medium| measure_etcd(medium, output, &session))
        }
        guests => measure(parts, guests, output, &session),
    });
    bench.finish(session, run)
}

/// Measures etcd on a medium.
fn measure_etcd(
    matrix: &mut Matrix,
    output: &Output,
    session: &Session,
) -> Result<(), CommandError> {
    let medium = matrix.sides().next().map(|side| side.text("medium"));
    let capped = medium == Some("capped");
    let missing = programs::missing(&etcd::NEEDS).map(programs::not_measured);
    if let Some(missing) = missing.or_else(volume::missing) {
        matrix.notes.push(missing);
        return Ok(());
    }
    let make = || EtcdMedium::new(&output.dir, capped);
    let Some(medium) = session.step("making disks for etcd", START, make)? else {
        return Ok(());
    };
    matrix.measure(session, |side| medium.measure(side))
}

/// Measures parts in turns, in the same guests.
fn measure(
    parts: &mut [Matrix],
    guests: usize,
    output: &Output,
    session: &Session,
) -> Result<(), CommandError> {
    let names: Vec<&str> = parts.iter().map(|part| part.spec.name.as_str()).collect();
    let what = format!("starting servers in user-mode Linux, guests: {guests}");
    let start = || DatabaseSite::start(&output.dir, guests, &names);
    let Some(mut site) = session.step(&what, START * guests as u32, start)? else {
        return Ok(());
    };
    measure_together(parts, session, |side| site.measure(side))
}
