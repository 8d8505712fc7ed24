//! `walvisor-bench archive`: what commits cost with an archive, and when they wait for it, by the
//! round trip to the store.
//!
//! ```text
//!   clients over NBD ─▶ walvisor serve ─▶ archive push ─▶ a store whose answers come later
//! ```

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor_storage::StoreOptions;
use walvisor_testkit::s3::S3;

use crate::bench::{Bench, Side, Turn, settings};
use crate::bench_dirs::{BenchDirs, LOGGED, make_disks};
use crate::daemon::Daemon;
use crate::load::nbd::{NbdClient, drive_all};
use crate::output::Output;
use crate::serve::serve;
use crate::session::Session;

const MATRICES: &str = include_str!("../matrices/archive.toml");
const DISK_BYTES: u64 = 64 << 20;
/// How long the first copy of the images may take.
const LONGEST_COPY: Duration = Duration::from_secs(120);

/// Arguments of `walvisor-bench archive`.
#[derive(Debug, Args)]
pub struct ArchiveArguments {
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench archive`.
///
/// # Errors
/// If a daemon does not start, a request fails, or a file can't be written.
pub fn run(arguments: &ArchiveArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let store = S3::start("bucket");
    let given = settings(json!({ "archive": store.url("bucket/bench") }));
    let mut bench = Bench::new(MATRICES, output, &[], &given);
    let session = bench.start()?;
    let place = BenchDirs::new(&output.dir)?;
    let options = StoreOptions::default();
    make_disks(place.images(), 1, DISK_BYTES, LOGGED, &options)?;
    let run = bench.matrices[0].measure(&session, |side| measure(side, &store, &place, &session));
    bench.finish(session, run)
}

/// Commits for a turn.
fn measure(
    side: &Side,
    store: &S3,
    place: &BenchDirs,
    session: &Session,
) -> Result<Turn, CommandError> {
    store.delay(Duration::ZERO);
    let sockets = [place.sockets().join("disk")];
    let daemons = serve(side, "nbd", place.images(), place.sockets(), &sockets)?;
    let daemon = &daemons[0];
    let archive = |daemon: &Daemon| {
        let stats = daemon.stats()?;
        Ok::<Value, CommandError>(stats["logs"][0]["archive"].clone())
    };
    let begun = Instant::now();
    // The copy of the images would be measured too.
    while archive(daemon)?["restorable"] == false {
        if begun.elapsed() > LONGEST_COPY {
            let why = "the first copy of the images to the archive does not end";
            return Err(CommandError::Failed(why.to_owned()));
        }
        thread::sleep(Duration::from_millis(20));
    }
    let clients = (0..side.number("clients")).map(|_| NbdClient::connect(&sockets[0], ""));
    let clients: io::Result<Vec<_>> = clients.map(|client| Ok(client?.0)).collect();
    let clients = clients.map_err(CommandError::failed)?;
    let before = archive(daemon)?["requests"].as_f64();
    store.delay(Duration::from_millis(side.number("delay_ms")));
    let turn = Duration::from_secs(side.number("seconds"));
    let work = (side.plan(), 1, DISK_BYTES);
    let tally = drive_all(clients, work, turn, session).map_err(CommandError::failed)?;
    let after = archive(daemon)?["requests"].as_f64();
    store.delay(Duration::ZERO);
    let mut figures = tally.figures();
    let requests = before.zip(after).map(|(before, after)| after - before);
    let commits = figures["requests"].as_f64();
    figures["commits_per_s"] = figures["iops"].clone();
    figures["requests_per_commit"] = requests.zip(commits).map(|(all, of)| all / of).into();
    Ok(Turn(figures))
}
