//! Tasks through io_uring: one system call submits all tasks of a turn, and completions are read without one.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, types};
use vmm_sys_util::eventfd::EventFd;

use super::shared::{Mover, Shared};
use super::task::{Step, Task};
use crate::medium::ring::Ring;

/// See the module's documentation.
pub(super) struct Uring {
    ring: Ring<Task>,
    shared: Arc<Shared>,
}

impl Uring {
    pub(super) fn new(event: &EventFd, shared: &Arc<Shared>) -> io::Result<Self> {
        Ok(Self {
            ring: Ring::new(event)?,
            shared: Arc::clone(shared),
        })
    }

    /// Starts the next step of a task.
    fn start(&mut self, mut task: Task) {
        let fd = types::Fd(self.shared.raw_fd());
        let entry = match &mut task.step {
            Step::Read {
                offset,
                buffer,
                done,
            } => {
                let rest = &mut buffer[*done..];
                opcode::Read::new(fd, rest.as_mut_ptr(), rest.len() as u32)
                    .offset(*offset + *done as u64)
                    .build()
            }
            Step::Write {
                offset,
                buffer,
                done,
            } => {
                let rest = &buffer[*done..];
                opcode::Write::new(fd, rest.as_ptr(), rest.len() as u32)
                    .offset(*offset + *done as u64)
                    .build()
            }
            Step::Zero { offset, len, unmap } => {
                let mode = Step::zero_mode(*unmap).bits() as i32;
                opcode::Fallocate::new(fd, *len)
                    .offset(*offset)
                    .mode(mode)
                    .build()
            }
            Step::Fill {
                offset,
                len,
                zeroes,
            } => {
                let part = Step::filling(zeroes, *len);
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

impl Mover for Uring {
    fn submit(&mut self, task: Task) {
        self.start(task);
    }

    fn enter(&mut self) {
        self.ring.enter();
    }

    fn poll(&mut self, moved: &mut Vec<(Task, io::Result<()>)>) {
        while let Some((mut task, bytes)) = self.ring.next_ended() {
            match task.advance(bytes) {
                None => self.start(task),
                Some(result) => moved.push((task, result)),
            }
        }
    }
}
