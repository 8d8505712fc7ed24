//! Shared by the store's tests: a disk in a directory of its own, and a port served to the end.

// Each test file is a crate of its own and uses a part of this module.
#![allow(dead_code, unused_imports)]

use std::path::{Path, PathBuf};
use std::process::Command;

use walvisor_storage::{
    Allocation, Backend, CacheMode, DiskOptions, EngineKind, Error, LogReport, Operation, Point,
    Store, StoreOptions, create_disk, default_log_dir, inspect, restore_disk,
};

pub use walvisor_testkit::queue::{fill, flush, read, run, wait, wait_all, write};
pub use walvisor_testkit::{Random, wait_until};

pub const SIZE: u64 = 8 << 20;

pub fn small(engine: EngineKind) -> StoreOptions {
    StoreOptions {
        segment_size: 1 << 20,
        max_segments: 4,
        engine,
        ..StoreOptions::default()
    }
}

pub struct Place {
    _dir: tempfile::TempDir,
    pub disk: PathBuf,
}

impl Place {
    pub fn new() -> Self {
        let place = Self::empty();
        let options = small(EngineKind::Auto);
        create_disk(&place.disk, SIZE, &place.log(), &options).unwrap();
        place
    }

    /// A directory without a disk.
    pub fn empty() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        Self { _dir: dir, disk }
    }

    /// Copies the files as a process killed now would leave them. If a checkpoint writes the control file or the
    /// image's mark meanwhile, the copy is repeated, since it would mix two moments.
    pub fn crash(&self) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        let (from, to) = (self.log(), default_log_dir(&disk));
        std::fs::create_dir(&to).unwrap();
        let state = || {
            (
                std::fs::read(from.join("control")).unwrap(),
                mark(&self.disk),
            )
        };
        loop {
            let before = state();
            for entry in std::fs::read_dir(&to).unwrap() {
                std::fs::remove_file(entry.unwrap().path()).unwrap();
            }
            copy_log(&from, &to);
            copy_image(&self.disk, &disk);
            if state() == before {
                return Self { _dir: dir, disk };
            }
        }
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

/// The text of the mark of an image, if it has one.
pub fn mark(image: &Path) -> Option<String> {
    let mut text = [0; 256];
    let len = rustix::fs::getxattr(image, "user.walvisor.disk", &mut text[..]).ok()?;
    Some(String::from_utf8(text[..len].to_vec()).unwrap())
}

/// Copies the files of a log to an empty directory.
pub fn copy_log(from: &Path, to: &Path) {
    std::fs::copy(from.join("control"), to.join("control")).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        if name.to_str().unwrap().starts_with("segment")
            && !name.to_str().unwrap().ends_with(".new")
        {
            std::fs::copy(from.join(&name), to.join(&name)).unwrap();
        }
    }
}

/// Copies an image with its mark, as `cp -a` does. (Not by `cp`: between fork and exec, a child would hold the
/// locks of every test in this process.)
pub fn copy_image(from: &Path, to: &Path) {
    std::fs::copy(from, to).unwrap();
    if let Some(mark) = mark(from) {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(to, "user.walvisor.disk", mark.as_bytes(), flags).unwrap();
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

/// A small file system in memory. Unmounted when dropped.
pub struct SmallFileSystem {
    dir: tempfile::TempDir,
}

impl SmallFileSystem {
    pub fn mount(mebibytes: u32) -> Option<Self> {
        Self::mount_as("tmpfs", &format!("size={mebibytes}m"))
    }

    /// Mounts a file system of a kind that needs no device.
    pub fn mount_as(kind: &str, options: &str) -> Option<Self> {
        let small = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        match small.call("mount", &["-t", kind, "-o", options, kind]) {
            Ok(()) => Some(small),
            Err(why) => {
                println!("skipped: can't mount a small file system: {why}");
                None
            }
        }
    }

    pub fn grow(&self, mebibytes: u32) {
        let size = format!("remount,size={mebibytes}m");
        self.call("mount", &["-o", &size]).unwrap();
    }

    fn call(&self, program: &str, arguments: &[&str]) -> Result<(), String> {
        let output = Command::new(program)
            .args(arguments)
            .arg(self.dir.path())
            .output()
            .map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        // Fails if it is not mounted.
        let _ = self.call("umount", &["-l"]);
    }
}
