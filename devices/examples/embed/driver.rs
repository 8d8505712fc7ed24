//! In place of a VMM and its guest: memory, an interrupt, register accesses, and a virtio-blk
//! driver (virtio 1.2, 3.1.1 and 2.7.13) that makes one request at a time.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use walvisor_devices::block::VirtioBlock;
use walvisor_devices::transport::{MmioTransport, offsets::mmio as reg};
use walvisor_devices::virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use walvisor_devices::virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use walvisor_devices::vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use walvisor_devices::vmm_sys_util::eventfd::EventFd;

type Memory = Arc<GuestMemoryMmap>;

/// Status without FEATURES_OK and DRIVER_OK, with the first, with both.
const STATUS: [u32; 3] = [3, 11, 15];
const QUEUE_SIZE: u16 = 8;
/// Where things are in guest memory.
const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADER: u64 = 0x4000;
const BUFFER: u64 = 0x5000;
const ANSWER: u64 = 0x6000;
const BUFFER_LEN: usize = 512;

/// Request type, sector, and what is in the buffer when the request is made. The last one is beyond
/// the end of the disk.
const REQUESTS: [(u32, u64, &[u8]); 3] = [
    (VIRTIO_BLK_T_OUT, 7, TEXT.as_bytes()),
    (VIRTIO_BLK_T_IN, 7, b""),
    (VIRTIO_BLK_T_IN, 2048, b""),
];
/// The status of each answer, and what is in the buffer then.
const ANSWERS: [(u8, &str); 3] = [(0, TEXT), (0, TEXT), (1, "")];
const TEXT: &str = "stable means stable";

/// The part of a VMM. Its vCPU threads pass the guest's accesses to the transport's registers on,
/// and the guest waits for its interrupts.
#[allow(dead_code)] // The example with an event loop does this itself.
pub fn run(device: VirtioBlock) -> Result<(), Box<dyn Error>> {
    let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?);
    let interrupt = EventFd::new(0)?;
    let transport = MmioTransport::new(device, Arc::clone(&memory), interrupt.try_clone()?);
    let mut driver = Driver::start(transport, memory)?;
    while driver.has_request {
        interrupt.read()?;
        driver.interrupt()?;
    }
    Ok(())
}

pub struct Driver {
    transport: MmioTransport<Memory>,
    memory: Memory,
    /// Whether a request waits for its answer.
    pub has_request: bool,
    made: u16,
    answered: u16,
}

impl Driver {
    /// Negotiates VERSION_1 and nothing else, sets up queue 0, and makes the first request.
    pub fn start(transport: MmioTransport<Memory>, memory: Memory) -> Result<Self, Box<dyn Error>> {
        let mut driver = Self {
            transport,
            memory,
            has_request: false,
            made: 0,
            answered: 0,
        };
        let [found, accepted, live] = STATUS;
        driver.set(reg::STATUS, found);
        driver.set(reg::DRIVER_FEATURES_SEL, 1);
        driver.set(reg::DRIVER_FEATURES, 1);
        driver.set(reg::STATUS, accepted);
        driver.set(reg::QUEUE_NUM, QUEUE_SIZE.into());
        driver.set(reg::QUEUE_DESC_LOW, TABLE as u32);
        driver.set(reg::QUEUE_DRIVER_LOW, AVAILABLE as u32);
        driver.set(reg::QUEUE_DEVICE_LOW, USED as u32);
        driver.set(reg::QUEUE_READY, 1);
        driver.set(reg::STATUS, live);
        match driver.get(reg::STATUS) {
            status if status == live => {
                driver.next_request()?;
                Ok(driver)
            }
            status => Err(format!("the device is not live: status {status:#x}").into()),
        }
    }

    /// Makes the next request, if there is one.
    fn next_request(&mut self) -> Result<(), Box<dyn Error>> {
        let next = REQUESTS.get(usize::from(self.made));
        self.has_request = next.is_some();
        let Some(&(kind, sector, contents)) = next else {
            return Ok(());
        };
        let is_read = kind == VIRTIO_BLK_T_IN;
        let name = if is_read { "IN" } else { "OUT" };
        println!("driver: {name} at {sector}");
        let memory = &self.memory;
        let mut buffer = [0; BUFFER_LEN];
        buffer[..contents.len()].copy_from_slice(contents);
        memory.write_slice(&buffer, GuestAddress(BUFFER))?;
        memory.write_obj(kind, GuestAddress(HEADER))?;
        memory.write_obj(sector, GuestAddress(HEADER + 8))?;
        let (next, write) = (VRING_DESC_F_NEXT as u16, VRING_DESC_F_WRITE as u16);
        let data_flags = if is_read { next | write } else { next };
        for (index, (address, len, flags)) in (0..).zip([
            (HEADER, 16, next),
            (BUFFER, BUFFER_LEN as u32, data_flags),
            (ANSWER, 1, write),
        ]) {
            let at = TABLE + u64::from(index) * 16;
            memory.write_obj::<u64>(address, GuestAddress(at))?;
            memory.write_obj::<u32>(len, GuestAddress(at + 8))?;
            memory.write_obj::<u16>(flags, GuestAddress(at + 12))?;
            memory.write_obj::<u16>(index + 1, GuestAddress(at + 14))?;
        }
        // Head 0 each time: the ring's entries are 0 as they are.
        self.made += 1;
        memory.store(self.made, GuestAddress(AVAILABLE + 2), Ordering::SeqCst)?;
        self.set(reg::QUEUE_NOTIFY, 0);
        Ok(())
    }

    /// Handles an interrupt, and makes the next request.
    pub fn interrupt(&mut self) -> Result<(), Box<dyn Error>> {
        let causes = self.get(reg::INTERRUPT_STATUS);
        self.set(reg::INTERRUPT_ACK, causes);
        let address = GuestAddress(USED + 2);
        let used: u16 = self.memory.load(address, Ordering::SeqCst)?;
        if used == self.answered {
            return Err("an interrupt without an answer: the device needs a reset".into());
        }
        self.answered = used;
        let status: u8 = self.memory.read_obj(GuestAddress(ANSWER))?;
        let mut buffer = [0; BUFFER_LEN];
        self.memory.read_slice(&mut buffer, GuestAddress(BUFFER))?;
        let text = String::from_utf8_lossy(&buffer);
        let text = text.trim_end_matches('\0');
        println!("driver: status {status}, buffer {text:?}");
        let expected = ANSWERS[usize::from(used - 1)];
        if (status, text) != expected {
            return Err(format!("not what was expected: {expected:?}").into());
        }
        self.next_request()
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

#[cfg(test)]
mod tests {
    #[test]
    fn what_was_written_is_read_and_a_range_beyond_the_disk_is_refused() {
        crate::main().expect("a run");
    }
}
