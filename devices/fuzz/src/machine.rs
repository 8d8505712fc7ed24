//! A device over virtio-mmio and the memory of its guest, for a driver that the input controls.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;
use walvisor_devices::transport::{Device, MmioTransport};

use crate::guest::{MEMORY, QUEUE_SIZE};
use crate::input::Input;

/// The device status of a device that runs.
pub const LIVE: u32 = 15;
/// The device status bit of a device that can't go on without a reset.
pub const NEEDS_RESET: u32 = 64;
const EVENT_IDX: u32 = 1 << 29;

/// The device and [`MEMORY`] bytes of memory, from address 0 on.
pub struct Machine<D: Device> {
    transport: MmioTransport<Arc<GuestMemoryMmap>, D>,
    memory: Arc<GuestMemoryMmap>,
    event_idx: bool,
    /// What the driver writes into the device's configuration: offsets and values.
    pub config: Vec<(u64, u32)>,
}

impl<D: Device> Machine<D> {
    /// A machine whose driver accepts all features, EVENT_IDX only if `event_idx`.
    pub fn new(device: D, irq: EventFd, event_idx: bool) -> Self {
        // Two adjacent regions, so that buffers can cross the border between them.
        let half = MEMORY / 2;
        let regions = [0, half].map(|start| (GuestAddress(start as u64), half));
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&regions).expect("guest memory"));
        Self {
            transport: MmioTransport::new(device, Arc::clone(&memory), irq),
            memory,
            event_idx,
            config: Vec::new(),
        }
    }

    /// Resets the device from any state.
    pub fn reset(&mut self) {
        self.set(0x70, 0);
        assert_eq!(self.get(0x70), 0, "the device does not reset");
    }

    /// Takes the device from reset to DRIVER_OK, with queues at these addresses of descriptor
    /// table, available ring and used ring (virtio 1.2, 3.1.1).
    pub fn start(&mut self, queues: &[[u64; 3]]) {
        self.set(0x70, 3);
        for half in [0, 1] {
            self.set(0x14, half);
            let offered = self.get(0x10);
            self.set(0x24, half);
            let unwanted = if half == 0 && !self.event_idx {
                EVENT_IDX
            } else {
                0
            };
            self.set(0x20, offered & !unwanted);
        }
        self.set(0x70, 11);
        for (offset, value) in self.config.clone() {
            self.set(0x100 + offset, value);
        }
        for (queue, rings) in (0..).zip(queues) {
            self.set(0x30, queue);
            self.set(0x38, QUEUE_SIZE.into());
            for (register, &address) in [0x80, 0x90, 0xa0].into_iter().zip(rings) {
                self.set(register, address as u32);
                self.set(register + 4, 0);
            }
            self.set(0x44, 1);
        }
        self.set(0x70, LIVE);
        assert_eq!(self.get(0x70), LIVE, "the device does not start");
    }

    /// Writes descriptors of the queue's `table` from `head` on; where the input says so, the rest
    /// go into one of the indirect `tables`. `place` picks the address of a segment.
    pub fn lay_chain(
        &self,
        mut table: u64,
        tables: [u64; 2],
        (head, count): (u16, u8),
        input: &mut Input,
        lengths: &[u32; 16],
        place: impl Fn(&mut Input) -> u64,
    ) {
        let (mut index, mut entries) = (head, QUEUE_SIZE);
        let mut tables = tables.into_iter();
        for left in (0..count).rev() {
            let address = place(input);
            let len = lengths[usize::from(input.byte() & 15)];
            let flags = input.byte();
            if flags & 2 != 0
                && let Some(indirect) = tables.next()
            {
                let odd = u32::from(flags >> 5 & 1);
                let len = (u32::from(left) + 1) * 16 + odd;
                // The write-only flag of a descriptor that refers to a table has no meaning.
                let bits = 4 | u16::from(flags & 1) << 1;
                self.describe(table, index, indirect, len, bits, 0);
                (table, index, entries) = (indirect, 0, u16::from(left) + 1);
            }
            let next = match flags >> 3 & 3 {
                1 => index,
                2 => 200,
                _ => (index + 1) % entries,
            };
            // The last descriptor has no NEXT flag, unless the input inverts the flag.
            let has_next = (left > 0) ^ (flags & 4 != 0);
            let bits = u16::from(has_next) | u16::from(flags & 1) << 1;
            self.describe(table, index, address, len, bits, next);
            index = (index + 1) % entries;
        }
    }

    /// Writes the descriptor `index` of `table`.
    pub fn describe(&self, table: u64, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.write(table + u64::from(index) * 16, &bytes);
    }

    /// The index of the ring, available or used, at `ring`.
    pub fn index(&self, ring: u64) -> u16 {
        let at = GuestAddress(ring + 2);
        u16::from_le(self.memory.load(at, Ordering::SeqCst).expect("an index"))
    }

    /// Publishes an index of the available ring at `ring`.
    pub fn set_index(&self, ring: u64, index: u16) {
        let at = GuestAddress(ring + 2);
        self.memory
            .store(index.to_le(), at, Ordering::SeqCst)
            .expect("an index");
    }

    /// Rings the doorbell of a queue.
    pub fn notify(&mut self, queue: u32) {
        self.set(0x50, queue);
    }

    /// The device status.
    pub fn status(&mut self) -> u32 {
        self.get(0x70)
    }

    /// All of the memory.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY];
        self.memory
            .read_slice(&mut bytes, GuestAddress(0))
            .expect("guest memory");
        bytes
    }

    /// Writes memory.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(at))
            .expect("guest memory");
    }

    fn get(&mut self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(register, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn set(&mut self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }
}
