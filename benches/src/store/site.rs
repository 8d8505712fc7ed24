//! The log and the disks of a benchmark, in its temporary directory.

use std::path::{Path, PathBuf};

use walvisor::commands::CommandError;
use walvisor_storage::{
    CacheMode, DiskOptions, EngineKind, Operation, Store, StoreOptions, create_disk,
};

use super::client::StoreClient;
use crate::blocks::{BLOCK, stamped_block};

/// A ring with room for `bytes` of log before a checkpoint begins. Its segments are small unless
/// the ring is large.
pub fn ring(bytes: u64) -> StoreOptions {
    let segment_size = if bytes > 8 << 30 { 64 << 20 } else { 16 << 20 };
    let segments = (2 * bytes).div_ceil(segment_size) + 8;
    StoreOptions {
        segment_size,
        index_memory: u64::MAX,
        max_segments: segments.clamp(64, 65536) as u32,
        engine: EngineKind::Auto,
        ..StoreOptions::default()
    }
}

/// The log in the directory `site`.
pub fn log(site: &Path) -> PathBuf {
    site.join("log")
}

/// The image of disk number `disk` in the directory `site`.
pub fn image(site: &Path, disk: usize) -> PathBuf {
    site.join(format!("disk-{disk}.img"))
}

/// Creates `disks` disks of `bytes` bytes on one log, and the log's first segments, which are then
/// not measured.
///
/// # Errors
/// If the store can't create them.
pub fn create(
    site: &Path,
    disks: usize,
    bytes: u64,
    options: &StoreOptions,
) -> Result<(), CommandError> {
    for disk in 0..disks {
        create_disk(&image(site, disk), bytes, &log(site), options)
            .map_err(CommandError::failed)?;
    }
    let store = open(site, disks, CacheMode::Writeback, options)?;
    let mut client = StoreClient::open(&store.disks()[0])?;
    let data = stamped_block(BLOCK, 0, 0);
    client.run(Operation::Write { sector: 0, data })?;
    client.run(Operation::Flush)?;
    drop(client);
    store.close().map_err(CommandError::failed)
}

/// Opens the log with its first `disks` disks.
///
/// # Errors
/// If the store can't open them.
pub fn open(
    site: &Path,
    disks: usize,
    cache: CacheMode,
    options: &StoreOptions,
) -> Result<Store, CommandError> {
    let disks: Vec<DiskOptions> = (0..disks)
        .map(|disk| DiskOptions {
            cache,
            ..DiskOptions::new(image(site, disk))
        })
        .collect();
    Store::open(&log(site), &disks, options).map_err(CommandError::failed)
}
