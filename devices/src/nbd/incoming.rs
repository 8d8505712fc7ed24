//! What a client sends, cut into requests.

use std::collections::VecDeque;
use std::io;

use super::protocol::{Framing, MAX_PAYLOAD, Request};
use super::wire::Wire;
use crate::backend::Buffer;

/// Bytes read at once: a few dozen requests, or some with a short payload.
const BUFFER_LEN: usize = 128 << 10;

/// A whole request.
pub(super) struct Message {
    pub(super) request: Request,
    pub(super) payload: Payload,
}

/// What came behind a header.
pub(super) enum Payload {
    /// Nothing.
    None,
    /// The data of a write, in parts that the backend takes at once.
    Data(VecDeque<Buffer>),
    /// Bytes that were thrown away: too many, or of a request that should have none.
    Dropped,
}

/// A payload on its way.
struct Arriving {
    request: Request,
    /// `None`: it is thrown away.
    parts: Option<VecDeque<Buffer>>,
    /// Bytes of the last part that are there.
    filled: usize,
    /// Bytes that are still to come.
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

    /// Reads what is there, once. 0: the client sends no more. To be called when [`next`](Self::next) has nothing left.
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

    /// The next request that is there in full.
    ///
    /// # Errors
    /// Something that is no request stands where one has to begin: nothing after it can be understood.
    pub(super) fn next(&mut self) -> Result<Option<Message>, NotARequest> {
        if self.arriving.is_none() {
            let len = Request::len(self.framing);
            let Some(header) = self.buffer[self.start..self.end].get(..len) else {
                return Ok(None);
            };
            let request = Request::decode(header, self.framing).ok_or(NotARequest)?;
            self.start += len;
            if !request.has_payload(self.framing) {
                let payload = Payload::None;
                return Ok(Some(Message { request, payload }));
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
        Ok(self.arriving.take().map(|arrived| Message {
            request: arrived.request,
            payload: arrived.parts.map_or(Payload::Dropped, Payload::Data),
        }))
    }
}

impl Arriving {
    /// Where the next bytes belong. Memory is taken part by part, when bytes come, not when they are announced.
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

/// The client has lost its place in the protocol, or never knew it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotARequest;
