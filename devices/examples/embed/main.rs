//! virtio-blk in your program, over a disk of your own. `driver.rs` plays the VMM and its guest.

mod driver;
use std::io;
use std::sync::{Arc, Mutex};
use walvisor_devices::backend::{SyncBackend, ThreadedDisk};
use walvisor_devices::block::{BlockConfig, VirtioBlock};

struct OwnDisk(Mutex<Vec<u8>>);

impl SyncBackend for OwnDisk {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        bytes.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..bytes.len()]);
        Ok(())
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let disk = OwnDisk(Mutex::new(vec![0; 1 << 20]));
    let disk = ThreadedDisk::new(disk, 1 << 20, 4)?;
    let device = VirtioBlock::new(Arc::new(disk), BlockConfig::default())?;
    driver::run(device)
}
