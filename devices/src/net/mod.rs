//! virtio-net (virtio 1.2, 5.1): one queue pair, a MAC address, an MTU, a link that may go down,
//! and no offloads.
//!
//! ```text
//!   driver ─▶ queue 1 ─▶ OutboundTraffic ─▶ FrameSender ───┐
//!                                                          ├─ Link ─ passt, a tap device, another program
//!   driver ◀─ queue 0 ◀─ InboundTraffic ◀── FrameReceiver ─┘
//! ```
//! Each side waits for the other: while the driver has no buffer, the link is not read, and while
//! the link takes nothing, chains stay in the ring. A frame that does not fit is dropped and
//! counted. If the program behind the link ends, the driver sees the link go down.
//!
//! ```
//! use std::os::unix::net::UnixStream;
//! use walvisor_devices::net::{Link, MacAddress, NetConfig, VirtioNet};
//!
//! let (ours, _theirs) = UnixStream::pair()?;
//! let mac: MacAddress = "02:00:00:00:00:01".parse()?;
//! let device = VirtioNet::new(Link::stream(ours)?, NetConfig::new(mac))?;
//! assert_eq!(device.metrics().counts().frames_received, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod inbound;
mod link;
mod mac;
mod metrics;
mod outbound;
mod worker;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::memory::DeviceMemory;
use crate::metrics::InterruptCounter;
use crate::status::{DRIVER_OK, DeviceStatus};
use crate::throttle::Throttle;
use crate::virtio::{
    ActiveQueue, DeviceType, Features, QueueHandle, QueueKind, QueueStart, VirtioDevice,
    WorkerPool, read_space,
};

use inbound::InboundTraffic;
use link::{FrameReceiver, FrameSender};
use outbound::OutboundTraffic;
use worker::{NetQueue, NetWorker};

pub use link::Link;
pub use mac::{MacAddress, ParseMacError};
pub use metrics::{NetCounts, NetMetrics};

/// Length of `struct virtio_net_hdr` in bytes, `num_buffers` included (5.1.6).
const HEADER_LEN: usize = 12;
/// An Ethernet header, and a VLAN tag in it, in bytes.
const ETHERNET_LEN: usize = 14 + 4;
/// The smallest frame: an Ethernet header.
const LEAST_FRAME: usize = 14;
/// Length of the configuration space in bytes, up to and including `mtu`.
const CONFIG_LEN: usize = 12;
/// Queue of frames to the driver (5.1.2).
const RECEIVE_QUEUE: u16 = 0;

/// The least MTU: what IPv6 needs.
pub const LEAST_MTU: u16 = 1280;
/// The largest MTU, which passt has by default too.
pub const MOST_MTU: u16 = 65520;

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// The address of the driver's side.
    pub mac: MacAddress,
    /// The largest payload of a frame in bytes, [`LEAST_MTU`] to [`MOST_MTU`].
    pub mtu: u16,
    /// Descriptors per queue: a power of two from 2 to 1024.
    pub queue_size: u16,
}

impl NetConfig {
    /// An MTU of 1500 bytes, and queues of 256 descriptors.
    pub fn new(mac: MacAddress) -> Self {
        Self {
            mac,
            mtu: 1500,
            queue_size: 256,
        }
    }
}

/// Why a device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// [`NetConfig::mac`] is a group address.
    #[error("mac={0}: an address of a group: give an even first byte, such as 02")]
    Mac(MacAddress),
    /// [`NetConfig::mtu`] is out of range.
    #[error("mtu={0}: give {LEAST_MTU} to {MOST_MTU}")]
    Mtu(u16),
    /// [`NetConfig::queue_size`] is out of range or not a power of two.
    #[error("queue-size={0}: must be a power of two from 2 to 1024")]
    QueueSize(u16),
    /// The system refuses an event descriptor, or a second descriptor of the link.
    #[error("cannot create the queues: {0}")]
    Queues(#[from] io::Error),
}

/// A virtio-net device over a [`Link`]. A transport owns it and presents it to the guest.
pub struct VirtioNet {
    config: NetConfig,
    shared: Arc<SharedState>,
    receiver: Arc<Mutex<FrameReceiver>>,
    sender: Arc<Mutex<FrameSender>>,
    workers: Arc<WorkerPool>,
    doorbells: Vec<EventFd>,
}

/// What both queues share.
struct SharedState {
    /// The link's name in messages.
    name: String,
    up: AtomicBool,
    metrics: Arc<NetMetrics>,
    /// The two queues take turns as one.
    throttle: Arc<Throttle>,
    /// The longest frame in bytes.
    max_frame: usize,
}

impl SharedState {
    fn is_up(&self) -> bool {
        self.up.load(Ordering::SeqCst)
    }

    /// Takes the link down for good, because of `reason`, and tells the driver.
    fn take_down(&self, reason: &dyn std::fmt::Display, status: &DeviceStatus) {
        if self.up.swap(false, Ordering::SeqCst) {
            tracing::warn!(
                "{}: {reason}: the guest's network link is down; its disks go on",
                self.name
            );
            if status.has(DRIVER_OK) {
                status.interrupt().config();
            }
        }
    }
}

impl VirtioNet {
    /// Creates a device. Nothing runs before the driver sets DRIVER_OK.
    ///
    /// # Errors
    /// If `config` is out of range, or the system refuses a descriptor.
    pub fn new(link: Link, config: NetConfig) -> Result<Self, NetError> {
        if config.mac.is_group() {
            return Err(NetError::Mac(config.mac));
        }
        if !(LEAST_MTU..=MOST_MTU).contains(&config.mtu) {
            return Err(NetError::Mtu(config.mtu));
        }
        if !(2..=1024).contains(&config.queue_size) || !config.queue_size.is_power_of_two() {
            return Err(NetError::QueueSize(config.queue_size));
        }
        let max_frame = usize::from(config.mtu) + ETHERNET_LEN;
        let doorbells = (0..2).map(|_| EventFd::new(EFD_NONBLOCK));
        let doorbells = doorbells.collect::<Result<_, _>>()?;
        let name = link.name().to_owned();
        let (receiver, sender) = link.split(max_frame)?;
        Ok(Self {
            shared: Arc::new(SharedState {
                name,
                up: AtomicBool::new(true),
                metrics: Arc::default(),
                throttle: Arc::default(),
                max_frame,
            }),
            receiver: Arc::new(Mutex::new(receiver)),
            sender: Arc::new(Mutex::new(sender)),
            workers: Arc::default(),
            doorbells,
            config,
        })
    }

    /// The device's counters; they may outlive the device.
    pub fn metrics(&self) -> Arc<NetMetrics> {
        Arc::clone(&self.shared.metrics)
    }

    /// Lets a thread of `pool` serve the queues. Several devices may share a pool; by default each
    /// has its own.
    pub fn serve_with(&mut self, pool: Arc<WorkerPool>) {
        self.workers = pool;
    }
}

impl VirtioDevice for VirtioNet {
    const TYPE: DeviceType = DeviceType {
        name: "virtio-net",
        id: 1,
        // Network controller, Ethernet.
        pci_class: 0x02_0000,
        config_len: CONFIG_LEN,
    };

    fn doorbells(&self) -> &[EventFd] {
        &self.doorbells
    }

    fn queue_size(&self) -> u16 {
        self.config.queue_size
    }

    /// No offloads: each would let a driver send what the link has to finish, or needs the link's
    /// word for what it sends.
    fn offered_features(&self) -> Features {
        let mut features = Features::of_every_device();
        for bit in [VIRTIO_NET_F_MAC, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS] {
            features.insert(bit);
        }
        features
    }

    fn interrupt_counter(&self) -> Arc<dyn InterruptCounter> {
        self.metrics()
    }

    fn accept_features(&self, _: Features) {}

    fn reset(&self) {}

    fn config_changes(&self) -> u32 {
        u32::from(!self.shared.is_up())
    }

    /// `struct virtio_net_config` (5.1.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut space = [0; CONFIG_LEN];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.config.mac.bytes());
        let status = if self.shared.is_up() {
            VIRTIO_NET_S_LINK_UP as u16
        } else {
            0
        };
        put(6, &status.to_le_bytes());
        // max_virtqueue_pairs: without MQ there is one.
        put(8, &1_u16.to_le_bytes());
        put(10, &self.config.mtu.to_le_bytes());
        read_space(&space, offset, data);
    }

    /// All fields are read-only for a driver (5.1.4).
    fn write_config(&self, _: u64, _: &[u8], _: Features) {}

    fn start_queue<M: DeviceMemory>(
        &self,
        queue: QueueStart,
        features: Features,
        memory: M,
        status: Arc<DeviceStatus>,
    ) -> io::Result<QueueHandle> {
        let is_receive = queue.index == RECEIVE_QUEUE;
        let active = ActiveQueue::open(
            Self::TYPE.name,
            queue,
            self.config.queue_size,
            features,
            &*memory.memory(),
            Arc::clone(&status),
        );
        let Some(active) = active else {
            return Ok(QueueHandle::broken());
        };
        let outcome = active.driver.outcome();
        let queue = NetQueue {
            active,
            shared: Arc::clone(&self.shared),
            status,
            max_descriptors: self.config.queue_size.into(),
            batch: Vec::new(),
        };
        let (workers, kind) = (&self.workers, QueueKind::Network);
        if is_receive {
            let traffic = InboundTraffic::new(Arc::clone(&self.receiver));
            QueueHandle::start(workers, kind, move || {
                Ok((NetWorker::new(queue, memory, traffic), outcome))
            })
        } else {
            let traffic = OutboundTraffic::new(Arc::clone(&self.sender));
            QueueHandle::start(workers, kind, move || {
                Ok((NetWorker::new(queue, memory, traffic), outcome))
            })
        }
    }
}
