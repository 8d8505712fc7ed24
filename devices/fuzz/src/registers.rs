//! A model of the registers that both transports have (virtio 1.2, 2.1, 2.2, 2.6.1, 3.1, 4.1.4.3
//! and 4.2.2): the values that a driver must read back. Shares no code with the device.

use crate::guest::{QUEUE_SIZE, QUEUES};

/// Device status: the driver has chosen its features, and the device has accepted them.
pub const FEATURES_OK: u8 = 8;
/// Device status: the driver is ready.
pub const DRIVER_OK: u8 = 4;
/// Device status: the device has met an error.
pub const NEEDS_RESET: u8 = 64;

const F_FLUSH: u64 = 1 << 9;
const F_CONFIG_WCE: u64 = 1 << 11;
const F_VERSION_1: u64 = 1 << 32;
const F_RING_RESET: u64 = 1 << 40;

/// A register, independent of its place in a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// Selects which 32 of the device's features are read.
    DeviceSelect,
    /// The device's features.
    DeviceFeatures,
    /// Selects which 32 of the driver's features are written.
    DriverSelect,
    /// The driver's features.
    DriverFeatures,
    /// Selects the queue that the queue registers refer to.
    QueueSelect,
    /// The queue's size.
    QueueSize,
    /// A half of one of the queue's addresses: 0 table, 1 available ring, 2 used ring; then 0 lower,
    /// 1 upper half.
    Address(usize, usize),
    /// Whether the queue is enabled.
    Ready,
    /// Whether the queue is being reset.
    QueueReset,
    /// The device status.
    Status,
}

/// The registers' offsets in virtio-mmio (4.2.2), and whether a driver may read them.
pub const MMIO_REGISTERS: [(u64, Register, bool); 15] = [
    (0x10, Register::DeviceFeatures, true),
    (0x14, Register::DeviceSelect, false),
    (0x20, Register::DriverFeatures, false),
    (0x24, Register::DriverSelect, false),
    (0x30, Register::QueueSelect, false),
    (0x38, Register::QueueSize, false),
    (0x44, Register::Ready, true),
    (0x70, Register::Status, true),
    (0x80, Register::Address(0, 0), false),
    (0x84, Register::Address(0, 1), false),
    (0x90, Register::Address(1, 0), false),
    (0x94, Register::Address(1, 1), false),
    (0xa0, Register::Address(2, 0), false),
    (0xa4, Register::Address(2, 1), false),
    (0xc0, Register::QueueReset, true),
];

/// The offset of a register in virtio-mmio.
///
/// # Panics
/// Never: every register has a place.
pub fn mmio_offset(register: Register) -> u64 {
    let mut places = MMIO_REGISTERS.iter();
    let found = places.find(|(_, other, _)| *other == register);
    found.expect("every register has a place").0
}

/// A queue's registers.
#[derive(Clone, Default)]
pub struct QueueModel {
    /// Number of descriptors.
    pub size: u16,
    /// Addresses of table, available ring and used ring.
    pub addresses: [u64; 3],
    /// Whether the queue is enabled.
    pub ready: bool,
    /// The queue alone was reset, and may still have requests in flight.
    draining: bool,
}

/// The model of the registers.
pub struct Registers {
    offered: u64,
    device_select: u32,
    driver_select: u32,
    chosen: u64,
    /// The index of the selected queue.
    pub queue_select: u32,
    queues: Vec<QueueModel>,
    /// The device status without [`NEEDS_RESET`].
    pub status: u8,
    /// The device has set [`NEEDS_RESET`], which only a reset clears.
    broken: bool,
    /// The field `writeback` of the configuration space.
    pub writeback: bool,
    default_writeback: bool,
}

impl Registers {
    /// The registers after a reset, for a device that offers these features.
    pub fn new(offered: u64, writeback: bool) -> Self {
        let mut registers = Self {
            offered,
            device_select: 0,
            driver_select: 0,
            chosen: 0,
            queue_select: 0,
            queues: Vec::new(),
            status: 0,
            broken: false,
            writeback,
            default_writeback: writeback,
        };
        registers.reset();
        registers
    }

    fn reset(&mut self) {
        let queue = QueueModel {
            size: QUEUE_SIZE,
            ..QueueModel::default()
        };
        self.queues = vec![queue; QUEUES.into()];
        (self.device_select, self.driver_select) = (0, 0);
        (self.chosen, self.queue_select) = (0, 0);
        (self.status, self.broken) = (0, false);
        self.writeback = self.default_writeback;
    }

    /// Whether DRIVER_OK is set, so that queues may run.
    pub fn live(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    /// The selected queue, if there is one.
    pub fn queue(&self) -> Option<&QueueModel> {
        self.queues.get(self.queue_select as usize)
    }

    fn queue_mut(&mut self) -> Option<&mut QueueModel> {
        self.queues.get_mut(self.queue_select as usize)
    }

    /// Whether the selected queue's reset may still go on, so that enabling it may fail.
    pub fn draining(&self) -> bool {
        self.queue().is_some_and(|queue| queue.draining)
    }

    /// Notes that all requests in flight have ended.
    pub fn drained(&mut self) {
        for queue in &mut self.queues {
            queue.draining = false;
        }
    }

    /// Takes over whether the device has enabled the selected queue.
    pub fn adopt_ready(&mut self, ready: bool) {
        if let Some(queue) = self.queue_mut() {
            queue.ready = ready;
        }
    }

    /// The driver writes a register with the width that the transport requires.
    pub fn write(&mut self, register: Register, value: u32) {
        match register {
            Register::DeviceSelect => self.device_select = value,
            Register::DriverSelect => self.driver_select = value,
            Register::QueueSelect => self.queue_select = value,
            Register::DriverFeatures => {
                if self.status & FEATURES_OK == 0 && self.driver_select < 2 {
                    let shift = self.driver_select * 32;
                    self.chosen &= !(0xffff_ffff << shift);
                    self.chosen |= u64::from(value) << shift;
                }
            }
            Register::QueueSize => {
                if let Some(queue) = self.queue_mut().filter(|queue| !queue.ready) {
                    // Any other value is invalid, and the register then reads as 0.
                    let size = u16::try_from(value).unwrap_or(0);
                    queue.size = if size.is_power_of_two() { size } else { 0 };
                }
            }
            Register::Address(ring, half) => {
                if let Some(queue) = self.queue_mut().filter(|queue| !queue.ready) {
                    let shift = half * 32;
                    queue.addresses[ring] &= !(0xffff_ffff << shift);
                    queue.addresses[ring] |= u64::from(value) << shift;
                }
            }
            Register::Ready => self.adopt_ready(value != 0),
            Register::QueueReset => self.reset_queue(),
            Register::Status => self.write_status(value as u8),
            Register::DeviceFeatures => {}
        }
    }

    fn reset_queue(&mut self) {
        if self.can_reset_queue()
            && let Some(queue) = self.queue_mut()
        {
            *queue = QueueModel {
                size: QUEUE_SIZE,
                draining: true,
                ..QueueModel::default()
            };
        }
    }

    /// Whether the reset of a single queue was negotiated.
    pub fn can_reset_queue(&self) -> bool {
        self.status & FEATURES_OK != 0 && self.chosen & F_RING_RESET != 0
    }

    fn write_status(&mut self, value: u8) {
        if value == 0 {
            return self.reset();
        }
        // ACKNOWLEDGE, DRIVER, FAILED.
        self.status |= value & 0x83;
        let acceptable = self.chosen & !self.offered == 0 && self.chosen & F_VERSION_1 != 0;
        if value & !self.status & FEATURES_OK != 0 && self.status & 3 == 3 && acceptable {
            self.status |= FEATURES_OK;
            self.writeback = self.default_writeback && self.chosen & F_FLUSH != 0;
        }
        if value & DRIVER_OK != 0 && self.status & FEATURES_OK != 0 {
            self.status |= DRIVER_OK;
        }
    }

    /// The driver writes a byte of the device's configuration space.
    pub fn write_config(&mut self, offset: u64, value: u8) {
        let may = self.status & FEATURES_OK != 0 && self.chosen & F_CONFIG_WCE != 0;
        if offset == 32 && may {
            self.writeback = value != 0;
        }
    }

    /// The value that a register must read as; the status without [`NEEDS_RESET`].
    pub fn value(&self, register: Register) -> u32 {
        let features = |set: u64, select: u32| match select {
            0 | 1 => (set >> (select * 32)) as u32,
            _ => 0,
        };
        let queue = self.queue().cloned().unwrap_or_default();
        match register {
            Register::DeviceSelect => self.device_select,
            Register::DeviceFeatures => features(self.offered, self.device_select),
            Register::DriverSelect => self.driver_select,
            Register::DriverFeatures => features(self.chosen, self.driver_select),
            Register::QueueSelect => self.queue_select,
            Register::QueueSize => queue.size.into(),
            Register::Address(ring, half) => (queue.addresses[ring] >> (half * 32)) as u32,
            Register::Ready => queue.ready.into(),
            Register::QueueReset => 0,
            Register::Status => self.status.into(),
        }
    }

    /// Checks a status that the driver has read.
    ///
    /// # Panics
    /// If the model does not allow this status.
    pub fn check_status(&mut self, status: u8) {
        assert_eq!(status & !NEEDS_RESET, self.status, "device status");
        let broken = status & NEEDS_RESET != 0;
        assert!(
            !broken || self.live(),
            "an error of a device that is not live"
        );
        assert!(broken || !self.broken, "an error that went away by itself");
        self.broken = broken;
    }

    /// Checks the queue reset register that the driver has read.
    ///
    /// # Panics
    /// If the model does not allow this value.
    pub fn check_queue_reset(&mut self, resetting: u32) {
        match (resetting, self.draining()) {
            (0, _) => {
                if let Some(queue) = self.queue_mut() {
                    queue.draining = false;
                }
            }
            (1, true) => {}
            _ => panic!("a queue reset of {resetting:#x} that nobody asked for"),
        }
    }
}
