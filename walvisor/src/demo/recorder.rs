//! Receives the serial line's output, splits it into lines, and reads the counters when a job
//! begins and ends.
//!
//! It runs on the vCPU's thread, so it reads the counters at exactly the moment that the guest
//! marks with a byte.

use std::io::{self, Write};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use walvisor_vmm::disk::DiskInUse;
use walvisor_vmm::vm::exits::{ExitCounters, ExitReason};
use walvisor_vmm::vm::kvm_stats::KvmCounter;

use crate::disk::log_counters;
use crate::processor_time;
use walvisor_guest::contract::GuestMessage;

/// Longest line that is kept, in bytes; the rest of a longer line is dropped.
const LONGEST_LINE: usize = 512;

/// The sources of the counts.
pub struct CountSources {
    /// Exits of each vCPU.
    pub exits: Vec<Arc<ExitCounters>>,
    /// All exits of the vCPU, if they are wanted and KVM reports them.
    pub kvm_exits: Option<KvmCounter>,
    /// Whether the processor time of the whole machine is wanted.
    pub host_cpu: bool,
    /// The disks, each with the guest's name for its transport.
    pub disks: Vec<DiskInUse>,
}

impl CountSources {
    fn counts(&self, transport: &str) -> Option<Counts> {
        let disk = self.disks.iter().find(|disk| disk.name == transport)?;
        let device = disk.metrics.counts();
        // Only the console uses ports, and its exits are not part of the job.
        let exits = ExitReason::ALL.map(|reason| match reason {
            ExitReason::PortWrite => 0,
            reason => self.exits.iter().map(|vcpu| vcpu.get(reason)).sum(),
        });
        // This code runs on the thread of the one vCPU.
        let vcpu = processor_time::of_this_thread();
        Some(Counts {
            at: Instant::now(),
            cpu: processor_time::of_this_process().saturating_sub(vcpu),
            host_cpu: self.host_cpu.then(processor_time::of_host).flatten(),
            exits,
            kvm_exits: self.kvm_exits.as_ref().and_then(KvmCounter::get),
            requests: device.requests,
            syncs: log_counters(&*disk.backend).unwrap_or_default().syncs,
        })
    }
}

/// Counts at one moment.
#[derive(Clone, Copy)]
struct Counts {
    at: Instant,
    cpu: Duration,
    host_cpu: Option<Duration>,
    exits: [u64; ExitReason::ALL.len()],
    kvm_exits: Option<u64>,
    requests: u64,
    syncs: u64,
}

/// The VMM's counts during a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// Exits to user space, by reason in the order of [`ExitReason::ALL`].
    pub exits: [u64; ExitReason::ALL.len()],
    /// All exits, including the console's and those that KVM handled itself, where KVM reports
    /// them.
    pub kvm_exits: Option<u64>,
    /// Requests that the device took.
    pub requests: u64,
    /// Syncs of the log.
    pub syncs: u64,
    /// The duration of the job.
    pub time: Duration,
    /// Processor time of all threads of the process except the vCPU's.
    pub cpu: Duration,
    /// Processor time of the whole machine, where it can be read.
    pub host_cpu: Option<Duration>,
}

/// A line, and the counts of the job that ended just before it.
pub struct Event {
    /// The line, without its end.
    pub line: String,
    /// The counts, if it follows a job.
    pub measured: Option<Measurement>,
}

/// A writer that sends its output to a listener, line by line.
pub struct Recorder {
    sources: Arc<OnceLock<CountSources>>,
    events: Sender<Event>,
    line: Vec<u8>,
    job: Option<(String, Counts)>,
    measured: Option<Measurement>,
}

impl Recorder {
    /// A recorder that sends events to `events`. It reads the counts of `sources`, which must be
    /// set before the guest runs.
    pub fn new(sources: Arc<OnceLock<CountSources>>, events: Sender<Event>) -> Self {
        Self {
            sources,
            events,
            line: Vec::new(),
            job: None,
            measured: None,
        }
    }

    fn counts(&self, transport: &str) -> Option<Counts> {
        self.sources.get()?.counts(transport)
    }

    fn byte(&mut self, byte: u8) {
        if let Some((transport, before)) = self.job.take() {
            self.measured = self.counts(&transport).map(|after| Measurement {
                exits: std::array::from_fn(|reason| after.exits[reason] - before.exits[reason]),
                kvm_exits: after
                    .kvm_exits
                    .zip(before.kvm_exits)
                    .map(|(after, before)| after.saturating_sub(before)),
                requests: after.requests - before.requests,
                syncs: after.syncs - before.syncs,
                time: after.at - before.at,
                cpu: after.cpu.saturating_sub(before.cpu),
                host_cpu: after
                    .host_cpu
                    .zip(before.host_cpu)
                    .map(|(after, before)| after - before),
            });
        }
        if byte != b'\n' {
            if self.line.len() < LONGEST_LINE {
                self.line.push(byte);
            }
            return;
        }
        let line = String::from_utf8_lossy(&self.line).into_owned();
        self.line.clear();
        let begins = match GuestMessage::parse(&line) {
            Some(GuestMessage::Begin(transport)) => Some(transport.to_owned()),
            _ => None,
        };
        // The listener may be gone if the run is being abandoned.
        let _ = self.events.send(Event {
            line,
            measured: self.measured.take(),
        });
        // The counts are read last, because sending the event takes time that is not part of the
        // job.
        self.job = begins.and_then(|transport| {
            let counts = self.counts(&transport)?;
            Some((transport, counts))
        });
    }
}

impl Write for Recorder {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        bytes.iter().for_each(|&byte| self.byte(byte));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;

    use walvisor_devices::backend::ram::RamDisk;
    use walvisor_devices::block::BlockMetrics;

    use super::*;
    use crate::control_socket::fixture::disk;

    #[test]
    fn only_what_happens_between_begin_and_the_next_line_is_measured() {
        let (exits, metrics) = (
            Arc::new(ExitCounters::default()),
            Arc::new(BlockMetrics::default()),
        );
        let disk = DiskInUse {
            metrics: metrics.clone(),
            ..disk("pci", RamDisk::new(8))
        };
        let sources = CountSources {
            exits: vec![exits.clone()],
            kvm_exits: None,
            host_cpu: true,
            disks: vec![disk],
        };
        let (events, received) = mpsc::channel();
        let mut recorder = Recorder::new(Arc::new(OnceLock::from(sources)), events);
        let act = |times| {
            for _ in 0..times {
                exits.count(ExitReason::MmioRead);
                exits.count(ExitReason::PortWrite);
                metrics.requests.fetch_add(2, Ordering::Relaxed);
            }
        };
        let mut write = |text: &str| recorder.write_all(text.as_bytes()).unwrap();
        act(100);
        write("found\n@begin pci");
        act(10);
        write("\n");
        act(3);
        write("@");
        act(1000);
        write("end pci 6 1 1 1 1 1 1\nbye\n@begin other\n@off\n");
        drop(recorder);
        let counted: Vec<_> = received
            .iter()
            .map(|event| {
                (
                    event.line,
                    event
                        .measured
                        .map(|counts| (counts.exits.iter().sum::<u64>(), counts.requests)),
                )
            })
            .collect();
        let expected = [
            ("found", None),
            ("@begin pci", None),
            ("@end pci 6 1 1 1 1 1 1", Some((3, 6))),
            ("bye", None),
            ("@begin other", None),
            ("@off", None),
        ];
        assert_eq!(
            counted,
            expected.map(|(line, counts)| (line.to_owned(), counts))
        );
    }

    #[test]
    fn a_line_without_end_takes_bounded_memory() {
        let (events, received) = mpsc::channel();
        let mut recorder = Recorder::new(Arc::default(), events);
        recorder.write_all(&[b'x'; 10_000]).unwrap();
        recorder.write_all(b"\n").unwrap();
        assert_eq!(received.recv().unwrap().line.len(), LONGEST_LINE);
    }
}
