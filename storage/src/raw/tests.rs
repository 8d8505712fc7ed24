//! Both engines against a model in memory: their promises in every cache mode, and after failures.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use walvisor_testkit::Random;
use walvisor_testkit::queue::{fill, wait};

use super::*;
use crate::{Allocation, Buffer, Failure, MAX_REQUEST_BYTES, Operation};

const SECTORS: u64 = 16384;
const SECTOR: usize = SECTOR_SIZE as usize;

/// An image of [`SECTORS`] sectors in `directory`.
fn create(directory: &Path) -> PathBuf {
    let path = directory.join("disk.img");
    let file = File::create(&path).expect("an image");
    file.set_len(SECTORS * SECTOR_SIZE).expect("an image");
    path
}

/// Runs `test` over each engine that this kernel has.
fn on_every_engine(cache: RawCache, test: impl Fn(&RawDisk, &Path)) {
    for engine in ENGINES {
        let directory = tempfile::tempdir().expect("a directory");
        let path = create(directory.path());
        if let Some(disk) = disk_on(&path, cache, engine) {
            test(&disk, &path);
        }
    }
}

/// A queue whose requests are numbered.
struct Client {
    queue: Box<dyn BackendQueue>,
    submitted: u64,
}

impl Client {
    fn new(disk: &RawDisk) -> Self {
        let queue = disk.open_queue().expect("a queue");
        Self {
            queue,
            submitted: 0,
        }
    }

    fn submit(&mut self, operation: Operation) {
        self.queue.submit(self.submitted, operation);
        self.submitted += 1;
    }

    /// Waits for all requests: their results in the order in which they were submitted.
    fn finish(&mut self) -> Vec<Result<Option<Buffer>, Failure>> {
        let mut done = wait(&mut *self.queue, self.submitted as usize);
        self.submitted = 0;
        done.sort_by_key(|completion| completion.token);
        done.into_iter()
            .map(|completion| completion.result)
            .collect()
    }

    fn run(&mut self, operation: Operation) -> Result<Option<Buffer>, Failure> {
        self.submit(operation);
        self.finish().remove(0)
    }
}

fn write(sector: u64, byte: u8, sectors: usize) -> Operation {
    let data = fill(byte, sectors);
    Operation::Write { sector, data }
}

/// The result of a request that returns no data.
fn end(ended: Result<Option<Buffer>, Failure>) -> Result<(), Failure> {
    ended.map(|data| assert!(data.is_none()))
}

fn read(sector: u64, sectors: u32) -> Operation {
    Operation::Read { sector, sectors }
}

fn discard(sector: u64, sectors: u32) -> Operation {
    Operation::Discard { sector, sectors }
}

fn zeroes(sector: u64, sectors: u32, unmap: bool) -> Operation {
    Operation::WriteZeroes {
        sector,
        sectors,
        unmap,
    }
}

const ENGINES: [EngineKind; 2] = [EngineKind::IoUring, EngineKind::Blocking];

/// A disk of this engine; `None`, with a line that says why, if this kernel does not have it.
fn disk_on(image: &Path, cache: RawCache, engine: EngineKind) -> Option<RawDisk> {
    let image = Image::open(image, false).expect("an image");
    let disk = RawDisk::with_engine(image, cache, engine);
    disk.inspect_err(|error| println!("skipped: {engine:?}: {error}"))
        .ok()
}

#[test]
fn every_operation_does_what_the_model_does_in_every_cache_mode() {
    for cache in [
        RawCache::Writeback,
        RawCache::Writethrough,
        RawCache::Unsafe,
    ] {
        on_every_engine(cache, |disk, path| {
            let mut client = Client::new(disk);
            let mut model = vec![0_u8; SECTORS as usize * SECTOR];
            let mut random = Random(7);
            let mut below = |bound| random.below(bound);
            for round in 0..400_u64 {
                let sectors = 1 + below(64);
                let sector = below(SECTORS - sectors + 1);
                let bytes =
                    (sector * SECTOR_SIZE) as usize..((sector + sectors) * SECTOR_SIZE) as usize;
                let byte = round as u8 | 1;
                let kind = below(6);
                let count = sectors as u32;
                let ended = client.run(match kind {
                    0 | 1 => write(sector, byte, sectors as usize),
                    2 => discard(sector, count),
                    3 => zeroes(sector, count, below(2) == 0),
                    4 => Operation::Flush,
                    _ => read(sector, count),
                });
                match kind {
                    0 | 1 => model[bytes].fill(byte),
                    2 | 3 => model[bytes].fill(0),
                    4 => {}
                    _ => {
                        let data = ended.expect("a read").expect("data");
                        assert!(data[..] == model[bytes], "round {round}");
                        continue;
                    }
                }
                assert!(ended.expect("done").is_none());
            }
            assert!(client.run(Operation::Flush).is_ok());
            drop(client);
            assert!(std::fs::read(path).expect("the image") == model);
        });
    }
}

#[test]
fn more_requests_at_once_than_a_ring_holds() {
    on_every_engine(RawCache::Writethrough, |disk, path| {
        let mut client = Client::new(disk);
        for sector in 0..1500 {
            client.submit(write(sector, sector as u8, 1));
            if sector % 100 == 0 {
                client.submit(Operation::Flush);
            }
        }
        assert!(client.finish().into_iter().all(|ended| end(ended).is_ok()));
        for sector in 0..1500 {
            client.submit(read(sector, 1));
        }
        for (sector, ended) in client.finish().into_iter().enumerate() {
            let data = ended.expect("a read").expect("data");
            assert!(data.iter().all(|&byte| byte == sector as u8));
        }
        // The queue may be dropped with requests in flight.
        for sector in 0..1500 {
            client.submit(write(sector, 9, 8));
        }
        client.queue.kick();
        drop(client);
        assert_eq!(std::fs::metadata(path).expect("it").len(), SECTORS * 512);
    });
}

#[test]
fn wrong_requests_fail_as_with_every_disk() {
    on_every_engine(RawCache::Writeback, |disk, _| {
        let mut client = Client::new(disk);
        for operation in [
            read(SECTORS, 1),
            read(SECTORS - 1, 2),
            read(0, 0),
            read(u64::MAX, 1),
            write(SECTORS, 1, 1),
            discard(0, u32::MAX),
            zeroes(0, 0, false),
        ] {
            assert_eq!(end(client.run(operation)), Err(Failure::OutOfRange));
        }
        let odd = Operation::Write {
            sector: 0,
            data: Buffer::zeroed(513),
        };
        assert_eq!(end(client.run(odd)), Err(Failure::TooLarge));
        let beyond = MAX_REQUEST_BYTES as u64 / SECTOR_SIZE + 1;
        disk.grow(64 << 20).expect("longer");
        assert_eq!(
            end(client.run(read(0, beyond as u32))),
            Err(Failure::TooLarge)
        );
    });
}

#[test]
fn a_read_only_disk_reads_and_flushes() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = create(directory.path());
    let image = Image::open(&path, true).expect("an image");
    let disk = RawDisk::new(image, RawCache::Writeback);
    assert!(disk.capabilities().read_only && !disk.capabilities().discard);
    let mut client = Client::new(&disk);
    assert_eq!(end(client.run(write(0, 1, 1))), Err(Failure::ReadOnly));
    assert_eq!(end(client.run(Operation::Flush)), Ok(()));
    assert!(client.run(read(0, 8)).is_ok());
    assert!(disk.grow(1 << 30).is_err());
}

#[test]
fn a_disk_grows_and_reports_its_holes() {
    on_every_engine(RawCache::Writeback, |disk, path| {
        let mut client = Client::new(disk);
        assert!(disk.grow(513).is_err() && disk.grow(512).is_err());
        disk.grow(2 * SECTORS * SECTOR_SIZE).expect("longer");
        assert_eq!(disk.sectors(), 2 * SECTORS);
        assert_eq!(end(client.run(write(SECTORS, 5, 2048))), Ok(()));
        assert_eq!(end(client.run(Operation::Flush)), Ok(()));
        let told = disk.extents(0, 2 * SECTORS, 8).expect("extents");
        let total: u64 = told.iter().map(|extent| extent.sectors).sum();
        assert_eq!(total, 2 * SECTORS);
        let kept: Vec<_> = told.iter().map(|extent| extent.allocation).collect();
        let (data, hole) = (Allocation::Data, Allocation::Hole);
        // A file system without holes reports everything as data.
        assert!(kept == [hole, data, hole] || kept == [data], "{kept:?}");
        assert_eq!(disk.extents(SECTORS, 8, 1).expect("extents").len(), 1);
        assert_eq!(
            std::fs::metadata(path).expect("it").len(),
            2 * SECTORS * SECTOR_SIZE
        );
    });
}

#[test]
fn where_the_file_system_makes_no_zeroes_they_are_written() {
    // tmpfs has holes, but no ZERO_RANGE.
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        return println!("skipped: no /dev/shm");
    };
    let path = create(directory.path());
    // One after the other, since each locks the image.
    let disks = ENGINES.into_iter();
    for disk in disks.filter_map(|engine| disk_on(&path, RawCache::Writethrough, engine)) {
        let mut client = Client::new(&disk);
        assert_eq!(end(client.run(write(0, 7, 8000))), Ok(()));
        assert_eq!(end(client.run(zeroes(3, 7001, false))), Ok(()));
        let data = client.run(read(0, 8000)).expect("a read").expect("data");
        for (sector, bytes) in data.chunks(SECTOR).enumerate() {
            let byte = if (3..7004).contains(&sector) { 0 } else { 7 };
            assert!(bytes.iter().all(|&it| it == byte), "sector {sector}");
        }
    }
}

#[test]
fn a_truncated_image_fails_reads_and_nothing_else() {
    on_every_engine(RawCache::Writeback, |disk, path| {
        let mut client = Client::new(disk);
        let file = File::options().write(true).open(path).expect("the image");
        file.set_len(4096).expect("shorter");
        assert_eq!(end(client.run(read(4, 8))), Err(Failure::Io));
        assert_eq!(end(client.run(read(100, 8))), Err(Failure::Io));
        assert!(client.run(read(0, 8)).is_ok());
    });
}

/// A block device of sectors of 4096 bytes, so that a raw disk writes it through the page cache;
/// once it is [broken](Self::break_it) no write reaches it.
struct LoopDevice {
    device: PathBuf,
    memory: File,
}

impl LoopDevice {
    /// `None`, with a line that says why, if no loop device is available.
    fn new() -> Option<Self> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let memory: std::os::fd::OwnedFd = rustix::fs::memfd_create("disk", flags).expect("memory");
        let memory = File::from(memory);
        memory.set_len(SECTORS * SECTOR_SIZE).expect("memory");
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        let losetup = std::process::Command::new("losetup")
            .args(["--find", "--show", "--sector-size", "4096", &path])
            .output();
        let output = match losetup {
            Ok(output) if output.status.success() => output,
            Ok(output) => {
                let why = String::from_utf8_lossy(&output.stderr);
                println!("skipped: no loop device: {}", why.trim());
                return None;
            }
            Err(error) => {
                println!("skipped: losetup: {error}");
                return None;
            }
        };
        let device = String::from_utf8(output.stdout).expect("a path");
        let device = PathBuf::from(device.trim());
        Some(Self { device, memory })
    }

    fn break_it(&self) {
        let seal = rustix::fs::SealFlags::FUTURE_WRITE;
        rustix::fs::fcntl_add_seals(&self.memory, seal).expect("sealed");
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detach = std::process::Command::new("losetup")
            .arg("--detach")
            .arg(&self.device)
            .status();
        assert!(detach.is_ok_and(|status| status.success()));
    }
}

#[test]
fn a_lost_write_fails_every_flush_that_waits_and_all_that_comes_after() {
    for cache in [RawCache::Writeback, RawCache::Writethrough] {
        for engine in ENGINES {
            let Some(device) = LoopDevice::new() else {
                return;
            };
            let Some(disk) = disk_on(&device.device, cache, engine) else {
                continue;
            };
            let mut clients: Vec<_> = (0..4).map(|_| Client::new(&disk)).collect();
            let all = |clients: &mut Vec<Client>, operation: &dyn Fn(u64) -> Operation| {
                for (number, client) in clients.iter_mut().enumerate() {
                    client.submit(operation(number as u64));
                    client.queue.kick();
                }
                let ended = clients
                    .iter_mut()
                    .map(|client| end(client.finish().remove(0)));
                ended.collect::<Vec<_>>()
            };
            let write_own = |number| write(number * 1024, 7, 64);
            assert_eq!(all(&mut clients, &write_own), [Ok(()); 4]);
            assert_eq!(all(&mut clients, &|_| Operation::Flush), [Ok(()); 4]);
            device.break_it();
            if cache == RawCache::Writeback {
                assert_eq!(
                    all(&mut clients, &write_own),
                    [Ok(()); 4],
                    "in the page cache"
                );
                let flushed = all(&mut clients, &|_| Operation::Flush);
                assert_eq!(flushed, [Err(Failure::Io); 4], "{engine:?}");
            } else {
                let written = all(&mut clients, &write_own);
                assert_eq!(written, [Err(Failure::Io); 4], "{engine:?}");
            }
            for operation in [&write_own, &|_| Operation::Flush] as [&dyn Fn(u64) -> Operation; 2] {
                assert_eq!(all(&mut clients, operation), [Err(Failure::Io); 4]);
            }
            let data = clients[0]
                .run(read(2048, 8))
                .expect("a read")
                .expect("data");
            assert!(data.iter().all(|&byte| byte == 7));
        }
    }
}
