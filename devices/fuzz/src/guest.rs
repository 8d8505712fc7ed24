//! A guest's memory, the places of rings and buffers in it, and the device under test.

use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::{BlockConfig, VirtioBlock};

/// Bytes of memory, from address 0 on.
pub const MEMORY: usize = 64 << 10;
/// Number of the device's queues.
pub const QUEUES: u16 = 2;
/// Largest size of a queue, in descriptors.
pub const QUEUE_SIZE: u16 = 16;
/// A device with these queues over a RAM disk of 64 sectors.
pub fn device(writeback: bool) -> VirtioBlock {
    let disk = RamDisk::new(64);
    disk.set_write_cache(writeback);
    device_over(Arc::new(disk))
}

/// The same device over another disk.
pub fn device_over(disk: Arc<dyn Backend>) -> VirtioBlock {
    let config = BlockConfig {
        queues: QUEUES,
        queue_size: QUEUE_SIZE,
        ..BlockConfig::default()
    };
    VirtioBlock::new(disk, config).expect("a device")
}

/// Bytes in a sector.
pub const SECTOR: usize = 512;

/// The memory has two adjacent regions, so that buffers can cross the border between them.
const REGION: usize = MEMORY / 2;
/// Bytes of guard pages before and after each region. An access to them ends the process.
const GUARD: usize = 64 << 10;

/// The memory, which all inputs use one after the other.
static REGIONS: LazyLock<Arc<GuestMemoryMmap>> = LazyLock::new(|| {
    let regions = [0, REGION].map(|start| {
        GuestRegionMmap::new(guarded_region(), GuestAddress(start as u64)).expect("addresses")
    });
    Arc::new(GuestMemoryMmap::from_regions(regions.into()).expect("guest memory"))
});

fn guarded_region() -> MmapRegion {
    let len = GUARD + REGION + GUARD;
    // SAFETY: a new mapping, which replaces none.
    let start = unsafe { mmap_anonymous(null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) }
        .expect("address space");
    let start = start.cast::<u8>().wrapping_add(GUARD);
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: pages of the mapping above, which no other code uses yet.
    unsafe {
        mprotect(
            start.cast(),
            REGION,
            MprotectFlags::from_bits_retain(access.bits()),
        )
    }
    .expect("memory");
    let (access, kind) = (access.bits() as i32, MapFlags::PRIVATE.bits() as i32);
    // SAFETY: these pages stay mapped with this access for as long as the process lives, and no
    // other code uses them.
    unsafe { MmapRegion::build_raw(start, REGION, access, kind) }.expect("a region")
}

/// Addresses of a queue's descriptor table, available ring and used ring, as a correct driver sets
/// them.
pub fn rings(queue: u16) -> [u64; 3] {
    [0x100, 0x300, 0x400].map(|at| at + u64::from(queue) * 0x800)
}

/// Addresses of the header, data and status of a queue's request.
pub fn buffers(queue: u16) -> [u64; 3] {
    [0x2000, 0x2200, 0x2f00].map(|at| at + u64::from(queue) * 0x1000)
}

/// A guest whose driver the input controls.
pub struct Guest {
    /// The memory that the device gets.
    pub memory: Arc<GuestMemoryMmap>,
    /// The available index of each queue.
    available: [u16; QUEUES as usize],
    /// A copy of the memory, taken while the device was not live. The device must not change memory
    /// then.
    quiet: Option<Vec<u8>>,
}

impl Default for Guest {
    /// Memory of zeroes.
    fn default() -> Self {
        let guest = Self {
            memory: Arc::clone(&REGIONS),
            available: [0; QUEUES as usize],
            quiet: None,
        };
        guest.write(0, &[0; MEMORY]);
        guest
    }
}

impl Guest {
    /// Writes memory as the guest's processor does.
    ///
    /// # Panics
    /// If there is no memory at `at`.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let at = GuestAddress(at);
        self.memory.write_slice(bytes, at).expect("guest memory");
    }

    /// Reads memory as the guest's processor does.
    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let at = GuestAddress(at);
        self.memory
            .read_slice(&mut bytes, at)
            .expect("guest memory");
        bytes
    }

    /// Checks after a step that a device that is not live has not changed memory since the last
    /// step.
    pub fn check_quiet(&mut self, live: bool) {
        if live {
            self.quiet = None;
            return;
        }
        let now = self.read(0, MEMORY);
        if let Some(before) = &self.quiet
            && *before != now
        {
            let at = before.iter().zip(&now).position(|(a, b)| a != b);
            panic!("a device that is not live has changed memory at {at:x?}");
        }
        self.quiet = Some(now);
    }

    /// Drops the copy of the memory, since the guest is about to change memory itself.
    pub fn forget_quiet(&mut self) {
        self.quiet = None;
    }

    /// Zeroes the rings.
    pub fn clear_rings(&mut self) {
        self.forget_quiet();
        self.available = [0; QUEUES as usize];
        self.write(0, &[0; 0x1000]);
    }

    /// Makes a request available: a header, `len` bytes of data that the device reads or writes,
    /// and a status.
    pub fn offer(&mut self, queue: u16, size: u16, kind: u32, sector: u64, len: u32) {
        self.forget_quiet();
        let [table, available, _] = rings(queue);
        let [header, data, status] = buffers(queue);
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        self.write(header, &bytes);
        let index = self.available[usize::from(queue)];
        let head = index.wrapping_mul(3) % (size - 2);
        let writable = if kind == 1 { 0 } else { 2 };
        let chain = [(header, 16, 1), (data, len, 1 | writable), (status, 1, 2)];
        for (at, (address, len, flags)) in (head..).zip(chain) {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&u64::to_le_bytes(address));
            bytes[8..12].copy_from_slice(&u32::to_le_bytes(len));
            bytes[12..14].copy_from_slice(&u16::to_le_bytes(flags));
            bytes[14..].copy_from_slice(&(at + 1).to_le_bytes());
            self.write(table + u64::from(at) * 16, &bytes);
        }
        let slot = u64::from(index % size);
        self.write(available + 4 + slot * 2, &head.to_le_bytes());
        let index = index.wrapping_add(1);
        self.available[usize::from(queue)] = index;
        let at = GuestAddress(available + 2);
        self.memory
            .store(index.to_le(), at, Ordering::SeqCst)
            .expect("guest memory");
    }

    /// Whether the device has used every available chain.
    pub fn all_used(&self, queue: u16) -> bool {
        let at = GuestAddress(rings(queue)[2] + 2);
        let used: u16 = self
            .memory
            .load(at, Ordering::SeqCst)
            .expect("guest memory");
        u16::from_le(used) == self.available[usize::from(queue)]
    }
}
