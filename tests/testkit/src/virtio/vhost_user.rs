//! Registers as a vhost-user front-end has them. This driver keeps the state that the protocol does
//! not carry.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{DRIVER_OK, FEATURES_OK, Memory, NEEDS_RESET, Registers};
use crate::PATIENCE;
use crate::vhost_user::*;

const PROTOCOL_FEATURES: u64 = 1 << 30;
/// MQ, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13;

/// One queue's descriptors.
struct Queue {
    kick: EventFd,
    call: EventFd,
    error: EventFd,
}

/// The owner of the device behind the socket, if it is in this process.
pub trait DeviceOwner {
    /// The disk has another size.
    fn capacity_changed(&self) {}
    /// Pauses the device.
    fn pause(&self) {}
    /// Lets it go on.
    fn resume(&self) {}
    /// Switches the write cache, and returns whether it is on.
    fn set_write_cache(&self, on: bool) -> bool {
        on
    }
}

/// Another process owns the device.
impl DeviceOwner for () {}

/// A vhost-user front-end.
pub struct VhostUserRegisters<O = ()> {
    front_end: FrontEnd,
    features: u64,
    status: u8,
    queues: Vec<Queue>,
    broken: bool,
    errors: u64,
    seg_max: u64,
    /// The channel on which the back-end reports a changed configuration.
    from_back_end: UnixStream,
    /// After the connection, because the front-end must be dropped first.
    owner: O,
}

impl<O: DeviceOwner> VhostUserRegisters<O> {
    /// Connects to the device at `socket`. `seg_max`: the offset of that field in its configuration
    /// space.
    #[must_use]
    pub fn connect(socket: &Path, memory: &Memory, seg_max: u64, owner: O) -> Self {
        let (from_back_end, to_front_end) = UnixStream::pair().expect("a channel");
        from_back_end
            .set_read_timeout(Some(PATIENCE))
            .expect("a timeout");
        let mut driver = Self {
            front_end: FrontEnd::connect(socket),
            features: 0,
            status: 0,
            queues: Vec::new(),
            broken: false,
            errors: 0,
            seg_max,
            from_back_end,
            owner,
        };
        driver.front_end.fields(SET_PROTOCOL_FEATURES, &[PROTOCOL]);
        driver
            .front_end
            .tell(SET_BACKEND_REQ_FD, &[], &[to_front_end.as_fd()]);
        let count = driver.front_end.ask(GET_QUEUE_NUM, &[]);
        driver.queues = (0..u64::from_ne_bytes(count[..].try_into().expect("8 bytes")))
            .map(|_| Queue {
                kick: event(),
                call: event(),
                error: event(),
            })
            .collect();
        let mut table = vec![memory.num_regions() as u64];
        let mut files = Vec::new();
        for region in memory.iter() {
            let (start, file) = (region.start_addr().0, region.file_offset().expect("a file"));
            table.extend([start, region.len(), start, file.start()]);
            files.push(file.arc().as_fd());
        }
        driver
            .front_end
            .tell(SET_MEM_TABLE, &payload(&table), &files);
        driver
    }

    /// Gives the back-end an area in which it records the chains in flight, of queues with up to
    /// `size` descriptors. The front-end then outlives the back-end: completed writes must too.
    pub fn track_in_flight(&mut self, size: u16) {
        let queues = self.queues.len() as u64;
        let bytes = queues * (16 + u64::from(size) * 16).next_multiple_of(64);
        let area = memory(bytes);
        let sizes = queues | u64::from(size) << 16;
        let payload = payload(&[bytes, 0, sizes]);
        self.front_end
            .tell(SET_INFLIGHT_FD, &payload, &[area.as_fd()]);
    }

    fn tell(&mut self, request: u32, values: &[u64]) {
        self.front_end.tell(request, &payload(values), &[]);
    }

    fn look_at_errors(&mut self) {
        let broken = self
            .queues
            .iter()
            .filter(|queue| queue.error.read().is_ok());
        let errors = broken.count() as u64;
        self.broken |= errors > 0;
        self.errors += errors;
    }
}

fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK).expect("an eventfd")
}

impl<O: DeviceOwner> Registers for VhostUserRegisters<O> {
    fn device_features(&mut self) -> u64 {
        let features = self.front_end.ask(GET_FEATURES, &[]);
        u64::from_ne_bytes(features[..].try_into().expect("8 bytes")) & !PROTOCOL_FEATURES
    }

    fn set_driver_features(&mut self, features: u64) {
        self.features = features;
    }

    fn status(&mut self) -> u8 {
        self.look_at_errors();
        self.status | if self.broken { NEEDS_RESET } else { 0 }
    }

    fn set_status(&mut self, status: u8) {
        if status == 0 {
            self.front_end.tell(RESET_DEVICE, &[], &[]);
            self.look_at_errors();
            (self.status, self.broken, self.errors) = (0, false, 0);
            return;
        }
        let new = status & !self.status;
        self.status |= status;
        if new & FEATURES_OK != 0 {
            self.tell(SET_FEATURES, &[self.features | PROTOCOL_FEATURES]);
        }
        if new & DRIVER_OK != 0 {
            for queue in 0..self.queues.len() {
                self.tell(SET_VRING_ENABLE, &[pair(queue as u32, 1)]);
                // A ring signals when it starts, because chains may have been used before.
                let _ = self.queues[queue].call.read();
            }
        }
    }

    fn generation(&mut self) -> u32 {
        0
    }

    fn read_config(&mut self, offset: u64, data: &mut [u8]) {
        let config = self.front_end.config(offset as u32, data.len() as u32);
        data.copy_from_slice(&config);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let header = config_header(offset as u32, data.len() as u32);
        let payload = [&header, data].concat();
        self.front_end.tell(SET_CONFIG, &payload, &[]);
    }

    fn queue_max(&mut self, queue: u16) -> u16 {
        if usize::from(queue) >= self.queues.len() {
            return 0;
        }
        // The protocol does not report the size. seg_max implies it, as a request also has a header
        // and a status.
        let mut bytes = [0; 4];
        self.read_config(self.seg_max, &mut bytes);
        let most = u32::from_le_bytes(bytes) as u16 + 2;
        1 << most.ilog2()
    }

    fn set_queue(&mut self, queue: u16, size: u16, addresses: [u64; 3]) {
        let index = u64::from(queue);
        let [descriptors, available, used] = addresses;
        self.tell(SET_VRING_NUM, &[index | u64::from(size) << 32]);
        self.tell(SET_VRING_BASE, &[index]);
        self.tell(SET_VRING_ADDR, &[index, descriptors, used, available, 0]);
        let Queue { kick, call, error } = &self.queues[usize::from(queue)];
        let fds = [call, error, kick].map(EventFd::as_raw_fd);
        let requests = [SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK];
        for (request, fd) in requests.into_iter().zip(fds) {
            // SAFETY: the queue's descriptors are open as long as the driver.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            self.front_end.tell(request, &payload(&[index]), &[fd]);
        }
    }

    fn notify(&mut self, queue: u16) {
        self.queues[usize::from(queue)]
            .kick
            .write(1)
            .expect("a doorbell");
    }

    fn reset_queue(&mut self, _queue: u16) {
        // The front-end would have to do it: RING_RESET is not offered here.
    }

    fn queue_resetting(&mut self, _queue: u16) -> bool {
        false
    }

    fn enable_queue(&mut self, queue: u16) {
        self.tell(SET_VRING_ENABLE, &[pair(queue.into(), 1)]);
    }

    fn disable_queue(&mut self, queue: u16) {
        self.tell(SET_VRING_ENABLE, &[queue.into()]);
    }

    fn queue_enabled(&mut self, _queue: u16) -> bool {
        self.status & DRIVER_OK != 0
    }

    fn doorbells(&self) -> Vec<EventFd> {
        let copy = |queue: &Queue| queue.kick.try_clone().expect("an eventfd");
        self.queues.iter().map(copy).collect()
    }

    fn take_queue_interrupts(&mut self, queue: u16) -> u64 {
        self.queues[usize::from(queue)].call.read().unwrap_or(0)
    }

    fn take_config_interrupts(&mut self) -> u64 {
        self.look_at_errors();
        std::mem::take(&mut self.errors)
    }

    fn capacity_changed(&mut self) {
        self.owner.capacity_changed();
        let mut message = [0; 12];
        self.from_back_end
            .read_exact(&mut message)
            .expect("the back-end tells");
        let words = [2_u32, 1, 0].map(u32::to_ne_bytes);
        assert_eq!(message, *words.as_flattened());
    }

    fn pause(&mut self) {
        self.owner.pause();
    }

    fn resume(&mut self) {
        self.owner.resume();
    }

    fn set_write_cache(&mut self, on: bool) -> bool {
        self.owner.set_write_cache(on)
    }
}
