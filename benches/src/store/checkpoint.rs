//! `walvisor-bench store checkpoint`: the rate at which a checkpoint copies the log to the base image.

use std::fmt;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::{CacheMode, Operation, SECTOR_SIZE};

use super::client::{QueueClient, damage_error, is_stamped, stamped_block};
use super::figures::{BLOCK, scattered, tenths, thousandths};
use super::output::StoreOutput;
use super::raw::{self, Direction, RawQueue};
use super::site::{StoreSite, ring};
use super::timing::median;

/// Number of turns of store and baseline.
const ROUNDS: u64 = 3;
/// Writes in flight while the log is filled.
const DEPTH: usize = 64;
/// Size and number of the baseline's requests in flight: first reads, then writes.
const RAW_BLOCK: usize = 256 << 10;
const RAW_DEPTH: usize = 8;
/// One in this many blocks is verified.
const VERIFY_EACH: u64 = 61;

/// Arguments of `walvisor-bench store checkpoint`.
#[derive(Debug, Args)]
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
    output: StoreOutput,
}

/// The results. Each rate is the median of the rounds, and includes the sync of the base image or the file.
#[derive(Debug, Serialize)]
struct CheckpointReport {
    bytes: u64,
    block_bytes: u64,
    sequential: bool,
    rounds: u64,
    mib_per_s: f64,
    raw_mib_per_s: f64,
    ratio: f64,
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
    if !(1 << 20..=64 << 30).contains(&bytes) || !bytes.is_multiple_of(1 << 20) {
        return Err(CommandError::Usage(format!(
            "--bytes {bytes}: give a multiple of 1M from 1M to 64G"
        )));
    }
    let blocks = bytes / block;
    let site = StoreSite::new(&arguments.output.dir)?;
    // In the worst case each write needs a descriptor block, and batches leave space unused at the end of segments. No
    // checkpoint begins before the log is closed.
    let options = ring(2 * (bytes + blocks * BLOCK as u64));
    site.create(1, bytes, &options)?;
    let raw_path = site.path().join("raw");
    let raw_file = raw::create(&raw_path, bytes, RAW_BLOCK)?;
    let mib = |began: Instant| bytes as f64 / f64::from(1 << 20) / began.elapsed().as_secs_f64();
    let (mut rates, mut raw_rates) = (Vec::new(), Vec::new());
    // Round 0 does not count, because it creates the segment files and allocates the blocks of the base image.
    for round in 0..=ROUNDS {
        let began = Instant::now();
        for direction in [Direction::Read, Direction::Write] {
            let mut queue = RawQueue::new(&raw_file, direction, RAW_BLOCK, RAW_DEPTH)?;
            let mut offsets = (0..bytes).step_by(RAW_BLOCK);
            while queue.step(|_| offsets.next())?.is_some() {}
        }
        raw_file
            .sync_data()
            .map_err(raw::failed("sync", &raw_path))?;
        raw_rates.push(mib(began));

        let store = site.open(1, CacheMode::Writeback, &options)?;
        let mut queue = QueueClient::open(&store.disks()[0], DEPTH)?;
        let mut record = 0;
        let mut write = |_| {
            let place = if arguments.sequential {
                record
            } else {
                scattered(record, blocks)
            };
            record += 1;
            (record <= blocks).then(|| Operation::Write {
                sector: place * block / SECTOR_SIZE,
                data: stamped_block(block as usize, 1 + round, place),
            })
        };
        while queue.step(&mut write)?.is_some() {}
        queue.flush()?;
        drop(queue);
        if store.log_counters().checkpoints > 0 {
            return Err(CommandError::Failed(
                "a checkpoint began too early: give less --bytes".to_owned(),
            ));
        }
        // Only the copy is left, so the close is the checkpoint.
        let began = Instant::now();
        store.close().map_err(CommandError::failed)?;
        rates.push(mib(began));
        verify(&site, bytes, block, 1 + round)?;
    }
    let (rate, raw_rate) = (median(rates.split_off(1)), median(raw_rates.split_off(1)));
    arguments.output.print(&CheckpointReport {
        bytes,
        block_bytes: block,
        sequential: arguments.sequential,
        rounds: ROUNDS,
        mib_per_s: tenths(rate),
        raw_mib_per_s: tenths(raw_rate),
        ratio: thousandths(rate / raw_rate),
    })
}

/// Reads some blocks of the base image, which is a plain image after the close, and checks them.
fn verify(site: &StoreSite, bytes: u64, block: u64, writer: u64) -> Result<(), CommandError> {
    use std::os::unix::fs::FileExt;
    let path = site.image(0);
    let image = raw::open_direct(&path)?;
    let mut buffer = walvisor_storage::Buffer::zeroed(block as usize);
    for number in (0..bytes / block).step_by(VERIFY_EACH as usize) {
        image
            .read_exact_at(&mut buffer, number * block)
            .map_err(raw::failed("read", &path))?;
        if !is_stamped(&buffer, writer, number) {
            return Err(damage_error("the base image", number));
        }
    }
    Ok(())
}

impl fmt::Display for CheckpointReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.sequential {
            "in order"
        } else {
            "scattered"
        };
        writeln!(
            f,
            "{} bytes in records of {}, {order}; median of {} rounds\n",
            self.bytes, self.block_bytes, self.rounds
        )?;
        writeln!(f, "                     MiB/s")?;
        writeln!(f, "checkpoint     {:>11.1}", self.mib_per_s)?;
        writeln!(f, "raw file       {:>11.1}", self.raw_mib_per_s)?;
        writeln!(f, "ratio          {:>11.3}", self.ratio)
    }
}
