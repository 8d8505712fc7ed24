//! Tasks on io_uring: one system call submits all tasks of a turn, and completions are read without one.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, types};
use vmm_sys_util::eventfd::EventFd;

use super::shared::{RawShared, TaskRunner};
use super::task::{RawStep, RawTask};
use crate::medium::io_ring::IoRing;

/// See the module's documentation.
pub(super) struct UringRunner {
    ring: IoRing<RawTask>,
    shared: Arc<RawShared>,
}

impl UringRunner {
    pub(super) fn new(event: &EventFd, shared: &Arc<RawShared>) -> io::Result<Self> {
        Ok(Self {
            ring: IoRing::new(event)?,
            shared: Arc::clone(shared),
        })
    }

    /// Starts the next step of a task.
    fn start(&mut self, mut task: RawTask) {
        let fd = types::Fd(self.shared.raw_fd());
        let entry = match &mut task.step {
            RawStep::Read {
                offset,
                buffer,
                done,
            } => {
                let rest = &mut buffer[*done..];
                opcode::Read::new(fd, rest.as_mut_ptr(), rest.len() as u32)
                    .offset(*offset + *done as u64)
                    .build()
            }
            RawStep::Write {
                offset,
                buffer,
                done,
            } => {
                let rest = &buffer[*done..];
                opcode::Write::new(fd, rest.as_ptr(), rest.len() as u32)
                    .offset(*offset + *done as u64)
                    .build()
            }
            RawStep::Zero { offset, len, unmap } => {
                let mode = RawStep::zero_mode(*unmap).bits() as i32;
                opcode::Fallocate::new(fd, *len)
                    .offset(*offset)
                    .mode(mode)
                    .build()
            }
            RawStep::Fill {
                offset,
                len,
                zeroes,
            } => {
                let part = RawStep::fill_chunk(zeroes, *len);
                opcode::Write::new(fd, part.as_ptr(), part.len() as u32)
                    .offset(*offset)
                    .build()
            }
        };
        // SAFETY: the buffer that the entry names belongs to the task, behind a pointer. The file stays open until
        // `shared` is dropped, after the ring.
        unsafe { self.ring.submit(task, entry) };
    }
}

impl TaskRunner for UringRunner {
    fn submit(&mut self, task: RawTask) {
        self.start(task);
    }

    fn enter(&mut self) {
        self.ring.enter();
    }

    fn poll(&mut self, moved: &mut Vec<(RawTask, io::Result<()>)>) {
        while let Some((mut task, bytes)) = self.ring.next_ended() {
            match task.advance(bytes) {
                None => self.start(task),
                Some(result) => moved.push((task, result)),
            }
        }
    }
}
