//! Any reads and writes of a virtio-mmio device's registers, of any width at any offset, while its
//! queues run. Every value read matches a model of the registers, a device that is not live touches
//! no memory, and after a reset the device works.
//!
//! An *input* is a byte of options (1: a disk in writethrough mode), then steps, see
//! `Machine::step`.

use std::sync::Arc;

use crate::driver::{self, Bus};
use crate::guest::{Guest, QUEUE_SIZE, device};
use crate::input::Input;
use crate::registers::{MMIO_REGISTERS, Register, Registers, mmio_offset};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::control::ControlTransport;
use walvisor_devices::transport::MmioTransport;

const MOST_STEPS: usize = 48;
/// Offset of the configuration space (virtio 1.2, 4.2.2).
const CONFIG: u64 = 0x100;
/// Offsets of QueueNumMax, QueueNotify and InterruptStatus.
const QUEUE_NUM_MAX: u64 = 0x34;
const NOTIFY: u64 = 0x50;
const INTERRUPT_STATUS: u64 = 0x60;
/// Registers with constant values: magic, version, device ID, vendor ID, no shared memory.
const CONSTANTS: [(u64, u32); 8] = [
    (0x00, u32::from_le_bytes(*b"virt")),
    (0x04, 2),
    (0x08, 2),
    (0x0c, u32::from_le_bytes(*b"WALV")),
    (0xb0, u32::MAX),
    (0xb4, u32::MAX),
    (0xb8, u32::MAX),
    (0xbc, u32::MAX),
];
struct Machine {
    transport: MmioTransport<Arc<vm_memory::GuestMemoryMmap>>,
    guest: Guest,
    registers: Registers,
    /// The configuration space, in which only `writeback` changes.
    config: Vec<u8>,
}

impl Machine {
    fn new(writeback: bool) -> Self {
        let guest = Guest::default();
        let irq = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        let mut transport = MmioTransport::new(device(writeback), Arc::clone(&guest.memory), irq);
        let mut config = vec![0; 96];
        transport.read(CONFIG, &mut config);
        let mut offered = 0;
        for half in [1, 0] {
            transport.write(0x14, &u32::to_le_bytes(half));
            let mut bytes = [0; 4];
            transport.read(0x10, &mut bytes);
            offered = offered << 32 | u64::from(u32::from_le_bytes(bytes));
        }
        Self {
            transport,
            guest,
            registers: Registers::new(offered, writeback),
            config,
        }
    }

    fn step(&mut self, input: &mut Input) {
        match input.byte() % 10 {
            // Any access. Most have a width of 4 and the offset of a register.
            0 | 1 => {
                let (offset, width) = (offset(input), width(input));
                let value = driver::value(input).to_le_bytes();
                let bytes: Vec<u8> = value.into_iter().cycle().take(width).collect();
                self.write(offset, &bytes);
            }
            2 => {
                let (offset, width) = (offset(input), width(input));
                self.read(offset, width);
            }
            3 => driver::scribble(&mut self.guest, input),
            4 => {
                let (features, size) = (driver::features(input), input.of(&[QUEUE_SIZE, 8, 4, 0]));
                driver::start(self, features, size);
            }
            5 | 6 => driver::request(self, input),
            7 => driver::any_register(self, input),
            // The disk's owner pauses or resumes the device. A pause drains the queues.
            8 => {
                self.transport.pause();
                self.registers.drained();
            }
            _ => self.transport.resume(),
        }
        for register in [Register::Status, Register::Ready] {
            self.get(register);
        }
        self.read(QUEUE_NUM_MAX, 4);
        self.guest.check_quiet(self.registers.live());
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let enabled_late = offset == 0x44 && self.registers.draining();
        self.transport.write(offset, bytes);
        if let Some(at) = offset.checked_sub(CONFIG) {
            if let [value] = *bytes {
                self.registers.write_config(at, value);
            }
            return;
        }
        let Ok(value) = bytes.try_into().map(u32::from_le_bytes) else {
            return;
        };
        let Some((_, register, _)) = MMIO_REGISTERS.iter().find(|(at, ..)| *at == offset) else {
            return;
        };
        match register {
            // The status has 8 bits. A value whose low 8 bits alone are zero is no reset and has no
            // effect.
            Register::Status if value != 0 && value as u8 == 0 => {}
            Register::QueueReset if value != 1 => {}
            register => self.registers.write(*register, value),
        }
        if enabled_late {
            let ready = self.read(offset, 4)[0];
            self.registers.adopt_ready(ready != 0);
        }
    }

    /// Reads, and compares the bytes with the model.
    fn read(&mut self, offset: u64, width: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; width];
        self.transport.read(offset, &mut bytes);
        if let Some(from) = offset.checked_sub(CONFIG) {
            self.config[32] = self.registers.writeback.into();
            let at = |index| usize::try_from(from).ok()?.checked_add(index);
            for (index, byte) in bytes.iter().enumerate() {
                let expected = at(index).and_then(|at| self.config.get(at));
                assert_eq!(byte, expected.unwrap_or(&0), "configuration at {from:#x}");
            }
            return bytes;
        }
        let Ok(value) = bytes[..].try_into().map(u32::from_le_bytes) else {
            assert!(
                bytes.iter().all(|&byte| byte == 0),
                "{width} bytes at {offset:#x}"
            );
            return bytes;
        };
        let constant = CONSTANTS.iter().find(|(at, _)| *at == offset);
        let register = MMIO_REGISTERS
            .iter()
            .find(|(at, _, reads)| *at == offset && *reads);
        match (offset, constant, register) {
            (_, Some((_, constant)), _) => assert_eq!(value, *constant, "at {offset:#x}"),
            (_, _, Some((_, Register::Status, _))) => {
                self.registers
                    .check_status(u8::try_from(value).expect("8 bits"));
            }
            (_, _, Some((_, Register::QueueReset, _))) => self.registers.check_queue_reset(value),
            // The model cannot know whether the device could enable the queue during the queue's
            // reset.
            (_, _, Some((_, Register::Ready, _))) if self.registers.draining() => {
                assert!(value < 2, "queue ready");
            }
            (_, _, Some((_, register, _))) => {
                assert_eq!(value, self.registers.value(*register), "{register:?}");
            }
            // The largest size of an existing queue; 0 for others.
            (QUEUE_NUM_MAX, ..) => {
                let size = self.registers.queue().map_or(0, |_| QUEUE_SIZE);
                assert_eq!(value, u32::from(size), "largest queue size");
            }
            (INTERRUPT_STATUS, ..) => {
                let most = if self.registers.live() { 3 } else { 0 };
                assert_eq!(value & !most, 0, "interrupt status");
            }
            // The configuration generation, which nothing here changes, and registers that are
            // reserved or write-only.
            _ => assert_eq!(value, 0, "at {offset:#x}"),
        }
        bytes
    }
}

impl Bus for Machine {
    fn guest(&mut self) -> &mut Guest {
        &mut self.guest
    }

    fn get(&mut self, register: Register) -> u32 {
        let bytes = self.read(mmio_offset(register), 4);
        u32::from_le_bytes(bytes.try_into().expect("four bytes"))
    }

    fn set(&mut self, register: Register, value: u32) {
        self.write(mmio_offset(register), &value.to_le_bytes());
    }

    fn notify(&mut self, queue: u16) {
        self.write(NOTIFY, &u32::from(queue).to_le_bytes());
    }
}

fn offset(input: &mut Input) -> u64 {
    match input.byte() {
        // Every register, defined or not, and the start of the configuration space.
        byte @ 0..72 => u64::from(byte) * 4,
        byte @ 72..176 => CONFIG + u64::from(byte - 72),
        // Any offset, near or far.
        byte @ 176..240 => u64::from(byte) * 61,
        240..248 => u64::MAX - u64::from(input.byte()),
        _ => u64::from_le_bytes(input.bytes()),
    }
}

fn width(input: &mut Input) -> usize {
    input.of(&[4, 4, 1, 2, 8, 4, 0, 3, 5, 16])
}

/// Runs an input.
///
/// # Panics
/// If the device does what it must not.
pub fn run(input: &[u8]) {
    let mut input = Input::new(input);
    let options = input.byte();
    let mut machine = Machine::new(options & 1 == 0);
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        machine.step(&mut input);
    }
    machine.transport.resume();
    driver::finish(&mut machine);
}
