//! Any reads and writes of a virtio-pci function's configuration space and BARs, of any width at
//! any offset, including its MSI-X table and the configuration access window, while its queues run.
//! Every value read matches a model of the function, the device sends no message that the driver
//! has not routed and unmasked, a device that is not live touches no memory, and after a reset it
//! works and interrupts.
//!
//! An *input* is a byte of options (1: a disk in writethrough mode), then steps, see
//! `Machine::step`.

mod function;
mod router;

use std::sync::Arc;

use crate::driver::{self, Bus};
use crate::guest::{Guest, QUEUE_SIZE, device};
use crate::input::Input;
use crate::registers::Register;
use vm_memory::GuestMemoryMmap;
use walvisor_devices::control::ControlTransport;
use walvisor_devices::transport::PciTransport;

use function::{
    COMMON, CONFIG_BAR, DEVICE_CONFIG, Function, ISR, MSIX_BAR, NOTIFY_BAR, VECTORS, place,
};
use router::{Router, VALID_ADDRESS};

const MOST_STEPS: usize = 48;

struct Machine {
    transport: PciTransport<Arc<GuestMemoryMmap>>,
    guest: Guest,
    function: Function,
    router: Arc<Router>,
}

impl Machine {
    fn new(writeback: bool) -> Self {
        let guest = Guest::default();
        let router = Arc::new(Router::default());
        let mut transport = PciTransport::new(
            device(writeback),
            Arc::clone(&guest.memory),
            Arc::clone(&router) as _,
        );
        for (bar, address) in transport
            .bars()
            .iter()
            .zip([0xc000_0000, 0xc100_0000, 0xc200_0000])
        {
            transport.set_bar(bar.index, address);
        }
        let function = Function::of(&mut transport, writeback);
        Self {
            transport,
            guest,
            function,
            router,
        }
    }

    fn step(&mut self, input: &mut Input) {
        match input.byte() % 14 {
            0 => {
                let (offset, bytes) = (self.config_offset(input), bytes(input));
                self.config_write(offset, &bytes);
            }
            1 => {
                let (offset, width) = (self.config_offset(input), width(input));
                self.config_read(offset, width);
            }
            2 | 3 => {
                let (bar, offset) = (bar(input), self.bar_offset(input));
                let bytes = bytes(input);
                self.bar_write(bar, offset, &bytes);
            }
            4 => {
                let (bar, offset) = (bar(input), self.bar_offset(input));
                let width = width(input);
                self.bar_read(bar, offset, width);
            }
            5 => driver::scribble(&mut self.guest, input),
            6 => {
                let (features, size) = (driver::features(input), input.of(&[QUEUE_SIZE, 8, 4, 0]));
                driver::start(self, features, size);
            }
            7 | 8 => driver::request(self, input),
            9 => driver::any_register(self, input),
            10 => self.window(input),
            11 => self.message(input),
            // The disk's owner pauses or resumes the device. A pause drains the queues.
            12 => {
                self.transport.pause();
                self.function.registers.drained();
            }
            _ => self.transport.resume(),
        }
        self.bar_read(CONFIG_BAR, 0, COMMON as usize);
        self.config_read(0, 256);
        self.guest.check_quiet(self.function.registers.live());
    }

    /// An access through the configuration access capability (virtio 1.2, 4.1.4.9).
    fn window(&mut self, input: &mut Input) {
        let capability = self.function.window as u16;
        let (bar, offset) = (bar(input), self.bar_offset(input));
        let len = input.of(&[4, 1, 2, 4, 3, 0, 8]);
        self.config_write(capability + 4, &[bar as u8]);
        self.config_write(capability + 8, &(offset as u32).to_le_bytes());
        self.config_write(capability + 12, &u32::to_le_bytes(len));
        if input.byte() & 1 == 0 {
            self.config_read(capability + 16, 4);
        } else {
            let value = driver::value(input);
            self.config_write(capability + 16, &value.to_le_bytes());
        }
    }

    /// Sets up a vector as a driver does, and enables or disables it.
    fn message(&mut self, input: &mut Input) {
        let vector = u64::from(input.byte()) % VECTORS as u64;
        let address = input.of(&[VALID_ADDRESS, VALID_ADDRESS + 0x1000, 0, u32::MAX]);
        let masked = input.byte() & 1;
        for (at, value) in [
            (0, address),
            (4, 0),
            (8, vector as u32),
            (12, masked.into()),
        ] {
            self.bar_write(MSIX_BAR, vector * 16 + at, &value.to_le_bytes());
        }
        let control = input.of(&[0x80, 0x80, 0xc0, 0]);
        self.config_write(self.function.msix as u16 + 3, &[control]);
        let at = input.of(&[0x10, 0x1a]);
        self.bar_write(CONFIG_BAR, at, &(vector as u16).to_le_bytes());
    }

    fn config_write(&mut self, offset: u16, bytes: &[u8]) {
        self.change(
            |function| function.config_write(offset, bytes),
            |transport| transport.config_write(offset, bytes),
        );
    }

    fn bar_write(&mut self, bar: usize, offset: u64, bytes: &[u8]) {
        self.change(
            |function| function.bar_write(bar, offset, bytes),
            |transport| transport.bar_write(bar, offset, bytes),
        );
    }

    /// Applies the same change to model and device. Meanwhile a vector may send if it may before or
    /// after the change.
    fn change(
        &mut self,
        model: impl FnOnce(&mut Function),
        device: impl FnOnce(&mut PciTransport<Arc<GuestMemoryMmap>>),
    ) {
        let before = self.function.open();
        let draining = self.function.registers.draining();
        model(&mut self.function);
        let after = self.function.open();
        self.router.allow(before | after);
        device(&mut self.transport);
        // 4.1.4.3.2: a driver that resets the device waits for the end of that.
        while self.function.registers.value(Register::Status) == 0 && self.status() != 0 {}
        self.router.allow(after);
        if draining {
            // A queue cannot be enabled before its reset has ended, and the model does not know
            // when that is.
            let mut ready = [0; 2];
            self.transport.bar_read(CONFIG_BAR, 0x1c, &mut ready);
            self.function.registers.adopt_ready(ready[0] != 0);
        }
    }

    /// The device's status.
    fn status(&mut self) -> u8 {
        let mut status = [0];
        self.transport.bar_read(CONFIG_BAR, 0x14, &mut status);
        status[0]
    }

    fn config_read(&mut self, offset: u16, width: usize) {
        let mut bytes = vec![0xee; width];
        self.transport.config_read(offset, &mut bytes);
        let window = self.function.window_of(offset, width);
        self.function.check_config(offset, &bytes, window.is_some());
        if let Some((bar, at, len)) = window {
            // Reads the whole data register, since the access has changed it.
            let mut data = [0; 4];
            let from = self.function.window as u16 + 16;
            self.transport.config_read(from, &mut data);
            self.function.check_bar(bar, at, &data[..len]);
            self.function.adopt_window(&data, len);
        }
    }

    fn bar_read(&mut self, bar: usize, offset: u64, width: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; width];
        self.transport.bar_read(bar, offset, &mut bytes);
        self.function.check_bar(bar, offset, &bytes);
        bytes
    }

    /// An offset in the configuration space: one with a meaning, or any.
    fn config_offset(&self, input: &mut Input) -> u16 {
        let (window, msix) = (self.function.window as u16, self.function.msix as u16);
        match input.byte() {
            byte @ 0..64 => byte.into(),
            byte @ 64..96 => window + u16::from(byte - 64) % 20,
            byte @ 96..128 => msix + u16::from(byte - 96) % 12,
            byte @ 128..240 => u16::from(byte - 64),
            _ => u16::from_le_bytes(input.bytes()),
        }
    }

    fn bar_offset(&self, input: &mut Input) -> u64 {
        match input.byte() {
            byte @ 0..64 => byte.into(),
            byte @ 64..128 => DEVICE_CONFIG + u64::from(byte - 64),
            byte @ 128..136 => ISR + u64::from(byte & 1),
            byte @ 136..160 => self.function.pending + u64::from(byte - 136),
            byte @ 160..200 => u64::from(byte - 160) * 4,
            byte @ 200..240 => u64::from(byte) * 61,
            _ => u64::from_le_bytes(input.bytes()),
        }
    }

    /// Checks that a driver that starts anew gets its interrupts, whatever happened before.
    fn interrupts(&mut self) {
        self.config_write(self.function.msix as u16 + 3, &[0x80]);
        for (at, value) in [(0, VALID_ADDRESS), (4, 0), (8, 7), (12, 0)] {
            self.bar_write(MSIX_BAR, 16 + at, &value.to_le_bytes());
        }
        driver::start(self, 1 << 32, QUEUE_SIZE);
        self.set(Register::QueueSelect, 0);
        self.bar_write(CONFIG_BAR, 0x1a, &1_u16.to_le_bytes());
        let before = self.router.sent(1);
        self.guest.offer(0, QUEUE_SIZE, 8, 0, 20);
        self.notify(0);
        // libFuzzer's timeout finds a hang.
        while self.router.sent(1) == before {
            std::thread::yield_now();
        }
        self.set(Register::Status, 0);
        self.function.check_bars(&self.transport.bars());
    }
}

impl Bus for Machine {
    fn guest(&mut self) -> &mut Guest {
        &mut self.guest
    }

    fn get(&mut self, register: Register) -> u32 {
        let (offset, width) = place(register);
        let mut bytes = self.bar_read(CONFIG_BAR, offset, width);
        bytes.resize(4, 0);
        u32::from_le_bytes(bytes.try_into().expect("four bytes"))
    }

    fn set(&mut self, register: Register, value: u32) {
        let (offset, width) = place(register);
        self.bar_write(CONFIG_BAR, offset, &value.to_le_bytes()[..width]);
    }

    fn notify(&mut self, queue: u16) {
        self.bar_write(NOTIFY_BAR, u64::from(queue) * 4, &queue.to_le_bytes());
    }
}

fn bar(input: &mut Input) -> usize {
    input.of(&[CONFIG_BAR, CONFIG_BAR, MSIX_BAR, NOTIFY_BAR, 1, 5, 6, 255])
}

fn width(input: &mut Input) -> usize {
    input.of(&[4, 2, 1, 8, 4, 0, 3, 5, 16, 64])
}

fn bytes(input: &mut Input) -> Vec<u8> {
    let width = width(input);
    let value = driver::value(input).to_le_bytes();
    value.into_iter().cycle().take(width).collect()
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
    machine.interrupts();
}
