//! rust-vmm's front-end, on which Cloud Hypervisor is built, with the messages in Cloud
//! Hypervisor's order (`virtio-devices/src/vhost_user`). Cloud Hypervisor itself needs VMX or SVM,
//! which test machines often lack.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::message::{
    VHOST_USER_CONFIG_OFFSET, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
    VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_testkit::vhost_user::memory;
use walvisor_testkit::virtio::{Memory, Piece, Ring};

use super::daemon;
use crate::{MIB, create, metric, noise, test_dir};

const PATIENCE: Timespec = Timespec {
    tv_sec: 120,
    tv_nsec: 0,
};
/// Cloud Hypervisor's default queue size.
const QUEUE_SIZE: u16 = 128;
/// FLUSH, CONFIG_WCE, MQ, VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES.
const FEATURES: u64 = 1 << 9 | 1 << 11 | 1 << 12 | 1 << 32 | 1 << 30;
/// Length of the configuration space that Cloud Hypervisor reads.
const CONFIG: usize = 60;
/// Offset of the cache mode in the configuration space.
const WRITEBACK: u32 = 32;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;

// Guest memory of a queue: its rings, then for each slot a header with a status, and a page of
// data.
const QUEUE: u64 = 0x40000;
const HEADERS: u64 = 0x3000;
const DATA: u64 = 0x10000;
const PAGE: usize = 4096;
/// Memory that is plugged in later.
const PLUGGED: u64 = 1 << 32;

struct Queue {
    kick: EventFd,
    call: EventFd,
    ring: Ring,
    /// Where the status of each request in flight will be.
    statuses: HashMap<u16, GuestAddress>,
}

/// A VMM with a guest.
struct Vmm {
    front_end: Frontend,
    memory: Memory,
    queues: Vec<Queue>,
    inflight: Option<(VhostUserInflight, File)>,
    config: Vec<u8>,
}

impl Vmm {
    fn connect(socket: &Path, queues: usize) -> Self {
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let memory = GuestMemoryMmap::from_regions(vec![region(0, MIB)]).unwrap();
        let memory = Arc::new(memory);
        let queue = |index| Queue {
            kick: event(),
            call: event(),
            ring: ring(&memory, index),
            statuses: HashMap::new(),
        };
        let mut vmm = Self {
            front_end: Frontend::connect(socket, queues as u64).unwrap(),
            queues: (0..queues).map(queue).collect(),
            memory,
            inflight: None,
            config: Vec::new(),
        };
        vmm.negotiate();
        assert!(vmm.front_end.get_queue_num().unwrap() >= queues as u64);
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, config) = vmm
            .front_end
            .get_config(VHOST_USER_CONFIG_OFFSET, CONFIG as u32, flags, &[0; CONFIG])
            .unwrap();
        vmm.config = config;
        vmm
    }

    fn negotiate(&mut self) {
        self.front_end.set_owner().unwrap();
        assert_eq!(self.front_end.get_features().unwrap() & FEATURES, FEATURES);
        let known = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::LOG_SHMFD;
        let offered = self.front_end.get_protocol_features().unwrap();
        assert!(offered.contains(VhostUserProtocolFeatures::REPLY_ACK));
        self.front_end
            .set_protocol_features(known & offered)
            .unwrap();
        self.front_end
            .set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }

    /// Does what the VMM does when the guest's driver is ready.
    fn activate(&mut self) {
        let front_end = &mut self.front_end;
        front_end.set_features(FEATURES).unwrap();
        let regions: Vec<_> = self.memory.iter().map(described).collect();
        front_end.set_mem_table(&regions).unwrap();
        for index in 0..self.queues.len() {
            front_end.set_vring_num(index, QUEUE_SIZE).unwrap();
        }
        if self.inflight.is_none() {
            let wanted = VhostUserInflight {
                num_queues: self.queues.len() as u16,
                queue_size: QUEUE_SIZE,
                ..VhostUserInflight::default()
            };
            self.inflight = Some(front_end.get_inflight_fd(&wanted).unwrap());
        }
        let (area, file) = self.inflight.as_ref().unwrap();
        front_end.set_inflight_fd(area, file.as_raw_fd()).unwrap();
        for (index, queue) in self.queues.iter().enumerate() {
            let host = |address| self.memory.get_host_address(GuestAddress(address));
            let [descriptors, available, used] = queue.ring.addresses().map(|address| {
                let host = host(address).unwrap();
                host as u64
            });
            let rings = VringConfigData {
                queue_max_size: QUEUE_SIZE,
                queue_size: QUEUE_SIZE,
                desc_table_addr: descriptors,
                avail_ring_addr: available,
                used_ring_addr: used,
                ..VringConfigData::default()
            };
            front_end.set_vring_addr(index, &rings).unwrap();
            // The base is the available index, even if the previous back-end died before it took
            // those chains.
            front_end
                .set_vring_base(index, queue.ring.available_index())
                .unwrap();
            front_end.set_vring_call(index, &queue.call).unwrap();
            front_end.set_vring_kick(index, &queue.kick).unwrap();
        }
        self.enable(true);
    }

    fn enable(&mut self, enable: bool) {
        for index in 0..self.queues.len() {
            self.front_end.set_vring_enable(index, enable).unwrap();
        }
    }

    /// Does what the VMM does when the guest's driver resets the device.
    fn reset(&mut self) {
        self.enable(false);
        self.front_end.reset_owner().unwrap();
        self.inflight = None;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let rings = GuestAddress(index as u64 * QUEUE);
            let zeroes = [0; HEADERS as usize];
            self.memory.write_slice(&zeroes, rings).unwrap();
            queue.ring = ring(&self.memory, index);
        }
    }

    /// The guest address of a slot's data.
    fn data(queue: usize, slot: u16) -> u64 {
        queue as u64 * QUEUE + DATA + u64::from(slot) * PAGE as u64
    }

    /// Makes a request available, with a page at `data`, and kicks the queue.
    fn submit(&mut self, queue: usize, slot: u16, kind: u32, page: u64, data: u64) {
        let header = GuestAddress(queue as u64 * QUEUE + HEADERS + u64::from(slot) * 0x20);
        let status = GuestAddress(header.0 + 16);
        let fields = [u64::from(kind), page * 8, 0xff].map(u64::to_le_bytes);
        let fields = &fields.as_flattened()[..17];
        self.memory.write_slice(fields, header).unwrap();
        let data = GuestAddress(data);
        let data = match kind {
            READ => vec![Piece::writable(data, PAGE as u32)],
            WRITE => vec![Piece::readable(data, PAGE as u32)],
            _ => vec![],
        };
        let ends = [Piece::readable(header, 16), Piece::writable(status, 1)];
        let queue = &mut self.queues[queue];
        let head = queue.ring.add(&[&ends[..1], &data, &ends[1..]].concat());
        queue.statuses.insert(head, status);
        queue.ring.publish();
        queue.kick.write(1).unwrap();
    }

    /// Waits until all requests of a queue have succeeded.
    #[track_caller]
    fn finish(&mut self, queue: usize) {
        let state = &mut self.queues[queue];
        while !state.statuses.is_empty() {
            if let Some((head, _)) = state.ring.pop_used() {
                let status = state.statuses.remove(&head).expect("a request in flight");
                let status: u8 = self.memory.read_obj(status).unwrap();
                assert_eq!(status, 0, "queue {queue}, descriptor {head}");
                continue;
            }
            // SAFETY: the queue keeps its descriptor open.
            let call = unsafe { BorrowedFd::borrow_raw(state.call.as_raw_fd()) };
            let mut fds = [PollFd::from_borrowed_fd(call, PollFlags::IN)];
            let ready = poll(&mut fds, Some(&PATIENCE)).unwrap();
            assert!(ready > 0, "queue {queue}: no interrupt");
            state.call.read().unwrap();
        }
    }

    #[track_caller]
    fn finish_all(&mut self) {
        (0..self.queues.len()).for_each(|queue| self.finish(queue));
    }

    /// Writes a page with one queue, and reads it with another.
    #[track_caller]
    fn works(&mut self, page: u64, data: &[u8]) {
        let last = self.queues.len() - 1;
        let from = Self::data(0, 0);
        self.memory.write_slice(data, GuestAddress(from)).unwrap();
        self.submit(0, 0, WRITE, page, from);
        self.finish(0);
        self.submit(0, 1, FLUSH, 0, 0);
        self.finish(0);
        assert_eq!(self.read(last, page), data);
    }

    fn read(&mut self, queue: usize, page: u64) -> Vec<u8> {
        let to = Self::data(queue, 2);
        self.submit(queue, 2, READ, page, to);
        self.finish(queue);
        let mut read = vec![0; PAGE];
        self.memory.read_slice(&mut read, GuestAddress(to)).unwrap();
        read
    }
}

/// The ring of a queue, without any request.
fn ring(memory: &Memory, queue: usize) -> Ring {
    let at = GuestAddress(queue as u64 * QUEUE);
    Ring::new(Arc::clone(memory), QUEUE_SIZE, at, false)
}

/// Memory that can be shared, at the guest address `start`.
fn region(start: u64, bytes: u64) -> GuestRegionMmap {
    let file = FileOffset::new(memory(bytes), 0);
    GuestRegionMmap::from_range(GuestAddress(start), bytes as usize, Some(file)).unwrap()
}

fn described(region: &GuestRegionMmap) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo::from_guest_region(region).unwrap()
}

#[test]
fn cloud_hypervisor_can_pause_reset_and_grow() {
    let dir = &test_dir();
    create(dir, "disk.img", "16M");
    let daemon = daemon(
        dir,
        "--disk path=disk.img,socket=s,queues=4 --metrics metrics.txt",
    );
    let data = noise(8 * PAGE);
    let page = |index: usize| &data[index * PAGE..][..PAGE];
    let mut vmm = Vmm::connect(&dir.join("s"), 2);
    let capacity = u64::from_le_bytes(vmm.config[..8].try_into().unwrap());
    assert_eq!(capacity, 16 * MIB / 512);
    assert_eq!(vmm.config[34..36], 4_u16.to_le_bytes());
    assert_eq!(vmm.config[WRITEBACK as usize], 1);
    vmm.activate();
    vmm.works(1, page(0));
    // The VM is paused while the back-end has not taken a request, and goes on.
    vmm.enable(false);
    vmm.submit(1, 0, FLUSH, 0, 0);
    vmm.enable(true);
    vmm.finish(1);
    vmm.works(2, page(1));
    // The guest's firmware hands over to its kernel.
    vmm.reset();
    vmm.activate();
    assert_eq!(vmm.read(1, 1), page(0));
    vmm.works(3, page(2));
    // Memory is plugged in, and used.
    let plugged = region(PLUGGED, MIB);
    vmm.front_end.add_mem_region(&described(&plugged)).unwrap();
    vmm.memory = Arc::new(vmm.memory.insert_region(plugged.into()).unwrap());
    let address = GuestAddress(PLUGGED + 0x5000);
    vmm.memory.write_slice(page(3), address).unwrap();
    vmm.submit(0, 0, WRITE, 4, address.0);
    vmm.finish(0);
    assert_eq!(vmm.read(1, 4), page(3));
    // Sets writethrough. SET_CONFIG uses the field's own offset, without the offset of MMIO.
    let flags = VhostUserConfigFlags::WRITABLE;
    vmm.front_end.set_config(WRITEBACK, flags, &[0]).unwrap();
    vmm.submit(0, 0, WRITE, 5, address.0);
    vmm.finish(0);
    let at = VHOST_USER_CONFIG_OFFSET + WRITEBACK;
    let (_, mode) = vmm.front_end.get_config(at, 1, flags, &[0]).unwrap();
    assert_eq!(mode, [0]);
    drop(vmm);
    assert_eq!(daemon.stop(), "");
    let metrics = std::fs::read_to_string(dir.join("metrics.txt")).unwrap();
    assert_eq!(metric(&metrics, "walvisor_block_writes_total"), 5);
    assert_eq!(metric(&metrics, "walvisor_block_errors_total"), 0);
}

/// 32 pages, with two queues.
fn write_pages(vmm: &mut Vmm, first: u64, data: &[u8]) {
    for (index, page) in (0_u16..).zip(data.chunks(PAGE)) {
        let (queue, slot) = (usize::from(index % 2), 3 + index / 2);
        let from = Vmm::data(queue, slot);
        vmm.memory.write_slice(page, GuestAddress(from)).unwrap();
        vmm.submit(queue, slot, WRITE, first + u64::from(index), from);
    }
}

/// How many pages of `data` the disk has.
fn count_pages(vmm: &mut Vmm, first: u64, data: &[u8]) -> usize {
    let pages = (first..).zip(data.chunks(PAGE));
    pages.filter(|(at, page)| vmm.read(1, *at) == *page).count()
}

/// What the VMM does when its back-end is there again.
fn reconnect(vmm: &mut Vmm, socket: &Path) {
    vmm.front_end = Frontend::connect(socket, 2).unwrap();
    vmm.negotiate();
    vmm.activate();
}

/// The guest does not repeat writes that were answered, so the daemon writes them to the log first,
/// without a sync; and those that were in flight are carried out by the next daemon.
#[test]
fn no_write_is_lost_when_the_daemon_is_killed() {
    let data = noise(32 * PAGE);
    for (answer, kept) in [("", 32), (",answer=memory", 0)] {
        let dir = &test_dir();
        create(dir, "disk.img", "16M");
        let arguments =
            format!("--disk path=disk.img,socket=s,queues=2{answer} --metrics metrics.txt");
        let serve = || daemon(dir, &arguments);
        let mut daemon = serve();
        let socket = dir.join("s");
        let mut vmm = Vmm::connect(&socket, 2);
        vmm.activate();
        write_pages(&mut vmm, 0, &data);
        vmm.finish_all();
        daemon.kill();
        daemon = serve();
        reconnect(&mut vmm, &socket);
        assert_eq!(count_pages(&mut vmm, 0, &data), kept, "{answer}");
        for round in 1..4 {
            // At the kill some requests are answered, some are in flight, and some are not taken
            // yet.
            write_pages(&mut vmm, round * 32, &data);
            if answer.is_empty() {
                daemon.kill();
                daemon = serve();
                reconnect(&mut vmm, &socket);
            }
            vmm.finish_all();
            assert_eq!(
                count_pages(&mut vmm, round * 32, &data),
                32,
                "round {round}"
            );
        }
        // Without a kill, and with the only flush that the guest asks for.
        write_pages(&mut vmm, 0, &data);
        vmm.finish_all();
        vmm.submit(0, 0, FLUSH, 0, 0);
        vmm.finish(0);
        drop(vmm);
        assert_eq!(daemon.stop(), "");
        let metrics = std::fs::read_to_string(dir.join("metrics.txt")).unwrap();
        assert_eq!(metric(&metrics, "walvisor_log_flushes_total"), 1);
    }
}
