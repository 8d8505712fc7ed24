//! A logical unit: a backend as a SCSI block device.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use super::order::CommandOrder;
use super::sense::Sense;
use crate::backend::{Backend, Capabilities, MAX_REQUEST_BYTES, SECTOR_SIZE};
use crate::control::GateWatcher;

/// Physical block in bytes, as for virtio-blk: the alignment of the log, and the usual block size
/// of the media under base images.
pub(super) const PHYSICAL_BLOCK: u32 = 4096;

/// The most blocks of a COMPARE AND WRITE: its CDB has one byte for their number.
const MAX_COMPARE_BLOCKS: u64 = u8::MAX as u64;

/// Why a backend cannot be a logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// The block size is neither 512 nor 4096 bytes.
    #[error("a logical block of {0} bytes: it must be 512 or 4096")]
    BlockSize(u32),
    /// The disk is smaller than a logical block.
    #[error("the disk is smaller than a logical block of {0} bytes")]
    TooSmall(u32),
}

/// A logical unit: a [`Backend`] with an identity, a logical block size, and the state that its
/// commands share.
///
/// All initiators share the unit's state, because the transports cannot tell them apart. So each
/// unit attention condition is reported once, and mode pages are shared.
pub struct LogicalUnit {
    backend: Arc<dyn Backend>,
    serial: String,
    block_size: u32,
    /// WCE when the unit was created.
    default_write_cache: bool,
    pub(super) order: Arc<CommandOrder>,
    /// D_SENSE of the control mode page.
    descriptor_sense: AtomicBool,
    /// Stopped by START STOP UNIT.
    stopped: AtomicBool,
    /// Unit attention conditions to be reported, as bits; the lowest is reported first.
    attentions: AtomicU8,
    /// How many units the target has, which REPORT LUNS lists.
    units_of_target: AtomicU8,
}

/// The unit attention conditions, the one with the lowest bit first (SAM-5, 5.14.5).
const ATTENTIONS: [Sense; 2] = [Sense::RESET, Sense::CAPACITY_CHANGED];
/// The bit of a reset.
const RESET: u8 = 1 << 0;
/// The bit of CAPACITY DATA HAS CHANGED.
const CAPACITY_CHANGED: u8 = 1 << 1;

impl LogicalUnit {
    /// Longest serial number in bytes.
    pub const MAX_SERIAL_BYTES: usize = 36;

    /// Presents `backend` with logical blocks of `block_size` bytes, 512 or 4096. A partial block
    /// at the end of the disk cannot be accessed.
    ///
    /// `serial` is the PRODUCT SERIAL NUMBER (VPD page 80h). The designators of page 83h are
    /// derived from it, so hosts take units with the same serial number for paths to one disk.
    /// Characters other than printable ASCII become `_`, and it is truncated to
    /// [`MAX_SERIAL_BYTES`](Self::MAX_SERIAL_BYTES).
    ///
    /// # Errors
    /// If the block size is neither of these, or the disk is smaller than a block.
    pub fn new(
        backend: Arc<dyn Backend>,
        serial: &str,
        block_size: u32,
    ) -> Result<Self, UnitError> {
        if !matches!(block_size, 512 | 4096) {
            return Err(UnitError::BlockSize(block_size));
        }
        let printable = |c: char| {
            if c.is_ascii_graphic() || c == ' ' {
                c
            } else {
                '_'
            }
        };
        let serial = serial.chars().take(Self::MAX_SERIAL_BYTES);
        let unit = Self {
            default_write_cache: backend.capabilities().flush && backend.write_cache(),
            backend,
            serial: serial.map(printable).collect(),
            block_size,
            order: Arc::default(),
            descriptor_sense: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            attentions: AtomicU8::new(0),
            units_of_target: AtomicU8::new(1),
        };
        match unit.blocks() {
            0 => Err(UnitError::TooSmall(block_size)),
            _ => Ok(unit),
        }
    }

    /// The disk.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The serial number, as initiators see it.
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// Bytes of a logical block: 512 or 4096.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Current capacity in logical blocks.
    pub fn blocks(&self) -> u64 {
        self.backend.sectors() / self.sectors_per_block()
    }

    /// The most bytes that a command moves, a multiple of the block size. A command that asks for
    /// more is refused.
    pub fn max_transfer_bytes(&self) -> usize {
        let block = self.block_size as usize;
        let most = self.backend.max_request_bytes().min(MAX_REQUEST_BYTES);
        (most / block).max(1) * block
    }

    /// The disk has another size: the next command gets a unit attention condition.
    pub fn capacity_changed(&self) {
        self.attentions.fetch_or(CAPACITY_CHANGED, Ordering::AcqRel);
    }

    /// The unit is one of `units`, numbered from 0, of its target.
    pub(crate) fn set_units_of_target(&self, units: u8) {
        self.units_of_target.store(units, Ordering::Relaxed);
    }

    pub(super) fn units_of_target(&self) -> u8 {
        self.units_of_target.load(Ordering::Relaxed)
    }

    /// The effects of a reset (SAM-5, 6.3.3), but for commands in flight and for the cache mode,
    /// which only an initiator or the owner changes.
    pub(crate) fn reset(&self) {
        self.set_stopped(false);
        self.set_descriptor_sense(false);
        self.attentions.fetch_or(RESET, Ordering::AcqRel);
    }

    /// Wakes `watcher` when blocked commands may go on.
    pub(crate) fn watch_order(&self, watcher: Weak<dyn GateWatcher>) {
        self.order.watch(watcher);
    }

    pub(super) fn sectors_per_block(&self) -> u64 {
        u64::from(self.block_size) / SECTOR_SIZE
    }

    /// MAXIMUM TRANSFER LENGTH in blocks.
    pub(super) fn max_transfer_blocks(&self) -> u32 {
        (self.max_transfer_bytes() / self.block_size as usize) as u32
    }

    /// MAXIMUM ATOMIC TRANSFER LENGTH in blocks; 0: WRITE ATOMIC is not supported. Its CDB has two
    /// bytes for their number.
    pub(super) fn max_atomic_blocks(&self) -> u32 {
        let most = self.backend.max_atomic_bytes() / self.block_size as usize;
        most.min(self.max_transfer_blocks() as usize)
            .min(u16::MAX.into()) as u32
    }

    /// MAXIMUM COMPARE AND WRITE LENGTH in blocks.
    pub(super) fn max_compare_blocks(&self) -> u8 {
        u64::from(self.max_transfer_blocks()).min(MAX_COMPARE_BLOCKS) as u8
    }

    pub(super) fn can(&self) -> Capabilities {
        self.backend.capabilities()
    }

    /// Whether blocks can be unmapped. Unmapped blocks read as zeroes (LBPME, LBPRZ).
    pub(super) fn is_thin(&self) -> bool {
        let can = self.can();
        can.discard && !can.read_only
    }

    /// WCE: writes complete before they are durable.
    pub(super) fn write_cache(&self) -> bool {
        self.can().flush && self.backend.write_cache()
    }

    pub(super) fn default_write_cache(&self) -> bool {
        self.default_write_cache
    }

    pub(super) fn descriptor_sense(&self) -> bool {
        self.descriptor_sense.load(Ordering::Relaxed)
    }

    pub(super) fn set_descriptor_sense(&self, on: bool) {
        self.descriptor_sense.store(on, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    pub(super) fn set_stopped(&self, stopped: bool) {
        self.stopped.store(stopped, Ordering::Relaxed);
    }

    /// Takes the unit attention condition to report next.
    pub(super) fn take_attention(&self) -> Option<Sense> {
        // Loaded first: there is hardly ever one.
        let lowest = self.attentions.load(Ordering::Relaxed).trailing_zeros();
        let sense = ATTENTIONS.get(lowest as usize)?;
        let bit = 1 << lowest;
        let before = self.attentions.fetch_and(!bit, Ordering::AcqRel);
        (before & bit != 0).then_some(*sense)
    }
}
