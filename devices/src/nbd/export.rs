//! A disk under the name by which clients choose it.

use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use crate::backend::{Answer, Backend, SECTOR_SIZE};
use crate::control::{DeviceControl, Gate};
use crate::look_up::LookUpThread;
use crate::metrics::BlockMetrics;
use crate::throttle::Throttle;

/// A disk under the name by which clients choose it.
pub struct Export {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) metrics: Arc<BlockMetrics>,
    pub(super) gate: Arc<Gate>,
    /// Clients and workers that use the export; closed for good once it is removed.
    pub(super) users: Arc<Gate>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) answer: Answer,
    pub(super) look_ups: LookUpThread,
    /// Number of clients that have chosen this export.
    clients: AtomicUsize,
    /// Called whenever the last client is gone.
    deserted: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Export {
    /// Longest name, and longest description, in bytes (the protocol's limit on strings).
    pub const MAX_NAME_BYTES: usize = 4096;

    /// Presents `backend` as `name`; `description` is for people. Both are truncated to
    /// [`MAX_NAME_BYTES`](Self::MAX_NAME_BYTES).
    pub fn new(name: &str, description: &str, backend: Arc<dyn Backend>) -> Self {
        let truncate =
            |text: &str| text[..text.floor_char_boundary(Self::MAX_NAME_BYTES)].to_owned();
        Self {
            name: truncate(name),
            description: truncate(description),
            backend,
            metrics: Arc::new(BlockMetrics::of_queues(1)),
            gate: Arc::default(),
            users: Arc::default(),
            throttle: Arc::default(),
            answer: Answer::default(),
            look_ups: LookUpThread::default(),
            clients: AtomicUsize::new(0),
            deserted: None,
        }
    }

    /// Calls `deserted` whenever the last client has left. A client counts from the end of its
    /// handshake on. A thread of the server makes the call, so the callback must not wait for the
    /// server to stop.
    pub fn when_deserted(self, deserted: impl Fn() + Send + Sync + 'static) -> Self {
        let deserted: Box<dyn Fn() + Send + Sync> = Box::new(deserted);
        Self {
            deserted: Some(deserted),
            ..self
        }
    }

    /// Sets when a write to this export is answered.
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
        // CAN_MULTI_CONN: a FLUSH covers the completed writes of every connection.
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

/// Keeps an export in use: its removal waits until this is dropped.
pub(super) struct ExportGuard {
    /// Dropped before `_user`.
    export: Arc<Export>,
    _user: UserGuard,
}

/// Leaves the gate of an export's users when it is dropped.
struct UserGuard(Arc<Gate>);

impl Drop for UserGuard {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl ExportGuard {
    /// `None`: the export is being removed.
    pub(super) fn enter(export: &Arc<Export>) -> Option<Self> {
        export.users.enter().then(|| Self {
            export: Arc::clone(export),
            _user: UserGuard(Arc::clone(&export.users)),
        })
    }
}

impl Deref for ExportGuard {
    type Target = Arc<Export>;

    fn deref(&self) -> &Arc<Export> {
        &self.export
    }
}

/// The exports of a listener. They may be added and removed while it runs.
#[derive(Default)]
pub(super) struct Exports(RwLock<Vec<Arc<Export>>>);

impl Exports {
    /// All exports that are not being removed, in the order in which they were added.
    pub(super) fn all(&self) -> Vec<ExportGuard> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(ExportGuard::enter).collect()
    }

    /// `export`, unless it has been removed.
    pub(super) fn find(&self, export: &Weak<Export>) -> Option<ExportGuard> {
        let mut all = self.all().into_iter();
        all.find(|other| Arc::as_ptr(other) == export.as_ptr())
    }

    /// Adds an export; `false`: its name is taken.
    pub(super) fn add(&self, export: Export) -> bool {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let free = all.iter().all(|other| other.name != export.name);
        if free {
            all.push(Arc::new(export));
        }
        free
    }

    /// Removes an export, and returns once nobody uses it any more; `false`: no export has this
    /// name.
    pub(super) fn remove(&self, name: &str) -> bool {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let index = all.iter().position(|export| export.name == name);
        let removed = index.map(|index| all.remove(index));
        drop(all);
        removed.inspect(|export| export.users.close()).is_some()
    }
}

/// Counts a client of an export until this is dropped.
pub(super) struct ClientGuard(Arc<Export>);

impl ClientGuard {
    pub(super) fn new(export: &Arc<Export>) -> Self {
        export.clients.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(export))
    }
}

impl Drop for ClientGuard {
    fn drop(&mut self) {
        let last = self.0.clients.fetch_sub(1, Ordering::AcqRel) == 1;
        if let Some(deserted) = self.0.deserted.as_ref().filter(|_| last) {
            deserted();
        }
    }
}

/// The control handle of an export.
struct ExportControl {
    gate: Arc<Gate>,
    backend: Arc<dyn Backend>,
}

impl DeviceControl for ExportControl {
    /// NBD has no message for a new size. New connections see it, and existing ones may access the
    /// new sectors too.
    fn capacity_changed(&self) {}

    /// FLUSH is advertised in both cache modes, so clients flush wherever they have to.
    fn set_write_cache(&self, on: bool) -> bool {
        if self.backend.capabilities().write_cache_toggle {
            self.backend.set_write_cache(on);
        }
        self.backend.write_cache()
    }

    fn pause(&self) -> io::Result<()> {
        self.gate.pause()
    }

    fn resume(&self) {
        self.gate.open();
    }
}
