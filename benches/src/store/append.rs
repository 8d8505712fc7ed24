//! `walvisor-bench store append`: the rate of sequential writes to the log.

use std::fmt;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::{
    BUFFER_ALIGN, Buffer, CacheMode, MAX_REQUEST_BYTES, Operation, SECTOR_SIZE,
};

use super::client::{QueueClient, StoreClient, damage_error, is_stamped, stamp, stamped_block};
use super::figures::{BLOCK, tenths, thousandths};
use super::output::StoreOutput;
use super::raw::{self, Direction, RawQueue};
use super::site::{StoreSite, ring};
use super::timing::median;

/// Number of turns of store and baseline.
const ROUNDS: u64 = 5;
/// The longest write: the largest that fits in a segment of the benchmark's ring.
const MOST_BLOCK: u64 = 4 << 20;
const _: () = assert!(MOST_BLOCK <= MAX_REQUEST_BYTES as u64);

/// Arguments of `walvisor-bench store append`.
#[derive(Debug, Args)]
pub struct AppendArguments {
    /// Bytes to write in each of 5 rounds
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    bytes: u64,
    /// Bytes of a write, a multiple of 4K up to 4M
    #[arg(long, value_name = "SIZE", default_value = "128K", value_parser = parse_size)]
    block: u64,
    /// Writes in flight
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    #[command(flatten)]
    output: StoreOutput,
}

/// The results. Each rate is the median of the rounds, and includes a FLUSH or fdatasync at the end of the round.
#[derive(Debug, Serialize)]
struct AppendReport {
    bytes: u64,
    block_bytes: u64,
    depth: u16,
    rounds: u64,
    mib_per_s: f64,
    raw_mib_per_s: f64,
    ratio: f64,
    log_bytes_per_byte: f64,
    syncs: u64,
}

/// Runs `walvisor-bench store append`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &AppendArguments) -> Result<(), CommandError> {
    let block = arguments.block;
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
    let report = measure(arguments)?;
    arguments.output.print(&report)
}

fn measure(arguments: &AppendArguments) -> Result<AppendReport, CommandError> {
    let (block, depth) = (arguments.block, usize::from(arguments.depth));
    let blocks = arguments.bytes / block;
    let bytes = blocks * block;
    let site = StoreSite::new(&arguments.output.dir)?;
    // In the worst case each write needs a descriptor block. The ring has room for a round without a checkpoint.
    let options = ring(blocks * (block + BLOCK as u64));
    site.create(1, bytes, &options)?;
    let raw_path = site.path().join("raw");
    let raw_file = raw::create(&raw_path, bytes, block as usize)?;
    let mib = |began: Instant| bytes as f64 / f64::from(1 << 20) / began.elapsed().as_secs_f64();
    let (mut rates, mut raw_rates) = (Vec::new(), Vec::new());
    let (mut log_bytes, mut syncs) = (0, 0);
    // Round 0 does not count, because it creates the segment files.
    for round in 0..=ROUNDS {
        let mut queue = RawQueue::new(&raw_file, Direction::Write, block as usize, depth)?;
        (0..depth).for_each(|slot| stamp(queue.buffer(slot), 0, round));
        let (mut next, began) = (0, Instant::now());
        let mut offset = |_| {
            let at = next * block;
            next += 1;
            (at < bytes).then_some(at)
        };
        while queue.step(&mut offset)?.is_some() {}
        raw_file
            .sync_data()
            .map_err(raw::failed("sync", &raw_path))?;
        raw_rates.push(mib(began));
        drop(queue);

        let store = site.open(1, CacheMode::Writeback, &options)?;
        let mut queue = QueueClient::open(&store.disks()[0], depth)?;
        // The data is stamped before the clock starts. Copying it stands in for the copy from guest memory.
        let template = stamped_block(block as usize, 1, round);
        let (mut next, began) = (0, Instant::now());
        let mut write = |_| {
            let sector = next * block / SECTOR_SIZE;
            next += 1;
            let data = Buffer::from(&template[..]);
            (next <= blocks).then_some(Operation::Write { sector, data })
        };
        while queue.step(&mut write)?.is_some() {}
        queue.flush()?;
        rates.push(mib(began));
        let counters = store.log_counters();
        drop(queue);
        if round == ROUNDS {
            verify(&mut StoreClient::open(&store.disks()[0])?, bytes, round)?;
        }
        if round > 0 {
            log_bytes += counters.log_bytes;
            syncs += counters.syncs;
        }
        store.close().map_err(CommandError::failed)?;
    }
    let (rate, raw_rate) = (median(rates.split_off(1)), median(raw_rates.split_off(1)));
    Ok(AppendReport {
        bytes,
        block_bytes: block,
        depth: arguments.depth,
        rounds: ROUNDS,
        mib_per_s: tenths(rate),
        raw_mib_per_s: tenths(raw_rate),
        ratio: thousandths(rate / raw_rate),
        log_bytes_per_byte: thousandths(log_bytes as f64 / (ROUNDS * bytes) as f64),
        syncs,
    })
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

impl fmt::Display for AppendReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} bytes in writes of {}, {} in flight, a FLUSH at the end; median of {} rounds\n",
            self.bytes, self.block_bytes, self.depth, self.rounds
        )?;
        writeln!(f, "               MiB/s")?;
        writeln!(f, "log      {:>11.1}", self.mib_per_s)?;
        writeln!(f, "raw file {:>11.1}", self.raw_mib_per_s)?;
        writeln!(f, "ratio    {:>11.3}", self.ratio)?;
        writeln!(
            f,
            "\n{:.3} log bytes for each byte written, {} syncs",
            self.log_bytes_per_byte, self.syncs
        )
    }
}
