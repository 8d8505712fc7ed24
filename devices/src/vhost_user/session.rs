//! A front-end's connection: handles its messages, and starts and stops its rings.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::inflight::InflightArea;
use super::memory::{MAX_REGIONS, MemoryRegion, REGION_BYTES, SharedMemory};
use super::message::{Channel, Message, send_to_front_end};
use super::outcome::{Outcome, refuse};
use super::sigbus::SessionGuard;
use super::signal::EventNotifier;
use super::vring::{Vring, doorbell};
use crate::status::{DRIVER_OK, DeviceStatus};
use crate::virtio::{Features, QueueSetup, QueueStart, VirtioDevice};

/// Feature bit 30, VHOST_USER_F_PROTOCOL_FEATURES: the front-end knows protocol features, and
/// enables rings itself.
const PROTOCOL_FEATURES: u64 = 1 << 30;

// Protocol features, by bit.
const MQ: u64 = 1 << 0;
const REPLY_ACK: u64 = 1 << 3;
/// A channel on which the back-end reports a changed configuration. Without it user-mode Linux
/// would get no interrupt.
const BACKEND_REQ: u64 = 1 << 5;
const CONFIG: u64 = 1 << 9;
const INFLIGHT_SHMFD: u64 = 1 << 12;
const RESET_DEVICE: u64 = 1 << 13;
const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
const OFFERED_PROTOCOL: u64 =
    MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | RESET_DEVICE | CONFIGURE_MEM_SLOTS;

/// The front-end requests that a disk's back-end must handle.
mod request {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const SET_OWNER: u32 = 3;
    pub(super) const RESET_OWNER: u32 = 4;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const GET_QUEUE_NUM: u32 = 17;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(super) const GET_CONFIG: u32 = 24;
    pub(super) const SET_CONFIG: u32 = 25;
    pub(super) const GET_INFLIGHT_FD: u32 = 31;
    pub(super) const SET_INFLIGHT_FD: u32 = 32;
    pub(super) const RESET_DEVICE: u32 = 34;
    pub(super) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(super) const ADD_MEM_REG: u32 = 37;
    pub(super) const REM_MEM_REG: u32 = 38;
}

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, the only request that this back-end sends.
const CONFIG_CHANGE: u32 = 2;
/// Length of the header before a piece of the configuration space, in bytes.
const CONFIG_HEADER: usize = 12;
/// Where front-ends that use rust-vmm's crate, such as Cloud Hypervisor, expect the configuration
/// space: at its offset on MMIO. A disk has no field at that offset.
const MMIO_CONFIG: u32 = 0x100;
/// The longest piece of the configuration space in one message (VHOST_USER_MAX_CONFIG_SIZE).
const MAX_CONFIG: u32 = 256;
/// Flag of a message about a ring's descriptor: it comes without a descriptor.
const NO_DESCRIPTOR: u64 = 1 << 8;

/// The reply to a message.
enum Reply {
    /// No payload, only an acknowledgement if the front-end asked for one.
    Done,
    /// A payload.
    Payload(Vec<u8>),
    /// A payload with a descriptor.
    WithFile(Vec<u8>, File),
}

impl Reply {
    fn number(value: u64) -> Self {
        Self::Payload(value.to_ne_bytes().to_vec())
    }
}

/// A front-end's connection. Dropping it drains its rings, and returns the device to its initial
/// state.
pub(super) struct FrontEndSession<'a, D: VirtioDevice> {
    device: &'a D,
    notifier: &'a Arc<EventNotifier>,
    guard: Arc<SessionGuard>,
    memory: SharedMemory,
    features: Option<Features>,
    protocol: u64,
    rings: Vec<Vring>,
    /// The area that records the chains in flight.
    inflight: Option<InflightArea>,
    /// The channel for requests to the front-end, if it has provided one.
    backend_requests: Option<File>,
    /// The owner has paused the disk: no ring may run.
    paused: bool,
}

impl<'a, D: VirtioDevice> FrontEndSession<'a, D> {
    /// # Errors
    /// If the system refuses a descriptor.
    pub(super) fn new(
        device: &'a D,
        notifier: &'a Arc<EventNotifier>,
        socket: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let rings = rings(device, notifier);
        let guard = SessionGuard::new(socket)?;
        Ok(Self {
            device,
            notifier,
            memory: SharedMemory::new(&guard),
            guard,
            features: None,
            protocol: 0,
            rings,
            inflight: None,
            backend_requests: None,
            paused: false,
        })
    }

    /// Whether the front-end has truncated memory that it shares, and an access has met that.
    pub(super) fn has_lost_memory(&self) -> bool {
        let inflight = self.inflight.as_ref();
        self.memory.is_lost() || inflight.is_some_and(InflightArea::is_lost)
    }

    fn ring(&mut self, index: u32) -> Outcome<&mut Vring> {
        let count = self.rings.len();
        self.rings
            .get_mut(index as usize)
            .ok_or_else(|| refuse(format!("ring {index}: there are {count}, numbered from 0")))
    }

    /// The ring `index`, which must not be running: its setup is about to be changed.
    fn stopped_ring(&mut self, index: u32) -> Outcome<&mut Vring> {
        let ring = self.ring(index)?;
        if ring.worker.is_some() {
            return Err(refuse(format!("ring {index} is changed while it runs")));
        }
        Ok(ring)
    }

    /// Starts a ring if it has everything it needs.
    fn start_if_ready(&mut self, index: u32) -> Outcome<()> {
        let (features, paused) = (self.features, self.paused);
        let enabled_at_once = features.is_none_or(|features| features.0 & PROTOCOL_FEATURES == 0);
        let ring = self.ring(index)?;
        let must_not_run = ring.worker.is_some() || ring.broken || paused;
        if must_not_run || !(ring.enabled || enabled_at_once) {
            return Ok(());
        }
        let (Some(kick), Some(addresses)) = (&ring.kick, ring.addresses) else {
            return Ok(());
        };
        let kick = kick.try_clone()?;
        let (size, next_available) = (ring.size, ring.next_available);
        let features = features
            .map(|features| Features(features.0 & !PROTOCOL_FEATURES))
            .filter(|features| features.is_acceptable(self.device.offered_features()))
            .ok_or_else(|| refuse("a ring is started without VIRTIO_F_VERSION_1"))?;
        let mut guest_addresses = addresses
            .into_iter()
            .map(|address| self.memory.guest_address(address));
        let [descriptors, driver, device] = [(); 3].map(|()| guest_addresses.next().flatten());
        let (Some(descriptors), Some(driver), Some(device)) = (descriptors, driver, device) else {
            return Err(refuse(format!("ring {index} lies outside the memory")));
        };
        let tracker = match &self.inflight {
            Some(area) => Some(area.tracker(index as u16, size)?),
            None => None,
        };
        let start = QueueStart {
            // The cast is lossless: there are at most 256 rings.
            index: index as u16,
            setup: QueueSetup {
                size,
                ready: true,
                descriptors,
                driver,
                device,
                resume_at: Some(next_available),
            },
            doorbell: kick,
            tracker,
        };
        let signals = Arc::clone(&self.rings[index as usize].signals);
        let status = Arc::new(DeviceStatus::new(Arc::clone(&signals) as _));
        status.insert(DRIVER_OK);
        let worker = self
            .device
            .start_queue(start, features, self.memory.guest(), status)?;
        self.rings[index as usize].worker = Some(worker);
        signals.signal_used();
        Ok(())
    }

    /// `true`: drains all rings, and lets none start. `false`: starts the rings that are ready.
    pub(super) fn set_paused(&mut self, paused: bool) -> Outcome<()> {
        if std::mem::replace(&mut self.paused, paused) == paused {
            return Ok(());
        }
        if paused {
            self.pause();
            return Ok(());
        }
        (0..self.rings.len() as u32).try_for_each(|index| self.start_if_ready(index))
    }

    /// Takes over the disk's capacity. If it has changed, notifies a front-end that has negotiated
    /// that.
    pub(super) fn capacity_changed(&mut self) {
        let wanted = self.protocol & CONFIG != 0 && self.protocol & BACKEND_REQ != 0;
        let changed = self.device.refresh_config();
        let Some(channel) = self.backend_requests.as_ref().filter(|_| wanted && changed) else {
            return;
        };
        if let Err(error) = send_to_front_end(channel, CONFIG_CHANGE) {
            tracing::warn!("a front-end could not be notified of its disk's new size: {error}");
        }
    }

    /// Drains all rings at once.
    fn pause(&mut self) {
        for worker in self.rings.iter().filter_map(|ring| ring.worker.as_ref()) {
            worker.request_stop();
        }
        self.rings.iter_mut().for_each(Vring::pause);
    }
}

fn rings(device: &impl VirtioDevice, notifier: &Arc<EventNotifier>) -> Vec<Vring> {
    (0..device.queues())
        .map(|_| {
            Vring::new(
                device.queue_size(),
                device.interrupt_counter(),
                Arc::clone(notifier),
            )
        })
        .collect()
}

impl<D: VirtioDevice> Drop for FrontEndSession<'_, D> {
    fn drop(&mut self) {
        self.pause();
        self.device.reset();
    }
}

impl<D: VirtioDevice> FrontEndSession<'_, D> {
    /// Carries out a message, and replies to it.
    pub(super) fn handle(
        &mut self,
        mut message: Message,
        channel: &mut Channel<'_>,
    ) -> Outcome<()> {
        let reply = self.carry_out(&mut message);
        let acknowledge = message.need_reply && self.protocol & REPLY_ACK != 0;
        match reply {
            Ok(Reply::Payload(payload)) => channel.reply(message.request, &payload, None),
            Ok(Reply::WithFile(payload, file)) => {
                channel.reply(message.request, &payload, Some(file))
            }
            Ok(Reply::Done) if acknowledge => {
                channel.reply(message.request, &0_u64.to_ne_bytes(), None)
            }
            Ok(Reply::Done) => Ok(()),
            Err(error) => {
                if acknowledge {
                    channel.reply(message.request, &1_u64.to_ne_bytes(), None)?;
                }
                Err(error)
            }
        }
    }

    fn carry_out(&mut self, message: &mut Message) -> Outcome<Reply> {
        let may_have_files = matches!(
            message.request,
            request::SET_MEM_TABLE
                | request::SET_VRING_KICK
                | request::SET_VRING_CALL
                | request::SET_VRING_ERR
                | request::SET_BACKEND_REQ_FD
                | request::SET_INFLIGHT_FD
                | request::ADD_MEM_REG
                // Some front-ends send a descriptor with REM_MEM_REG by mistake. It is closed
                // unused.
                | request::REM_MEM_REG
        );
        if !message.files.is_empty() && !may_have_files {
            let request = message.request;
            return Err(refuse(format!("message {request} comes with descriptors")));
        }
        match message.request {
            request::GET_FEATURES => {
                return Ok(Reply::number(
                    self.device.offered_features().0 | PROTOCOL_FEATURES,
                ));
            }
            request::SET_FEATURES => self.set_features(message.u64(0)?)?,
            request::SET_OWNER => {}
            request::RESET_OWNER => self.reset_owner(),
            request::SET_MEM_TABLE => self.set_memory_table(message)?,
            request::SET_VRING_NUM => self.set_ring_size(message.u32(0)?, message.u32(4)?)?,
            request::SET_VRING_ADDR => self.set_ring_addresses(message)?,
            request::SET_VRING_BASE => self.set_ring_base(message.u32(0)?, message.u32(4)?)?,
            request::GET_VRING_BASE => return self.stop_ring(message.u32(0)?),
            request::SET_VRING_KICK => {
                let (index, file) = ring_descriptor(message)?;
                self.set_kick(index, file)?;
            }
            request::SET_VRING_CALL => {
                let (index, file) = ring_descriptor(message)?;
                self.ring(index)?.signals.set_call(file)?;
            }
            request::SET_VRING_ERR => {
                let (index, file) = ring_descriptor(message)?;
                self.ring(index)?.signals.set_error(file)?;
            }
            request::GET_PROTOCOL_FEATURES => return Ok(Reply::number(OFFERED_PROTOCOL)),
            request::SET_PROTOCOL_FEATURES => self.set_protocol_features(message.u64(0)?)?,
            request::GET_QUEUE_NUM => return Ok(Reply::number(self.device.queues().into())),
            request::SET_VRING_ENABLE => self.enable_ring(message.u32(0)?, message.u32(4)?)?,
            request::SET_BACKEND_REQ_FD => self.backend_requests = message.take_file()?,
            request::GET_CONFIG => return self.read_config(message),
            request::SET_CONFIG => self.write_config(message)?,
            request::GET_INFLIGHT_FD => {
                let (payload, file) = InflightArea::create(message, self.device.queues())?;
                return Ok(Reply::WithFile(payload, file));
            }
            request::SET_INFLIGHT_FD => {
                let file = message.take_file()?;
                let file = file.ok_or_else(|| refuse("an inflight area without a descriptor"))?;
                if self.rings.iter().any(|ring| ring.worker.is_some()) {
                    return Err(refuse("the inflight area is changed while a ring runs"));
                }
                self.inflight = Some(InflightArea::open(message, file, &self.guard)?);
            }
            request::RESET_DEVICE => self.reset(),
            request::GET_MAX_MEM_SLOTS => return Ok(Reply::number(MAX_REGIONS as u64)),
            request::ADD_MEM_REG => {
                let file = message.take_file()?;
                let file = file.ok_or_else(|| refuse("a memory region without a descriptor"))?;
                // Eight bytes of padding come first.
                self.memory.add(&MemoryRegion::read(message, 8)?, file)?;
            }
            request::REM_MEM_REG => self.memory.remove(&MemoryRegion::read(message, 8)?)?,
            unknown => return Err(refuse(format!("message {unknown} is unknown to a disk"))),
        }
        Ok(Reply::Done)
    }

    fn set_features(&mut self, features: u64) -> Outcome<()> {
        let offered = self.device.offered_features().0 | PROTOCOL_FEATURES;
        if features & !offered != 0 {
            return Err(refuse(format!(
                "features {features:#x} chosen, {offered:#x} offered"
            )));
        }
        let features = Features(features);
        if self.features == Some(features) {
            return Ok(());
        }
        if self.rings.iter().any(|ring| ring.worker.is_some()) {
            return Err(refuse("features are changed while a ring runs"));
        }
        self.device.accept_features(features);
        self.features = Some(features);
        Ok(())
    }

    fn set_protocol_features(&mut self, features: u64) -> Outcome<()> {
        if features & !OFFERED_PROTOCOL != 0 {
            return Err(refuse(format!(
                "protocol features {features:#x} chosen, {OFFERED_PROTOCOL:#x} offered"
            )));
        }
        self.protocol = features;
        Ok(())
    }

    /// RESET_OWNER is deprecated; it only disables all rings.
    fn reset_owner(&mut self) {
        self.pause();
        for ring in &mut self.rings {
            ring.stop();
            ring.enabled = false;
        }
    }

    /// Resets everything but the memory and the protocol features.
    fn reset(&mut self) {
        self.pause();
        self.rings = rings(self.device, self.notifier);
        self.features = None;
        self.device.reset();
    }

    fn set_memory_table(&mut self, message: &mut Message) -> Outcome<()> {
        let count = message.u32(0)? as usize;
        let files = std::mem::take(&mut message.files);
        if files.len() != count {
            let files = files.len();
            return Err(refuse(format!(
                "{count} memory regions with {files} descriptors"
            )));
        }
        // The message may be longer than the table: user-mode Linux always leaves room for two
        // regions.
        let regions: Vec<MemoryRegion> = (0..count)
            .map(|index| MemoryRegion::read(message, 8 + index * REGION_BYTES))
            .collect::<Outcome<_>>()?;
        self.memory.replace(&regions, files)
    }

    fn set_ring_size(&mut self, index: u32, size: u32) -> Outcome<()> {
        let most = self.device.queue_size();
        let valid = u16::try_from(size).ok();
        let valid = valid.filter(|size| size.is_power_of_two() && *size <= most);
        self.stopped_ring(index)?.size = valid.ok_or_else(|| {
            refuse(format!(
                "ring {index} has {size} descriptors: must be a power of two up to \
                 queue-size={most}"
            ))
        })?;
        Ok(())
    }

    fn set_ring_addresses(&mut self, message: &Message) -> Outcome<()> {
        let (index, flags) = (message.u32(0)?, message.u32(4)?);
        if flags != 0 {
            return Err(refuse("logging of memory writes was not offered"));
        }
        let (descriptors, used, available) = (message.u64(8)?, message.u64(16)?, message.u64(24)?);
        let addresses = Some([descriptors, available, used]);
        let ring = self.ring(index)?;
        // A front-end may send the same addresses again while the ring runs.
        if ring.worker.is_some() && ring.addresses != addresses {
            return Err(refuse(format!("ring {index} is moved while it runs")));
        }
        ring.addresses = addresses;
        self.start_if_ready(index)
    }

    fn set_ring_base(&mut self, index: u32, base: u32) -> Outcome<()> {
        let base = u16::try_from(base).map_err(|_| {
            refuse(format!(
                "ring {index}: index {base} does not fit in 16 bits"
            ))
        })?;
        self.stopped_ring(index)?.next_available = base;
        Ok(())
    }

    /// Drains and stops a ring, until it gets another kick descriptor.
    fn stop_ring(&mut self, index: u32) -> Outcome<Reply> {
        let ring = self.ring(index)?;
        ring.stop();
        ring.kick = None;
        let mut payload = index.to_ne_bytes().to_vec();
        payload.extend_from_slice(&u32::from(ring.next_available).to_ne_bytes());
        Ok(Reply::Payload(payload))
    }

    fn set_kick(&mut self, index: u32, file: Option<File>) -> Outcome<()> {
        let file = file.ok_or_else(|| {
            refuse(format!(
                "ring {index} has no kick descriptor, and polling is not supported"
            ))
        })?;
        let kick = doorbell(file)?;
        let ring = self.ring(index)?;
        ring.stop();
        ring.kick = Some(kick);
        self.start_if_ready(index)
    }

    fn enable_ring(&mut self, index: u32, enable: u32) -> Outcome<()> {
        let ring = self.ring(index)?;
        ring.enabled = enable != 0;
        if ring.enabled {
            return self.start_if_ready(index);
        }
        ring.stop();
        Ok(())
    }

    fn read_config(&self, message: &Message) -> Outcome<Reply> {
        let (offset, size) = (config_offset(message)?, message.u32(4)?);
        if size > MAX_CONFIG {
            return Err(refuse(format!(
                "a read of {size} bytes of configuration, more than {MAX_CONFIG}"
            )));
        }
        let mut payload = message.payload[..8].to_vec();
        payload.resize(CONFIG_HEADER + size as usize, 0);
        self.device
            .read_config(offset, &mut payload[CONFIG_HEADER..]);
        Ok(Reply::Payload(payload))
    }

    fn write_config(&self, message: &Message) -> Outcome<()> {
        let (offset, size) = (config_offset(message)?, message.u32(4)? as usize);
        let data = message.payload.get(CONFIG_HEADER..);
        let data = data.and_then(|data| data.get(..size));
        let data = data.ok_or_else(|| refuse("a configuration write without its data"))?;
        if let Some(features) = self.features {
            self.device.write_config(offset, data, features);
        }
        Ok(())
    }
}

/// The offset in the configuration space that a message reads or writes.
fn config_offset(message: &Message) -> Outcome<u64> {
    let offset = message.u32(0)?;
    Ok(offset.checked_sub(MMIO_CONFIG).unwrap_or(offset).into())
}

/// The ring that a message names, and the descriptor that comes with it.
fn ring_descriptor(message: &mut Message) -> Outcome<(u32, Option<File>)> {
    let value = message.u64(0)?;
    let file = message.take_file()?;
    if file.is_none() != (value & NO_DESCRIPTOR != 0) {
        return Err(refuse(
            "a ring's descriptor is missing, or comes with the flag that there is none",
        ));
    }
    Ok(((value & 0xff) as u32, file))
}
