//! Device registers in memory and in I/O port space.

use core::arch::asm;

/// Devices that a program reaches by calls, without a virtual machine.
pub trait Bus: core::fmt::Debug {
    /// Reads `bytes` at `address`, in one access.
    fn read(&self, address: u64, bytes: &mut [u8]);
    /// Writes `bytes` at `address`, in one access.
    fn write(&self, address: u64, bytes: &[u8]);
}

/// A block of memory-mapped registers.
///
/// Each access is a single MOV in inline assembly. A VMM's instruction decoder knows MOV, while the
/// compiler may use another instruction for a volatile access.
#[derive(Clone, Copy, Debug)]
pub struct Registers {
    base: u64,
    /// What carries out the accesses, instead of MOV.
    bus: Option<&'static dyn Bus>,
}

macro_rules! access {
    ($read:ident, $write:ident, $type:ty, $class:ident, $load:literal, $store:literal, $bits:literal) => {
        #[doc = concat!("Reads the ", $bits, "-bit register at `offset`.")]
        pub fn $read(&self, offset: u64) -> $type {
            if let Some(bus) = self.bus {
                let mut bytes = [0; size_of::<$type>()];
                bus.read(self.base + offset, &mut bytes);
                return <$type>::from_le_bytes(bytes);
            }
            let value: $type;
            // SAFETY: `new` requires that the block is device registers, where a read has no effect
            // on the program's own memory.
            unsafe {
                asm!($load, out($class) value, in(reg) self.base + offset, options(nostack, preserves_flags));
            }
            value
        }

        #[doc = concat!("Writes the ", $bits, "-bit register at `offset`.")]
        pub fn $write(&self, offset: u64, value: $type) {
            if let Some(bus) = self.bus {
                return bus.write(self.base + offset, &value.to_le_bytes());
            }
            // SAFETY: as above; what the device then does to memory is covered by the regions
            // handed to it.
            unsafe {
                asm!($store, in(reg) self.base + offset, in($class) value, options(nostack, preserves_flags));
            }
        }
    };
}

impl Registers {
    /// The registers from `base` on.
    ///
    /// # Safety
    /// Every offset that is used is a device register, not memory that the program uses otherwise.
    pub unsafe fn new(base: u64) -> Self {
        Self { base, bus: None }
    }

    /// The registers from `base` on, of the devices on `bus`.
    pub fn on(bus: &'static dyn Bus, base: u64) -> Self {
        Self {
            base,
            bus: Some(bus),
        }
    }

    access!(
        read8,
        write8,
        u8,
        reg_byte,
        "mov {}, byte ptr [{}]",
        "mov byte ptr [{}], {}",
        "8"
    );
    access!(
        read16,
        write16,
        u16,
        reg,
        "mov {:x}, word ptr [{}]",
        "mov word ptr [{}], {:x}",
        "16"
    );
    access!(
        read32,
        write32,
        u32,
        reg,
        "mov {:e}, dword ptr [{}]",
        "mov dword ptr [{}], {:e}",
        "32"
    );

    access!(
        read_qword,
        write_qword,
        u64,
        reg,
        "mov {}, qword ptr [{}]",
        "mov qword ptr [{}], {}",
        "64"
    );

    /// Reads `width` bytes (1, 2, 4 or 8) at `offset`, in one access.
    pub fn read(&self, offset: u64, width: u8) -> u64 {
        match width {
            1 => self.read8(offset).into(),
            2 => self.read16(offset).into(),
            4 => self.read32(offset).into(),
            _ => self.read_qword(offset),
        }
    }

    /// Writes the low `width` bytes (1, 2, 4 or 8) of `value` at `offset`, in one access.
    pub fn write(&self, offset: u64, width: u8, value: u64) {
        match width {
            1 => self.write8(offset, value as u8),
            2 => self.write16(offset, value as u16),
            4 => self.write32(offset, value as u32),
            _ => self.write_qword(offset, value),
        }
    }

    /// Writes a 64-bit register as two halves, the low one first (virtio 1.2, 4.1.3.1 and 4.2.2.2
    /// allow it).
    pub fn write64(&self, offset: u64, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }

    /// Reads a 64-bit register as two halves, the low one first.
    pub fn read64(&self, offset: u64) -> u64 {
        u64::from(self.read32(offset)) | u64::from(self.read32(offset + 4)) << 32
    }

    /// The block that begins `offset` bytes further on.
    pub fn at(&self, offset: u64) -> Self {
        Self {
            base: self.base + offset,
            ..*self
        }
    }
}

/// Writes 16 bits to an I/O port.
///
/// # Safety
/// As [`write_port`].
pub unsafe fn write_port16(port: u16, value: u16) {
    // SAFETY: the caller guarantees the device's effects; the instruction itself accesses no
    // memory.
    unsafe {
        asm!("out dx, ax", in("dx") port, in("ax") value, options(nomem, nostack, preserves_flags))
    };
}

/// Writes a byte to an I/O port.
///
/// # Safety
/// The device behind the port must not harm memory that the program uses.
pub unsafe fn write_port(port: u16, value: u8) {
    // SAFETY: the caller guarantees the device's effects; the instruction itself accesses no
    // memory.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags))
    };
}
