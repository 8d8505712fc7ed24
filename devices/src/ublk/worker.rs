//! Serves the queues of a device: each is a source of the reactor. A queue takes all requests that
//! have come, submits them as a batch, and passes all answers to the kernel in one system call.
//!
//! ```text
//!   ring ─▶ requests ─▶ memory, data of writes ─▶ kick ─▶ completions ─▶ data of reads ─▶ answers
//! ```

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::device::Device;
use super::layout::Request;
use super::queue::{QueueRing, TagEvent};
use crate::backend::{
    Backend, Buffer, Completion, Failure, MemoryBudget, MemoryCharge, MemoryClient, Operation,
    SECTOR_SIZE,
};
use crate::control::{Gate, GateWatcher};
use crate::event_loop::EventSet;
use crate::latency::{OperationKind, add};
use crate::metrics::BlockMetrics;
use crate::reactor::{
    DedicatedThread, DiskPort, FIRST_OWN_EVENT, LEAST_IN_FLIGHT, NextStep, ReactorPool, Source,
    SourceHandle, Turn,
};
use crate::throttle::Throttle;

/// The ring has something.
const RING: usize = FIRST_OWN_EVENT;

/// The threads that serve the queues of any number of devices.
pub struct WorkerPool(ReactorPool);

impl Default for WorkerPool {
    fn default() -> Self {
        Self(ReactorPool::new("ublk-worker"))
    }
}

/// The queues of a device, which are served. Dropping this ends that: requests that were taken are
/// answered, others wait in the kernel.
pub(super) struct QueueServers {
    sources: Vec<SourceHandle>,
    /// The gate has only weak references to them, so they are kept alive here.
    _watchers: Vec<Arc<dyn GateWatcher>>,
}

impl QueueServers {
    pub(super) fn start(
        device: &Device,
        queues: Vec<QueueRing>,
        pool: &WorkerPool,
    ) -> io::Result<Self> {
        let (mut sources, mut watchers) = (Vec::new(), Vec::new());
        for ring in queues {
            // A read that blocks must not hold up other disks.
            let dedicated = device.backend.blocks().then(|| DedicatedThread {
                name: "ublk-worker".into(),
                cpu: None,
            });
            let reservation = pool.0.reserve(dedicated)?;
            let watcher: Arc<dyn GateWatcher> = Arc::new(reservation.thread());
            device.gate.watch(Arc::downgrade(&watcher));
            watchers.push(watcher);
            let server = QueueServer::new(device, ring)?;
            sources.push(reservation.serve(Box::new(server)));
        }
        Ok(Self {
            sources,
            _watchers: watchers,
        })
    }

    /// Whether any queue is no longer served.
    pub(super) fn have_ended(&self) -> bool {
        self.sources.iter().any(SourceHandle::is_gone)
    }
}

impl Drop for QueueServers {
    fn drop(&mut self) {
        self.sources.iter().for_each(SourceHandle::request_stop);
        self.sources.iter().for_each(SourceHandle::wait_until_gone);
    }
}

/// A request in flight.
struct InFlightRequest {
    request: Request,
    since: Instant,
    /// Bytes that move now.
    moving: usize,
    /// Of a read in parts, the bytes that were read before.
    done: usize,
    /// It needs a FLUSH before it is answered.
    flush_after: bool,
    /// It is answered once it survives this process.
    await_written: bool,
    _charge: MemoryCharge,
}

impl InFlightRequest {
    /// What it counts for, of the bytes in flight.
    fn weight(&self) -> usize {
        match self.moving {
            0 => 0,
            bytes => bytes.max(LEAST_IN_FLIGHT),
        }
    }

    /// The next part of a read, of `most` bytes at most.
    fn next_part(&mut self, most: usize) -> Operation {
        let rest = self.request.payload() as usize - self.done;
        self.moving = rest.min(most);
        Operation::Read {
            sector: self.request.sector + self.done as u64 / SECTOR_SIZE,
            sectors: (self.moving as u64 / SECTOR_SIZE) as u32,
        }
    }
}

/// Serves a queue.
struct QueueServer {
    name: String,
    port: DiskPort,
    backend: Arc<dyn Backend>,
    gate: Arc<Gate>,
    metrics: Arc<BlockMetrics>,
    answer_written: bool,
    ring: QueueRing,
    /// Tags that still get requests, or have one.
    tags: usize,
    /// Tags whose requests were not taken yet.
    arrived: VecDeque<u16>,
    /// By tag.
    in_flight: Vec<Option<InFlightRequest>>,
    /// How many of them there are, and what they move.
    requests: usize,
    moving: usize,
    memory: MemoryClient,
    /// Since when the next request waits for memory.
    hungry_since: Option<Instant>,
    /// Whether the turn was over before all requests were taken.
    more: bool,
    /// Completions not handled yet.
    completions: Vec<Completion>,
    /// Whether the queue is no longer served: requests in flight complete, and no more are taken.
    failed: bool,
}

impl QueueServer {
    fn new(device: &Device, ring: QueueRing) -> io::Result<Self> {
        let depth = usize::from(ring.depth());
        Ok(Self {
            name: device.name.clone(),
            port: DiskPort::open(&*device.backend, &device.throttle)?,
            backend: Arc::clone(&device.backend),
            gate: Arc::clone(&device.gate),
            metrics: Arc::clone(&device.metrics),
            answer_written: device.answer_written,
            ring,
            tags: depth,
            arrived: VecDeque::with_capacity(depth),
            in_flight: (0..depth).map(|_| None).collect(),
            requests: 0,
            moving: 0,
            memory: MemoryBudget::of_process().client(),
            hungry_since: None,
            more: false,
            completions: Vec::new(),
            failed: false,
        })
    }

    fn fail(&mut self, reason: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.failed, true) {
            tracing::error!(
                "disk '{}': queue {}: {reason}: it is no longer served, and its requests wait",
                self.name,
                self.ring.index()
            );
        }
    }

    /// Takes what has happened to the tags.
    fn collect(&mut self) {
        let mut refused = None;
        let (arrived, tags) = (&mut self.arrived, &mut self.tags);
        self.ring.events(|event| match event {
            TagEvent::Request(tag) => arrived.push_back(tag),
            TagEvent::Retired => *tags = tags.saturating_sub(1),
            TagEvent::Failed(error) => refused = Some(error),
        });
        if let Some(error) = refused {
            self.fail(&io::Error::from_raw_os_error(error));
        }
    }

    /// Takes requests until none is left, one has to wait, or the turn is over.
    fn take_requests(&mut self, turn: &mut Turn<'_>) {
        // One clock reading for all requests taken now.
        let mut since = None;
        self.more = false;
        while let Some(&tag) = self.arrived.front() {
            if turn.is_over() {
                self.more = true;
                return;
            }
            if self.port.is_holding() || !self.gate.enter() {
                return;
            }
            let now = *since.get_or_insert_with(Instant::now);
            if !self.begin_request(tag, now, turn) {
                self.gate.leave();
                let since = *self.hungry_since.get_or_insert(now);
                return self.memory.wait_since(since);
            }
            self.hungry_since = None;
            self.arrived.pop_front();
        }
    }

    /// Submits a request, or answers one that can't be; `false`: it has to wait for memory.
    fn begin_request(&mut self, tag: u16, since: Instant, turn: &mut Turn<'_>) -> bool {
        let Some(request) = self.ring.request(tag) else {
            add(&self.metrics.requests, 1);
            turn.charge_request(0);
            self.end(tag, -libc::EOPNOTSUPP);
            return true;
        };
        let payload = request.payload();
        let Some(charge) = self.memory.charge(payload) else {
            return false;
        };
        add(&self.metrics.requests, 1);
        let changes = !matches!(request.kind, OperationKind::Read | OperationKind::Flush);
        // A FLUSH makes a write of FUA durable, unless writes are anyway.
        let flush_after = request.fua && self.backend.write_cache();
        let mut in_flight = InFlightRequest {
            request,
            since,
            moving: payload as usize,
            done: 0,
            flush_after,
            await_written: changes && self.answer_written && !flush_after,
            _charge: charge,
        };
        let Request {
            sector, sectors, ..
        } = request;
        let operation = match request.kind {
            OperationKind::Read => in_flight.next_part(turn.part()),
            OperationKind::Write => {
                let data = Buffer::try_for_overwrite(payload as usize);
                let data = data.map_err(|_| io::ErrorKind::OutOfMemory.into());
                let data = data.and_then(|mut data| {
                    self.ring.read_data(tag, &mut data)?;
                    Ok::<_, io::Error>(data)
                });
                match data {
                    Ok(data) => Operation::Write { sector, data },
                    Err(error) => {
                        tracing::warn!("disk '{}': data of a write: {error}", self.name);
                        turn.charge_request(0);
                        self.end(tag, -libc::EIO);
                        return true;
                    }
                }
            }
            OperationKind::Flush => Operation::Flush,
            OperationKind::Discard => Operation::Discard { sector, sectors },
            OperationKind::WriteZeroes => Operation::WriteZeroes {
                sector,
                sectors,
                unmap: request.unmap,
            },
        };
        turn.charge_request(in_flight.moving);
        turn.take_room(in_flight.moving);
        self.metrics.count(&operation);
        self.moving += in_flight.weight();
        self.requests += 1;
        self.in_flight[usize::from(tag)] = Some(in_flight);
        self.port.submit_first(tag.into(), operation, payload);
        true
    }

    /// Goes on with a request whose operation has completed.
    fn complete(
        &mut self,
        token: u64,
        result: Result<Option<Buffer>, Failure>,
        turn: &mut Turn<'_>,
    ) {
        let slot = self.in_flight.get_mut(token as usize);
        let Some(in_flight) = slot.and_then(Option::as_mut) else {
            debug_assert!(false, "completion of unknown token {token}");
            return;
        };
        let tag = token as u16;
        let outcome = match result {
            Err(failure) => Err(errno(failure)),
            Ok(_) if std::mem::take(&mut in_flight.flush_after) => {
                return self.port.submit_unlimited(token, Operation::Flush);
            }
            Ok(_) if std::mem::take(&mut in_flight.await_written) => {
                if !self.port.notify_written(token) {
                    return;
                }
                Ok(in_flight.request.payload() as i32)
            }
            Ok(data) if in_flight.request.kind == OperationKind::Read => {
                let data = data.filter(|data| data.len() == in_flight.moving);
                let copied = data.is_some_and(|data| {
                    turn.charge(data.len());
                    let copied = self.ring.write_data(tag, in_flight.done, &data);
                    copied
                        .inspect_err(|error| {
                            tracing::warn!("disk '{}': data of a read: {error}", self.name);
                        })
                        .is_ok()
                });
                if copied {
                    self.moving -= in_flight.weight();
                    in_flight.done += in_flight.moving;
                    in_flight.moving = 0;
                    if in_flight.done < in_flight.request.payload() as usize {
                        let part = in_flight.next_part(turn.part());
                        self.moving += in_flight.weight();
                        turn.charge(in_flight.moving);
                        return self.port.submit_unlimited(token, part);
                    }
                    Ok(in_flight.done as i32)
                } else {
                    Err(libc::EIO)
                }
            }
            Ok(_) => Ok(in_flight.request.payload() as i32),
        };
        let Some(ended) = self.in_flight[usize::from(tag)].take() else {
            return;
        };
        self.moving -= ended.weight();
        self.requests -= 1;
        let Request { kind, .. } = ended.request;
        let queue = usize::from(self.ring.index());
        self.metrics
            .latencies
            .count(queue, kind, ended.since.elapsed());
        let bytes = ended.request.payload();
        match (outcome, kind) {
            (Ok(_), OperationKind::Read) => add(&self.metrics.bytes_read, bytes),
            (Ok(_), OperationKind::Write) => add(&self.metrics.bytes_written, bytes),
            _ => {}
        }
        self.end(tag, outcome.unwrap_or_else(|error| -error));
    }

    /// Answers a tag's request, which has passed the gate.
    fn end(&mut self, tag: u16, result: i32) {
        if result < 0 {
            add(&self.metrics.errors, 1);
        }
        self.ring.commit(tag, result);
        self.gate.leave();
    }
}

/// The error number that the kernel turns into the request's status.
fn errno(failure: Failure) -> i32 {
    match failure {
        Failure::OutOfRange | Failure::TooLarge => libc::EINVAL,
        Failure::ReadOnly => libc::EROFS,
        Failure::Io => libc::EIO,
    }
}

impl Source for QueueServer {
    fn throttle(&self) -> &Arc<Throttle> {
        self.port.throttle()
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        turn.watch(&self.ring, RING, EventSet::IN)?;
        self.port.watch(turn)?;
        // From this thread on, only it may answer.
        self.ring.fetch_all()
    }

    fn ready(&mut self, event: usize, _: EventSet, _: bool) {
        if event == RING {
            add(&self.metrics.doorbells, 1);
        } else {
            self.port.ready(event);
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        self.collect();
        if !self.failed && !turn.is_stopping() {
            self.take_requests(turn);
        }
    }

    fn kick(&mut self, alone: bool) {
        self.port.kick(alone && self.requests == 1);
    }

    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep {
        let mut completions = std::mem::take(&mut self.completions);
        self.port.completions(&mut completions);
        let mut handled = 0;
        for Completion { token, result } in &mut completions {
            // The first may end, whatever it takes.
            if turn.is_over() && handled > 0 {
                break;
            }
            handled += 1;
            self.complete(*token, std::mem::replace(result, Ok(None)), turn);
        }
        completions.drain(..handled);
        self.completions = completions;
        if self.ring.has_answers() {
            add(&self.metrics.interrupts, 1);
            if let Err(error) = self.ring.submit() {
                self.fail(&error);
            }
        }
        let over = self.failed || self.tags == 0 || turn.is_stopping();
        if over && self.requests == 0 {
            NextStep::End
        } else if self.port.has_submitted() || !self.completions.is_empty() {
            NextStep::Work
        } else if self.more && !over {
            NextStep::Take
        } else if self.hungry_since.is_some() && !over {
            NextStep::WaitUntil(Instant::now() + MemoryClient::RETRY)
        } else {
            NextStep::Wait
        }
    }

    fn has_in_flight(&self) -> bool {
        self.requests > 0
    }

    fn bytes_in_flight(&self) -> usize {
        self.moving
    }

    fn give_up(&mut self, reason: &str) {
        self.fail(&reason);
    }
}

impl Drop for QueueServer {
    /// Requests still in flight were abandoned after an error. They leave the gate without an
    /// answer.
    fn drop(&mut self) {
        for _ in self.in_flight.iter_mut().filter_map(Option::take) {
            self.gate.leave();
        }
    }
}
