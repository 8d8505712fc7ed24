//! `walvisor-bench tcmu`: the kernel's SCSI target with a handler in user space, compared with its NBD client on the same
//! backend.

use clap::Args;

use walvisor::commands::CommandError;

use crate::linux::{Amount, Kernels, Linux, LinuxPlace, LinuxPlan};
use crate::matrix::{self, Matrix};
use crate::output::Output;
use crate::report::plot::Plot;
use crate::report::{Cell, Section};
use crate::sample::{Point, Sample, matrix};

type Column = matrix::Column<'static, Point>;

const SCRIPT: &str = include_str!("../scripts/tcmu.sh");

/// Results of the source, in MB/s: threads, TCMU, NBD.
const SOURCE: [(u32, f64, f64); 3] = [(2, 270.0, 282.0), (4, 276.0, 237.0), (8, 242.0, 194.0)];

/// Arguments of `walvisor-bench tcmu`.
#[derive(Debug, Args)]
pub struct TcmuArguments {
    #[command(flatten)]
    kernels: Kernels,
    #[command(flatten)]
    output: Output,
}

fn plan(linux: Linux, output: &Output) -> LinuxPlan {
    let quick = output.quick;
    let (title, place, rounds, amount) = match linux {
        Linux::UserMode => (
            "TCMU and NBD in user-mode Linux",
            LinuxPlace::UserMode { script: SCRIPT },
            output.rounds(3, 1),
            Amount::Seconds(1),
        ),
        Linux::Machine => (
            "TCMU and NBD on a machine with KVM",
            LinuxPlace::Kvm {
                machine: SCRIPT,
                guest: "",
                cpus: 1,
                limit_s: 1800,
            },
            output.rounds(1, 1),
            Amount::Requests(if quick { 128 } else { 400 }),
        ),
    };
    LinuxPlan {
        title,
        place,
        loops: &[(1, 2), (1, 4), (1, 8)],
        jobs: if quick {
            vec!["ram:read", "ram:write"]
        } else {
            vec!["ram:read", "ram:write", "wal:read", "wal:write"]
        },
        rounds: rounds as u32,
        block: "64k",
        amount,
        schedulers: if quick {
            &["none"]
        } else {
            &["none", "mq-deadline"]
        },
        paths: 2,
    }
}

/// Runs `walvisor-bench tcmu`.
///
/// # Errors
/// If a measurement fails, or a file can't be written.
pub fn run(arguments: &TcmuArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let chosen = arguments.kernels.chosen(output.quick).iter();
    let plans: Vec<LinuxPlan> = chosen.map(|linux| plan(*linux, output)).collect();
    let session = output.start(plans.iter().map(LinuxPlan::expected).sum())?;
    let (mut samples, mut outcomes) = (Vec::new(), Vec::new());
    for plan in &plans {
        let mut outcome = plan.measure(&output.dir, &session)?;
        samples.append(&mut outcome.samples);
        outcomes.push(outcome);
    }
    let mut section = section(samples);
    for outcome in outcomes {
        outcome.tell_missing(&mut section);
    }
    let title = "TCMU against NBD: two ways of one kernel to a disk in user space";
    output.write(title, session, vec![section])
}

fn section(mut samples: Vec<Sample>) -> Section {
    for Sample { point, turn, .. } in &mut samples {
        point.load = point.load.trim_start_matches("fio, ").to_owned();
        if let (Some(told), Some(woken)) = (
            turn.get("doorbells_per_request"),
            turn.get("interrupts_per_request"),
        ) {
            turn.0["wakes_per_request"] = (told + woken).into();
        }
    }
    samples.sort_by_cached_key(|sample| {
        let point = &sample.point;
        let names = [&point.load, &point.scheduler, &point.backend, &point.job];
        (names.map(String::clone), point.queues)
    });
    let row = |point: &Point| {
        let Point {
            load,
            scheduler,
            backend,
            job,
            queues,
            ..
        } = point;
        format!("{load} {scheduler} {backend} {job}, {queues} threads")
    };
    let all = matrix(samples.iter(), row);
    let source = |figure: fn(&(u32, f64, f64)) -> f64| {
        move |point: &Point| {
            let source = SOURCE.iter().find(|source| source.0 == point.queues);
            source.map_or(Cell::None, |source| Cell::Number(figure(source), 0))
        }
    };
    let requests = |path: &'static str, key, title| {
        Column::new(key, title, move |row, _| {
            let side = row.side(path);
            let requests = side.map_or(0.0, |side| side.of("requests").iter().sum());
            Cell::Number(requests, 0)
        })
    };
    let syncs = "syncs_per_request";
    let section = all.wide(
        "tcmu-nbd",
        "2, 4 and 8 fio threads through TCMU and through NBD",
        &[
            "The kernel's SCSI target with its handler in user space (TCMU, over tcm_loop) and the kernel's NBD client (a Unix \
             socket, a connection a processor), both on disks of one program: a disk in memory, and a write-ahead-logged one. fio, \
             64 KiB a request, sequential, direct, a request in flight for each thread; both take turns. The source (about 2017) \
             gives MB/s for its threads, and neither its block size nor which of read and write: its figures stand in both rows.",
            "Wakes: times that the kernel or the server was told of something (UIO reads and writes), for each request. Grey: seconds \
             of an emulated machine, which say nothing; its counts do.",
        ],
        &[
            Column::plan("load", "fio in", |point| Cell::text(&point.load)),
            Column::plan("scheduler", "scheduler", |point| Cell::text(&point.scheduler)),
            Column::plan("backend", "backend", |point| Cell::text(&point.backend)),
            Column::plan("job", "job", |point| Cell::text(&point.job)),
            Column::plan("threads", "threads", |point| Cell::count(point.queues.into())),
            Column::of("tcmu", "tcmu_mb_per_s", "TCMU MB/s", "mb_per_s", 0).timed(),
            Column::of("nbd", "nbd_mb_per_s", "NBD MB/s", "mb_per_s", 0).timed(),
            Column::ratio("tcmu_to_nbd", "TCMU / NBD", ("tcmu", "nbd"), "mb_per_s").timed(),
            Column::plan("source_tcmu_mb_per_s", "source: TCMU", source(|source| source.1)),
            Column::plan("source_nbd_mb_per_s", "NBD", source(|source| source.2)),
            requests("tcmu", "tcmu_requests", "TCMU requests"),
            requests("nbd", "nbd_requests", "NBD requests"),
            Column::of("tcmu", "tcmu_wakes_per_request", "wakes / request", "wakes_per_request", 2),
            Column::of("tcmu", "tcmu_syncs_per_request", "TCMU syncs / request", syncs, 3),
            Column::of("nbd", "nbd_syncs_per_request", "NBD syncs / request", syncs, 3),
        ],
    );
    let shown = |sample: &&Sample| {
        let point = &sample.point;
        !sample.emulated && point.scheduler == "none" && point.backend == "ram"
    };
    let shown: Matrix<Point> = matrix(samples.iter().filter(shown), |point| {
        format!("{}, {} threads", point.job, point.queues)
    });
    if !shown.is_measured() {
        return section;
    }
    section.with_plots(vec![Plot::bars(
        "tcmu-nbd",
        "TCMU and NBD in user-mode Linux, a disk in memory, no scheduler",
        "MB/s",
        &["TCMU", "NBD"],
        shown.bars(&["tcmu", "nbd"], "mb_per_s"),
    )])
}
