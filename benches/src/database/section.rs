//! The tables and plots.

use super::job::{DatabaseDisk, DatabaseJob, DatabasePart, RAW, WAL};
use crate::matrix::{self, Matrix};
use crate::report::plot::{Axis, Plot};
use crate::report::{Cell, Section};

type Column<'a> = matrix::Column<'a, DatabaseJob>;

const RATE: &str = "commits_per_s";

/// The results of a part. `guests` is the number of guests in the part with several.
pub fn section(part: DatabasePart, matrix: &Matrix<DatabaseJob>, guests: usize) -> Section {
    match part {
        DatabasePart::Mariadb => by_clients(
            matrix,
            "mariadb",
            "MariaDB",
            "an update of a random row is a transaction",
            &[
                "innodb_flush_log_at_trx_commit=1, sync_binlog=1, O_DIRECT, a buffer pool of 8 MiB that is to hold no changed page, ext4 \
                 with clusters of a page's size. On raw each FLUSH is an fdatasync of the image. Without its doublewrite buffer the \
                 server writes each page once: safe where a page is all there or not at all, which a raw image does not promise.",
                "The guest is user-mode Linux: its programs run on the processor, but on one, which server and clients share: rates of \
                 many clients say what that processor can do as much as what the disk can. FLUSHes, syncs and bytes are counted.",
            ],
        ),
        DatabasePart::Postgresql => by_clients(
            matrix,
            "postgresql",
            "PostgreSQL",
            "pgbench, an update of a random row and an insert are a transaction",
            &[
                "pgbench simple-update with prepared statements, scale 1, synchronous_commit=on. A job begins after a checkpoint, so \
                 that most transactions are the first to change their page, as in a database that is large for its checkpoints. The \
                 server then copies the whole page to its log, which full_page_writes=off prevents.",
                "Without full-page writes no page may tear. On the log none does if each page is one request; a raw image promises \
                 nothing. The server opens its tables with O_DIRECT here, as PostgreSQL 16 and newer do with debug_io_direct=data. \
                 Through the page cache Linux may send a page as two requests, and no disk can help.",
            ],
        ),
        DatabasePart::Sqlite => sqlite(matrix),
        DatabasePart::Guests => several(matrix, guests),
    }
}

/// The columns that all tables contain, after `first`.
fn with_figures<'a>(first: impl IntoIterator<Item = Column<'a>>) -> Vec<Column<'a>> {
    let mut columns: Vec<Column<'a>> = first.into_iter().collect();
    columns.extend([
        Column::figure(RATE, "commits/s", 0),
        Column::figure("flushes_per_commit", "guest FLUSHes/commit", 2),
        Column::figure("syncs_per_commit", "host syncs/commit", 2),
        Column::figure("writes_per_commit", "writes/commit", 2),
        Column::figure("written_kib_per_commit", "KiB/commit", 1),
    ]);
    columns
}

fn beside_raw<'a>() -> Column<'a> {
    Column::beside("rate_beside_raw", "beside raw", RAW, RATE)
}

fn disk<'a>() -> Column<'a> {
    Column::plan("disk", "disk", |job| Cell::text(job.side()))
}

/// A server by number of clients.
fn by_clients(
    matrix: &Matrix<DatabaseJob>,
    key: &str,
    server: &str,
    transaction: &str,
    notes: &[&str],
) -> Section {
    let clients = Column::plan("clients", "clients", |job| Cell::count(job.clients.into()));
    let mut columns = with_figures([clients, disk()]);
    columns.push(beside_raw());
    let section = matrix.long(key, &format!("{server}: {transaction}"), notes, &columns);
    let sides: Vec<&str> = matrix.rows[0]
        .sides
        .iter()
        .map(|side| side.plan.side())
        .collect();
    let plot = |name: &str, title: &str, label: &str, figure: &str| {
        Plot::lines(
            &format!("{key}-{name}"),
            &format!("{server}: {title}"),
            Axis::log("clients"),
            Axis::linear(label),
            matrix.lines(&sides, |job| job.clients.into(), figure),
        )
    };
    let rate = "transactions a second";
    section.with_plots(vec![
        plot("rate", rate, rate, RATE),
        plot(
            "syncs",
            "syncs of the host for a transaction",
            "syncs",
            "syncs_per_commit",
        ),
        plot(
            "bytes",
            "KiB that it writes for a transaction",
            "KiB",
            "written_kib_per_commit",
        ),
    ])
}

/// SQLite by journal.
fn sqlite(matrix: &Matrix<DatabaseJob>) -> Section {
    let journal = Column::new("journal", "journal", |row, _| Cell::text(&row.name));
    let section = matrix.long(
        "sqlite",
        "SQLite: an update of a random row is a transaction, one client",
        &[
            "synchronous=EXTRA: with FULL, a commit with a rollback journal can be lost by a power cut, as its journal's removal is not \
             synced.",
        ],
        &with_figures([journal, disk()]),
    );
    section.with_plots(vec![Plot::bars(
        "sqlite-rate",
        "SQLite: transactions a second, one client",
        "transactions a second",
        &[RAW, WAL],
        matrix.bars(&[RAW, WAL], RATE),
    )])
}

/// Several guests with PostgreSQL.
fn several(matrix: &Matrix<DatabaseJob>, guests: usize) -> Section {
    let mut columns = with_figures([
        Column::plan("guests", "guests", move |_| Cell::count(guests as u64)),
        Column::plan("clients_each", "clients each", |job| {
            Cell::count(job.clients.into())
        }),
        Column::plan("disks", "disks", move |job| match job.disk {
            DatabaseDisk::Raw => Cell::text(format!("{guests} raw")),
            _ => Cell::text(job.side().replace("wal", "one log")),
        }),
    ]);
    columns.push(beside_raw());
    matrix.long(
        "guests",
        "Several guests, each with PostgreSQL on its own disk: raw images, and disks on one log",
        &[
            "All guests do the same job at the same time, through one daemon. Commits are those of all, and the time is that of the \
             slowest guest. A sync of the log serves every guest that waits; each raw image needs its own fdatasync.",
        ],
        &columns,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::matrix::Turn;
    use crate::report::Preference;

    /// The section with a round in which the log had 1.5 times the rate of raw, and PostgreSQL without full-page writes
    /// that again.
    fn measured(part: DatabasePart, clients: &[u32]) -> Section {
        let mut matrix = part.matrix(true, clients);
        for side in matrix.rows.iter_mut().flat_map(|row| &mut row.sides) {
            let log = if side.plan.disk == DatabaseDisk::Raw {
                1.0
            } else {
                1.5
            };
            let once = if side.plan.engine == "postgresql-off" {
                1.5
            } else {
                1.0
            };
            side.turns.push(Turn(json!({ RATE: 100.0 * log * once })));
        }
        section(part, &matrix, 4)
    }

    #[test]
    fn a_row_compares_its_rate_with_that_of_raw() {
        for (part, clients, ratios) in [
            (
                DatabasePart::Mariadb,
                &[1, 16][..],
                &[1.0, 1.5, 1.5, 1.0, 1.5, 1.5][..],
            ),
            (DatabasePart::Postgresql, &[1], &[1.0, 1.5, 1.5, 2.25]),
            (DatabasePart::Guests, &[], &[1.0, 1.5, 2.25]),
        ] {
            let section = measured(part, clients);
            let rows = section.table.rows.iter();
            let beside: Vec<_> = rows.map(|row| row.last().unwrap().clone()).collect();
            let ratio = |ratio: &f64| Cell::ratio(*ratio, Preference::More);
            assert_eq!(beside, ratios.iter().map(ratio).collect::<Vec<_>>());
        }
    }

    #[test]
    fn each_part_is_drawn_and_what_was_not_measured_is_left_empty() {
        let clients = [1, 2, 4, 8, 16, 32];
        for (part, rows, plots) in [
            (DatabasePart::Mariadb, 18, 3),
            (DatabasePart::Postgresql, 24, 3),
            (DatabasePart::Sqlite, 4, 1),
            (DatabasePart::Guests, 6, 0),
        ] {
            let empty = section(part, &part.matrix(false, &clients), 4);
            assert_eq!((empty.table.rows.len(), empty.plots.len()), (rows, plots));
            for row in &empty.table.rows {
                assert!(row[3..].iter().all(|cell| *cell == Cell::None));
            }
            for plot in measured(part, &clients).plots {
                plot.draw(false).unwrap();
            }
        }
    }
}
