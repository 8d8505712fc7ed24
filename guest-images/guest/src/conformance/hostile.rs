//! Cases of a driver that breaks the rules: its offence must lead to a reset or an error, and must
//! harm nothing else.

use super::bench::{ALL, Bench, IOERR, OK, SECTOR, SIZE, kind};
use super::ring::{INDIRECT, NEXT, WRITE, describe};
use super::{Case, Verdict, check};
use crate::transport::status;

pub(super) const CASES: &[Case] = &[
    ("chain-follows-itself", |bench| {
        needs_reset(bench, |bench| post_chain(bench, &[(16, NEXT, 0)]))
    }),
    ("chain-loops-over-two", |bench| {
        needs_reset(bench, |bench| {
            post_chain(bench, &[(16, NEXT | WRITE, 1), (16, NEXT | WRITE, 0)]);
        })
    }),
    ("chain-leaves-the-table", |bench| {
        needs_reset(bench, |bench| post_chain(bench, &[(16, NEXT, SIZE)]))
    }),
    ("chain-without-a-status-byte", |bench| {
        needs_reset(bench, |bench| post_chain(bench, &[(16, 0, 0)]))
    }),
    ("chain-with-an-empty-status", |bench| {
        needs_reset(bench, |bench| {
            post_chain(bench, &[(16, NEXT, 1), (0, WRITE, 0)]);
        })
    }),
    ("writable-before-readable", |bench| {
        needs_reset(bench, |bench| {
            post_chain(bench, &[(1, NEXT | WRITE, 1), (16, 0, 0)]);
        })
    }),
    ("more-than-2-to-the-32-bytes", |bench| {
        needs_reset(bench, |bench| {
            let most = u32::MAX;
            post_chain(
                bench,
                &[(16, NEXT, 1), (most, NEXT | WRITE, 2), (most, WRITE, 0)],
            );
        })
    }),
    ("status-byte-outside-memory", status_outside),
    ("status-byte-beyond-2-to-the-64", status_wraps),
    ("indirect-in-indirect", nested),
    ("indirect-of-odd-length", |bench| {
        indirect(bench, |table, _| (table, 33))
    }),
    ("indirect-of-no-length", |bench| {
        indirect(bench, |table, _| (table, 0))
    }),
    ("indirect-outside-memory", |bench| {
        indirect(bench, |_, end| (end, 32))
    }),
    ("indirect-beyond-2-to-the-64", |bench| {
        indirect(bench, |_, _| (u64::MAX - 15, 64))
    }),
    ("indirect-of-all-memory", |bench| {
        indirect(bench, |_, _| (0, !15))
    }),
    ("head-outside-the-table", |bench| {
        needs_reset(bench, |bench| bench.rings[0].offer(SIZE))
    }),
    ("head-65535", |bench| {
        needs_reset(bench, |bench| bench.rings[0].offer(u16::MAX))
    }),
    ("available-index-jumps", index_jumps),
    ("rings-outside-memory", rings_outside),
    ("rings-wrap-around-2-to-the-64", rings_wrap),
    ("rings-not-aligned", rings_not_aligned),
    ("queue-sizes-that-are-none", odd_sizes),
    ("registers-of-a-live-queue", live_registers),
    ("used-ring-scribbled-on", scribbled),
    ("one-head-offered-again-and-again", same_head),
    ("doorbell-storm", doorbell_storm),
    ("requests-in-flight-when-the-queue-breaks", breaks_in_flight),
];

/// Commits `offence` on queue 0. The device must ask for a reset, once and with an interrupt, and
/// must work after the reset.
fn needs_reset(bench: &mut Bench<'_>, offence: impl FnOnce(&mut Bench<'_>)) -> Verdict {
    bench.start(ALL)?;
    bench.store(16, SECTOR, 16)?;
    let seen = bench.wait_for_quiet();
    let used = bench.rings[0].used_index();
    offence(bench);
    bench.send(0);
    asks_for_a_reset(bench, seen)?;
    let now = bench.rings[0].used_index();
    check(now == used, "it was answered", now.into())?;
    // The queue is dead until the reset, and the device must not report the fault twice.
    let seen = bench.wait_for_quiet();
    bench.transport.notify(0);
    bench.quiet();
    let count = bench.interrupts.count() - seen;
    check(count == 0, "interrupts of a dead queue", count)?;
    bench.works()?;
    bench.load(16, SECTOR, 16)
}

fn asks_for_a_reset(bench: &mut Bench<'_>, seen: u64) -> Verdict {
    bench.wait_until("no reset is asked for, status", |bench| {
        bench.transport.status() & status::NEEDS_RESET != 0
    })?;
    bench.wait_until("not told by an interrupt", |bench| {
        bench.interrupts.count() > seen
    })
}

/// Offers the chain of these descriptors (length, flags, next), from 0 on, over a FLUSH request.
fn post_chain(bench: &mut Bench<'_>, descriptors: &[(u32, u16, u16)]) {
    bench.head(0, kind::FLUSH, 0);
    let address = bench.header(0);
    for (index, &(length, flags, next)) in (0..).zip(descriptors) {
        bench.rings[0].describe(index, address, length, flags, next);
    }
    bench.rings[0].offer(0);
}

fn status_outside(bench: &mut Bench<'_>) -> Verdict {
    let end = bench.memory_end;
    needs_reset(bench, |bench| {
        post_chain(bench, &[(16, NEXT, 1)]);
        bench.rings[0].describe(1, end, 1, WRITE, 0);
    })
}

fn status_wraps(bench: &mut Bench<'_>) -> Verdict {
    needs_reset(bench, |bench| {
        post_chain(bench, &[(16, NEXT, 1)]);
        bench.rings[0].describe(1, u64::MAX - 10, 100, WRITE, 0);
    })
}

/// A chain of one descriptor that refers to an indirect table. `place` gives the table's address
/// and length, which are invalid.
fn indirect(bench: &mut Bench<'_>, place: impl FnOnce(u64, u64) -> (u64, u32)) -> Verdict {
    let (address, length) = place(bench.table.address(), bench.memory_end);
    needs_reset(bench, |bench| {
        bench.rings[0].describe(0, address, length, INDIRECT, 0);
        bench.rings[0].offer(0);
    })
}

fn nested(bench: &mut Bench<'_>) -> Verdict {
    needs_reset(bench, |bench| {
        let (table, header) = (bench.table.address(), bench.header(0));
        describe(&bench.table, 0, header, 16, NEXT, 1);
        describe(&bench.table, 1, table, 32, INDIRECT, 0);
        bench.rings[0].describe(0, table, 32, INDIRECT, 0);
        bench.rings[0].offer(0);
    })
}

fn index_jumps(bench: &mut Bench<'_>) -> Verdict {
    for ahead in [SIZE + 1, 1000, 0x8000, u16::MAX] {
        bench.start(ALL)?;
        let seen = bench.wait_for_quiet();
        bench.rings[0].set_index(ahead);
        bench.transport.notify(0);
        asks_for_a_reset(bench, seen)?;
        let used = bench.rings[0].used_index();
        check(used == 0, "something was answered", used.into())?;
        bench.works()?;
    }
    Ok(())
}

/// A queue at invalid addresses or of an invalid size.
fn set_bad_queue(bench: &mut Bench<'_>, size: u16, areas: [u64; 3]) -> Verdict {
    bench.negotiate(ALL)?;
    let seen = bench.wait_for_quiet();
    bench.rings[0].clear(SIZE);
    // The device may refuse the queue here, or when it goes live: both are right.
    let _ = bench.transport.set_queue(0, size, areas);
    bench.transport.set_status(super::bench::LIVE);
    bench.transport.notify(0);
    asks_for_a_reset(bench, seen)?;
    bench.works()
}

fn rings_outside(bench: &mut Bench<'_>) -> Verdict {
    let (good, end) = (bench.rings[0].areas(), bench.memory_end);
    for area in 0..3 {
        for address in [end, end - 16, 1 << 40] {
            let mut areas = good;
            areas[area] = address;
            set_bad_queue(bench, SIZE, areas)?;
        }
    }
    Ok(())
}

fn rings_wrap(bench: &mut Bench<'_>) -> Verdict {
    let good = bench.rings[0].areas();
    for area in 0..3 {
        let mut areas = good;
        areas[area] = u64::MAX - 15;
        set_bad_queue(bench, SIZE, areas)?;
    }
    Ok(())
}

fn rings_not_aligned(bench: &mut Bench<'_>) -> Verdict {
    let good = bench.rings[0].areas();
    for (area, off) in [(0, 8), (1, 1), (2, 2)] {
        let mut areas = good;
        areas[area] += off;
        set_bad_queue(bench, SIZE, areas)?;
    }
    Ok(())
}

fn odd_sizes(bench: &mut Bench<'_>) -> Verdict {
    let areas = bench.rings[0].areas();
    let most = bench.transport.queue_max(0);
    for size in [0, 3, 100, most * 2, 0x8000, u16::MAX] {
        set_bad_queue(bench, size, areas)?;
    }
    Ok(())
}

/// The driver must not write the registers of an enabled queue. If it does, nothing must change.
fn live_registers(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    bench.store(24, SECTOR, 24)?;
    // The queue is enabled, so the device must ignore these writes.
    let _ = bench.transport.set_queue(0, SIZE, [0; 3]);
    bench.load(24, SECTOR, 24)
}

fn scribbled(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    for slot in 0..4 {
        bench.post(0, slot, slot * 2, (kind::FLUSH, 0), &[]);
    }
    bench.send(0);
    bench.wait(0, 4)?;
    // The device keeps its own count: it never reads the used ring that it has written.
    bench.rings[0].scribble_on_used();
    bench.post(0, 7, 14, (kind::FLUSH, 0), &[]);
    bench.send(0);
    bench.wait_until("the used index is not the device's", |bench| {
        bench.rings[0].used_index() == 5
    })?;
    let (head, _) = bench.rings[0].used_at(4);
    check(head == 14, "head", head.into())?;
    check(bench.answer(7) == OK, "status", bench.answer(7).into())?;
    bench.works()
}

fn same_head(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    let segment = bench.data(20, true);
    bench.post(0, 0, 0, (kind::GET_ID, 0), &[segment]);
    for _ in 1..SIZE {
        bench.rings[0].offer(0);
    }
    bench.send(0);
    bench.wait(0, SIZE)?;
    let used = bench.rings[0].used_index();
    check(used == SIZE, "used index", used.into())?;
    bench.works()
}

fn doorbell_storm(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    for round in 0..20 {
        for _ in 0..500 {
            bench.transport.notify(0);
            bench.transport.notify(1);
        }
        bench.store(32, SECTOR, round)?;
        bench.load(32, SECTOR, round)?;
    }
    let state = bench.transport.status();
    check(state == super::bench::LIVE, "status", state.into())
}

fn breaks_in_flight(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    let seen = bench.wait_for_quiet();
    let segment = bench.data(SECTOR, false);
    for slot in 0..8 {
        let sector = 600 + u64::from(slot);
        bench.post(0, slot, slot * 3, (kind::OUT, sector), &[segment]);
    }
    bench.rings[0].offer(u16::MAX);
    bench.send(0);
    asks_for_a_reset(bench, seen)?;
    // The fault does not affect the other queue of the same disk.
    bench.post(1, 20, 60, (kind::IN, u64::MAX), &[segment]);
    bench.send(1);
    bench.wait_until("the other queue is dead", |bench| {
        bench.rings[1].used_index() == 1
    })?;
    let status = bench.answer(20);
    check(status == IOERR, "status", status.into())?;
    bench.works()
}
