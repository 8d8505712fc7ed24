//! How bytes reach the medium: one trait, and an engine for each kind of thread.
//!
//! ```text
//!   port, copy ──submit──▶ Engine ──▶ io_uring, if the kernel has it               (uring.rs)
//!     ▲                          └──▶ else reads inline, and a thread with pwritev2  (blocking.rs)
//!     └──── poll ◀── event descriptor
//!
//!   the log's appends ─────▶ system calls in the thread that needs them            (medium/file.rs)
//! ```
//! An operation owns its buffers until it is polled as done, so none is freed while the kernel uses
//! it. In front of either engine, `gated.rs` keeps operations while an image lacks their chunks.

mod blocking;
mod gated;
#[cfg(test)]
pub(crate) mod inline;
mod uring;

use std::io;

use crate::medium::file::Engine;
use crate::medium::io_ring;
use crate::sync::Event;

/// Which engine performs the I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring if the kernel has all that is needed, otherwise blocking calls.
    #[default]
    Auto,
    /// io_uring; opening fails where the kernel has none.
    IoUring,
    /// `pwritev2` on a thread.
    Blocking,
}

/// Resolves `kind` to an engine that works on this kernel.
pub(crate) fn probe(kind: EngineKind) -> io::Result<EngineKind> {
    match kind {
        EngineKind::Blocking => Ok(kind),
        EngineKind::IoUring => io_ring::probe().map(|()| kind),
        EngineKind::Auto => Ok(match io_ring::probe() {
            Ok(()) => EngineKind::IoUring,
            Err(error) => {
                tracing::info!("io_uring is not usable ({error}): using blocking calls");
                EngineKind::Blocking
            }
        }),
    }
}

/// Makes an engine of a probed kind that signals `event`. If there is no ring for it, it uses
/// blocking calls.
pub(crate) fn create(kind: EngineKind, event: &Event) -> io::Result<Box<dyn Engine>> {
    let ring = match kind {
        EngineKind::Blocking => None,
        _ => uring::UringEngine::new(event).ok(),
    };
    let engine: Box<dyn Engine> = match ring {
        Some(ring) => Box::new(ring),
        None => Box::new(blocking::BlockingEngine::new(event.try_clone()?)),
    };
    Ok(Box::new(gated::GatedEngine::new(
        engine,
        event.try_clone()?,
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;
    use crate::medium::directory::Medium;
    use crate::medium::file::{Chunk, DataFile, Io, IoCompletion, ReadSource, SyncScope};
    use crate::medium::segment::take_short_steps;
    use crate::sync::Arc;

    fn finish(engine: &mut dyn Engine, event: &Event, count: usize) -> Vec<IoCompletion> {
        let mut done = Vec::new();
        engine.enter();
        while done.len() < count {
            engine.poll(&mut done);
            if done.len() < count {
                event.sleep_until(None);
                event.clear();
            }
        }
        done
    }

    #[test]
    fn both_engines_write_sync_and_read_back() {
        for kind in [EngineKind::IoUring, EngineKind::Blocking] {
            let kind = match probe(kind) {
                Ok(kind) => kind,
                Err(error) => {
                    println!("skipped: {kind:?}: {error}");
                    continue;
                }
            };
            let dir = tempfile::tempdir().unwrap();
            let medium = crate::medium::directory::directory(dir.path(), kind);
            let segment = Arc::new(
                medium
                    .create_segment(0, 1 << 20, &mut take_short_steps)
                    .unwrap(),
            );
            let event = Event::new().unwrap();
            let mut engine = create(kind, &event).unwrap();
            let chunk = |byte: u8, len: usize| Chunk {
                buffer: Buffer::from(&vec![byte; len][..]).share(),
                len,
            };
            let chunks = vec![chunk(1, 4096), chunk(2, 512), chunk(3, 3584)];
            let sync = SyncScope::Write;
            engine.submit(
                7,
                Io::Append {
                    segment: segment.clone(),
                    offset: 8192,
                    chunks,
                    payloads: 0..0,
                    sync,
                },
            );
            let done = finish(engine.as_mut(), &event, 1);
            assert_eq!(done[0].id, 7);
            assert!(done[0].result.is_ok(), "{:?}", done[0].result);
            let source = ReadSource::Segment(segment.clone());
            engine.submit(
                8,
                Io::Read {
                    source: source.clone(),
                    offset: 8192,
                    buffer: Buffer::zeroed(8192),
                },
            );
            engine.submit(
                9,
                Io::Read {
                    source,
                    offset: 1 << 20,
                    buffer: Buffer::zeroed(512),
                },
            );
            let mut done = finish(engine.as_mut(), &event, 2);
            done.sort_by_key(|d| d.id);
            let read = done[0].result.as_ref().unwrap().as_ref().unwrap();
            assert!(
                read[..4096].iter().all(|&b| b == 1) && read[4096..4608].iter().all(|&b| b == 2)
            );
            assert!(read[4608..].iter().all(|&b| b == 3));
            assert_eq!(
                done[1].result.as_ref().unwrap_err().kind(),
                io::ErrorKind::UnexpectedEof,
                "{kind:?}"
            );
            // A sync alone, and many operations at once.
            engine.submit(
                1,
                Io::Append {
                    segment: segment.clone(),
                    offset: 0,
                    chunks: vec![],
                    payloads: 0..0,
                    sync: SyncScope::Segments(vec![segment.clone()]),
                },
            );
            for i in 0..300 {
                let source = ReadSource::Segment(segment.clone());
                engine.submit(
                    100 + i,
                    Io::Read {
                        source,
                        offset: i * 512,
                        buffer: Buffer::zeroed(512),
                    },
                );
            }
            assert!(
                finish(engine.as_mut(), &event, 301)
                    .iter()
                    .all(|d| d.result.is_ok())
            );
            // Base images: many chunks in one write, many writes at once.
            let path = dir.path().join("base");
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            let base: Arc<dyn DataFile> =
                Arc::new(crate::medium::host::open_direct(&path, true).unwrap());
            for i in 0..16u8 {
                engine.submit(
                    u64::from(i),
                    Io::Write {
                        base: base.clone(),
                        offset: u64::from(i) << 16,
                        chunks: (0..16).map(|j| chunk(16 * i + j, 4096)).collect(),
                    },
                );
            }
            let done = finish(engine.as_mut(), &event, 16);
            assert!(done.iter().all(|d| d.result.is_ok()), "{done:?}");
            let written = std::fs::read(&path).unwrap();
            let right = |(i, block): (usize, &[u8])| block.iter().all(|&byte| byte == i as u8);
            assert!(written.chunks(4096).enumerate().all(right));
        }
    }
}
