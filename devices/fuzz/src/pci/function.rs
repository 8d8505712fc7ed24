//! A model of the function: what a driver must read in configuration space, BARs and MSI-X (PCI
//! Local Bus 3.0, 6.1, 6.2.5, 6.8.2; virtio 1.2, 4.1.4). Shares no code with the device.

use crate::guest::QUEUES;
use crate::registers::{Register, Registers};
use walvisor_devices::transport::{Bar, DeviceMemory, PciTransport};

/// Number of vectors: one per queue, and one for configuration changes.
pub const VECTORS: usize = QUEUES as usize + 1;
/// Indices of the BARs.
pub const CONFIG_BAR: usize = 0;
pub const NOTIFY_BAR: usize = 2;
pub const MSIX_BAR: usize = 4;
/// Length of the common configuration, at the start of the first BAR.
pub const COMMON: u64 = 0x3c;
/// Offsets of the ISR status and of the device configuration in the first BAR.
pub const ISR: u64 = 0x1000;
pub const DEVICE_CONFIG: u64 = 0x2000;

const SPACE: usize = 256;
const NO_VECTOR: u16 = 0xffff;
/// Low byte of the status register, and its bit for a pending interrupt, which the device sets and
/// clears at any time.
const STATUS_AT: usize = 6;
const STATUS_INTERRUPT: u8 = 8;

/// The registers' offsets in the common configuration, and their widths (virtio 1.2, 4.1.4.3).
const FIELDS: [(Register, u64, usize); 15] = [
    (Register::DeviceSelect, 0x00, 4),
    (Register::DeviceFeatures, 0x04, 4),
    (Register::DriverSelect, 0x08, 4),
    (Register::DriverFeatures, 0x0c, 4),
    (Register::Status, 0x14, 1),
    (Register::QueueSelect, 0x16, 2),
    (Register::QueueSize, 0x18, 2),
    (Register::Ready, 0x1c, 2),
    (Register::Address(0, 0), 0x20, 4),
    (Register::Address(0, 1), 0x24, 4),
    (Register::Address(1, 0), 0x28, 4),
    (Register::Address(1, 1), 0x2c, 4),
    (Register::Address(2, 0), 0x30, 4),
    (Register::Address(2, 1), 0x34, 4),
    (Register::QueueReset, 0x3a, 2),
];

/// Offset and width of a register in the common configuration.
pub fn place(register: Register) -> (u64, usize) {
    let field = FIELDS.iter().find(|(other, ..)| *other == register);
    let (_, offset, width) = field.expect("every register has a place");
    (*offset, *width)
}

/// A table entry: address low and high, data, vector control.
type Entry = [u32; 4];

/// The model of the function.
pub struct Function {
    pub registers: Registers,
    /// The device's configuration, in which only `writeback` changes.
    config: Vec<u8>,
    space: [u8; SPACE],
    writable: [u8; SPACE],
    bars: Vec<Bar>,
    /// Offsets of two capabilities in the space: configuration access, and MSI-X.
    pub window: usize,
    pub msix: usize,
    /// Offset of the pending bits in the MSI-X BAR.
    pub pending: u64,
    table: [Entry; VECTORS],
    config_vector: u16,
    queue_vectors: [u16; QUEUES as usize],
}

impl Function {
    /// The model of a function whose BARs were placed by firmware, and that no driver has used yet.
    pub fn of<M: DeviceMemory>(transport: &mut PciTransport<M>, writeback: bool) -> Self {
        let mut space = [0; SPACE];
        transport.config_read(0, &mut space);
        let mut config = vec![0; 96];
        transport.bar_read(CONFIG_BAR, DEVICE_CONFIG, &mut config);
        let mut offered = 0;
        for half in [1, 0] {
            transport.bar_write(CONFIG_BAR, 0, &u32::to_le_bytes(half));
            let mut bytes = [0; 4];
            transport.bar_read(CONFIG_BAR, 4, &mut bytes);
            offered = offered << 32 | u64::from(u32::from_le_bytes(bytes));
        }
        let (mut window, mut msix, mut at) = (0, 0, usize::from(space[0x34]));
        while at != 0 {
            match (space[at], space[at + 3]) {
                (0x09, 5) => window = at,
                (0x11, _) => msix = at,
                _ => {}
            }
            at = space[at + 1].into();
        }
        let mut writable = [0; SPACE];
        // Writable bits: memory space, bus master, INTx disable, and all of the interrupt line
        // register.
        (writable[4], writable[5], writable[0x3c]) = (6, 4, 0xff);
        let bars = transport.bars();
        for bar in &bars {
            assert!(bar.size.is_power_of_two() && bar.size >= 4096);
            let kind = space[0x10 + bar.index * 4] & 0xf;
            assert_eq!(kind, 0, "32-bit memory, not prefetchable");
            let mask = !(bar.size as u32 - 1);
            writable[0x10 + bar.index * 4..][..4].copy_from_slice(&mask.to_le_bytes());
        }
        // Also the window's BAR, offset, length and data, and MSI-X's enable and mask bits.
        writable[window + 4] = 0xff;
        writable[window + 8..window + 20].fill(0xff);
        writable[msix + 3] = 0xc0;
        let pending = u32::from_le_bytes(space[msix + 8..][..4].try_into().expect("four bytes"));
        Self {
            registers: Registers::new(offered, writeback),
            config,
            space,
            writable,
            bars,
            window,
            msix,
            pending: u64::from(pending & !7),
            table: [[0, 0, 0, 1]; VECTORS],
            config_vector: NO_VECTOR,
            queue_vectors: [NO_VECTOR; QUEUES as usize],
        }
    }

    /// The vectors that may send, a bit each.
    pub fn open(&self) -> usize {
        let on = self.space[self.msix + 3] & 0xc0 == 0x80;
        let masks = self.table.iter().enumerate();
        masks.fold(0, |open, (vector, entry)| {
            open | usize::from(on && entry[3] & 1 == 0) << vector
        })
    }

    /// The BAR, offset and length that an access of the configuration space reaches through the
    /// window, if any.
    pub fn window_of(&self, offset: u16, width: usize) -> Option<(usize, u64, usize)> {
        let (data, offset) = (self.window + 16, usize::from(offset));
        if offset >= data + 4 || offset + width <= data {
            return None;
        }
        let field = |at: usize| {
            let bytes = self.space[self.window + at..][..4].try_into();
            u32::from_le_bytes(bytes.expect("four bytes"))
        };
        let index = usize::from(self.space[self.window + 4]);
        let (at, len) = (u64::from(field(8)), u64::from(field(12)));
        let bar = self.bars.iter().find(|bar| bar.index == index)?;
        // 4.1.4.9.1: 1, 2 or 4 bytes, aligned, inside of the BAR.
        let fits = matches!(len, 1 | 2 | 4) && at % len == 0 && at + len <= bar.size;
        fits.then_some((index, at, len as usize))
    }

    pub fn config_write(&mut self, offset: u16, bytes: &[u8]) {
        for (at, byte) in (usize::from(offset)..SPACE).zip(bytes) {
            let mask = self.writable[at];
            self.space[at] = self.space[at] & !mask | byte & mask;
        }
        if let Some((bar, at, len)) = self.window_of(offset, bytes.len()) {
            let data: [u8; 4] = self.space[self.window + 16..][..4]
                .try_into()
                .expect("four bytes");
            self.bar_write(bar, at, &data[..len]);
        }
    }

    /// Compares bytes read from the configuration space. `through`: the window's data is checked
    /// elsewhere.
    pub fn check_config(&self, offset: u16, bytes: &[u8], through: bool) {
        let data = self.window + 16..self.window + 20;
        for (at, byte) in (usize::from(offset)..).zip(bytes) {
            let volatile = if at == STATUS_AT { STATUS_INTERRUPT } else { 0 };
            let expected = self.space.get(at).unwrap_or(&0);
            let same = byte & !volatile == expected & !volatile;
            assert!(
                same || through && data.contains(&at),
                "configuration space at {at:#x}: {byte:#x}, should be {expected:#x}"
            );
        }
    }

    /// Takes over the contents of the window's data register. Only the first `len` bytes may have
    /// changed.
    pub fn adopt_window(&mut self, data: &[u8; 4], len: usize) {
        let register = &mut self.space[self.window + 16..][..4];
        assert_eq!(data[len..], register[len..], "the window beyond its length");
        register.copy_from_slice(data);
    }

    pub fn bar_write(&mut self, bar: usize, offset: u64, bytes: &[u8]) {
        match bar {
            CONFIG_BAR if offset >= DEVICE_CONFIG => {
                if let [value] = *bytes {
                    self.registers.write_config(offset - DEVICE_CONFIG, value);
                }
            }
            CONFIG_BAR if bytes.len() == 8 && matches!(offset, 0x20 | 0x28 | 0x30) => {
                self.write_common(offset, &bytes[..4]);
                self.write_common(offset + 4, &bytes[4..]);
            }
            CONFIG_BAR if offset < COMMON => self.write_common(offset, bytes),
            MSIX_BAR if offset < self.pending => {
                if !matches!(bytes.len(), 4 | 8) || !offset.is_multiple_of(bytes.len() as u64) {
                    return;
                }
                let Some(entry) = self.table.get_mut((offset / 16) as usize) else {
                    return;
                };
                for (word, bytes) in ((offset % 16 / 4) as usize..).zip(bytes.chunks(4)) {
                    let value = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
                    // Only bit 0 of the vector control exists.
                    entry[word] = if word == 3 { value & 1 } else { value };
                }
            }
            _ => {}
        }
    }

    fn write_common(&mut self, offset: u64, bytes: &[u8]) {
        let mut value = [0; 4];
        if bytes.len() > 4 {
            return;
        }
        value[..bytes.len()].copy_from_slice(bytes);
        let value = u32::from_le_bytes(value);
        let existing = |vector: u32| match vector as usize {
            0..VECTORS => vector as u16,
            _ => NO_VECTOR,
        };
        let selected = self.registers.queue_select as usize;
        match (offset, bytes.len()) {
            (0x10, 2) => self.config_vector = existing(value),
            (0x1a, 2) => {
                if let Some(vector) = self.queue_vectors.get_mut(selected) {
                    *vector = existing(value);
                }
            }
            // 4.1.4.3.2: a driver may only write 1 there.
            (0x1c | 0x3a, 2) if value != 1 => {}
            (0x3a, 2) => {
                self.registers.write(Register::QueueReset, 1);
                if self.registers.can_reset_queue()
                    && let Some(vector) = self.queue_vectors.get_mut(selected)
                {
                    *vector = NO_VECTOR;
                }
            }
            (at, width) => {
                let field = FIELDS
                    .iter()
                    .find(|field| (field.1, field.2) == (at, width));
                let Some((register, ..)) = field else {
                    return;
                };
                self.registers.write(*register, value);
                if (*register, value) == (Register::Status, 0) {
                    self.config_vector = NO_VECTOR;
                    self.queue_vectors = [NO_VECTOR; QUEUES as usize];
                }
            }
        }
    }

    /// Compares bytes read from a BAR.
    pub fn check_bar(&mut self, bar: usize, offset: u64, bytes: &[u8]) {
        let common = self.common();
        let word_access = matches!(bytes.len(), 4 | 8) && offset.is_multiple_of(bytes.len() as u64);
        for (index, &byte) in bytes.iter().enumerate() {
            let at = offset.saturating_add(index as u64);
            let expected = match bar {
                CONFIG_BAR if offset >= DEVICE_CONFIG => {
                    let from = usize::try_from(at - DEVICE_CONFIG).unwrap_or(usize::MAX);
                    match from {
                        32 => self.registers.writeback.into(),
                        _ => self.config.get(from).copied().unwrap_or(0),
                    }
                }
                CONFIG_BAR if offset == ISR && index == 0 => {
                    let most = if self.registers.live() { 3 } else { 0 };
                    assert_eq!(byte & !most, 0, "ISR status");
                    continue;
                }
                CONFIG_BAR if offset < COMMON => match at {
                    0x14 => {
                        self.registers.check_status(byte);
                        continue;
                    }
                    0x3a => {
                        self.registers.check_queue_reset(byte.into());
                        continue;
                    }
                    _ => common.get(at as usize).copied().unwrap_or(0),
                },
                MSIX_BAR if offset >= self.pending => {
                    let first = (at - self.pending).saturating_mul(8);
                    for bit in 0..8 {
                        let vector = first.saturating_add(bit);
                        let may = vector < VECTORS as u64 && self.open() >> vector & 1 == 0;
                        assert!(may || byte >> bit & 1 == 0, "pending bit {vector}");
                    }
                    continue;
                }
                MSIX_BAR if word_access => {
                    let entry = self.table.get((at / 16) as usize);
                    let word = entry.map_or(0, |entry| entry[(at % 16 / 4) as usize]);
                    word.to_le_bytes()[(at % 4) as usize]
                }
                _ => 0,
            };
            assert_eq!(byte, expected, "BAR {bar} at {offset:#x} + {index:#x}");
        }
    }

    /// The common configuration, with the status without DEVICE_NEEDS_RESET.
    fn common(&self) -> [u8; COMMON as usize] {
        let mut common = [0; COMMON as usize];
        for (register, offset, width) in FIELDS {
            let value = self.registers.value(register).to_le_bytes();
            common[offset as usize..][..width].copy_from_slice(&value[..width]);
        }
        let select = self.registers.queue_select as usize;
        let vector = self.queue_vectors.get(select).copied();
        let notify_offset = vector.map_or(0, |_| select as u16);
        for (offset, value) in [
            (0x10, self.config_vector),
            (0x12, QUEUES),
            (0x1a, vector.unwrap_or(NO_VECTOR)),
            (0x1e, notify_offset),
        ] {
            common[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
        }
        common
    }

    /// Checks that the BARs are where the driver has put them, with unchanged sizes.
    pub fn check_bars(&self, bars: &[Bar]) {
        let enabled = self.space[4] & 2 != 0;
        for (bar, before) in bars.iter().zip(&self.bars) {
            let at = 0x10 + before.index * 4;
            let address = u32::from_le_bytes(self.space[at..at + 4].try_into().expect("a BAR"));
            let address = address.into();
            let expected = Bar {
                address,
                enabled,
                ..*before
            };
            assert_eq!(*bar, expected);
        }
    }
}
