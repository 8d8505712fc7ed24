//! Replies that wait for room in the socket's send buffer.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use super::wire::Wire;
use crate::backend::{Buffer, MemoryCharge};

/// Most pieces in one vectored write.
const PIECES_AT_ONCE: usize = 32;

enum Content {
    Bytes(Vec<u8>),
    Data(Buffer),
}

/// A part of the stream, and its memory, which is given back once it is sent.
struct Piece {
    content: Content,
    _charge: Option<MemoryCharge>,
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match &self.content {
            Content::Bytes(bytes) => bytes,
            Content::Data(buffer) => buffer,
        }
    }
}

/// The sending half of a connection. Data is sent from the buffer that it was read into, without a
/// copy.
#[derive(Default)]
pub(super) struct ReplyQueue {
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that have been sent.
    sent: usize,
    /// Unsent bytes of all pieces.
    bytes: usize,
    /// Bytes of all pieces that are no data, the sent ones of the first piece included.
    headers: usize,
}

impl ReplyQueue {
    /// Unsent bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Bytes of headers and errors, which no charge covers.
    pub(super) fn headers(&self) -> usize {
        self.headers
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Appends the bytes that `put` writes.
    pub(super) fn push_header(&mut self, put: impl FnOnce(&mut Vec<u8>)) {
        let last = self.pieces.back().map(|piece| &piece.content);
        if !matches!(last, Some(Content::Bytes(_))) {
            self.push(Content::Bytes(Vec::new()), None);
        }
        if let Some(Content::Bytes(bytes)) = self.pieces.back_mut().map(|piece| &mut piece.content)
        {
            let before = bytes.len();
            put(bytes);
            self.bytes += bytes.len() - before;
            self.headers += bytes.len() - before;
        }
    }

    /// Appends the bytes that `put` writes, which `charge` covers.
    pub(super) fn push_charged(&mut self, charge: MemoryCharge, put: impl FnOnce(&mut Vec<u8>)) {
        self.push(Content::Bytes(Vec::new()), Some(charge));
        self.push_header(put);
    }

    /// Appends data, without a copy.
    pub(super) fn push_data(&mut self, data: Buffer, charge: MemoryCharge) {
        self.bytes += data.len();
        self.push(Content::Data(data), Some(charge));
    }

    fn push(&mut self, content: Content, charge: Option<MemoryCharge>) {
        self.pieces.push_back(Piece {
            content,
            _charge: charge,
        });
    }

    /// Sends as much as the socket takes, at most `most` bytes. Returns the number of bytes, and
    /// whether the socket may take more of what is left.
    ///
    /// # Errors
    /// If the client is gone.
    pub(super) fn send(&mut self, wire: &mut Wire, most: usize) -> io::Result<(usize, bool)> {
        let mut left = most;
        while self.bytes > 0 {
            if left == 0 {
                return Ok((most, true));
            }
            let (mut skipped, mut room) = (self.sent, left);
            let slices = self.pieces.iter().take(PIECES_AT_ONCE).map_while(|piece| {
                let bytes = &piece.bytes()[std::mem::take(&mut skipped)..];
                let bytes = &bytes[..bytes.len().min(room)];
                room -= bytes.len();
                (!bytes.is_empty()).then(|| IoSlice::new(bytes))
            });
            match wire.write(&slices.collect::<Vec<_>>()) {
                Ok(written) => {
                    self.advance(written);
                    left -= written;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok((most - left, false));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        wire.flush()?;
        Ok((most - left, false))
    }

    fn advance(&mut self, written: usize) {
        assert!(written <= self.bytes, "sent more than there was");
        self.bytes -= written;
        self.sent += written;
        while let Some(piece) = self.pieces.front()
            && self.sent >= piece.bytes().len()
        {
            self.sent -= piece.bytes().len();
            if let Some(Content::Bytes(bytes)) = self.pieces.pop_front().map(|piece| piece.content)
            {
                self.headers -= bytes.len();
            }
        }
        debug_assert!(
            self.bytes > 0 || (self.pieces.is_empty() && self.sent == 0),
            "all bytes are sent, and some pieces are not"
        );
    }
}
