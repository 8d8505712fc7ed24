//! The guest on faulty disks: it must notice every fault.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{
    Backend, BackendQueue, Capabilities, Completion, Failure, Operation,
};
use walvisor_devices::block::BlockConfig;
use walvisor_vmm::disk::OpenDisk;
use walvisor_vmm::seccomp::Seccomp;
use walvisor_vmm::vm::DiskConfig;

use super::listener::Transcript;
use super::*;
use crate::disk_spec::{Notifications, TransportKind};

/// The fault of a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// No fault.
    None,
    /// One bit of a block is wrong in each read of it.
    FlippedBit,
    /// DISCARD has no effect.
    DiscardIgnored,
    /// WRITE_ZEROES has no effect.
    ZeroesIgnored,
    /// The hundredth write does nothing.
    LostWrite,
    /// The hundredth write ends up in the next block.
    MisplacedWrite,
    /// The first FLUSH fails.
    FlushFails,
}

/// A RAM disk with a fault.
struct FaultyDisk {
    disk: RamDisk,
    fault: Fault,
    /// Number of writes, or of flushes, so far.
    count: Arc<AtomicU64>,
}

impl FaultyDisk {
    fn new(fault: Fault) -> Self {
        Self {
            disk: RamDisk::new(64 << 11),
            fault,
            count: Arc::default(),
        }
    }
}

impl Backend for FaultyDisk {
    fn sectors(&self) -> u64 {
        self.disk.sectors()
    }

    fn capabilities(&self) -> Capabilities {
        self.disk.capabilities()
    }

    fn write_cache(&self) -> bool {
        self.disk.write_cache()
    }

    fn set_write_cache(&self, on: bool) {
        self.disk.set_write_cache(on);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        let queue = self.disk.open_queue()?;
        let (fault, count) = (self.fault, self.count.clone());
        Ok(Box::new(FaultyQueue {
            queue,
            fault,
            count,
            spoiled: None,
            replaced: Vec::new(),
        }))
    }
}

struct FaultyQueue {
    queue: Box<dyn BackendQueue>,
    fault: Fault,
    count: Arc<AtomicU64>,
    /// The read whose data will be spoiled.
    spoiled: Option<u64>,
    /// Requests whose result is replaced, with the new result.
    replaced: Vec<(u64, Result<(), Failure>)>,
}

impl BackendQueue for FaultyQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let operation = match (self.fault, operation) {
            (Fault::FlippedBit, read @ Operation::Read { sector: 8, .. }) => {
                self.spoiled = Some(token);
                read
            }
            (Fault::DiscardIgnored, Operation::Discard { sector, .. })
            | (Fault::ZeroesIgnored, Operation::WriteZeroes { sector, .. }) => {
                self.replaced.push((token, Ok(())));
                Operation::Read { sector, sectors: 1 }
            }
            (Fault::LostWrite | Fault::MisplacedWrite, Operation::Write { sector, data }) => {
                let hundredth = self.count.fetch_add(1, Ordering::Relaxed) == 100;
                match (hundredth, self.fault) {
                    (false, _) => Operation::Write { sector, data },
                    (true, Fault::LostWrite) => {
                        self.replaced.push((token, Ok(())));
                        Operation::Read { sector, sectors: 1 }
                    }
                    (true, _) => Operation::Write {
                        sector: sector + 8,
                        data,
                    },
                }
            }
            (Fault::FlushFails, Operation::Flush)
                if self.count.fetch_add(1, Ordering::Relaxed) == 0 =>
            {
                self.replaced.push((token, Err(Failure::Io)));
                Operation::Flush
            }
            (_, operation) => operation,
        };
        self.queue.submit(token, operation);
    }

    fn kick(&mut self) {
        self.queue.kick();
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.queue.event()
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        self.queue.completions(done);
        for completion in &mut done[before..] {
            let token = completion.token;
            if let Some(at) = self
                .replaced
                .iter()
                .position(|&(replaced, _)| replaced == token)
            {
                completion.result = self.replaced.swap_remove(at).1.map(|()| None);
            }
            if self.spoiled == Some(completion.token) {
                self.spoiled = None;
                if let Ok(Some(data)) = &mut completion.result {
                    data[1234] ^= 0x40;
                }
            }
        }
    }
}

/// The guest's transcript with these faults in the MMIO disk and in the PCI disk; `None` without
/// KVM.
fn transcript(faults: [Fault; 2], task: Task) -> Option<Transcript> {
    let disk = |name: &str, transport, fault| {
        let mut disk = disk(name, transport, FaultyDisk::new(fault));
        disk.disk.device.serial = name.to_owned();
        disk
    };
    run(
        [
            disk("mmio", TransportKind::Mmio, faults[0]),
            disk("pci", TransportKind::Pci, faults[1]),
        ],
        task,
    )
}

fn disk(name: &str, transport: TransportKind, backend: impl Backend + 'static) -> DiskConfig {
    DiskConfig {
        disk: OpenDisk {
            device: BlockConfig {
                queues: 4,
                queue_size: 1024,
                ..BlockConfig::default()
            },
            ..OpenDisk::new(name, Arc::new(backend))
        },
        transport,
        notifications: Notifications::default(),
    }
}

fn run(disks: [DiskConfig; 2], task: Task) -> Option<Transcript> {
    if let Err(error) = probe::open() {
        println!("skipped: {error}");
        return None;
    }
    Some(run_guest(disks, task, Seccomp::Off, |_| ()).expect("the guest ends"))
}

/// A disk's fault fails its own job, and no other.
#[test]
fn every_fault_is_noticed_and_the_other_disk_passes() {
    let (discards, zeroes) = ("block 1", "block 3");
    let lost = "expected 0x";
    for (faults, complaints) in [
        (
            [Fault::FlippedBit, Fault::None],
            ["block 1, byte 1234: expected ", ""],
        ),
        (
            [Fault::DiscardIgnored, Fault::ZeroesIgnored],
            [discards, zeroes],
        ),
        ([Fault::LostWrite, Fault::MisplacedWrite], [lost, lost]),
        (
            [Fault::None, Fault::FlushFails],
            ["", "FLUSH at sector 0 ended with status 1"],
        ),
    ] {
        let Some(transcript) = transcript(faults, Task::Job) else {
            return;
        };
        for ((transport, fault), complaint) in ["mmio", "pci"].iter().zip(faults).zip(complaints) {
            let mut jobs = transcript.jobs.iter();
            let job = jobs
                .find(|job| job.transport == *transport)
                .expect("reported");
            match &job.outcome {
                Ok(_) => assert_eq!(fault, Fault::None),
                Err(reason) => {
                    assert!(
                        fault != Fault::None && reason.contains(complaint),
                        "{fault:?}: {reason}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_disk_that_ignores_requests_fails_their_cases() {
    let faults = [Fault::DiscardIgnored, Fault::ZeroesIgnored];
    let Some(transcript) = transcript(faults, Task::Conformance) else {
        return;
    };
    let report = ConformanceReport::new(transcript, &disks::NAMES);
    let failed = report.cases.iter().filter(|case| !case.passed);
    let failed: Vec<String> = failed
        .map(|case| format!("{} {}", case.transport, case.case))
        .collect();
    let failing = [
        "mmio discard",
        "pci write-zeroes",
        "pci secure-erase-or-refusal",
    ];
    assert_eq!(failed, failing, "{report}");
    assert!(report.passed > 120, "{report}");
}

#[test]
fn every_byte_is_right_without_eventfds() {
    let disks = [("mmio", TransportKind::Mmio), ("pci", TransportKind::Pci)];
    let disks = disks.map(|(name, transport)| DiskConfig {
        notifications: Notifications::Exits,
        ..disk(name, transport, RamDisk::new(64 << 11))
    });
    let Some(transcript) = run(disks, Task::Job) else {
        return;
    };
    assert_eq!(transcript.jobs.len(), 2, "{}", transcript.last_line);
    for job in transcript.jobs {
        let outcome = job.outcome.expect("every byte is as it was written");
        let exits: u64 = job.measured.expect("counted").exits.iter().sum();
        assert!(exits >= outcome.counts.doorbells && outcome.counts.interrupts > 0);
    }
}
