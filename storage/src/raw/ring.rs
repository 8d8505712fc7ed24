//! Tasks through io_uring: one system call submits all tasks of a turn, and completions are read without one.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use slab::Slab;
use vmm_sys_util::eventfd::EventFd;

use super::shared::{Mover, Shared};
use super::task::{Step, Task};

/// Submission entries; the kernel gives twice as many completion entries.
const ENTRIES: u32 = 256;
/// The most entries in flight, so that the completion queue never overflows.
const IN_FLIGHT: usize = 2 * ENTRIES as usize;

/// Whether the kernel gives a ring with the operations used here (Linux 5.6).
pub(super) fn probe() -> io::Result<()> {
    let ring = IoUring::new(4)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::Fallocate::CODE,
    ];
    match needed.iter().all(|&code| probe.is_supported(code)) {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this io_uring lacks an operation",
        )),
    }
}

/// See the module's documentation.
pub(super) struct Ring {
    ring: IoUring,
    shared: Arc<Shared>,
    /// By key, every task with an entry in `waiting`, in the submission queue or in the kernel.
    tasks: Slab<Task>,
    /// Entries that did not fit the submission queue.
    waiting: VecDeque<squeue::Entry>,
    ended: Vec<(u64, i32)>,
    /// Entries put into the submission queue and not completed.
    open: usize,
}

impl Ring {
    pub(super) fn new(event: &EventFd, shared: &Arc<Shared>) -> io::Result<Self> {
        // Linux 5.19: completions do not interrupt a running thread; its next system call takes them.
        let cooperative = IoUring::builder().setup_coop_taskrun().build(ENTRIES);
        let ring = cooperative.or_else(|_| IoUring::new(ENTRIES))?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(Self {
            ring,
            shared: Arc::clone(shared),
            tasks: Slab::new(),
            waiting: VecDeque::new(),
            ended: Vec::new(),
            open: 0,
        })
    }

    /// The entry for the next step of the task at `key`.
    fn entry(&mut self, key: usize) -> squeue::Entry {
        let fd = types::Fd(self.shared.raw_fd());
        let entry = match &mut self.tasks[key].step {
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
        entry.user_data(key as u64)
    }

    /// Starts the next step of the task at `key`.
    fn start(&mut self, key: usize) {
        let entry = self.entry(key);
        if !self.waiting.is_empty() || !self.push(&entry) {
            self.waiting.push_back(entry);
        }
    }

    /// Moves entries from `waiting` to the submission queue while there is room.
    fn fill(&mut self) {
        while let Some(entry) = self.waiting.pop_front() {
            if !self.push(&entry) {
                return self.waiting.push_front(entry);
            }
        }
    }

    /// Puts an entry into the submission queue, if there is room.
    fn push(&mut self, entry: &squeue::Entry) -> bool {
        let mut queue = self.ring.submission();
        if self.open >= IN_FLIGHT || queue.is_full() {
            return false;
        }
        // SAFETY: the buffer that the entry names is owned by a task in `tasks`, which is changed or removed only when
        // the entry's completion has come, and the descriptor by `shared`, which outlives the ring.
        unsafe { queue.push(entry).expect("room was checked") };
        self.open += 1;
        true
    }

    /// Takes the completed entries out of the ring; returns whether there were any.
    fn take_ended(&mut self) -> bool {
        let entries = self.ring.completion();
        let entries = entries.map(|entry| (entry.user_data(), entry.result()));
        self.ended.extend(entries);
        self.open -= self.ended.len();
        !self.ended.is_empty()
    }
}

impl Mover for Ring {
    fn submit(&mut self, task: Task) {
        let key = self.tasks.insert(task);
        self.start(key);
    }

    fn enter(&mut self) {
        self.fill();
        loop {
            if self.ring.submission().is_empty() {
                return;
            }
            match self.ring.submit() {
                Ok(_) => self.fill(),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is short of memory. With entries in flight, a completion makes `poll` try again. Without,
                // nothing would, so wait here.
                Err(_) if self.open > self.ring.submission().len() => return,
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        }
    }

    fn poll(&mut self, moved: &mut Vec<(Task, io::Result<()>)>) {
        while self.take_ended() {
            let mut ended = std::mem::take(&mut self.ended);
            for (key, result) in ended.drain(..) {
                let key = key as usize;
                let Some(task) = self.tasks.get_mut(key) else {
                    continue;
                };
                let bytes = usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
                match task.advance(bytes) {
                    None => self.start(key),
                    Some(result) => moved.push((self.tasks.remove(key), result)),
                }
            }
            self.ended = ended;
            self.enter();
        }
        if !self.ring.submission().is_empty() {
            self.enter();
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still use the buffers of submitted entries: wait for each. The others are never submitted.
        self.waiting.clear();
        loop {
            self.take_ended();
            self.ended.clear();
            if self.open == 0 {
                return;
            }
            if let Err(error) = self.ring.submit_and_wait(1)
                && error.raw_os_error() != Some(libc::EINTR)
            {
                // Leak rather than free memory that the kernel may use.
                tracing::error!("io_uring can't be drained: {error}");
                return std::mem::forget(std::mem::take(&mut self.tasks));
            }
        }
    }
}
