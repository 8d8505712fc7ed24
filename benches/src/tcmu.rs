//! `walvisor-bench tcmu`: the kernel's SCSI target with a handler in user space, compared with its NBD client on the same
//! backend.

use std::time::Duration;

use clap::Args;

use walvisor::commands::CommandError;

use crate::linux::{
    Amount, Kernels, Linux, LinuxMeasurement, LinuxOutcome, LinuxPlace, LinuxPlan, measure,
};
use crate::output::Output;
use crate::report::plot::{Plot, PlotKind};
use crate::report::{Cell, Preference, Section, Spread};

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

fn place(linux: Linux) -> LinuxPlace {
    match linux {
        Linux::UserMode => LinuxPlace::UserMode { script: SCRIPT },
        Linux::Machine => LinuxPlace::Kvm {
            machine: SCRIPT,
            guest: "",
            cpus: 1,
            limit_s: 1800,
        },
    }
}

fn plan(linux: Linux, output: &Output) -> LinuxPlan {
    let quick = output.quick;
    let user_mode = linux == Linux::UserMode;
    LinuxPlan {
        loops: &[(1, 2), (1, 4), (1, 8)],
        jobs: if quick {
            vec!["ram:read", "ram:write"]
        } else {
            vec!["ram:read", "ram:write", "wal:read", "wal:write"]
        },
        rounds: output.rounds(if user_mode { 3 } else { 1 }, 1) as u32,
        block: "64k",
        amount: if user_mode {
            Amount::Seconds(1)
        } else {
            Amount::Requests(if quick { 128 } else { 400 })
        },
        schedulers: if quick {
            &["none"]
        } else {
            &["none", "mq-deadline"]
        },
    }
}

/// Runs `walvisor-bench tcmu`.
///
/// # Errors
/// If a measurement fails, or a file can't be written.
pub fn run(arguments: &TcmuArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let chosen = arguments.kernels.chosen(output.quick);
    let expected = |linux: &Linux| {
        let plan = plan(*linux, output);
        let jobs = plan.loops.len() * plan.jobs.len() * plan.schedulers.len() * 2;
        Duration::from_millis(15_000 + 1_700 * jobs as u64 * u64::from(plan.rounds))
    };
    let session = arguments.output.start(chosen.iter().map(expected).sum())?;
    let mut section = section();
    for linux in chosen {
        let expected = expected(linux);
        let what = match linux {
            Linux::UserMode => "TCMU and NBD in user-mode Linux",
            Linux::Machine => "TCMU and NBD on a machine with KVM",
        };
        // Measurements before a signal still count, so results are kept outside of the step.
        let mut outcome = LinuxOutcome::default();
        session.step(what, expected, || {
            outcome = measure(
                place(*linux),
                &plan(*linux, output),
                &output.dir,
                &session,
                &mut |_| (),
            )?;
            outcome.check_caches()
        })?;
        section.notes.extend(
            outcome
                .missing
                .iter()
                .map(|missing| format!("Missing: {missing}.")),
        );
        add_rows(&mut section, &outcome.measured);
    }
    let title = "TCMU against NBD: two ways of one kernel to a disk in user space";
    arguments.output.write(title, session, vec![section])
}

fn section() -> Section {
    Section::new(
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
            ("load", "fio in"),
            ("scheduler", "scheduler"),
            ("backend", "backend"),
            ("job", "job"),
            ("threads", "threads"),
            ("tcmu_mb_per_s", "TCMU MB/s"),
            ("nbd_mb_per_s", "NBD MB/s"),
            ("tcmu_to_nbd", "TCMU / NBD"),
            ("source_tcmu_mb_per_s", "source: TCMU"),
            ("source_nbd_mb_per_s", "NBD"),
            ("tcmu_requests", "TCMU requests"),
            ("nbd_requests", "NBD requests"),
            ("tcmu_wakes_per_request", "wakes / request"),
            ("tcmu_syncs_per_request", "TCMU syncs / request"),
            ("nbd_syncs_per_request", "NBD syncs / request"),
        ],
    )
}

/// The values that identify a row.
type Key = (String, String, String, String, u32);

fn key(measured: &LinuxMeasurement) -> Key {
    let sample = &measured.sample;
    let load = sample.load.trim_start_matches("fio, ").to_owned();
    (
        load,
        measured.scheduler.clone(),
        sample.backend.clone(),
        sample.job.clone(),
        sample.queues,
    )
}

/// Adds a row for each key that both paths were measured at, and bars for those rows whose times are meaningful.
fn add_rows(section: &mut Section, measured: &[LinuxMeasurement]) {
    let mut keys: Vec<Key> = measured.iter().map(key).collect();
    keys.sort();
    keys.dedup();
    let mut bars = Vec::new();
    for key_of_row in keys {
        let of = |path: &'static str| {
            let key_of_row = &key_of_row;
            let these =
                move |one: &&LinuxMeasurement| one.sample.path == path && key(one) == *key_of_row;
            measured.iter().filter(these)
        };
        let figures = |path, figure: fn(&LinuxMeasurement) -> Option<f64>| -> Vec<f64> {
            of(path).filter_map(figure).collect()
        };
        let speed = |path| figures(path, |one| Some(one.sample.mb_per_s));
        let (tcmu, nbd) = (speed("tcmu"), speed("nbd"));
        let real = of("tcmu")
            .chain(of("nbd"))
            .all(|one| one.sample.seconds_mean_something);
        let timed = |cell: Cell| if real { cell } else { cell.grey() };
        let ratio = match (Spread::of(&tcmu), Spread::of(&nbd)) {
            (Some(tcmu), Some(nbd)) if nbd.median > 0.0 => {
                Cell::ratio(tcmu.median / nbd.median, Preference::More)
            }
            _ => Cell::None,
        };
        let (load, scheduler, backend, job, threads) = key_of_row.clone();
        let source = SOURCE.iter().find(|source| source.0 == threads);
        let reported =
            |figure: Option<f64>| figure.map_or(Cell::None, |figure| Cell::Number(figure, 0));
        let requests = |path| Cell::count(of(path).map(|one| one.sample.requests).sum());
        let wakes = figures("tcmu", |one| {
            let sample = &one.sample;
            Some(sample.doorbells_per_request? + sample.interrupts_per_request?)
        });
        let syncs = |path| Cell::of(&figures(path, |one| one.sample.syncs_per_request), 3);
        if real && scheduler == "none" && backend == "ram" {
            bars.push((
                format!("{job}, {threads} threads"),
                vec![Spread::of(&tcmu), Spread::of(&nbd)],
            ));
        }
        section.table.rows.push(vec![
            Cell::text(load),
            Cell::text(scheduler),
            Cell::text(backend),
            Cell::text(job),
            Cell::count(threads.into()),
            timed(Cell::of(&tcmu, 0)),
            timed(Cell::of(&nbd, 0)),
            timed(ratio),
            reported(source.map(|source| source.1)),
            reported(source.map(|source| source.2)),
            requests("tcmu"),
            requests("nbd"),
            Cell::of(&wakes, 2),
            syncs("tcmu"),
            syncs("nbd"),
        ]);
    }
    if !bars.is_empty() {
        section.plots.push(Plot {
            name: "tcmu-nbd".to_owned(),
            title: "TCMU and NBD in user-mode Linux, a disk in memory, no scheduler".to_owned(),
            caption: String::new(),
            kind: PlotKind::Bars {
                unit: "MB/s".to_owned(),
                groups: vec!["TCMU".to_owned(), "NBD".to_owned()],
                even: None,
                rows: bars,
            },
        });
    }
}
