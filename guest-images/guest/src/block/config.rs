//! Features and configuration space of a block device (virtio 1.2, 5.2.3 and 5.2.4).

use core::fmt;

use crate::error::Error;
use crate::pattern::BLOCK;
use crate::transport::Transport;

/// Feature bits.
pub mod feature {
    /// `seg_max` is valid.
    pub const SEG_MAX: u32 = 2;
    /// `blk_size` is valid.
    pub const BLK_SIZE: u32 = 6;
    /// The device supports FLUSH.
    pub const FLUSH: u32 = 9;
    /// `writeback` can be written.
    pub const CONFIG_WCE: u32 = 11;
    /// `num_queues` is valid.
    pub const MQ: u32 = 12;
    /// The device supports DISCARD.
    pub const DISCARD: u32 = 13;
    /// The device supports WRITE_ZEROES.
    pub const WRITE_ZEROES: u32 = 14;
    /// `size_max` is valid.
    pub const SIZE_MAX: u32 = 1;
    /// `topology` is valid.
    pub const TOPOLOGY: u32 = 10;
    /// The device supports GET_LIFETIME.
    pub const LIFETIME: u32 = 15;
    /// The device supports SECURE_ERASE.
    pub const SECURE_ERASE: u32 = 16;
    /// The device uses requests in the order in which the driver made them available.
    pub const IN_ORDER: u32 = 35;
    /// The driver can reset a single queue.
    pub const RING_RESET: u32 = 40;
    /// A descriptor may point at a table of descriptors.
    pub const INDIRECT_DESC: u32 = 28;
    /// `used_event` and `avail_event` are in use.
    pub const EVENT_IDX: u32 = 29;
    /// Not a legacy device.
    pub const VERSION_1: u32 = 32;

    /// The features that the job's driver uses, with their names, in the order of their bits.
    pub const NAMES: [(u32, &str); 10] = [
        (SEG_MAX, "SEG_MAX"),
        (BLK_SIZE, "BLK_SIZE"),
        (FLUSH, "FLUSH"),
        (CONFIG_WCE, "CONFIG_WCE"),
        (MQ, "MQ"),
        (DISCARD, "DISCARD"),
        (WRITE_ZEROES, "WRITE_ZEROES"),
        (INDIRECT_DESC, "INDIRECT_DESC"),
        (EVENT_IDX, "EVENT_IDX"),
        (VERSION_1, "VERSION_1"),
    ];
}

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// The features that this driver knows.
    pub fn known() -> Self {
        Self(
            feature::NAMES
                .iter()
                .fold(0, |bits, &(bit, _)| bits | 1 << bit),
        )
    }

    /// Whether the feature `bit` is in this set.
    pub fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names = feature::NAMES.iter().filter(|&&(bit, _)| self.has(bit));
        if let Some((_, first)) = names.next() {
            f.write_str(first)?;
        }
        names.try_for_each(|(_, name)| write!(f, ",{name}"))
    }
}

// Configuration space, 5.2.4.
const CAPACITY: u64 = 0;
const SEG_MAX: u64 = 12;
const BLK_SIZE: u64 = 20;
/// The write cache: 1 on (writeback), 0 off (writethrough).
pub(super) const WRITEBACK: u64 = 32;
const NUM_QUEUES: u64 = 34;
const MAX_DISCARD_SECTORS: u64 = 36;
const MAX_WRITE_ZEROES_SECTORS: u64 = 48;

/// The fields of the configuration space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Capacity in sectors of 512 bytes.
    pub sectors: u64,
    /// Most data segments of a request.
    pub seg_max: u32,
    /// Size that requests should be multiples of, in bytes.
    pub block_size: u32,
    /// Queues of the device.
    pub queues: u16,
    /// Most sectors of a DISCARD.
    pub max_discard: u32,
    /// Most sectors of a WRITE_ZEROES.
    pub max_write_zeroes: u32,
}

/// Reads the fields that `features` make valid.
pub(super) fn read_config(
    transport: &mut dyn Transport,
    features: Features,
) -> Result<Config, Error> {
    let mut field = |bit, offset, without| {
        if features.has(bit) {
            transport.config32(offset)
        } else {
            without
        }
    };
    let seg_max = field(feature::SEG_MAX, SEG_MAX, 1);
    let block_size = field(feature::BLK_SIZE, BLK_SIZE, 512);
    let max_discard = field(feature::DISCARD, MAX_DISCARD_SECTORS, 0);
    let max_write_zeroes = field(feature::WRITE_ZEROES, MAX_WRITE_ZEROES_SECTORS, 0);
    let queues = if features.has(feature::MQ) {
        transport.config16(NUM_QUEUES)
    } else {
        1
    };
    let sectors = transport.config64(CAPACITY);
    if queues == 0 {
        return Err(Error::Config("num_queues is 0"));
    }
    if seg_max == 0 {
        return Err(Error::Config("seg_max is 0"));
    }
    if !block_size.is_power_of_two() || block_size as usize > BLOCK {
        return Err(Error::Config(
            "blk_size is no power of two from 512 to 4096",
        ));
    }
    Ok(Config {
        sectors,
        seg_max,
        block_size,
        queues,
        max_discard,
        max_write_zeroes,
    })
}
