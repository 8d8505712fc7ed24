//! The area that records the chains in flight. The back-end creates it; the front-end keeps it, and
//! passes it to the next back-end.
//!
//! ```text
//!  message: size u64 │ offset u64 │ queues u16 │ queue size u16 │ 4 unused
//!  area:    a record (block/tracker.rs) for each queue
//! ```

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vm_memory::{FileOffset, MmapRegion};

use super::memory::check_mappable;
use super::message::Message;
use super::outcome::{Outcome, refuse};
use super::sigbus::{GuardedMapping, SessionGuard};
use crate::block::MAX_QUEUE_SIZE;
use crate::virtio::Tracker;

/// An area that the front-end has passed in.
pub(super) struct InflightArea {
    area: GuardedMapping<MmapRegion>,
    queues: u16,
    queue_size: u16,
}

/// The number of queues, and of descriptors per queue, in a message.
fn dimensions(message: &Message) -> Outcome<(u16, u16)> {
    Ok((message.u16(16)?, message.u16(18)?))
}

impl InflightArea {
    /// GET_INFLIGHT_FD: a new area for a device with at most `most` queues, and the payload of the
    /// reply.
    pub(super) fn create(message: &Message, most: u16) -> Outcome<(Vec<u8>, File)> {
        let (queues, queue_size) = dimensions(message)?;
        if !(1..=most).contains(&queues) || !(1..=MAX_QUEUE_SIZE).contains(&queue_size) {
            return Err(refuse(format!(
                "an inflight area for {queues} queues of {queue_size} descriptors: at most {most} \
                 queues of {MAX_QUEUE_SIZE}"
            )));
        }
        let bytes = usize::from(queues) * Tracker::bytes(queue_size);
        let fd: OwnedFd = memfd_create(
            "vhost-user-inflight",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        let file = File::from(fd);
        file.set_len(bytes as u64)?;
        // The seals keep every holder of the descriptor from truncating the mapped file.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mut payload = Vec::from((bytes as u64).to_ne_bytes());
        payload.extend_from_slice(&0_u64.to_ne_bytes());
        payload.extend_from_slice(&queues.to_ne_bytes());
        payload.extend_from_slice(&queue_size.to_ne_bytes());
        payload.extend_from_slice(&[0; 4]);
        Ok((payload, file))
    }

    /// SET_INFLIGHT_FD: maps the area that the front-end has passed in.
    pub(super) fn open(
        message: &Message,
        file: File,
        session: &Arc<SessionGuard>,
    ) -> Outcome<Self> {
        let (size, offset) = (message.u64(0)?, message.u64(8)?);
        let (queues, queue_size) = dimensions(message)?;
        let needed = usize::from(queues) * Tracker::bytes(queue_size);
        let length = check_mappable(&file, offset, needed as u64)
            .map_err(|error| refuse(format!("the inflight area: {error}")))?;
        if size < needed as u64 || offset.checked_add(size).is_none_or(|end| end > length) {
            return Err(refuse(format!(
                "an inflight area of {size} bytes at {offset} in a file of {length}: {queues} \
                 queues of {queue_size} take {needed}"
            )));
        }
        let area = MmapRegion::from_file(FileOffset::new(file, offset), needed)
            .map_err(|error| refuse(format!("the inflight area: {error}")))?;
        Ok(Self {
            area: GuardedMapping::new(Arc::new(area), session)?,
            queues,
            queue_size,
        })
    }

    /// Whether the area's file was truncated, and an access has met that.
    pub(super) fn is_lost(&self) -> bool {
        self.area.is_lost()
    }

    /// The record of ring `index`, which has `size` descriptors.
    pub(super) fn tracker(&self, index: u16, size: u16) -> Outcome<Tracker> {
        let fits = index < self.queues && size <= self.queue_size;
        fits.then(|| Tracker::new(Arc::clone(self.area.mapping()), index, self.queue_size))
            .flatten()
            .ok_or_else(|| {
                let (queues, most) = (self.queues, self.queue_size);
                refuse(format!(
                    "ring {index} of {size} descriptors does not fit an inflight area for {queues} \
                     rings of {most}"
                ))
            })
    }
}
