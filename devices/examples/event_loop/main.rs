//! virtio-blk over a disk that the program serves in its own event loop, which takes the interrupts
//! too.
//!
//! ```text
//!   this program: one thread, one epoll                        walvisor-devices
//!   Driver ──registers, doorbell──▶ MmioTransport ──eventfd──▶ queue worker (a thread)
//!   loop ◀──REQUESTS── (token, Operation) ◀─────channel── Queue::submit ◀────────┘ ▲
//!    ├─ served from the program's own bytes ────── Completion, eventfd ────────────┤
//!    └◀─INTERRUPT── irq ◀──── data, status and used ring in guest memory ──────────┘
//! ```
//! In a VMM the register accesses come from vCPU threads. Here they are made in the loop, and none
//! may reset the device while a request is in flight: a reset waits until the backend has ended it,
//! which is up to the same loop.

#[path = "../embed/driver.rs"]
mod driver;

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::{error::Error, io};

use walvisor_devices::backend::{
    Backend, BackendQueue, Buffer, Capabilities, Completion, Failure, Operation, SECTOR_SIZE,
    descriptor,
};
use walvisor_devices::block::{BlockConfig, VirtioBlock};
use walvisor_devices::transport::MmioTransport;
use walvisor_devices::vm_memory::{GuestAddress, GuestMemoryMmap};
use walvisor_devices::vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use walvisor_devices::vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const SECTORS: u64 = 2048;
// Sources of events.
const REQUESTS: u64 = 0;
const INTERRUPT: u64 = 1;

/// A request on its way to the loop: its token, what it asks for, and whom to tell how it ended.
type QueuedOperation = (u64, Operation, Arc<CompletionList>);

struct CompletionList {
    completions: Mutex<Vec<Completion>>,
    event: EventFd,
}

/// The disk as the device sees it: each request goes to the loop.
#[derive(Clone)]
struct Disk {
    jobs: mpsc::Sender<QueuedOperation>,
    wake: Arc<EventFd>,
}

impl Backend for Disk {
    fn sectors(&self) -> u64 {
        SECTORS
    }

    /// What stands here is what the driver is offered: no DISCARD, no WRITE_ZEROES, and no FLUSH,
    /// because there is no volatile cache before this disk.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn write_cache(&self) -> bool {
        false
    }

    fn set_write_cache(&self, _on: bool) {}

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        let ended = CompletionList {
            completions: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK)?,
        };
        Ok(Box::new(Queue(self.clone(), Arc::new(ended))))
    }
}

/// One queue's way to the disk, and what ended. It belongs to the queue's worker.
struct Queue(Disk, Arc<CompletionList>);

impl BackendQueue for Queue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let job = (token, operation, Arc::clone(&self.1));
        self.0.jobs.send(job).expect("the loop outlives the device");
    }

    fn kick(&mut self) {
        self.0.wake.write(1).expect("an eventfd that is read often");
    }

    fn event(&self) -> BorrowedFd<'_> {
        descriptor(&self.1.event)
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        let _ = self.1.event.read();
        done.append(&mut self.1.completions.lock().expect("nobody panics"));
    }
}

/// The program's part of a request. The device has checked its range against the capacity.
fn serve(disk: &mut [u8], operation: Operation) -> Result<Option<Buffer>, Failure> {
    let at = |sector| (sector * SECTOR_SIZE) as usize;
    match operation {
        Operation::Read { sector, sectors } => Ok(Some(
            disk[at(sector)..at(sector + u64::from(sectors))].into(),
        )),
        Operation::Write { sector, data } => {
            disk[at(sector)..][..data.len()].copy_from_slice(&data);
            Ok(None)
        }
        // Never offered, so never asked for.
        _ => Err(Failure::Io),
    }
}

/// Serves one device until its driver is through with it.
fn main() -> Result<(), Box<dyn Error>> {
    let (sender, jobs) = mpsc::channel::<QueuedOperation>();
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
    let irq = EventFd::new(EFD_NONBLOCK)?;
    let disk = Disk {
        jobs: sender,
        wake: Arc::clone(&wake),
    };
    let device = VirtioBlock::new(Arc::new(disk), BlockConfig::default())?;
    let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?);
    let transport = MmioTransport::new(device, Arc::clone(&memory), irq.try_clone()?);
    let mut driver = driver::Driver::start(transport, memory)?;

    let mut bytes = vec![0; (SECTORS * SECTOR_SIZE) as usize];
    let epoll = Epoll::new()?;
    for (event, source) in [(&*wake, REQUESTS), (&irq, INTERRUPT)] {
        let event_set = EpollEvent::new(EventSet::IN, source);
        epoll.ctl(ControlOperation::Add, event.as_raw_fd(), event_set)?;
    }
    let mut events = [EpollEvent::default(); 2];
    while driver.has_request {
        let ready = epoll.wait(-1, &mut events)?;
        for event in &events[..ready] {
            if event.data() == REQUESTS {
                wake.read()?;
                for (token, operation, ended) in jobs.try_iter() {
                    let result = serve(&mut bytes, operation);
                    let mut completions = ended.completions.lock().expect("nobody panics");
                    completions.push(Completion { token, result });
                    ended.event.write(1)?;
                }
            } else {
                irq.read()?;
                driver.interrupt()?;
            }
        }
    }
    Ok(())
}
