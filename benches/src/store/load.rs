//! `walvisor-bench store load`: import, export, check and recovery with one thread, and with one per processor.

use std::fmt;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use walvisor::commands::CommandError;
use walvisor::commands::threads::Threads;
use walvisor::size::parse_size;
use walvisor_storage::{Buffer, StoreOptions, export_disk, import_disk, inspect_with_progress};

use super::client::{damage_error, is_stamped};
use super::figures::{BLOCK, tenths, thousandths};
use super::output::StoreOutput;
use super::raw;
use super::recover::child;
use super::site::{StoreSite, log, ring};
use super::timing::median;

/// Number of turns of one thread and all threads.
const ROUNDS: usize = 3;
/// One in this many blocks is verified.
const VERIFY_EACH: u64 = 61;

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

/// The results. Each rate is the median of the rounds.
#[derive(Debug, Serialize)]
struct LoadReport {
    bytes: u64,
    log_bytes: u64,
    threads: usize,
    rounds: usize,
    import: ThreadRates,
    export: ThreadRates,
    check: ThreadRates,
    recover: ThreadRates,
}

/// The rates with one thread and with all threads.
#[derive(Debug, Default, Serialize)]
struct ThreadRates {
    one_thread_mib_per_s: f64,
    all_threads_mib_per_s: f64,
    /// The rate with all threads divided by that with one.
    ratio: f64,
}

/// Runs `walvisor-bench store load`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &LoadArguments) -> Result<(), CommandError> {
    let bytes = arguments.bytes;
    if !(1 << 20..=64 << 30).contains(&bytes) || !bytes.is_multiple_of(1 << 20) {
        return Err(CommandError::Usage(format!(
            "--bytes {bytes}: give a multiple of 1M from 1M to 64G"
        )));
    }
    let all = arguments
        .threads
        .get()
        .map_or_else(std::thread::available_parallelism, Ok)
        .map_err(CommandError::failed)?;
    let site = StoreSite::new(&arguments.output.dir)?;
    let (image, disk) = (site.path().join("raw"), site.path().join("loaded.img"));
    raw::create(&image, bytes, BLOCK)?;
    let import = measure_both(all, bytes, |threads| import(&image, &disk, threads))?;
    import_into(&image, &disk, all)?;
    let export = measure_both(all, bytes, |threads| export(&disk, threads))?;

    site.create(1, bytes, &ring(2 * bytes))?;
    let log_bytes = child(&site, "fill", bytes, &[])? as u64;
    let check = measure_both(all, log_bytes, |threads| check(&site, threads))?;
    let recover = measure_both(all, log_bytes, |threads| {
        let threads = threads.to_string();
        child(&site, "open", bytes, &["--verify", "--threads", &threads]).map(|us| us / 1e6)
    })?;
    arguments.output.print(&LoadReport {
        bytes,
        log_bytes,
        threads: all.get(),
        rounds: ROUNDS,
        import,
        export,
        check,
        recover,
    })
}

/// Runs `work` in turns with one thread and with all. `work` returns its time in seconds for `bytes` bytes.
fn measure_both(
    all: NonZeroUsize,
    bytes: u64,
    work: impl Fn(NonZeroUsize) -> Result<f64, CommandError>,
) -> Result<ThreadRates, CommandError> {
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (rates, threads) in rates.iter_mut().zip([NonZeroUsize::MIN, all]) {
            rates.push(bytes as f64 / f64::from(1 << 20) / work(threads)?);
        }
    }
    let [one, all] = rates.map(median);
    Ok(ThreadRates {
        one_thread_mib_per_s: tenths(one),
        all_threads_mib_per_s: tenths(all),
        ratio: thousandths(all / one),
    })
}

/// Removes a file from the page cache, so that it is read from the medium.
fn drop_from_cache(path: &Path) -> Result<(), CommandError> {
    let file = File::open(path).map_err(raw::failed("open", path))?;
    file.sync_all().map_err(raw::failed("sync", path))?;
    // The kernel may ignore this hint. Then both sides gain equally.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    Ok(())
}

/// Imports an image, checks the disk and removes it. Returns the time in seconds.
fn import(image: &Path, disk: &Path, threads: NonZeroUsize) -> Result<f64, CommandError> {
    drop_from_cache(image)?;
    let began = Instant::now();
    import_into(image, disk, threads)?;
    let time = began.elapsed();
    verify(disk)?;
    std::fs::remove_file(disk).map_err(raw::failed("remove", disk))?;
    let log = log_of(disk);
    std::fs::remove_dir_all(&log).map_err(raw::failed("remove", &log))?;
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
    drop_from_cache(disk)?;
    let image = disk.with_extension("raw");
    let began = Instant::now();
    export_disk(
        disk,
        &log_of(disk),
        &image,
        false,
        Some(threads),
        &mut |_, _| {},
    )
    .map_err(CommandError::failed)?;
    let time = began.elapsed();
    verify(&image)?;
    std::fs::remove_file(&image).map_err(raw::failed("remove", &image))?;
    Ok(time.as_secs_f64())
}

/// Verifies the whole log. Returns the time in seconds.
fn check(site: &StoreSite, threads: NonZeroUsize) -> Result<f64, CommandError> {
    let began = Instant::now();
    let (disk, log) = (site.image(0), log(site.path()));
    inspect_with_progress(&disk, &log, Some(threads), &mut |_, _| {})
        .map_err(CommandError::failed)?;
    Ok(began.elapsed().as_secs_f64())
}

fn log_of(disk: &Path) -> PathBuf {
    walvisor_storage::default_log_dir(disk)
}

/// Checks some blocks of a copy of the image.
fn verify(path: &Path) -> Result<(), CommandError> {
    let file = File::open(path).map_err(raw::failed("open", path))?;
    let blocks = file.metadata().map_err(raw::failed("read", path))?.len() / BLOCK as u64;
    let mut block = Buffer::zeroed(BLOCK);
    for number in (0..blocks).step_by(VERIFY_EACH as usize) {
        file.read_exact_at(&mut block, number * BLOCK as u64)
            .map_err(raw::failed("read", path))?;
        if !is_stamped(&block, 0, number) {
            return Err(damage_error(&path.display().to_string(), number));
        }
    }
    Ok(())
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} bytes of image, {} bytes of log; median of {} rounds\n",
            self.bytes, self.log_bytes, self.rounds
        )?;
        let all = match self.threads {
            1 => "1 thread".to_owned(),
            threads => format!("{threads} threads"),
        };
        writeln!(f, "MiB/s      {:>11} {all:>11} {:>8}", "1 thread", "ratio")?;
        let rows = [
            ("import", &self.import),
            ("export", &self.export),
            ("check", &self.check),
            ("recover", &self.recover),
        ];
        for (name, pair) in rows {
            writeln!(
                f,
                "{name:<10} {:>11.1} {:>11.1} {:>8.3}",
                pair.one_thread_mib_per_s, pair.all_threads_mib_per_s, pair.ratio
            )?;
        }
        Ok(())
    }
}
