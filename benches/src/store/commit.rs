//! `walvisor-bench store commit`: the cost of a FLUSH when several clients flush at the same time.

use std::fs::File;
use std::num::NonZeroU32;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor_storage::{
    Buffer, CacheMode, CommitWait, GROUP_SIZE_CLASSES, Operation, Pace, SECTOR_SIZE, Store,
    StoreOptions,
};

use super::STORE;
use super::client::StoreClient;
use super::site::{self, ring};
use super::timing::{Timing, closed_loops};
use crate::bench::{Bench, Turn, settings};
use crate::bench_dirs::{self, directory, failed, make_raw};
use crate::blocks::{BLOCK, stamp, stamped_block};
use crate::output::Output;

/// Blocks that each client overwrites in turn.
const CLIENT_BLOCKS: u64 = 256;

/// Arguments of `walvisor-bench store commit`.
#[derive(Debug, Args)]
pub struct StoreCommitArguments {
    #[command(flatten)]
    plan: CommitPlan,
    /// Commits of all clients together [default: 100 for each client, at least 1000]
    #[arg(long, value_name = "M")]
    commits: Option<u64>,
    /// Without the raw file
    #[arg(long, hide = true)]
    no_baseline: bool,
    #[command(flatten)]
    output: Output,
}

/// What a side does in a turn.
#[derive(Args, Clone, Debug, Deserialize, Serialize)]
pub struct CommitPlan {
    /// Number of clients, each with a thread
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,
    /// Time added to each sync, in microseconds
    #[arg(long, value_name = "L", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    #[serde(default)]
    sync_latency_us: u32,
    /// Limit of writes and syncs per second, as small cloud volumes have [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    operations_per_second: Option<u32>,
    /// Time added to each write and sync, in microseconds
    #[arg(long, value_name = "L", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    #[serde(default)]
    operation_latency_us: u32,
    /// Group commit; off: one sync for each FLUSH
    #[arg(long, value_enum, default_value_t = Switch::On)]
    #[serde(default)]
    group: Switch,
    /// One write to the log for each waiting client, and one sync for all; shows what one write for
    /// the group saves
    #[arg(long)]
    #[serde(default)]
    write_per_waiter: bool,
    /// Longest time that a group waits for more to join it, in microseconds; 0 for none [default:
    /// adaptive]
    #[arg(long, value_name = "U", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    commit_wait_usec: Option<u32>,
    /// A group starts as soon as this many wait [default: as many as were served last, or came
    /// meanwhile]
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    commit_wait_count: Option<u32>,
    /// writethrough: each write is durable when it completes, and a commit has no FLUSH
    #[arg(long, value_enum, default_value_t = Mode::Writeback)]
    #[serde(default)]
    mode: Mode,
    /// Number of disks on one log, over which the clients are spread
    #[arg(long, value_name = "D", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    #[serde(default = "one")]
    disks: u16,
    /// Number of logs, of which `disks` is a multiple.
    #[arg(skip = 1u16)]
    #[serde(default = "one")]
    logs: u16,
    /// Commits of all clients together.
    #[arg(skip)]
    commits: u64,
    /// Whether it is the baseline: each client writes to a raw file and syncs it.
    #[arg(skip)]
    #[serde(default)]
    raw: bool,
}

fn one() -> u16 {
    1
}

/// Off or on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// Off.
    Off,
    /// On.
    #[default]
    On,
}

/// What a commit is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// A WRITE and a FLUSH.
    #[default]
    Writeback,
    /// A WRITE.
    Writethrough,
}

/// Runs `walvisor-bench store commit`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &StoreCommitArguments) -> Result<(), CommandError> {
    let (plan, output) = (&arguments.plan, &arguments.output);
    let clients = u64::from(plan.clients);
    let commits = arguments.commits.unwrap_or((100 * clients).max(1000));
    if !(clients..=100_000_000).contains(&commits) {
        return Err(CommandError::Usage(format!(
            "--commits {commits}: give at least one for each of the {clients} clients, at most \
             100000000"
        )));
    }
    if plan.disks > plan.clients {
        return Err(CommandError::Usage(format!(
            "--disks {}: {clients} clients can't use more disks than there are clients; give more \
             --clients",
            plan.disks
        )));
    }
    let only = ["commit".to_owned()];
    let mut bench = Bench::new(STORE, output, &only, &settings(json!(plan)));
    if arguments.no_baseline {
        bench.matrices[0].keep_sides(&["log".to_owned()]);
    }
    let matrix = &mut bench.matrices[0];
    // The rounds share the commits, and each client makes at least one in each.
    matrix.spec.rounds = matrix.spec.rounds.min((commits / clients) as usize);
    let each = commits.div_ceil(matrix.spec.rounds as u64);
    for side in matrix.sides_mut() {
        side.plan.insert("commits".to_owned(), each.into());
    }
    let session = bench.start()?;
    let run = bench.matrices[0].measure(&session, |side| measure(&side.plan(), &output.dir));
    bench.finish(session, run)
}

impl CommitPlan {
    fn pace(&self) -> Pace {
        let most = self.operations_per_second.and_then(NonZeroU32::new);
        Pace::new(
            most,
            Duration::from_micros(self.operation_latency_us.into()),
        )
    }

    fn sync_latency(&self) -> Duration {
        Duration::from_micros(self.sync_latency_us.into())
    }

    fn options(&self) -> StoreOptions {
        let wait = self.commit_wait_usec;
        StoreOptions {
            group_commit: self.group == Switch::On,
            commit_wait: CommitWait {
                longest: wait.map(|wait| Duration::from_micros(wait.into())),
                count: self.commit_wait_count,
            },
            write_per_waiter: self.write_per_waiter,
            sync_latency: self.sync_latency(),
            operations_per_second: self.operations_per_second.and_then(NonZeroU32::new),
            operation_latency: Duration::from_micros(self.operation_latency_us.into()),
            ..ring(0)
        }
    }
}

/// Does a turn in a temporary directory in `dir`.
///
/// # Errors
/// If the medium fails, or an acknowledged write does not read back.
pub fn measure(plan: &CommitPlan, dir: &Path) -> Result<Turn, CommandError> {
    if plan.raw {
        measure_raw(plan, dir)
    } else {
        measure_log(plan, dir)
    }
}

/// A client of the store, with blocks of its own on one of the disks.
struct Committer {
    /// Dropped when its thread has no more to do. A port can be the leader of all groups, so a
    /// client that stops polling its port must drop it, which passes leadership on.
    client: Option<StoreClient>,
    writer: u64,
    log: usize,
    /// Number of the disk among those of the log.
    disk: usize,
    first_block: u64,
    flushes: bool,
    committed: u64,
}

impl Committer {
    fn commit(&mut self) -> Result<Duration, CommandError> {
        let block = self.first_block + self.committed % CLIENT_BLOCKS;
        let sector = block * BLOCK as u64 / SECTOR_SIZE;
        let data = stamped_block(BLOCK, self.writer, self.committed);
        let began = Instant::now();
        let client = self.client.as_mut().expect("there until it leaves");
        client.run(Operation::Write { sector, data })?;
        if self.flushes {
            client.run(Operation::Flush)?;
        }
        self.committed += 1;
        Ok(began.elapsed())
    }
}

fn measure_log(plan: &CommitPlan, dir: &Path) -> Result<Turn, CommandError> {
    let clients = u64::from(plan.clients);
    let (disks, logs) = (usize::from(plan.disks), usize::from(plan.logs));
    let options = plan.options();
    let bytes = clients.div_ceil(disks as u64) * CLIENT_BLOCKS * BLOCK as u64;
    let cache = match plan.mode {
        Mode::Writeback => CacheMode::Writeback,
        Mode::Writethrough => CacheMode::Writethrough,
    };
    let (mut sites, mut stores) = (Vec::new(), Vec::new());
    for _ in 0..logs {
        let site = directory(dir)?;
        site::create(site.path(), disks / logs, bytes, &options)?;
        stores.push(site::open(site.path(), disks / logs, cache, &options)?);
        sites.push(site);
    }
    let committer = |writer: u64| {
        let log = writer as usize % logs;
        let disk = writer as usize / logs % (disks / logs);
        Ok(Committer {
            client: Some(StoreClient::open(&stores[log].disks()[disk])?),
            writer,
            log,
            disk,
            first_block: writer / disks as u64 * CLIENT_BLOCKS,
            flushes: plan.mode == Mode::Writeback,
            committed: 0,
        })
    };
    let committers = (0..clients).map(committer);
    let mut committers = committers.collect::<Result<Vec<_>, CommandError>>()?;
    let before = counts(&stores);
    let leave = |committer: &mut Committer| committer.client = None;
    let timing = closed_loops(&mut committers, plan.commits, Committer::commit, leave)?;
    let after = counts(&stores);
    for store in stores {
        store.close().map_err(CommandError::failed)?;
    }
    for committer in &committers {
        verify(sites[committer.log].path(), committer)?;
    }
    let counts: Vec<u64> = after
        .iter()
        .zip(before)
        .map(|(after, before)| after - before)
        .collect();
    let mut figures = figures(plan, timing, counts[0], counts[1]);
    figures["group_sizes"] = json!(counts[2..]);
    Ok(Turn(figures))
}

/// The sums of the logs' counters: writes, syncs, and the groups of each size.
fn counts(stores: &[Store]) -> Vec<u64> {
    let mut sum = vec![0; 2 + GROUP_SIZE_CLASSES];
    for counters in stores.iter().map(Store::log_counters) {
        let counts = [counters.writes, counters.syncs].into_iter();
        for (sum, count) in sum.iter_mut().zip(counts.chain(counters.group_sizes)) {
            *sum += count;
        }
    }
    sum
}

/// The figures of a turn.
fn figures(plan: &CommitPlan, mut timing: Timing, writes: u64, syncs: u64) -> Value {
    let each = |count: u64| count as f64 / plan.commits as f64;
    let mut figures = timing.figures("commits_per_s");
    figures["commits"] = json!(plan.commits);
    figures["writes"] = json!(writes);
    figures["writes_per_commit"] = json!(each(writes));
    figures["syncs"] = json!(syncs);
    figures["syncs_per_commit"] = json!(each(syncs));
    figures["operations_per_commit"] = json!(each(writes + syncs));
    figures
}

/// Checks the last write of a client to each of its blocks in the images, which are plain files
/// after the close.
fn verify(site: &Path, committer: &Committer) -> Result<(), CommandError> {
    let path = site::image(site, committer.disk);
    let last = committer.committed.saturating_sub(CLIENT_BLOCKS)..committer.committed;
    let blocks = last.map(|number| (committer.first_block + number % CLIENT_BLOCKS, number));
    bench_dirs::verify(&path, BLOCK, committer.writer, blocks)
}

/// A thread of the baseline, with blocks of its own in the file.
struct RawCommitter<'a> {
    file: &'a File,
    path: &'a Path,
    block: Buffer,
    writer: u64,
    sync_latency: Duration,
    pace: &'a Pace,
    committed: u64,
}

impl RawCommitter<'_> {
    fn commit(&mut self) -> Result<Duration, CommandError> {
        let at = self.writer * CLIENT_BLOCKS + self.committed % CLIENT_BLOCKS;
        stamp(&mut self.block, self.writer, self.committed);
        let began = Instant::now();
        self.pace.charge(BLOCK, 0);
        let written = self.file.write_all_at(&self.block, at * BLOCK as u64);
        written.map_err(failed("write", self.path))?;
        self.pace.charge(0, 1);
        let synced = self.file.sync_data();
        synced.map_err(failed("sync", self.path))?;
        if !self.sync_latency.is_zero() {
            std::thread::sleep(self.sync_latency);
        }
        self.committed += 1;
        Ok(began.elapsed())
    }
}

fn measure_raw(plan: &CommitPlan, dir: &Path) -> Result<Turn, CommandError> {
    let (clients, pace) = (u64::from(plan.clients), plan.pace());
    let site = directory(dir)?;
    let path = site.path().join("raw");
    let file = make_raw(&path, clients * CLIENT_BLOCKS * BLOCK as u64, BLOCK)?;
    let committer = |writer| RawCommitter {
        file: &file,
        path: &path,
        block: Buffer::zeroed(BLOCK),
        writer,
        sync_latency: plan.sync_latency(),
        pace: &pace,
        committed: 0,
    };
    let mut committers: Vec<_> = (0..clients).map(committer).collect();
    let timing = closed_loops(&mut committers, plan.commits, RawCommitter::commit, |_| ())?;
    Ok(Turn(figures(plan, timing, plan.commits, plan.commits)))
}
