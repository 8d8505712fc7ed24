//! Splits the bytes that a client sends into requests.

use std::collections::VecDeque;
use std::io;

use super::protocol::{Framing, MAX_PAYLOAD, NbdRequest};
use super::wire::Wire;
use crate::backend::{Buffer, MemoryCharge, OutOfMemory};

/// Size of the read buffer: room for thousands of requests without payload, or about thirty writes
/// of 4 KiB.
const BUFFER_LEN: usize = 128 << 10;

/// A request that has arrived in full.
pub(super) struct NbdMessage {
    pub(super) request: NbdRequest,
    pub(super) payload: Payload,
    /// The memory that the request may take.
    pub(super) charge: MemoryCharge,
}

/// The payload that followed a header.
pub(super) enum Payload {
    /// Nothing.
    None,
    /// The data of a write, in buffers no longer than the backend takes in one operation.
    Data(VecDeque<Buffer>),
    /// The payload was discarded: it was longer than [`MAX_PAYLOAD`], or the system had no memory
    /// for it.
    Dropped,
}

/// A request whose payload is still arriving.
struct PartialRequest {
    request: NbdRequest,
    /// `None`: the payload is discarded.
    buffers: Option<VecDeque<Buffer>>,
    /// Bytes of the last buffer that have arrived.
    filled: usize,
    /// Bytes of the payload that are still to arrive.
    left: u64,
    charge: MemoryCharge,
}

/// The receiving half of a connection.
pub(super) struct RequestReader {
    framing: Framing,
    /// The longest payload buffer in bytes.
    max_buffer: usize,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    partial: Option<PartialRequest>,
}

impl RequestReader {
    pub(super) fn new(framing: Framing, max_buffer: usize) -> Self {
        Self {
            framing,
            max_buffer,
            buffer: vec![0; BUFFER_LEN].into_boxed_slice(),
            start: 0,
            end: 0,
            partial: None,
        }
    }

    /// Whether bytes were received that are not taken.
    pub(super) fn has_data(&self) -> bool {
        self.start < self.end
    }

    /// Whether the payload of a request is still arriving.
    pub(super) fn has_partial(&self) -> bool {
        self.partial.is_some()
    }

    /// Reads from the socket once; 0: the client sends no more. Call it when [`next`](Self::next)
    /// has returned `None`.
    pub(super) fn receive(&mut self, wire: &mut Wire) -> io::Result<usize> {
        if self.start == self.end
            && let Some(partial) = &mut self.partial
            && let Some(space) = partial.space(self.max_buffer)
        {
            let most = space.len().min(2 * BUFFER_LEN);
            let read = wire.read(&mut space[..most])?;
            partial.filled += read;
            partial.left -= read as u64;
            return Ok(read);
        }
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let read = wire.read(&mut self.buffer[self.end..])?;
        self.end += read;
        Ok(read)
    }

    /// The next request that has arrived in full. `charge` takes the memory that a request may
    /// need; if it returns `None`, the request waits.
    ///
    /// # Errors
    /// If a header has the wrong magic number: the rest of the stream cannot be parsed.
    pub(super) fn next(
        &mut self,
        charge: impl FnOnce(&NbdRequest) -> Option<MemoryCharge>,
    ) -> Result<Option<NbdMessage>, BadMagic> {
        if self.partial.is_none() {
            let len = NbdRequest::len(self.framing);
            let Some(header) = self.buffer[self.start..self.end].get(..len) else {
                return Ok(None);
            };
            let request = NbdRequest::decode(header, self.framing).ok_or(BadMagic)?;
            let Some(charge) = charge(&request) else {
                return Ok(None);
            };
            self.start += len;
            if !request.has_payload(self.framing) {
                return Ok(Some(NbdMessage {
                    request,
                    payload: Payload::None,
                    charge,
                }));
            }
            self.partial = Some(PartialRequest {
                request,
                buffers: (request.length <= MAX_PAYLOAD).then(VecDeque::new),
                filled: 0,
                left: request.length,
                charge,
            });
        }
        while let Some(partial) = &mut self.partial
            && partial.left > 0
        {
            let received = &self.buffer[self.start..self.end];
            if received.is_empty() {
                return Ok(None);
            }
            let taken = match partial.space(self.max_buffer) {
                Some(space) => {
                    let taken = space.len().min(received.len());
                    space[..taken].copy_from_slice(&received[..taken]);
                    partial.filled += taken;
                    taken
                }
                None => partial.left.min(received.len() as u64) as usize,
            };
            partial.left -= taken as u64;
            self.start += taken;
        }
        Ok(self.partial.take().map(|arrived| NbdMessage {
            request: arrived.request,
            payload: arrived.buffers.map_or(Payload::Dropped, Payload::Data),
            charge: arrived.charge,
        }))
    }
}

impl PartialRequest {
    /// Where the next bytes go; `None` for a discarded payload. A buffer is allocated when its
    /// first bytes arrive, not when the header announces them.
    fn space(&mut self, max_len: usize) -> Option<&mut [u8]> {
        let buffers = self.buffers.as_mut()?;
        if buffers.back().is_none_or(|last| last.len() == self.filled) {
            let len = (max_len as u64).min(self.left) as usize;
            match Buffer::try_for_overwrite(len) {
                Ok(buffer) => buffers.push_back(buffer),
                Err(OutOfMemory) => {
                    self.buffers = None;
                    return None;
                }
            }
            self.filled = 0;
        }
        let buffers = self.buffers.as_mut()?;
        buffers.back_mut().map(|last| &mut last[self.filled..])
    }
}

/// A header does not start with the magic number of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadMagic;
