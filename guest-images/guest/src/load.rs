//! A load: closed loops over random blocks, with a fixed number of requests in flight, until the
//! time is over.
//!
//! ```text
//!   begin ─▶ write ─▶ FLUSH ─▶ ended: its time into the histogram, the next one begins   (a loop per slot)
//!               read ────────────▶
//! ```
//!
//! The guest prints the final line before it takes the driver down, because that costs register
//! accesses too.
//!
//! The guest does not compare any data: a load only checks that each request succeeds.

use core::fmt::Write;

use crate::block::Block;
use crate::block::request::{Request, SLOTS};
use crate::block::{MAX_QUEUES, config::feature};
use crate::contract::{GuestMessage, Load, LoadKind, LoadResult, mix};
use crate::error::Error;
use crate::histogram::Histogram;
use crate::pattern::BLOCK;

/// Runs `load` and prints its result. `now` reads the clock.
///
/// # Errors
/// If the device does not fit the load, or a request fails.
pub fn run(
    block: &mut Block<'_>,
    load: &Load,
    now: &mut dyn FnMut() -> u64,
    console: &mut dyn Write,
) -> Result<(), Error> {
    let (queues, depth) = (usize::from(load.queues), usize::from(load.iodepth));
    if queues > block.queue_count() || queues > MAX_QUEUES {
        return Err(Error::Config("the device has fewer queues than the load"));
    }
    if depth > SLOTS {
        return Err(Error::Config("more in flight than a queue holds"));
    }
    let blocks = block.config.sectors / (BLOCK as u64 / 512);
    if blocks == 0 {
        return Err(Error::Config("the disk is smaller than a block"));
    }
    // Without CONFIG_WCE a device that offers FLUSH has a write cache (virtio 1.2, 5.2.5).
    let write_cache = !block.features.has(feature::CONFIG_WCE) || block.write_cache();
    // If the console fails, there is no other way to report.
    let _ = writeln!(console, "{}", GuestMessage::Begin(block.name()));
    block.start_counting();

    let mut histogram = Histogram::default();
    let mut begun = [[0; SLOTS]; MAX_QUEUES];
    let (mut random, mut started) = (mix(blocks), 0);
    let start = now();
    let end = start.saturating_add(load.ticks);
    block.sustain(queues, depth, &mut |queue, slot, ended| {
        let moment = now();
        match ended {
            Some(Request::Write(_)) if load.kind == LoadKind::RandWriteFlush => {
                return Some(Request::Flush);
            }
            Some(_) => histogram.record(moment.wrapping_sub(begun[queue][slot])),
            None => {}
        }
        if started == load.requests || moment >= end {
            return None;
        }
        started += 1;
        begun[queue][slot] = moment;
        random = mix(random);
        let number = (random % blocks) as u32;
        Some(match load.kind {
            LoadKind::RandRead => Request::Read(number),
            LoadKind::RandWrite | LoadKind::RandWriteFlush => Request::Write(number),
        })
    })?;
    let loaded = LoadResult {
        counts: block.counts(),
        ticks: now().wrapping_sub(start),
        p50: histogram.quantile(500),
        p99: histogram.quantile(990),
        p999: histogram.quantile(999),
        write_cache,
    };
    let _ = writeln!(console, "{}", GuestMessage::Loaded(block.name(), loaded));
    Ok(())
}
