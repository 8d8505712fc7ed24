//! A disk as it was: `past IMAGE AT` shows its first byte at a point such as `-15m`, `cid:7` or
//! `snapshot:monday`.

use std::{error::Error, path::Path};

use walvisor_storage::{BlockingDisk, DiskOptions, Look, Point, StoreOptions, default_log_dir};

pub(crate) fn first_byte(image: &Path, at: Point) -> Result<u8, Box<dyn Error>> {
    let (log, options) = (default_log_dir(image), StoreOptions::default());
    // A look of a disk in use is `Disk::look`.
    let look = Look::open(&DiskOptions::new(image), &log, at, None, &options)?;
    let mut sector = [0; 512];
    BlockingDisk::new(look).read(&mut sector, 0)?;
    Ok(sector[0])
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [image, at] = &arguments[..] else {
        return Err("usage: past IMAGE AT".into());
    };
    println!("{}", first_byte(image.as_ref(), at.parse()?)?);
    Ok(())
}
