//! Shared by the store's tests: a disk in a directory of its own, and a port served to the end.

// Each test file is a crate of its own and uses a part of this module.
#![allow(dead_code, unused_imports)]

use std::path::{Path, PathBuf};

use walvisor_storage::{
    Allocation, Backend, CacheMode, DiskOptions, EngineKind, Error, LogReport, Operation, Point,
    Store, StoreOptions, create_disk, default_log_dir, inspect, restore_disk,
};

pub use walvisor_testkit::queue::{fill, flush, read, run, wait, wait_all, write};
pub use walvisor_testkit::{MemoryFs, Random, copy_image, copy_log, mark, wait_until};

pub const SIZE: u64 = 8 << 20;

pub fn small(engine: EngineKind) -> StoreOptions {
    StoreOptions {
        segment_size: 1 << 20,
        max_segments: 4,
        engine,
        ..StoreOptions::default()
    }
}

pub struct TestDisk {
    _dir: tempfile::TempDir,
    pub disk: PathBuf,
}

impl TestDisk {
    pub fn new() -> Self {
        let place = Self::empty();
        let options = small(EngineKind::Auto);
        create_disk(&place.disk, SIZE, &place.log(), &options).unwrap();
        place
    }

    /// A directory without a disk.
    pub fn empty() -> Self {
        Self::empty_in(&std::env::temp_dir())
    }

    /// The same beneath `parent`.
    pub fn empty_in(parent: &Path) -> Self {
        let dir = tempfile::tempdir_in(parent).unwrap();
        let disk = dir.path().join("disk.img");
        Self { _dir: dir, disk }
    }

    /// Copies the files as a process killed now would leave them.
    pub fn crash(&self) -> Self {
        let copy = Self::empty();
        copy_killed(
            &self.log(),
            &copy.log(),
            &[(self.disk.clone(), copy.disk.clone())],
        );
        copy
    }

    pub fn log(&self) -> PathBuf {
        default_log_dir(&self.disk)
    }

    pub fn report(&self) -> LogReport {
        inspect(&self.disk, &self.log()).unwrap().log.unwrap()
    }

    pub fn open_with(&self, engine: EngineKind, cache: CacheMode) -> Store {
        let options = DiskOptions {
            cache,
            ..DiskOptions::new(&self.disk)
        };
        Store::open(&self.log(), &[options], &small(engine)).unwrap()
    }

    pub fn open(&self) -> Store {
        self.open_with(EngineKind::Auto, CacheMode::Writeback)
    }
}

/// Copies a log, and images to other paths, as a process killed now would leave them. If a
/// checkpoint writes the control file or a mark meanwhile, the copy is repeated, since it would mix
/// two moments.
pub fn copy_killed(from: &Path, to: &Path, images: &[(PathBuf, PathBuf)]) {
    std::fs::create_dir(to).unwrap();
    let state = || {
        let marks: Vec<_> = images.iter().map(|(image, _)| mark(image)).collect();
        (std::fs::read(from.join("control")).unwrap(), marks)
    };
    loop {
        let before = state();
        for entry in std::fs::read_dir(to).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        copy_log(from, to);
        for (image, copy) in images {
            copy_image(image, copy);
        }
        if state() == before {
            return;
        }
    }
}

/// What a disk was at a point, restored to a new image `new`, which is removed again.
pub fn restored(disk: &Path, log: &Path, at: Point, new: &Path) -> Result<Vec<u8>, Error> {
    restore_disk(disk, log, at, new, None, &mut |_, _| {})?;
    let bytes = std::fs::read(new).unwrap();
    std::fs::remove_file(new).unwrap();
    Ok(bytes)
}

/// A random modification, which is also made to the bytes of the disk.
pub fn modify(random: &mut Random, bytes: &mut [u8]) -> Operation {
    let all = bytes.len() as u64 / 512;
    let sector = random.below(all);
    let sectors = 1 + random.below((all - sector).min(20));
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

/// Reads of any place and length show the state of the point, and so do the extents.
pub fn check_look(random: &mut Random, look: &dyn Backend, state: &[u8], told: &str) {
    let all = state.len() as u64 / 512;
    assert_eq!(look.sectors(), all);
    let mut queue = look.open_queue().unwrap();
    let whole = read(&mut *queue, 0, all as u32);
    assert!(whole[..] == *state, "{told}");
    for _ in 0..8 {
        let sector = random.below(all);
        let sectors = 1 + random.below(all - sector);
        let range = sector as usize * 512..(sector + sectors) as usize * 512;
        let bytes = read(&mut *queue, sector, sectors as u32);
        assert!(bytes[..] == state[range], "{told}, sector {sector}");
    }
    let mut at = 0;
    while at < all {
        for extent in look
            .mapped()
            .expect("a map")
            .extents(at, all - at, 3)
            .unwrap()
        {
            let end = at + extent.sectors;
            let bytes = &state[at as usize * 512..end as usize * 512];
            let zero = bytes.iter().all(|&byte| byte == 0);
            assert!(
                zero || extent.allocation == Allocation::Data,
                "{told}, sector {at}"
            );
            at = end;
        }
    }
}
