//! Tests of the queue against a small device that uses the same memory.

use std::collections::VecDeque;

use super::*;
use crate::memory::Word;
use crate::memory::tests::arena;

/// The device's side of a queue, with the minimum that the specification requires.
struct Device {
    size: u16,
    descriptors: *const u8,
    available: *const u8,
    used: *mut u8,
    event_idx: bool,
    seen: u16,
    written: u16,
    doorbell_wanted_after: u16,
}

impl Device {
    fn new(queue: &Queue) -> Self {
        let [descriptors, available, used] = queue.addresses();
        Self {
            size: queue.size(),
            descriptors: std::ptr::with_exposed_provenance(descriptors as usize),
            available: std::ptr::with_exposed_provenance(available as usize),
            used: std::ptr::with_exposed_provenance_mut(used as usize),
            event_idx: queue.features().event_idx,
            seen: 0,
            written: 0,
            doorbell_wanted_after: 0,
        }
    }

    fn read<T: Word>(start: *const u8, offset: usize) -> T {
        // SAFETY: the offsets below lie in the rings, which live as long as the test.
        unsafe { start.add(offset).cast::<T>().read_volatile() }
    }

    fn write<T: Word>(&self, offset: usize, value: T) {
        // SAFETY: as above.
        unsafe { self.used.add(offset).cast::<T>().write_volatile(value) }
    }

    /// The chains made available since the last call: heads and segments. The device asks for the
    /// next doorbell `ahead` entries after the next one.
    fn receive(&mut self, ahead: u16) -> Vec<(u16, Vec<Segment>)> {
        let mut chains = Vec::new();
        while self.seen != Self::read::<u16>(self.available, 2) {
            let slot = usize::from(self.seen % self.size);
            let head: u16 = Self::read(self.available, 4 + slot * 2);
            chains.push((head, Self::walk(self.descriptors, head)));
            self.seen = self.seen.wrapping_add(1);
        }
        if self.event_idx {
            self.doorbell_wanted_after = self.seen.wrapping_add(ahead);
            self.write(4 + usize::from(self.size) * 8, self.doorbell_wanted_after);
        }
        chains
    }

    fn walk(table: *const u8, mut index: u16) -> Vec<Segment> {
        let mut segments = Vec::new();
        loop {
            let at = usize::from(index) * 16;
            let address: u64 = Self::read(table, at);
            let length: u32 = Self::read(table, at + 8);
            let flags: u16 = Self::read(table, at + 12);
            if flags & 4 != 0 {
                assert_eq!(
                    (flags, segments.len()),
                    (4, 0),
                    "indirect, alone and not nested"
                );
                return Self::walk(std::ptr::with_exposed_provenance(address as usize), 0);
            }
            segments.push(Segment {
                address,
                length,
                device_writes: flags & 2 != 0,
            });
            if flags & 1 == 0 {
                return segments;
            }
            index = Self::read(table, at + 14);
        }
    }

    /// Uses the chains; returns whether the driver wants an interrupt.
    fn complete(&mut self, chains: impl IntoIterator<Item = (u16, u32)>) -> bool {
        let before = self.written;
        for (head, length) in chains {
            let at = 4 + usize::from(self.written % self.size) * 8;
            self.write(at, u32::from(head));
            self.write(at + 4, length);
            self.written = self.written.wrapping_add(1);
        }
        self.write(2, self.written);
        let event: u16 = Self::read(self.available, 4 + usize::from(self.size) * 2);
        // Does not use `passes`, which is under test: checks whether the event is one of the
        // entries just used.
        !self.event_idx || entries(before, self.written).contains(&event)
    }
}

/// The entries from `from` up to but not including `to`, with the wrap of the index.
fn entries(from: u16, to: u16) -> Vec<u16> {
    (0..to.wrapping_sub(from))
        .map(|step| from.wrapping_add(step))
        .collect()
}

fn segments(count: usize, tag: u64) -> Vec<Segment> {
    (0..count)
        .map(|index| Segment {
            address: tag << 16 | index as u64,
            length: index as u32 + 1,
            device_writes: index * 2 >= count,
        })
        .collect()
}

/// SplitMix64: the tests need many cases, not good randomness.
fn random(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (word >> 33) as usize % below
}

/// Runs many rounds, past the wrap of the 16-bit indices, completed out of order. Each request must
/// come back once with its token, and doorbells and interrupts must come exactly when the other
/// side asked for them.
fn many_rounds(event_idx: bool, indirect: bool) {
    let mut arena = arena(1 << 20);
    let mut queue = Queue::new(
        &mut arena,
        16,
        RingFeatures {
            event_idx,
            indirect,
        },
    )
    .unwrap();
    let mut tables: Vec<Region> = Vec::new();
    for _ in 0..64 {
        tables.push(arena.take(16 * 8, 16).unwrap());
    }
    let mut device = Device::new(&queue);
    let mut state = 7;
    let mut free_tokens: Vec<u16> = (0..64).collect();
    let mut expected: std::collections::HashMap<u16, Vec<Segment>> = Default::default();
    let mut at_device: VecDeque<(u16, u16)> = VecDeque::new();
    let mut total = 0u32;
    let mut suppressed = 0u32;
    while total < 100_000 {
        let mut added = 0;
        for _ in 0..random(&mut state, 6) {
            let Some(&token) = free_tokens.last() else {
                break;
            };
            let chain = segments(1 + random(&mut state, 5), u64::from(token));
            let room = if indirect && random(&mut state, 2) == 0 {
                queue.add_indirect(token, &tables[usize::from(token)], &chain)
            } else {
                queue.add(token, &chain)
            };
            if room {
                free_tokens.pop();
                expected.insert(token, chain);
                added += 1;
            }
        }
        let rings = queue.publish();
        let asked_for = device.doorbell_wanted_after;
        let wanted =
            added > 0 && (!event_idx || entries(device.seen, queue.added).contains(&asked_for));
        assert_eq!(rings, wanted);
        for (head, chain) in device.receive(random(&mut state, 4) as u16) {
            let token = (chain[0].address >> 16) as u16;
            assert_eq!(chain, expected[&token]);
            at_device.push_back((head, token));
        }
        if at_device.is_empty() {
            continue;
        }
        let count = 1 + random(&mut state, usize::from(queue.in_flight())) as u16;
        assert!(!queue.arm(count), "nothing is used yet");
        let mut interrupted = false;
        let mut used = 0;
        while used < count {
            let now = 1 + random(&mut state, usize::from(count - used));
            let chains: Vec<_> = (0..now)
                .map(|_| {
                    let at = random(&mut state, at_device.len());
                    at_device.swap_remove_back(at).unwrap()
                })
                .collect();
            used += now as u16;
            let interrupt =
                device.complete(chains.iter().map(|&(head, token)| (head, u32::from(token))));
            if event_idx {
                assert_eq!(
                    interrupt,
                    used == count,
                    "one interrupt, at the last one asked for"
                );
                suppressed += u32::from(!interrupt);
            }
            interrupted |= interrupt;
        }
        assert!(interrupted && queue.arm(count));
        while let Some(done) = queue.take().unwrap() {
            assert_eq!(u32::from(done.token), done.written);
            expected.remove(&done.token).expect("in flight");
            free_tokens.push(done.token);
            total += 1;
        }
        assert_eq!(queue.in_flight() as usize, at_device.len());
        assert_eq!(expected.len(), at_device.len());
    }
    assert_eq!(event_idx, suppressed > 0);
}

#[test]
fn direct_chains_without_events() {
    many_rounds(false, false);
}

#[test]
fn direct_chains_with_events() {
    many_rounds(true, false);
}

#[test]
fn indirect_chains_with_events() {
    many_rounds(true, true);
}

#[test]
fn a_full_queue_takes_no_more_and_an_unpublished_request_is_not_in_flight() {
    let mut arena = arena(1 << 16);
    let mut queue = Queue::new(&mut arena, 4, RingFeatures::default()).unwrap();
    assert!(queue.add(0, &segments(3, 0)));
    assert!(!queue.add(1, &segments(2, 1)));
    assert!(queue.add(1, &segments(1, 1)));
    assert!(!queue.add(2, &segments(1, 2)));
    assert!(!queue.add(2, &[]));
    assert_eq!(queue.in_flight(), 0);
    assert!(queue.publish());
    assert_eq!(queue.in_flight(), 2);
    assert!(!queue.publish(), "nothing new, no doorbell");
}

#[test]
fn a_used_entry_that_names_nothing_in_flight_is_an_error() {
    let mut arena = arena(1 << 16);
    let mut queue = Queue::new(&mut arena, 4, RingFeatures::default()).unwrap();
    let mut device = Device::new(&queue);
    assert!(queue.add(0, &segments(2, 0)));
    queue.publish();
    device.complete([(1, 0)]);
    assert_eq!(
        queue.take(),
        Err(Error::UsedRing { id: 1 }),
        "the middle of a chain"
    );
    let mut queue = Queue::new(&mut arena, 4, RingFeatures::default()).unwrap();
    let mut device = Device::new(&queue);
    assert!(queue.add(0, &segments(2, 0)));
    queue.publish();
    device.complete([(0, 0), (0, 0)]);
    assert!(queue.take().unwrap().is_some());
    assert_eq!(queue.take(), Err(Error::UsedRing { id: 0 }), "twice");
}
