//! The report: a section for each medium, a row for each job and side, a plot of the seconds for each job.

use std::time::Duration;

use super::medium::Medium;
use super::side::Side;
use super::turn::{Row, Turn};
use crate::report::plot::{Axis, Plot, PlotKind, Series};
use crate::report::{Cell, Preference, Section, Spread};

/// The most points of a line.
const POINTS: usize = 300;

const COLUMNS: [(&str, &str); 24] = [
    ("job", "job"),
    ("side", "side"),
    ("answer", "answer="),
    ("cache", "cache"),
    ("median_per_s", "median second"),
    ("worst_tenth_per_s", "worst tenth"),
    ("slowest_second_share", "slowest / median"),
    ("p50_us", "p50 us"),
    ("p99_us", "p99 us"),
    ("p999_us", "p99.9 us"),
    ("longest_ms", "longest ms"),
    ("close_s", "close s"),
    ("with_close_per_s", "rate with close"),
    ("device_bytes_per_byte", "written bytes/byte"),
    ("device_read_bytes_per_byte", "read bytes/byte"),
    ("device_operations_per_4_kib", "operations/4 KiB"),
    ("median_beside_peer", "median / peer"),
    ("median_beside_raw", "median / raw"),
    ("with_close_beside_peer", "with close / peer"),
    ("with_close_beside_raw", "with close / raw"),
    ("median_beside_unsafe", "median / unsafe"),
    ("median_beside_no_history", "median / retain=off"),
    ("each_second_per_s", "each second"),
    ("each_second_longest_ms", "longest of each second"),
];

/// The section of a medium. `missing`: why it was not measured.
pub fn section(medium: Medium, rows: &[Row], time: Duration, missing: Option<String>) -> Section {
    let (key, title) = match medium {
        Medium::Directory => ("sustained-directory", "For minutes, in the directory"),
        Medium::Capped => (
            "sustained-capped",
            "For minutes, on a volume that counts operations",
        ),
    };
    let turns = format!(
        "Turns of {} s. Median second: of the requests that ended in each second. Worst tenth: the median of the slowest tenth of the \
         seconds. A request that is flushed counts once, when its FLUSH has ended. With close: requests over the time of the turn \
         and from SIGTERM to the daemon's end, when it has nothing left to do.",
        time.as_secs()
    );
    let counted = match medium {
        Medium::Directory => {
            "Bytes that reached the device, from a daemon's start to its end, for each byte that the clients wrote: of the daemon's \
             process (/proc/PID/io). The directory shares its device with others, so operations are not counted."
        }
        Medium::Capped => {
            "1 ms for an operation and three at a time, which is 1,700 to 3,700 a second: nbdkit's delay filter under nbdfuse, a loop device and \
             ext4. Bytes and operations that reached the loop device (/sys/block/loopN/stat), from a daemon's start to its end, for \
             what the clients wrote."
        }
    };
    let mut notes = vec![
        turns.as_str(),
        "All sides but cache=unsafe answer a write once a kill of the daemon cannot lose it (for walvisor answer=written), and a FLUSH \
         makes every write before it durable (fdatasync). The peer and the raw image keep the host's page cache out (O_DIRECT, io_uring), \
         except with cache=writeback. A log is written through it, about 2 MiB ahead of the medium, and its image past it.",
        counted,
    ];
    notes.extend(missing.as_deref());
    let mut section = Section::new(key, title, &notes, &COLUMNS);
    for row in rows {
        for &side in &row.sides {
            section.table.rows.push(cells(row, side));
        }
        section.plots.push(plot(key, title, row));
    }
    section
}

fn cells(row: &Row, side: Side) -> Vec<Cell> {
    let turns = &row.turns[side.position()];
    let of = |figure: &dyn Fn(&Turn) -> f64, decimals| {
        Cell::of(&turns.iter().map(figure).collect::<Vec<_>>(), decimals)
    };
    let beside = |other: Side, figure: fn(&Turn) -> f64| {
        let median = |turns: &[Turn]| {
            let figures: Vec<f64> = turns.iter().map(figure).collect();
            Spread::of(&figures).map(|spread| spread.median)
        };
        match (median(turns), median(&row.turns[other.position()])) {
            (Some(this), Some(other)) if other > 0.0 => Cell::ratio(this / other, Preference::More),
            _ => Cell::None,
        }
    };
    let series = |figures: &dyn Fn(&Turn) -> Vec<f64>| {
        turns
            .first()
            .map_or(Cell::None, |turn| Cell::Series(figures(turn)))
    };
    // A database page is several times 4 KiB.
    let operations: Option<Vec<f64>> = turns
        .iter()
        .map(|turn| Some(turn.each_byte(turn.traffic.operations?) * 4096.0))
        .collect();
    vec![
        Cell::text(row.job.title()),
        Cell::text(side.title()),
        Cell::text("written"),
        Cell::text(side.cache()),
        of(&Turn::median, 0),
        of(&Turn::worst_tenth, 0),
        of(&Turn::slowest_share, 2),
        of(&|turn| turn.within_us(500), 0),
        of(&|turn| turn.within_us(990), 0),
        of(&|turn| turn.within_us(999), 0),
        of(&|turn| turn.tally.longest.as_secs_f64() * 1e3, 1),
        of(&|turn| turn.close.as_secs_f64(), 2),
        of(&Turn::with_close, 0),
        of(&|turn| turn.each_byte(turn.traffic.written_bytes), 2),
        of(&|turn| turn.each_byte(turn.traffic.read_bytes), 2),
        operations.map_or(Cell::None, |operations| Cell::of(&operations, 2)),
        beside(Side::QemuNbd, Turn::median),
        beside(Side::Raw, Turn::median),
        beside(Side::QemuNbd, Turn::with_close),
        beside(Side::Raw, Turn::with_close),
        beside(Side::Unsafe, Turn::median),
        match side {
            Side::Keeping => beside(Side::Wal, Turn::median),
            _ => Cell::None,
        },
        series(&Turn::seconds),
        series(&Turn::waits_ms),
    ]
}

/// The seconds of the first round. If there are many, each point stands for several of them and shows the slowest.
fn plot(key: &str, title: &str, row: &Row) -> Plot {
    let series = row.sides.iter().map(|&side| {
        let seconds = row.turns[side.position()]
            .first()
            .map_or(Vec::new(), Turn::seconds);
        let each = seconds.len().div_ceil(POINTS).max(1);
        let points = seconds.chunks(each).enumerate().map(|(at, part)| {
            let slowest = part.iter().copied().fold(f64::INFINITY, f64::min);
            ((at * each) as f64, slowest)
        });
        Series::measured(side.title(), points.collect())
    });
    Plot {
        name: format!("{key}-{}", row.job.name()),
        title: format!("{title}: {}", row.job.title()),
        caption: String::new(),
        kind: PlotKind::Lines {
            x: Axis::linear("second"),
            y: Axis::linear("requests a second"),
            series: series.collect(),
        },
    }
}
