//! `walvisor-bench store checkpoint`: the rate at which a checkpoint copies the log to the base
//! image.

use std::time::Instant;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::{CacheMode, Operation, SECTOR_SIZE};

use super::client::QueueClient;
use super::raw::{Direction, RawQueue};
use super::site::{self, ring};
use super::{VERIFY_EACH, check_bytes, measure, rate, raw_or_log};
use crate::bench_dirs::{directory, failed, make_raw, verify};
use crate::blocks::{BLOCK, scattered, stamped_block};
use crate::output::Output;

/// Writes in flight while the log is filled.
const DEPTH: usize = 64;
/// Size and number of the baseline's requests in flight: first reads, then writes.
const RAW_BLOCK: usize = 256 << 10;
const RAW_DEPTH: usize = 8;

/// Arguments of `walvisor-bench store checkpoint`.
#[derive(Debug, Args, Serialize)]
pub struct CheckpointArguments {
    /// Bytes of payload in the log
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    bytes: u64,
    /// Bytes of a record, a multiple of 4K up to 1M
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = parse_size)]
    block: u64,
    /// Write the blocks in order (otherwise each once, scattered over the disk)
    #[arg(long)]
    sequential: bool,
    #[command(flatten)]
    #[serde(skip)]
    output: Output,
}

/// Runs `walvisor-bench store checkpoint`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &CheckpointArguments) -> Result<(), CommandError> {
    let (bytes, block) = (arguments.bytes, arguments.block);
    if !block.is_multiple_of(BLOCK as u64) || !(BLOCK as u64..=1 << 20).contains(&block) {
        return Err(CommandError::Usage(format!(
            "--block {block}: give a multiple of 4K from 4K to 1M"
        )));
    }
    check_bytes(bytes, 1 << 20, "1M")?;
    let blocks = bytes / block;
    let directory = directory(&arguments.output.dir)?;
    let site = directory.path();
    // In the worst case each write needs a descriptor block, and batches leave space unused at the
    // end of segments. No checkpoint begins before the log is closed.
    let options = ring(2 * (bytes + blocks * BLOCK as u64));
    site::create(site, 1, bytes, &options)?;
    let raw_path = site.join("raw");
    let raw_file = make_raw(&raw_path, bytes, RAW_BLOCK)?;
    let raw = || {
        let began = Instant::now();
        for direction in [Direction::Read, Direction::Write] {
            let mut queue = RawQueue::new(&raw_file, direction, RAW_BLOCK, RAW_DEPTH)?;
            queue.run((0..bytes).step_by(RAW_BLOCK))?;
        }
        raw_file.sync_data().map_err(failed("sync", &raw_path))?;
        Ok(rate(bytes, began.elapsed()))
    };
    let log = |writer| {
        let store = site::open(site, 1, CacheMode::Writeback, &options)?;
        let mut queue = QueueClient::open(&store.disks()[0], DEPTH)?;
        queue.run((0..blocks).map(|record| {
            let place = if arguments.sequential {
                record
            } else {
                scattered(record, blocks)
            };
            Operation::Write {
                sector: place * block / SECTOR_SIZE,
                data: stamped_block(block as usize, writer, place),
            }
        }))?;
        drop(queue);
        if store.log_counters().checkpoints > 0 {
            return Err(CommandError::Failed(
                "a checkpoint began too early: give less --bytes".to_owned(),
            ));
        }
        // Only the copy is left, so the close is the checkpoint.
        let began = Instant::now();
        store.close().map_err(CommandError::failed)?;
        let turn = rate(bytes, began.elapsed());
        // The base image is a plain image after the close.
        let some = (0..blocks)
            .step_by(VERIFY_EACH)
            .map(|number| (number, number));
        verify(&site::image(site, 0), block as usize, writer, some)?;
        Ok(turn)
    };
    let turns = &mut raw_or_log(raw, log);
    measure("checkpoint", json!(arguments), &arguments.output, turns)
}
