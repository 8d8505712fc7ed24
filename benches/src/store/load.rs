//! `walvisor-bench store load`: import, export, check and recovery with one thread, and with one per processor.

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor::commands::threads::Threads;
use walvisor::size::parse_size;
use walvisor_storage::{StoreOptions, export_disk, import_disk, inspect_with_progress};

use super::output::{StoreOutput, StoreReport, check_bytes, median, tenths, thousandths};
use super::recover::child;
use super::site::{self, log, ring};
use crate::blocks::BLOCK;
use crate::place::{self, directory, failed, make_raw};
use crate::report::Cell;

/// Number of turns of one thread and all threads.
const ROUNDS: usize = 3;
/// One in this many blocks is verified.
const VERIFY_EACH: usize = 61;

/// Arguments of `walvisor-bench store load`.
#[derive(Debug, Args)]
pub struct LoadArguments {
    /// Bytes of the image, and of payload in the log, in records of 4 KiB
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    bytes: u64,
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    output: StoreOutput,
}

/// Runs `walvisor-bench store load`. Each rate is the median of the rounds.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &LoadArguments) -> Result<(), CommandError> {
    let bytes = arguments.bytes;
    check_bytes(bytes, 1 << 20, "1M")?;
    let all = arguments
        .threads
        .get()
        .map_or_else(std::thread::available_parallelism, Ok)
        .map_err(CommandError::failed)?;
    let directory = directory(&arguments.output.dir)?;
    let site = directory.path();
    let (image, disk) = (site.join("raw"), site.join("loaded.img"));
    make_raw(&image, bytes, BLOCK)?;
    let imported = measure_both(all, bytes, |threads| import(&image, &disk, threads))?;
    import_into(&image, &disk, all)?;
    let exported = measure_both(all, bytes, |threads| export(&disk, threads))?;

    site::create(site, 1, bytes, &ring(2 * bytes))?;
    let log_bytes = child(site, "fill", bytes, &[])? as u64;
    let checked = measure_both(all, log_bytes, |threads| check(site, threads))?;
    let recovered = measure_both(all, log_bytes, |threads| {
        let threads = threads.to_string();
        child(site, "open", bytes, &["--verify", "--threads", &threads]).map(|us| us / 1e6)
    })?;
    let works = [
        ("import", imported),
        ("export", exported),
        ("check", checked),
        ("recover", recovered),
    ];
    let mut json = json!({
        "bytes": bytes,
        "log_bytes": log_bytes,
        "threads": all,
        "rounds": ROUNDS,
    });
    let mut rows = Vec::new();
    for (name, [one, all]) in works {
        json[name] = json!({
            "one_thread_mib_per_s": tenths(one),
            "all_threads_mib_per_s": tenths(all),
            "ratio": thousandths(all / one),
        });
        rows.push(vec![
            Cell::text(name),
            Cell::Number(one, 1),
            Cell::Number(all, 1),
            Cell::Number(all / one, 3),
        ]);
    }
    arguments.output.print(StoreReport {
        json,
        head: format!(
            "{bytes} bytes of image, {log_bytes} bytes of log, {all} threads; median of {ROUNDS} rounds"
        ),
        columns: &["MiB/s", "1 thread", "all threads", "ratio"],
        rows,
        notes: Vec::new(),
    })
}

/// Runs `work` in turns with one thread and with all. `work` returns its time in seconds for `bytes` bytes. Returns both
/// rates in MiB a second.
fn measure_both(
    all: NonZeroUsize,
    bytes: u64,
    work: impl Fn(NonZeroUsize) -> Result<f64, CommandError>,
) -> Result<[f64; 2], CommandError> {
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (rates, threads) in rates.iter_mut().zip([NonZeroUsize::MIN, all]) {
            rates.push(bytes as f64 / f64::from(1 << 20) / work(threads)?);
        }
    }
    Ok(rates.map(median))
}

/// Removes a file from the page cache, so that it is read from the medium. Returns its size in bytes.
fn drop_from_cache(path: &Path) -> Result<u64, CommandError> {
    let file = File::open(path).map_err(failed("open", path))?;
    file.sync_all().map_err(failed("sync", path))?;
    // The kernel may ignore this hint. Then both sides gain equally.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    let metadata = file.metadata().map_err(failed("read", path))?;
    Ok(metadata.len())
}

/// Imports an image, checks the disk and removes it. Returns the time in seconds.
fn import(image: &Path, disk: &Path, threads: NonZeroUsize) -> Result<f64, CommandError> {
    let bytes = drop_from_cache(image)?;
    let began = Instant::now();
    import_into(image, disk, threads)?;
    let time = began.elapsed();
    verify(disk, bytes)?;
    std::fs::remove_file(disk).map_err(failed("remove", disk))?;
    let log = log_of(disk);
    std::fs::remove_dir_all(&log).map_err(failed("remove", &log))?;
    Ok(time.as_secs_f64())
}

fn import_into(image: &Path, disk: &Path, threads: NonZeroUsize) -> Result<(), CommandError> {
    let options = StoreOptions {
        threads: Some(threads),
        ..ring(0)
    };
    let done = import_disk(disk, image, &log_of(disk), &options, &mut |_, _| {});
    done.map(drop).map_err(CommandError::failed)
}

/// Exports a disk whose content is all in its base image, checks the image and removes it. Returns the time in seconds.
fn export(disk: &Path, threads: NonZeroUsize) -> Result<f64, CommandError> {
    let bytes = drop_from_cache(disk)?;
    let (image, threads) = (disk.with_extension("raw"), Some(threads));
    let began = Instant::now();
    export_disk(disk, &log_of(disk), &image, false, threads, &mut |_, _| {})
        .map_err(CommandError::failed)?;
    let time = began.elapsed();
    verify(&image, bytes)?;
    std::fs::remove_file(&image).map_err(failed("remove", &image))?;
    Ok(time.as_secs_f64())
}

/// Verifies the whole log. Returns the time in seconds.
fn check(site: &Path, threads: NonZeroUsize) -> Result<f64, CommandError> {
    let began = Instant::now();
    let (disk, log) = (site::image(site, 0), log(site));
    inspect_with_progress(&disk, &log, Some(threads), &mut |_, _| {})
        .map_err(CommandError::failed)?;
    Ok(began.elapsed().as_secs_f64())
}

fn log_of(disk: &Path) -> PathBuf {
    walvisor_storage::default_log_dir(disk)
}

/// Checks some blocks of a copy of the image.
fn verify(path: &Path, bytes: u64) -> Result<(), CommandError> {
    let blocks = (0..bytes / BLOCK as u64).step_by(VERIFY_EACH);
    place::verify(path, BLOCK, 0, blocks.map(|number| (number, number)))
}
