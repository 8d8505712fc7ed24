//! `walvisor-bench database`: MariaDB and SQLite, which wait for the disk at each commit, on a raw image and on the
//! write-ahead log, with and without the doublewrite buffer.
//!
//! ```text
//!   mod.rs: cells in turns ──▶ site.rs ──▶ walvisor serve vhost-user: raw.img, wal.img, single.img
//!                                 │ jobs, one by one                ▲ /dev/vda, vdb, vdc
//!                                 └──▶ walvisor-guest-images user-mode scripts/database.sh: three servers, their load
//! ```

mod job;
mod site;

use std::time::Duration;

use clap::Args;

use walvisor::commands::CommandError;

use crate::output::Output;
use crate::report::plot::{Axis, Kind, Plot, Series};
use crate::report::{Cell as Figure, Section, Spread};
use job::{DatabaseDisk, DatabaseEngine, DatabaseJob, DatabaseMeasured};
use site::DatabaseSite;

/// Arguments of `walvisor-bench database`.
#[derive(Debug, Args)]
pub struct DatabaseArguments {
    /// Numbers of MariaDB clients, measured in turns, separated by commas [default: 1,2,4,8,16,32; with --quick 1,16]
    #[arg(long, value_delimiter = ',', value_name = "N,N..", value_parser = clap::value_parser!(u32).range(1..=64))]
    clients: Vec<u32>,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench database`.
///
/// # Errors
/// If a measurement fails, a file can't be written, or a database is not installed.
pub fn run(arguments: &DatabaseArguments) -> Result<(), CommandError> {
    let quick = arguments.output.quick;
    let mut cells = cells(quick, &arguments.clients);
    let rounds = arguments.output.rounds(5, 1);
    let once: Duration = cells.iter().map(|cell| cell.job.expected()).sum();
    let session = arguments.output.start(START + once * rounds as u32)?;
    let what = "starting three servers in user-mode Linux";
    if let Some(mut site) =
        session.step(what, START, || DatabaseSite::start(&arguments.output.dir))?
    {
        'rounds: for round in 1..=rounds {
            for cell in &mut cells {
                let job = &cell.job;
                let what = format!(
                    "{} on {}, {} clients, round {round} of {rounds}",
                    job.engine.name(),
                    job.disk.name(),
                    job.clients
                );
                match session.step(&what, job.expected(), || site.measure(job))? {
                    Some(measured) => cell.rounds.push(measured),
                    None => break 'rounds,
                }
            }
        }
    }
    let sections = vec![mariadb(&cells), sqlite(&cells)];
    let title = "Databases: what a commit costs on a raw image and on the write-ahead log";
    arguments.output.give(title, session, sections)
}

/// Estimated time of the start.
const START: Duration = Duration::from_secs(20);

/// A job and the results of its rounds.
struct Cell {
    job: DatabaseJob,
    rounds: Vec<DatabaseMeasured>,
}

impl Cell {
    fn of(&self, figure: fn(&DatabaseMeasured) -> f64) -> Vec<f64> {
        self.rounds.iter().map(figure).collect()
    }

    fn median(&self, figure: fn(&DatabaseMeasured) -> f64) -> Option<f64> {
        Spread::of(&self.of(figure)).map(|spread| spread.median)
    }

    /// The figures that all tables contain.
    fn figures(&self) -> [Figure; 5] {
        [
            Figure::of(&self.of(|it| it.commits_per_s), 0),
            Figure::of(&self.of(|it| it.flushes), 2),
            Figure::of(&self.of(|it| it.syncs), 2),
            Figure::of(&self.of(|it| it.writes), 2),
            Figure::of(&self.of(|it| it.kib), 1),
        ]
    }
}

/// The titles of [`Cell::figures`].
const FIGURES: [(&str, &str); 5] = [
    ("commits_per_s", "commits/s"),
    ("flushes_per_commit", "guest FLUSHes/commit"),
    ("syncs_per_commit", "host syncs/commit"),
    ("writes_per_commit", "writes/commit"),
    ("written_kib_per_commit", "KiB/commit"),
];

/// All cells, in the order of a round.
fn cells(quick: bool, clients: &[u32]) -> Vec<Cell> {
    let clients = match (clients, quick) {
        ([], true) => &[1, 16],
        ([], false) => &[1, 2, 4, 8, 16, 32][..],
        (chosen, _) => chosen,
    };
    let mut jobs = Vec::new();
    for &clients in clients {
        let commits = match quick {
            true => (clients * 10).max(60),
            false => (clients * 40).max(160),
        };
        jobs.extend(DatabaseDisk::ALL.map(|disk| DatabaseJob {
            engine: DatabaseEngine::Mariadb,
            disk,
            clients,
            commits,
        }));
    }
    for engine in [DatabaseEngine::SqliteWal, DatabaseEngine::SqliteRollback] {
        jobs.extend(
            [DatabaseDisk::Raw, DatabaseDisk::Wal].map(|disk| DatabaseJob {
                engine,
                disk,
                clients: 1,
                commits: if quick { 60 } else { 200 },
            }),
        );
    }
    let rounds = Vec::new;
    jobs.into_iter()
        .map(|job| Cell {
            job,
            rounds: rounds(),
        })
        .collect()
}

fn mariadb(cells: &[Cell]) -> Section {
    let mut columns = vec![("clients", "clients"), ("disk", "disk")];
    columns.extend(FIGURES);
    columns.push(("rate_beside_raw", "beside raw"));
    let mut section = Section::new(
        "mariadb",
        "MariaDB: an update of a random row is a transaction",
        &[
            "innodb_flush_log_at_trx_commit=1, sync_binlog=1, O_DIRECT, a buffer pool of 8 MiB that is to hold no changed page, ext4 \
             with clusters of a page's size. On raw each FLUSH is an fdatasync of the image. Without its doublewrite buffer the \
             server writes each page once: safe where a page is all there or not at all, which a raw image does not promise.",
            "The guest is user-mode Linux: its programs run on the processor, but on one, which server and clients share: rates of \
             many clients say what that processor can do as much as what the disk can. FLUSHes, syncs and bytes are counted.",
        ],
        &columns,
    );
    let of = |engine| cells.iter().filter(move |cell| cell.job.engine == engine);
    for cell in of(DatabaseEngine::Mariadb) {
        let raw = of(DatabaseEngine::Mariadb).find(|other| {
            other.job.disk == DatabaseDisk::Raw && other.job.clients == cell.job.clients
        });
        let rates = [raw, Some(cell)].map(|it| it.and_then(|it| it.median(|it| it.commits_per_s)));
        let mut row = vec![
            Figure::count(cell.job.clients.into()),
            Figure::text(cell.job.disk.title()),
        ];
        row.extend(cell.figures());
        row.push(match rates {
            [Some(raw), Some(rate)] if raw > 0.0 => Figure::Number(rate / raw, 2),
            _ => Figure::None,
        });
        section.table.rows.push(row);
    }
    let plot = |name: &str, title: &str, label: &str, figure: fn(&DatabaseMeasured) -> f64| {
        let series = DatabaseDisk::ALL.map(|disk| {
            let line = of(DatabaseEngine::Mariadb).filter(|cell| cell.job.disk == disk);
            let points = line.filter_map(|cell| {
                let value = cell.median(figure)?;
                Some((f64::from(cell.job.clients), value))
            });
            Series::measured(disk.title(), points.collect())
        });
        Plot {
            name: name.to_owned(),
            title: title.to_owned(),
            kind: Kind::Lines {
                x: Axis::log("clients"),
                y: Axis::linear(label),
                series: series.to_vec(),
            },
        }
    };
    section.plots = vec![
        plot(
            "mariadb-rate",
            "MariaDB: transactions a second",
            "transactions a second",
            |it| it.commits_per_s,
        ),
        plot(
            "mariadb-syncs",
            "MariaDB: syncs of the host for a transaction",
            "syncs",
            |it| it.syncs,
        ),
        plot(
            "mariadb-bytes",
            "MariaDB: KiB that it writes for a transaction",
            "KiB",
            |it| it.kib,
        ),
    ];
    section
}

fn sqlite(cells: &[Cell]) -> Section {
    let mut columns = vec![("journal", "journal"), ("disk", "disk")];
    columns.extend(FIGURES);
    let mut section = Section::new(
        "sqlite",
        "SQLite: an update of a random row is a transaction, one client",
        &[
            "synchronous=EXTRA: with FULL, a commit with a rollback journal can be lost by a power cut, as its journal's removal is not \
             synced.",
        ],
        &columns,
    );
    let mut bars = Vec::new();
    for (engine, journal) in [
        (DatabaseEngine::SqliteWal, "write-ahead log"),
        (DatabaseEngine::SqliteRollback, "rollback journal"),
    ] {
        let mut rates = Vec::new();
        for cell in cells.iter().filter(|cell| cell.job.engine == engine) {
            let mut row = vec![Figure::text(journal), Figure::text(cell.job.disk.title())];
            row.extend(cell.figures());
            section.table.rows.push(row);
            rates.push(Spread::of(&cell.of(|it| it.commits_per_s)));
        }
        bars.push((journal.to_owned(), rates));
    }
    section.plots = vec![Plot {
        name: "sqlite-rate".to_owned(),
        title: "SQLite: transactions a second, one client".to_owned(),
        kind: Kind::Bars {
            unit: "transactions a second".to_owned(),
            groups: vec!["raw".to_owned(), "wal".to_owned()],
            rows: bars,
        },
    }];
    section
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(commits_per_s: f64) -> DatabaseMeasured {
        DatabaseMeasured {
            commits_per_s,
            flushes: 3.0,
            syncs: 1.5,
            writes: 4.0,
            kib: 10.0,
        }
    }

    #[test]
    fn a_row_tells_its_rate_beside_that_of_raw() {
        let mut cells = cells(true, &[]);
        for cell in &mut cells {
            let rate = if cell.job.disk == DatabaseDisk::Raw {
                100.0
            } else {
                150.0
            };
            cell.rounds.push(measured(rate));
        }
        let section = mariadb(&cells);
        assert_eq!(section.table.rows.len(), 6);
        assert_eq!(section.table.rows[0].last(), Some(&Figure::Number(1.0, 2)));
        assert_eq!(section.table.rows[1].last(), Some(&Figure::Number(1.5, 2)));
        for plot in section.plots.iter().chain(&sqlite(&cells).plots) {
            plot.svg().unwrap();
        }
    }

    #[test]
    fn what_was_not_measured_is_told_as_nothing() {
        let cells = cells(false, &[]);
        let rows = mariadb(&cells).table.rows;
        assert_eq!(rows.len(), 18);
        assert!(
            rows.iter()
                .all(|row| row[2..].iter().all(|cell| *cell == Figure::None))
        );
        assert_eq!(sqlite(&cells).table.rows.len(), 4);
    }
}
