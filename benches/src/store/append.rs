//! `walvisor-bench store append`: the rate of sequential writes to the log.

use std::time::Instant;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::{
    BUFFER_ALIGN, Buffer, CacheMode, MAX_REQUEST_BYTES, Operation, SECTOR_SIZE,
};

use super::client::{QueueClient, StoreClient};
use super::raw::{Direction, RawQueue};
use super::site::{self, ring};
use super::{measure, rate, raw_or_log};
use crate::bench_dirs::{directory, failed, make_raw};
use crate::blocks::{BLOCK, damage_error, is_stamped, stamp, stamped_block};
use crate::output::Output;

/// The longest write: the largest that fits in a segment of the benchmark's ring.
const MOST_BLOCK: u64 = 4 << 20;
const _: () = assert!(MOST_BLOCK <= MAX_REQUEST_BYTES as u64);

/// Arguments of `walvisor-bench store append`.
#[derive(Debug, Args, Serialize)]
pub struct AppendArguments {
    /// Bytes to write in each round
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    bytes: u64,
    /// Bytes of a write, a multiple of 4K up to 4M
    #[arg(long, value_name = "SIZE", default_value = "128K", value_parser = parse_size)]
    block: u64,
    /// Writes in flight
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    #[command(flatten)]
    #[serde(skip)]
    output: Output,
}

/// Runs `walvisor-bench store append`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &AppendArguments) -> Result<(), CommandError> {
    let (block, depth) = (arguments.block, usize::from(arguments.depth));
    if block == 0 || !block.is_multiple_of(BUFFER_ALIGN as u64) || block > MOST_BLOCK {
        return Err(CommandError::Usage(format!(
            "--block {block}: give a multiple of 4K from 4K to 4M"
        )));
    }
    if arguments.bytes < block || arguments.bytes > 64 << 30 {
        return Err(CommandError::Usage(format!(
            "--bytes {}: give at least one block, at most 64G",
            arguments.bytes
        )));
    }
    let blocks = arguments.bytes / block;
    let bytes = blocks * block;
    let directory = directory(&arguments.output.dir)?;
    let site = directory.path();
    // In the worst case each write needs a descriptor block. The ring has room for a round without
    // a checkpoint.
    let options = ring(blocks * (block + BLOCK as u64));
    site::create(site, 1, bytes, &options)?;
    let raw_path = site.join("raw");
    let raw_file = make_raw(&raw_path, bytes, block as usize)?;
    let raw = || {
        let mut queue = RawQueue::new(&raw_file, Direction::Write, block as usize, depth)?;
        (0..depth).for_each(|slot| stamp(queue.buffer(slot), 0, slot as u64));
        let began = Instant::now();
        queue.run((0..bytes).step_by(block as usize))?;
        raw_file.sync_data().map_err(failed("sync", &raw_path))?;
        Ok(rate(bytes, began.elapsed()))
    };
    let log = |round| {
        let store = site::open(site, 1, CacheMode::Writeback, &options)?;
        let mut queue = QueueClient::open(&store.disks()[0], depth)?;
        // The data is stamped before the clock starts. Copying it stands in for the copy from guest
        // memory.
        let template = stamped_block(block as usize, 1, round);
        let began = Instant::now();
        let sectors = (0..bytes / SECTOR_SIZE).step_by((block / SECTOR_SIZE) as usize);
        queue.run(sectors.map(|sector| Operation::Write {
            sector,
            data: Buffer::from(&template[..]),
        }))?;
        let mut turn = rate(bytes, began.elapsed());
        let counters = store.log_counters();
        turn.0["log_bytes_per_byte"] = json!(counters.log_bytes as f64 / bytes as f64);
        turn.0["syncs"] = json!(counters.syncs);
        drop(queue);
        verify(&mut StoreClient::open(&store.disks()[0])?, bytes, round)?;
        store.close().map_err(CommandError::failed)?;
        Ok(turn)
    };
    let turns = &mut raw_or_log(raw, log);
    measure("append", json!(arguments), &arguments.output, turns)
}

/// Reads 4 KiB of each MiB back through the log, and checks it.
fn verify(client: &mut StoreClient, bytes: u64, round: u64) -> Result<(), CommandError> {
    for at in (0..bytes).step_by(1 << 20) {
        if !is_stamped(&client.read(at / SECTOR_SIZE)?, 1, round) {
            return Err(damage_error("the log", at / BLOCK as u64));
        }
    }
    Ok(())
}
