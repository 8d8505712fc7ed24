//! `walvisor-bench store read`: the cost of a random read through the log and its index.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::{CacheMode, Operation, SECTOR_SIZE, Store, StoreOptions};
use walvisor_testkit::Random;

use super::STORE;
use super::client::{QueueClient, StoreClient, write_block};
use super::raw::{Direction, RawQueue};
use super::site::{self, ring};
use super::timing::{Timing, closed_loops};
use crate::bench::{Bench, Row, Side, TakeTurns, Turn, settings};
use crate::bench_dirs::{directory, make_raw, open_direct};
use crate::blocks::{BLOCK, damage_error, is_stamped, stamped_block};
use crate::output::Output;

/// Writes between two FLUSHes while the log is filled.
const FILL_DEPTH: usize = 64;
/// Writes in flight during the reads.
const WRITES: usize = 32;
/// A log that has copied nothing for this long is idle.
const IDLE_TIME: Duration = Duration::from_millis(300);

/// Arguments of `walvisor-bench store read`.
#[derive(Debug, Args, Serialize)]
pub struct ReadArguments {
    /// Bytes of the disk, all of them written
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    bytes: u64,
    /// Reads of each kind, of all clients and rounds together
    #[arg(long, value_name = "M", default_value_t = 100_000)]
    reads: u64,
    /// Number of clients, each with a thread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    clients: u16,
    /// Reads in flight of each client
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// Also measure while a client writes to another disk of the log and flushes in a loop, with so
    /// many microseconds added to each sync
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    beside_sync_us: Option<u32>,
    /// Also measure while 32 writes are in flight to another disk, whose log is full and is copied
    /// all the time, and beside as many writes to a raw file
    #[arg(long)]
    beside_writes: bool,
    #[command(flatten)]
    #[serde(skip)]
    output: Output,
}

/// Runs `walvisor-bench store read`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &ReadArguments) -> Result<(), CommandError> {
    let in_flight = u64::from(arguments.clients) * u64::from(arguments.depth);
    if arguments.bytes < 1 << 20 || arguments.bytes > 64 << 30 {
        return Err(CommandError::Usage(format!(
            "--bytes {}: give 1M to 64G",
            arguments.bytes
        )));
    }
    if arguments.reads < in_flight || arguments.reads > 1_000_000_000 {
        return Err(CommandError::Usage(format!(
            "--reads {}: give at least {in_flight}, one for each place in the queues, at most \
             1000000000",
            arguments.reads
        )));
    }
    let output = &arguments.output;
    let mut bench = Bench::new(
        STORE,
        output,
        &["read".to_owned()],
        &settings(json!(arguments)),
    );
    let matrix = &mut bench.matrices[0];
    matrix.rows.retain(|row| match row.name.as_str() {
        "beside syncs" => arguments.beside_sync_us.is_some(),
        "beside writes" | "raw, beside writes" => arguments.beside_writes,
        _ => true,
    });
    let directory = directory(&output.dir)?;
    let mut reads = Reads::new(arguments, directory.path(), matrix.spec.rounds)?;
    let session = bench.start()?;
    let run = bench.matrices[0].measure_rows(&session, &mut reads);
    let closed = reads.close();
    bench.finish(session, run.and(closed))
}

/// The disks that are read.
struct Reads<'a> {
    arguments: &'a ReadArguments,
    site: &'a Path,
    options: StoreOptions,
    blocks: u64,
    /// Reads of a turn.
    each: u64,
    raw: File,
    /// The store of the row that is measured.
    store: Option<Store>,
    /// The writer whose stamps its first disk has.
    writer: u64,
}

impl<'a> Reads<'a> {
    /// Creates the disks, with checkpointed data of writer 1.
    fn new(
        arguments: &'a ReadArguments,
        site: &'a Path,
        rounds: usize,
    ) -> Result<Self, CommandError> {
        let blocks = arguments.bytes / BLOCK as u64;
        let bytes = blocks * BLOCK as u64;
        let options = ring(3 * bytes);
        site::create(site, 2, bytes, &options)?;
        fill_and_close(site, blocks, &options)?;
        Ok(Self {
            arguments,
            site,
            options,
            blocks,
            each: arguments.reads.div_ceil(rounds as u64),
            raw: make_raw(&site.join("raw"), bytes, BLOCK)?,
            store: None,
            writer: 1,
        })
    }

    fn close(&mut self) -> Result<(), CommandError> {
        let closed = self.store.take().map(Store::close);
        closed.transpose().map(drop).map_err(CommandError::failed)
    }

    fn store(&self) -> &Store {
        self.store.as_ref().expect("the row has opened it")
    }

    /// A checkpoint continues for a while after the writes.
    fn wait_until_idle(&self) {
        let copied = || self.store().log_counters().base_writes;
        let mut before = u64::MAX;
        while copied() != before {
            before = copied();
            thread::sleep(IDLE_TIME);
        }
    }

    fn scatter(&self, client: u64) -> Scatter {
        Scatter {
            blocks: self.blocks,
            random: Random(client + 1),
        }
    }

    /// Reads the first disk of the store.
    fn read_store(&self) -> Result<Timing, CommandError> {
        let depth = usize::from(self.arguments.depth);
        let reader = |client: u16| {
            let queue = QueueClient::open(&self.store().disks()[0], depth)?;
            Ok((queue, self.scatter(client.into()), vec![0; depth]))
        };
        let readers = (0..self.arguments.clients).map(reader);
        let mut readers = readers.collect::<Result<Vec<_>, CommandError>>()?;
        let read = |(queue, scatter, wanted): &mut (QueueClient, Scatter, Vec<u64>)| {
            let ended = queue.step(|slot| {
                wanted[slot] = scatter.next();
                Some(Operation::Read {
                    sector: wanted[slot] * BLOCK as u64 / SECTOR_SIZE,
                    sectors: (BLOCK as u64 / SECTOR_SIZE) as u32,
                })
            })?;
            let (slot, data, time) = ended.expect("the queue is never empty");
            match data {
                Some(data) if is_stamped(&data, self.writer, wanted[slot]) => Ok(time),
                _ => Err(damage_error("the disk", wanted[slot])),
            }
        };
        closed_loops(&mut readers, self.each, read, |_| ())
    }

    /// Reads the raw file.
    fn read_raw(&self) -> Result<Timing, CommandError> {
        let depth = usize::from(self.arguments.depth);
        let reader = |client: u16| {
            let queue = RawQueue::new(&self.raw, Direction::Read, BLOCK, depth)?;
            Ok((queue, self.scatter(client.into()), vec![0; depth]))
        };
        let readers = (0..self.arguments.clients).map(reader);
        let mut readers = readers.collect::<Result<Vec<_>, CommandError>>()?;
        let read = |(queue, scatter, wanted): &mut (RawQueue<'_>, Scatter, Vec<u64>)| {
            let ended = queue.step(|slot| {
                wanted[slot] = scatter.next();
                Some(wanted[slot] * BLOCK as u64)
            })?;
            let (slot, time) = ended.expect("the queue is never empty");
            if !is_stamped(queue.buffer(slot), 0, wanted[slot]) {
                return Err(damage_error("the raw file", wanted[slot]));
            }
            Ok(time)
        };
        closed_loops(&mut readers, self.each, read, |_| ())
    }
}

impl TakeTurns for Reads<'_> {
    /// Brings the disks into the state that a row measures.
    fn prepare(&mut self, row: &Row) -> Result<(), CommandError> {
        let open = |disks, options: &StoreOptions| {
            site::open(self.site, disks, CacheMode::Writeback, options).map(Some)
        };
        match row.name.as_str() {
            "checkpointed" => self.store = open(1, &self.options)?,
            // Writer 2's data stays in the log.
            "in the log" => {
                fill(self.store(), self.blocks, 2)?;
                self.writer = 2;
            }
            "beside syncs" => {
                let latency = self.arguments.beside_sync_us.unwrap_or_default();
                let options = StoreOptions {
                    sync_latency: Duration::from_micros(latency.into()),
                    ..self.options
                };
                self.close()?;
                self.store = open(2, &options)?;
            }
            "beside writes" => {
                let options = StoreOptions {
                    max_segments: 8,
                    ..self.options
                };
                self.close()?;
                let full = self.site.join("full");
                std::fs::create_dir(&full).map_err(CommandError::failed)?;
                site::create(&full, 2, self.blocks * BLOCK as u64, &options)?;
                fill_and_close(&full, self.blocks, &options)?;
                self.store = Some(site::open(&full, 2, CacheMode::Writeback, &options)?);
                self.writer = 1;
            }
            _ => {
                self.close()?;
                make_raw(
                    &self.site.join("written"),
                    self.blocks * BLOCK as u64,
                    BLOCK,
                )?;
            }
        }
        Ok(())
    }

    fn turn(&mut self, side: &Side) -> Result<Turn, CommandError> {
        let before = self.store.as_ref().map(Store::log_counters);
        let mut places = self.scatter(self.arguments.clients.into());
        let mut timing = match (side.text("reads_of"), side.side.as_str()) {
            (_, "raw") | ("raw, beside writes", "alone") => self.read_raw()?,
            ("raw, beside writes", _) => {
                let written = open_direct(&self.site.join("written"))?;
                let mut queue = RawQueue::new(&written, Direction::Write, BLOCK, WRITES)?;
                let write = || queue.step(|_| Some(places.next() * BLOCK as u64)).map(drop);
                beside(write, || self.read_raw())?
            }
            ("beside writes", "alone") => {
                self.wait_until_idle();
                self.read_store()?
            }
            (_, "log" | "alone") => self.read_store()?,
            ("beside syncs", _) => {
                let mut client = StoreClient::open(&self.store().disks()[1])?;
                let flush = || {
                    let data = stamped_block(BLOCK, 0, 0);
                    client.run(Operation::Write { sector: 0, data })?;
                    client.run(Operation::Flush).map(drop)
                };
                beside(flush, || self.read_store())?
            }
            _ => {
                let mut queue = QueueClient::open(&self.store().disks()[1], WRITES)?;
                let write = || {
                    queue
                        .step(|_| Some(write_block(1, places.next())))
                        .map(drop)
                };
                beside(write, || self.read_store())?
            }
        };
        let mut figures = timing.figures("reads_per_s");
        let after = self.store.as_ref().map(Store::log_counters);
        if let (Some(before), Some(after), "beside") = (before, after, side.side.as_str()) {
            figures["syncs"] = json!(after.syncs - before.syncs);
            figures["checkpoints"] = json!(after.checkpoints - before.checkpoints);
        }
        Ok(Turn(figures))
    }
}

/// Chooses the next block.
struct Scatter {
    blocks: u64,
    random: Random,
}

impl Scatter {
    fn next(&mut self) -> u64 {
        self.random.below(self.blocks)
    }
}

/// Reads while another thread repeats `work`.
fn beside(
    mut work: impl FnMut() -> Result<(), CommandError> + Send,
    read: impl FnOnce() -> Result<Timing, CommandError>,
) -> Result<Timing, CommandError> {
    let over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let working = scope.spawn(move || {
            // Runs at least once, because all reads may end before this thread first runs.
            loop {
                work()?;
                if over.load(Ordering::Relaxed) {
                    return Ok(());
                }
            }
        });
        let timing = read();
        over.store(true, Ordering::Relaxed);
        working.join().expect("no panic").and(timing)
    })
}

/// Writes every block as a record of its own, and makes them durable.
fn fill(store: &Store, blocks: u64, writer: u64) -> Result<(), CommandError> {
    let mut queue = QueueClient::open(&store.disks()[0], FILL_DEPTH)?;
    queue.run((0..blocks).map(|block| write_block(writer, block)))
}

/// Fills the first disk as writer 1, and copies it all to the image.
fn fill_and_close(site: &Path, blocks: u64, options: &StoreOptions) -> Result<(), CommandError> {
    let store = site::open(site, 1, CacheMode::Writeback, options)?;
    fill(&store, blocks, 1)?;
    store.close().map_err(CommandError::failed)
}
