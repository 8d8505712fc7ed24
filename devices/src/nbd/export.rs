//! A disk under the name by which clients choose it.

use std::io;
use std::sync::Arc;

use super::mapper::Mapper;
use crate::backend::{Answer, Backend, SECTOR_SIZE};
use crate::control::{DeviceControl, Gate};
use crate::metrics::BlockMetrics;
use crate::throttle::Throttle;

/// A disk under the name by which clients choose it.
pub struct Export {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) metrics: Arc<BlockMetrics>,
    pub(super) gate: Arc<Gate>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) answer: Answer,
    pub(super) mapper: Mapper,
}

impl Export {
    /// Longest name, and longest description, in bytes (the protocol's limit on strings).
    pub const MAX_NAME_BYTES: usize = 4096;

    /// Presents `backend` as `name`; `description` is for people. Both are cut to [`MAX_NAME_BYTES`](Self::MAX_NAME_BYTES).
    pub fn new(name: &str, description: &str, backend: Arc<dyn Backend>) -> Self {
        let cut = |text: &str| text[..text.floor_char_boundary(Self::MAX_NAME_BYTES)].to_owned();
        Self {
            name: cut(name),
            description: cut(description),
            backend,
            metrics: Arc::new(BlockMetrics::of_queues(1)),
            gate: Arc::default(),
            throttle: Arc::default(),
            answer: Answer::default(),
            mapper: Mapper::default(),
        }
    }

    /// Sets when the server answers writes to this export.
    pub fn answering(self, answer: Answer) -> Self {
        Self { answer, ..self }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counters of the clients' requests so far.
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.metrics)
    }

    /// The limits of the export, for all of its clients together.
    pub fn throttle(&self) -> Arc<Throttle> {
        Arc::clone(&self.throttle)
    }

    /// A handle with which the owner controls the export while it is in use.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::new(ExportControl {
            gate: Arc::clone(&self.gate),
            backend: Arc::clone(&self.backend),
        })
    }

    /// Size of the disk in bytes.
    pub(super) fn size(&self) -> u64 {
        self.backend.sectors().saturating_mul(SECTOR_SIZE)
    }

    /// The transmission flags: what the disk supports.
    pub(super) fn flags(&self, structured: bool) -> u16 {
        use super::protocol::transmission as flag;
        let can = self.backend.capabilities();
        let when = |condition: bool, flags: u16| if condition { flags } else { 0 };
        // CAN_MULTI_CONN: a FLUSH waits for the disk's newest record, whichever connection wrote it.
        flag::HAS_FLAGS
            | flag::CAN_MULTI_CONN
            | when(can.read_only, flag::READ_ONLY)
            | when(can.flush, flag::SEND_FLUSH | flag::SEND_FUA)
            | when(can.discard, flag::SEND_TRIM)
            // FAST_ZERO: zeroing is a record without payload, so it is never slower than a write.
            | when(can.write_zeroes, flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO)
            // DF: the server answers a read as one chunk anyway.
            | when(structured, flag::SEND_DF)
    }
}

/// The control handle of an export.
struct ExportControl {
    gate: Arc<Gate>,
    backend: Arc<dyn Backend>,
}

impl DeviceControl for ExportControl {
    /// NBD has no message for a new size. New connections learn it, and existing ones can access the new sectors too.
    fn capacity_changed(&self) {}

    /// Both cache modes announce FLUSH to clients, so clients flush where they have to.
    fn set_write_cache(&self, on: bool) -> bool {
        if self.backend.capabilities().write_cache_toggle {
            self.backend.set_write_cache(on);
        }
        self.backend.write_cache()
    }

    fn pause(&self) -> io::Result<()> {
        self.gate.close();
        Ok(())
    }

    fn resume(&self) {
        self.gate.open();
    }
}
