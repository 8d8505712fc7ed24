//! Which chains a SCSI target can answer, and how (virtio 1.2, 5.6.6). Shares no code with the
//! device.

use crate::chain::{Segment, gather, scatter, walk};
use crate::guest::QUEUE_SIZE;

/// Bytes of a response before its sense data.
pub const RESPONSE: u64 = 12;
/// Bytes of an event.
const EVENT: u64 = 16;

/// A chain that can be answered.
pub struct Answerable {
    /// What the device may write.
    pub writable: Vec<Segment>,
    /// Bytes of the answer, at the beginning of these.
    pub answer: u64,
    /// Bytes of data for the device.
    pub data_out: u64,
}

/// The sizes that the driver has chosen.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub sense: u32,
    pub cdb: u32,
}

fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| segment.len).sum()
}

/// The chain at `head` of a request queue; `None`: it breaks a rule.
pub fn request(memory: &[u8], table: u64, head: u16, sizes: Sizes) -> Option<Answerable> {
    let (readable, writable) = walk(memory, table, head, QUEUE_SIZE)?;
    let header = 19 + u64::from(sizes.cdb);
    gather(memory, &readable, 0, header)?;
    let answer = RESPONSE + u64::from(sizes.sense);
    gather(memory, &writable, 0, answer)?;
    Some(Answerable {
        writable,
        answer,
        data_out: total(&readable) - header,
    })
}

/// The chain at `head` of the control queue; `None`: it breaks a rule.
pub fn control(memory: &[u8], table: u64, head: u16) -> Option<Answerable> {
    let (readable, writable) = walk(memory, table, head, QUEUE_SIZE)?;
    let kind = gather(memory, &readable, 0, 4)?;
    let (request, answer) = match kind[..] {
        [0, 0, 0, 0] => (24, 1),
        [1 | 2, 0, 0, 0] => (16, 5),
        _ => (4, 0),
    };
    gather(memory, &readable, 0, request)?;
    gather(memory, &writable, 0, answer)?;
    Some(Answerable {
        writable,
        answer,
        data_out: 0,
    })
}

/// Has `memory` get what the chain at `head` of the event queue gets when `unit` has another
/// capacity; `None`: it breaks a rule. `written`: how many bytes; less than [`EVENT`]: it is too
/// short, and the unit is still to be told.
pub fn event(
    memory: &mut [u8],
    any: &mut Vec<(usize, usize)>,
    (table, head): (u64, u16),
    unit: u8,
) -> Option<(u64, bool)> {
    let (_, writable) = walk(memory, table, head, QUEUE_SIZE)?;
    let room = total(&writable).min(EVENT);
    let fits = room == EVENT;
    let mut bytes = [0; EVENT as usize];
    if fits {
        // VIRTIO_SCSI_T_PARAM_CHANGE, the unit, and CAPACITY DATA HAS CHANGED.
        bytes = [3, 0, 0, 0, 1, 0, 0, unit, 0, 0, 0, 0, 0x2a, 9, 0, 0];
    }
    scatter(memory, any, &writable, &bytes[..room as usize]).then_some((room, fits))
}
