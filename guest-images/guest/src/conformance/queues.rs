//! Queues: sizes, order, notifications both ways, resets with requests in flight (virtio 1.2, 2.6,
//! 2.7, 6).

use super::bench::{ALL, Bench, EVENT_IDX, OK, SECTOR, SIZE, kind};
use super::ring::LARGEST;
use super::{Case, Verdict, check};
use crate::block::config::feature;

pub(super) const CASES: &[Case] = &[
    ("largest-queue-used-to-its-end", largest_queue),
    ("small-queues", small_queues),
    ("indices-wrap", indices_wrap),
    ("in-order", in_order),
    ("event-idx-one-interrupt-a-batch", one_interrupt),
    ("event-idx-asks-for-the-next-doorbell", next_doorbell),
    ("flags-hold-interrupts-back", interrupt_flag),
    ("two-queues-at-once", two_queues),
    ("doorbell-of-a-queue-that-is-not-ready", not_ready),
    ("queue-reset-in-flight", queue_reset),
    ("queue-reset-is-negotiated", reset_not_negotiated),
    ("device-reset-in-flight", device_reset),
    ("device-reset-storm", reset_storm),
];

/// Offers `count` FLUSH requests of two descriptors each.
fn flushes(bench: &mut Bench<'_>, queue: usize, count: u16) {
    for slot in 0..count {
        bench.post(queue, slot, slot * 2, (kind::FLUSH, 0), &[]);
    }
}

/// Takes `count` used requests, whose status must be OK.
fn all_ok(bench: &mut Bench<'_>, queue: usize, count: u16) -> Verdict {
    bench.wait(queue, count)?;
    for _ in 0..count {
        let (head, _) = bench.take(queue);
        let status = bench.answer((head / 2) as u16);
        check(status == OK, "status", status.into())?;
    }
    Ok(())
}

fn largest_queue(bench: &mut Bench<'_>) -> Verdict {
    bench.negotiate(ALL)?;
    let size = bench.transport.queue_max(0).min(LARGEST);
    bench.set_up(0, size)?;
    bench.set_live()?;
    for _ in 0..3 {
        flushes(bench, 0, size / 2);
        bench.send(0);
        all_ok(bench, 0, size / 2)?;
    }
    Ok(())
}

fn small_queues(bench: &mut Bench<'_>) -> Verdict {
    for size in [4, 8, 16] {
        bench.negotiate(ALL)?;
        bench.set_up(0, size)?;
        bench.set_live()?;
        for round in 0..10 {
            flushes(bench, 0, size / 2);
            bench.send(0);
            all_ok(bench, 0, size / 2)?;
            bench.store(round, SECTOR, round)?;
            bench.load(round, SECTOR, round)?;
        }
    }
    Ok(())
}

/// Runs more than 2^16 requests, so that every index of both rings wraps. Of few batches, for with
/// each of them the device and the driver wait for one another, which is long on a busy machine.
fn indices_wrap(bench: &mut Bench<'_>) -> Verdict {
    bench.negotiate(ALL)?;
    let size = bench.transport.queue_max(0).min(LARGEST);
    bench.set_up(0, size)?;
    bench.set_live()?;
    let batch = size / 2;
    let mut done = 0u32;
    while done < 70_000 {
        // The ring asks for an interrupt for the last request of each batch only.
        let last = bench.rings[0].offered().wrapping_add(batch - 1);
        bench.rings[0].set_used_event(last);
        flushes(bench, 0, batch);
        bench.send(0);
        all_ok(bench, 0, batch)?;
        done += u32::from(batch);
    }
    let used = bench.rings[0].used_index();
    check(used == done as u16, "used index", used.into())
}

fn in_order(bench: &mut Bench<'_>) -> Verdict {
    bench.start(u64::MAX)?;
    if !bench.has(feature::IN_ORDER) {
        // Without IN_ORDER any order is right. The documentation says that it is not offered by
        // default.
        return Ok(());
    }
    for _ in 0..20 {
        for slot in 0..21u16 {
            let segment = bench.data(SECTOR, slot % 3 == 1);
            let (request, data) = match slot % 3 {
                0 => ((kind::OUT, slot.into()), &[segment][..]),
                1 => ((kind::IN, 1000), &[segment][..]),
                _ => ((kind::FLUSH, 0), &[][..]),
            };
            bench.post(0, slot, slot * 3, request, data);
        }
        bench.send(0);
        bench.wait(0, 21)?;
        for slot in 0..21u16 {
            let (head, _) = bench.take(0);
            check(
                head == u32::from(slot) * 3,
                "out of order: head",
                head.into(),
            )?;
            check(
                bench.answer(slot) == OK,
                "status",
                bench.answer(slot).into(),
            )?;
        }
    }
    Ok(())
}

fn one_interrupt(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    check(
        bench.has(feature::EVENT_IDX),
        "EVENT_IDX is not offered",
        bench.features,
    )?;
    for _ in 0..10 {
        let seen = bench.wait_for_quiet();
        let last = bench.rings[0].offered().wrapping_add(15);
        bench.rings[0].set_used_event(last);
        // With EVENT_IDX the device must ignore this flag (2.7.7.1).
        bench.rings[0].set_no_interrupt(true);
        flushes(bench, 0, 16);
        bench.send(0);
        all_ok(bench, 0, 16)?;
        bench.wait_until("no interrupt", |bench| bench.interrupts.count() > seen)?;
        bench.quiet();
        let count = bench.interrupts.count() - seen;
        check(count == 1, "interrupts for one batch", count)?;
        let flags = bench.rings[0].used_flags();
        check(flags == 0, "flags of the used ring", flags.into())?;
        bench.transport.acknowledge();
    }
    Ok(())
}

fn next_doorbell(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    for _ in 0..10 {
        flushes(bench, 0, 4);
        bench.send(0);
        all_ok(bench, 0, 4)?;
        // The device is idle now, so it must ask for a doorbell with the very next chain.
        let offered = bench.rings[0].offered();
        bench.wait_until("avail_event stays behind", |bench| {
            bench.rings[0].avail_event() == offered
        })?;
    }
    Ok(())
}

fn interrupt_flag(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL & !EVENT_IDX)?;
    bench.rings[0].set_no_interrupt(true);
    // Without EVENT_IDX the device must ignore the event index, even one that asks for an
    // interrupt.
    bench.rings[0].set_used_event(0);
    let seen = bench.wait_for_quiet();
    flushes(bench, 0, 8);
    bench.send(0);
    all_ok(bench, 0, 8)?;
    bench.quiet();
    let count = bench.interrupts.count() - seen;
    check(count == 0, "interrupts nobody asked for", count)?;
    bench.rings[0].set_no_interrupt(false);
    let seen = bench.wait_for_quiet();
    flushes(bench, 0, 1);
    bench.send(0);
    all_ok(bench, 0, 1)?;
    bench.wait_until("no interrupt", |bench| bench.interrupts.count() > seen)
}

fn two_queues(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    for _ in 0..50 {
        flushes(bench, 0, 16);
        flushes(bench, 1, 16);
        bench.send(1);
        bench.send(0);
        all_ok(bench, 0, 16)?;
        all_ok(bench, 1, 16)?;
    }
    Ok(())
}

fn not_ready(bench: &mut Bench<'_>) -> Verdict {
    bench.negotiate(ALL)?;
    bench.set_up(0, SIZE)?;
    bench.rings[1].clear(SIZE);
    bench.set_live()?;
    flushes(bench, 1, 1);
    for _ in 0..10 {
        bench.send(1);
    }
    bench.store(8, SECTOR, 4)?;
    let used = bench.rings[1].used_index();
    check(used == 0, "it is served", used.into())?;
    // The queue works once it is enabled on the live device.
    bench.set_up(1, SIZE)?;
    flushes(bench, 1, 1);
    bench.send(1);
    all_ok(bench, 1, 1)?;
    bench.load(8, SECTOR, 4)
}

/// Sends writes and flushes, without waiting for them.
fn in_flight(bench: &mut Bench<'_>, queue: u16) {
    for slot in 0..20 {
        let segment = bench.data(8 * SECTOR, false);
        let (request, data) = match slot % 4 {
            3 => ((kind::FLUSH, 0), &[][..]),
            _ => ((kind::OUT, 512 + u64::from(slot) * 8), &[segment][..]),
        };
        bench.post(queue.into(), slot, slot * 3, request, data);
    }
    bench.send(queue);
}

/// Checks that queue `index` does not change any more, even after a doorbell.
fn stays_still(bench: &mut Bench<'_>, index: u16) -> Verdict {
    let seen = bench.wait_for_quiet();
    let used = bench.rings[usize::from(index)].used_index();
    bench.transport.notify(index);
    bench.quiet();
    let now = bench.rings[usize::from(index)].used_index();
    check(now == used, "used index after the reset", now.into())?;
    let count = bench.interrupts.count() - seen;
    check(count == 0, "interrupts after the reset", count)
}

fn queue_reset(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    check(
        bench.has(feature::RING_RESET),
        "RING_RESET is not offered",
        bench.features,
    )?;
    for size in [SIZE, 16, SIZE / 2, SIZE] {
        in_flight(bench, 1);
        bench.transport.reset_queue(1);
        // The other queue works meanwhile.
        bench.store(8, SECTOR, 6)?;
        bench.wait_until("the reset does not end", |bench| {
            !bench.transport.queue_resetting(1)
        })?;
        let enabled = bench.transport.queue_enabled(1);
        check(!enabled, "the queue is still enabled", 1)?;
        stays_still(bench, 1)?;
        bench.load(8, SECTOR, 6)?;
        bench.set_up(1, size)?;
        flushes(bench, 1, size / 2);
        bench.send(1);
        all_ok(bench, 1, size / 2)?;
        bench.set_up_anew(1)?;
    }
    Ok(())
}

impl Bench<'_> {
    /// Resets the queue and sets it up again as [`start`](Self::start) does.
    fn set_up_anew(&mut self, index: u16) -> Verdict {
        self.transport.reset_queue(index);
        self.wait_until("the reset does not end", |bench| {
            !bench.transport.queue_resetting(index)
        })?;
        self.set_up(index, SIZE)
    }
}

fn reset_not_negotiated(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL & !(1 << feature::RING_RESET))?;
    bench.transport.reset_queue(0);
    let enabled = bench.transport.queue_enabled(0);
    check(
        enabled && !bench.transport.queue_resetting(0),
        "the queue is reset",
        0,
    )?;
    // Nor do queues exist that do not.
    for queue in [7, u16::MAX] {
        bench.transport.reset_queue(queue);
        let resets = bench.transport.queue_resetting(queue);
        check(
            !resets,
            "a queue that does not exist is reset",
            queue.into(),
        )?;
    }
    flushes(bench, 0, 4);
    bench.send(0);
    all_ok(bench, 0, 4)
}

fn device_reset(bench: &mut Bench<'_>) -> Verdict {
    for _ in 0..10 {
        bench.start(ALL)?;
        in_flight(bench, 0);
        in_flight(bench, 1);
        bench.transport.set_status(0);
        bench.wait_until("the reset does not end", |bench| {
            bench.transport.status() == 0
        })?;
        stays_still(bench, 0)?;
        stays_still(bench, 1)?;
    }
    bench.works()
}

fn reset_storm(bench: &mut Bench<'_>) -> Verdict {
    for round in 0..50 {
        bench.negotiate(if round % 2 == 0 { ALL } else { 0 })?;
        bench.set_up(0, SIZE)?;
        bench.set_live()?;
        in_flight(bench, 0);
    }
    bench.works()
}
