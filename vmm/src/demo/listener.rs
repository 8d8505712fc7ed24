//! Gathers what the guest reports, passes on what it says to people, and ends a run that has gone silent.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::contract::{Line, Outcome};
use super::recorder::{Event, Measured};
use crate::vm::control::{Control, Ended};

/// Longest silence of a guest. Its whole job takes a second or so; a loaded machine gets many times that.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// One transport's job.
#[derive(Debug)]
pub struct Job {
    /// The transport.
    pub transport: String,
    /// What the guest reports, or why it failed.
    pub outcome: Result<Outcome, String>,
    /// What the VMM counted, if the job began.
    pub measured: Option<Measured>,
}

/// All that the guest reported.
#[derive(Debug, Default)]
pub struct Transcript {
    /// The jobs that ended or failed.
    pub jobs: Vec<Job>,
    /// The last line of all.
    pub last_line: String,
    /// The run was ended for the guest's silence.
    pub stalled: bool,
}

/// A thread that hears the guest out.
pub struct Listener(JoinHandle<Transcript>);

impl Listener {
    /// Listens to `events` until their sender is gone. After [`PATIENCE`] without one the run of `control` is
    /// ended.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn start(
        events: Receiver<Event>,
        control: Arc<Control>,
        mut say: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<Self> {
        let listen = move || {
            let mut transcript = Transcript::default();
            loop {
                match events.recv_timeout(PATIENCE) {
                    Ok(event) => transcript.take(event, &mut say),
                    Err(RecvTimeoutError::Timeout) => {
                        transcript.stalled = true;
                        control.end(Ended::Quit);
                        return transcript;
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

    /// What was heard. The VM must be gone: until then it may say more.
    pub fn finish(self) -> Transcript {
        // Its panic has been printed; then there is nothing to report.
        self.0.join().unwrap_or_default()
    }
}

impl Transcript {
    fn take(&mut self, Event { line, measured }: Event, say: &mut impl FnMut(&str)) {
        let job = match Line::parse(&line) {
            Some(Line::End(transport, outcome)) => Some((transport, Ok(outcome))),
            Some(Line::Fail(transport, reason)) => Some((transport, Err(reason.to_owned()))),
            Some(Line::Begin(_) | Line::Off) => None,
            None => {
                say(&line);
                None
            }
        };
        if let Some((transport, outcome)) = job {
            self.jobs.push(Job {
                transport: transport.to_owned(),
                outcome,
                measured,
            });
        }
        self.last_line = line;
    }
}
