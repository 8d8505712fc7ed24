//! Properties of a single transport: register widths, interrupt status, MSI-X (virtio 1.2, 4.1 and
//! 4.2).

use super::bench::{ALL, Bench, EVENT_IDX, LIVE, OK, kind};
use super::{Case, Verdict, check};

pub(super) const MMIO: &[Case] = &[
    ("registers-are-32-bits-wide", mmio_widths),
    ("interrupt-status-until-acknowledged", interrupt_status),
    ("legacy-registers-do-nothing", legacy_registers),
];

pub(super) const PCI: &[Case] = &[
    ("common-configuration-at-every-width", pci_widths),
    ("a-masked-vector-becomes-pending", masked),
    ("a-vector-that-does-not-exist-is-none", no_vector),
];

fn mmio_widths(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    let control = bench.transport.control();
    for offset in [0x00, 0x08, 0x34, 0x44, 0x70] {
        for width in [1, 2, 8] {
            let found = control.read(offset, width);
            check(found == 0, "a register read in another width", found)?;
            control.write(offset, width, 0);
        }
        let found = control.read32(offset + 1);
        check(
            found == 0,
            "a register read across its border",
            found.into(),
        )?;
        control.write32(offset + 2, 0);
    }
    let state = bench.transport.status();
    check(state == LIVE, "status", state.into())?;
    bench.expect((kind::FLUSH, 0), &[], OK)
}

fn interrupt_status(bench: &mut Bench<'_>) -> Verdict {
    const STATUS: u64 = 0x60;
    const ACK: u64 = 0x64;
    bench.start(ALL & !EVENT_IDX)?;
    let control = bench.transport.control();
    bench.expect((kind::FLUSH, 0), &[], OK)?;
    bench.wait_until("no bit", |_| control.read32(STATUS) == 1)?;
    control.write32(ACK, 2);
    let found = control.read32(STATUS);
    check(found == 1, "acknowledged by another bit", found.into())?;
    control.write32(ACK, 1);
    let found = control.read32(STATUS);
    check(found == 0, "not acknowledged", found.into())?;
    bench.expect((kind::FLUSH, 0), &[], OK)?;
    bench.wait_until("no bit", |_| control.read32(STATUS) == 1)?;
    bench.transport.set_status(0);
    let found = control.read32(STATUS);
    check(found == 0, "not cleared by a reset", found.into())
}

/// GuestPageSize, QueueAlign and QueuePFN of the legacy layout (4.2.4).
fn legacy_registers(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    let control = bench.transport.control();
    for offset in [0x28, 0x3c, 0x40] {
        control.write32(offset, 0x1000);
        let found = control.read32(offset);
        check(found == 0, "a legacy register", found.into())?;
    }
    bench.expect((kind::FLUSH, 0), &[], OK)
}

fn pci_widths(bench: &mut Bench<'_>) -> Verdict {
    const LENGTH: u64 = 0x38;
    bench.start(ALL)?;
    let control = bench.transport.control();
    for width in [2u8, 4, 8] {
        for at in (0..LENGTH).step_by(width.into()) {
            let bytes = (at..at + u64::from(width)).rev();
            let expected = bytes.fold(0, |value, at| value << 8 | u64::from(control.read8(at)));
            let found = control.read(at, width);
            check(found == expected, "another value, read wider", found)?;
        }
    }
    // Writes of a width other than the field's.
    for (at, width) in [
        (0x14, 2),
        (0x14, 4),
        (0x1c, 1),
        (0x1c, 4),
        (0x18, 1),
        (0x20, 1),
    ] {
        control.write(at, width, 0);
    }
    let state = bench.transport.status();
    check(state == LIVE, "status", state.into())?;
    // A 64-bit field takes one whole write, too (4.1.3.1 requires halves of drivers only).
    bench.expect((kind::FLUSH, 0), &[], OK)
}

fn masked(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL & !EVENT_IDX)?;
    bench.transport.mask_queue(0, true);
    let seen = bench.wait_for_quiet();
    for _ in 0..3 {
        bench.expect((kind::FLUSH, 0), &[], OK)?;
    }
    bench.wait_until("the vector is not pending", |bench| {
        bench.transport.queue_pending(0)
    })?;
    bench.quiet();
    let count = bench.interrupts.count() - seen;
    check(count == 0, "interrupts while masked", count)?;
    let other = bench.transport.queue_pending(1);
    check(!other, "another vector is pending", 1)?;
    bench.transport.mask_queue(0, false);
    bench.wait_until("no interrupt once unmasked", |bench| {
        bench.interrupts.count() > seen
    })?;
    bench.quiet();
    let count = bench.interrupts.count() - seen;
    // The device answers the last request before it sends its interrupt, which may thus arrive
    // after the unmasking. Only the last interrupt can be late: a queue sends a request's interrupt
    // before it takes the next request.
    check(matches!(count, 1 | 2), "interrupts once unmasked", count)?;
    check(!bench.transport.queue_pending(0), "still pending", 0)
}

fn no_vector(bench: &mut Bench<'_>) -> Verdict {
    const SELECT: u64 = 0x16;
    const VECTOR: u64 = 0x1a;
    bench.start(ALL & !EVENT_IDX)?;
    let control = bench.transport.control();
    control.write16(SELECT, 0);
    for vector in [0x7ff, 0x800, 0xfffe] {
        control.write16(VECTOR, vector);
        let found = control.read16(VECTOR);
        check(found == 0xffff, "vector", found.into())?;
    }
    // 4.1.5.3.1: without a vector the device sends no interrupt.
    let seen = bench.wait_for_quiet();
    bench.expect((kind::FLUSH, 0), &[], OK)?;
    bench.quiet();
    let count = bench.interrupts.count() - seen;
    check(count == 0, "interrupts without a vector", count)
}
