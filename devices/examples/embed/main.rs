//! virtio-blk in a program of your own: the program's event loop serves the disk and takes the interrupts.
//!
//! ```text
//!   this program: one thread, one epoll                        walvisor-devices
//!   Driver ──registers, doorbell──▶ MmioTransport ──eventfd──▶ queue worker (a thread)
//!   loop ◀──REQUESTS── Job { token, Operation } ◀──channel── LoopQueue::submit ◀─┘ ▲
//!    ├─ served from a map that needs no lock ────── Completion, eventfd ───────────┤
//!    └◀─INTERRUPT── irq ◀──── data, status and used ring in guest memory ──────────┘
//! ```
//! In a VMM the register accesses come from vCPU threads. Here they are made in the loop, and none may reset the device
//! while a request is in flight: a reset waits until the backend has ended it, which is up to the same loop.

mod driver;

use std::collections::HashMap;
use std::error::Error;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};

use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::backend::{
    Backend, BackendQueue, Buffer, Capabilities, Completion, Failure, Operation, SECTOR_SIZE,
};
use walvisor_devices::block::{BlockConfig, VirtioBlock};
use walvisor_devices::transport::MmioTransport;

use driver::Driver;

/// Sources of events.
const REQUESTS: u64 = 0;
const INTERRUPT: u64 = 1;

/// A request on its way to the loop, and whom to tell how it ended.
struct Job {
    token: u64,
    operation: Operation,
    queue: Arc<Ended>,
}

struct Ended {
    completions: Mutex<Vec<Completion>>,
    event: OwnedFd,
}

/// The backend, and each queue's way to it: they hand requests to the loop.
#[derive(Clone)]
struct LoopDisk {
    jobs: mpsc::Sender<Job>,
    requests: Arc<OwnedFd>,
}

struct LoopQueue {
    disk: LoopDisk,
    ended: Arc<Ended>,
}

impl Backend for LoopDisk {
    fn sectors(&self) -> u64 {
        2048
    }

    /// What stands here is what the driver is offered: no DISCARD, no WRITE_ZEROES, and no FLUSH, because there is no
    /// volatile cache before this disk.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn write_cache(&self) -> bool {
        false
    }

    fn set_write_cache(&self, _on: bool) {}

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        let ended = Ended {
            completions: Mutex::default(),
            event: new_event()?,
        };
        Ok(Box::new(LoopQueue {
            disk: self.clone(),
            ended: Arc::new(ended),
        }))
    }
}

impl BackendQueue for LoopQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let job = Job {
            token,
            operation,
            queue: Arc::clone(&self.ended),
        };
        // Each request must end, so one that nobody takes any more ends here.
        if let Err(mpsc::SendError(job)) = self.disk.jobs.send(job) {
            job.queue.push(job.token, Err(Failure::Io));
        }
    }

    fn kick(&mut self) {
        signal(&self.disk.requests);
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.ended.event.as_fd()
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        clear(&self.ended.event);
        done.append(&mut self.ended.completions.lock().expect("nobody panics"));
    }
}

impl Ended {
    fn push(&self, token: u64, result: Result<Option<Buffer>, Failure>) {
        let mut completions = self.completions.lock().expect("nobody panics");
        completions.push(Completion { token, result });
        signal(&self.event);
    }
}

fn new_event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn signal(event: &OwnedFd) {
    // A counter that is full is readable too.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

fn clear(event: &OwnedFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}

/// The loop's own disk. The device has checked each range against the capacity.
#[derive(Default)]
struct Sectors(HashMap<u64, [u8; SECTOR_SIZE as usize]>);

impl Sectors {
    fn serve(&mut self, operation: &Operation) -> Result<Option<Buffer>, Failure> {
        match operation {
            Operation::Read { sector, sectors } => {
                let mut data = Buffer::zeroed(*sectors as usize * SECTOR_SIZE as usize);
                let (chunks, _) = data.as_chunks_mut();
                for (sector, chunk) in (*sector..).zip(chunks) {
                    *chunk = *self.0.get(&sector).unwrap_or(&[0; SECTOR_SIZE as usize]);
                }
                Ok(Some(data))
            }
            Operation::Write { sector, data } => {
                let (chunks, _) = data.as_chunks();
                self.0.extend((*sector..).zip(chunks.iter().copied()));
                Ok(None)
            }
            Operation::Flush => Ok(None),
            // Never offered, so never asked for.
            Operation::Discard { .. } | Operation::WriteZeroes { .. } => Err(Failure::Io),
        }
    }
}

/// Serves one device until its driver is through with it.
fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let requests = Arc::new(new_event()?);
    let disk = LoopDisk {
        jobs: sender,
        requests: Arc::clone(&requests),
    };
    let device = VirtioBlock::new(Arc::new(disk), BlockConfig::default())?;
    let metrics = device.metrics();
    let irq = EventFd::new(EFD_NONBLOCK)?;
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
    let memory = Arc::new(memory);
    let transport = MmioTransport::new(device, Arc::clone(&memory), irq.try_clone()?);

    let epoll = Epoll::new()?;
    for (fd, source) in [
        (requests.as_raw_fd(), REQUESTS),
        (irq.as_raw_fd(), INTERRUPT),
    ] {
        let event = EpollEvent::new(EventSet::IN, source);
        epoll.ctl(ControlOperation::Add, fd, event)?;
    }

    let mut sectors = Sectors::default();
    let mut driver = Driver::start(transport, memory)?;
    driver.next_request(out)?;
    let mut events = [EpollEvent::default(); 2];
    loop {
        let ready = epoll.wait(-1, &mut events)?;
        for event in &events[..ready] {
            if event.data() == REQUESTS {
                clear(&requests);
                for job in jobs.try_iter() {
                    writeln!(out, "loop: {}", describe(&job.operation))?;
                    job.queue.push(job.token, sectors.serve(&job.operation));
                }
            } else {
                irq.read()?;
                driver.take_answers(out)?;
                if !driver.next_request(out)? {
                    let counts = metrics.counts();
                    writeln!(out, "device: {} requests", counts.requests)?;
                    return Ok(());
                }
            }
        }
    }
}

fn describe(operation: &Operation) -> String {
    match operation {
        Operation::Read { sector, sectors } => format!("read {sectors} at {sector}"),
        Operation::Write { sector, data } => format!("write {} bytes at {sector}", data.len()),
        other => format!("{other:?}"),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut io::stdout())
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_was_written_is_read_and_a_range_beyond_the_disk_is_refused() {
        let mut out = Vec::new();
        super::run(&mut out).expect("a run");
        let expected = "\
            driver: OUT at 7\n\
            loop: write 512 bytes at 7\n\
            driver: status 0, buffer \"stable means stable\"\n\
            driver: IN at 7\n\
            loop: read 1 at 7\n\
            driver: status 0, buffer \"stable means stable\"\n\
            driver: IN at 2048\n\
            driver: status 1, buffer \"\"\n\
            device: 3 requests\n";
        assert_eq!(String::from_utf8_lossy(&out), expected);
    }
}
