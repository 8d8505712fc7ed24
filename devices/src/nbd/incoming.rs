//! Splits the bytes that a client sends into requests.

use std::collections::VecDeque;
use std::io;

use super::protocol::{Framing, MAX_PAYLOAD, NbdRequest};
use super::wire::Wire;
use crate::backend::Buffer;

/// Bytes read at once: thousands of bare requests, or about thirty writes of 4 KiB.
const BUFFER_LEN: usize = 128 << 10;

/// A request that has arrived in full.
pub(super) struct NbdMessage {
    pub(super) request: NbdRequest,
    pub(super) payload: Payload,
}

/// The payload that followed a header.
pub(super) enum Payload {
    /// Nothing.
    None,
    /// The data of a write, in parts no longer than the backend takes in one operation.
    Data(VecDeque<Buffer>),
    /// The payload was discarded: it was longer than [`MAX_PAYLOAD`].
    Dropped,
}

/// A request whose payload is still arriving.
struct Arriving {
    request: NbdRequest,
    /// `None`: the payload is discarded.
    parts: Option<VecDeque<Buffer>>,
    /// Bytes of the last part that have arrived.
    filled: usize,
    /// Bytes of the payload that are still to arrive.
    left: u64,
}

/// The receiving half of a connection.
pub(super) struct Incoming {
    framing: Framing,
    /// Longest part in bytes.
    part: usize,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    arriving: Option<Arriving>,
}

impl Incoming {
    pub(super) fn new(framing: Framing, part: usize) -> Self {
        Self {
            framing,
            part,
            buffer: vec![0; BUFFER_LEN].into_boxed_slice(),
            start: 0,
            end: 0,
            arriving: None,
        }
    }

    /// Reads from the socket once; 0: the client sends no more. To be called when [`next`](Self::next) returns `None`.
    pub(super) fn receive(&mut self, wire: &mut Wire) -> io::Result<usize> {
        if self.start == self.end
            && let Some(arriving) = &mut self.arriving
            && let Some(space) = arriving.space(self.part)
        {
            let read = wire.read(space)?;
            arriving.filled += read;
            arriving.left -= read as u64;
            return Ok(read);
        }
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let read = wire.read(&mut self.buffer[self.end..])?;
        self.end += read;
        Ok(read)
    }

    /// The next request that has arrived in full.
    ///
    /// # Errors
    /// If the bytes where a request must begin are none: the rest of the stream cannot be parsed.
    pub(super) fn next(&mut self) -> Result<Option<NbdMessage>, NotARequest> {
        if self.arriving.is_none() {
            let len = NbdRequest::len(self.framing);
            let Some(header) = self.buffer[self.start..self.end].get(..len) else {
                return Ok(None);
            };
            let request = NbdRequest::decode(header, self.framing).ok_or(NotARequest)?;
            self.start += len;
            if !request.has_payload(self.framing) {
                let payload = Payload::None;
                return Ok(Some(NbdMessage { request, payload }));
            }
            self.arriving = Some(Arriving {
                request,
                parts: (request.length <= MAX_PAYLOAD).then(VecDeque::new),
                filled: 0,
                left: request.length,
            });
        }
        while let Some(arriving) = &mut self.arriving
            && arriving.left > 0
        {
            let here = &self.buffer[self.start..self.end];
            if here.is_empty() {
                return Ok(None);
            }
            let taken = match arriving.space(self.part) {
                Some(space) => {
                    let taken = space.len().min(here.len());
                    space[..taken].copy_from_slice(&here[..taken]);
                    arriving.filled += taken;
                    taken
                }
                None => arriving.left.min(here.len() as u64) as usize,
            };
            arriving.left -= taken as u64;
            self.start += taken;
        }
        Ok(self.arriving.take().map(|arrived| NbdMessage {
            request: arrived.request,
            payload: arrived.parts.map_or(Payload::Dropped, Payload::Data),
        }))
    }
}

impl Arriving {
    /// Where the next bytes go; `None` for a discarded payload. Each part is allocated when its first bytes arrive, not
    /// when the header announces them.
    fn space(&mut self, part: usize) -> Option<&mut [u8]> {
        let parts = self.parts.as_mut()?;
        if parts.back().is_none_or(|last| last.len() == self.filled) {
            let len = (part as u64).min(self.left) as usize;
            parts.push_back(Buffer::for_overwrite(len));
            self.filled = 0;
        }
        parts.back_mut().map(|last| &mut last[self.filled..])
    }
}

/// A header does not begin with the magic number of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotARequest;
