//! Refuses commands in place of a dead handler, while its disk is being removed.

use std::io;
use std::sync::Arc;
use std::thread;

use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Threads, Waiter, WakeReason};
use walvisor_devices::tcmu::{CommandRing, Entry, Response};

use super::target::Result;
use super::uio::Uio;

/// NOT READY, MEDIUM NOT PRESENT in the fixed format (SPC-4, 4.5.3), which makes a disk driver give
/// up at once.
const GONE: [u8; 18] = {
    let mut sense = [0; 18];
    sense[0] = 0x70;
    sense[2] = 0x02;
    sense[7] = 10;
    sense[12] = 0x3a;
    sense
};
const CHECK_CONDITION: u8 = 2;

/// Refuses every command until it is dropped.
pub(super) struct Refusal {
    stop: Stop,
    _thread: Threads,
}

impl Refusal {
    /// Starts to refuse commands.
    pub(super) fn start(uio: Uio) -> Result<io::Result<Self>> {
        let ring = CommandRing::open(Arc::clone(&uio.memory))?;
        Ok(Self::spawn(ring, uio))
    }

    fn spawn(ring: CommandRing, uio: Uio) -> io::Result<Self> {
        let stop = Stop::new()?;
        let stopped = stop.clone();
        let mut threads = Threads::new("TCMU");
        let thread = thread::Builder::new().name("tcmu-refusal".into());
        threads.start(thread, move || {
            if let Err(error) = refuse(ring, &uio, &stopped) {
                tracing::warn!(
                    "commands to a disk that is being removed are not answered: {error}"
                );
            }
        })?;
        Ok(Self {
            stop,
            _thread: threads,
        })
    }
}

fn refuse(mut ring: CommandRing, uio: &Uio, stop: &Stop) -> io::Result<()> {
    let mut waiter = Waiter::new(&uio.device, stop)?;
    loop {
        while let Some(entry) = ring.take().map_err(io::Error::other)? {
            if let Entry::Command(command) = entry {
                let answer = Response {
                    status: CHECK_CONDITION,
                    sense: &GONE,
                    read: None,
                };
                ring.complete(command.ticket, &answer);
            }
        }
        if ring.publish() > 0 {
            rustix::io::write(&uio.device, &1_u32.to_ne_bytes())?;
            continue;
        }
        if waiter.wait(&uio.device, EventSet::IN, None)? == WakeReason::Stopped {
            return Ok(());
        }
        rustix::io::read(&uio.device, &mut [0; 4])?;
    }
}

impl Drop for Refusal {
    fn drop(&mut self) {
        self.stop.tell();
    }
}
