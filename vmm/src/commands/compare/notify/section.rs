//! From samples to tables and plots: a section for each backend and job, a row for each path, queues and depth.

use super::Sample;
use crate::commands::compare::plot::{Axis, Kind, Plot, Series};
use crate::commands::compare::report::{Cell, Section, Spread};

/// The columns behind those that name the row.
const COLUMNS: [(&str, &str); 18] = [
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

    /// A figure of each round that has it.
    fn of(&self, figure: impl Fn(&Sample) -> Option<f64>) -> Vec<f64> {
        self.rounds
            .iter()
            .filter_map(|round| figure(round))
            .collect()
    }

    fn spread(&self, figure: impl Fn(&Sample) -> f64) -> Option<Spread> {
        Spread::of(&self.of(|sample| Some(figure(sample))))
    }

    /// The middle of a count; nothing where it cannot be read.
    fn count(&self, figure: impl Fn(&Sample) -> Option<f64>) -> Cell {
        Spread::of(&self.of(figure)).map_or(Cell::None, |spread| Cell::Number(spread.median, 3))
    }

    /// A time, or what follows from one, with its spread: grey where seconds mean nothing.
    fn time(&self, figure: impl Fn(&Sample) -> Option<f64>, decimals: usize) -> Cell {
        self.maybe_grey(Cell::of(&self.of(figure), decimals))
    }

    /// The same without its spread: tables have an end.
    fn middle(&self, figure: impl Fn(&Sample) -> Option<f64>, decimals: usize) -> Cell {
        let spread = Spread::of(&self.of(figure));
        self.maybe_grey(spread.map_or(Cell::None, |spread| Cell::Number(spread.median, decimals)))
    }

    fn maybe_grey(&self, cell: Cell) -> Cell {
        match self.first().seconds_mean_something || cell == Cell::None {
            true => cell,
            false => cell.grey(),
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
            self.middle(|sample| Some(sample.mb_per_s), 1),
            self.time(|sample| Some(sample.p50_us), 1),
            self.time(|sample| Some(sample.p99_us), 1),
            self.middle(|sample| Some(sample.p999_us), 1),
            self.middle(|sample| sample.vmm_cpu_us_per_request, 1),
            self.middle(|sample| sample.host_cpu_us_per_request, 1),
            self.count(|sample| exits(sample, |kind| kind == "mmio_read")),
            self.count(|sample| exits(sample, |kind| kind == "mmio_write")),
            self.count(|sample| exits(sample, |kind| kind.starts_with("port_"))),
            self.count(|sample| {
                exits(sample, |kind| {
                    !kind.starts_with("mmio_") && !kind.starts_with("port_")
                })
            }),
            self.count(|sample| sample.doorbells_per_request),
            self.count(|sample| sample.interrupts_per_request),
            self.count(|sample| sample.syncs_per_request),
        ]
    }
}

/// Exits of these kinds for each request; `None` if nothing of exits is known.
fn exits(sample: &Sample, which: impl Fn(&str) -> bool) -> Option<f64> {
    let known = !sample.exits_per_request.is_empty() || sample.load == super::EMBEDDED_GUEST;
    let of = sample.exits_per_request.iter();
    known.then(|| {
        of.filter(|(kind, _)| which(kind))
            .map(|(_, each)| each)
            .sum()
    })
}

/// Distinct values of `of`, in the order in which they first come.
fn distinct<'a, T: PartialEq>(samples: &[&'a Sample], of: impl Fn(&'a Sample) -> T) -> Vec<T> {
    let mut values = Vec::new();
    for sample in samples {
        let value = of(sample);
        if !values.contains(&value) {
            values.push(value);
        }
    }
    values
}

/// The rows of samples of one backend and job.
fn rows<'a>(samples: &[&'a Sample]) -> Vec<Row<'a>> {
    let mut keys = distinct(samples, |sample| (sample.queues, sample.iodepth));
    keys.sort_unstable();
    let paths = distinct(samples, |sample| (&sample.path, &sample.load));
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

/// What samples, of whatever paths, have to tell. `notes` stand above the first table.
pub fn sections(samples: &[Sample], notes: &[String]) -> Vec<Section> {
    let all: Vec<&Sample> = samples.iter().collect();
    let mut sections = Vec::new();
    for backend in distinct(&all, |sample| &sample.backend) {
        let of_backend: Vec<&Sample> = all
            .iter()
            .filter(|sample| &sample.backend == backend)
            .copied()
            .collect();
        for job in distinct(&of_backend, |sample| &sample.job) {
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
        "CPU: of the disk's own threads (no vCPU, no client), and of the whole machine. Exits are those to user space. An \
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

/// Rounds of the row that has most.
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

fn plots(name: &str, title: &str, rows: &[Row<'_>]) -> Vec<Plot> {
    let queues = rows.iter().map(|row| row.first().queues).min().unwrap_or(1);
    let few: Vec<&Row<'_>> = rows
        .iter()
        .filter(|row| row.first().queues == queues)
        .collect();
    let bars = |which: &str, unit: &str, figure: fn(&Sample) -> f64| {
        let mut depths: Vec<u32> = few.iter().map(|row| row.first().iodepth).collect();
        depths.dedup();
        let paths = {
            let mut paths: Vec<&str> = Vec::new();
            for row in &few {
                if !paths.contains(&row.first().path.as_str()) {
                    paths.push(&row.first().path);
                }
            }
            paths
        };
        let bar = |path: &str, depth: u32| {
            let row = few
                .iter()
                .find(|row| row.first().path == path && row.first().iodepth == depth)?;
            row.spread(figure)
        };
        Plot {
            name: format!("notify-{name}-{which}"),
            title: format!("{title}, {queues} queue"),
            kind: Kind::Bars {
                unit: unit.to_owned(),
                groups: depths
                    .iter()
                    .map(|depth| format!("iodepth {depth}"))
                    .collect(),
                rows: paths
                    .iter()
                    .map(|path| {
                        let row = depths.iter().map(|depth| bar(path, *depth)).collect();
                        ((*path).to_owned(), row)
                    })
                    .collect(),
            },
        }
    };
    let mut lines: Vec<Series> = Vec::new();
    for row in &few {
        let (first, Some(spread)) = (row.first(), row.spread(|sample| sample.p50_us)) else {
            continue;
        };
        let point = (f64::from(first.iodepth), spread.median);
        match lines.iter_mut().find(|line| line.name == first.path) {
            Some(line) => line.points.push(point),
            None => lines.push(Series::measured(first.path.clone(), vec![point])),
        }
    }
    vec![
        bars("iops", "IOPS", |sample| sample.iops),
        bars("p50", "p50, microseconds", |sample| sample.p50_us),
        Plot {
            name: format!("notify-{name}-latency"),
            title: format!("{title}: latency against iodepth, {queues} queue"),
            kind: Kind::Lines {
                x: Axis::log("iodepth"),
                y: Axis::log("p50, microseconds"),
                series: lines,
            },
        },
    ]
}
