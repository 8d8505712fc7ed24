//! The job: the requests that the guest sends to its disk, and how it checks the results.
//!
//! ```text
//!   identify ─▶ write + flush, one by one ─▶ one large write ─▶ burst of writes and flushes, all queues
//!     ─▶ burst of reads ─▶ discard, write zeroes ─▶ write cache off and on ─▶ read and compare everything
//! ```

use core::fmt::{Arguments, Write};

use crate::block::Block;
use crate::block::config::feature;
use crate::block::request::{ID_BYTES, Request};
use crate::contract::{Digest, GuestMessage, Outcome};
use crate::error::Error;
use crate::memory::{Arena, Region};
use crate::pattern::{BLOCK, Generations};

/// Number of the disk's blocks that the job uses: 8 MiB.
const BLOCKS: u32 = 2048;
/// Writes at the start, each followed by a FLUSH.
const LONE_WRITES: u32 = 16;
/// First block of the large request, and its number of blocks (1 MiB).
const LARGE_FIRST: u32 = 1536;
const LARGE_BLOCKS: u32 = 256;
/// Blocks that the burst writes; the next [`LARGE_FIRST`] - these stay untouched.
const BURST_BLOCKS: u32 = 1024;
/// Every request of the burst with this interval is a FLUSH.
const FLUSH_EVERY: u32 = 16;
/// The ranges discarded and zeroed: first block and number.
const DISCARDED: (u32, u32) = (100, 64);
const ZEROED: (u32, u32) = (300, 32);
/// Blocks written while the write cache is off.
const WRITETHROUGH: (u32, u32) = (110, 8);

/// Runs the job on a device and returns its result.
///
/// # Errors
/// If a request fails, or a byte does not read as it was written.
pub fn run(
    block: &mut Block<'_>,
    arena: &mut Arena,
    seed: u32,
    console: &mut dyn Write,
) -> Result<Outcome, Error> {
    let mut generations = Generations::new(arena.take(BLOCKS as usize * 4, 8)?, seed);
    let mut large = arena.take(LARGE_BLOCKS as usize * BLOCK, BLOCK)?;
    describe(block, console)?;
    say(
        console,
        format_args!("{}", GuestMessage::Begin(block.name())),
    );
    block.start_counting();

    lone_writes(block, &mut generations)?;
    large_request(block, &mut generations, &mut large)?;
    burst(block, &mut generations)?;
    let all_queues = block.queue_count();
    read_all(block, all_queues, 0, BURST_BLOCKS, &generations)?;
    zeroes(block, &mut generations)?;
    write_cache(block, &mut generations)?;
    flush(block)?;
    let digest = read_all(block, all_queues, 0, BLOCKS, &generations)?;

    Ok(Outcome {
        counts: block.counts(),
        blocks: BLOCKS,
        digest,
    })
}

fn say(console: &mut dyn Write, line: Arguments<'_>) {
    // If the console fails, there is no other way to report.
    let _ = writeln!(console, "{line}");
}

/// Prints the device's properties for the user.
fn describe(block: &mut Block<'_>, console: &mut dyn Write) -> Result<(), Error> {
    if block.config.sectors * 512 < u64::from(BLOCKS) * BLOCK as u64 {
        return Err(Error::Config("the disk is smaller than 8 MiB"));
    }
    let mut id = [0u8; ID_BYTES];
    block.one(Request::GetId, &mut |_| (), &mut |data| {
        id.copy_from_slice(&data[..ID_BYTES]);
        Ok(())
    })?;
    let end = id.iter().position(|&byte| byte == 0).unwrap_or(ID_BYTES);
    let id = core::str::from_utf8(&id[..end]).unwrap_or("not text");
    let (name, config, features) = (block.name(), block.config, block.features);
    say(
        console,
        format_args!(
            "{name}: disk \"{id}\", {} sectors, {} queues, {features}",
            config.sectors, config.queues
        ),
    );
    Ok(())
}

fn flush(block: &mut Block<'_>) -> Result<(), Error> {
    block.one(Request::Flush, &mut |_| (), &mut |_| Ok(()))
}

fn lone_writes(block: &mut Block<'_>, generations: &mut Generations) -> Result<(), Error> {
    for number in 0..LONE_WRITES {
        let write = Request::Write(number);
        block.one(
            write,
            &mut |data| generations.renew(number, data),
            &mut |_| Ok(()),
        )?;
        flush(block)?;
    }
    for number in 0..LONE_WRITES {
        let read = Request::Read(number);
        block.one(read, &mut spoil, &mut |data| {
            generations.check(number, data)
        })?;
    }
    Ok(())
}

fn large_request(
    block: &mut Block<'_>,
    generations: &mut Generations,
    large: &mut Region,
) -> Result<(), Error> {
    let numbers = LARGE_FIRST..LARGE_FIRST + LARGE_BLOCKS;
    for (number, data) in numbers
        .clone()
        .zip(large.bytes_mut().chunks_exact_mut(BLOCK))
    {
        generations.renew(number, data);
    }
    block.large(true, LARGE_FIRST, large)?;
    flush(block)?;
    spoil(large.bytes_mut());
    block.large(false, LARGE_FIRST, large)?;
    numbers
        .zip(large.bytes().chunks_exact(BLOCK))
        .try_for_each(|(number, data)| generations.check(number, data))
}

/// Keeps many scattered writes in flight over all queues, with a FLUSH among every few.
fn burst(block: &mut Block<'_>, generations: &mut Generations) -> Result<(), Error> {
    let queues = block.queue_count();
    let total = BURST_BLOCKS + BURST_BLOCKS / (FLUSH_EVERY - 1);
    let mut written = 0;
    let mut plan = |number: u32, data: &mut [u8]| {
        if number % FLUSH_EVERY == FLUSH_EVERY - 1 || written == BURST_BLOCKS {
            return Request::Flush;
        }
        // An odd multiplier visits each block exactly once, because the number of blocks is a power
        // of two.
        let target = written * 377 % BURST_BLOCKS;
        written += 1;
        generations.renew(target, data);
        Request::Write(target)
    };
    block.burst(queues, total, &mut plan, &mut |_, _| Ok(()))
}

/// Reads `count` blocks from `first` on, in a burst, and compares every byte.
fn read_all(
    block: &mut Block<'_>,
    queues: usize,
    first: u32,
    count: u32,
    generations: &Generations,
) -> Result<Digest, Error> {
    let mut digest = Digest::default();
    let mut plan = |number: u32, data: &mut [u8]| {
        spoil(data);
        Request::Read(first + number)
    };
    block.burst(queues, count, &mut plan, &mut |request, data| {
        let Request::Read(number) = request else {
            return Ok(());
        };
        generations.check(number, data)?;
        digest.add(number, data);
        Ok(())
    })?;
    Ok(digest)
}

/// Discards one range and zeroes another, and reads back both ranges and the blocks around them.
fn zeroes(block: &mut Block<'_>, generations: &mut Generations) -> Result<(), Error> {
    let (discard, write_zeroes) = (
        block.features.has(feature::DISCARD),
        block.features.has(feature::WRITE_ZEROES),
    );
    for (offered, (first, count), request) in [
        (
            discard,
            DISCARDED,
            Request::Discard(DISCARDED.0, DISCARDED.1),
        ),
        (
            write_zeroes,
            ZEROED,
            Request::WriteZeroes(ZEROED.0, ZEROED.1),
        ),
    ] {
        if !offered {
            continue;
        }
        block.one(request, &mut |_| (), &mut |_| Ok(()))?;
        (first..first + count).for_each(|number| generations.clear(number));
        read_all(block, 1, first - 1, count + 2, generations)?;
    }
    Ok(())
}

/// Writes a few blocks with the write cache off. Each is durable when it completes, without a
/// FLUSH.
fn write_cache(block: &mut Block<'_>, generations: &mut Generations) -> Result<(), Error> {
    if !block.features.has(feature::CONFIG_WCE) {
        return Ok(());
    }
    let before = block.write_cache();
    block.set_write_cache(false);
    if block.write_cache() {
        return Err(Error::Config("writeback does not turn 0"));
    }
    let (first, count) = WRITETHROUGH;
    let mut plan = |number: u32, data: &mut [u8]| {
        generations.renew(first + number, data);
        Request::Write(first + number)
    };
    let queues = block.queue_count();
    block.burst(queues, count, &mut plan, &mut |_, _| Ok(()))?;
    block.set_write_cache(before);
    if block.write_cache() != before {
        return Err(Error::Config("writeback does not turn back"));
    }
    Ok(())
}

/// Fills a buffer with bytes that no block holds, so that a read that transfers no data is noticed.
fn spoil(data: &mut [u8]) {
    data.fill(0xee);
}
