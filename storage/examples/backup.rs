//! A backup of a disk that is not in use, as a sparse raw image: `backup DISK COPY`. An earlier copy is replaced at the
//! moment when the new one is complete and durable.
//!
//! The copy has all that the disk holds, also what is only in its log so far. The disk and its log do not change.

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;

use walvisor_storage::{default_log_dir, export_disk};

/// Copies `disk`, and tells `out` how far it is, at most once for each per cent.
fn backup(disk: &Path, copy: &Path, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let (replace, threads, mut told) = (true, None, 0);
    let mut progress = |done: u64, size: u64| {
        let per_cent = u128::from(done) * 100 / u128::from(size);
        if per_cent > told {
            told = per_cent;
            // Nobody reads the progress: no reason to stop the copy.
            let _ = write!(out, "\r{per_cent} %");
        }
    };
    let log = default_log_dir(disk);
    let done = export_disk(disk, &log, copy, replace, threads, &mut progress)?;
    let (copied, size) = (done.copied, done.size);
    writeln!(out, "\r{copied} of {size} bytes copied, the rest are holes")?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [disk, copy] => backup(disk.as_ref(), copy.as_ref(), &mut io::stdout()),
        _ => Err("usage: backup DISK COPY".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use walvisor_storage::{
        BackendQueue, Buffer, DiskOptions, Operation, Store, StoreOptions, create_disk,
    };

    use super::*;

    const SIZE: u64 = 1 << 20;

    /// Writes a sector full of `byte`, and leaves it in the log.
    fn write(disk: &Path, sector: u64, byte: u8) {
        let options = StoreOptions {
            close_time: Some(Duration::ZERO),
            ..StoreOptions::default()
        };
        let disks = [DiskOptions::new(disk)];
        let store = Store::open(&default_log_dir(disk), &disks, &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        let data = Buffer::from(&[byte; 512][..]);
        port.submit(0, Operation::Write { sector, data });
        port.kick();
        drop(port);
        store.close().unwrap();
    }

    #[test]
    fn a_copy_has_what_the_log_holds_and_a_later_one_replaces_it() {
        let place = tempfile::tempdir().unwrap();
        let [disk, copy] = ["disk.img", "copy.img"].map(|name| place.path().join(name));
        let log = default_log_dir(&disk);
        create_disk(&disk, SIZE, &log, &StoreOptions::default()).unwrap();
        let mut expected = vec![0; SIZE as usize];
        for (sector, byte) in [(3, 0xa5), (2047, 0x5a)] {
            write(&disk, sector, byte);
            expected[sector as usize * 512..][..512].fill(byte);
            let before = fs::read(&disk).unwrap();
            // The first change is only in the log. The second open copies it to the image, at some time.
            assert!(sector != 3 || before != expected);
            let mut out = Vec::new();
            backup(&disk, &copy, &mut out).unwrap();
            assert!(fs::read(&copy).unwrap() == expected);
            assert!(fs::read(&disk).unwrap() == before);
            let out = String::from_utf8(out).unwrap();
            assert!(out.contains("\r100 %\r"), "{out:?}");
            assert!(out.contains("of 1048576 bytes copied"), "{out:?}");
        }
    }

    #[test]
    fn a_disk_that_does_not_exist_is_named() {
        let place = tempfile::tempdir().unwrap();
        let [disk, copy] = ["disk.img", "copy.img"].map(|name| place.path().join(name));
        let error = backup(&disk, &copy, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("disk.img"), "{error}");
        assert!(!copy.exists());
    }
}
