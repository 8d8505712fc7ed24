//! Clones that are used while they are filled.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;

use walvisor_storage::{
    CloneSource, DiskOptions, ErrorKind, Operation, Point, Result, Retention, Store, StoreOptions,
    Transfer, clone_disk, create_disk, export_disk, inspect, leave_log, resize_disk, serve_clone,
};
use walvisor_testkit::{PATIENCE, Random, queue};

use crate::support::TestDisk;

const MIB: usize = 1 << 20;
/// Some times as many chunks as are written before a sync.
const SIZE: usize = 48 * MIB;

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: MIB as u64,
        max_segments: 32,
        retain: Some(Retention::All),
        close_time: Some(std::time::Duration::ZERO),
        ..StoreOptions::default()
    }
}

/// A disk with holes, of which some bytes are in its log only, and a clone of it to be made.
struct CloneCase {
    place: TestDisk,
    bytes: Vec<u8>,
    new: PathBuf,
    log: PathBuf,
}

impl CloneCase {
    fn new() -> Self {
        let place = TestDisk::made(&["a"], SIZE as u64, options());
        let mut case = Self {
            new: place.at("new"),
            log: place.at("new.wal"),
            bytes: vec![0; SIZE],
            place,
        };
        let store = case.place.open();
        for chunk in (0..48).filter(|chunk| chunk % 4 != 3) {
            case.write(&store, chunk * 2048, chunk as u8 + 1, 128);
            case.write(&store, chunk * 2048 + 1920, chunk as u8 + 1, 128);
        }
        store.disks()[0].checkpoint().unwrap();
        case.write(&store, 5, 200, 3);
        case.write(&store, 7 * 2048 + 9, 201, 8);
        store.close().unwrap();
        case
    }

    fn write(&mut self, store: &Store, sector: u64, byte: u8, sectors: usize) {
        let mut port = store.disks()[0].open_port().unwrap();
        queue::write(&mut port, sector, byte, sectors);
        queue::flush(&mut port);
        self.bytes[sector as usize * 512..][..sectors * 512].fill(byte);
    }

    fn source(&self, at: Option<Point>) -> CloneSource {
        self.place.source(&self.place.disk, at)
    }

    fn serve(
        &self,
        at: Option<Point>,
        ready: impl FnOnce(),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Transfer> {
        serve_clone(
            &self.source(at),
            &self.new,
            &self.log,
            &options(),
            ready,
            progress,
        )
    }

    fn open_clone(&self) -> Store {
        Store::open(&self.log, &[DiskOptions::new(&self.new)], &options()).unwrap()
    }

    fn cloned(&self) -> Vec<u8> {
        exported(&self.new, &self.log)
    }

    /// Begins to fill the clone, and ends as a killed process does: before anything is there, or
    /// once something is. Returns whether a part is left to do, perhaps of no bytes.
    fn is_killed(&self, at: Option<Point>, early: bool) -> bool {
        let ready = || assert!(!early, "killed");
        let mut begun = None;
        let progress = &mut |passed, total| {
            let more = passed > *begun.get_or_insert(passed) && passed < total;
            assert!(!more, "killed");
        };
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve(at, ready, progress)));
        ended.is_err() && self.place.at("new.fetch").exists()
    }
}

fn exported(disk: &Path, log: &Path) -> Vec<u8> {
    let raw = disk.with_extension("raw");
    export_disk(disk, log, &raw, true, None, &mut |_, _| {}).unwrap();
    std::fs::read(raw).unwrap()
}

/// Whether the file system of temporary files copies blocks, so that a clone is filled.
fn copies(done: &Transfer) -> bool {
    if done.shared {
        println!("skipped: the file system shares blocks");
    }
    !done.shared
}

#[test]
fn a_clone_is_used_while_it_is_filled() {
    let mut case = CloneCase::new();
    let before = case.bytes.clone();
    let mut wanted = case.bytes.clone();
    let done = case.serve(
        None,
        || {
            // Its source stays as it is.
            assert_eq!(
                case.place
                    .try_open(&options())
                    .map(drop)
                    .unwrap_err()
                    .kind(),
                ErrorKind::Locked
            );
            let store = case.open_clone();
            let disk = &store.disks()[0];
            if disk.unfetched() > 0 {
                let second = case.serve(None, || (), &mut |_, _| {}).unwrap_err();
                assert_eq!(second.kind(), ErrorKind::Locked, "{second}");
            }
            let mut port = disk.open_port().unwrap();
            queue::write(&mut port, 3 * 2048 + 7, 99, 2);
            queue::write(&mut port, 22 * 2048, 98, 8);
            let zeroes = Operation::WriteZeroes {
                sector: 21 * 2048,
                sectors: 16,
                unmap: false,
            };
            queue::run(&mut port, zeroes).unwrap();
            queue::flush(&mut port);
        },
        &mut |_, _| {},
    );
    let done = done.unwrap();
    wanted[(3 * 2048 + 7) * 512..][..1024].fill(99);
    wanted[22 * 2048 * 512..][..4096].fill(98);
    wanted[21 * 2048 * 512..][..8192].fill(0);
    assert!(case.cloned() == wanted);
    if copies(&done) {
        assert_eq!(done.copied, 37 * MIB as u64);
        assert_eq!(inspect(&case.new, &case.log).unwrap().unfetched, 0);
    }
    // It is a disk as any other, and its source is what it was.
    resize_disk(&case.new, 2 * SIZE as u64, &case.log, false, &[]).unwrap();
    let left = case.cloned();
    assert!(left[..SIZE] == wanted && left[SIZE..].iter().all(|byte| *byte == 0));
    let store = case.place.open();
    case.write(&store, 0, 1, 1);
    store.close().unwrap();
    assert!(exported(&case.place.disk, &case.place.log())[512..] == before[512..]);
}

/// A clone that was killed goes on, as long as its source is the same.
#[test]
fn a_killed_clone_goes_on() {
    for snapshot in [false, true] {
        for early in [true, false] {
            let mut case = CloneCase::new();
            let at = snapshot.then(|| {
                let store = case.place.open();
                let made = store.disks()[0]
                    .snapshot("golden".parse().unwrap())
                    .unwrap();
                store.close().unwrap();
                Point::Snapshot(made.name)
            });
            if !case.is_killed(at, early) {
                continue;
            }
            let mut wanted = case.bytes.clone();
            // Requests for the rest fail, but not those for what was written.
            let store = case.open_clone();
            assert!(!early || store.disks()[0].unfetched() == 37 * MIB as u64);
            let mut port = store.disks()[0].open_port().unwrap();
            queue::write(&mut port, 4096, 77, 4);
            wanted[4096 * 512..][..2048].fill(77);
            drop(port);
            store.close().unwrap();
            if snapshot {
                // The source goes on, and its image passes the snapshot.
                let store = case.place.open();
                for chunk in 0..48 {
                    case.write(&store, chunk * 2048 + 20, 222, 128);
                }
                store.disks()[0].checkpoint().unwrap();
                store.close().unwrap();
            }
            let done = case.serve(at, || (), &mut |_, _| {}).unwrap();
            assert!(done.copied <= 37 * MIB as u64);
            assert!(case.cloned() == wanted, "{snapshot} {early}");
            let again = case.serve(at, || (), &mut |_, _| {}).unwrap_err();
            assert_eq!(again.kind(), ErrorKind::AlreadyExists, "{again}");
        }
    }
}

/// Nothing is filled with what is not the source any more, nor is anything else taken for a clone.
#[test]
fn a_killed_clone_of_what_has_changed_is_refused() {
    let mut case = CloneCase::new();
    if !case.is_killed(None, true) {
        return println!("skipped: the file system shares blocks");
    }
    let newest = case.place.report().last_lsn;
    let wanted = case.bytes.clone();
    let other = case.place.at("other");
    create_disk(&other, SIZE as u64, &case.place.at("other.wal"), &options()).unwrap();
    let source = CloneSource {
        path: other,
        log_dir: case.place.at("other.wal"),
        at: None,
    };
    let refused = serve_clone(
        &source,
        &case.new,
        &case.log,
        &options(),
        || (),
        &mut |_, _| {},
    );
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::WrongLog);
    let store = case.place.open();
    case.write(&store, 0, 55, 1);
    store.close().unwrap();
    let refused = case.serve(None, || (), &mut |_, _| {}).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::WrongLog);
    assert!(refused.to_string().contains("snapshot:NAME"), "{refused}");
    // Others refuse it too.
    let none = &mut |_, _| {};
    let plain = clone_disk(&case.source(None), &case.new, &case.log, &options(), none);
    assert_eq!(plain.unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert!(leave_log(&case.new, &case.log, &[]).is_err());
    // The log still leads to the point.
    case.serve(Some(Point::Lsn(newest)), || (), &mut |_, _| {})
        .unwrap();
    assert!(case.cloned() == wanted);
}

/// Nor with what was resized, or written behind the log's back.
#[test]
fn a_killed_clone_of_what_was_resized_is_refused() {
    for change in ["grown", "shrunk", "shrunk and grown", "written"] {
        let case = CloneCase::new();
        let store = case.place.open();
        let made = store.disks()[0]
            .snapshot("golden".parse().unwrap())
            .unwrap();
        store.close().unwrap();
        let golden = Point::Snapshot(made.name);
        for at in [golden, Point::Newest] {
            let _ = std::fs::remove_file(&case.new);
            let _ = std::fs::remove_file(case.place.at("new.fetch"));
            let _ = std::fs::remove_dir_all(&case.log);
            if !case.is_killed(Some(at), true) {
                return println!("skipped: the file system shares blocks");
            }
            let (disk, log) = (&case.place.disk, case.place.log());
            let size = inspect(disk, &log).unwrap().size;
            let resize = |size| resize_disk(disk, size, &log, true, &[]).map(drop);
            let changed = match change {
                "grown" => resize(size + (1 << 19)),
                "shrunk" => resize(size - (1 << 19)),
                "shrunk and grown" => resize(1 << 20).and_then(|()| resize(size)),
                _ => {
                    let image = std::fs::File::options().write(true).open(disk).unwrap();
                    image.write_all_at(&[9; 512], 4096).unwrap();
                    Ok(())
                }
            };
            // A log whose history has records does not let its disk shrink.
            if changed.is_err() {
                continue;
            }
            let refused = case.serve(Some(at), || (), &mut |_, _| {}).unwrap_err();
            let kinds = [ErrorKind::WrongLog, ErrorKind::NotFound];
            assert!(kinds.contains(&refused.kind()), "{change} {at}: {refused}");
        }
    }
}

/// What is beside a map that another clone has left is not overwritten, and a map is not replaced
/// whose image may come back.
#[test]
fn an_unfinished_clone_is_not_mixed_up_with_another_image() {
    let case = CloneCase::new();
    if !case.is_killed(None, true) {
        return println!("skipped: the file system shares blocks");
    }
    let moved = case.place.at("moved");
    std::fs::rename(&case.new, &moved).unwrap();
    let refused = case.serve(None, || (), &mut |_, _| {}).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Locked, "{refused}");
    assert!(
        refused.to_string().contains("put the image back"),
        "{refused}"
    );
    std::fs::write(&case.new, vec![7; SIZE]).unwrap();
    let refused = case.serve(None, || (), &mut |_, _| {}).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists, "{refused}");
    assert!(
        std::fs::read(&case.new)
            .unwrap()
            .iter()
            .all(|byte| *byte == 7)
    );
    std::fs::rename(&moved, &case.new).unwrap();
    let elsewhere = case.place.at("elsewhere");
    let source = case.source(None);
    let other = serve_clone(
        &source,
        &case.new,
        &elsewhere,
        &options(),
        || (),
        &mut |_, _| {},
    );
    assert_eq!(other.unwrap_err().kind(), ErrorKind::WrongLog);
    case.serve(None, || (), &mut |_, _| {}).unwrap();
    assert!(case.cloned() == case.bytes);
    // What was a hole in its source is one.
    let allocated = std::fs::metadata(&case.new).unwrap().blocks() * 512;
    assert!(allocated < 37 * (256 << 10), "{allocated}");
}

/// What a process that was killed before the new disk had its name has left is in nobody's way.
#[test]
fn what_an_early_end_left_is_replaced() {
    let case = CloneCase::new();
    if !case.is_killed(None, true) {
        return println!("skipped: the file system shares blocks");
    }
    let left = case.place.at("new.walvisor-part");
    std::fs::rename(&case.new, left).unwrap();
    std::fs::remove_dir_all(&case.log).unwrap();
    case.serve(None, || (), &mut |_, _| {}).unwrap();
    assert!(case.cloned() == case.bytes);
    // Nor is it when another disk is made there.
    let case = CloneCase::new();
    assert!(case.is_killed(None, true));
    let left = case.place.at("new.walvisor-part");
    std::fs::rename(&case.new, left).unwrap();
    std::fs::remove_dir_all(&case.log).unwrap();
    std::fs::remove_file(case.place.at("new.fetch")).unwrap();
    create_disk(&case.new, SIZE as u64, &case.log, &options()).unwrap();
    assert!(case.cloned().iter().all(|byte| *byte == 0));
}

/// Random requests to a clone, and kills, while it is filled.
#[test]
fn random_requests_while_a_clone_is_filled() {
    for seed in 0..6 {
        let mut random = Random(seed);
        let case = CloneCase::new();
        let mut now = case.bytes.clone();
        let mut work = |random: &mut Random| {
            let mut store = case.open_clone();
            for _ in 0..random.below(60) {
                let mut port = store.disks()[0].open_port().unwrap();
                match random.below(12) {
                    0 => queue::flush(&mut port),
                    1 => {
                        drop(port);
                        store.close().unwrap();
                        store = case.open_clone();
                    }
                    _ => {
                        let history = format!("seed {seed}");
                        queue::random_request(&mut port, random, &mut now, &history);
                    }
                }
            }
            store.close().unwrap();
        };
        for _ in 0..random.below(3) {
            if !case.is_killed(None, true) {
                return println!("skipped: the file system shares blocks");
            }
        }
        let (send, ready) = channel();
        thread::scope(|scope| {
            let serving = scope.spawn(|| {
                let tell = || send.send(()).unwrap();
                case.serve(None, tell, &mut |_, _| {})
            });
            ready.recv_timeout(PATIENCE).unwrap();
            work(&mut random);
            serving.join().unwrap().unwrap();
        });
        assert!(case.cloned() == now, "seed {seed}");
    }
}
