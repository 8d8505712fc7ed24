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

/// The guest's transcript with `fault` in the MMIO disk and no fault in the PCI disk; `None`
/// without KVM.
fn transcript(fault: Fault, task: Task) -> Option<Transcript> {
    if let Err(error) = probe::open() {
        println!("skipped: {error}");
        return None;
    }
    let disk = |name: &str, transport, fault| DiskConfig {
        disk: OpenDisk {
            device: BlockConfig {
                queues: 2,
                queue_size: 64,
                serial: name.to_owned(),
                ..BlockConfig::default()
            },
            ..OpenDisk::new(name, Arc::new(FaultyDisk::new(fault)))
        },
        transport,
        notifications: Notifications::default(),
    };
    let disks = [
        disk("mmio", TransportKind::Mmio, fault),
        disk("pci", TransportKind::Pci, Fault::None),
    ];
    Some(run_guest(disks, task, Seccomp::Off, |_| ()).expect("the guest ends"))
}

/// The results of the two jobs.
fn outcomes(fault: Fault) -> Option<[Result<(), String>; 2]> {
    let transcript = transcript(fault, Task::Job)?;
    let outcome = |name| {
        let job = transcript
            .jobs
            .iter()
            .find(|job| job.transport == name)
            .expect("reported");
        job.outcome.as_ref().map(|_| ()).map_err(Clone::clone)
    };
    Some([outcome("mmio"), outcome("pci")])
}

#[test]
fn a_good_disk_passes() {
    let Some(outcomes) = outcomes(Fault::None) else {
        return;
    };
    assert_eq!(outcomes, [Ok(()), Ok(())]);
}

#[test]
fn every_fault_is_noticed_and_the_other_disk_passes() {
    for (fault, complaint) in [
        (Fault::FlippedBit, "block 1, byte 1234: expected "),
        (Fault::DiscardIgnored, "block 1"),
        (Fault::ZeroesIgnored, "block 3"),
        (Fault::LostWrite, "expected 0x"),
        (Fault::MisplacedWrite, "expected 0x"),
        (Fault::FlushFails, "FLUSH at sector 0 ended with status 1"),
    ] {
        let Some([mmio, pci]) = outcomes(fault) else {
            return;
        };
        let reason = mmio.expect_err("a fault");
        assert!(reason.contains(complaint), "{fault:?}: {reason}");
        assert_eq!(pci, Ok(()), "{fault:?}");
    }
}

#[test]
fn a_disk_that_ignores_requests_fails_their_cases() {
    for (fault, failing) in [
        (Fault::DiscardIgnored, &["mmio discard"][..]),
        (
            Fault::ZeroesIgnored,
            &["mmio write-zeroes", "mmio secure-erase-or-refusal"],
        ),
    ] {
        let Some(transcript) = transcript(fault, Task::Conformance) else {
            return;
        };
        let report = ConformanceReport::new(transcript, &disks::NAMES);
        let failed: Vec<String> = report
            .cases
            .iter()
            .filter(|case| !case.passed)
            .map(|case| format!("{} {}", case.transport, case.case))
            .collect();
        assert_eq!(failed, failing, "{fault:?}: {report}");
        assert!(report.passed > 120, "{report}");
    }
}

#[test]
fn every_byte_is_right_without_eventfds() {
    if let Err(error) = probe::open() {
        println!("skipped: {error}");
        return;
    }
    let disks =
        [("mmio", TransportKind::Mmio), ("pci", TransportKind::Pci)].map(|(name, transport)| {
            DiskConfig {
                disk: OpenDisk {
                    device: BlockConfig {
                        queues: 4,
                        queue_size: 64,
                        ..BlockConfig::default()
                    },
                    ..OpenDisk::new(name, Arc::new(RamDisk::new(64 << 11)))
                },
                transport,
                notifications: Notifications::Exits,
            }
        });
    let transcript = run_guest(disks, Task::Job, Seccomp::Off, |_| ()).expect("the guest ends");
    assert_eq!(transcript.jobs.len(), 2, "{}", transcript.last_line);
    for job in transcript.jobs {
        let outcome = job.outcome.expect("every byte is as it was written");
        let exits: u64 = job.measured.expect("counted").exits.iter().sum();
        assert!(exits >= outcome.counts.doorbells && outcome.counts.interrupts > 0);
    }
}
