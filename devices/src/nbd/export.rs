//! A disk under a name that clients ask for.

use std::io;
use std::sync::Arc;

use super::mapper::Mapper;
use crate::backend::{Answer, Backend, SECTOR_SIZE};
use crate::control::{DeviceControl, Gate};
use crate::metrics::BlockMetrics;
use crate::throttle::Throttle;

/// A disk under a name that clients ask for.
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

    /// The same, whose clients' writes are answered so.
    pub fn answering(self, answer: Answer) -> Self {
        Self { answer, ..self }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What clients have asked for so far.
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.metrics)
    }

    /// The limits of the export, for all of its clients together.
    pub fn throttle(&self) -> Arc<Throttle> {
        Arc::clone(&self.throttle)
    }

    /// The export in use, for its owner.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::new(ExportControl {
            gate: Arc::clone(&self.gate),
            backend: Arc::clone(&self.backend),
        })
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.backend.sectors().saturating_mul(SECTOR_SIZE)
    }

    /// The transmission flags: what the disk really does.
    pub(super) fn flags(&self, structured: bool) -> u16 {
        use super::protocol::transmission as flag;
        let can = self.backend.capabilities();
        let when = |condition: bool, flags: u16| if condition { flags } else { 0 };
        // A FLUSH waits for the newest record of the disk, whoever wrote it.
        flag::HAS_FLAGS
            | flag::CAN_MULTI_CONN
            | when(can.read_only, flag::READ_ONLY)
            | when(can.flush, flag::SEND_FLUSH | flag::SEND_FUA)
            | when(can.discard, flag::SEND_TRIM)
            // Zeroes are a record without payload, so never slower than a write.
            | when(can.write_zeroes, flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO)
            // A read is answered as one chunk anyway.
            | when(structured, flag::SEND_DF)
    }
}

/// An export as its owner sees it.
struct ExportControl {
    gate: Arc<Gate>,
    backend: Arc<dyn Backend>,
}

impl DeviceControl for ExportControl {
    /// The protocol has no word for it: who connects from now on learns the size, and others reach all of it too.
    fn capacity_changed(&self) {}

    /// Clients are told of FLUSH whatever the mode, so they flush where they have to.
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
