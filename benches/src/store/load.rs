//! `walvisor-bench store load`: import, export, check and recovery with one thread, and with one
//! per processor.

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor::commands::threads::Threads;
use walvisor::size::parse_size;
use walvisor_storage::{StoreOptions, export_disk, import_disk, inspect_with_progress};

use super::recover::child;
use super::site::{self, log, ring};
use super::{VERIFY_EACH, check_bytes, measure, rate};
use crate::bench::Side;
use crate::bench_dirs::{self, directory, failed, make_raw};
use crate::blocks::BLOCK;
use crate::output::Output;

/// Arguments of `walvisor-bench store load`.
#[derive(Debug, Args)]
pub struct LoadArguments {
    /// Bytes of the image, and of payload in the log, in records of 4 KiB
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    bytes: u64,
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench store load`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &LoadArguments) -> Result<(), CommandError> {
    let (bytes, output) = (arguments.bytes, &arguments.output);
    check_bytes(bytes, 1 << 20, "1M")?;
    let chosen = arguments.threads.get();
    let all = chosen.map_or_else(std::thread::available_parallelism, Ok);
    let all = all.map_err(CommandError::failed)?;
    let directory = directory(&output.dir)?;
    let site = directory.path();
    let [image, imported, disk] = ["raw", "imported.img", "loaded.img"].map(|name| site.join(name));
    make_raw(&image, bytes, BLOCK)?;
    import_into(&image, &disk, all)?;
    site::create(site, 1, bytes, &ring(2 * bytes))?;
    let log_bytes = child(site, "fill", bytes, &[])? as u64;
    let mut turn = |side: &Side| {
        let threads = NonZeroUsize::new(side.number("use") as usize).unwrap_or(all);
        let (moved, took) = match side.text("work") {
            "import" => (bytes, import(&image, &imported, threads)?),
            "export" => (bytes, export(&disk, threads)?),
            "check" => (log_bytes, check(site, threads)?),
            _ => {
                let threads = threads.to_string();
                let us = child(site, "open", bytes, &["--verify", "--threads", &threads])?;
                (log_bytes, Duration::from_secs_f64(us / 1e6))
            }
        };
        Ok(rate(moved, took))
    };
    let given = json!({ "bytes": bytes, "threads": all });
    measure("load", given, output, &mut turn)
}

/// Removes a file from the page cache, so that it is read from the medium. Returns its size in
/// bytes.
fn drop_from_cache(path: &Path) -> Result<u64, CommandError> {
    let file = File::open(path).map_err(failed("open", path))?;
    file.sync_all().map_err(failed("sync", path))?;
    // The kernel may ignore this hint. Then both sides gain equally.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    let metadata = file.metadata().map_err(failed("read", path))?;
    Ok(metadata.len())
}

/// Imports an image, checks the disk and removes it. Returns the time.
fn import(image: &Path, disk: &Path, threads: NonZeroUsize) -> Result<Duration, CommandError> {
    let bytes = drop_from_cache(image)?;
    let began = Instant::now();
    import_into(image, disk, threads)?;
    let time = began.elapsed();
    verify(disk, bytes)?;
    std::fs::remove_file(disk).map_err(failed("remove", disk))?;
    let log = log_of(disk);
    std::fs::remove_dir_all(&log).map_err(failed("remove", &log))?;
    Ok(time)
}

fn import_into(image: &Path, disk: &Path, threads: NonZeroUsize) -> Result<(), CommandError> {
    let options = StoreOptions {
        threads: Some(threads),
        ..ring(0)
    };
    let done = import_disk(disk, image, &log_of(disk), &options, &mut |_, _| {});
    done.map(drop).map_err(CommandError::failed)
}

/// Exports a disk whose content is all in its base image, checks the image and removes it. Returns
/// the time.
fn export(disk: &Path, threads: NonZeroUsize) -> Result<Duration, CommandError> {
    let bytes = drop_from_cache(disk)?;
    let (image, threads) = (disk.with_extension("raw"), Some(threads));
    let began = Instant::now();
    export_disk(disk, &log_of(disk), &image, false, threads, &mut |_, _| {})
        .map_err(CommandError::failed)?;
    let time = began.elapsed();
    verify(&image, bytes)?;
    std::fs::remove_file(&image).map_err(failed("remove", &image))?;
    Ok(time)
}

/// Verifies the whole log. Returns the time.
fn check(site: &Path, threads: NonZeroUsize) -> Result<Duration, CommandError> {
    let began = Instant::now();
    let (disk, log) = (site::image(site, 0), log(site));
    inspect_with_progress(&disk, &log, Some(threads), &mut |_, _| {})
        .map_err(CommandError::failed)?;
    Ok(began.elapsed())
}

fn log_of(disk: &Path) -> PathBuf {
    walvisor_storage::default_log_dir(disk)
}

/// Checks some blocks of a copy of the image.
fn verify(path: &Path, bytes: u64) -> Result<(), CommandError> {
    let blocks = (0..bytes / BLOCK as u64).step_by(VERIFY_EACH);
    bench_dirs::verify(path, BLOCK, 0, blocks.map(|number| (number, number)))
}
