//! An engine that keeps an operation on an image until the chunks that it needs were fetched (see
//! [`partial_file`](crate::medium::partial_file)). All others pass.

use std::ops::Range;

use crate::medium::file::{Engine, Io, IoCompletion, ReadSource};
use crate::medium::partial_file::{Fetch, FetchState};
use crate::sync::{Arc, Event};

/// See the module's documentation.
pub(super) struct GatedEngine {
    inner: Box<dyn Engine>,
    /// Operations that wait for chunks, with the caller's numbers.
    kept: Vec<(u64, Io)>,
    /// Operations that failed without being carried out.
    failed: Vec<IoCompletion>,
    /// Operations wait although requests may not.
    outwaits: bool,
    event: Event,
}

impl GatedEngine {
    pub(super) fn new(inner: Box<dyn Engine>, event: Event) -> Self {
        Self {
            inner,
            kept: Vec::new(),
            failed: Vec::new(),
            outwaits: false,
            event,
        }
    }

    /// Hands an operation on, or keeps it. Whether it was handed on.
    fn pass(&mut self, id: u64, io: Io) -> bool {
        let waits = needs(&io).and_then(|(fetch, bytes)| {
            let waits = match fetch.check(bytes.clone()) {
                FetchState::Present => return None,
                FetchState::Failed(error) => Err(error),
                FetchState::Absent => match fetch.refuses().filter(|_| !self.outwaits) {
                    Some(error) => Err(error),
                    None => fetch.ask(bytes, &self.event),
                },
            };
            Some(waits)
        });
        match waits {
            None => {
                self.inner.submit(id, io);
                return true;
            }
            Some(Ok(())) => self.kept.push((id, io)),
            Some(Err(error)) => {
                let result = Err(error);
                self.failed.push(IoCompletion { id, result });
                self.event.signal();
            }
        }
        false
    }
}

/// What of an image an operation needs that may lack chunks.
fn needs(io: &Io) -> Option<(&Arc<Fetch>, Range<u64>)> {
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
            base.fetch()?;
            (base, *offset, chunks.iter().map(|chunk| chunk.len).sum())
        }
        _ => return None,
    };
    let fetch = file.fetch()?;
    Some((fetch, offset..offset + len as u64))
}

impl Engine for GatedEngine {
    fn submit(&mut self, id: u64, io: Io) {
        self.pass(id, io);
    }

    fn outwait(&mut self) {
        self.outwaits = true;
    }

    fn abandon(&mut self) -> bool {
        let abandoned = self.kept.drain(..).map(|(id, _)| IoCompletion {
            id,
            result: Err(std::io::ErrorKind::TimedOut.into()),
        });
        let before = self.failed.len();
        self.failed.extend(abandoned);
        self.failed.len() > before
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
