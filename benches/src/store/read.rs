//! `walvisor-bench store read`: the cost of a random read through the log and its index.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::{CacheMode, Operation, SECTOR_SIZE, Store, StoreOptions};
use walvisor_testkit::Random;

use super::client::{QueueClient, StoreClient, write_block};
use super::output::{StoreOutput, StoreReport, row, tenths, thousandths};
use super::raw::{Direction, RawQueue};
use super::site::{self, ring};
use super::timing::{Timing, closed_loops, shares};
use crate::blocks::{BLOCK, damage_error, is_stamped, stamped_block};
use crate::place::{directory, make_raw};
use crate::report::Cell;

/// Number of turns of store and baseline.
const ROUNDS: u64 = 4;
/// Writes between two FLUSHes while the log is filled.
const FILL_DEPTH: usize = 64;
/// Writes in flight during the reads.
const WRITES: usize = 32;
/// A log that has copied nothing for this long is idle.
const IDLE_TIME: Duration = Duration::from_millis(300);

/// Arguments of `walvisor-bench store read`.
#[derive(Debug, Args)]
pub struct ReadArguments {
    /// Bytes of the disk, all of them written
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    bytes: u64,
    /// Reads of each kind, of all clients together
    #[arg(long, value_name = "M", default_value_t = 100_000)]
    reads: u64,
    /// Number of clients, each with a thread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    clients: u16,
    /// Reads in flight of each client
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// Also measure while a client writes to another disk of the log and flushes in a loop, with so many microseconds
    /// added to each sync
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    beside_sync_us: Option<u32>,
    /// Also measure while 32 writes are in flight to another disk, whose log is full and is copied all the time, and
    /// beside as many writes to a raw file
    #[arg(long)]
    beside_writes: bool,
    #[command(flatten)]
    output: StoreOutput,
}

/// The figures of one kind of read.
struct Figures {
    rate: f64,
    p50_us: f64,
    p99_us: f64,
}

impl Figures {
    fn new(mut timing: Timing) -> Self {
        Self {
            rate: timing.rate(),
            p50_us: timing.percentile_us(0.5),
            p99_us: timing.percentile_us(0.99),
        }
    }

    fn json(&self) -> Value {
        json!({
            "reads_per_s": tenths(self.rate),
            "p50_us": tenths(self.p50_us),
            "p99_us": tenths(self.p99_us),
        })
    }

    /// A row of the table, with a ratio of another row's figure.
    fn row(&self, name: &str, ratio: f64) -> Vec<Cell> {
        let mut row = row(name, 1, &[self.rate, self.p50_us, self.p99_us]);
        row.push(Cell::Number(ratio, 3));
        row
    }
}

/// Reads while other work goes on, and the same reads alone, in turns.
struct LoadedReads {
    alone: Figures,
    beside: Figures,
}

impl LoadedReads {
    /// The ratio of the 99th percentiles.
    fn ratio(&self) -> f64 {
        self.beside.p99_us / self.alone.p99_us
    }

    fn json(&self) -> Value {
        json!({
            "alone": self.alone.json(),
            "beside": self.beside.json(),
            "p99_ratio": thousandths(self.ratio()),
        })
    }

    /// Two rows of the table, with the ratio of the 99th percentiles.
    fn rows(&self, what: &str) -> [Vec<Cell>; 2] {
        [
            self.alone.row(&format!("{what}: alone"), 1.0),
            self.beside.row(&format!("{what}: beside"), self.ratio()),
        ]
    }
}

/// Runs `walvisor-bench store read`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &ReadArguments) -> Result<(), CommandError> {
    let (clients, depth) = (u64::from(arguments.clients), u64::from(arguments.depth));
    if arguments.bytes < 1 << 20 || arguments.bytes > 64 << 30 {
        return Err(CommandError::Usage(format!(
            "--bytes {}: give 1M to 64G",
            arguments.bytes
        )));
    }
    if arguments.reads < clients * depth || arguments.reads > 1_000_000_000 {
        return Err(CommandError::Usage(format!(
            "--reads {}: give at least {}, one for each place in the queues, at most 1000000000",
            arguments.reads,
            clients * depth
        )));
    }
    arguments.output.print(measure(arguments)?)
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

/// A client of the store, with the block that each of its slots reads.
struct StoreReader {
    queue: QueueClient,
    wanted: Vec<u64>,
    scatter: Scatter,
    writer: u64,
}

impl StoreReader {
    fn read(&mut self) -> Result<Duration, CommandError> {
        let (wanted, scatter) = (&mut self.wanted, &mut self.scatter);
        let next = |slot: usize| {
            wanted[slot] = scatter.next();
            Some(Operation::Read {
                sector: wanted[slot] * BLOCK as u64 / SECTOR_SIZE,
                sectors: (BLOCK as u64 / SECTOR_SIZE) as u32,
            })
        };
        let ended = self.queue.step(next)?;
        let (slot, data, time) = ended.expect("the queue is never empty");
        let block = self.wanted[slot];
        match data {
            Some(data) if is_stamped(&data, self.writer, block) => Ok(time),
            _ => Err(damage_error("the disk", block)),
        }
    }
}

/// A thread of the baseline.
struct RawReader<'a> {
    queue: RawQueue<'a>,
    wanted: Vec<u64>,
    scatter: Scatter,
}

impl RawReader<'_> {
    fn read(&mut self) -> Result<Duration, CommandError> {
        let (wanted, scatter) = (&mut self.wanted, &mut self.scatter);
        let next = |slot: usize| {
            wanted[slot] = scatter.next();
            Some(wanted[slot] * BLOCK as u64)
        };
        let ended = self.queue.step(next)?;
        let (slot, time) = ended.expect("the queue is never empty");
        let block = self.wanted[slot];
        if !is_stamped(self.queue.buffer(slot), 0, block) {
            return Err(damage_error("the raw file", block));
        }
        Ok(time)
    }
}

fn measure(arguments: &ReadArguments) -> Result<StoreReport, CommandError> {
    let (clients, depth) = (u64::from(arguments.clients), usize::from(arguments.depth));
    let blocks = arguments.bytes / BLOCK as u64;
    let bytes = blocks * BLOCK as u64;
    let place = directory(&arguments.output.dir)?;
    let site = place.path();
    let options = ring(3 * bytes);
    let disks = 1 + usize::from(arguments.beside_sync_us.is_some());
    site::create(site, disks, bytes, &options)?;
    let raw_file = make_raw(&site.join("raw"), bytes, BLOCK)?;
    let scatter = |client: u64| Scatter {
        blocks,
        random: Random(client + 1),
    };
    let readers = |store: &Store, writer| {
        let reader = |client| {
            Ok(StoreReader {
                queue: QueueClient::open(&store.disks()[0], depth)?,
                wanted: vec![0; depth],
                scatter: scatter(client),
                writer,
            })
        };
        (0..clients)
            .map(reader)
            .collect::<Result<Vec<_>, CommandError>>()
    };
    // Writer 1's data is checkpointed, because the store is closed.
    let store = site::open(site, 1, CacheMode::Writeback, &options)?;
    fill(&store, blocks, 1)?;
    store.close().map_err(CommandError::failed)?;
    let raw_reader = |client| {
        Ok(RawReader {
            queue: RawQueue::new(&raw_file, Direction::Read, BLOCK, depth)?,
            wanted: vec![0; depth],
            scatter: scatter(client),
        })
    };
    let mut raw_readers = (0..clients)
        .map(raw_reader)
        .collect::<Result<Vec<_>, CommandError>>()?;
    let rounds: Vec<u64> = shares(arguments.reads, ROUNDS).collect();
    let store = site::open(site, 1, CacheMode::Writeback, &options)?;
    let [mut raw, checkpointed] = take_turns(&mut raw_readers, readers(&store, 1)?, &rounds)?;
    // Writer 2's data stays in the log.
    fill(&store, blocks, 2)?;
    let [raw_beside, logged] = take_turns(&mut raw_readers, readers(&store, 2)?, &rounds)?;
    let (checkpointed_ratio, logged_ratio) = (
        checkpointed.rate() / raw.rate(),
        logged.rate() / raw_beside.rate(),
    );
    raw.add(raw_beside);
    store.close().map_err(CommandError::failed)?;
    let beside_syncs = arguments
        .beside_sync_us
        .map(|latency| {
            let options = StoreOptions {
                sync_latency: Duration::from_micros(latency.into()),
                ..options
            };
            let store = site::open(site, 2, CacheMode::Writeback, &options)?;
            let syncs = store.log_counters().syncs;
            let mut client = StoreClient::open(&store.disks()[1])?;
            let flush = || {
                let data = stamped_block(BLOCK, 0, 0);
                client.run(Operation::Write { sector: 0, data })?;
                client.run(Operation::Flush).map(drop)
            };
            let reads = measure_under_load(
                &mut readers(&store, 2)?,
                &rounds,
                StoreReader::read,
                flush,
                || (),
            )?;
            let syncs = store.log_counters().syncs - syncs;
            store.close().map_err(CommandError::failed)?;
            Ok::<_, CommandError>((latency, syncs, reads))
        })
        .transpose()?;
    let beside_writes = arguments
        .beside_writes
        .then(|| {
            let little = StoreOptions {
                max_segments: 8,
                ..options
            };
            let full = directory(&arguments.output.dir)?;
            let full = full.path();
            site::create(full, 2, bytes, &little)?;
            let store = site::open(full, 1, CacheMode::Writeback, &little)?;
            fill(&store, blocks, 1)?;
            store.close().map_err(CommandError::failed)?;
            let store = site::open(full, 2, CacheMode::Writeback, &little)?;
            let checkpoints = store.log_counters().checkpoints;
            let mut queue = QueueClient::open(&store.disks()[1], WRITES)?;
            let mut places = scatter(clients);
            let write = || {
                let write = |_| Some(write_block(1, places.next()));
                queue.step(write).map(drop)
            };
            let rest = || {
                // A checkpoint continues for a while.
                let copied = || store.log_counters().base_writes;
                let mut before = u64::MAX;
                while copied() != before {
                    before = copied();
                    thread::sleep(IDLE_TIME);
                }
            };
            let of_store = measure_under_load(
                &mut readers(&store, 1)?,
                &rounds,
                StoreReader::read,
                write,
                rest,
            )?;
            let checkpoints = store.log_counters().checkpoints - checkpoints;
            drop(queue);
            store.close().map_err(CommandError::failed)?;
            let written = make_raw(&site.join("written"), bytes, BLOCK)?;
            let mut queue = RawQueue::new(&written, Direction::Write, BLOCK, WRITES)?;
            let write = || queue.step(|_| Some(places.next() * BLOCK as u64)).map(drop);
            let of_raw =
                measure_under_load(&mut raw_readers, &rounds, RawReader::read, write, || ())?;
            Ok::<_, CommandError>((checkpoints, of_store, of_raw))
        })
        .transpose()?;
    let [checkpointed, logged, raw] = [checkpointed, logged, raw].map(Figures::new);
    let mut json = json!({
        "bytes": bytes,
        "reads": arguments.reads,
        "clients": clients,
        "depth": depth,
        "checkpointed": checkpointed.json(),
        "logged": logged.json(),
        "raw": raw.json(),
        "checkpointed_ratio": thousandths(checkpointed_ratio),
        "logged_ratio": thousandths(logged_ratio),
    });
    let mut rows = vec![
        checkpointed.row("checkpointed", checkpointed_ratio),
        logged.row("in the log", logged_ratio),
        raw.row("raw file", 1.0),
    ];
    let mut notes = vec!["each ratio against the raw reads that took turns with it".to_owned()];
    if let Some((latency, syncs, reads)) = beside_syncs {
        json["beside_syncs"] = reads.json();
        json["beside_syncs"]["sync_latency_us"] = json!(latency);
        json["beside_syncs"]["syncs"] = json!(syncs);
        rows.extend(reads.rows("syncs"));
        notes.push(format!(
            "syncs: beside {syncs} syncs of another disk, each {latency} us longer than the medium needs; taking turns with \
             none; the ratio is that of p99"
        ));
    }
    if let Some((checkpoints, store, raw)) = beside_writes {
        json["beside_writes"] = json!({
            "checkpoints": checkpoints,
            "store": store.json(),
            "raw": raw.json(),
        });
        rows.extend(store.rows("writes"));
        rows.extend(raw.rows("raw writes"));
        notes.push(format!(
            "writes: beside {WRITES} writes in flight to another disk, with {checkpoints} checkpoints; raw writes: raw files, \
             beside as many; taking turns with none; the ratio is that of p99"
        ));
    }
    Ok(StoreReport {
        json,
        head: format!(
            "{} random 4 KiB reads of each kind over {bytes} bytes; {clients} clients, {depth} in flight each",
            arguments.reads
        ),
        columns: &["", "reads/s", "p50 us", "p99 us", "ratio"],
        rows,
        notes,
    })
}

/// Lets the baseline and the store take turns.
fn take_turns(
    raw_readers: &mut [RawReader<'_>],
    mut readers: Vec<StoreReader>,
    rounds: &[u64],
) -> Result<[Timing; 2], CommandError> {
    let mut timings = [Timing::default(), Timing::default()];
    for &share in rounds {
        timings[0].add(closed_loops(raw_readers, share, RawReader::read, |_| ())?);
        timings[1].add(closed_loops(
            &mut readers,
            share,
            StoreReader::read,
            |_| (),
        )?);
    }
    Ok(timings)
}

/// Measures reads alone and while another thread repeats `work`, in turns. `rest` waits until the effects of the work are
/// over.
fn measure_under_load<R: Send>(
    readers: &mut [R],
    rounds: &[u64],
    read: impl Fn(&mut R) -> Result<Duration, CommandError> + Sync,
    mut work: impl FnMut() -> Result<(), CommandError> + Send,
    rest: impl Fn(),
) -> Result<LoadedReads, CommandError> {
    let (mut alone, mut beside) = (Timing::default(), Timing::default());
    for &share in rounds {
        rest();
        alone.add(closed_loops(readers, share, &read, |_| ())?);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (over, work) = (&over, &mut work);
            let working = scope.spawn(move || {
                // Runs at least once, because all reads may end before this thread first runs.
                loop {
                    work()?;
                    if over.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                }
            });
            let read = closed_loops(readers, share, &read, |_| ());
            over.store(true, Ordering::Relaxed);
            let worked: Result<(), CommandError> = working.join().expect("no panic");
            beside.add(read?);
            worked
        })?;
    }
    let [alone, beside] = [alone, beside].map(Figures::new);
    Ok(LoadedReads { alone, beside })
}

/// Writes every block as a record of its own, and makes them durable.
fn fill(store: &Store, blocks: u64, writer: u64) -> Result<(), CommandError> {
    let mut queue = QueueClient::open(&store.disks()[0], FILL_DEPTH)?;
    queue.run((0..blocks).map(|block| write_block(writer, block)))
}
