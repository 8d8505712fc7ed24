//! Every state that two disks of one log had since the last checkpoint can be brought back.

mod support;

use std::path::{Path, PathBuf};

use support::{copy_image, fill, flush, run, small};
use walvisor_storage::{
    DiskOptions, EngineKind, ErrorKind, Operation, Point, Store, StoreOptions, create_disk,
    restore_disk,
};

const SECTORS: u64 = 256;
/// Requests before the checkpoint, and after it.
const REQUESTS: [usize; 2] = [60, 90];

/// Xorshift (Marsaglia 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A random modification, which is also made to the bytes of the disk.
fn modify(random: &mut Random, bytes: &mut [u8]) -> Operation {
    let sector = random.below(SECTORS);
    let sectors = 1 + random.below((SECTORS - sector).min(20));
    let byte = random.below(256) as u8;
    let range = &mut bytes[(sector * 512) as usize..((sector + sectors) * 512) as usize];
    let kind = random.below(8);
    range.fill(if kind < 2 { 0 } else { byte });
    let count = sectors as u32;
    match kind {
        0 => Operation::Discard {
            sector,
            sectors: count,
        },
        1 => Operation::WriteZeroes {
            sector,
            sectors: count,
            unmap: byte < 128,
        },
        _ => Operation::Write {
            sector,
            data: fill(byte, sectors as usize),
        },
    }
}

fn copy_log(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        if !name.to_str().unwrap().ends_with(".new") {
            std::fs::copy(from.join(&name), to.join(&name)).unwrap();
        }
    }
}

#[test]
fn every_state_since_the_checkpoint_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let disks = ["a", "b"].map(|name| dir.path().join(name));
    // No checkpoint but the one at the close.
    let options = StoreOptions {
        max_segments: 64,
        ..small(EngineKind::Auto)
    };
    for disk in &disks {
        create_disk(disk, SECTORS * 512, &log, &options).unwrap();
    }
    let mut random = Random(7);
    // Both disks after each record, by LSN.
    let mut states = vec![[(); 2].map(|()| vec![0; (SECTORS * 512) as usize])];
    for (life, requests) in REQUESTS.into_iter().enumerate() {
        let opened = disks.each_ref().map(DiskOptions::new);
        let store = Store::open(&log, &opened, &options).unwrap();
        let mut ports: Vec<_> = store
            .disks()
            .iter()
            .map(|disk| disk.open_port().unwrap())
            .collect();
        for _ in 0..requests {
            let disk = random.below(2) as usize;
            let mut state = states.last().unwrap().clone();
            run(&mut ports[disk], modify(&mut random, &mut state[disk])).unwrap();
            states.push(state);
            if random.below(4) == 0 {
                flush(&mut ports[disk]);
            }
        }
        ports.iter_mut().for_each(flush);
        if life == 0 {
            drop(ports);
            store.close().unwrap();
            continue;
        }
        // As a kill leaves it.
        let killed = dir.path().join("killed");
        std::fs::create_dir(&killed).unwrap();
        copy_log(&log, &killed.join("log"));
        for disk in &disks {
            copy_image(disk, &killed.join(disk.file_name().unwrap()));
        }
    }
    let killed = dir.path().join("killed");
    let restored = |disk: &PathBuf, lsn: u64| {
        let disk = killed.join(disk.file_name().unwrap());
        let new = killed.join("new");
        let point = Point::Lsn(lsn);
        restore_disk(
            &disk,
            &killed.join("log"),
            point,
            &new,
            None,
            &mut |_, _| {},
        )?;
        let bytes = std::fs::read(&new).unwrap();
        std::fs::remove_file(new).unwrap();
        Ok::<_, walvisor_storage::Error>(bytes)
    };
    for (number, disk) in disks.iter().enumerate() {
        for (lsn, state) in states.iter().enumerate().skip(REQUESTS[0]) {
            let bytes = restored(disk, lsn as u64).unwrap();
            assert!(bytes == state[number], "disk {number} at LSN {lsn}");
        }
        for lsn in [0, REQUESTS[0] - 1, states.len()] {
            let error = restored(disk, lsn as u64).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        }
    }
}
