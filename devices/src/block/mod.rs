//! virtio-blk (virtio 1.2, 5.2): the device object, whatever transport presents it.
//!
//! ```text
//!            VirtioBlock ── offered features, configuration space, cache mode
//!                │ start_queue (DRIVER_OK)
//!                ▼
//!   queue 0: QueueWorker ── Virtqueue ── parse ── BackendQueue ─┐
//!   queue 1: QueueWorker ── Virtqueue ── parse ── BackendQueue ─┼── Backend
//!   …  (served by the threads of a WorkerPool)                  ┘
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use walvisor_devices::backend::ram::RamDisk;
//! use walvisor_devices::block::{BlockConfig, BlockError, VirtioBlock};
//!
//! let disk = Arc::new(RamDisk::new(2048));
//! let config = BlockConfig {
//!     queues: 4,
//!     serial: "a RAM disk".into(),
//!     ..BlockConfig::default()
//! };
//! let device = VirtioBlock::new(disk.clone(), config)?;
//! assert_eq!(device.metrics().counts().requests, 0);
//!
//! let config = BlockConfig {
//!     queue_size: 100,
//!     ..BlockConfig::default()
//! };
//! let refused = VirtioBlock::new(disk, config).err().unwrap();
//! assert_eq!(refused.to_string(), "queue-size=100: must be a power of two from 4 to 1024");
//! # Ok::<(), BlockError>(())
//! ```

mod config;
mod features;
mod in_flight;
mod request;
mod worker;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use request::ID_LEN;
use rustix::thread::{CpuSet, sched_getaffinity};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_SECURE_ERASE,
};
use virtio_bindings::virtio_config::VIRTIO_F_IN_ORDER;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use worker::{QueueWorker, WorkerConfig};

use crate::backend::{Answer, Backend, Capabilities, SECTOR_SIZE, flush};
use crate::control::CacheSwitch;
use crate::memory::DeviceMemory;
use crate::metrics::InterruptCounter;
use crate::reactor::DedicatedThread;
use crate::status::DeviceStatus;
use crate::throttle::Throttle;
use crate::virtio::{
    ActiveQueue, DeviceType, Features, QueueHandle, QueueKind, QueueStart, VirtioDevice, read_space,
};

pub use crate::latency::{LATENCY_CLASSES, Latencies, LatencyCounts, OperationKind};
pub use crate::metrics::{BlockCounts, BlockMetrics};
pub use crate::virtio::{Starter, WorkerPool};

pub(crate) use config::MAX_ERASE_SECTORS;

/// The most queues of a device: their notification addresses fit in one page of the PCI notify BAR.
pub const MAX_QUEUES: u16 = 256;
/// Largest queue size in descriptors.
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// The longest time that a worker may poll its ring before it sleeps.
pub const MAX_POLL: Duration = Duration::from_millis(1);
/// Smallest queue size in descriptors: a header, a status and a segment need three.
pub const MIN_QUEUE_SIZE: u16 = 4;

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockConfig {
    /// Number of request queues, 1 to [`MAX_QUEUES`], each with a worker.
    pub queues: u16,
    /// Descriptors per queue: a power of two from [`MIN_QUEUE_SIZE`] to [`MAX_QUEUE_SIZE`].
    pub queue_size: u16,
    /// The string that GET_ID returns, at most 20 bytes.
    pub serial: String,
    /// Logical block in bytes, 512 or 4096. A driver's requests should be multiples of it, but any
    /// whole number of sectors works (virtio 1.2, 5.2.5).
    pub block_size: u32,
    /// Whether IN_ORDER is offered. A driver that accepts it gets its requests back in the order in
    /// which it sent them, so each request waits for the slowest one before it.
    pub in_order: bool,
    /// Processors for the queues' workers: the worker of queue `i` runs only on the processor at
    /// index `i` modulo the length of the list. Empty: the system decides.
    pub worker_cpus: Vec<u16>,
    /// How long a worker with nothing in flight polls its ring for the next request before it
    /// sleeps, at most [`MAX_POLL`]. Zero: no polling. Polling keeps a processor busy, and saves
    /// the doorbell and the wake-up.
    pub poll: Duration,
    /// When a write is answered, for a driver that outlives this process: its front-end
    /// (vhost-user) records the requests in flight. Other drivers end with this process, and their
    /// writes are answered at once.
    pub answer: Answer,
}

impl Default for BlockConfig {
    /// One queue of 256 descriptors, no serial, blocks of 512 bytes, any order.
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 256,
            serial: String::new(),
            block_size: SECTOR_SIZE as u32,
            in_order: false,
            worker_cpus: Vec::new(),
            poll: Duration::ZERO,
            answer: Answer::default(),
        }
    }
}

impl BlockConfig {
    /// Checks everything that does not depend on the disk.
    pub(crate) fn check(&self) -> Result<(), BlockError> {
        if !(1..=MAX_QUEUES).contains(&self.queues) {
            return Err(BlockError::Queues(self.queues));
        }
        if !(MIN_QUEUE_SIZE..=MAX_QUEUE_SIZE).contains(&self.queue_size)
            || !self.queue_size.is_power_of_two()
        {
            return Err(BlockError::QueueSize(self.queue_size));
        }
        if self.serial.len() > ID_LEN {
            return Err(BlockError::Serial(self.serial.clone()));
        }
        if self.poll > MAX_POLL {
            return Err(BlockError::Poll(self.poll));
        }
        if !self.worker_cpus.is_empty() {
            // If the affinity cannot be read, any processor is accepted; a worker that cannot be
            // pinned logs a warning.
            let allowed = sched_getaffinity(None).ok();
            let forbidden = |cpu: &&u16| {
                usize::from(**cpu) >= CpuSet::MAX_CPU
                    || allowed.is_some_and(|allowed| !allowed.is_set((**cpu).into()))
            };
            if let Some(&cpu) = self.worker_cpus.iter().find(forbidden) {
                return Err(BlockError::Cpu(cpu));
            }
        }
        if !matches!(self.block_size, 512 | 4096) {
            return Err(BlockError::BlockSize(self.block_size));
        }
        Ok(())
    }

    /// The thread of its own that the worker of request queue `index` needs, if it does. `blocks`:
    /// reads of the disk may block.
    pub(crate) fn thread(&self, device: &str, index: u16, blocks: bool) -> Option<DedicatedThread> {
        let at = usize::from(index).checked_rem(self.worker_cpus.len());
        let cpu = at.and_then(|at| self.worker_cpus.get(at)).copied();
        // A worker that polls, or whose disk blocks, would delay the other queues of its thread.
        let needs_own_thread = cpu.is_some() || !self.poll.is_zero() || blocks;
        needs_own_thread.then(|| DedicatedThread {
            name: format!("{device}-q{index}"),
            cpu,
        })
    }
}

/// Why a device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// [`BlockConfig::queues`] is out of range.
    #[error("queues={0}: a disk has 1 to {MAX_QUEUES} queues")]
    Queues(u16),
    /// [`BlockConfig::queue_size`] is out of range or not a power of two.
    #[error("queue-size={0}: must be a power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}")]
    QueueSize(u16),
    /// [`BlockConfig::serial`] is too long.
    #[error("serial={0}: must be at most {ID_LEN} bytes")]
    Serial(String),
    /// [`BlockConfig::block_size`] is neither 512 nor 4096.
    #[error("block-size={0}: give 512 or 4096")]
    BlockSize(u32),
    /// The disk is not a whole number of blocks.
    #[error(
        "block-size={0}: the disk has {1} sectors of 512 bytes, which is not a whole number of \
         blocks: give block-size=512"
    )]
    PartialBlock(u32, u64),
    /// [`BlockConfig::worker_cpus`] names a processor that the process may not run on.
    #[error(
        "worker-cpus: CPU {0} does not exist, or this process may not use it: give CPUs that \
         'nproc' counts"
    )]
    Cpu(u16),
    /// [`BlockConfig::poll`] is too long.
    #[error("poll-usec={}: give at most {}", .0.as_micros(), MAX_POLL.as_micros())]
    Poll(Duration),
    /// The backend's capacity in bytes does not fit 64 bits.
    #[error("the disk has {0} sectors: more than 2^55 - 1")]
    Capacity(u64),
    /// The system refuses an event descriptor.
    #[error("cannot create the doorbell of a queue: {0}")]
    Doorbell(#[source] io::Error),
}

/// A virtio-blk device over a [`Backend`]. A transport owns it and presents it to the guest.
pub struct VirtioBlock {
    backend: Arc<dyn Backend>,
    config: BlockConfig,
    id: [u8; ID_LEN],
    capabilities: Capabilities,
    /// In sectors, as the configuration space reports it.
    capacity: AtomicU64,
    cache: Arc<CacheSwitch>,
    metrics: Arc<BlockMetrics>,
    throttle: Arc<Throttle>,
    workers: Arc<WorkerPool>,
    doorbells: Vec<EventFd>,
}

impl VirtioBlock {
    /// Creates a device. Nothing runs before the driver sets DRIVER_OK.
    ///
    /// # Errors
    /// If `config` is out of range, or the system refuses an event descriptor.
    pub fn new(backend: Arc<dyn Backend>, config: BlockConfig) -> Result<Self, BlockError> {
        config.check()?;
        let mut id = [0; ID_LEN];
        id[..config.serial.len()].copy_from_slice(config.serial.as_bytes());
        let block_size = config.block_size;
        let capacity = backend.sectors();
        if !capacity.is_multiple_of(u64::from(block_size) / SECTOR_SIZE) {
            return Err(BlockError::PartialBlock(block_size, capacity));
        }
        if capacity.checked_mul(SECTOR_SIZE).is_none() {
            return Err(BlockError::Capacity(capacity));
        }
        let doorbells = (0..config.queues)
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<Result<_, _>>()
            .map_err(BlockError::Doorbell)?;
        Ok(Self {
            id,
            capabilities: backend.capabilities(),
            capacity: AtomicU64::new(capacity),
            cache: Arc::new(CacheSwitch::new(Arc::clone(&backend))),
            metrics: Arc::new(BlockMetrics::of_queues(config.queues.into())),
            throttle: Arc::default(),
            workers: Arc::default(),
            doorbells,
            backend,
            config,
        })
    }

    /// The device's counters; they may outlive the device.
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.metrics)
    }

    /// The device's limits, which may be changed at any time; they may outlive the device.
    pub fn throttle(&self) -> Arc<Throttle> {
        Arc::clone(&self.throttle)
    }

    /// Whether the device has to flush after every write, because the driver expects completed
    /// writes to be stable and the backend cannot be switched to writethrough (virtio 1.2,
    /// 5.2.6.2).
    fn flush_after_write(&self, features: Features) -> bool {
        expects_writethrough(features)
            && self.capabilities.flush
            && !self.capabilities.write_cache_toggle
    }

    /// The cache mode, shared with the owner of the device.
    pub(crate) fn cache(&self) -> &Arc<CacheSwitch> {
        &self.cache
    }

    /// Takes over the backend's capacity. `true`: it has changed, so the driver has to be notified.
    pub(crate) fn refresh_capacity(&self) -> bool {
        let block = u64::from(self.config.block_size) / SECTOR_SIZE;
        // The driver does not see a partial block at the end.
        let whole = self.backend.sectors() / block * block;
        self.capacity.swap(whole, Ordering::Relaxed) != whole
    }

    /// Flushes what was written while the cache was volatile. virtio does not require it, but Linux
    /// sends no FLUSH in writethrough mode, so an fsync would not make these writes durable.
    fn flush_before_writethrough(&self) {
        let backend = Arc::clone(&self.backend);
        // The register write waits for a sync, which delays only other accesses to this device's
        // registers.
        if let Err(error) = self.workers.run_in_starter(move || flush(&*backend)) {
            tracing::error!(%error, "a driver asked for writethrough, and earlier writes cannot be \
                                     flushed");
        }
    }

    /// Lets the threads of `pool` serve the queues. Several devices may share a pool; by default
    /// each has its own.
    pub fn serve_with(&mut self, pool: Arc<WorkerPool>) {
        self.workers = pool;
    }
}

impl VirtioDevice for VirtioBlock {
    const TYPE: DeviceType = DeviceType {
        name: "virtio-blk",
        id: 2,
        // Mass storage controller, other.
        pci_class: 0x01_8000,
        config_len: config::CONFIG_LEN,
    };

    fn doorbells(&self) -> &[EventFd] {
        &self.doorbells
    }

    fn queue_size(&self) -> u16 {
        self.config.queue_size
    }

    fn offered_features(&self) -> Features {
        let mut features = Features::for_backend(self.capabilities, self.config.queues);
        if self.config.in_order {
            features.insert(VIRTIO_F_IN_ORDER);
        }
        features
    }

    fn interrupt_counter(&self) -> Arc<dyn InterruptCounter> {
        self.metrics.clone()
    }

    /// Sets the cache mode that follows from the driver's choice.
    ///
    /// A driver without FLUSH cannot make writes stable, so they must be stable when they complete
    /// (5.2.6.2), and `writeback` starts as 0 (5.2.5.2). Otherwise the configured mode applies.
    fn accept_features(&self, features: Features) {
        self.cache.set_negotiated(!expects_writethrough(features));
    }

    /// Back to the configured cache mode.
    fn reset(&self) {
        self.cache.set_for_driver(None);
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = config::encode(&config::ConfigFields {
            capacity: self.capacity.load(Ordering::Relaxed),
            queue_size: self.config.queue_size,
            queues: self.config.queues,
            writeback: self.cache.driver_mode(),
            may_unmap: self.capabilities.discard,
            secure_erase: self.offered_features().has(VIRTIO_BLK_F_SECURE_ERASE),
            block_size: self.config.block_size,
            // At most 16 MiB, MAX_REQUEST_BYTES.
            max_request: u32::try_from(self.backend.max_request_bytes()).unwrap_or(u32::MAX),
        });
        read_space(&space, offset, data);
    }

    fn refresh_config(&self) -> bool {
        self.refresh_capacity()
    }

    /// Writes the configuration space: only `writeback`, and only if CONFIG_WCE was negotiated.
    /// Other writes do nothing (5.2.4).
    fn write_config(&self, offset: u64, data: &[u8], features: Features) {
        if let (config::WRITEBACK, [value]) = (offset as usize, data)
            && features.has(VIRTIO_BLK_F_CONFIG_WCE)
        {
            let volatile = self.backend.write_cache();
            self.cache.set_for_driver(Some(*value != 0));
            if volatile && !self.backend.write_cache() {
                self.flush_before_writethrough();
            }
        }
    }

    fn start_queue<M: DeviceMemory>(
        &self,
        queue: QueueStart,
        features: Features,
        memory: M,
        status: Arc<DeviceStatus>,
    ) -> io::Result<QueueHandle> {
        // A driver that outlives this process expects its completed writes to survive, flushed or
        // not.
        let outlives_process = queue.tracker.is_some();
        let answer_when_written = outlives_process && self.config.answer == Answer::Written;
        let index = queue.index;
        let active = ActiveQueue::open(
            Self::TYPE.name,
            queue,
            self.config.queue_size,
            features,
            &*memory.memory(),
            status,
        );
        let Some(active) = active else {
            return Ok(QueueHandle::broken());
        };
        let blocks = self.backend.blocks();
        let dedicated = self.config.thread(Self::TYPE.name, index, blocks);
        let config = WorkerConfig {
            flush_after_write: self.flush_after_write(features),
            answer_when_written,
            poll: self.config.poll,
            max_size: self.config.queue_size,
            in_order: features.has(VIRTIO_F_IN_ORDER),
            features,
            id: self.id,
            backend: Arc::clone(&self.backend),
            throttle: Arc::clone(&self.throttle),
            metrics: Arc::clone(&self.metrics),
        };
        let outcome = active.driver.outcome();
        QueueHandle::start(&self.workers, QueueKind::Disk(dedicated), move || {
            Ok((QueueWorker::open(config, active, memory)?, outcome))
        })
    }
}

/// Whether a driver that chose `features` expects completed writes to be stable, at least until it
/// writes `writeback` itself.
fn expects_writethrough(features: Features) -> bool {
    !features.has(VIRTIO_BLK_F_FLUSH)
}
