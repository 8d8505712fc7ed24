//! `walvisor-bench drbd`: the disk and its log on a block device that DRBD copies to a second
//! machine.
//!
//! ```text
//!   mod.rs       commits by round trip and clients  ─┐
//!   failover.rs  the primary dies under load        ─┴─▶ pair.rs ─▶ guests, DRBD, netem, a cable
//! ```

mod failover;
mod pair;

use std::path::Path;

use clap::Args;
use serde_json::{Value, json};
use walvisor::commands::CommandError;

use crate::bench::{Bench, Matrix, Settings, Side, Turn, sections};
use crate::output::Output;
use crate::session::Session;
use failover::fail_over;
use pair::MachinePair;

const MATRICES: &str = include_str!("../../matrices/drbd.toml");

/// Arguments of `walvisor-bench drbd`.
#[derive(Debug, Args)]
pub struct DrbdArguments {
    /// Only these parts, with commas between
    #[arg(long, value_delimiter = ',', value_name = "PART,PART", value_parser = sections(MATRICES))]
    only: Vec<String>,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench drbd`.
///
/// # Errors
/// If a program is missing, a machine or a measurement fails, a file can't be written, or a
/// failover lost a commit.
pub fn run(arguments: &DrbdArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let mut bench = Bench::new(MATRICES, output, &arguments.only, &Settings::new());
    let session = bench.start()?;
    let run = bench.matrices.iter_mut().try_for_each(|matrix| {
        if matrix.spec.name == "matrix" {
            return measure_links(matrix, &session, &output.dir);
        }
        let mut round = 0;
        matrix.measure(&session, |side| {
            round += 1;
            fail_over(
                side.text("protocol"),
                side.number("delay_ms"),
                round,
                &output.dir,
            )
        })
    });
    let failovers = bench.matrices.iter().flat_map(|matrix| &matrix.rows);
    let synchronous = failovers
        .flat_map(|row| &row.sides)
        .filter(|side| side.text("protocol") == "C");
    let lost: f64 = synchronous.flat_map(|side| side.of("lost")).sum();
    bench.finish(session, run)?;
    if lost > 0.0 {
        return Err(CommandError::Failed(format!(
            "{lost} acknowledged commits were lost in a failover"
        )));
    }
    Ok(())
}

/// Measures each round on new machines. After the rows without its other machine the disks differ,
/// so these come last.
fn measure_links(matrix: &mut Matrix, session: &Session, dir: &Path) -> Result<(), CommandError> {
    let links = matrix
        .rows
        .iter()
        .map(|row| row.sides[0].text("link").to_owned());
    let links: Vec<String> = links.collect();
    let mut rows: Vec<usize> = (0..links.len()).collect();
    rows.sort_by_key(|row| links[*row] == "disconnected");
    for round in 0..matrix.rounds() {
        let mut pair = MachinePair::start(dir, "C")?;
        pair.begin()?;
        for rows in rows.chunk_by(|one, other| links[*one] == links[*other]) {
            if session.interrupted() {
                return Ok(());
            }
            let link = &links[rows[0]];
            let ping = set_up(
                link,
                matrix.rows[rows[0]].sides[0].number("delay_ms"),
                &mut pair,
            )?;
            for &row in rows {
                let turn = |side: &Side| commit(side, &mut pair, &ping);
                if !matrix.measure_row(row, round, session, turn)? {
                    return Ok(());
                }
            }
            // The link was up during all rows.
            pair.first.run(match link.as_str() {
                "no DRBD" => "umount plain",
                "disconnected" => "state StandAlone",
                _ => "state Connected",
            })?;
        }
    }
    Ok(())
}

/// Sets up a link, and measures its round trip, if there is one: the figures of pings.
fn set_up(link: &str, delay_ms: u64, pair: &mut MachinePair) -> Result<Value, CommandError> {
    match link {
        "no DRBD" => pair.first.run("mkdir plain && format /dev/ubdb plain")?,
        "disconnected" => pair.first.run("drbd disconnect r0")?,
        _ => {
            pair.delay(delay_ms as f64 / 2.0)?;
            let said = pair.first.run("round_trip")?;
            let times = said.iter().find_map(|line| {
                let (shortest, mean) = line.strip_prefix("rtt ")?.split_once(' ')?;
                Some((shortest.parse::<f64>().ok()?, mean.parse::<f64>().ok()?))
            });
            let Some((shortest, mean)) = times else {
                return Err(CommandError::Failed(
                    "ping printed no round trips".to_owned(),
                ));
            };
            if shortest < delay_ms as f64 {
                return Err(CommandError::Failed(format!(
                    "{link}: a ping took {shortest} ms: the delay is not in force"
                )));
            }
            return Ok(json!({ "ping_shortest_ms": shortest, "ping_mean_ms": mean }));
        }
    };
    Ok(json!({}))
}

/// Commits in the first machine. The turn also has the pings of its link.
fn commit(side: &Side, pair: &mut MachinePair, ping: &Value) -> Result<Turn, CommandError> {
    let dir = match side.text("link") {
        "no DRBD" => "plain",
        _ => "disk",
    };
    let (clients, commits) = (side.number("clients"), side.number("commits"));
    let group = side.text("group");
    let said = pair.first.run(&format!(
        "commit {dir} --clients {clients} --commits {commits} --group {group}"
    ))?;
    let report = said.iter().find_map(|line| line.strip_prefix("report "));
    let report: Value = serde_json::from_str(report.unwrap_or_default())
        .map_err(|error| CommandError::Failed(format!("the report in the machine: {error}")))?;
    let mut figures = ping.clone();
    for key in ["commits_per_s", "syncs_per_commit"] {
        figures[key] = report["sections"][0]["rows"][0][key]["median"].clone();
    }
    Ok(Turn(figures))
}
