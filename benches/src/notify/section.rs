//! Converts samples to tables and plots: a section for each backend and job, a row for each path, queues and depth.

use crate::matrix::{self, Matrix, Side};
use crate::report::plot::{Axis, Plot, Series};
use crate::report::{Cell, Section, Spread};
use crate::sample::{Point, Sample, matrix};

type Column = matrix::Column<'static, Point>;

/// The source of the requests on the paths of a VM, as tables name it.
pub const EMBEDDED_GUEST: &str = "embedded guest";

fn columns() -> Vec<Column> {
    vec![
        Column::plan("path", "path", |point| Cell::text(&point.path)),
        Column::plan("load", "load", |point| Cell::text(&point.load)),
        Column::plan("queues", "queues", |point| Cell::count(point.queues.into())),
        Column::plan("iodepth", "iodepth", |point| {
            Cell::count(point.iodepth.into())
        }),
        Column::figure("iops", "IOPS", 0).timed(),
        Column::median("mb_per_s", "MB/s", 1).timed(),
        Column::figure("p50_us", "p50 us", 1).timed(),
        Column::figure("p99_us", "p99 us", 1).timed(),
        Column::median("p999_us", "p99.9 us", 1).timed(),
        Column::median("vmm_cpu_us_per_request", "CPU us/req: disk", 1).timed(),
        Column::median("host_cpu_us_per_request", "machine", 1).timed(),
        Column::median("mmio_read_exits_per_request", "exits/req: mmio read", 3),
        Column::median("mmio_write_exits_per_request", "mmio write", 3),
        Column::median("port_exits_per_request", "port", 3),
        Column::median("other_exits_per_request", "other", 3),
        Column::median("all_exits_per_request", "with KVM's own", 3),
        Column::median("doorbells_per_request", "doorbells/req", 3),
        Column::median("interrupts_per_request", "interrupts/req", 3),
        Column::median("syncs_per_request", "syncs/req", 3),
    ]
}

/// The sections for samples of any paths. `notes` come before the first table.
pub fn sections(samples: &[Sample], notes: &[String]) -> Vec<Section> {
    let mut parts: Vec<(&str, &str)> = Vec::new();
    for Sample { point, .. } in samples {
        let part = (point.backend.as_str(), point.job.as_str());
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    let mut rounds = 1;
    let mut sections = Vec::new();
    for (backend, job) in parts {
        let these = samples.iter();
        let these =
            these.filter(|sample| sample.point.backend == backend && sample.point.job == job);
        let mut matrix = matrix(these, |point| {
            format!("{} queues, iodepth {}", point.queues, point.iodepth)
        });
        matrix.rows.sort_by_key(|row| {
            let point = &row.sides[0].plan;
            (point.queues, point.iodepth)
        });
        rounds = rounds.max(matrix.rounds());
        sections.push(section(backend, job, matrix));
    }
    let mut general = vec![
        "A row is a closed loop: each queue keeps iodepth requests of 4 KiB in flight, at random places of a disk of 64 MiB; with \
         fsync a write and then its FLUSH, whose time is that of both. The write cache is on everywhere, as each path itself says."
            .to_owned(),
        "CPU: of the disk's own threads (no vCPU, no client), and of the whole machine. Exits are those to user space; with \
         KVM's own, also those that it deals with itself, a doorbell with an ioeventfd among them. An \
         interrupt of virtio-mmio costs a read and a write of registers, one of virtio-pci (MSI-X) none; a doorbell costs a \
         write where it has no ioeventfd."
            .to_owned(),
    ];
    if rounds > 1 {
        general.push(format!(
            "Median of {rounds} rounds (lowest to highest), all paths in turns."
        ));
    }
    general.extend(notes.iter().cloned());
    match sections.first_mut() {
        Some(first) => first.notes = general,
        None => {
            let matrix = Matrix::default();
            let mut empty = matrix.long("nothing", "Nothing was measured", &[], &columns());
            empty.notes = notes.to_vec();
            sections.push(empty);
        }
    }
    sections
}

fn section(backend: &str, job: &str, mut matrix: Matrix<Point>) -> Section {
    let name = format!("{backend}-{}", job.replace('+', "-"));
    let title = match backend {
        "ram" => format!("{job} on a RAM disk: the notification alone"),
        "wal" => format!("{job} on a write-ahead-logged disk"),
        other => format!("{job} on backend {other}"),
    };
    let section = matrix.long(&name, &title, &[], &columns());
    // The plots show the rows with the fewest queues.
    let queues = matrix
        .sides()
        .map(|side| side.plan.queues)
        .min()
        .unwrap_or(1);
    matrix.rows.retain(|row| row.sides[0].plan.queues == queues);
    section.with_plots(plots(&name, &title, queues, &matrix))
}

/// The name of a path in a plot, in brackets if its times are not meaningful.
fn label(side: &Side<Point>) -> String {
    if side.emulated {
        format!("[{}]", side.name)
    } else {
        side.name.clone()
    }
}

fn plots(name: &str, title: &str, queues: u32, matrix: &Matrix<Point>) -> Vec<Plot> {
    const EMULATED: &str = "In brackets: an emulated machine, whose times mean nothing.";
    let loops = match queues {
        1 => "1 queue",
        _ => "several queues",
    };
    let title_of_loops = format!("{title}, {loops}");
    let depth = |point: &Point| f64::from(point.iodepth);
    let depths: Vec<String> = matrix
        .rows
        .iter()
        .map(|row| format!("iodepth {}", row.sides[0].plan.iodepth))
        .collect();
    let depths: Vec<&str> = depths.iter().map(String::as_str).collect();
    // A bar for each path and depth, a line for each path.
    let bars = |figure: &str, unit: &str, key: &str| {
        let rows = matrix.rows[0].sides.iter().map(|path| {
            let rows = matrix.rows.iter();
            let spread = rows.map(|row| row.side(&path.name)?.spread(key));
            (label(path), spread.collect())
        });
        let name = format!("notify-{name}-{figure}");
        Plot::bars(&name, &title_of_loops, unit, &depths, rows.collect())
    };
    let lines = matrix.rows[0]
        .sides
        .iter()
        .map(|path| Series::measured(label(path), matrix.line(&path.name, depth, "p50_us")));
    // Notifications per request, with one request at a time: counts, which mean the same on every machine.
    let counts = [
        ("exits", "exits_per_request"),
        ("with KVM's own", "all_exits_per_request"),
        ("doorbells", "doorbells_per_request"),
        ("interrupts", "interrupts_per_request"),
        ("syncs", "syncs_per_request"),
    ];
    let lone = matrix.rows[0].sides.iter().map(|path| {
        let spread: Vec<Option<Spread>> = counts.iter().map(|(_, key)| path.spread(key)).collect();
        (path.name.clone(), spread)
    });
    let least = matrix.rows[0].sides[0].plan.iodepth;
    vec![
        bars("iops", "IOPS", "iops").captioned(&format!("More is better. {EMULATED}")),
        bars("p50", "p50, microseconds", "p50_us")
            .captioned(&format!("Less is better. {EMULATED}")),
        Plot::lines(
            &format!("notify-{name}-latency"),
            &format!("{title}: latency against iodepth, {loops}"),
            Axis::log("iodepth"),
            Axis::log("p50, microseconds"),
            lines.collect(),
        )
        .captioned(&format!("Less is better. {EMULATED}")),
        Plot::bars(
            &format!("notify-{name}-counts"),
            &format!("{title_of_loops}: what crosses"),
            &format!("a request, iodepth {least}"),
            &counts.map(|(name, _)| name),
            lone.collect(),
        )
        .captioned("Fewer are better."),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::matrix::Turn;

    fn sample(path: &str, iodepth: u32, iops: f64, emulated: bool) -> Sample {
        Sample {
            point: Point {
                path: path.to_owned(),
                load: "fio".to_owned(),
                backend: "ram".to_owned(),
                job: "randwrite+fsync".to_owned(),
                iodepth,
                queues: 1,
                scheduler: String::new(),
            },
            turn: Turn(json!({ "iops": iops, "p50_us": 2.0, "doorbells_per_request": 1.0 })),
            write_cache: true,
            emulated,
        }
    }

    #[test]
    fn rounds_are_one_row_and_emulated_seconds_are_grey() {
        let samples = [
            sample("a", 4, 100.0, false),
            sample("b", 4, 7.0, true),
            sample("a", 4, 300.0, false),
            sample("a", 1, 50.0, false),
            sample("a", 4, 200.0, false),
        ];
        let sections = sections(&samples, &["a note".to_owned()]);
        let [section] = &sections[..] else {
            panic!("{sections:?}")
        };
        assert_eq!(section.key, "ram-randwrite-fsync");
        assert!(section.notes.contains(&"a note".to_owned()));
        let rows: Vec<String> = section
            .table
            .rows
            .iter()
            .map(|row| format!("{} {} {} {} {}", row[0], row[3], row[4], row[16], row[17]))
            .collect();
        let expected = [
            "a 1 50 1.000 -",
            "a 4 200 (100 to 300) 1.000 -",
            "b 4 [7] 1.000 -",
        ];
        assert_eq!(rows, expected);
        assert_eq!(section.plots.len(), 4);
        for plot in &section.plots {
            plot.draw(false).unwrap();
        }
    }

    #[test]
    fn a_report_says_that_nothing_was_measured() {
        let sections = sections(&[], &["skipped: no KVM".to_owned()]);
        assert_eq!(sections[0].notes, ["skipped: no KVM"]);
        assert!(sections[0].table.rows.is_empty());
    }
}
