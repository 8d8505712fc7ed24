//! fio in Linux kernels: in user-mode Linux, at near-native speed, and on a machine with KVM, which is emulated if this one
//! cannot run Linux.

use super::{BackendKind, section};
use crate::linux::{Amount, Linux, LinuxOutcome, LinuxPlace, LinuxPlan};
use crate::output::Output;
use crate::report::Section;

const MACHINE: &str = include_str!("../../scripts/notify-machine.sh");
const GUEST: &str = include_str!("../../scripts/notify-guest.sh");
const USER_MODE: &str = include_str!("../../scripts/notify-user-mode.sh");

/// The jobs of each backend in the notation of scripts/load.sh. A quick run uses the first.
const RAM_JOBS: [&str; 3] = ["ram:randread", "ram:randwrite", "ram:randwrite+fsync"];
const WAL_JOBS: [&str; 3] = ["wal:randwrite+fsync", "wal:randread", "wal:randwrite"];

/// The measurements in each of `kinds`, each with the first words of the keys of its sections.
pub fn plans(
    output: &Output,
    kinds: &[Linux],
    backends: &[BackendKind],
) -> Vec<(&'static str, LinuxPlan)> {
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
        title: "fio in user-mode Linux",
        place: LinuxPlace::UserMode { script: USER_MODE },
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
        paths: 4,
    };
    let machine = LinuxPlan {
        title: "fio in Linux on a machine with KVM",
        place: LinuxPlace::Kvm {
            machine: MACHINE,
            guest: GUEST,
            cpus: if quick { 1 } else { 4 },
            limit_s: 3600,
        },
        loops: if quick {
            &[(4, 1)]
        } else {
            &[(1, 1), (4, 1), (32, 1), (4, 4)]
        },
        rounds: output.rounds(1, 1) as u32,
        amount: Amount::Requests(if quick { 64 } else { 240 }),
        paths: 7,
        ..user_mode.clone()
    };
    let all = [
        (Linux::UserMode, "user-mode-linux", user_mode),
        (Linux::Machine, "linux", machine),
    ];
    let chosen = all.into_iter().filter(|(kind, ..)| kinds.contains(kind));
    chosen.map(|(_, key, plan)| (key, plan)).collect()
}

/// The results as sections.
pub fn sections(key: &str, plan: &LinuxPlan, outcome: LinuxOutcome) -> Vec<Section> {
    let (samples, title) = (&outcome.samples, plan.title);
    if samples.is_empty() {
        return Vec::new();
    }
    let real = samples.iter().all(|sample| !sample.emulated);
    let mut sections = section::sections(samples, &[]);
    for section in &mut sections {
        section.key = format!("{key}-{}", section.key);
        section.title = format!("{title}: {}", section.title);
        section.notes.clear();
        for plot in &mut section.plots {
            plot.name = plot.name.replace("notify-", &format!("notify-{key}-"));
            plot.title = format!("{title}: {}", plot.title);
        }
        if !real {
            section.plots.clear();
        }
    }
    let first = &mut sections[0];
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
    outcome.tell_missing(first);
    sections
}
