//! Replies that wait for room in the socket's send buffer.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use super::wire::Wire;
use crate::backend::Buffer;

/// Most pieces in one vectored write.
const PIECES_AT_ONCE: usize = 32;

enum Piece {
    Bytes(Vec<u8>),
    Data(Buffer),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Data(buffer) => buffer,
        }
    }
}

/// The sending half of a connection. Data is sent from the buffer that it was read into, without a copy.
#[derive(Default)]
pub(super) struct ReplyQueue {
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that have been sent.
    sent: usize,
    /// Unsent bytes of all pieces.
    bytes: usize,
}

impl ReplyQueue {
    /// Unsent bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Appends the bytes that `put` writes.
    pub(super) fn push_header(&mut self, put: impl FnOnce(&mut Vec<u8>)) {
        if !matches!(self.pieces.back(), Some(Piece::Bytes(_))) {
            self.pieces.push_back(Piece::Bytes(Vec::new()));
        }
        if let Some(Piece::Bytes(bytes)) = self.pieces.back_mut() {
            let before = bytes.len();
            put(bytes);
            self.bytes += bytes.len() - before;
        }
    }

    /// Appends data, without a copy.
    pub(super) fn push_data(&mut self, data: Buffer) {
        self.bytes += data.len();
        self.pieces.push_back(Piece::Data(data));
    }

    /// Sends as much as the socket takes, at most `most` bytes. Returns the number of bytes, and whether the socket may
    /// take more of what is left.
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
            self.pieces.pop_front();
        }
        debug_assert!(
            self.bytes > 0 || (self.pieces.is_empty() && self.sent == 0),
            "all bytes are sent, and some pieces are not"
        );
    }
}
