//! Collects the guest's reports, passes on its other messages, and ends the run if the guest goes
//! silent.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use walvisor_vmm::control::{RunControl, RunEnd};

use super::recorder::{Event, Measurement};
use walvisor_guest::contract::{GuestMessage, LoadResult, Outcome};

/// Longest time for which a guest neither says a line nor exits: it sleeps, or loops.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How many times as long a guest may take from one line to the next while it exits. One that polls
/// a device gets on, however slowly, on a machine whose processors are busy with something else.
const BUSY: u32 = 15;

/// One transport's job.
#[derive(Debug)]
pub struct TransportJob {
    /// The transport.
    pub transport: String,
    /// The guest's report, or why the job failed.
    pub outcome: Result<Outcome, String>,
    /// The VMM's counts, if the job began.
    pub measured: Option<Measurement>,
}

/// One case of the conformance task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// The transport.
    pub transport: String,
    /// The name of the case.
    pub name: String,
    /// The problem, if the case failed.
    pub problem: Option<String>,
}

/// The guest's whole output, parsed.
#[derive(Debug, Default)]
pub struct Transcript {
    /// The jobs that ended or failed.
    pub jobs: Vec<TransportJob>,
    /// The load, if it has ended, and the VMM's counts during it.
    pub load: Option<(LoadResult, Measurement)>,
    /// The cases, in the order in which the guest ran them.
    pub cases: Vec<Case>,
    /// The transports whose cases were all tried, with the number of cases.
    pub checked: Vec<(String, u32)>,
    /// The last line of the output.
    pub last_line: String,
    /// For how long the guest was silent, if the run was ended because of that.
    pub silence: Option<Duration>,
}

/// The thread that collects the guest's reports.
pub struct Listener(JoinHandle<Transcript>);

impl Listener {
    /// Listens to `events` until their sender is gone. Ends the run of `control` after `patience`
    /// without an event and without an exit, of which `exits` tells the number, or after many times
    /// as long without an event.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn start(
        events: Receiver<Event>,
        control: Arc<RunControl>,
        patience: Duration,
        mut exits: impl FnMut() -> u64 + Send + 'static,
        mut say: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<Self> {
        let listen = move || {
            let mut transcript = Transcript::default();
            let (mut silent, mut before) = (0, exits());
            loop {
                match events.recv_timeout(patience) {
                    Ok(event) => {
                        transcript.take(event, &mut say);
                        (silent, before) = (0, exits());
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        silent += 1;
                        let sleeps = std::mem::replace(&mut before, exits()) == before;
                        if sleeps || silent == BUSY {
                            transcript.silence = Some(patience * silent);
                            control.end(RunEnd::Quit);
                            return transcript;
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => return transcript,
                }
            }
        };
        std::thread::Builder::new()
            .name("demo-listener".into())
            .spawn(listen)
            .map(Self)
    }

    /// The collected reports. Drop the VM first, because it may send more.
    pub fn finish(self) -> Transcript {
        // If that thread panicked, which has been printed, the transcript is empty.
        self.0.join().unwrap_or_default()
    }
}

impl Transcript {
    fn take(&mut self, Event { line, measured }: Event, say: &mut impl FnMut(&str)) {
        let job = match GuestMessage::parse(&line) {
            Some(GuestMessage::End(transport, outcome)) => Some((transport, Ok(outcome))),
            Some(GuestMessage::Fail(transport, reason)) => {
                Some((transport, Err(reason.to_owned())))
            }
            Some(GuestMessage::Loaded(_, loaded)) => {
                self.load = measured.map(|measured| (loaded, measured));
                None
            }
            Some(GuestMessage::Case(transport, name, problem)) => {
                self.cases.push(Case {
                    transport: transport.to_owned(),
                    name: name.to_owned(),
                    problem: problem.map(str::to_owned),
                });
                None
            }
            Some(GuestMessage::Checked(transport, count)) => {
                self.checked.push((transport.to_owned(), count));
                None
            }
            Some(GuestMessage::Begin(_) | GuestMessage::Off) => None,
            None => {
                say(&line);
                None
            }
        };
        if let Some((transport, outcome)) = job {
            self.jobs.push(TransportJob {
                transport: transport.to_owned(),
                outcome,
                measured,
            });
        }
        self.last_line = line;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn jobs_are_gathered_and_other_lines_passed_on() {
        let (events, received) = mpsc::channel();
        let control = Arc::new(RunControl::new().unwrap());
        let said = Arc::new(Mutex::new(Vec::new()));
        let heard = said.clone();
        let say = move |line: &str| heard.lock().unwrap().push(line.to_owned());
        let listener = Listener::start(received, control.clone(), PATIENCE, || 0, say).unwrap();
        let measured = Measurement {
            exits: [1; 7],
            kvm_exits: Some(9),
            requests: 2,
            syncs: 3,
            time: Duration::from_micros(4),
            cpu: Duration::from_micros(5),
            host_cpu: None,
        };
        for (line, measured) in [
            ("hello", None),
            ("@begin mmio", None),
            ("@end mmio 2 1 1 1 4096 1 7", Some(measured)),
            ("@fail pci no virtio block device found", None),
            ("@case pci get-id", None),
            ("@case pci flush status (0x1)", None),
            ("@checked pci 2", None),
            ("@loaded mmio 2 1 1 1 4096 9 5 6 7 1", Some(measured)),
            ("@off", None),
        ] {
            events
                .send(Event {
                    line: line.to_owned(),
                    measured,
                })
                .unwrap();
        }
        drop(events);
        let transcript = listener.finish();
        assert_eq!(*said.lock().unwrap(), ["hello"]);
        assert!(transcript.silence.is_none() && control.end_reason().is_none());
        assert_eq!(transcript.last_line, "@off");
        assert_eq!(transcript.checked, [("pci".to_owned(), 2)]);
        let (load, counted) = transcript.load.unwrap();
        assert_eq!((load.ticks, load.p99, load.write_cache), (9, 6, true));
        assert_eq!(counted, measured);
        let problems: Vec<_> = transcript.cases.iter().map(|case| &case.problem).collect();
        assert_eq!(problems, [&None, &Some("status (0x1)".to_owned())]);
        let [mmio, pci] = &transcript.jobs[..] else {
            panic!("{:?}", transcript.jobs)
        };
        assert_eq!(mmio.outcome.as_ref().unwrap().counts.requests, 2);
        assert_eq!(mmio.measured, Some(measured));
        assert_eq!(
            pci.outcome.as_ref().unwrap_err(),
            "no virtio block device found"
        );
    }

    #[test]
    fn a_silent_guest_is_ended() {
        let patience = Duration::from_millis(2);
        // Without an exit at once, and later while it exits, or once it does not.
        for (exits, waits) in [(0, 1), (3, 3), (u64::MAX, BUSY)] {
            let (_events, received) = mpsc::channel();
            let control = Arc::new(RunControl::new().unwrap());
            let mut asked = 0;
            let count = move || {
                asked += 1;
                exits.min(asked)
            };
            let say = |_: &str| ();
            let listener = Listener::start(received, control.clone(), patience, count, say);
            let silence = listener.unwrap().finish().silence;
            assert_eq!(silence, Some(patience * waits), "{exits}");
            assert!(matches!(control.end_reason(), Some(RunEnd::Quit)));
        }
    }
}
