//! etcd, which elects another leader where fsync takes too long: a cluster of three members, each
//! on a disk of its own, alone and beside noisy neighbours.
//!
//! ```text
//!   serve nbd: disks 0 to 5, in the directory or on a capped volume
//!      ▲ 0, 1, 2: nbdfuse, loop, ext4            ▲ 3, 4, 5: the same
//!   three members ◀── etcdctl check perf      fio: random writes and FLUSHes, for each disk
//! ```
//! Not in a guest: user-mode Linux has one emulated processor, on which this cluster makes 14 of
//! the 150 commits a second that it is asked for, whatever the disk.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_guest_images::leash;
use walvisor_storage::StoreOptions;
use walvisor_testkit::http;

use crate::bench::{Side, Turn};
use crate::bench_dirs::{BenchDirs, LOGGED, directory, make_disks};
use crate::daemon::Daemon;
use crate::serve::serve;
use crate::volume::{self, Volume};

/// Programs with their packages, beside those of a volume.
pub const NEEDS: [(&str, &str); 4] = [
    ("etcd", "etcd-server"),
    ("etcdctl", "etcd-client"),
    ("fio", "fio"),
    ("qemu-nbd", "qemu-utils"),
];
const MEMBERS: usize = 3;
const NEIGHBOURS: usize = 3;
const DISK_BYTES: u64 = 256 << 20;
/// The status of timeout(1) for a program that it has ended.
const TIMED_OUT: i32 = 124;
/// Even on the slowest machine a cluster of new members has a leader after this.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The disks of a medium. Dropping it removes them.
pub struct EtcdMedium {
    // The order of the fields matters: the volume is unmounted before its directory is removed.
    capped: Option<Volume>,
    place: BenchDirs,
}

impl EtcdMedium {
    /// Creates disks in `dir`, on a volume there if it is to be `capped`.
    ///
    /// # Errors
    /// If a disk or the volume cannot be made.
    pub fn new(dir: &Path, capped: bool) -> Result<Self, CommandError> {
        let place = BenchDirs::new(dir)?;
        volume::own_mounts()?;
        let (disks, options) = (MEMBERS + NEIGHBOURS, StoreOptions::default());
        let log = u64::from(options.max_segments) * options.segment_size;
        // Raw images, disks, their log, and what the file system takes.
        let bytes = (2 * disks as u64 * DISK_BYTES + log) / 10 * 11;
        let capped = capped.then(|| Volume::capped(place.images(), bytes));
        let capped = capped.transpose()?;
        let medium = Self { capped, place };
        make_disks(&medium.images(), disks, DISK_BYTES, LOGGED, &options)?;
        Ok(medium)
    }

    fn images(&self) -> PathBuf {
        let capped = self.capped.as_ref().map(Volume::disks);
        capped.unwrap_or_else(|| self.place.images().to_owned())
    }

    /// Has etcd check a new cluster on the disks of a side.
    ///
    /// # Errors
    /// If a program fails.
    pub fn measure(&self, side: &Side) -> Result<Turn, CommandError> {
        let used = MEMBERS + side.number("neighbours") as usize;
        let sockets = (0..used).map(|disk| self.place.sockets().join(format!("disk-{disk}")));
        let sockets: Vec<_> = sockets.collect();
        let daemons = serve(side, "nbd", &self.images(), self.place.sockets(), &sockets)?;
        let mut disks = Vec::new();
        for socket in &sockets {
            disks.push(Disk::mount(socket)?);
        }
        // What mkfs and earlier turns have left in a log is not paid for in this one.
        daemons.iter().try_for_each(Daemon::checkpoint)?;
        let (members, neighbours) = disks.split_at(MEMBERS);
        let mut cluster = Cluster::start(members)?;
        let noise = neighbours.iter().map(Disk::write_at_random);
        let mut noise = noise.collect::<Result<Vec<_>, _>>()?;
        let (before, syncs) = (cluster.metrics()?, host_syncs(&daemons)?);
        let check = cluster.check(Duration::from_secs(side.number("seconds")))?;
        let (after, synced) = (cluster.metrics()?, host_syncs(&daemons)?);
        let mut programs = cluster.members.iter_mut().chain(&mut noise);
        programs.try_for_each(Program::check)?;
        drop((noise, cluster));
        drop(disks);
        // A log holds nothing of disks that the next turn does not use.
        daemons.iter().try_for_each(Daemon::checkpoint)?;
        daemons.into_iter().for_each(Daemon::kill);
        let fsyncs = after.fsyncs.since(&before.fsyncs);
        let quantile = |share: f64| fsyncs.quantile(share).map(|seconds| seconds * 1e3);
        Ok(Turn(json!({
            "fsyncs": fsyncs.count(),
            "p50_ms": quantile(0.5),
            "p99_ms": quantile(0.99),
            "p999_ms": quantile(0.999),
            "elections": after.leader_changes - before.leader_changes,
            "puts_per_s": check.puts_per_s,
            "slowest_ms": check.slowest.map(|seconds| seconds * 1e3),
            "syncs": synced.zip(syncs).map(|(after, before)| after - before),
        })))
    }
}

/// Syncs of the host, of all disks of a daemon of walvisor. Without a log each FLUSH is an
/// fdatasync of the image; a log counts the syncs of all its disks.
fn host_syncs(daemons: &[Daemon]) -> Result<Option<u64>, CommandError> {
    let stats = daemons[0].stats()?;
    let Some(disks) = stats["disks"].as_array() else {
        return Ok(None);
    };
    let of_log = disks[0]["log"]["syncs"].as_u64();
    let flushes = disks.iter().filter_map(|disk| disk["flushes"].as_u64());
    Ok(Some(of_log.unwrap_or_else(|| flushes.sum())))
}

/// A program in a process that is killed when this is dropped.
struct Program {
    name: String,
    child: Child,
}

impl Program {
    fn start(command: &mut Command) -> Result<Self, CommandError> {
        let name = command.get_program().display().to_string();
        let child = leash(command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        let child = child
            .map_err(|error| CommandError::Failed(format!("{name} does not start: {error}")))?;
        Ok(Self { name, child })
    }

    /// Fails if it has ended.
    fn check(&mut self) -> Result<(), CommandError> {
        let ended = self.child.try_wait().map_err(CommandError::failed)?;
        ended.map_or(Ok(()), |status| {
            Err(CommandError::Failed(format!(
                "{} ended: {status}",
                self.name
            )))
        })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A disk with a file system that is mounted here.
struct Disk {
    // The order of the fields matters: it is unmounted before its directory is removed.
    volume: Volume,
    _place: TempDir,
}

impl Disk {
    fn mount(socket: &Path) -> Result<Self, CommandError> {
        let place = directory(&std::env::temp_dir())?;
        let server = format!("nbd+unix:///disk?socket={}", socket.display());
        let volume = Volume::mount(place.path(), &server)?;
        Ok(Self {
            volume,
            _place: place,
        })
    }

    fn write_at_random(&self) -> Result<Program, CommandError> {
        let mut fio = Command::new("fio");
        fio.args(["--name=noise", "--filename=noise", "--size=96M"])
            .args([
                "--rw=randwrite",
                "--bs=16k",
                "--ioengine=libaio",
                "--iodepth=16",
            ])
            .args([
                "--direct=1",
                "--fdatasync=8",
                "--time_based",
                "--runtime=1h",
                // A process of its own for the job would outlive the turn.
                "--thread",
            ]);
        Program::start(fio.current_dir(self.volume.disks()))
    }
}

/// Three running members of etcd. Dropping it kills them.
struct Cluster {
    /// The ports for clients.
    clients: Vec<u16>,
    members: Vec<Program>,
}

impl Cluster {
    /// Starts new members, each on a disk, and waits until they have a leader.
    fn start(disks: &[Disk]) -> Result<Self, CommandError> {
        let ports = free_ports(2 * disks.len()).map_err(CommandError::failed)?;
        let (clients, peers) = ports.split_at(disks.len());
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let named = peers.iter().enumerate();
        let named = named.map(|(at, &port)| format!("m{at}={}", url(port)));
        let all = named.collect::<Vec<_>>().join(",");
        let members = disks.iter().enumerate().map(|(at, disk)| {
            let (client, peer) = (url(clients[at]), url(peers[at]));
            let mut etcd = Command::new("etcd");
            etcd.args(["--name", &format!("m{at}"), "--data-dir", "etcd"])
                .args(["--listen-client-urls", &client])
                .args(["--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &peer])
                .args(["--initial-advertise-peer-urls", &peer])
                .args(["--initial-cluster", &all])
                .current_dir(disk.volume.disks());
            Program::start(&mut etcd)
        });
        let mut cluster = Self {
            members: members.collect::<Result<_, _>>()?,
            clients: clients.to_vec(),
        };
        let began = Instant::now();
        while !cluster
            .metrics()
            .is_ok_and(|metrics| metrics.leaders == disks.len())
        {
            cluster.members.iter_mut().try_for_each(Program::check)?;
            if began.elapsed() > START_LIMIT {
                return Err(CommandError::Failed("etcd elects no leader".to_owned()));
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(cluster)
    }

    /// etcd's own benchmark, which takes a minute, for at most as long as this.
    fn check(&self, longest: Duration) -> Result<CheckResult, CommandError> {
        let ports = self.clients.iter();
        let endpoints: Vec<_> = ports.map(|port| format!("127.0.0.1:{port}")).collect();
        let mut etcdctl = Command::new("timeout");
        etcdctl
            .args([&longest.as_secs().to_string(), "etcdctl", "--endpoints"])
            .arg(endpoints.join(","))
            .args(["check", "perf", "--load", "s"])
            .env("ETCDCTL_API", "3");
        let output = leash(&mut etcdctl).output().map_err(CommandError::failed)?;
        let result = CheckResult::parse(&String::from_utf8_lossy(&output.stdout));
        // Its status is that of a disk that is too slow, too, which is a result.
        if result.puts_per_s.is_none() && output.status.code() != Some(TIMED_OUT) {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(CommandError::Failed(format!(
                "etcdctl check perf: {}: {}",
                output.status,
                said.trim()
            )));
        }
        Ok(result)
    }

    fn metrics(&self) -> Result<Metrics, CommandError> {
        let mut sum = Metrics::default();
        for &port in &self.clients {
            let page = get_metrics(port);
            sum.add(
                &page.map_err(|error| CommandError::Failed(format!("etcd's metrics: {error}")))?,
            );
        }
        Ok(sum)
    }
}

/// Ports of this machine that nobody uses.
fn free_ports(count: usize) -> io::Result<Vec<u16>> {
    let listeners = (0..count).map(|_| TcpListener::bind("127.0.0.1:0"));
    let listeners = listeners.collect::<io::Result<Vec<_>>>()?;
    let ports = listeners.iter().map(|listener| listener.local_addr());
    ports.map(|address| Ok(address?.port())).collect()
}

fn get_metrics(port: u16) -> io::Result<String> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(START_LIMIT))?;
    http::get(stream, "/metrics")
}

/// What the check says at its end: nothing if it was cut short.
#[derive(Debug, Default, PartialEq)]
struct CheckResult {
    puts_per_s: Option<f64>,
    /// Seconds of the slowest put.
    slowest: Option<f64>,
}

impl CheckResult {
    /// Reads lines as `PASS: Throughput is 150 writes/s`, `FAIL: Throughput too low: 33 writes/s`
    /// and `Slowest request took too long: 0.6s`.
    fn parse(text: &str) -> Self {
        let mut result = Self::default();
        for line in text.split(['\r', '\n']) {
            let mut numbers = line.split_whitespace();
            let number = numbers.find_map(|word| word.trim_end_matches('s').parse().ok());
            if line.contains("Throughput") {
                result.puts_per_s = number;
            } else if line.contains("Slowest request") {
                result.slowest = number;
            }
        }
        result
    }
}

/// Metrics of all members.
#[derive(Default)]
struct Metrics {
    fsyncs: Histogram,
    /// Changes of the leader that all members together have seen, divided by the members.
    leader_changes: f64,
    /// Members that have a leader.
    leaders: usize,
}

impl Metrics {
    /// Adds those of a member, in Prometheus' text format.
    fn add(&mut self, page: &str) {
        const FSYNC: &str = "etcd_disk_wal_fsync_duration_seconds_bucket{le=\"";
        for line in page.lines() {
            let Some((name, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let Ok(value) = value.parse::<f64>() else {
                continue;
            };
            if let Some(bound) = name.strip_prefix(FSYNC) {
                let bound = bound.trim_end_matches("\"}").trim_start_matches('+');
                if let Ok(bound) = bound.to_lowercase().parse() {
                    self.fsyncs.add(bound, value);
                }
            } else if name == "etcd_server_leader_changes_seen_total" {
                self.leader_changes += value / MEMBERS as f64;
            } else if name == "etcd_server_has_leader" {
                self.leaders += value as usize;
            }
        }
    }
}

/// A histogram as Prometheus has them: how many were at most as long as each bound, in seconds, by
/// rising bounds. The last bound is infinite.
#[derive(Clone, Debug, Default)]
struct Histogram(Vec<(f64, f64)>);

impl Histogram {
    fn add(&mut self, bound: f64, count: f64) {
        match self
            .0
            .binary_search_by(|(known, _)| known.total_cmp(&bound))
        {
            Ok(at) => self.0[at].1 += count,
            Err(at) => self.0.insert(at, (bound, count)),
        }
    }

    /// What came after `before`.
    fn since(mut self, before: &Self) -> Self {
        before
            .0
            .iter()
            .for_each(|&(bound, count)| self.add(bound, -count));
        self
    }

    fn count(&self) -> f64 {
        self.0.last().map_or(0.0, |(_, count)| *count)
    }

    /// As `histogram_quantile` of Prometheus: linear within a bucket. `None` beyond the last bound.
    fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.count();
        let (mut from, mut below) = (0.0, 0.0);
        for &(bound, count) in &self.0 {
            if count >= rank && count > below {
                let part = (rank - below) / (count - below);
                return bound.is_finite().then_some(from + (bound - from) * part);
            }
            (from, below) = (bound, count);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# TYPE etcd_disk_wal_fsync_duration_seconds histogram
etcd_disk_wal_fsync_duration_seconds_bucket{le=\"0.001\"} 50
etcd_disk_wal_fsync_duration_seconds_bucket{le=\"0.002\"} 90
etcd_disk_wal_fsync_duration_seconds_bucket{le=\"0.004\"} 99
etcd_disk_wal_fsync_duration_seconds_bucket{le=\"+Inf\"} 100
etcd_disk_wal_fsync_duration_seconds_sum 9.287207384999968
etcd_server_has_leader 1
etcd_server_leader_changes_seen_total 3
";

    #[test]
    fn quantiles_are_those_of_prometheus() {
        let mut metrics = Metrics::default();
        (0..MEMBERS).for_each(|_| metrics.add(PAGE));
        assert_eq!((metrics.leader_changes, metrics.leaders), (3.0, MEMBERS));
        let fsyncs = &metrics.fsyncs;
        assert_eq!(fsyncs.count(), 300.0);
        assert_eq!(fsyncs.quantile(0.5), Some(0.001));
        assert_eq!(fsyncs.quantile(0.7), Some(0.0015));
        assert_eq!(fsyncs.quantile(0.99), Some(0.004));
        assert_eq!(fsyncs.quantile(0.999), None);
        let none = fsyncs.clone().since(fsyncs);
        assert_eq!((none.count(), none.quantile(0.5)), (0.0, None));
    }

    #[test]
    fn results_of_checks_that_pass_and_that_fail_are_read() {
        let passed = "60 / 60 B  100.00% 1m0s\rPASS: Throughput is 150 writes/s
PASS: Slowest request took 0.016144s\nPASS: Stddev is 0.000637s\nPASS";
        let failed = "FAIL: Throughput too low: 33 writes/s
Slowest request took too long: 0.612000s\nPASS: Stddev is 0.000637s\nFAIL";
        for (text, puts, slowest) in [(passed, 150.0, 0.016144), (failed, 33.0, 0.612)] {
            let expected = CheckResult {
                puts_per_s: Some(puts),
                slowest: Some(slowest),
            };
            assert_eq!(CheckResult::parse(text), expected);
        }
        assert_eq!(CheckResult::parse(" 3 / 60 B"), CheckResult::default());
    }
}
