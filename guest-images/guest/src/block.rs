//! A driver for virtio block devices (virtio 1.2, 5.2): negotiation, bursts over several queues.

pub mod config;
pub mod request;

use crate::block::config::{Config, Features, WRITEBACK, feature, read_config};
use crate::block::request::{CompletionHandler, Request, RequestQueue, RequestSource, SEGMENTS};
use crate::contract::Counts;
use crate::error::Error;
use crate::memory::{Arena, Region};
use crate::pattern::BLOCK;
use crate::queue::{MAX_SIZE, Queue, RingFeatures, Segment};
use crate::transport::{Interrupts, Transport, status};

/// Most queues that this driver uses.
pub const MAX_QUEUES: usize = 4;

/// The driver of one device.
pub struct Block<'a> {
    transport: &'a mut dyn Transport,
    interrupts: &'a dyn Interrupts,
    /// The features in use.
    pub features: Features,
    /// The device's configuration.
    pub config: Config,
    queues: [Option<RequestQueue>; MAX_QUEUES],
    counts: Counts,
    interrupts_before: u64,
}

impl<'a> Block<'a> {
    /// Negotiates with the device, as virtio 1.2, 3.1.1 orders it, and sets its queues up.
    ///
    /// # Errors
    /// If the device lacks VERSION_1 or FLUSH, or a step fails.
    pub fn start(
        transport: &'a mut dyn Transport,
        interrupts: &'a dyn Interrupts,
        arena: &mut Arena,
    ) -> Result<Self, Error> {
        transport.set_status(0);
        transport.set_status(status::ACKNOWLEDGE);
        let mut state = status::ACKNOWLEDGE | status::DRIVER;
        transport.set_status(state);
        let offered = u64::from(transport.offered(0)) | u64::from(transport.offered(1)) << 32;
        let features = Features(offered & Features::known().0);
        for (bit, name) in [(feature::VERSION_1, "VERSION_1"), (feature::FLUSH, "FLUSH")] {
            if !features.has(bit) {
                return Err(Error::FeatureMissing(name));
            }
        }
        transport.accept(0, features.0 as u32);
        transport.accept(1, (features.0 >> 32) as u32);
        state |= status::FEATURES_OK;
        transport.set_status(state);
        if transport.status() & status::FEATURES_OK == 0 {
            return Err(Error::FeaturesRefused);
        }

        let config = read_config(transport, features)?;
        let rings = RingFeatures {
            event_idx: features.has(feature::EVENT_IDX),
            indirect: features.has(feature::INDIRECT_DESC),
        };
        let mut queues = [const { None }; MAX_QUEUES];
        for (index, place) in (0..config.queues).zip(&mut queues) {
            let size = match transport.queue_max(index) {
                0..8 => {
                    return Err(Error::Queue {
                        index,
                        what: "absent or too small",
                    });
                }
                // The largest power of two that the device and this driver both support.
                most => 1 << most.min(MAX_SIZE).ilog2(),
            };
            let queue = Queue::new(arena, size, rings)?;
            transport.enable_queue(index, &queue)?;
            *place = Some(RequestQueue::new(queue, arena)?);
        }
        transport.set_status(state | status::DRIVER_OK);
        let interrupts_before = interrupts.count();
        let counts = Counts::default();
        Ok(Self {
            transport,
            interrupts,
            features,
            config,
            queues,
            counts,
            interrupts_before,
        })
    }

    /// The transport's name.
    pub fn name(&self) -> &'static str {
        self.transport.name()
    }

    /// Queues in use.
    pub fn queue_count(&self) -> usize {
        self.queues.iter().flatten().count()
    }

    /// Resets the counts to zero.
    pub fn start_counting(&mut self) {
        self.counts = Counts::default();
        self.interrupts_before = self.interrupts.count();
    }

    /// Operations since the last call of [`start_counting`](Self::start_counting).
    pub fn counts(&self) -> Counts {
        let interrupts = self.interrupts.count() - self.interrupts_before;
        Counts {
            interrupts,
            ..self.counts
        }
    }

    /// Whether the device's write cache is on (writeback).
    pub fn write_cache(&mut self) -> bool {
        self.transport.config8(WRITEBACK) != 0
    }

    /// Switches the device's write cache on or off, with CONFIG_WCE.
    pub fn set_write_cache(&mut self, on: bool) {
        self.transport.set_config8(WRITEBACK, u8::from(on));
    }

    /// Resets the device, after which it does not access memory any more.
    pub fn stop(self) {
        self.transport.set_status(0);
    }

    /// Runs one request in the first queue and waits for it. `fill` fills in the data of a write,
    /// `check` receives the data of a read.
    ///
    /// # Errors
    /// If the request fails, or `check` does.
    pub fn one(
        &mut self,
        request: Request,
        fill: &mut dyn FnMut(&mut [u8]),
        check: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.burst(
            1,
            1,
            &mut |_, data| (fill(data), request).1,
            &mut |_, data| check(data),
        )
    }

    /// Runs `total` requests over the first `queues` queues, with as many in flight as fit. `plan`
    /// returns the request with a given number and fills in the data of a write. `done` receives
    /// each request that has succeeded, in any order, with the data of a read. Requests run
    /// concurrently, so no two may use the same block.
    ///
    /// # Errors
    /// If a request fails, or `done` does.
    pub fn burst(
        &mut self,
        queues: usize,
        total: u32,
        plan: &mut RequestSource<'_>,
        done: &mut CompletionHandler<'_>,
    ) -> Result<(), Error> {
        let queues = queues.clamp(1, self.queue_count());
        // A single request uses direct descriptors, several requests use indirect tables.
        let indirect = total > 1;
        let mut next = 0;
        let mut finished = 0;
        while finished < total {
            // The count is read before the rings: any interrupt from now on ends the wait below.
            let seen = self.interrupts.count();
            for (index, queue) in (0u16..).zip(self.queues.iter_mut().take(queues).flatten()) {
                queue.submit(total, &mut next, indirect, plan);
                if queue.queue.publish() {
                    self.transport.notify(index);
                    self.counts.doorbells += 1;
                }
            }
            let mut progress = 0;
            for queue in self.queues.iter_mut().take(queues).flatten() {
                while let Some(used) = queue.queue.take()? {
                    queue.finish(used, BLOCK, &mut self.counts, done)?;
                    progress += 1;
                }
            }
            finished += progress;
            // The driver waits until three quarters of the requests in flight are used.
            if progress == 0 && !self.arm(queues, |in_flight| (in_flight * 3).div_ceil(4)) {
                self.sleep(seen)?;
            }
        }
        Ok(())
    }

    /// Keeps a request in flight in each of `depth` slots of each of the first `queues` queues.
    /// `next` gets the queue, the slot and the request that has just succeeded there (none at
    /// first), and returns the slot's next request. If it returns none, the slot stays idle.
    /// Returns when all slots are idle. A write's data is the current content of its slot.
    ///
    /// # Errors
    /// If a request fails.
    pub fn sustain(
        &mut self,
        queues: usize,
        depth: usize,
        next: &mut dyn FnMut(usize, usize, Option<Request>) -> Option<Request>,
    ) -> Result<(), Error> {
        let no_room = |index| Error::Queue {
            index,
            what: "too small for what is to be in flight",
        };
        let mut running = 0;
        for (index, queue) in self.queues.iter_mut().take(queues).flatten().enumerate() {
            for slot in 0..depth {
                let Some(request) = next(index, slot, None) else {
                    continue;
                };
                if !queue.begin(slot, request, queue.queue.features().indirect) {
                    return Err(no_room(index as u16));
                }
                running += 1;
            }
        }
        while running > 0 {
            // The count is read before the rings: any interrupt from now on ends the wait below.
            let seen = self.interrupts.count();
            for (index, queue) in (0u16..).zip(self.queues.iter_mut().take(queues).flatten()) {
                if queue.queue.publish() {
                    self.transport.notify(index);
                    self.counts.doorbells += 1;
                }
            }
            let mut progress = false;
            for (index, queue) in self.queues.iter_mut().take(queues).flatten().enumerate() {
                while let Some(used) = queue.queue.take()? {
                    let (slot, mut ended) = (usize::from(used.token), None);
                    queue.finish(used, BLOCK, &mut self.counts, &mut |request, _| {
                        ended = Some(request);
                        Ok(())
                    })?;
                    progress = true;
                    match next(index, slot, ended) {
                        None => running -= 1,
                        Some(request) => {
                            if !queue.begin(slot, request, queue.queue.features().indirect) {
                                return Err(no_room(index as u16));
                            }
                        }
                    }
                }
            }
            // Like Linux's driver, this one asks for an interrupt with the very next used request.
            if !progress && !self.arm(queues, |_| 1) {
                self.sleep(seen)?;
            }
        }
        Ok(())
    }

    /// Sleeps until the driver has received more than `seen` interrupts.
    fn sleep(&mut self, seen: u64) -> Result<(), Error> {
        self.interrupts.wait(seen);
        self.transport.acknowledge();
        if self.transport_is_broken() {
            return Err(Error::DeviceBroken {
                status: self.transport.status(),
            });
        }
        Ok(())
    }

    /// Asks each queue for an interrupt once `count` of its requests are used; `count` gets the
    /// number in flight. Returns `true` if a queue has reached its number already.
    fn arm(&mut self, queues: usize, count: fn(u16) -> u16) -> bool {
        self.queues
            .iter_mut()
            .take(queues)
            .flatten()
            .filter(|queue| queue.queue.in_flight() > 0)
            .fold(false, |ready, RequestQueue { queue, .. }| {
                queue.arm(count(queue.in_flight())) || ready
            })
    }

    /// Whether the device needs a reset, which it may announce by an interrupt without progress.
    /// Reading the status costs an exit, so the driver reads it only after such an interrupt.
    fn transport_is_broken(&mut self) -> bool {
        let nothing_used = self
            .queues
            .iter()
            .flatten()
            .all(|queue| !queue.queue.has_used());
        nothing_used && self.transport.status() & status::NEEDS_RESET != 0
    }

    /// Writes or reads the blocks from `first` on in one request, and waits for it. The data is
    /// split into as many segments as SEG_MAX allows and the data needs.
    ///
    /// # Errors
    /// If the request fails.
    pub fn large(&mut self, write: bool, first: u32, data: &Region) -> Result<(), Error> {
        let request = if write {
            Request::Write(first)
        } else {
            Request::Read(first)
        };
        let pieces = (self.config.seg_max as usize).clamp(1, SEGMENTS);
        let length = data.len().div_ceil(pieces).next_multiple_of(BLOCK);
        let mut segments = [Segment {
            address: 0,
            length: 0,
            device_writes: !write,
        }; SEGMENTS];
        let mut count = 0;
        for (at, segment) in (0..data.len()).step_by(length).zip(&mut segments) {
            segment.address = data.address() + at as u64;
            segment.length = length.min(data.len() - at) as u32;
            count += 1;
        }
        let queue = self.queues[0].as_mut().ok_or(Error::Queue {
            index: 0,
            what: "absent",
        })?;
        if !queue.start(
            0,
            request,
            &segments[..count],
            queue.queue.features().indirect,
        ) {
            return Err(Error::Queue {
                index: 0,
                what: "too small for a large request",
            });
        }
        if queue.queue.publish() {
            self.transport.notify(0);
            self.counts.doorbells += 1;
        }
        loop {
            let seen = self.interrupts.count();
            let queue = self.queues[0].as_mut().ok_or(Error::Queue {
                index: 0,
                what: "absent",
            })?;
            if let Some(used) = queue.queue.take()? {
                let bytes = data.len();
                return queue.finish(used, bytes, &mut self.counts, &mut |_, _| Ok(()));
            }
            if !queue.queue.arm(1) {
                self.interrupts.wait(seen);
                self.transport.acknowledge();
            }
        }
    }
}
