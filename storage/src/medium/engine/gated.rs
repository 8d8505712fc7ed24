//! An engine that keeps an operation on an image until the chunks that it needs were fetched (see
//! [`partial_file`](crate::medium::partial_file)). All others pass.

use std::io;
use std::ops::Range;

use crate::medium::file::{Engine, Io, IoCompletion, ReadSource};
use crate::medium::partial_file::{ChunkGate, GateState};
use crate::sync::{Arc, Event};

/// See the module's documentation.
pub(super) struct GatedEngine {
    inner: Box<dyn Engine>,
    /// Operations that wait for chunks, with the caller's numbers.
    kept: Vec<(u64, Io)>,
    /// Operations that failed without being carried out.
    failed: Vec<IoCompletion>,
    event: Event,
}

impl GatedEngine {
    pub(super) fn new(inner: Box<dyn Engine>, event: Event) -> Self {
        Self {
            inner,
            kept: Vec::new(),
            failed: Vec::new(),
            event,
        }
    }

    /// Hands an operation on, or keeps it. Whether it was handed on.
    fn pass(&mut self, id: u64, io: Io) -> bool {
        let kept = match self.keep(&io) {
            None => {
                self.inner.submit(id, io);
                return true;
            }
            Some(kept) => kept,
        };
        match kept {
            Ok(()) => self.kept.push((id, io)),
            Err(error) => {
                let result = Err(error);
                self.failed.push(IoCompletion { id, result });
                self.event.signal();
            }
        }
        false
    }

    /// Asks for the chunks that an operation waits for; `None`: it need not wait.
    ///
    /// # Errors
    /// If it must not wait, or the chunks are lost.
    fn keep(&self, io: &Io) -> Option<io::Result<()>> {
        let (gate, bytes) = needs(io)?;
        // Copies of the log, which write, have limits of their own.
        let refusal = || gate.refuses().filter(|_| matches!(io, Io::Read { .. }));
        match gate.check(bytes.clone()) {
            GateState::Present => None,
            GateState::Failed(error) => Some(Err(error)),
            GateState::Absent => Some(match refusal() {
                Some(error) => Err(error),
                None => gate.ask(bytes, &self.event),
            }),
        }
    }
}

/// The bytes that an operation needs of an image that may lack chunks.
fn needs(io: &Io) -> Option<(&Arc<ChunkGate>, Range<u64>)> {
    let (file, offset, len) = match io {
        Io::Read {
            source: ReadSource::File(file),
            offset,
            buffer,
        } => (file, *offset, buffer.len()),
        Io::Write {
            base,
            offset,
            chunks,
        } => {
            // Most files have all chunks, and need no length.
            base.chunk_gate()?;
            (base, *offset, chunks.iter().map(|chunk| chunk.len).sum())
        }
        _ => return None,
    };
    let gate = file.chunk_gate()?;
    Some((gate, offset..offset + len as u64))
}

impl Engine for GatedEngine {
    fn submit(&mut self, id: u64, io: Io) {
        self.pass(id, io);
    }

    fn abandon(&mut self) -> bool {
        let any = !self.kept.is_empty();
        let abandoned = self.kept.drain(..).map(|(id, _)| IoCompletion {
            id,
            result: Err(io::ErrorKind::TimedOut.into()),
        });
        self.failed.extend(abandoned);
        any
    }

    fn enter(&mut self) {
        self.inner.enter();
    }

    fn poll(&mut self, done: &mut Vec<IoCompletion>) {
        if !self.kept.is_empty() {
            let mut passed = false;
            for (id, io) in std::mem::take(&mut self.kept) {
                passed |= self.pass(id, io);
            }
            if passed {
                self.inner.enter();
            }
        }
        done.append(&mut self.failed);
        self.inner.poll(done);
    }
}
