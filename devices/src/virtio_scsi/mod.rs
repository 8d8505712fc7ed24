//! virtio-scsi (virtio 1.2, 5.6): one target whose logical units are disks.
//!
//! ```text
//!   queue 0, control:   task management ── TaskFunction ─▶ every request queue ─▶ answered when all have finished it
//!   queue 1, events:    a unit has another capacity
//!   queue 2 …, requests: chain ── parse ─▶ UnitQueue of the unit ── Task ─▶ BackendQueue
//! ```
//! A unit that its owner has paused, or whose limits hold its commands, does not hold up the
//! others.
//!
//! ```
//! use std::sync::Arc;
//! use walvisor_devices::backend::ram::RamDisk;
//! use walvisor_devices::block::BlockConfig;
//! use walvisor_devices::virtio_scsi::{ScsiError, VirtioScsi};
//!
//! let config = |serial: &str| {
//!     let serial = serial.to_owned();
//!     BlockConfig { serial, ..BlockConfig::default() }
//! };
//! let mut target = VirtioScsi::new(Arc::new(RamDisk::new(2048)), config("unit 0"))?;
//! let unit = target.add_unit(Arc::new(RamDisk::new(64)), &config("unit 1"))?;
//! assert_eq!(unit.number, 1);
//! # Ok::<(), ScsiError>(())
//! ```
//!
//! # Choices that the standard leaves open
//!
//! - **ORDERED and ACA** tasks are refused (INVALID MESSAGE ERROR): units carry commands out in any
//!   order. HEAD OF QUEUE is as good as SIMPLE.
//! - **A reset** keeps the cache mode: only the driver or the owner changes that.
//! - **INOUT and T10_PI** are not offered.

mod commands;
mod control;
mod events;
mod request;
mod target;
mod worker;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::backend::{Answer, Backend, MAX_REQUEST_BYTES, SECTOR_SIZE};
use crate::block::{BlockConfig, BlockError, MAX_QUEUES};
use crate::control::DeviceControl;
use crate::memory::DeviceMemory;
use crate::metrics::{BlockMetrics, InterruptCounter};
use crate::scsi::{LogicalUnit, SharedUnit, UnitError};
use crate::status::DeviceStatus;
use crate::throttle::Throttle;
use crate::virtio::{
    ActiveQueue, DeviceType, Features, QueueHandle, QueueKind, QueueStart, VirtioDevice,
    WorkerPool, read_space,
};

use commands::Commands;
use control::ControlQueue;
use events::{EVENT, Events};
use request::Layout;
use target::{QueueLinks, ScsiTarget, UnitControl};
use worker::{Role, ScsiQueue, ScsiWorker};

/// VIRTIO_SCSI_F_HOTPLUG.
const HOTPLUG: u32 = 1;
/// VIRTIO_SCSI_F_CHANGE.
const CHANGE: u32 = 2;
/// The control queue (5.6.2).
const CONTROL_QUEUE: u16 = 0;
/// The event queue.
const EVENT_QUEUE: u16 = 1;
/// The first request queue.
const FIRST_REQUEST_QUEUE: usize = 2;
/// Length of the configuration space in bytes (5.6.4).
const CONFIG_LEN: usize = 36;
/// Offsets of the two fields that a driver may write, and their values after a reset.
const SENSE_SIZE: (u64, u32) = (20, 96);
const CDB_SIZE: (u64, u32) = (24, 32);
/// Most bytes of either: SPC-5 has no longer sense data, and no longer CDB.
const MAX_SIZE: u32 = 252;
/// The highest number that flat space addressing has.
const MAX_LUN: u32 = 0x3fff;
/// How many commands of a unit a driver should have in flight.
const CMD_PER_LUN: u32 = 128;

/// The most logical units of a target.
pub const MAX_UNITS: usize = 16;
/// The most request queues: with the two others, as many as any device may have.
pub const MAX_REQUEST_QUEUES: u16 = MAX_QUEUES - FIRST_REQUEST_QUEUE as u16;

/// Why a target cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ScsiError {
    /// A property is out of range.
    #[error("{0}")]
    Config(#[from] BlockError),
    /// There are too many request queues.
    #[error("queues={0}: a SCSI target has 1 to {MAX_REQUEST_QUEUES} request queues")]
    Queues(u16),
    /// There are too many logical units.
    #[error("a SCSI target has at most {MAX_UNITS} disks")]
    TooManyUnits,
    /// A disk cannot be a logical unit.
    #[error("{0}")]
    Unit(#[from] UnitError),
    /// The system refuses an event descriptor.
    #[error("cannot create the doorbell of a queue: {0}")]
    Doorbell(#[source] io::Error),
}

/// A logical unit in use. It stays readable after the target is gone.
#[derive(Clone)]
pub struct ScsiUnit {
    /// Its number, from 0.
    pub number: usize,
    /// Its counters.
    pub metrics: Arc<BlockMetrics>,
    /// Its limits, which may be changed at any time.
    pub throttle: Arc<Throttle>,
    /// Controls it while it is in use.
    pub control: Arc<dyn DeviceControl>,
}

/// A virtio-scsi device. A transport owns it and presents it to the guest.
pub struct VirtioScsi {
    /// What concerns the queues.
    config: BlockConfig,
    units: Vec<SharedUnit>,
    links: Arc<QueueLinks>,
    sense_size: AtomicU32,
    cdb_size: AtomicU32,
    workers: Arc<WorkerPool>,
    doorbells: Vec<EventFd>,
}

impl VirtioScsi {
    /// A target with `disk` as its logical unit 0. `config` says everything about the queues too.
    ///
    /// # Errors
    /// If `config` is out of range, the disk cannot be a unit, or the system refuses an event
    /// descriptor.
    pub fn new(disk: Arc<dyn Backend>, config: BlockConfig) -> Result<Self, ScsiError> {
        if config.queues > MAX_REQUEST_QUEUES {
            return Err(ScsiError::Queues(config.queues));
        }
        let queues = FIRST_REQUEST_QUEUE + usize::from(config.queues);
        let doorbells = (0..queues).map(|_| EventFd::new(EFD_NONBLOCK));
        let mut target = Self {
            units: Vec::new(),
            links: Arc::default(),
            config: config.clone(),
            sense_size: AtomicU32::new(SENSE_SIZE.1),
            cdb_size: AtomicU32::new(CDB_SIZE.1),
            workers: Arc::default(),
            doorbells: doorbells
                .collect::<Result<_, _>>()
                .map_err(ScsiError::Doorbell)?,
        };
        target.add_unit(disk, &config)?;
        Ok(target)
    }

    /// Adds a disk as the next logical unit, with the `serial` and the `block_size` of its
    /// configuration.
    ///
    /// # Errors
    /// If `config` is out of range, the disk cannot be a unit, or there are too many.
    pub fn add_unit(
        &mut self,
        disk: Arc<dyn Backend>,
        config: &BlockConfig,
    ) -> Result<ScsiUnit, ScsiError> {
        config.check()?;
        if self.units.len() >= MAX_UNITS {
            return Err(ScsiError::TooManyUnits);
        }
        let unit = LogicalUnit::new(disk, &config.serial, config.block_size)?;
        self.units
            .push(SharedUnit::new(unit, self.config.queues.into()));
        let count = self.units.len();
        for shared in &self.units {
            shared.unit.set_units_of_target(count as u8);
        }
        Ok(self.handle(count - 1))
    }

    /// Logical unit 0.
    pub fn first_unit(&self) -> ScsiUnit {
        self.handle(0)
    }

    fn handle(&self, number: usize) -> ScsiUnit {
        let shared = &self.units[number];
        ScsiUnit {
            number,
            metrics: Arc::clone(&shared.metrics),
            throttle: Arc::clone(&shared.throttle),
            control: Arc::new(UnitControl {
                shared: shared.clone(),
                links: Arc::clone(&self.links),
                number,
            }),
        }
    }

    /// Lets the threads of `pool` serve the queues. Several devices may share a pool; by default
    /// each has its own.
    pub fn serve_with(&mut self, pool: Arc<WorkerPool>) {
        self.workers = pool;
    }

    /// The first unit. Doorbells, interrupts and the time spent polling count as its own, and its
    /// weight counts for all units.
    fn first(&self) -> &SharedUnit {
        &self.units[0]
    }
}

impl VirtioDevice for VirtioScsi {
    const TYPE: DeviceType = DeviceType {
        name: "virtio-scsi",
        id: 8,
        // Mass storage controller, SCSI.
        pci_class: 0x01_0000,
        config_len: CONFIG_LEN,
    };

    fn doorbells(&self) -> &[EventFd] {
        &self.doorbells
    }

    fn queue_size(&self) -> u16 {
        self.config.queue_size
    }

    fn offered_features(&self) -> Features {
        let mut features = Features::of_every_device();
        // No unit ever comes or goes, but Linux gives the event queue buffers only with HOTPLUG.
        features.insert(HOTPLUG);
        features.insert(CHANGE);
        features
    }

    fn interrupt_counter(&self) -> Arc<dyn InterruptCounter> {
        Arc::<BlockMetrics>::clone(&self.first().metrics)
    }

    fn accept_features(&self, _: Features) {}

    fn reset(&self) {
        self.sense_size.store(SENSE_SIZE.1, Ordering::Relaxed);
        self.cdb_size.store(CDB_SIZE.1, Ordering::Relaxed);
        self.units.iter().for_each(|shared| shared.unit.reset());
    }

    /// `struct virtio_scsi_config` (5.6.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let units = self.units.iter();
        let longest = units.map(|shared| shared.unit.max_transfer_bytes()).min();
        let longest = longest.unwrap_or(MAX_REQUEST_BYTES) as u64;
        let fields = [
            self.config.queues.into(),
            // A request also has a header and a response.
            u32::from(self.config.queue_size) - 2,
            (longest / SECTOR_SIZE) as u32,
            CMD_PER_LUN,
            EVENT as u32,
            self.sense_size.load(Ordering::Relaxed),
            self.cdb_size.load(Ordering::Relaxed),
            // max_channel and max_target: there is one of each, number 0.
            0,
            MAX_LUN,
        ];
        read_space(fields.map(u32::to_le_bytes).as_flattened(), offset, data);
    }

    /// A driver may write two fields. Values that the device does not take change nothing.
    fn write_config(&self, offset: u64, data: &[u8], _: Features) {
        let Ok(value) = data.try_into().map(u32::from_le_bytes) else {
            return;
        };
        match offset {
            at if at == SENSE_SIZE.0 && value <= MAX_SIZE => {
                self.sense_size.store(value, Ordering::Relaxed);
            }
            at if at == CDB_SIZE.0 && (1..=MAX_SIZE).contains(&value) => {
                self.cdb_size.store(value, Ordering::Relaxed);
            }
            _ => {}
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
        let queue = ScsiQueue {
            active,
            memory,
            target: Arc::new(ScsiTarget {
                units: self.units.clone(),
                links: Arc::clone(&self.links),
            }),
            batch: Vec::new(),
            max_descriptors: self.config.queue_size.into(),
        };
        match index {
            CONTROL_QUEUE => self.start(queue, |_| Ok(ControlQueue::default()), None),
            EVENT_QUEUE => {
                let wanted = features.has(CHANGE);
                self.links.forget_resized();
                self.start(queue, move |_| Ok(Events { wanted }), None)
            }
            _ => {
                let mut units = self.units.iter();
                let blocks = units.any(|shared| shared.unit.backend().blocks());
                let request = index - FIRST_REQUEST_QUEUE as u16;
                let thread = self.config.thread(Self::TYPE.name, request, blocks);
                let layout = Layout {
                    cdb_size: self.cdb_size.load(Ordering::Relaxed),
                    sense_size: self.sense_size.load(Ordering::Relaxed),
                    max_descriptors: queue.max_descriptors,
                    units: self.units.len(),
                };
                let target = Arc::clone(&queue.target);
                let open = move |wakeup: &_| {
                    Commands::open(&target, index, layout, answer_when_written, wakeup)
                };
                self.start(queue, open, Some(thread))
            }
        }
    }
}

impl VirtioScsi {
    /// Starts a queue in its role. `requests`: its thread, if it is a request queue.
    fn start<M: DeviceMemory, R: Role<M> + 'static>(
        &self,
        queue: ScsiQueue<M>,
        open: impl FnOnce(&Arc<target::Wakeup>) -> io::Result<R> + Send + 'static,
        requests: Option<Option<crate::reactor::DedicatedThread>>,
    ) -> io::Result<QueueHandle> {
        let SharedUnit {
            metrics, throttle, ..
        } = self.first().clone();
        let (poll, throttle) = match requests {
            Some(_) => (self.config.poll, throttle),
            None => (Duration::ZERO, Arc::default()),
        };
        let kind = QueueKind::Disk(requests.flatten());
        QueueHandle::start(&self.workers, kind, move || {
            let wakeup = queue.target.links.wakeup()?;
            let outcome = queue.active.driver.outcome();
            let worker = ScsiWorker {
                role: open(&wakeup)?,
                queue,
                wakeup,
                throttle,
                metrics,
                poll,
            };
            Ok((worker, outcome))
        })
    }
}
