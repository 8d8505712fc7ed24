//! Shared by the store's tests: a disk in a directory of its own, and a port served to the end.

// Each test file is a crate of its own and uses a part of this module.
#![allow(dead_code, unused_imports)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use walvisor_storage::{
    Allocation, Backend, CacheMode, Changes, CloneSource, Disk, DiskOptions, EngineKind, Error,
    ErrorKind, LogReport, Look, Operation, Point, Port, Result, Store, StoreOptions, create_disk,
    default_log_dir, disk_changes, export_disk, inspect, restore_disk,
};

pub use walvisor_testkit::queue::{fill, flush, read, run, wait, wait_all, write};
pub use walvisor_testkit::{MemoryFs, Random, copy_image, mark, wait_until};

pub const MIB: u64 = 1 << 20;
pub const SIZE: u64 = 8 * MIB;
pub const ENGINES: [EngineKind; 2] = [EngineKind::Auto, EngineKind::Blocking];

pub fn small(engine: EngineKind) -> StoreOptions {
    StoreOptions {
        segment_size: MIB,
        max_segments: 4,
        engine,
        ..StoreOptions::default()
    }
}

/// Disks of one log, in a directory of their own.
pub struct TestDisk {
    pub top: PathBuf,
    /// The first disk.
    pub disk: PathBuf,
    /// How its log is opened.
    pub options: StoreOptions,
    names: Vec<&'static str>,
    // Dropped before `_dir`: the file system is unmounted before its directory is removed.
    _fs: Option<MemoryFs>,
    _dir: tempfile::TempDir,
}

impl TestDisk {
    pub fn new() -> Self {
        Self::made(&["disk.img"], SIZE, small(EngineKind::Auto))
    }

    pub fn made(names: &[&'static str], size: u64, options: StoreOptions) -> Self {
        let place = Self::within(None, names, options);
        place.make(size);
        place
    }

    /// A directory without a disk.
    pub fn empty() -> Self {
        Self::within(None, &["disk.img"], small(EngineKind::Auto))
    }

    /// The same, on a file system.
    pub fn within(fs: Option<MemoryFs>, names: &[&'static str], options: StoreOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let top = fs.as_ref().map_or(dir.path(), MemoryFs::path).to_owned();
        Self {
            disk: top.join(names[0]),
            top,
            options,
            names: names.to_vec(),
            _fs: fs,
            _dir: dir,
        }
    }

    /// Makes its disks.
    pub fn make(&self, size: u64) {
        for disk in self.disks() {
            create_disk(&disk, size, &self.log(), &self.options).unwrap();
        }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.top.join(name)
    }

    pub fn disks(&self) -> Vec<PathBuf> {
        self.names.iter().map(|name| self.at(name)).collect()
    }

    pub fn log(&self) -> PathBuf {
        default_log_dir(&self.disk)
    }

    /// Copies the files as a process killed now would leave them.
    pub fn crash(&self) -> Self {
        let copy = Self::within(None, &self.names, self.options);
        let images: Vec<_> = self.disks().into_iter().zip(copy.disks()).collect();
        copy_killed(&self.log(), &copy.log(), &images);
        copy
    }

    pub fn try_open(&self, options: &StoreOptions) -> Result<Store> {
        let disks: Vec<_> = self.disks().iter().map(DiskOptions::new).collect();
        Store::open(&self.log(), &disks, options)
    }

    pub fn open(&self) -> Store {
        self.try_open(&self.options).unwrap()
    }

    pub fn open_with(&self, engine: EngineKind, cache: CacheMode) -> Store {
        let options = DiskOptions {
            cache,
            ..DiskOptions::new(&self.disk)
        };
        Store::open(&self.log(), &[options], &small(engine)).unwrap()
    }

    pub fn report(&self) -> LogReport {
        inspect(&self.disk, &self.log()).unwrap().log.unwrap()
    }

    /// One of its disks, to be cloned.
    pub fn source(&self, disk: &Path, at: Option<Point>) -> CloneSource {
        CloneSource {
            path: disk.to_owned(),
            log_dir: self.log(),
            at,
        }
    }

    /// What a disk that is not in use was at a point.
    pub fn as_of(&self, disk: &Path, at: Point) -> Result<Vec<u8>> {
        let new = self.at("restored");
        restore_disk(disk, &self.log(), at, &new, None, &mut |_, _| {})?;
        Ok(taken(&new))
    }

    pub fn exported(&self, disk: &Path) -> Result<Vec<u8>> {
        let raw = self.at("exported");
        export_disk(disk, &self.log(), &raw, true, None, &mut |_, _| {})?;
        Ok(taken(&raw))
    }

    pub fn changes(&self, disk: &Path, from: Point, to: Option<Point>) -> Result<Changes> {
        disk_changes(disk, &self.log(), from, to, None)
    }

    /// A look at a disk that is not in use.
    pub fn look(&self, disk: &Path, at: Point, scratch: Option<File>) -> Result<Look> {
        let disk = DiskOptions::new(disk);
        Look::open(&disk, &self.log(), at, scratch, &self.options)
    }

    /// The files of the log whose names begin so.
    pub fn files(&self, begin: &str) -> Vec<PathBuf> {
        let names = std::fs::read_dir(self.log()).unwrap();
        let paths = names.map(|entry| entry.unwrap().path());
        let begins = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with(begin) && !name.ends_with(".new")
        };
        let mut files: Vec<_> = paths.filter(begins).collect();
        files.sort();
        files
    }

    pub fn segment(&self, number: u32) -> PathBuf {
        self.log().join(format!("segment-{number:05}"))
    }
}

/// Runs the test on a file system with attributes, if the directory for temporary files has them,
/// and on one without, where images have no marks.
pub fn each_file_system(names: &[&'static str], options: StoreOptions, test: impl Fn(&TestDisk)) {
    let here = TestDisk::within(None, names, options);
    if has_attributes(&here.top) {
        test(&here);
    } else {
        println!("skipped: no attributes in {}", here.top.display());
    }
    // ramfs has no user attributes, no birth times, and no O_DIRECT.
    if let Some(fs) = MemoryFs::ramfs() {
        test(&TestDisk::within(Some(fs), names, options));
    }
}

/// Whether images get marks there.
pub fn has_attributes(dir: &Path) -> bool {
    let probe = dir.join("probe");
    std::fs::write(&probe, "").unwrap();
    let set = set_attribute(&probe, "user.walvisor.test", "1");
    std::fs::remove_file(probe).unwrap();
    set.is_ok()
}

pub fn set_mark(image: &Path, text: &str) {
    set_attribute(image, "user.walvisor.disk", text).unwrap();
}

fn set_attribute(file: &Path, name: &str, text: &str) -> rustix::io::Result<()> {
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(file, name, text.as_bytes(), flags)
}

/// A file's bytes; it is removed.
pub fn taken(file: &Path) -> Vec<u8> {
    let bytes = std::fs::read(file).unwrap();
    std::fs::remove_file(file).unwrap();
    bytes
}

/// Overwrites bytes of a file behind everybody's back.
pub fn put(file: &Path, at: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(file).unwrap();
    file.write_all_at(bytes, at).unwrap();
    file.sync_all().unwrap();
}

/// Changes a bit of a file.
pub fn flip(file: &Path, at: u64) {
    let mut byte = [0];
    File::open(file)
        .unwrap()
        .read_exact_at(&mut byte, at)
        .unwrap();
    put(file, at, &[byte[0] ^ 4]);
}

/// What must be refused, with one line that has this part.
#[track_caller]
pub fn refused<T>(done: Result<T>, part: &str) -> ErrorKind {
    let error: Error = done.err().expect("a refusal");
    let text = error.to_string();
    let one_line = !text.contains('\n');
    assert!(text.contains(part) && one_line, "no {part:?}: {text}");
    error.kind()
}

pub fn port(store: &Store, disk: usize) -> Port {
    store.disks()[disk].open_port().unwrap()
}

/// Writes sectors of equal bytes, durably.
pub fn commit(disk: &Disk, sector: u64, byte: u8, sectors: usize) {
    let mut port = disk.open_port().unwrap();
    write(&mut port, sector, byte, sectors);
    flush(&mut port);
}

/// Whether all the bytes are this one.
pub fn all(bytes: &[u8], byte: u8) -> bool {
    bytes.iter().all(|found| *found == byte)
}

pub fn put_in(sector: u64, byte: u8, sectors: usize) -> Operation {
    let data = fill(byte, sectors);
    Operation::Write { sector, data }
}

pub fn discard(sector: u64, sectors: u32) -> Operation {
    Operation::Discard { sector, sectors }
}

pub fn zeroes(sector: u64, sectors: u32, unmap: bool) -> Operation {
    Operation::WriteZeroes {
        sector,
        sectors,
        unmap,
    }
}

pub fn snapshot(name: &str) -> Point {
    Point::Snapshot(name.parse().unwrap())
}

/// This program, to run one test of it in a process of its own.
pub fn only(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .stdin(Stdio::null());
    command
}

/// Copies a log, with its saved files and spill files, and images to other paths, as a process
/// killed now would leave them. If a checkpoint writes the control file or a mark meanwhile, or
/// removes a file, the copy is repeated, since it would mix two moments.
pub fn copy_killed(from: &Path, to: &Path, images: &[(PathBuf, PathBuf)]) {
    std::fs::create_dir(to).unwrap();
    let state = || {
        let marks: Vec<_> = images.iter().map(|(image, _)| mark(image)).collect();
        (std::fs::read(from.join("control")).unwrap(), marks)
    };
    let copy = || {
        for entry in std::fs::read_dir(from)? {
            let name = entry?.file_name();
            if !name.to_str().unwrap().ends_with(".new") {
                std::fs::copy(from.join(&name), to.join(&name))?;
            }
        }
        std::io::Result::Ok(())
    };
    loop {
        let before = state();
        for entry in std::fs::read_dir(to).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let copied = copy();
        for (image, copy) in images {
            copy_image(image, copy);
        }
        if copied.is_ok() && state() == before {
            return;
        }
    }
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
        0 => discard(sector, count),
        1 => zeroes(sector, count, byte < 128),
        _ => put_in(sector, byte, sectors as usize),
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
