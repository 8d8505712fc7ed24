//! Reading a segment file from front to back, one piece ahead of the checks.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};

use crate::error::{Error, Result};
use crate::medium::file::Segment;
use crate::{Buffer, format};

/// Room before a piece for the end of the previous one: a batch header may span both.
const LEAD: usize = format::batch_header_len(format::MAX_DESCRIPTORS, format::MAX_CHECKSUMS);
/// Bytes read at a time.
const PIECE: usize = (1 << 20) - LEAD;
/// Pieces that may be read ahead. One more is being read, and one is being checked.
const AHEAD: usize = 1;

/// The part of a segment file that has been read and is still needed.
pub(crate) struct Window {
    segment: Arc<Segment>,
    /// Bytes of the segment.
    size: u64,
    /// Offset in the segment of the first byte in the buffer, and its index there.
    first: u64,
    at: usize,
    /// Offset after the last byte in the buffer.
    end: u64,
    buffer: Buffer,
    ahead: Option<ReaderThread>,
}

/// A thread that reads the pieces from the window's `end` on.
struct ReaderThread {
    /// Taken to make the thread end.
    pieces: Option<Receiver<io::Result<Buffer>>>,
    thread: Option<JoinHandle<()>>,
}

impl Window {
    /// A window on a segment of `size` bytes from `from` on, a multiple of
    /// [`BLOCK`](format::BLOCK).
    pub(crate) fn new(segment: &Arc<Segment>, from: u64, size: u64) -> Self {
        Self {
            segment: segment.clone(),
            size,
            first: from,
            at: 0,
            end: from,
            buffer: Buffer::for_overwrite(0),
            ahead: ReaderThread::start(segment, from, size),
        }
    }

    /// Bytes of the segment.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The segment file.
    pub(crate) fn path(&self) -> &Path {
        &self.segment.path
    }

    /// The `len` bytes at `offset`; `len` is at most that of the longest batch header. The bytes
    /// must lie within the segment, and `offset` must not be below that of the call before.
    pub(crate) fn bytes(&mut self, offset: u64, len: usize) -> Result<&[u8]> {
        while offset + len as u64 > self.end {
            self.advance(offset)?;
        }
        let at = self.at + (offset - self.first) as usize;
        Ok(&self.buffer[at..at + len])
    }

    /// Some of the bytes from `offset` to `end`, at least one. As for [`bytes`](Self::bytes), but
    /// without a limit on the length.
    pub(crate) fn bytes_up_to(&mut self, offset: u64, end: u64) -> Result<&[u8]> {
        while offset >= self.end {
            self.advance(offset)?;
        }
        let len = end.min(self.end) - offset;
        self.bytes(offset, len as usize)
    }

    /// Moves on to the next piece, and keeps the bytes from `offset` on.
    fn advance(&mut self, offset: u64) -> Result<()> {
        let next = match &self.ahead {
            Some(ahead) => ahead.next(),
            None => read_piece(&self.segment, self.end, self.size),
        };
        let mut next =
            next.map_err(|error| Error::io("read the log segment", &self.segment.path, error))?;
        let kept = self.end.saturating_sub(offset) as usize;
        let old_end = self.at + (self.end - self.first) as usize;
        next[LEAD - kept..LEAD].copy_from_slice(&self.buffer[old_end - kept..old_end]);
        self.first = self.end - kept as u64;
        self.at = LEAD - kept;
        self.end += (next.len() - LEAD) as u64;
        self.buffer = next;
        Ok(())
    }
}

/// Reads the piece that begins at `offset`, into a buffer with the lead in front.
fn read_piece(segment: &Segment, offset: u64, size: u64) -> io::Result<Buffer> {
    let len = (size - offset).min(PIECE as u64) as usize;
    let mut piece = Buffer::for_overwrite(LEAD + len);
    segment.file.read_exact_at(&mut piece[LEAD..], offset)?;
    Ok(piece)
}

impl ReaderThread {
    /// `None` if a thread would gain nothing or can't be started.
    fn start(segment: &Arc<Segment>, from: u64, size: u64) -> Option<Self> {
        if size - from <= PIECE as u64 {
            return None;
        }
        let (sender, receiver) = sync_channel(AHEAD);
        let segment = segment.clone();
        let read = move || {
            for offset in (from..size).step_by(PIECE) {
                let piece = read_piece(&segment, offset, size);
                let failed = piece.is_err();
                // The window is gone, or will not ask for more after an error.
                if sender.send(piece).is_err() || failed {
                    return;
                }
            }
        };
        let name = "log-reader".to_owned();
        let thread = thread::Builder::new().name(name).spawn(read).ok()?;
        Some(Self {
            pieces: Some(receiver),
            thread: Some(thread),
        })
    }

    fn next(&self) -> io::Result<Buffer> {
        let piece = self.pieces.as_ref().map(Receiver::recv);
        let ended = || Err(io::Error::other("the thread that reads it has ended"));
        piece
            .and_then(std::result::Result::ok)
            .unwrap_or_else(ended)
    }
}

impl Drop for ReaderThread {
    /// Waits for the thread: while it runs, the segment can't be recycled.
    fn drop(&mut self) {
        self.pieces = None;
        // A panic would be a bug, and has been printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::format::BLOCK;
    use crate::medium::host::open_direct;

    /// A segment of a little more than three pieces, and its bytes.
    fn segment(directory: &Path) -> (Arc<Segment>, Vec<u8>) {
        let bytes: Vec<u8> = (0..(3 * PIECE + BLOCK) as u64 / 8)
            .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
            .collect();
        let path = directory.join("segment-00000");
        std::fs::write(&path, &bytes).unwrap();
        let file = open_direct(&path, true).unwrap();
        (Arc::new(Segment::new(path, Box::new(file))), bytes)
    }

    #[test]
    fn every_byte_is_seen_wherever_pieces_meet() {
        let directory = tempfile::tempdir().unwrap();
        let (segment, bytes) = segment(directory.path());
        let size = bytes.len() as u64;
        for from in [0, 5 * BLOCK, 2 * PIECE, 3 * PIECE] {
            let mut window = Window::new(&segment, from as u64, size);
            // Headers of any length at every block, as when the rest of a segment is searched.
            for at in (from..bytes.len()).step_by(BLOCK) {
                let len = (LEAD - at % (7 * BLOCK)).min(bytes.len() - at);
                assert!(window.bytes(at as u64, BLOCK).unwrap() == &bytes[at..at + BLOCK]);
                assert!(window.bytes(at as u64, len).unwrap() == &bytes[at..at + len]);
            }
            // Batches: a header, and a payload of any length.
            let mut window = Window::new(&segment, from as u64, size);
            let (mut at, mut payload) = (from, 1000);
            while at < bytes.len() {
                let header = window.bytes(at as u64, BLOCK).unwrap();
                assert!(header == &bytes[at..at + BLOCK]);
                at += BLOCK;
                let end = (at + payload).min(bytes.len());
                while at < end {
                    let some = window.bytes_up_to(at as u64, end as u64).unwrap();
                    assert!(!some.is_empty() && some == &bytes[at..at + some.len()]);
                    at += some.len();
                }
                (at, payload) = (at.next_multiple_of(BLOCK), payload * 3 % 1_500_007);
            }
        }
    }

    #[test]
    fn a_truncated_file_is_an_error_at_its_end_and_not_before() {
        let directory = tempfile::tempdir().unwrap();
        let (segment, bytes) = segment(directory.path());
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&segment.path)
            .unwrap();
        file.set_len((2 * PIECE) as u64).unwrap();
        file.write_all_at(&[1], 0).unwrap();
        let mut window = Window::new(&segment, 0, bytes.len() as u64);
        assert_eq!(window.bytes(0, 1).unwrap(), [1]);
        window.bytes((2 * PIECE - BLOCK) as u64, BLOCK).unwrap();
        for _ in 0..2 {
            let error = window.bytes((2 * PIECE) as u64, BLOCK).unwrap_err();
            assert!(error.to_string().contains("segment-00000"), "{error}");
        }
    }
}
