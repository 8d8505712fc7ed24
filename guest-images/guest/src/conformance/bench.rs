//! The driver that the cases use: it polls with a long time limit, and breaks any rule that a case
//! wants broken.

use core::arch::x86_64::_rdtsc;

use super::ring::{LARGEST, NEXT, Ring, WRITE};
use super::{Problem, Verdict, check};
use crate::block::config::feature;
use crate::error::Error;
use crate::memory::{Arena, Region};
use crate::queue::Segment;
use crate::transport::{Interrupts, Transport, status};

/// Request types (virtio 1.2, 5.2.6).
pub(super) mod kind {
    pub(in super::super) const IN: u32 = 0;
    pub(in super::super) const OUT: u32 = 1;
    pub(in super::super) const FLUSH: u32 = 4;
    pub(in super::super) const GET_ID: u32 = 8;
    pub(in super::super) const GET_LIFETIME: u32 = 10;
    pub(in super::super) const DISCARD: u32 = 11;
    pub(in super::super) const WRITE_ZEROES: u32 = 13;
    pub(in super::super) const SECURE_ERASE: u32 = 14;
}

/// Status bytes.
pub(super) const OK: u8 = 0;
pub(super) const IOERR: u8 = 1;
pub(super) const UNSUPP: u8 = 2;
/// The status byte before the device answers.
const UNANSWERED: u8 = 0xee;

/// All features except IN_ORDER, which makes other faults harder to see.
pub(super) const ALL: u64 = !(1 << feature::IN_ORDER);
pub(super) const EVENT_IDX: u64 = 1 << feature::EVENT_IDX;

pub(super) const SECTOR: usize = 512;
pub(super) const LIVE: u8 =
    status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;

/// Descriptors of the rings, unless a case says otherwise.
pub(super) const SIZE: u16 = 64;
/// A used index that no case reaches by accident.
const NEVER: u16 = 0x4000;
/// Bytes of the data area.
pub(super) const DATA: usize = 4 << 20;
/// Header and status of a request.
const CONTROL: usize = 32;
const STATUS: usize = 16;

/// Time limit in ticks of the time stamp counter, about a minute: no step takes as long.
const PATIENCE: u64 = 180_000_000_000;
/// The least number of status reads before a time-out: the counter goes on while the whole VMM is
/// stopped.
const LOOKS: u32 = 20_000;

/// Ticks within which anything under way arrives: a few milliseconds.
const A_WHILE: u64 = 8_000_000;

/// The device under test.
pub(super) struct Bench<'a> {
    pub(super) transport: &'a mut dyn Transport,
    pub(super) interrupts: &'a dyn Interrupts,
    pub(super) rings: [Ring; 2],
    /// Headers and status bytes, by slot.
    pub(super) control: Region,
    pub(super) data: Region,
    /// An indirect table.
    pub(super) table: Region,
    /// Where RAM ends.
    pub(super) memory_end: u64,
    /// Features in use.
    pub(super) features: u64,
    /// Capacity in sectors.
    pub(super) sectors: u64,
}

impl<'a> Bench<'a> {
    pub(super) fn new(
        transport: &'a mut dyn Transport,
        interrupts: &'a dyn Interrupts,
        arena: &mut Arena,
        memory_end: u64,
    ) -> Result<Self, Error> {
        transport.set_status(0);
        let sectors = transport.config64(0);
        if sectors < 2 * (DATA / SECTOR) as u64 {
            return Err(Error::Config("the disk is smaller than 8 MiB"));
        }
        if transport.queue_max(1) < SIZE {
            return Err(Error::Config("two queues of 64 descriptors are needed"));
        }
        Ok(Self {
            transport,
            interrupts,
            rings: [Ring::new(arena)?, Ring::new(arena)?],
            control: arena.take(usize::from(LARGEST) * CONTROL, 4096)?,
            data: arena.take(DATA, 4096)?,
            table: arena.take(usize::from(LARGEST) * 16, 4096)?,
            memory_end,
            features: 0,
            sectors,
        })
    }

    /// The features that the device offers.
    pub(super) fn offered(&mut self) -> u64 {
        u64::from(self.transport.offered(0)) | u64::from(self.transport.offered(1)) << 32
    }

    pub(super) fn has(&self, bit: u32) -> bool {
        self.features >> bit & 1 != 0
    }

    /// Polls until `condition` holds. Each read of the status is an exit, which lets the VMM's
    /// threads run.
    pub(super) fn wait_until(
        &mut self,
        what: &'static str,
        mut condition: impl FnMut(&mut Self) -> bool,
    ) -> Verdict {
        // SAFETY: the instruction only reads a counter.
        let start = unsafe { _rdtsc() };
        let mut looks = 0;
        loop {
            if condition(self) {
                return Ok(());
            }
            let state = self.transport.status();
            looks += 1;
            // SAFETY: as above.
            if looks > LOOKS && unsafe { _rdtsc() } - start > PATIENCE {
                return Err(Problem(what, state.into()));
            }
        }
    }

    /// Waits long enough to see an event that must not happen.
    pub(super) fn quiet(&mut self) {
        // SAFETY: the instruction only reads a counter.
        let start = unsafe { _rdtsc() };
        let mut looks = 0;
        // SAFETY: as above.
        while looks < 20 || unsafe { _rdtsc() } - start < A_WHILE {
            self.transport.status();
            looks += 1;
        }
    }

    /// Interrupts received, once those under way have arrived.
    pub(super) fn wait_for_quiet(&mut self) -> u64 {
        loop {
            let before = self.interrupts.count();
            self.quiet();
            if self.interrupts.count() == before {
                return before;
            }
        }
    }

    /// Negotiates `features`, from a reset to FEATURES_OK. Returns whether the device accepts them.
    pub(super) fn choose(&mut self, features: u64) -> Result<bool, Problem> {
        self.transport.set_status(0);
        self.wait_until("a reset does not end", |bench| {
            bench.transport.status() == 0
        })?;
        self.transport.set_status(status::ACKNOWLEDGE);
        let state = status::ACKNOWLEDGE | status::DRIVER;
        self.transport.set_status(state);
        self.transport.accept(0, features as u32);
        self.transport.accept(1, (features >> 32) as u32);
        self.transport.set_status(state | status::FEATURES_OK);
        Ok(self.transport.status() & status::FEATURES_OK != 0)
    }

    /// Negotiates those of the `wanted` features that the device offers. The device must accept
    /// them.
    pub(super) fn negotiate(&mut self, wanted: u64) -> Verdict {
        self.features = self.offered() & (wanted | 1 << feature::VERSION_1);
        let taken = self.choose(self.features)?;
        check(taken, "what was offered is refused", self.features)
    }

    /// Gives an empty ring of `size` descriptors to the device as queue `index`. With EVENT_IDX the
    /// ring asks for no interrupt; a case that waits for one sets the used event.
    pub(super) fn set_up(&mut self, index: u16, size: u16) -> Verdict {
        let ring = &mut self.rings[usize::from(index)];
        ring.clear(size);
        ring.set_used_event(NEVER);
        let areas = ring.areas();
        match self.transport.set_queue(index, size, areas) {
            Ok(true) => Ok(()),
            _ => Err(Problem("a queue cannot be enabled", index.into())),
        }
    }

    pub(super) fn set_live(&mut self) -> Verdict {
        self.transport.set_status(LIVE);
        let state = self.transport.status();
        check(state == LIVE, "the device is not live", state.into())
    }

    /// A live device with two queues and those of the `wanted` features that it offers.
    pub(super) fn start(&mut self, wanted: u64) -> Verdict {
        self.negotiate(wanted)?;
        self.set_up(0, SIZE)?;
        self.set_up(1, SIZE)?;
        self.set_live()
    }

    /// Address of the header of `slot`.
    pub(super) fn header(&self, slot: u16) -> u64 {
        self.control.address() + u64::from(slot) * CONTROL as u64
    }

    /// Address of the status byte of `slot`.
    pub(super) fn status_byte(&self, slot: u16) -> u64 {
        self.header(slot) + STATUS as u64
    }

    /// Writes the header of `slot`, and overwrites its status byte with [`UNANSWERED`].
    pub(super) fn head(&mut self, slot: u16, kind: u32, sector: u64) {
        let at = usize::from(slot) * CONTROL;
        self.control.write(at, kind);
        self.control.write(at + 4, 0u32);
        self.control.write(at + 8, sector);
        self.control.write(at + STATUS, UNANSWERED);
    }

    /// The status byte of `slot`.
    pub(super) fn answer(&self, slot: u16) -> u8 {
        self.control.read(usize::from(slot) * CONTROL + STATUS)
    }

    /// Puts a request into the available ring, its descriptors from `first` on, without publishing
    /// it.
    pub(super) fn post(
        &mut self,
        queue: usize,
        slot: u16,
        first: u16,
        (kind, sector): (u32, u64),
        segments: &[Segment],
    ) {
        self.head(slot, kind, sector);
        let (header, status) = (self.header(slot), self.status_byte(slot));
        let ring = &mut self.rings[queue];
        ring.describe(first, header, 16, NEXT, first + 1);
        let mut index = first + 1;
        for segment in segments {
            let write = if segment.device_writes { WRITE } else { 0 };
            let Segment {
                address, length, ..
            } = *segment;
            ring.describe(index, address, length, write | NEXT, index + 1);
            index += 1;
        }
        ring.describe(index, status, 1, WRITE, 0);
        ring.offer(first);
    }

    /// Publishes the offered requests, and writes the doorbell.
    pub(super) fn send(&mut self, queue: u16) {
        self.rings[usize::from(queue)].publish();
        self.transport.notify(queue);
    }

    /// Waits until the device has used `count` requests that the driver has not taken yet.
    pub(super) fn wait(&mut self, queue: usize, count: u16) -> Verdict {
        self.wait_until("a request is not answered", |bench| {
            let ring = &bench.rings[queue];
            ring.used_index().wrapping_sub(ring.taken) >= count
                || bench.transport.status() & status::NEEDS_RESET != 0
        })?;
        let state = self.transport.status();
        let healthy = state & status::NEEDS_RESET == 0;
        check(healthy, "the device asks for a reset", state.into())
    }

    /// Takes the next used element.
    pub(super) fn take(&mut self, queue: usize) -> (u32, u32) {
        let ring = &mut self.rings[queue];
        let element = ring.used_at(ring.taken);
        ring.taken = ring.taken.wrapping_add(1);
        element
    }

    /// Runs one request in slot 0. Returns its status and its used length.
    pub(super) fn request(
        &mut self,
        queue: u16,
        request: (u32, u64),
        segments: &[Segment],
    ) -> Result<(u8, u32), Problem> {
        let at = usize::from(queue);
        self.post(at, 0, 0, request, segments);
        self.send(queue);
        self.wait(at, 1)?;
        let (head, length) = self.take(at);
        check(head == 0, "another head is used", head.into())?;
        Ok((self.answer(0), length))
    }

    /// Runs one request whose status must be `expected`.
    pub(super) fn expect(
        &mut self,
        request: (u32, u64),
        segments: &[Segment],
        expected: u8,
    ) -> Verdict {
        let (status, _) = self.request(0, request, segments)?;
        check(status == expected, "another status", status.into())
    }

    /// A segment of the first `bytes` of the data area, for the device to read or to write.
    pub(super) fn data(&self, bytes: usize, device_writes: bool) -> Segment {
        Segment {
            address: self.data.address(),
            length: bytes as u32,
            device_writes,
        }
    }

    /// Writes `bytes` of data derived from `seed`.
    pub(super) fn store(&mut self, sector: u64, bytes: usize, seed: u64) -> Verdict {
        fill(&mut self.data.bytes_mut()[..bytes], seed);
        let segment = self.data(bytes, false);
        let (status, length) = self.request(0, (kind::OUT, sector), &[segment])?;
        check(status == OK, "a write fails, status", status.into())?;
        check(length == 1, "a write's used length", length.into())
    }

    /// Reads `bytes` and compares them with the data derived from `seed`.
    pub(super) fn load(&mut self, sector: u64, bytes: usize, seed: u64) -> Verdict {
        self.read(sector, bytes)?;
        matches(&self.data.bytes()[..bytes], seed)
    }

    /// Reads `bytes` into the data area.
    pub(super) fn read(&mut self, sector: u64, bytes: usize) -> Verdict {
        self.data.bytes_mut()[..bytes].fill(0xee);
        let segment = self.data(bytes, true);
        let (status, length) = self.request(0, (kind::IN, sector), &[segment])?;
        check(status == OK, "a read fails, status", status.into())?;
        let right = length as usize == bytes + 1;
        check(right, "a read's used length", length.into())
    }

    /// Reads `bytes` that must be zeroes.
    pub(super) fn load_zeroes(&mut self, sector: u64, bytes: usize) -> Verdict {
        self.read(sector, bytes)?;
        let data = &self.data.bytes()[..bytes];
        let wrong = data.iter().position(|&byte| byte != 0);
        check(wrong.is_none(), "not zero at", wrong.unwrap_or(0) as u64)
    }

    /// Resets the device and checks that a write, a FLUSH and a read work, whatever the case did
    /// before.
    pub(super) fn works(&mut self) -> Verdict {
        self.start(ALL)?;
        // SAFETY: the instruction only reads a counter.
        let seed = unsafe { _rdtsc() };
        self.store(40, 8 * SECTOR, seed)?;
        self.expect((kind::FLUSH, 0), &[], OK)?;
        self.load(40, 8 * SECTOR, seed)
    }
}

/// Fills `bytes` with data derived from `seed`.
pub(super) fn fill(bytes: &mut [u8], seed: u64) {
    let mut word = seed | 1;
    for chunk in bytes.chunks_mut(8) {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
}

/// Whether `bytes` are the data derived from `seed`.
pub(super) fn matches(bytes: &[u8], seed: u64) -> Verdict {
    let mut expected = [0; 64];
    let mut word = seed | 1;
    for (at, chunk) in (0u64..).step_by(8).zip(bytes.chunks(8)) {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        expected[..8].copy_from_slice(&word.to_le_bytes());
        check(chunk == &expected[..chunk.len()], "other data at byte", at)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_data_is_noticed_wherever_it_is() {
        for length in [1, 7, 8, 512, 4099] {
            let mut bytes = vec![0; length];
            fill(&mut bytes, 42);
            assert_eq!(matches(&bytes, 42), Ok(()));
            assert!(matches(&bytes, 44).is_err());
            for at in [0, length / 2, length - 1] {
                bytes[at] ^= 0x10;
                let problem = matches(&bytes, 42).unwrap_err();
                assert_eq!(problem.1, at as u64 / 8 * 8);
                bytes[at] ^= 0x10;
            }
        }
    }
}
