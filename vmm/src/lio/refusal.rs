//! Answers in place of a handler that is gone, while its disk is taken away.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use walvisor_devices::tcmu::{Entry, Response, Ring};

use super::target::Result;
use super::uio::Uio;

/// NOT READY, MEDIUM NOT PRESENT in the fixed format (SPC-4, 4.5.3): what makes a disk driver give up at once.
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
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Refusal {
    /// Begins with it.
    pub(super) fn start(uio: Uio) -> Result<io::Result<Self>> {
        let ring = Ring::open(Arc::clone(&uio.memory))?;
        Ok(Self::spawn(ring, uio))
    }

    fn spawn(ring: Ring, uio: Uio) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("tcmu-refusal".into())
            .spawn(move || {
                if let Err(error) = refuse(ring, &uio, &stopped) {
                    tracing::warn!("commands of a disk that goes are not answered: {error}");
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

fn refuse(mut ring: Ring, uio: &Uio, stop: &OwnedFd) -> io::Result<()> {
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
        let mut fds = [
            PollFd::new(&uio.device, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        poll(&mut fds, None)?;
        if !fds[1].revents().is_empty() {
            return Ok(());
        }
        rustix::io::read(&uio.device, &mut [0; 4])?;
    }
}

impl Drop for Refusal {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that refuses commands has panicked");
        }
    }
}
