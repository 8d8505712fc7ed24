//! A thread that asks a disk which of its sectors hold data, or have changed.
//!
//! A query may need a seek in the base image (SEEK_HOLE), which can take arbitrarily long on a
//! network or user-space file system, and a worker that serves many disks must not wait for it. So
//! each export starts a thread with its first query, and a slow file system delays only the clients
//! that ask about its own disk.
//!
//! The number of waiting queries is bounded by the requests that connections may have in flight.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::protocol::extent;
use crate::backend::{Allocation, Backend, Extent};
use crate::listen::join;

/// A metadata context of BLOCK_STATUS. Its ID is its position in the connection's list of contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetaContext {
    /// Which sectors hold data.
    Allocation,
    /// Which sectors have changed since this point in the past.
    Changes(u64),
}

/// A range of sectors, the contexts asked for, and the most extents to return for each of them.
#[derive(Clone, Debug)]
pub(super) struct ExtentQuery {
    pub(super) sector: u64,
    pub(super) sectors: u64,
    pub(super) most: usize,
    pub(super) contexts: Arc<[MetaContext]>,
}

/// A number of sectors, and their status in a context.
pub(super) type ExtentStatus = (u64, u32);

/// Called with the result in the mapper's thread: consecutive extents for each context.
pub(super) type QueryCallback = Box<dyn FnOnce(io::Result<Vec<Vec<ExtentStatus>>>) + Send>;

impl ExtentQuery {
    fn run(&self, backend: &dyn Backend) -> io::Result<Vec<Vec<ExtentStatus>>> {
        let &Self {
            sector,
            sectors,
            most,
            ..
        } = self;
        let extents_of = |context: &MetaContext| match *context {
            MetaContext::Allocation => {
                let extents = match backend.mapped() {
                    Some(mapped) => mapped.extents(sector, sectors, most)?,
                    None => vec![Extent::data(sectors)],
                };
                let extents = extents.into_iter();
                let status = extents.map(|extent| match extent.allocation {
                    Allocation::Data => (extent.sectors, 0),
                    Allocation::Zero => (extent.sectors, extent::ZERO),
                    Allocation::Hole => (extent.sectors, extent::HOLE | extent::ZERO),
                });
                Ok(status.collect())
            }
            MetaContext::Changes(since) => {
                let tracked = backend.tracked().ok_or(io::ErrorKind::NotFound)?;
                let changes = tracked.changes(since, sector, sectors, most)?.into_iter();
                let status = changes.map(|change| {
                    let dirty = if change.changed { extent::DIRTY } else { 0 };
                    (change.sectors, dirty)
                });
                Ok(status.collect())
            }
        };
        self.contexts.iter().map(extents_of).collect()
    }
}

/// The thread of an export, started by its first query. Dropping this ends the thread, after the
/// pending queries.
#[derive(Default)]
pub(super) struct ExtentMapper(Mutex<Option<MapperThread>>);

struct MapperThread {
    queries: Sender<(ExtentQuery, QueryCallback)>,
    thread: JoinHandle<()>,
}

impl ExtentMapper {
    /// Queues a query of `backend`, which must be the same in every call; the thread passes the
    /// result to `callback`.
    pub(super) fn ask(
        &self,
        backend: &Arc<dyn Backend>,
        query: ExtentQuery,
        callback: QueryCallback,
    ) {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_none() {
            match start(Arc::clone(backend)) {
                Ok(started) => *running = Some(started),
                Err(error) => return callback(Err(error)),
            }
        }
        if let Some(running) = &*running
            && let Err(unsent) = running.queries.send((query, callback))
        {
            let (_, callback) = unsent.0;
            callback(Err(io::Error::other(
                "the thread that queries extents has panicked",
            )));
        }
    }
}

fn start(backend: Arc<dyn Backend>) -> io::Result<MapperThread> {
    let (queries, receiver) = channel::<(ExtentQuery, QueryCallback)>();
    let thread = thread::Builder::new()
        .name("nbd-map".into())
        .spawn(move || {
            for (query, callback) in receiver {
                callback(query.run(&*backend));
            }
        })?;
    Ok(MapperThread { queries, thread })
}

impl Drop for ExtentMapper {
    fn drop(&mut self) {
        let running = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(MapperThread { queries, thread }) = running.take() {
            drop(queries);
            join(thread, "NBD");
        }
    }
}
