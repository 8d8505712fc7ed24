//! A disk of your own: `own_disk FILE` writes to it, flushes it, and reads it.

use std::{error::Error, fs::File, io, os::unix::fs::FileExt};

use walvisor_block::{BlockingDisk, SyncBackend, ThreadedDisk};

struct OwnDisk(File);

impl SyncBackend for OwnDisk {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(bytes, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
    fn flush(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: own_disk FILE")?;
    let file = File::options().read(true).write(true).open(path)?;
    let bytes = file.metadata()?.len();
    let disk = BlockingDisk::new(ThreadedDisk::new(OwnDisk(file), bytes, 4)?);
    disk.write(&[7; 512], 1024)?;
    disk.flush()?;
    Ok(disk.read(&mut [0; 512], 1024)?)
}
