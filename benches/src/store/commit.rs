//! `walvisor-bench store commit`: the cost of a FLUSH when several clients flush at the same time.

use std::fs::File;
use std::num::NonZeroU32;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor_storage::{
    Buffer, CacheMode, CommitWait, GROUP_SIZE_CLASSES, Operation, Pace, SECTOR_SIZE, Store,
    StoreOptions,
};

use super::client::StoreClient;
use super::output::{StoreOutput, StoreReport, tenths, thousandths};
use super::site::{self, ring};
use super::timing::{Timing, closed_loops, shares};
use crate::blocks::{BLOCK, stamp, stamped_block};
use crate::matrix::Turn;
use crate::place::{self, directory, failed, make_raw};
use crate::report::Cell;

/// Blocks that each client overwrites in turn.
const CLIENT_BLOCKS: u64 = 256;
/// Number of turns of store and baseline.
const ROUNDS: u64 = 4;

/// Arguments of `walvisor-bench store commit`.
#[derive(Debug, Args)]
pub struct StoreCommitArguments {
    /// Number of clients, each with a thread
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,
    /// Time added to each sync, in microseconds
    #[arg(long, value_name = "L", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    sync_latency_us: u32,
    #[command(flatten)]
    pace: PaceArguments,
    /// Commits of all clients together [default: 100 for each client, at least 1000]
    #[arg(long, value_name = "M")]
    commits: Option<u64>,
    /// Group commit; off: one sync for each FLUSH
    #[arg(long, value_enum, default_value_t = Switch::On)]
    group: Switch,
    /// One write to the log for each waiting client, and one sync for all; shows what one write for the group saves
    #[arg(long)]
    write_per_waiter: bool,
    #[command(flatten)]
    wait: WaitArguments,
    /// writethrough: each write is durable when it completes, and a commit has no FLUSH
    #[arg(long, value_enum, default_value_t = Mode::Writeback)]
    mode: Mode,
    /// Number of disks on one log, over which the clients are spread
    #[arg(long, value_name = "D", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    disks: u16,
    /// Without the raw file
    #[arg(long, hide = true)]
    no_baseline: bool,
    #[command(flatten)]
    output: StoreOutput,
}

/// A medium slower than the one there is.
#[derive(Args, Clone, Copy, Debug)]
pub struct PaceArguments {
    /// Limit of writes and syncs per second, as small cloud volumes have [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    operations_per_second: Option<u32>,
    /// Time added to each write and sync, in microseconds
    #[arg(long, value_name = "L", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    operation_latency_us: u32,
}

/// How long a group waits for more to join it.
#[derive(Args, Clone, Copy, Debug)]
pub struct WaitArguments {
    /// Longest time that a group waits for more to join it, in microseconds; 0 for none [default: adaptive]
    #[arg(long, value_name = "U", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    commit_wait_usec: Option<u32>,
    /// A group starts as soon as this many wait [default: as many as were served last, or came meanwhile]
    #[arg(long, value_name = "C", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    commit_wait_count: Option<u32>,
}

impl From<WaitArguments> for CommitWait {
    fn from(arguments: WaitArguments) -> Self {
        Self {
            longest: arguments
                .commit_wait_usec
                .map(|wait| Duration::from_micros(wait.into())),
            count: arguments.commit_wait_count,
        }
    }
}

/// Off or on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// Off.
    Off,
    /// On.
    On,
}

/// What a commit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// A WRITE and a FLUSH.
    Writeback,
    /// A WRITE.
    Writethrough,
}

/// The simulated properties of the medium, for the store and the baseline.
#[derive(Clone, Copy, Debug, Default)]
pub struct MediumModel {
    /// Time added to each sync.
    pub sync_latency: Duration,
    /// The most writes and syncs per second; `None` for no limit.
    pub operations_per_second: Option<NonZeroU32>,
    /// Time added to each write and each sync.
    pub operation_latency: Duration,
}

/// The parameters of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct CommitPlan {
    /// Number of clients.
    pub clients: u16,
    /// The medium.
    pub medium: MediumModel,
    /// Commits of all clients together.
    pub commits: u64,
    /// Whether group commit is on.
    pub group: Switch,
    /// Whether a group makes one write for each of its waiters.
    pub write_per_waiter: bool,
    /// The longest wait of a group.
    pub wait: CommitWait,
    /// The operations of a commit.
    pub mode: Mode,
    /// Number of disks on all logs together: a multiple of `logs`.
    pub disks: u16,
    /// Number of logs.
    pub logs: u16,
    /// Whether the baseline, a raw file, is measured too.
    pub baseline: bool,
}

impl CommitPlan {
    /// Estimated time to measure it.
    pub fn expected(&self) -> Duration {
        let (clients, commits, medium) =
            (f64::from(self.clients), self.commits as f64, self.medium);
        let served = match self.group {
            Switch::Off => 1.0,
            Switch::On => (clients / 2.0).max(1.0),
        };
        // The time of one group: its own sync, and the operations that it waits for.
        let own = medium.sync_latency + 2 * medium.operation_latency + Duration::from_micros(300);
        let writes = if self.write_per_waiter { served } else { 1.0 };
        let limit = medium.operations_per_second;
        let paced = limit.map_or(0.0, |most| 1.0 / f64::from(most.get()));
        let log = own.as_secs_f64().max(paced * (writes + 1.0)) * commits / served;
        let raw = if self.baseline {
            paced * 2.0 * commits
        } else {
            0.0
        };
        Duration::from_secs_f64(0.4 + log + raw)
    }
}

/// Runs `walvisor-bench store commit`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &StoreCommitArguments) -> Result<(), CommandError> {
    let clients = u64::from(arguments.clients);
    let commits = arguments.commits.unwrap_or((100 * clients).max(1000));
    if !(clients..=100_000_000).contains(&commits) {
        return Err(CommandError::Usage(format!(
            "--commits {commits}: give at least one for each of the {clients} clients, at most 100000000"
        )));
    }
    if arguments.disks > arguments.clients {
        return Err(CommandError::Usage(format!(
            "--disks {}: {clients} clients can't use more disks than there are clients; give more --clients",
            arguments.disks
        )));
    }
    let plan = CommitPlan {
        clients: arguments.clients,
        medium: MediumModel {
            sync_latency: Duration::from_micros(arguments.sync_latency_us.into()),
            operations_per_second: arguments
                .pace
                .operations_per_second
                .and_then(NonZeroU32::new),
            operation_latency: Duration::from_micros(arguments.pace.operation_latency_us.into()),
        },
        commits,
        group: arguments.group,
        write_per_waiter: arguments.write_per_waiter,
        wait: arguments.wait.into(),
        mode: arguments.mode,
        disks: arguments.disks,
        logs: 1,
        baseline: !arguments.no_baseline,
    };
    let turn = measure(&plan, &arguments.output.dir)?;
    arguments.output.print(report(&plan, turn))
}

/// The figures for people.
fn report(plan: &CommitPlan, turn: Turn) -> StoreReport {
    let medium = plan.medium;
    let mode = match plan.mode {
        Mode::Writeback => "write and FLUSH",
        Mode::Writethrough => "write, durable when it completes",
    };
    let group = match (plan.group, plan.write_per_waiter) {
        (Switch::Off, _) => "off",
        (Switch::On, false) => "on",
        (Switch::On, true) => "on, a write per waiter",
    };
    let mut head = format!(
        "{} clients on {} disk{} of one log; a commit is a 4 KiB {mode}; group commit {group}; {} us added to each sync",
        plan.clients,
        plan.disks,
        if plan.disks == 1 { "" } else { "s" },
        medium.sync_latency.as_micros()
    );
    if !medium.operation_latency.is_zero() {
        let latency = medium.operation_latency.as_micros();
        head += &format!("; {latency} us to each write and sync");
    }
    if let Some(most) = medium.operations_per_second {
        head += &format!("; at most {most} writes and syncs a second");
    }
    let number = |key: &str, decimals| {
        let value = turn.get(key);
        value.map_or(Cell::None, |value| Cell::Number(value, decimals))
    };
    let mut groups = "groups that served".to_owned();
    for (class, count) in turn.list("group_sizes").into_iter().enumerate() {
        let to = 1u64 << class;
        let from = to / 2 + 1;
        match (count, class + 1 == GROUP_SIZE_CLASSES) {
            (0.0, _) => {}
            (_, true) => groups += &format!("  {from} and more: {count}"),
            _ if from == to => groups += &format!("  {to}: {count}"),
            _ => groups += &format!("  {from}-{to}: {count}"),
        }
    }
    let log = vec![
        Cell::text("log"),
        number("commits_per_s", 1),
        number("p50_us", 1),
        number("p99_us", 1),
        number("syncs", 0),
        number("syncs_per_commit", 3),
        number("writes_per_commit", 3),
    ];
    let raw = vec![
        Cell::text("raw file"),
        number("raw_commits_per_s", 1),
        number("raw_p50_us", 1),
        number("raw_p99_us", 1),
        number("commits", 0),
        Cell::Number(1.0, 3),
        Cell::Number(1.0, 3),
    ];
    let mut ratio = vec![Cell::text("ratio"), number("ratio", 3)];
    ratio.resize(log.len(), Cell::None);
    let columns = &[
        "",
        "commits/s",
        "p50 us",
        "p99 us",
        "syncs",
        "syncs/commit",
        "writes/commit",
    ];
    StoreReport {
        json: turn.0,
        head,
        columns,
        rows: vec![log, raw, ratio],
        notes: vec![groups],
    }
}

/// A client of the store, with blocks of its own on one of the disks.
struct Committer {
    /// Present during a round. A port can be the leader of all groups, so a client that stops polling its port must drop it,
    /// which passes leadership on.
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
        let client = self.client.as_mut().expect("opened for the round");
        client.run(Operation::Write { sector, data })?;
        if self.flushes {
            client.run(Operation::Flush)?;
        }
        self.committed += 1;
        Ok(began.elapsed())
    }
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

/// Measures store and baseline in turns, in a temporary directory in `dir`.
///
/// # Errors
/// If the medium fails, or an acknowledged write does not read back.
pub fn measure(plan: &CommitPlan, dir: &Path) -> Result<Turn, CommandError> {
    let medium = plan.medium;
    let pace = Pace::new(medium.operations_per_second, medium.operation_latency);
    let (clients, disks, logs) = (
        u64::from(plan.clients),
        usize::from(plan.disks),
        usize::from(plan.logs),
    );
    let options = StoreOptions {
        group_commit: plan.group == Switch::On,
        commit_wait: plan.wait,
        write_per_waiter: plan.write_per_waiter,
        sync_latency: medium.sync_latency,
        operations_per_second: medium.operations_per_second,
        operation_latency: medium.operation_latency,
        ..ring(0)
    };
    let disk_blocks = clients.div_ceil(disks as u64) * CLIENT_BLOCKS;
    let cache = match plan.mode {
        Mode::Writeback => CacheMode::Writeback,
        Mode::Writethrough => CacheMode::Writethrough,
    };
    let (mut sites, mut stores) = (Vec::new(), Vec::new());
    for _ in 0..logs {
        let site = directory(dir)?;
        site::create(
            site.path(),
            disks / logs,
            disk_blocks * BLOCK as u64,
            &options,
        )?;
        stores.push(site::open(site.path(), disks / logs, cache, &options)?);
        sites.push(site);
    }
    let raw_path = sites[0].path().join("raw");
    let raw_blocks = if plan.baseline {
        clients * CLIENT_BLOCKS
    } else {
        0
    };
    let raw_file = make_raw(&raw_path, raw_blocks * BLOCK as u64, BLOCK)?;
    let mut committers = (0..clients)
        .map(|writer| Committer {
            client: None,
            writer,
            log: writer as usize % logs,
            disk: writer as usize / logs % (disks / logs),
            first_block: writer / disks as u64 * CLIENT_BLOCKS,
            flushes: plan.mode == Mode::Writeback,
            committed: 0,
        })
        .collect::<Vec<_>>();
    let mut raw_committers: Vec<_> = (0..clients)
        .map(|writer| RawCommitter {
            file: &raw_file,
            path: &raw_path,
            block: Buffer::zeroed(BLOCK),
            writer,
            sync_latency: medium.sync_latency,
            pace: &pace,
            committed: 0,
        })
        .collect();
    let count = || LogCounts::of(&stores);
    let before = count();
    let (mut logged, mut raw) = (Timing::default(), Timing::default());
    for share in shares(plan.commits, ROUNDS.min(plan.commits / clients)) {
        if plan.baseline {
            let ended = closed_loops(&mut raw_committers, share, RawCommitter::commit, |_| ())?;
            raw.add(ended);
        }
        for committer in &mut committers {
            let disk = &stores[committer.log].disks()[committer.disk];
            committer.client = Some(StoreClient::open(disk)?);
        }
        let leave = |committer: &mut Committer| committer.client = None;
        let ended = closed_loops(&mut committers, share, Committer::commit, leave)?;
        logged.add(ended);
    }
    let counters = count();
    for store in stores {
        store.close().map_err(CommandError::failed)?;
    }
    for committer in &committers {
        verify(sites[committer.log].path(), committer)?;
    }
    let (writes, syncs) = (
        counters.writes - before.writes,
        counters.syncs - before.syncs,
    );
    let each = |count: u64| count as f64 / plan.commits as f64;
    let groups = (0..GROUP_SIZE_CLASSES).map(|i| counters.group_sizes[i] - before.group_sizes[i]);
    // Times are in microseconds; the keys with `raw_` are of the baseline, which syncs once per commit.
    Ok(Turn(json!({
        "clients": plan.clients,
        "disks": plan.disks,
        "mode": plan.mode,
        "group": plan.group,
        "write_per_waiter": plan.write_per_waiter,
        "commit_wait_us": plan.wait.longest.map(|wait| wait.as_micros() as u64),
        "commit_wait_count": plan.wait.count,
        "sync_latency_us": medium.sync_latency.as_micros() as u64,
        "operations_per_second": medium.operations_per_second,
        "operation_latency_us": medium.operation_latency.as_micros() as u64,
        "commits": plan.commits,
        "writes": writes,
        "writes_per_commit": thousandths(each(writes)),
        "syncs": syncs,
        "syncs_per_commit": thousandths(each(syncs)),
        "operations_per_commit": thousandths(each(writes + syncs)),
        "commits_per_s": tenths(logged.rate()),
        "p50_us": tenths(logged.percentile_us(0.5)),
        "p99_us": tenths(logged.percentile_us(0.99)),
        "group_sizes": groups.collect::<Vec<_>>(),
        "raw_commits_per_s": tenths(raw.rate()),
        "raw_p50_us": tenths(raw.percentile_us(0.5)),
        "raw_p99_us": tenths(raw.percentile_us(0.99)),
        "ratio": if plan.baseline { thousandths(logged.rate() / raw.rate()) } else { 0.0 },
    })))
}

/// The sums of the logs' counters.
struct LogCounts {
    writes: u64,
    syncs: u64,
    group_sizes: [u64; GROUP_SIZE_CLASSES],
}

impl LogCounts {
    fn of(stores: &[Store]) -> Self {
        let mut sum = Self {
            writes: 0,
            syncs: 0,
            group_sizes: [0; GROUP_SIZE_CLASSES],
        };
        for counters in stores.iter().map(Store::log_counters) {
            sum.writes += counters.writes;
            sum.syncs += counters.syncs;
            for (sum, count) in sum.group_sizes.iter_mut().zip(counters.group_sizes) {
                *sum += count;
            }
        }
        sum
    }
}

/// Checks the last write of a client to each of its blocks in the images, which are plain files after the close.
fn verify(site: &Path, committer: &Committer) -> Result<(), CommandError> {
    let path = site::image(site, committer.disk);
    let last = committer.committed.saturating_sub(CLIENT_BLOCKS)..committer.committed;
    let blocks = last.map(|number| (committer.first_block + number % CLIENT_BLOCKS, number));
    place::verify(&path, BLOCK, committer.writer, blocks)
}
