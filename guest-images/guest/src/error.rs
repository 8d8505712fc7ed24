//! The guest's errors, each one line for the console.

use core::fmt;

/// Why the guest could not do its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// No virtio block device behind this transport.
    NoDevice,
    /// The device does not offer the named feature.
    FeatureMissing(&'static str),
    /// The device did not keep FEATURES_OK: it refuses the features that the driver accepted.
    FeaturesRefused,
    /// The device asks for a reset (DEVICE_NEEDS_RESET) or has failed.
    DeviceBroken {
        /// Its status register.
        status: u8,
    },
    /// A queue is absent, or too small.
    Queue {
        /// Its index.
        index: u16,
        /// The fault.
        what: &'static str,
    },
    /// The used ring names a descriptor that is not in flight.
    UsedRing {
        /// The descriptor.
        id: u32,
    },
    /// A PCI capability, BAR or table is absent or does not fit.
    Pci(&'static str),
    /// There is not enough RAM.
    Memory,
    /// A request ended with another status than OK.
    Status {
        /// Which request.
        request: &'static str,
        /// Its first sector.
        sector: u64,
        /// The status byte: 1 is IOERR, 2 UNSUPP, 0xff never written.
        status: u8,
    },
    /// The used length of a request is wrong.
    Length {
        /// Which request.
        request: &'static str,
        /// Bytes that the device should have written.
        expected: u32,
        /// Bytes that it says it has.
        found: u32,
    },
    /// A block does not read as it was written.
    Content {
        /// Its number (4 KiB blocks).
        block: u32,
        /// First wrong byte in it.
        offset: usize,
        /// The byte it must read as.
        expected: u8,
        /// The byte that was read.
        found: u8,
    },
    /// A field of the device's configuration space makes no sense.
    Config(&'static str),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoDevice => write!(f, "no virtio block device found"),
            Self::FeatureMissing(name) => write!(f, "the device does not offer {name}"),
            Self::FeaturesRefused => write!(f, "the device refuses the accepted features"),
            Self::DeviceBroken { status } => write!(f, "the device failed, status {status:#04x}"),
            Self::Queue { index, what } => write!(f, "queue {index}: {what}"),
            Self::UsedRing { id } => write!(f, "used ring: descriptor {id} is not in flight"),
            Self::Pci(what) => write!(f, "PCI: {what}"),
            Self::Memory => write!(f, "out of memory"),
            Self::Status {
                request,
                sector,
                status,
            } => {
                write!(f, "{request} at sector {sector} ended with status {status}")
            }
            Self::Length {
                request,
                expected,
                found,
            } => {
                write!(f, "{request}: used length {found}, expected {expected}")
            }
            Self::Content {
                block,
                offset,
                expected,
                found,
            } => write!(
                f,
                "block {block}, byte {offset}: expected {expected:#04x}, read {found:#04x}"
            ),
            Self::Config(what) => write!(f, "configuration space: {what}"),
        }
    }
}
