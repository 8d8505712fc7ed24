//! A disk with an hour of history: `disk IMAGE` counts in its first byte how often it was run.

use std::{error::Error, path::Path};

use walvisor_storage::{
    BlockingDisk, DiskOptions, Store, StoreOptions, create_disk, default_log_dir,
};

pub(crate) fn count(image: &Path) -> Result<u8, Box<dyn Error>> {
    let (log, mut options) = (default_log_dir(image), StoreOptions::default());
    options.retain = Some("1h".parse()?);
    if !image.exists() {
        create_disk(image, 64 << 20, &log, &options)?;
    }
    let store = Store::open(&log, &[DiskOptions::new(image)], &options)?;
    let (disk, mut sector) = (BlockingDisk::new(store.disks()[0].clone()), [0; 512]);
    disk.read(&mut sector, 0)?;
    sector[0] += 1;
    disk.write(&sector, 0)?;
    disk.flush()?;
    drop(disk);
    store.close()?;
    Ok(sector[0])
}

fn main() -> Result<(), Box<dyn Error>> {
    let image = std::env::args_os().nth(1).ok_or("usage: disk IMAGE")?;
    println!("run {}", count(image.as_ref())?);
    Ok(())
}
