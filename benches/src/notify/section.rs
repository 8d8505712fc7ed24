//! Converts samples to tables and plots: a section for each backend and job, a row for each path, queues and depth.

use walvisor::demo::ALL_EXITS;

use super::guest::EMBEDDED_GUEST;
use crate::load::sample::Sample;
use crate::report::plot::{Axis, Plot, PlotKind, Series};
use crate::report::{Cell, Section, Spread};

/// The columns of a table.
const COLUMNS: [(&str, &str); 19] = [
    ("path", "path"),
    ("load", "load"),
    ("queues", "queues"),
    ("iodepth", "iodepth"),
    ("iops", "IOPS"),
    ("mb_per_s", "MB/s"),
    ("p50_us", "p50 us"),
    ("p99_us", "p99 us"),
    ("p999_us", "p99.9 us"),
    ("vmm_cpu_us_per_request", "CPU us/req: disk"),
    ("host_cpu_us_per_request", "machine"),
    ("mmio_read_exits_per_request", "exits/req: mmio read"),
    ("mmio_write_exits_per_request", "mmio write"),
    ("port_exits_per_request", "port"),
    ("other_exits_per_request", "other"),
    ("all_exits_per_request", "with KVM's own"),
    ("doorbells_per_request", "doorbells/req"),
    ("interrupts_per_request", "interrupts/req"),
    ("syncs_per_request", "syncs/req"),
];

/// All rounds of one row.
struct Row<'a> {
    rounds: Vec<&'a Sample>,
}

impl Row<'_> {
    fn first(&self) -> &Sample {
        self.rounds[0]
    }

    /// A figure of those rounds that have it.
    fn of(&self, figure: impl Fn(&Sample) -> Option<f64>) -> Vec<f64> {
        self.rounds
            .iter()
            .filter_map(|round| figure(round))
            .collect()
    }

    fn spread(&self, figure: impl Fn(&Sample) -> f64) -> Option<Spread> {
        Spread::of(&self.of(|sample| Some(figure(sample))))
    }

    /// The median of a count; an empty cell if the count cannot be read.
    fn count(&self, figure: impl Fn(&Sample) -> Option<f64>) -> Cell {
        Spread::of(&self.of(figure)).map_or(Cell::None, |spread| Cell::Number(spread.median, 3))
    }

    /// A time, or a figure derived from times, with its spread. Grey if times are meaningless.
    fn time(&self, figure: impl Fn(&Sample) -> Option<f64>, decimals: usize) -> Cell {
        self.maybe_grey(Cell::of(&self.of(figure), decimals))
    }

    /// Like [`time`](Self::time) without the spread, to keep tables narrow.
    fn median_time(&self, figure: impl Fn(&Sample) -> Option<f64>, decimals: usize) -> Cell {
        let spread = Spread::of(&self.of(figure));
        self.maybe_grey(spread.map_or(Cell::None, |spread| Cell::Number(spread.median, decimals)))
    }

    fn maybe_grey(&self, cell: Cell) -> Cell {
        if self.first().seconds_mean_something || cell == Cell::None {
            cell
        } else {
            cell.grey()
        }
    }

    fn cells(&self) -> Vec<Cell> {
        let first = self.first();
        vec![
            Cell::text(&first.path),
            Cell::text(&first.load),
            Cell::count(first.queues.into()),
            Cell::count(first.iodepth.into()),
            self.time(|sample| Some(sample.iops), 0),
            self.median_time(|sample| Some(sample.mb_per_s), 1),
            self.time(|sample| Some(sample.p50_us), 1),
            self.time(|sample| Some(sample.p99_us), 1),
            self.median_time(|sample| Some(sample.p999_us), 1),
            self.median_time(|sample| sample.vmm_cpu_us_per_request, 1),
            self.median_time(|sample| sample.host_cpu_us_per_request, 1),
            self.count(|sample| exits(sample, |kind| kind == "mmio_read")),
            self.count(|sample| exits(sample, |kind| kind == "mmio_write")),
            self.count(|sample| exits(sample, |kind| kind.starts_with("port_"))),
            self.count(|sample| {
                exits(sample, |kind| {
                    !kind.starts_with("mmio_") && !kind.starts_with("port_")
                })
            }),
            self.count(|sample| sample.exits_per_request.get(ALL_EXITS).copied()),
            self.count(|sample| sample.doorbells_per_request),
            self.count(|sample| sample.interrupts_per_request),
            self.count(|sample| sample.syncs_per_request),
        ]
    }
}

/// Exits to user space of these kinds per request; `None` if exits are unknown.
fn exits(sample: &Sample, which: impl Fn(&str) -> bool) -> Option<f64> {
    let known = !sample.exits_per_request.is_empty() || sample.load == EMBEDDED_GUEST;
    let of = sample.exits_per_request.iter();
    let of = of.filter(|(kind, _)| *kind != ALL_EXITS);
    known.then(|| {
        of.filter(|(kind, _)| which(kind))
            .fold(0.0, |sum, (_, each)| sum + each)
    })
}

/// Distinct values of `of`, in the order of their first occurrence.
fn list_distinct<'a, T: PartialEq>(samples: &[&'a Sample], of: impl Fn(&'a Sample) -> T) -> Vec<T> {
    let mut values = Vec::new();
    for sample in samples {
        let value = of(sample);
        if !values.contains(&value) {
            values.push(value);
        }
    }
    values
}

/// The rows for samples of one backend and job.
fn rows<'a>(samples: &[&'a Sample]) -> Vec<Row<'a>> {
    let mut keys = list_distinct(samples, |sample| (sample.queues, sample.iodepth));
    keys.sort_unstable();
    let paths = list_distinct(samples, |sample| (&sample.path, &sample.load));
    let mut rows = Vec::new();
    for (queues, iodepth) in keys {
        for &(path, load) in &paths {
            let of_row = |sample: &&&Sample| {
                (sample.queues, sample.iodepth) == (queues, iodepth)
                    && (&sample.path, &sample.load) == (path, load)
            };
            let rounds: Vec<&Sample> = samples.iter().filter(of_row).copied().collect();
            if !rounds.is_empty() {
                rows.push(Row { rounds });
            }
        }
    }
    rows
}

/// The sections for samples of any paths. `notes` come before the first table.
pub fn sections(samples: &[Sample], notes: &[String]) -> Vec<Section> {
    let all: Vec<&Sample> = samples.iter().collect();
    let mut sections = Vec::new();
    for backend in list_distinct(&all, |sample| &sample.backend) {
        let of_backend: Vec<&Sample> = all
            .iter()
            .filter(|sample| &sample.backend == backend)
            .copied()
            .collect();
        for job in list_distinct(&of_backend, |sample| &sample.job) {
            let of_job: Vec<&Sample> = of_backend
                .iter()
                .filter(|sample| &sample.job == job)
                .copied()
                .collect();
            sections.push(section(backend, job, &rows(&of_job)));
        }
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
    let rounds = sections_rounds(samples);
    if rounds > 1 {
        general.push(format!(
            "Median of {rounds} rounds (lowest to highest), all paths in turns."
        ));
    }
    general.extend(notes.iter().cloned());
    match sections.first_mut() {
        Some(first) => first.notes.splice(0..0, general).for_each(drop),
        None => {
            let mut empty = Section::new("nothing", "Nothing was measured", &[], &COLUMNS);
            empty.notes = notes.to_vec();
            sections.push(empty);
        }
    }
    sections
}

/// The largest number of rounds in any row.
fn sections_rounds(samples: &[Sample]) -> usize {
    let all: Vec<&Sample> = samples.iter().collect();
    let key = |sample: &Sample| {
        let Sample {
            path,
            load,
            backend,
            job,
            iodepth,
            queues,
            ..
        } = sample;
        (
            path.clone(),
            load.clone(),
            backend.clone(),
            job.clone(),
            *iodepth,
            *queues,
        )
    };
    let first = all.first().map(|sample| key(sample));
    all.iter()
        .filter(|sample| Some(key(sample)) == first)
        .count()
}

fn section(backend: &str, job: &str, rows: &[Row<'_>]) -> Section {
    let name = format!("{backend}-{}", job.replace('+', "-"));
    let title = match backend {
        "ram" => format!("{job} on a RAM disk: the notification alone"),
        "wal" => format!("{job} on a write-ahead-logged disk"),
        other => format!("{job} on backend {other}"),
    };
    let mut section = Section::new(&name, &title, &[], &COLUMNS);
    section.table.rows = rows.iter().map(Row::cells).collect();
    section.plots = plots(&name, &title, rows);
    section
}

/// The name of a path in a plot, in brackets if its times are not meaningful.
fn label(sample: &Sample) -> String {
    if sample.seconds_mean_something {
        sample.path.clone()
    } else {
        format!("[{}]", sample.path)
    }
}

/// What brackets around a path mean.
const EMULATED: &str = "In brackets: an emulated machine, whose times mean nothing.";

/// Plots of the rows with the fewest queues.
fn plots(name: &str, title: &str, rows: &[Row<'_>]) -> Vec<Plot> {
    let queues = rows.iter().map(|row| row.first().queues).min().unwrap_or(1);
    let rows: Vec<&Row<'_>> = rows
        .iter()
        .filter(|row| row.first().queues == queues)
        .collect();
    let loops = if queues == 1 {
        "1 queue"
    } else {
        "several queues"
    };
    vec![
        bars_by_depth(
            format!("notify-{name}-iops"),
            format!("{title}, {loops}"),
            "IOPS",
            &rows,
            |sample| sample.iops,
        )
        .captioned(&format!("More is better. {EMULATED}")),
        bars_by_depth(
            format!("notify-{name}-p50"),
            format!("{title}, {loops}"),
            "p50, microseconds",
            &rows,
            |sample| sample.p50_us,
        )
        .captioned(&format!("Less is better. {EMULATED}")),
        latency(
            format!("notify-{name}-latency"),
            format!("{title}: latency against iodepth, {loops}"),
            &rows,
        )
        .captioned(&format!("Less is better. {EMULATED}")),
        notices(
            format!("notify-{name}-counts"),
            format!("{title}, {loops}: what crosses"),
            &rows,
        )
        .captioned("Fewer are better."),
    ]
}

/// A plot with a bar for each path and depth.
fn bars_by_depth(
    name: String,
    title: String,
    unit: &str,
    rows: &[&Row<'_>],
    figure: fn(&Sample) -> f64,
) -> Plot {
    let first: Vec<&Sample> = rows.iter().map(|row| row.first()).collect();
    let depths = list_distinct(&first, |sample| sample.iodepth);
    let bar = |path: &str, depth| {
        let row = rows
            .iter()
            .find(|row| row.first().iodepth == depth && label(row.first()) == path)?;
        row.spread(figure)
    };
    let of_path = |path: String| {
        let bars = depths.iter().map(|&depth| bar(&path, depth)).collect();
        (path, bars)
    };
    Plot {
        name,
        title,
        caption: String::new(),
        kind: PlotKind::Bars {
            unit: unit.to_owned(),
            groups: depths
                .iter()
                .map(|depth| format!("iodepth {depth}"))
                .collect(),
            even: None,
            rows: list_distinct(&first, label)
                .into_iter()
                .map(of_path)
                .collect(),
        },
    }
}

/// A plot with a line for each path.
fn latency(name: String, title: String, rows: &[&Row<'_>]) -> Plot {
    let mut lines: Vec<Series> = Vec::new();
    for row in rows {
        let Some(spread) = row.spread(|sample| sample.p50_us) else {
            continue;
        };
        let (path, point) = (
            label(row.first()),
            (f64::from(row.first().iodepth), spread.median),
        );
        match lines.iter_mut().find(|line| line.name == path) {
            Some(line) => line.points.push(point),
            None => lines.push(Series::measured(path, vec![point])),
        }
    }
    Plot {
        name,
        title,
        caption: String::new(),
        kind: PlotKind::Lines {
            x: Axis::log("iodepth"),
            y: Axis::log("p50, microseconds"),
            series: lines,
        },
    }
}

/// Notifications per request, with one request at a time: counts, which mean the same on every machine.
fn notices(name: String, title: String, rows: &[&Row<'_>]) -> Plot {
    let least = rows.iter().map(|row| row.first().iodepth).min();
    let of_path = |row: &&Row<'_>| {
        let spread = |figure: &dyn Fn(&Sample) -> Option<f64>| Spread::of(&row.of(figure));
        let bars = vec![
            spread(&|sample| exits(sample, |_| true)),
            spread(&|sample| sample.exits_per_request.get(ALL_EXITS).copied()),
            spread(&|sample| sample.doorbells_per_request),
            spread(&|sample| sample.interrupts_per_request),
            spread(&|sample| sample.syncs_per_request),
        ];
        (row.first().path.clone(), bars)
    };
    let lone = rows.iter().filter(|row| Some(row.first().iodepth) == least);
    Plot {
        name,
        title,
        caption: String::new(),
        kind: PlotKind::Bars {
            unit: format!("a request, iodepth {}", least.unwrap_or(1)),
            groups: [
                "exits",
                "with KVM's own",
                "doorbells",
                "interrupts",
                "syncs",
            ]
            .map(str::to_owned)
            .into(),
            even: None,
            rows: lone.map(of_path).collect(),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn sample(path: &str, iodepth: u32, iops: f64, real: bool) -> Sample {
        Sample {
            path: path.to_owned(),
            load: "fio".to_owned(),
            backend: "ram".to_owned(),
            job: "randwrite+fsync".to_owned(),
            iodepth,
            queues: 1,
            requests: 10,
            iops,
            mb_per_s: 1.0,
            p50_us: 2.0,
            p99_us: 3.0,
            p999_us: 4.0,
            vmm_cpu_us_per_request: None,
            host_cpu_us_per_request: None,
            exits_per_request: BTreeMap::from([
                ("mmio_write".to_owned(), 2.0),
                (ALL_EXITS.to_owned(), 5.0),
            ]),
            doorbells_per_request: Some(1.0),
            interrupts_per_request: None,
            syncs_per_request: Some(0.0),
            write_cache: None,
            seconds_mean_something: real,
        }
    }

    #[test]
    fn rounds_are_one_row_and_emulated_seconds_are_grey() {
        let samples = [
            sample("a", 4, 100.0, true),
            sample("b", 4, 7.0, false),
            sample("a", 4, 300.0, true),
            sample("a", 1, 50.0, true),
            sample("a", 4, 200.0, true),
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
            .map(|row| format!("{} {} {}", row[0], row[3], row[4]))
            .collect();
        assert_eq!(rows, ["a 1 50", "a 4 200 (100 to 300)", "b 4 [7]"]);
        let row = &section.table.rows[1];
        assert_eq!((row[9].clone(), row[17].clone()), (Cell::None, Cell::None));
        let counts = [11, 12, 14, 15, 16].map(|at| row[at].to_string());
        assert_eq!(counts, ["0.000", "2.000", "0.000", "5.000", "1.000"]);
        assert_eq!(section.plots.len(), 4);
        for plot in &section.plots {
            assert!(plot.svg().unwrap().contains("<svg"), "{}", plot.name);
        }
    }

    #[test]
    fn a_report_says_that_nothing_was_measured() {
        let sections = sections(&[], &["skipped: no KVM".to_owned()]);
        assert_eq!(sections[0].notes, ["skipped: no KVM"]);
        assert!(sections[0].table.rows.is_empty());
    }
}
