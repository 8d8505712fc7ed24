//! `walvisor-bench store recover`: the time to open a log after a crash. The crash is a process
//! that ends without closing.

use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::time::Instant;

use clap::Args;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor::commands::threads::Threads;
use walvisor::size::parse_size;
use walvisor_storage::{Buffer, CacheMode, Operation, SECTOR_SIZE, Store, StoreOptions};

use super::client::{QueueClient, StoreClient, write_block};
use super::site::{self, ring};
use super::{VERIFY_EACH, check_bytes, measure};
use crate::bench::{Side, Turn};
use crate::bench_dirs::{directory, failed, open_direct};
use crate::blocks::{BLOCK, damage_error, is_stamped, scattered};
use crate::output::Output;

/// Records between two FLUSHes.
const BURST: u64 = 256;
/// Bytes of each read of the baseline.
const RAW_BYTES: usize = 1 << 20;
/// Number of full segments in which holes are dug at once.
const DUG_TOGETHER: usize = 16;

/// Arguments of `walvisor-bench store recover`.
#[derive(Debug, Args)]
pub struct RecoverArguments {
    /// Bytes of payload in the log, in records of 4 KiB
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    bytes: u64,
    /// Payloads are zeroes, and their space in the log is given back to the file system: for a log
    /// larger than the free space
    #[arg(long)]
    sparse: bool,
    #[command(flatten)]
    output: Output,
}

/// Arguments of the process that fills the log.
#[derive(Debug, Args)]
pub struct FillArguments {
    site: PathBuf,
    bytes: u64,
    #[arg(long)]
    sparse: bool,
}

/// Arguments of the process that opens the log.
#[derive(Debug, Args)]
pub struct OpenArguments {
    site: PathBuf,
    bytes: u64,
    /// Read back what was acknowledged
    #[arg(long)]
    verify: bool,
    /// Print by how many bytes the process has grown, instead of the time
    #[arg(long)]
    memory: bool,
    #[command(flatten)]
    threads: Threads,
}

/// Runs `walvisor-bench store recover`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &RecoverArguments) -> Result<(), CommandError> {
    let (bytes, output) = (arguments.bytes, &arguments.output);
    check_bytes(bytes, BLOCK as u64, "4K")?;
    let directory = directory(&output.dir)?;
    let site = directory.path();
    site::create(site, 1, bytes, &ring(2 * bytes))?;
    let sparse: &[&str] = if arguments.sparse { &["--sparse"] } else { &[] };
    let log_bytes = child(site, "fill", bytes, sparse)? as u64;
    // The zeroes of a sparse log are not checked, and it is not read from the medium.
    if !arguments.sparse {
        child(site, "open", bytes, &["--verify"])?;
    }
    let mut turn = |side: &Side| {
        if side.side == "raw" {
            let us = read_raw(&site::log(site), log_bytes)?;
            return Ok(Turn(json!({ "ms": us / 1000.0, "log_bytes": log_bytes })));
        }
        let ms = child(site, "open", bytes, &[])? / 1000.0;
        let memory = child(site, "open", bytes, &["--memory"])?;
        Ok(Turn(json!({
            "ms": ms,
            "log_bytes": log_bytes,
            "memory_bytes_per_record": memory / (bytes / BLOCK as u64) as f64,
        })))
    };
    let given = json!({ "bytes": bytes, "sparse": arguments.sparse });
    measure("recover", given, output, &mut turn)
}

/// Runs a process that leaves the log unclosed, and returns the number that it prints.
///
/// # Errors
/// If the process fails; the error contains its output.
pub fn child(site: &Path, action: &str, bytes: u64, more: &[&str]) -> Result<f64, CommandError> {
    let myself = std::env::current_exe().map_err(CommandError::failed)?;
    let output = Command::new(myself)
        .args(["store", action])
        .arg(site)
        .arg(bytes.to_string())
        .args(more)
        .output()
        .map_err(CommandError::failed)?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.trim().parse() {
        Ok(number) if output.status.success() => Ok(number),
        _ => {
            let error = String::from_utf8_lossy(&output.stderr);
            let error = error.trim().trim_start_matches("walvisor-bench: ");
            Err(CommandError::Failed(format!("store {action}: {error}")))
        }
    }
}

/// Fills the log, prints its size in bytes, and ends without closing it, like a crash.
///
/// # Errors
/// If the store fails.
pub fn fill(arguments: &FillArguments) -> Result<(), CommandError> {
    let store = open_store(&arguments.site, arguments.bytes, None)?;
    let blocks = arguments.bytes / BLOCK as u64;
    let mut holes = HolePuncher {
        segment_size: ring(2 * arguments.bytes).segment_size,
        dug: 0,
    };
    let mut queue = QueueClient::open(&store.disks()[0], BURST as usize)?;
    for first in (0..blocks).step_by(BURST as usize) {
        queue.run((first..blocks.min(first + BURST)).map(|record| {
            let block = scattered(record, blocks);
            if arguments.sparse {
                Operation::Write {
                    sector: block * BLOCK as u64 / SECTOR_SIZE,
                    data: Buffer::zeroed(BLOCK),
                }
            } else {
                write_block(1, block)
            }
        }))?;
        if arguments.sparse {
            holes.dig(&site::log(&arguments.site), store.log_counters().log_bytes)?;
        }
    }
    println!("{}", store.log_counters().log_bytes);
    exit(0)
}

/// Opens the log, prints the time in microseconds, and ends without closing it, like a crash.
///
/// # Errors
/// If the store fails, or an acknowledged write does not read back.
pub fn open(arguments: &OpenArguments) -> Result<(), CommandError> {
    let before = resident_bytes()?;
    let began = Instant::now();
    let store = open_store(&arguments.site, arguments.bytes, arguments.threads.get())?;
    let time = began.elapsed();
    if arguments.memory {
        println!("{}", resident_bytes()?.saturating_sub(before));
        exit(0);
    }
    if arguments.verify {
        let mut client = StoreClient::open(&store.disks()[0])?;
        for block in (0..arguments.bytes / BLOCK as u64).step_by(VERIFY_EACH) {
            if !is_stamped(&client.read(block * BLOCK as u64 / SECTOR_SIZE)?, 1, block) {
                return Err(damage_error("the recovered disk", block));
            }
        }
    }
    println!("{}", time.as_micros());
    exit(0)
}

fn open_store(
    site: &Path,
    bytes: u64,
    threads: Option<NonZeroUsize>,
) -> Result<Store, CommandError> {
    let options = StoreOptions {
        threads,
        ..ring(2 * bytes)
    };
    site::open(site, 1, CacheMode::Writeback, &options)
}

/// Bytes of memory that this process uses.
fn resident_bytes() -> Result<u64, CommandError> {
    let path = Path::new("/proc/self/statm");
    let text = std::fs::read_to_string(path).map_err(failed("read", path))?;
    let pages = text.split_whitespace().nth(1).and_then(|n| n.parse().ok());
    let pages: u64 = pages.ok_or_else(|| CommandError::Failed(format!("{text}: not a size")))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Gives the zeroes in full segments back to the file system.
struct HolePuncher {
    segment_size: u64,
    /// Segments in which holes were dug.
    dug: usize,
}

impl HolePuncher {
    /// `written`: bytes of the log so far.
    fn dig(&mut self, log: &Path, written: u64) -> Result<(), CommandError> {
        let full = written / self.segment_size;
        if full < (self.dug + 2 * DUG_TOGETHER) as u64 {
            return Ok(());
        }
        let segments = segments(log)?;
        let next = segments.iter().skip(self.dug).take(DUG_TOGETHER);
        for segment in next {
            let mut dig = Command::new("fallocate");
            let dug = dig.arg("--dig-holes").arg(segment).status();
            let dug = dug.map_err(failed("dig holes with fallocate in", segment))?;
            if !dug.success() {
                return Err(CommandError::Failed(format!(
                    "{}: fallocate --dig-holes failed: take a file system that has holes",
                    segment.display()
                )));
            }
        }
        self.dug += DUG_TOGETHER;
        Ok(())
    }
}

/// The segment files of a log, in order.
fn segments(log: &Path) -> Result<Vec<PathBuf>, CommandError> {
    let entries = std::fs::read_dir(log).map_err(failed("list", log))?;
    let mut segments = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed("list", log))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("segment-") && path.extension().is_none() {
            segments.push(path);
        }
    }
    segments.sort();
    Ok(segments)
}

/// Reads `bytes` of the log's segment files in order. Returns the time in microseconds.
fn read_raw(log: &Path, bytes: u64) -> Result<f64, CommandError> {
    let segments = segments(log)?;
    let mut buffer = Buffer::zeroed(RAW_BYTES);
    let (mut left, began) = (bytes, Instant::now());
    for path in segments {
        let file = open_direct(&path)?;
        let len = file.metadata().map_err(failed("read", &path))?.len();
        for at in (0..len).step_by(RAW_BYTES) {
            if left == 0 {
                break;
            }
            let part = (len - at).min(RAW_BYTES as u64) as usize;
            file.read_exact_at(&mut buffer[..part], at)
                .map_err(failed("read", &path))?;
            left = left.saturating_sub(part as u64);
        }
    }
    Ok(began.elapsed().as_secs_f64() * 1e6)
}
