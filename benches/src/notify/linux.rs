//! fio in Linux kernels: in user-mode Linux, at near-native speed, and on a machine with KVM, which is emulated if this one
//! cannot run Linux.

use std::path::Path;
use std::time::Duration;

use walvisor::commands::CommandError;

use super::section;
use crate::linux::{Amount, Linux, LinuxOutcome, LinuxPlace, LinuxPlan, measure};
use crate::load::point::BackendKind;
use crate::load::sample::Sample;
use crate::output::Output;
use crate::report::Section;
use crate::session::Session;

const MACHINE: &str = include_str!("../../scripts/notify-machine.sh");
const GUEST: &str = include_str!("../../scripts/notify-guest.sh");
const USER_MODE: &str = include_str!("../../scripts/notify-user-mode.sh");

/// The jobs of each backend in the notation of scripts/load.sh. A quick run uses the first.
const RAM_JOBS: [&str; 3] = ["ram:randread", "ram:randwrite", "ram:randwrite+fsync"];
const WAL_JOBS: [&str; 3] = ["wal:randwrite+fsync", "wal:randread", "wal:randwrite"];

/// The kernels, and the measurements in each.
pub struct LinuxLoad {
    kernels: Vec<Kernel>,
}

struct Kernel {
    /// The first word of the keys of its sections.
    key: &'static str,
    title: &'static str,
    place: LinuxPlace,
    plan: LinuxPlan,
    /// Number of paths to a disk of one backend.
    paths: u32,
}

impl Kernel {
    fn expected(&self) -> Duration {
        let plan = &self.plan;
        let jobs = plan.jobs.len() * plan.loops.len() * plan.rounds as usize;
        Duration::from_secs(20) + Duration::from_millis(2300) * self.paths * jobs as u32
    }
}

impl LinuxLoad {
    /// The measurements of a run.
    pub fn new(output: &Output, kinds: &[Linux], backends: &[BackendKind]) -> Self {
        let quick = output.quick;
        let jobs = |backend, jobs: [&'static str; 3]| {
            let count = match (backends.contains(&backend), quick) {
                (false, _) => 0,
                (true, true) => 1,
                (true, false) => jobs.len(),
            };
            jobs.into_iter().take(count)
        };
        let user_mode = LinuxPlan {
            loops: if quick {
                &[(4, 1)]
            } else {
                &[(1, 1), (4, 1), (32, 1)]
            },
            jobs: jobs(BackendKind::Ram, RAM_JOBS)
                .chain(jobs(BackendKind::Wal, WAL_JOBS))
                .collect(),
            rounds: output.rounds(3, 1) as u32,
            block: "4k",
            amount: Amount::Seconds(1),
            schedulers: &["none"],
        };
        let machine = LinuxPlan {
            loops: if quick {
                &[(4, 1)]
            } else {
                &[(1, 1), (4, 1), (32, 1), (4, 4)]
            },
            rounds: output.rounds(1, 1) as u32,
            amount: Amount::Requests(if quick { 64 } else { 240 }),
            ..user_mode.clone()
        };
        let user_mode = Kernel {
            key: "user-mode-linux",
            title: "fio in user-mode Linux",
            place: LinuxPlace::UserMode { script: USER_MODE },
            plan: user_mode,
            paths: 4,
        };
        let machine = Kernel {
            key: "linux",
            title: "fio in Linux on a machine with KVM",
            place: LinuxPlace::Kvm {
                machine: MACHINE,
                guest: GUEST,
                cpus: if quick { 1 } else { 4 },
                limit_s: 3600,
            },
            plan: machine,
            paths: 7,
        };
        let all = [(Linux::UserMode, user_mode), (Linux::Machine, machine)];
        let chosen = all.into_iter().filter(|(kind, _)| kinds.contains(kind));
        Self {
            kernels: chosen.map(|(_, kernel)| kernel).collect(),
        }
    }

    /// Estimated time of all measurements.
    pub fn expected(&self) -> Duration {
        self.kernels.iter().map(Kernel::expected).sum()
    }

    /// Runs all measurements, with disks in `dir`. If a signal interrupts them, returns the results so far.
    ///
    /// # Errors
    /// If the program that runs guests is missing or fails, or the write caches of two paths differ.
    pub fn sections(&self, dir: &Path, session: &Session) -> Result<Vec<Section>, CommandError> {
        let mut sections = Vec::new();
        for kernel in &self.kernels {
            // Measurements before a signal still count, so results are kept outside of the step.
            let mut outcome = LinuxOutcome::default();
            session.step(kernel.title, kernel.expected(), || {
                outcome = measure(kernel.place, &kernel.plan, dir, session, &mut |_| ())?;
                outcome.check_caches()
            })?;
            sections.extend(kernel.sections(outcome));
        }
        Ok(sections)
    }
}

impl Kernel {
    fn sections(&self, outcome: LinuxOutcome) -> Vec<Section> {
        let real = outcome
            .measured
            .iter()
            .all(|measured| measured.sample.seconds_mean_something);
        let samples: Vec<Sample> = outcome
            .measured
            .into_iter()
            .map(|measured| measured.sample)
            .collect();
        if samples.is_empty() {
            return Vec::new();
        }
        let mut sections = section::sections(&samples, &[]);
        for section in &mut sections {
            section.key = format!("{}-{}", self.key, section.key);
            section.title = format!("{}: {}", self.title, section.title);
            section.notes.clear();
            for plot in &mut section.plots {
                plot.name = plot
                    .name
                    .replace("notify-", &format!("notify-{}-", self.key));
                plot.title = format!("{}: {}", self.title, plot.title);
            }
            if !real {
                section.plots.clear();
            }
        }
        if let Some(first) = sections.first_mut() {
            first.notes.push(
                "TCMU and NBD are of the kernel that fio runs on. TCMU in a guest: that kernel's SCSI target, its handler over the \
                 virtio disk that it has from outside, so that its doorbells, interrupts and exits are those of the disk below, and \
                 its processor time is that of both. Without an I/O scheduler; the write cache is on, as the kernel that runs fio \
                 says of each disk. A request with fsync takes the time of both; fio clocks the first syncs from the start of their \
                 machine, so that tails of few requests may be as long as the job. Exits of ports, which are those of the guest's console, are left out."
                    .to_owned(),
            );
            if !real {
                first.notes.push(
                    "This machine's KVM runs no Linux: both the machine and its guest are emulated, the times are in brackets and \
                     mean nothing, and the counts are those of any KVM."
                        .to_owned(),
                );
            }
            let missing = outcome.missing.iter();
            first
                .notes
                .extend(missing.map(|missing| format!("Missing: {missing}.")));
        }
        sections
    }
}
