//! Features, status, configuration space (virtio 1.2, 2.1, 2.2, 2.5, 5.2.3 to 5.2.5).

use super::bench::{ALL, Bench, LIVE, OK, SECTOR, UNSUPP, kind};
use super::{Case, Problem, Verdict, check};
use crate::block::config::feature;
use crate::transport::status;

pub(super) const CASES: &[Case] = &[
    ("version-1-is-offered", version_1),
    ("only-offered-features-are-accepted", only_offered),
    ("a-legacy-driver-gets-nowhere", legacy),
    ("status-bits-only-grow", status_grows),
    ("nothing-runs-before-driver-ok", before_driver_ok),
    ("features-are-negotiated-anew", negotiated_anew),
    ("configuration-at-every-width-and-offset", every_width),
    ("configuration-is-read-only", read_only),
    ("write-cache-is-switched-live", write_cache),
    ("limits-make-sense", limits),
    ("topology-makes-sense", topology),
];

const VERSION_1: u64 = 1 << feature::VERSION_1;

fn version_1(bench: &mut Bench<'_>) -> Verdict {
    let offered = bench.offered();
    check(offered & VERSION_1 != 0, "features", offered)?;
    // Each feature needs its precondition (2.2.2, 5.2.5.2) and an implementation, and none lies
    // beyond bit 63.
    let wce = offered >> feature::CONFIG_WCE & 1;
    check(
        offered >> feature::FLUSH & 1 >= wce,
        "CONFIG_WCE without FLUSH",
        offered,
    )?;
    check(offered >> feature::LIFETIME & 1 == 0, "LIFETIME", offered)?;
    for word in [2, 3, u32::MAX] {
        let bits = bench.transport.offered(word);
        check(bits == 0, "features beyond bit 63", bits.into())?;
    }
    Ok(())
}

fn only_offered(bench: &mut Bench<'_>) -> Verdict {
    let offered = bench.offered();
    for bit in 0..64 {
        let choice = VERSION_1 | 1 << bit;
        let taken = bench.choose(choice)?;
        let expected = offered & choice == choice;
        check(
            taken == expected,
            "feature bit accepted or not, wrongly",
            bit,
        )?;
    }
    let taken = bench.choose(offered)?;
    check(taken, "all that is offered", offered)
}

fn legacy(bench: &mut Bench<'_>) -> Verdict {
    let offered = bench.offered();
    let taken = bench.choose(offered & !VERSION_1)?;
    check(!taken, "FEATURES_OK without VERSION_1", offered)?;
    // 3.1.2: DRIVER_OK without FEATURES_OK.
    bench.transport.set_status(0);
    let state = status::ACKNOWLEDGE | status::DRIVER;
    bench.transport.set_status(status::ACKNOWLEDGE);
    bench.transport.set_status(state);
    bench.transport.accept(0, offered as u32);
    bench.set_up(0, 64)?;
    bench.transport.set_status(state | status::DRIVER_OK);
    let found = bench.transport.status();
    check(
        found == state,
        "DRIVER_OK without FEATURES_OK",
        found.into(),
    )?;
    bench.post(0, 0, 0, (kind::FLUSH, 0), &[]);
    bench.send(0);
    bench.quiet();
    let used = bench.rings[0].used_index();
    check(used == 0, "a legacy driver is served", used.into())?;
    bench.works()
}

fn status_grows(bench: &mut Bench<'_>) -> Verdict {
    bench.transport.set_status(0);
    let mut expect = |write: u8, read: u8| {
        bench.transport.set_status(write);
        let found = bench.transport.status();
        check(found == read, "status", found.into())
    };
    expect(status::FEATURES_OK, 0)?;
    expect(status::ACKNOWLEDGE, 1)?;
    expect(status::DRIVER, 3)?;
    expect(status::NEEDS_RESET | 1, 3)?;
    expect(status::DRIVER_OK, 3)?;
    // FAILED.
    expect(128, 131)?;
    expect(0, 0)
}

fn before_driver_ok(bench: &mut Bench<'_>) -> Verdict {
    bench.negotiate(ALL)?;
    bench.set_up(0, 64)?;
    let seen = bench.wait_for_quiet();
    bench.post(0, 0, 0, (kind::FLUSH, 0), &[]);
    bench.send(0);
    bench.quiet();
    let used = bench.rings[0].used_index();
    check(used == 0, "a chain is used", used.into())?;
    let count = bench.interrupts.count() - seen;
    check(count == 0, "interrupts", count)?;
    bench.set_live()?;
    bench.wait(0, 1)
}

fn negotiated_anew(bench: &mut Bench<'_>) -> Verdict {
    for round in 0..6 {
        let poor = round % 2 == 1;
        bench.start(if poor { 1 << feature::FLUSH } else { ALL })?;
        let expected = if bench.has(feature::DISCARD) {
            OK
        } else {
            UNSUPP
        };
        discard(bench, 64, 8, 0, expected)?;
        bench.store(8, SECTOR, round)?;
        bench.load(8, SECTOR, round)?;
    }
    Ok(())
}

/// A DISCARD of `sectors` from `sector` on that must end with `expected`.
fn discard(bench: &mut Bench<'_>, sector: u64, sectors: u32, flags: u32, expected: u8) -> Verdict {
    bench.data.write(0, sector);
    bench.data.write(8, sectors);
    bench.data.write(12, flags);
    let segment = bench.data(16, false);
    bench.expect((kind::DISCARD, 0), &[segment], expected)
}

fn every_width(bench: &mut Bench<'_>) -> Verdict {
    bench.transport.set_status(0);
    let space = bench.transport.space();
    let mut bytes = [0u8; 96];
    for (at, byte) in (0..).zip(&mut bytes) {
        *byte = space.read8(at);
    }
    for width in [2u8, 4, 8] {
        for at in (0..88).step_by(usize::from(width)) {
            let mut word = [0; 8];
            word[..usize::from(width)].copy_from_slice(&bytes[at..at + usize::from(width)]);
            let (expected, found) = (u64::from_le_bytes(word), space.read(at as u64, width));
            check(found == expected, "another value, read wider", found)?;
        }
    }
    // Reads that are unaligned or beyond the last field.
    check(
        space.read16(1) == u16::from_le_bytes([bytes[1], bytes[2]]),
        "unaligned",
        1,
    )?;
    let behind = space.read_qword(0x200);
    check(behind == 0, "behind the last field", behind)?;
    check(
        bytes[33] == 0 && bytes[57..60] == [0; 3],
        "unused bytes",
        33,
    )
}

fn read_only(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    let space = bench.transport.space();
    let before: [u8; 128] = core::array::from_fn(|at| space.read8(at as u64));
    for at in (0..128).filter(|&at| at != 32) {
        space.write8(at, 0x5a);
    }
    space.write_qword(0, u64::MAX);
    space.write32(30, 0);
    space.write32(0xe00, u32::MAX);
    for (at, byte) in (0..).zip(before) {
        check(space.read8(at) == byte, "written at", at)?;
    }
    bench.load_beyond()
}

impl Bench<'_> {
    /// Checks that the last sector can be read, and the sector after it cannot.
    fn load_beyond(&mut self) -> Verdict {
        let sectors = self.sectors;
        self.read(sectors - 1, SECTOR)?;
        let segment = self.data(SECTOR, true);
        self.expect((kind::IN, sectors), &[segment], super::bench::IOERR)
    }
}

fn write_cache(bench: &mut Bench<'_>) -> Verdict {
    const WRITEBACK: u64 = 32;
    bench.start(ALL & !(1 << feature::CONFIG_WCE))?;
    let before = bench.transport.config8(WRITEBACK);
    bench.transport.set_config8(WRITEBACK, before ^ 1);
    let found = bench.transport.config8(WRITEBACK);
    check(
        found == before,
        "writeback without CONFIG_WCE",
        found.into(),
    )?;
    bench.start(ALL)?;
    if !bench.has(feature::CONFIG_WCE) {
        return Ok(());
    }
    for on in [0, 1, 0, 1] {
        bench.transport.set_config8(WRITEBACK, on);
        let found = bench.transport.config8(WRITEBACK);
        check(found == on, "writeback", found.into())?;
        bench.store(8, 8 * SECTOR, u64::from(on) + 5)?;
        bench.load(8, 8 * SECTOR, u64::from(on) + 5)?;
    }
    // 5.2.5.2: without FLUSH, CONFIG_WCE starts as writethrough.
    bench.negotiate(ALL & !(1 << feature::FLUSH))?;
    let found = bench.transport.config8(WRITEBACK);
    check(found == 0, "writeback without FLUSH", found.into())
}

fn limits(bench: &mut Bench<'_>) -> Verdict {
    // The largest queue size is read after a reset: over PCI the register later holds the chosen
    // size.
    bench.transport.set_status(0);
    let room = bench.transport.queue_max(0);
    bench.start(ALL)?;
    let size_max = bench.transport.config32(8);
    let seg_max = bench.transport.config32(12);
    check(
        bench.has(feature::SEG_MAX) && seg_max > 0,
        "seg_max",
        seg_max.into(),
    )?;
    check(
        seg_max + 2 <= room.into(),
        "seg_max, more than a queue holds",
        seg_max.into(),
    )?;
    if bench.has(feature::SIZE_MAX) {
        check(
            size_max >= 4096,
            "size_max, less than a page",
            size_max.into(),
        )?;
    }
    let queues = bench.transport.config16(34);
    let last = bench.transport.queue_max(queues - 1);
    check(last > 0, "num_queues, more than there are", queues.into())?;
    let beyond = bench.transport.queue_max(queues);
    check(beyond == 0, "more queues than num_queues", queues.into())
}

fn topology(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    if !bench.has(feature::BLK_SIZE) || !bench.has(feature::TOPOLOGY) {
        return Err(Problem(
            "BLK_SIZE or TOPOLOGY is not offered",
            bench.features,
        ));
    }
    let block = bench.transport.config32(20);
    let sane = block.is_power_of_two() && (512..=4096).contains(&block);
    check(sane, "blk_size", block.into())?;
    let exponent = bench.transport.config8(24);
    check(
        u64::from(block) << exponent == 4096,
        "physical_block_exp",
        exponent.into(),
    )?;
    let least = bench.transport.config16(26);
    check(
        u32::from(least) * block == 4096,
        "min_io_size",
        least.into(),
    )?;
    let blocks = bench.sectors * SECTOR as u64;
    check(
        blocks.is_multiple_of(block.into()),
        "capacity in part blocks",
        blocks,
    )?;
    check(
        bench.transport.status() == LIVE,
        "status",
        bench.transport.status().into(),
    )
}
