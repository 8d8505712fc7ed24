//! Every type of request, valid and invalid (virtio 1.2, 5.2.6).

use super::bench::{ALL, Bench, DATA, IOERR, OK, SECTOR, UNSUPP, fill, kind, matches};
use super::{Case, Verdict, check};
use crate::block::config::feature;
use crate::queue::Segment;

pub(super) const CASES: &[Case] = &[
    ("read-write-flush", read_write_flush),
    ("largest-request", largest),
    ("request-in-single-bytes", single_bytes),
    ("get-id", get_id),
    ("discard", discard),
    ("write-zeroes", write_zeroes),
    ("secure-erase-or-refusal", secure_erase),
    ("lifetime-is-refused", lifetime),
    ("unknown-requests-are-unsupported", unknown),
    ("not-negotiated-is-unsupported", not_negotiated),
    ("sector-2-to-the-55", huge_sector),
    ("beyond-the-end", beyond_the_end),
    ("zero-length", zero_length),
    ("length-of-no-sector", no_sector),
    ("header-too-short", short_header),
    ("request-too-large", too_large),
    ("data-outside-memory", outside_memory),
];

fn read_write_flush(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    for (sector, sectors) in [(0, 1), (7, 9), (100, 256), (bench.sectors - 1, 1)] {
        bench.store(sector, sectors * SECTOR, sector + 3)?;
        bench.expect((kind::FLUSH, 0), &[], OK)?;
        bench.load(sector, sectors * SECTOR, sector + 3)?;
    }
    Ok(())
}

fn largest(bench: &mut Bench<'_>) -> Verdict {
    bench.negotiate(ALL)?;
    let room = bench.transport.queue_max(0).min(super::ring::LARGEST);
    bench.set_up(0, room)?;
    bench.set_live()?;
    let size = bench.transport.config32(8) as usize;
    let most = bench.transport.config32(12) as usize;
    let pieces = most.min(DATA / size).min(256);
    let empty = bench.data(0, false);
    let mut segments = [empty; 256];
    for write in [true, false] {
        for (piece, segment) in segments[..pieces].iter_mut().enumerate() {
            *segment = bench.data(size, !write);
            segment.address += (piece * size) as u64;
        }
        let bytes = bench.data.bytes_mut();
        if write {
            fill(&mut bytes[..pieces * size], 99);
        } else {
            bytes.fill(0);
        }
        let request = if write { kind::OUT } else { kind::IN };
        bench.expect((request, 16), &segments[..pieces], OK)?;
    }
    matches(&bench.data.bytes()[..pieces * size], 99)
}

/// 2.7.4.1: the device must not assume how a request is split into descriptors.
fn single_bytes(bench: &mut Bench<'_>) -> Verdict {
    use super::ring::{NEXT, WRITE};
    bench.start(ALL)?;
    bench.store(3, SECTOR, 31)?;
    bench.data.bytes_mut()[..SECTOR].fill(0);
    bench.head(0, kind::IN, 3);
    let (header, data, status) = (bench.header(0), bench.data.address(), bench.status_byte(0));
    let ring = &mut bench.rings[0];
    // The header takes 16 descriptors, the data 41, and the status one of its own.
    for index in 0..16 {
        ring.describe(index, header + u64::from(index), 1, NEXT, index + 1);
    }
    for piece in 0..40 {
        let index = 16 + piece;
        ring.describe(index, data + u64::from(piece), 1, NEXT | WRITE, index + 1);
    }
    ring.describe(56, data + 40, SECTOR as u32 - 40, NEXT | WRITE, 57);
    ring.describe(57, status, 1, WRITE, 0);
    ring.offer(0);
    bench.send(0);
    bench.wait(0, 1)?;
    let (_, length) = bench.take(0);
    check(length as usize == SECTOR + 1, "used length", length.into())?;
    check(bench.answer(0) == OK, "status", bench.answer(0).into())?;
    matches(&bench.data.bytes()[..SECTOR], 31)
}

fn get_id(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    bench.data.bytes_mut()[..64].fill(0xee);
    let segment = bench.data(20, true);
    let (status, length) = bench.request(0, (kind::GET_ID, 0), &[segment])?;
    check(status == OK && length == 21, "used length", length.into())?;
    let data = bench.data.bytes();
    let end = data[..20].iter().position(|&byte| byte == 0).unwrap_or(20);
    let padded = data[end..20].iter().all(|&byte| byte == 0);
    check(padded, "not padded with zeroes from", end as u64)?;
    check(
        data[20..64] == [0xee; 44],
        "more than 20 bytes are written",
        20,
    )
}

/// Runs a DISCARD, WRITE_ZEROES or SECURE_ERASE of one range, which must end with `expected`.
fn erase(bench: &mut Bench<'_>, kind: u32, range: (u64, u32, u32), expected: u8) -> Verdict {
    let (sector, sectors, flags) = range;
    bench.data.write(0, sector);
    bench.data.write(8, sectors);
    bench.data.write(12, flags);
    let segment = bench.data(16, false);
    bench.expect((kind, 0), &[segment], expected)
}

/// Checks that an erasing request zeroes its range and nothing outside it, and keeps to its limits.
fn erases(bench: &mut Bench<'_>, kind: u32, limit_at: u64, unmap: bool) -> Verdict {
    bench.store(64, 64 * SECTOR, 17)?;
    erase(bench, kind, (72, 16, u32::from(unmap)), OK)?;
    bench.load_zeroes(72, 16 * SECTOR)?;
    bench.read(64, 64 * SECTOR)?;
    let (found, expected) = bench.data.bytes_mut().split_at_mut(DATA / 2);
    let expected = &mut expected[..64 * SECTOR];
    fill(expected, 17);
    expected[8 * SECTOR..24 * SECTOR].fill(0);
    check(
        found[..64 * SECTOR] == *expected,
        "more than was asked for",
        64,
    )?;
    let most = bench.transport.config32(limit_at);
    check(most > 0, "its largest range", most.into())?;
    let sectors = bench.sectors;
    for range in [
        (0, 0, 0),
        (sectors, 1, 0),
        (sectors - 1, 2, 0),
        (1 << 55, 8, 0),
        (u64::MAX, 8, 0),
        (0, most.saturating_add(1), 0),
        (0, u32::MAX, 0),
    ] {
        erase(bench, kind, range, IOERR)?;
    }
    for flags in [2, 1 << 31, u32::MAX] {
        erase(bench, kind, (0, 8, flags), UNSUPP)?;
    }
    // An incomplete range, and more ranges than are allowed.
    for bytes in [0, 8, 15] {
        let segment = bench.data(bytes, false);
        bench.expect((kind, 0), &[segment], IOERR)?;
    }
    let allowed = bench.transport.config32(limit_at + 4) as usize * 16;
    for bytes in [allowed + 1, allowed + 16] {
        let segment = bench.data(bytes, false);
        bench.expect((kind, 0), &[segment], UNSUPP)?;
    }
    Ok(())
}

fn discard(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    check(
        bench.has(feature::DISCARD),
        "it is not offered",
        bench.features,
    )?;
    erases(bench, kind::DISCARD, 36, false)?;
    // 5.2.6.2: `unmap` must be 0 in a DISCARD.
    erase(bench, kind::DISCARD, (0, 8, 1), UNSUPP)
}

fn write_zeroes(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    check(
        bench.has(feature::WRITE_ZEROES),
        "it is not offered",
        bench.features,
    )?;
    erases(bench, kind::WRITE_ZEROES, 48, false)?;
    erases(bench, kind::WRITE_ZEROES, 48, true)
}

fn secure_erase(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    if bench.has(feature::SECURE_ERASE) {
        return erases(bench, kind::SECURE_ERASE, 60, false);
    }
    bench.store(0, 8 * SECTOR, 23)?;
    erase(bench, kind::SECURE_ERASE, (0, 8, 0), UNSUPP)?;
    bench.load(0, 8 * SECTOR, 23)
}

fn lifetime(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    let segment = bench.data(6, true);
    bench.expect((kind::GET_LIFETIME, 0), &[segment], UNSUPP)
}

fn unknown(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    for kind in [2, 3, 5, 7, 9, 12, 15, 24, 0x8000_0000, u32::MAX] {
        let segment = bench.data(SECTOR, true);
        let (status, length) = bench.request(0, (kind, 0), &[segment])?;
        check(status == UNSUPP, "another status for type", kind.into())?;
        check(length <= 1, "used length", length.into())?;
    }
    Ok(())
}

fn not_negotiated(bench: &mut Bench<'_>) -> Verdict {
    bench.start(0)?;
    for request in [kind::DISCARD, kind::WRITE_ZEROES, kind::SECURE_ERASE] {
        erase(bench, request, (0, 8, 0), UNSUPP)?;
    }
    // A FLUSH still works.
    bench.expect((kind::FLUSH, 0), &[], OK)?;
    bench.store(0, SECTOR, 1)?;
    bench.load(0, SECTOR, 1)
}

/// A read and a write of one sector that both must fail.
fn refused_at(bench: &mut Bench<'_>, sector: u64) -> Verdict {
    for (request, device_writes) in [(kind::IN, true), (kind::OUT, false)] {
        let segment = bench.data(SECTOR, device_writes);
        bench.expect((request, sector), &[segment], IOERR)?;
    }
    Ok(())
}

fn huge_sector(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    bench.store(0, SECTOR, 55)?;
    for sector in [
        1 << 55,
        (1 << 55) + 1,
        1 << 63,
        u64::MAX / 512,
        u64::MAX - 1,
        u64::MAX,
    ] {
        refused_at(bench, sector)?;
    }
    // A multiplication that overflows would have overwritten sector 0.
    bench.load(0, SECTOR, 55)
}

fn beyond_the_end(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    let sectors = bench.sectors;
    refused_at(bench, sectors)?;
    refused_at(bench, sectors + 1000)?;
    bench.store(sectors - 1, SECTOR, 9)?;
    for (request, device_writes) in [(kind::IN, true), (kind::OUT, false)] {
        let segment = bench.data(2 * SECTOR, device_writes);
        bench.expect((request, sectors - 1), &[segment], IOERR)?;
    }
    bench.load(sectors - 1, SECTOR, 9)
}

fn zero_length(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    for request in [kind::IN, kind::OUT] {
        bench.expect((request, 0), &[], IOERR)?;
        for device_writes in [true, false] {
            let empty = bench.data(0, device_writes);
            bench.expect((request, 0), &[empty], IOERR)?;
        }
    }
    // Empty segments are allowed among others.
    let (empty, whole) = (bench.data(0, true), bench.data(SECTOR, true));
    bench.expect((kind::IN, 0), &[empty, whole, empty], OK)
}

fn no_sector(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    bench.store(0, 2 * SECTOR, 77)?;
    for bytes in [1, 511, 513, 1000] {
        for (request, device_writes) in [(kind::IN, true), (kind::OUT, false)] {
            let segment = bench.data(bytes, device_writes);
            bench.expect((request, 0), &[segment], IOERR)?;
        }
    }
    bench.load(0, 2 * SECTOR, 77)
}

/// A header that is too short has no type.
fn short_header(bench: &mut Bench<'_>) -> Verdict {
    use super::ring::{NEXT, WRITE};
    bench.start(ALL)?;
    for bytes in [1, 8, 15] {
        bench.head(0, kind::FLUSH, 0);
        let (header, status) = (bench.header(0), bench.status_byte(0));
        let ring = &mut bench.rings[0];
        ring.describe(0, header, bytes, NEXT, 1);
        ring.describe(1, status, 1, WRITE, 0);
        ring.offer(0);
        bench.send(0);
        bench.wait(0, 1)?;
        bench.take(0);
        check(bench.answer(0) == IOERR, "status", bench.answer(0).into())?;
    }
    Ok(())
}

fn too_large(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    bench.store(0, SECTOR, 78)?;
    for (request, device_writes) in [(kind::IN, true), (kind::OUT, false)] {
        // The same buffer again and again: 34 MiB, and then a buffer of almost 2^32 bytes.
        let segment = bench.data(1 << 20, device_writes);
        bench.expect((request, 0), &[segment; 34], IOERR)?;
        let huge = Segment {
            length: u32::MAX - 0x1ff,
            ..segment
        };
        bench.expect((request, 0), &[huge], IOERR)?;
    }
    bench.load(0, SECTOR, 78)
}

fn outside_memory(bench: &mut Bench<'_>) -> Verdict {
    bench.start(ALL)?;
    bench.store(5, SECTOR, 79)?;
    let end = bench.memory_end;
    for address in [end - 256, end, 1 << 40, u64::MAX - 100, u64::MAX] {
        for (request, device_writes) in [(kind::IN, true), (kind::OUT, false)] {
            let segment = Segment {
                address,
                length: SECTOR as u32,
                device_writes,
            };
            bench.expect((request, 5), &[segment], IOERR)?;
        }
    }
    bench.load(5, SECTOR, 79)
}
