//! A command in a chain of a request queue, and its response (virtio 1.2, 5.6.6.1).
//!
//! ```text
//!  device-readable bytes:  lun [u8; 8] │ id u64 │ task_attr u8 │ prio u8 │ crn u8 │ cdb │ data-out …
//!  device-writable bytes:  sense_len u32 │ residual u32 │ status_qualifier u16 │ status u8 │ response u8 │ sense │ data-in …
//! ```

use std::cell::Cell;

use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use crate::memory::DeviceMemory;
use crate::scsi::{DataBuffer, Status, TaskOutcome};
use crate::virtio::{
    Chain, GuestRange, MemoryFault, QueueError, UsedElement, split_chain, split_ranges,
    write_to_driver,
};

/// What comes before the CDB, in bytes.
const HEADER: usize = 19;
/// What comes before the sense data, in bytes.
const RESPONSE: usize = 12;

/// VIRTIO_SCSI_S_*: what became of a request, besides its SCSI status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Response {
    /// The command has a status; or a task management function is complete.
    Ok = 0,
    /// The CDB names more data than its buffers have room for.
    Overrun = 1,
    /// ABORT TASK, ABORT TASK SET or CLEAR TASK SET has ended the command.
    Aborted = 2,
    /// There is no such target.
    BadTarget = 3,
    /// A reset has ended the command.
    Reset = 4,
    /// Anything else.
    Failure = 9,
    /// The answer to a query is yes.
    FunctionSucceeded = 10,
    /// There is no such task management function.
    FunctionRejected = 11,
    /// There is no such logical unit, for a task management function.
    IncorrectLun = 12,
}

/// Whom a request is for (5.6.6.1: 1, the target, a single level LUN structure, 4 zero bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// A unit of the target.
    Unit(usize),
    /// A unit that the target lacks.
    NoUnit,
    /// Another target.
    NoTarget,
}

impl Address {
    /// `units`: how many the target has, numbered from 0.
    pub(super) fn read(lun: [u8; 8], units: usize) -> Self {
        let [one, target, high, low, 0, 0, 0, 0] = lun else {
            return Self::NoTarget;
        };
        let number = match (one, target, high >> 6) {
            // REPORT LUNS, a well known logical unit. What it knows, every unit knows.
            (0xc1, 1, _) if (high, low) == (0, 0) => return Self::NoUnit,
            // Peripheral device addressing on bus 0, or flat space addressing.
            (1, 0, 0) if high == 0 => usize::from(low),
            (1, 0, 1) => usize::from(high & 0x3f) << 8 | usize::from(low),
            (1, 0, _) => return Self::NoUnit,
            _ => return Self::NoTarget,
        };
        if number < units {
            Self::Unit(number)
        } else {
            Self::NoUnit
        }
    }
}

/// The data of a command, in guest memory.
pub(super) struct GuestData<M> {
    memory: M,
    ranges: Vec<GuestRange>,
    len: usize,
    failed: Cell<bool>,
}

impl<M: DeviceMemory> GuestData<M> {
    fn new(memory: &M, ranges: Vec<GuestRange>) -> Self {
        Self {
            memory: memory.clone(),
            len: ranges.iter().map(|range| range.len as usize).sum(),
            ranges,
            failed: Cell::new(false),
        }
    }

    /// Calls `copy` for each range of `[offset, offset + len)`, with its address, the number of
    /// bytes before it, and its length.
    fn for_each_range(
        &self,
        mut offset: usize,
        len: usize,
        mut copy: impl FnMut(&M::M, GuestAddress, usize, usize) -> bool,
    ) {
        let memory = self.memory.memory();
        let mut done = 0;
        for range in &self.ranges {
            let whole = range.len as usize;
            if offset >= whole {
                offset -= whole;
                continue;
            }
            let now = (whole - offset).min(len - done);
            let address = GuestAddress(range.address.0.wrapping_add(offset as u64));
            if now > 0 && !copy(&memory, address, done, now) {
                break;
            }
            (done, offset) = (done + now, 0);
        }
        // The memory was there when the command was taken.
        self.failed.set(self.failed.get() || done < len);
    }
}

impl<M: DeviceMemory> DataBuffer for GuestData<M> {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.for_each_range(offset, into.len(), |memory, address, done, len| {
            let part = &mut into[done..done + len];
            memory.read_slice(part, address).is_ok()
        });
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.for_each_range(offset, from.len(), |memory, address, done, len| {
            let part = &from[done..done + len];
            memory.write_slice(part, address).is_ok()
        });
    }

    fn has_failed(&self) -> bool {
        self.failed.get()
    }
}

/// What a command is answered with, once it has ended.
pub(super) struct PendingCommand {
    head: u16,
    response: Vec<GuestRange>,
    sense_size: u32,
    /// The unit and the driver's name for the command.
    pub(super) unit: Option<usize>,
    pub(super) id: u64,
    /// Its place among the chains taken from the queue.
    pub(super) number: u64,
    /// Bytes of the Data-Out Buffer that it moves.
    pub(super) data_out: usize,
    /// What a task management function has ended it with.
    pub(super) ended_by: Option<Response>,
}

/// A command as it is in its chain.
pub(super) struct ScsiCommand<M> {
    pub(super) pending: PendingCommand,
    pub(super) address: Address,
    pub(super) attribute: u8,
    pub(super) cdb: Vec<u8>,
    pub(super) data_out: usize,
    pub(super) data_in: usize,
    pub(super) data: GuestData<M>,
    /// Whether its data lies in guest memory.
    pub(super) valid: bool,
}

/// The sizes that the driver has chosen, and the limits of a chain.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) cdb_size: u32,
    pub(super) sense_size: u32,
    pub(super) max_descriptors: usize,
    pub(super) units: usize,
}

/// Reads a command. An error means that it cannot even be answered.
pub(super) fn parse<M: DeviceMemory>(
    memory: &M,
    guest: &M::M,
    chain: Chain<'_, M::M>,
    number: u64,
    layout: Layout,
) -> Result<ScsiCommand<M>, QueueError> {
    let head = chain.head();
    let broken = |reason| QueueError::Chain { head, reason };
    let (mut readable, writable) = split_chain(chain, layout.max_descriptors).map_err(broken)?;
    let mut header = [0; HEADER];
    let mut cdb = vec![0; layout.cdb_size as usize];
    let read = readable.take(guest, &mut header);
    read.and_then(|()| readable.take(guest, &mut cdb))
        .map_err(|MemoryFault| broken("its header is short, or lies outside guest memory"))?;
    let (response, data_in) = split_ranges(writable, RESPONSE as u32 + layout.sense_size)
        .ok_or_else(|| broken("it has no room for a response"))?;
    let lies_in = |ranges: &[GuestRange], access: Permissions| {
        let mut ranges = ranges.iter();
        ranges.all(|range| guest.check_range(range.address, range.len as usize, access))
    };
    if !lies_in(&response, Permissions::Write) {
        return Err(broken("its response lies outside guest memory"));
    }
    let data_out = readable.into_ranges();
    let valid = lies_in(&data_in, Permissions::Write) && lies_in(&data_out, Permissions::Read);
    let len = |ranges: &[GuestRange]| ranges.iter().map(|range| range.len as usize).sum();
    let (out_len, in_len) = (len(&data_out), len(&data_in));
    let [lun @ .., _, _, _, _, _, _, _, _, _, _, _] = header;
    let mut id = [0; 8];
    id.copy_from_slice(&header[8..16]);
    let address = Address::read(lun, layout.units);
    Ok(ScsiCommand {
        pending: PendingCommand {
            head,
            response,
            sense_size: layout.sense_size,
            unit: match address {
                Address::Unit(unit) => Some(unit),
                _ => None,
            },
            id: u64::from_le_bytes(id),
            number,
            data_out: 0,
            ended_by: None,
        },
        address,
        attribute: header[16],
        cdb,
        data_out: out_len,
        data_in: in_len,
        data: GuestData::new(memory, if out_len > 0 { data_out } else { data_in }),
        valid,
    })
}

impl PendingCommand {
    /// Answers a command that was not carried out.
    pub(super) fn refuse<G: GuestMemory>(
        self,
        memory: &G,
        response: Response,
        residual: usize,
    ) -> Result<UsedElement, QueueError> {
        self.put(memory, response, 0, &[], residual, 0)
    }

    /// Answers a command that has ended.
    pub(super) fn answer<M: DeviceMemory>(
        self,
        memory: &M::M,
        outcome: &TaskOutcome,
        data: &GuestData<M>,
    ) -> Result<UsedElement, QueueError> {
        let response = match self.ended_by {
            _ if data.has_failed() => Response::Failure,
            Some(response) => response,
            None => Response::Ok,
        };
        let (data_in, moved) = match (response, outcome.status, outcome.data_in) {
            (Response::Ok, Status::Good, Some(len)) => (len, len),
            (Response::Ok, Status::Good, None) => (0, self.data_out),
            _ => (0, 0),
        };
        let (status, sense) = match response {
            Response::Ok => (outcome.status as u8, outcome.sense.as_deref()),
            _ => (0, None),
        };
        let residual = data.len() - moved;
        let sense = sense.unwrap_or(&[]);
        self.put(memory, response, status, sense, residual, data_in)
    }

    fn put<G: GuestMemory>(
        self,
        memory: &G,
        response: Response,
        status: u8,
        sense: &[u8],
        residual: usize,
        data_in: usize,
    ) -> Result<UsedElement, QueueError> {
        let sense = &sense[..sense.len().min(self.sense_size as usize)];
        let mut bytes = vec![0; RESPONSE + self.sense_size as usize];
        bytes[..4].copy_from_slice(&(sense.len() as u32).to_le_bytes());
        // A chain has at most 2^32 bytes.
        bytes[4..8].copy_from_slice(&(residual as u32).to_le_bytes());
        (bytes[10], bytes[11]) = (status, response as u8);
        bytes[RESPONSE..RESPONSE + sense.len()].copy_from_slice(sense);
        let head = self.head;
        let written = write_to_driver(memory, &self.response, &bytes);
        let written = written.map_err(|MemoryFault| QueueError::Chain {
            head,
            reason: "its response lies outside guest memory",
        })?;
        Ok(UsedElement {
            head,
            written: written + data_in as u32,
        })
    }
}
