//! The tables and plots.

use super::cell::{DatabaseCell, FIGURES};
use super::job::{DatabaseDisk, DatabaseEngine, DatabaseMeasurement};
use crate::report::plot::{Axis, Plot, PlotKind, Series};
use crate::report::{Cell as Figure, Preference, Section, Spread};

/// MariaDB by clients.
pub fn mariadb(cells: &[DatabaseCell]) -> Section {
    let section = Section::new(
        "mariadb",
        "MariaDB: an update of a random row is a transaction",
        &[
            "innodb_flush_log_at_trx_commit=1, sync_binlog=1, O_DIRECT, a buffer pool of 8 MiB that is to hold no changed page, ext4 \
             with clusters of a page's size. On raw each FLUSH is an fdatasync of the image. Without its doublewrite buffer the \
             server writes each page once: safe where a page is all there or not at all, which a raw image does not promise.",
            "The guest is user-mode Linux: its programs run on the processor, but on one, which server and clients share: rates of \
             many clients say what that processor can do as much as what the disk can. FLUSHes, syncs and bytes are counted.",
        ],
        &server_columns(),
    );
    by_clients(section, "MariaDB", cells)
}

/// PostgreSQL by clients.
pub fn postgresql(cells: &[DatabaseCell]) -> Section {
    let section = Section::new(
        "postgresql",
        "PostgreSQL: pgbench, an update of a random row and an insert are a transaction",
        &[
            "pgbench simple-update with prepared statements, scale 1, synchronous_commit=on. A job begins after a checkpoint, so \
             that most transactions are the first to change their page, as in a database that is large for its checkpoints. The \
             server then copies the whole page to its log, which full_page_writes=off prevents.",
            "Without full-page writes no page may tear. On the log none does if each page is one request; a raw image promises \
             nothing. The server opens its tables with O_DIRECT here, as PostgreSQL 16 and newer do with debug_io_direct=data. \
             Through the page cache Linux may send a page as two requests, and no disk can help.",
        ],
        &server_columns(),
    );
    by_clients(section, "PostgreSQL", cells)
}

fn server_columns() -> Vec<(&'static str, &'static str)> {
    let mut columns = vec![("clients", "clients"), ("disk", "disk")];
    columns.extend(FIGURES);
    columns.push(("rate_beside_raw", "beside raw"));
    columns
}

/// The rows of a server by number of clients, and their plots.
fn by_clients(mut section: Section, server: &str, cells: &[DatabaseCell]) -> Section {
    for cell in cells {
        let mut row = vec![
            Figure::count(cell.job.clients.into()),
            Figure::text(cell.job.side()),
        ];
        row.extend(cell.figures());
        row.push(beside_raw(cell, cells));
        section.table.rows.push(row);
    }
    let plot = |name: &str, title: &str, label: &str, figure: fn(&DatabaseMeasurement) -> f64| {
        let sides = cells
            .iter()
            .take_while(|cell| cell.job.clients == cells[0].job.clients);
        let series = sides.map(|side| {
            let side = side.job.side();
            let line = cells.iter().filter(|cell| cell.job.side() == side);
            let points = line.filter_map(|cell| {
                let value = cell.median(figure)?;
                Some((f64::from(cell.job.clients), value))
            });
            Series::measured(side, points.collect())
        });
        Plot {
            name: format!("{}-{name}", section.key),
            title: format!("{server}: {title}"),
            caption: String::new(),
            kind: PlotKind::Lines {
                x: Axis::log("clients"),
                y: Axis::linear(label),
                series: series.collect(),
            },
        }
    };
    section.plots = vec![
        plot(
            "rate",
            "transactions a second",
            "transactions a second",
            |it| it.commits_per_s,
        ),
        plot(
            "syncs",
            "syncs of the host for a transaction",
            "syncs",
            |it| it.syncs,
        ),
        plot(
            "bytes",
            "KiB that it writes for a transaction",
            "KiB",
            |it| it.kib,
        ),
    ];
    section
}

/// A cell's rate compared with that of the raw image with as many clients.
fn beside_raw(cell: &DatabaseCell, cells: &[DatabaseCell]) -> Figure {
    let raw = cells
        .iter()
        .find(|other| other.job.side() == "raw" && other.job.clients == cell.job.clients);
    let rates = [raw, Some(cell)].map(|it| it.and_then(|it| it.median(|it| it.commits_per_s)));
    match rates {
        [Some(raw), Some(rate)] if raw > 0.0 => Figure::ratio(rate / raw, Preference::More),
        _ => Figure::None,
    }
}

/// SQLite by journal.
pub fn sqlite(cells: &[DatabaseCell]) -> Section {
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
            let mut row = vec![Figure::text(journal), Figure::text(cell.job.side())];
            row.extend(cell.figures());
            section.table.rows.push(row);
            rates.push(Spread::of(&cell.of(|it| it.commits_per_s)));
        }
        bars.push((journal.to_owned(), rates));
    }
    section.plots = vec![Plot {
        name: "sqlite-rate".to_owned(),
        title: "SQLite: transactions a second, one client".to_owned(),
        caption: String::new(),
        kind: PlotKind::Bars {
            unit: "transactions a second".to_owned(),
            groups: vec!["raw".to_owned(), "wal".to_owned()],
            even: None,
            rows: bars,
        },
    }];
    section
}

/// Several guests with PostgreSQL.
pub fn guests(cells: &[DatabaseCell], guests: usize) -> Section {
    let mut columns = vec![
        ("guests", "guests"),
        ("clients_each", "clients each"),
        ("disks", "disks"),
    ];
    columns.extend(FIGURES);
    columns.push(("rate_beside_raw", "beside raw"));
    let mut section = Section::new(
        "guests",
        "Several guests, each with PostgreSQL on its own disk: raw images, and disks on one log",
        &[
            "All guests do the same job at the same time, through one daemon. Commits are those of all, and the time is that of the \
             slowest guest. A sync of the log serves every guest that waits; each raw image needs its own fdatasync.",
        ],
        &columns,
    );
    for cell in cells {
        let disks = match cell.job.disk {
            DatabaseDisk::Raw => format!("{guests} raw"),
            _ => cell.job.side().replace("wal", "one log"),
        };
        let mut row = vec![
            Figure::count(guests as u64),
            Figure::count(cell.job.clients.into()),
            Figure::text(disks),
        ];
        row.extend(cell.figures());
        row.push(beside_raw(cell, cells));
        section.table.rows.push(row);
    }
    section
}

#[cfg(test)]
mod tests {
    use super::super::cell;
    use super::*;

    fn measured(commits_per_s: f64) -> DatabaseMeasurement {
        DatabaseMeasurement {
            commits_per_s,
            flushes: 3.0,
            syncs: 1.5,
            writes: 4.0,
            kib: 10.0,
        }
    }

    /// Cells with a round in which the log had 1.5 times the rate of raw, and PostgreSQL without full-page writes that
    /// again.
    fn with_a_round(mut cells: Vec<DatabaseCell>) -> Vec<DatabaseCell> {
        for cell in &mut cells {
            let log = if cell.job.disk == DatabaseDisk::Raw {
                1.0
            } else {
                1.5
            };
            let once = if cell.job.engine == DatabaseEngine::PostgresqlOnce {
                1.5
            } else {
                1.0
            };
            cell.rounds.push(measured(100.0 * log * once));
        }
        cells
    }

    /// The last cells of the rows.
    fn beside(section: &Section) -> Vec<&Figure> {
        let rows = section.table.rows.iter();
        rows.map(|row| row.last().unwrap()).collect()
    }

    #[test]
    fn a_row_compares_its_rate_with_that_of_raw() {
        let number = |ratio| Figure::ratio(ratio, Preference::More);
        let section = mariadb(&with_a_round(cell::mariadb(true, &[1, 16])));
        let expected = [1.0, 1.5, 1.5].map(number);
        let twice: Vec<&Figure> = expected.iter().chain(&expected).collect();
        assert_eq!(beside(&section), twice);
        let others = with_a_round(cell::postgresql(true, &[1]));
        let section = postgresql(&others);
        assert_eq!(
            beside(&section),
            [1.0, 1.5, 1.5, 2.25].map(number).each_ref()
        );
        let unsafe_side = Figure::text("raw, no full-page writes (unsafe)");
        assert_eq!(section.table.rows[1][1], unsafe_side);
        let section = guests(&with_a_round(cell::guests(true)), 4);
        assert_eq!(beside(&section), [1.0, 1.5, 2.25].map(number).each_ref());
        let disks: Vec<_> = section.table.rows.iter().map(|row| &row[2]).collect();
        let named = ["4 raw", "one log", "one log, no full-page writes"].map(Figure::text);
        assert_eq!(disks, named.each_ref());
    }

    #[test]
    fn each_side_is_a_line_of_the_plots() {
        let section = postgresql(&with_a_round(cell::postgresql(false, &[1, 8, 32])));
        let lines = section.plots.iter().map(|plot| match &plot.kind {
            PlotKind::Lines { series, .. } => series.len(),
            _ => 0,
        });
        assert_eq!(lines.collect::<Vec<_>>(), [4, 4, 4]);
        let sqlite = sqlite(&with_a_round(cell::sqlite(true)));
        for plot in section.plots.iter().chain(&sqlite.plots) {
            plot.svg().unwrap();
        }
    }

    #[test]
    fn what_was_not_measured_is_left_empty() {
        let clients = [1, 2, 4, 8, 16, 32];
        for (section, rows) in [
            (mariadb(&cell::mariadb(false, &clients)), 18),
            (postgresql(&cell::postgresql(false, &clients)), 24),
            (sqlite(&cell::sqlite(false)), 4),
            (guests(&cell::guests(false), 4), 6),
        ] {
            assert_eq!(section.table.rows.len(), rows);
            let names = if section.key == "guests" { 3 } else { 2 };
            for row in &section.table.rows {
                assert!(row[names..].iter().all(|cell| *cell == Figure::None));
            }
        }
    }

    #[test]
    fn every_client_makes_the_same_number_of_commits() {
        for quick in [true, false] {
            let clients: Vec<u32> = (1..=64).collect();
            for cell in cell::postgresql(quick, &clients) {
                assert!(cell.job.commits.is_multiple_of(cell.job.clients));
                assert!(cell.job.commits >= 41, "{:?}", cell.job);
            }
        }
    }
}
