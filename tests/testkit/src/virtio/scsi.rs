//! The part of a virtio-scsi driver that is not also a virtio-blk driver's: commands, and task
//! management.

use vm_memory::{Bytes, GuestAddress};

use super::{BlockDriver, Piece};

/// The control queue.
pub const CONTROL: usize = 0;
/// The event queue.
pub const EVENTS: usize = 1;
/// The first request queue.
pub const REQUESTS: usize = 2;

/// Default sizes of the CDB and of the sense data in bytes.
pub const CDB: usize = 32;
/// See [`CDB`].
pub const SENSE: usize = 96;

/// The address of unit `number` of target 0, in flat space addressing.
#[must_use]
pub fn lun(number: u8) -> [u8; 8] {
    [1, 0, 0x40, number, 0, 0, 0, 0]
}

/// A command in the ring.
#[derive(Clone, Debug)]
pub struct PostedCommand {
    /// The head of its chain.
    pub head: u16,
    response: GuestAddress,
    data_in: usize,
}

/// The answer to a command.
#[derive(Debug, PartialEq, Eq)]
pub struct CommandAnswer {
    /// VIRTIO_SCSI_S_*.
    pub response: u8,
    /// The SCSI status.
    pub status: u8,
    /// Sense data, as much as is valid.
    pub sense: Vec<u8>,
    /// Bytes of the data that were not moved.
    pub residual: u32,
    /// The Data-In Buffer.
    pub data: Vec<u8>,
    /// The length in the used ring.
    pub written: u32,
}

impl CommandAnswer {
    /// Response and status, both 0 if all is well.
    pub fn verdict(&self) -> (u8, u8) {
        (self.response, self.status)
    }

    /// Additional sense code and qualifier, of the fixed format.
    pub fn code(&self) -> [u8; 2] {
        self.sense[12..14].try_into().expect("2 bytes")
    }
}

impl<M> BlockDriver<M> {
    /// Puts a command into the ring, and publishes nothing yet.
    pub fn post_command(
        &mut self,
        queue: usize,
        lun: [u8; 8],
        id: u64,
        cdb: &[u8],
        out: &[u8],
        data_in: usize,
    ) -> PostedCommand {
        let mut header = [&lun[..], &id.to_le_bytes(), &[0; 3], cdb].concat();
        header.resize(19 + CDB, 0);
        self.post_header(queue, &header, out, data_in)
    }

    /// The same with any header.
    pub fn post_header(
        &mut self,
        queue: usize,
        header: &[u8],
        out: &[u8],
        data_in: usize,
    ) -> PostedCommand {
        let readable = self.allocate(header.len() + out.len());
        let bytes = [header, out].concat();
        self.memory.write_slice(&bytes, readable).expect("a header");
        let response = self.allocate(12 + SENSE + data_in);
        self.memory
            .write_slice(&[0xee; 12 + SENSE], response)
            .expect("a response");
        let data = GuestAddress(response.0 + 12 + SENSE as u64);
        let mut pieces = vec![Piece::readable(readable, header.len() as u32)];
        if !out.is_empty() {
            let at = GuestAddress(readable.0 + header.len() as u64);
            pieces.push(Piece::readable(at, out.len() as u32));
        }
        pieces.push(Piece::writable(response, 12 + SENSE as u32));
        if data_in > 0 {
            pieces.push(Piece::writable(data, data_in as u32));
        }
        let head = self.rings[queue].add(&pieces);
        PostedCommand {
            head,
            response,
            data_in,
        }
    }

    /// The device's answer to `posted`.
    pub fn command_answer(&self, posted: &PostedCommand, written: u32) -> CommandAnswer {
        let mut bytes = vec![0; 12 + SENSE + posted.data_in];
        self.memory
            .read_slice(&mut bytes, posted.response)
            .expect("a response");
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let sense = word(0) as usize;
        CommandAnswer {
            response: bytes[11],
            status: bytes[10],
            sense: bytes.get(12..12 + sense).unwrap_or(&[]).to_vec(),
            residual: word(4),
            data: bytes[12 + SENSE..].to_vec(),
            written,
        }
    }

    /// Sends a command to a unit, and waits for its answer.
    #[track_caller]
    pub fn command(
        &mut self,
        lun: [u8; 8],
        cdb: &[u8],
        out: &[u8],
        data_in: usize,
    ) -> CommandAnswer {
        let posted = self.post_command(REQUESTS, lun, 1, cdb, out, data_in);
        self.kick(REQUESTS);
        let (head, written) = self.next_used(REQUESTS);
        assert_eq!(head, posted.head);
        self.command_answer(&posted, written)
    }

    /// Puts a request into the control queue and rings. Returns where its `answer` bytes go.
    pub fn post_control(&mut self, request: &[u8], answer: u32) -> GuestAddress {
        let at = self.allocate(request.len() + answer as usize);
        self.memory.write_slice(request, at).expect("a request");
        let response = GuestAddress(at.0 + request.len() as u64);
        let unanswered = vec![0xee; answer as usize];
        self.memory
            .write_slice(&unanswered, response)
            .expect("a response");
        let mut pieces = vec![Piece::readable(at, request.len() as u32)];
        if answer > 0 {
            pieces.push(Piece::writable(response, answer));
        }
        self.rings[CONTROL].add(&pieces);
        self.kick(CONTROL);
        response
    }

    /// Starts a task management function.
    pub fn post_function(&mut self, function: u32, lun: [u8; 8], id: u64) -> GuestAddress {
        let function = function.to_le_bytes();
        let request = [&[0; 4], &function, &lun[..], &id.to_le_bytes()].concat();
        self.post_control(&request, 1)
    }

    /// Carries out a task management function, and returns its response.
    #[track_caller]
    pub fn manage(&mut self, function: u32, lun: [u8; 8], id: u64) -> u8 {
        let response = self.post_function(function, lun, id);
        self.next_used(CONTROL);
        self.memory.read_obj(response).expect("a response")
    }
}
