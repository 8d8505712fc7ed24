//! Logs that are written, archived and restored, over a store that fails.

mod damage;
mod faulty;
mod follow;
mod history;
mod large;
mod rot;
mod serving;
mod strange;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use walvisor_storage::{
    BackendQueue, Buffer, Commit, Disk, DiskOptions, MarkText, Operation, Point, Retention, Store,
    StoreOptions, create_disk, export_disk,
};
use walvisor_testkit::queue;

use crate::epoch::Claim;
use crate::error::{Error, ErrorKind, Result};
use crate::expire::{DAY_US, ExpireOptions, ExpireReport, Lease, expire_at};
use crate::fetch::restore;
use crate::layout::{self, ObjectId};
use crate::lineage::read_base;
use crate::object;
use crate::remote::Archive;
use crate::restore::{RestoreReport, verify};
use crate::survey::survey;
use crate::uploader::{Tick, UploadOptions, Uploader};

const SECTORS: u64 = 512;

/// A log with disks, and an archive in memory.
struct Bench {
    dir: tempfile::TempDir,
    store: Arc<InMemory>,
}

impl Bench {
    fn new(disks: &[&str], retain: Retention) -> Self {
        let bench = Self {
            dir: tempfile::tempdir().unwrap(),
            store: Arc::default(),
        };
        for disk in disks {
            let options = options(retain);
            create_disk(&bench.disk(disk), SECTORS * 512, &bench.log(), &options).unwrap();
        }
        bench
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    fn disk(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn open(&self, disks: &[&str]) -> Store {
        let disks: Vec<_> = disks
            .iter()
            .map(|disk| DiskOptions::new(self.disk(disk)))
            .collect();
        Store::open(&self.log(), &disks, &options(Retention::Nothing)).unwrap()
    }

    /// A log of disk "a", which is open, and an archive for it.
    fn in_use(retain: Retention) -> (Self, Archive, Store) {
        let bench = Self::new(&["a"], retain);
        let (archive, store) = (bench.archive(), bench.open(&["a"]));
        (bench, archive, store)
    }

    fn archive(&self) -> Archive {
        archive_in(self.store.clone())
    }

    fn restore(&self, archive: &Archive, at: Point) -> Result<(tempfile::TempDir, RestoreReport)> {
        let dir = tempfile::tempdir_in(self.dir.path()).unwrap();
        let restored = restore(archive, &dir.path().join("restored"), at, &mut |_, _| {})?;
        Ok((dir, restored))
    }

    /// The bytes of the first disk as of a point.
    fn bytes_at(&self, archive: &Archive, at: Point) -> Vec<u8> {
        let (_dir, restored) = self.restore(archive, at).unwrap();
        bytes_of(&restored.disks[0].path, &restored.log_dir)
    }
}

fn options(retain: Retention) -> StoreOptions {
    StoreOptions {
        segment_size: 256 << 10,
        max_segments: 32,
        retain: (retain != Retention::Nothing).then_some(retain),
        ..StoreOptions::default()
    }
}

fn archive_in(store: Arc<dyn object_store::ObjectStore>) -> Archive {
    Archive::over(store, "a/log".into(), "memory".into(), true).unwrap()
}

/// Opens the disks that have come back.
fn open(restored: &RestoreReport) -> Store {
    let disks: Vec<_> = restored
        .disks
        .iter()
        .map(|disk| DiskOptions::new(&disk.path))
        .collect();
    Store::open(&restored.log_dir, &disks, &options(Retention::Nothing)).unwrap()
}

/// The present bytes of a disk that is not in use.
fn bytes_of(disk: &Path, log: &Path) -> Vec<u8> {
    let raw = disk.with_extension("raw");
    export_disk(disk, log, &raw, true, None, &mut |_, _| {}).unwrap();
    std::fs::read(raw).unwrap()
}

fn write(disk: &Disk, sector: u64, byte: u8, sectors: usize) {
    queue::write(&mut disk.open_port().unwrap(), sector, byte, sectors);
}

fn mark(disk: &Disk) -> Commit {
    disk.mark(&"here".parse::<MarkText>().unwrap()).unwrap()
}

fn uploader<'a>(archive: &'a Archive, bench: &Bench) -> Uploader<'a> {
    Uploader::new(archive, &bench.log(), UploadOptions::default()).unwrap()
}

/// Why no uploader begins.
fn refused(archive: &Archive, log: &Path) -> Error {
    let begun = Uploader::new(archive, log, UploadOptions::default());
    begun.map(drop).unwrap_err()
}

fn take_over() -> UploadOptions {
    UploadOptions {
        take_over: true,
        ..UploadOptions::default()
    }
}

/// Has another machine claim what was claimed here.
fn claim_elsewhere(archive: &Archive, epoch: u64) {
    let name = layout::epoch(epoch);
    let claim = archive.block_on(archive.need(&name)).unwrap();
    let mut claim = Claim::of(&claim, &name, epoch);
    claim.host = "elsewhere".to_owned();
    claim.owner = "process 1 on elsewhere".to_owned();
    let claim = serde_json::to_vec(&claim).unwrap().into();
    archive.block_on(archive.put(&name, &claim)).unwrap();
}

fn remove_notices(uploader: &Uploader<'_>) {
    let archive = uploader.archive();
    archive.block_on(async {
        for notice in archive.list(layout::EXPIRING).await.unwrap() {
            archive.remove(&notice.name).await.unwrap();
        }
    });
}

/// Ticks until everything is there.
fn settle(uploader: &mut Uploader<'_>) -> Tick {
    let mut last = None;
    for number in 0..1000 {
        let tick = uploader.tick().unwrap();
        if tick.caught_up && tick.restorable && tick.base.is_none() {
            return tick;
        }
        last = Some((tick, uploader.take_reason()));
        if number == 500 {
            // The store has put a notice late, which would end after a minute.
            remove_notices(uploader);
        }
    }
    panic!("never caught up: {last:?}");
}

#[test]
fn a_disk_in_use_comes_back_as_of_its_commits() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let disk = &store.disks()[0];
    write(disk, 0, 1, 8);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    let mut commits = Vec::new();
    for round in 2..10u8 {
        write(disk, u64::from(round) * 8, round, 3);
        commits.push((mark(disk), round));
        up.tick().unwrap();
    }
    let tick = settle(&mut up);
    assert_eq!(tick.last.lsn, commits.last().unwrap().0.lsn);
    for (commit, newest) in commits {
        for at in [
            Point::Lsn(commit.lsn),
            Point::Cid(commit.cid),
            Point::Time(commit.unix_us),
        ] {
            let bytes = bench.bytes_at(&archive, at);
            for round in 2..10usize {
                let wanted = if round <= usize::from(newest) {
                    round as u8
                } else {
                    0
                };
                assert_eq!(bytes[round * 8 * 512], wanted, "{at}: {round}");
            }
            assert_eq!(bytes[0], 1);
        }
    }
    let verified = verify(&archive, Point::Newest, &mut |_, _| {}).unwrap();
    assert_eq!(verified.commit.lsn, tick.last.lsn);
    store.close().unwrap();
}

/// The log keeps no history, so checkpoints overwrite the images while they are copied.
#[test]
fn images_that_change_while_they_are_copied_are_made_exact() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    let mut up = uploader(&archive, &bench);
    let mut model = vec![0; SECTORS as usize * 512];
    for round in 1..60u64 {
        let (sector, byte) = (round * 37 % (SECTORS - 20), round as u8);
        write(disk, sector, byte, 20);
        model[sector as usize * 512..][..20 * 512].fill(byte);
        if round % 7 == 0 {
            disk.checkpoint().unwrap();
        }
        up.tick().unwrap();
    }
    mark(disk);
    settle(&mut up);
    assert!(bench.bytes_at(&archive, Point::Newest) == model);
    store.close().unwrap();
    // All of it is in the image now, and the log has no segment.
    settle(&mut up);
    assert!(bench.bytes_at(&archive, Point::Newest) == model);
}

/// Between two steps of the copy, a checkpoint puts newer records into the image.
#[test]
fn images_lead_to_no_point_before_what_they_may_have() {
    const BIG: u64 = 4096;
    let bench = Bench::new(&[], Retention::Nothing);
    let archive = bench.archive();
    create_disk(
        &bench.disk("a"),
        BIG * 512,
        &bench.log(),
        &options(Retention::Nothing),
    )
    .unwrap();
    let store = bench.open(&["a"]);
    let disk = &store.disks()[0];
    let mut model = vec![0; (BIG * 512) as usize];
    for sector in (0..BIG).step_by(32) {
        // No chunk like another.
        let byte = (sector / 32) as u8 + 100;
        write(disk, sector, byte, 32);
        model[sector as usize * 512..][..32 * 512].fill(byte);
    }
    disk.checkpoint().unwrap();
    let mut up = uploader(&archive, &bench);
    let mut states = Vec::new();
    for round in 2..20u8 {
        // At the image's end, which is copied last.
        let sector = BIG - 8 + u64::from(round) % 8;
        write(disk, sector, round, 1);
        model[sector as usize * 512..][..512].fill(round);
        states.push((mark(disk).lsn, model.clone()));
        up.tick().unwrap();
        disk.checkpoint().unwrap();
    }
    settle(&mut up);
    store.close().unwrap();
    let oldest = survey(&archive).unwrap().spans[0].bases[0].exact.lsn;
    let reached = states.iter().filter(|(lsn, _)| *lsn >= oldest).count();
    assert!(0 < reached && reached < states.len(), "{reached}");
    let (_dir, newest) = bench.restore(&archive, Point::Newest).unwrap();
    for (lsn, model) in states {
        // The log that comes back does not lead there either.
        let (disk, raw) = (&newest.disks[0].path, bench.disk("past"));
        let (at, log) = (Point::Lsn(lsn), &newest.log_dir);
        let past = walvisor_storage::restore_disk(disk, log, at, &raw, None, &mut |_, _| {});
        assert_eq!(past.is_ok(), lsn >= oldest, "{lsn}");
        if past.is_ok() {
            assert!(std::fs::read(&raw).unwrap() == model);
            std::fs::remove_file(&raw).unwrap();
        }
        match bench.restore(&archive, Point::Lsn(lsn)) {
            Ok((_dir, back)) => assert!(bytes_of(&back.disks[0].path, &back.log_dir) == model),
            Err(error) => assert!(lsn < oldest, "{error}"),
        }
    }
}

#[test]
fn an_uploader_that_lost_the_archive_stops_and_what_it_adds_does_not_count() {
    let bench = Bench::new(&["a"], Retention::All);
    let (archive, other) = (bench.archive(), bench.archive());
    let store = bench.open(&["a"]);
    let disk = &store.disks()[0];
    write(disk, 0, 1, 1);
    mark(disk);
    let mut first = uploader(&archive, &bench);
    settle(&mut first);
    let mut second = uploader(&other, &bench);
    write(disk, 1, 2, 1);
    mark(disk);
    let error = first.tick().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(error.to_string().contains("(epoch 2)"), "{error}");
    let tick = settle(&mut second);
    assert_eq!(survey(&archive).unwrap().spans.len(), 1);
    assert_eq!(
        verify(&archive, Point::Newest, &mut |_, _| {})
            .unwrap()
            .commit
            .lsn,
        tick.last.lsn
    );
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[512], 2);
    store.close().unwrap();
}

#[test]
fn a_store_that_ignores_conditions_is_refused() {
    let bench = Bench::new(&["a"], Retention::All);
    let careless = Arc::new(faulty::FaultyStore::careless(bench.store.clone()));
    let archive = archive_in(careless.clone());
    let refused = refused(&archive, &bench.log()).to_string();
    assert!(
        refused.contains("ignores conditions") && refused.contains("fencing=off"),
        "{refused}"
    );
    let archive = Archive::over(careless, "a".into(), "memory".into(), false).unwrap();
    settle(&mut uploader(&archive, &bench));
}

#[test]
fn an_archive_is_of_one_log() {
    let [bench, other] = [(); 2].map(|()| Bench::new(&["a"], Retention::All));
    let archive = bench.archive();
    settle(&mut uploader(&archive, &bench));
    let refused = refused(&archive, &other.log());
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    assert!(
        refused.to_string().contains("an archive of its own"),
        "{refused}"
    );
}

/// The uploader is away while the log recycles its segments.
#[test]
fn a_log_that_went_on_without_the_archive_begins_anew_and_the_old_span_stays() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    write(disk, 0, 1, 1);
    let first = mark(disk);
    settle(&mut uploader(&archive, &bench));
    for round in 0..500u64 {
        write(disk, round % 8 * 8, round as u8, 40);
        if round % 10 == 0 {
            disk.checkpoint().unwrap();
        }
    }
    write(disk, 0, 9, 1);
    mark(disk);
    // Not if it was another machine that wrote the archive.
    claim_elsewhere(&archive, 1);
    let refused = refused(&archive, &bench.log());
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    let told = "process 1 on elsewhere has since written to this archive";
    assert!(refused.to_string().contains(told), "{refused}");
    let mut up = Uploader::new(&archive, &bench.log(), take_over()).unwrap();
    assert!(
        up.take_reason()
            .unwrap()
            .contains("is no longer in the log")
    );
    settle(&mut up);
    assert_eq!(survey(&archive).unwrap().spans.len(), 2);
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 9);
    assert_eq!(bench.bytes_at(&archive, Point::Lsn(first.lsn))[0], 1);
    let beyond = bench.restore(&archive, Point::Lsn(first.lsn + 1)).map(drop);
    let beyond = beyond.unwrap_err().to_string();
    assert!(
        beyond.contains("nothing in the archive leads to lsn:"),
        "{beyond}"
    );
    store.close().unwrap();
}

/// A program mounts the image, say, while no log has it open.
#[test]
fn an_image_that_others_have_written_to_begins_anew() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    write(&store.disks()[0], 0, 1, 1);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    store.close().unwrap();
    let image = std::fs::File::options()
        .write(true)
        .open(bench.disk("a"))
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&image, &[5; 512], 512).unwrap();
    drop(image);
    let store = bench.open(&["a"]);
    write(&store.disks()[0], 2, 3, 1);
    mark(&store.disks()[0]);
    settle(&mut up);
    store.close().unwrap();
    let bytes = bench.bytes_at(&archive, Point::Newest);
    assert_eq!((bytes[0], bytes[512], bytes[1024]), (1, 5, 3));
    assert!(up.epoch() > 1);
}

/// Nobody has written since.
#[test]
fn a_restore_in_place_that_the_images_have_passed_is_in_the_archive() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    write(&store.disks()[0], 0, 1, 1);
    let one = mark(&store.disks()[0]);
    write(&store.disks()[0], 0, 2, 1);
    mark(&store.disks()[0]);
    settle(&mut uploader(&archive, &bench));
    store.close().unwrap();
    let disk = bench.disk("a");
    walvisor_storage::rewind_disk(&disk, &bench.log(), Point::Lsn(one.lsn)).unwrap();
    let store = bench.open(&["a"]);
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 1);
    // It does not begin anew again and again.
    let epoch = up.epoch();
    settle(&mut up);
    settle(&mut uploader(&archive, &bench));
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 1);
    assert_eq!(up.epoch(), epoch);
}

#[test]
fn a_disk_that_grows_is_as_large_when_it_comes_back() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let disk = &store.disks()[0];
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    disk.grow(2 * SECTORS * 512).unwrap();
    write(disk, 2 * SECTORS - 1, 4, 1);
    mark(disk);
    settle(&mut up);
    store.close().unwrap();
    let bytes = bench.bytes_at(&archive, Point::Newest);
    assert_eq!(
        (bytes.len() as u64, bytes.last()),
        (2 * SECTORS * 512, Some(&4))
    );
    assert_eq!(up.epoch(), 1);
}

/// Between two pushes the disk is cut, and grows again.
#[test]
fn bytes_that_were_cut_off_do_not_come_back() {
    for restarts in [false, true] {
        let (bench, archive, store) = Bench::in_use(Retention::Nothing);
        write(&store.disks()[0], SECTORS - 1, 4, 1);
        mark(&store.disks()[0]);
        let mut up = uploader(&archive, &bench);
        settle(&mut up);
        store.close().unwrap();
        settle(&mut up);
        let (disk, log) = (bench.disk("a"), bench.log());
        for size in [SECTORS / 2, SECTORS] {
            walvisor_storage::resize_disk(&disk, size * 512, &log, true, &[]).unwrap();
        }
        if restarts {
            drop(up);
            up = uploader(&archive, &bench);
        }
        settle(&mut up);
        let bytes = bench.bytes_at(&archive, Point::Newest);
        assert_eq!(
            (bytes.len() as u64, bytes.last()),
            (SECTORS * 512, Some(&0)),
            "{restarts}"
        );
    }
}

#[test]
fn a_disk_that_comes_to_the_log_is_archived_from_then_on() {
    let bench = Bench::new(&["a"], Retention::All);
    let archive = bench.archive();
    let mut store = bench.open(&["a"]);
    write(&store.disks()[0], 0, 1, 1);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    std::fs::write(bench.disk("b"), [6; 4096]).unwrap();
    store.add_disk(&DiskOptions::new(bench.disk("b"))).unwrap();
    write(&store.disks()[1], 1, 7, 1);
    mark(&store.disks()[0]);
    settle(&mut up);
    store.close().unwrap();
    let (_dir, restored) = bench.restore(&archive, Point::Newest).unwrap();
    assert_eq!(restored.log_dir.file_name().unwrap(), "log");
    let bytes = bytes_of(&restored.disks[1].path, &restored.log_dir);
    assert_eq!((bytes.len(), bytes[0], bytes[512]), (4096, 6, 7));
}

/// The log is an older one than the archive has seen, and nobody has opened it yet.
#[test]
fn a_log_that_is_behind_the_archive_does_not_pass_for_its_end() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let disk = &store.disks()[0];
    write(disk, 0, 1, 1);
    let one = mark(disk);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    for round in 0..60 {
        write(disk, round, 2, 40);
    }
    mark(disk);
    settle(&mut up);
    store.close().unwrap();
    let (_dir, restored) = bench.restore(&archive, Point::Lsn(one.lsn)).unwrap();
    let why = refused(&archive, &restored.log_dir).to_string();
    assert!(why.contains("add --take-over"), "{why}");
    let mut behind = Uploader::new(&archive, &restored.log_dir, take_over()).unwrap();
    assert!(behind.take_reason().is_some());
    settle(&mut behind);
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[..512], [1; 512]);
    // The log that is ahead has all that the other one had.
    let mut ahead = uploader(&archive, &bench);
    assert_eq!(ahead.take_reason(), None);
    settle(&mut ahead);
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[512], 2);
}

/// A copy of a log's directory is another one, on the same machine, too.
#[test]
fn a_copied_directory_is_another_copy_of_the_log() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    write(&store.disks()[0], 0, 1, 1);
    mark(&store.disks()[0]);
    store.close().unwrap();
    settle(&mut uploader(&archive, &bench));
    let copy = bench.dir.path().join("copy");
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .args([&bench.log(), &copy])
        .status();
    assert!(copied.unwrap().success());
    // It has all that the archive has.
    let goes_on = Uploader::new(&archive, &copy, UploadOptions::default()).unwrap();
    assert_eq!(goes_on.epoch(), 2);
    let store = bench.open(&["a"]);
    write(&store.disks()[0], 0, 2, 1);
    mark(&store.disks()[0]);
    store.close().unwrap();
    settle(&mut uploader(&archive, &bench));
    // Now it lacks something. The other one has sent it.
    let why = refused(&archive, &copy);
    assert_eq!(why.kind(), ErrorKind::Fenced);
    let why = why.to_string();
    assert!(why.contains("another directory"), "{why}");
    assert!(why.contains("--take-over"), "{why}");
    let mut taken = Uploader::new(&archive, &copy, take_over()).unwrap();
    assert!(taken.take_reason().is_some());
}

/// The point is inside a batch, so the log that is brought back has a restore in place, at an LSN
/// that a record has in the other log.
#[test]
fn a_restore_in_place_of_one_log_does_not_count_in_another() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let mut port = store.disks()[0].open_port().unwrap();
    for sector in 0..3 {
        let data = Buffer::from(&[7; 512][..]);
        port.submit(sector, Operation::Write { sector, data });
    }
    port.kick();
    queue::wait(&mut port, 3);
    queue::flush(&mut port);
    drop(port);
    settle(&mut uploader(&archive, &bench));
    let (_dir, restored) = bench.restore(&archive, Point::Lsn(2)).unwrap();
    assert_eq!(restored.commit.lsn, 2);
    let mut other = Uploader::new(&archive, &restored.log_dir, take_over()).unwrap();
    settle(&mut other);
    assert_eq!(
        bench.bytes_at(&archive, Point::Newest)[..1536],
        [[7; 1024].as_slice(), &[0; 512]].concat()
    );
    write(&store.disks()[0], 3, 7, 1);
    mark(&store.disks()[0]);
    settle(&mut Uploader::new(&archive, &bench.log(), take_over()).unwrap());
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[..2048], [7; 2048]);
    store.close().unwrap();
}

/// The log that was restored goes on, in the same archive and in one of its own.
/// A batch comes as a whole, so the disks of the restored log go back to a point in it. There may
/// be more of them than the log has segments to spare, and some that nobody has written to.
#[test]
fn many_disks_come_back_as_of_a_point_in_a_batch() {
    let names: Vec<String> = (0..12).map(|name| format!("disk{name}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let bench = Bench::new(&names, Retention::All);
    let (archive, store) = (bench.archive(), bench.open(&names));
    for disk in &store.disks()[..11] {
        write(disk, 0, 1, 1);
    }
    let mut port = store.disks()[0].open_port().unwrap();
    for sector in 0..40 {
        let data = queue::fill(2, 1);
        port.submit(sector, Operation::Write { sector, data });
    }
    queue::wait(&mut port, 40);
    queue::flush(&mut port);
    drop(port);
    // Behind the point.
    for disk in &store.disks()[..11] {
        write(disk, 1, 3, 1);
    }
    mark(&store.disks()[0]);
    settle(&mut uploader(&archive, &bench));
    store.close().unwrap();
    let (mut point, mut end) = (None, 0);
    walvisor_storage::dump_records(&bench.log(), &mut |record| {
        // No header comes between it and the one before.
        if record.offset == end && record.disk_id == 1 {
            point.get_or_insert((record.lsn - 1, record.sector));
        }
        end = record.offset + record.payload_bytes;
    })
    .unwrap();
    let (at, sector) = point.expect("a batch of some records");
    let (_dir, restored) = bench.restore(&archive, Point::Lsn(at)).unwrap();
    assert_eq!(restored.commit.lsn, at);
    for (number, disk) in restored.disks.iter().enumerate() {
        let bytes = bytes_of(&disk.path, &restored.log_dir);
        let written = u8::from(number < 11);
        match number {
            // The record behind the point is the first that does not count.
            0 => assert!(bytes[sector as usize * 512] < 2),
            _ => assert_eq!((bytes[0], bytes[512]), (written, 0), "disk {number}"),
        }
    }
    drop(open(&restored));
}

/// Discards have LSNs that no record has. What is written to the restored log gets later ones.
#[test]
fn what_is_written_to_a_restored_log_after_discards_stays() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    write(&store.disks()[0], 0, 1, 1);
    mark(&store.disks()[0]);
    store.close().unwrap();
    for _ in 0..3 {
        walvisor_storage::discard_log(&bench.disk("a"), &bench.log()).unwrap();
    }
    settle(&mut uploader(&archive, &bench));
    let (_dir, restored) = bench.restore(&archive, Point::Newest).unwrap();
    let store = open(&restored);
    write(&store.disks()[0], 0, 9, 1);
    mark(&store.disks()[0]);
    store.close().unwrap();
    let bytes = bytes_of(&restored.disks[0].path, &restored.log_dir);
    assert_eq!(bytes[0], 9);
}

#[test]
fn a_restored_log_goes_on() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let disk = &store.disks()[0];
    write(disk, 0, 1, 1);
    let one = mark(disk);
    write(disk, 0, 2, 1);
    mark(disk);
    settle(&mut uploader(&archive, &bench));
    store.close().unwrap();
    let (_dir, restored) = bench.restore(&archive, Point::Lsn(one.lsn)).unwrap();
    let store = open(&restored);
    let disk = &store.disks()[0];
    write(disk, 1, 3, 1);
    mark(disk);
    let mut up = Uploader::new(&archive, &restored.log_dir, take_over()).unwrap();
    settle(&mut up);
    store.close().unwrap();
    let bytes = bench.bytes_at(&archive, Point::Newest);
    assert_eq!((bytes[0], bytes[512]), (1, 3));
    assert_eq!(survey(&archive).unwrap().spans.len(), 2);
}

#[test]
fn damage_in_the_store_is_told_and_never_restored() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let disk = &store.disks()[0];
    write(disk, 0, 1, 64);
    disk.checkpoint().unwrap();
    settle(&mut uploader(&archive, &bench));
    store.close().unwrap();
    let names: Vec<String> = ["chunks", layout::PARTS, layout::BASES]
        .iter()
        .flat_map(|folder| archive.block_on(archive.list(folder)).unwrap())
        .map(|listed| listed.name)
        .collect();
    assert!(names.len() >= 3, "{names:?}");
    for name in names {
        let whole = archive.block_on(archive.need(&name)).unwrap();
        let put = |bytes: &[u8]| {
            let bytes = bytes.to_vec().into();
            archive.block_on(archive.put(&name, &bytes)).unwrap();
        };
        let mut flipped = whole.to_vec();
        flipped[whole.len() / 2] ^= 1;
        for bad in [Some(&flipped[..]), Some(&whole[..whole.len() / 2]), None] {
            match bad {
                Some(bad) => put(bad),
                None => archive.block_on(archive.remove(&name)).unwrap(),
            }
            let failed = bench
                .restore(&archive, Point::Newest)
                .map(drop)
                .unwrap_err();
            let text = failed.to_string();
            let none = failed.kind() == ErrorKind::NotFound
                && (text.contains("not complete") || text.contains("is damaged"));
            assert!(
                failed.kind() == ErrorKind::Damaged || none,
                "{name}: {text}"
            );
            put(&whole);
        }
    }
    bench.bytes_at(&archive, Point::Newest);
}

#[test]
fn a_restore_that_was_ended_goes_on_with_the_next_chunk() {
    let bench = Bench::new(&["a"], Retention::Nothing);
    let big = 40 << 20;
    let disk = bench.disk("big");
    let log = bench.dir.path().join("big-log");
    create_disk(&disk, big, &log, &options(Retention::Nothing)).unwrap();
    let store = Store::open(
        &log,
        &[DiskOptions::new(&disk)],
        &options(Retention::Nothing),
    )
    .unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    for chunk in 0..(big >> 16) {
        let mut data = Buffer::zeroed(512);
        data[..8].copy_from_slice(&(chunk + 1).to_le_bytes());
        let operation = Operation::Write {
            sector: chunk * 128,
            data,
        };
        queue::run(&mut port, operation).unwrap();
    }
    drop(port);
    store.close().unwrap();
    let archive = bench.archive();
    let mut up = Uploader::new(&archive, &log, UploadOptions::default()).unwrap();
    settle(&mut up);
    let faulty = Arc::new(faulty::FaultyStore::new(bench.store.clone(), 0, 0));
    let failing = archive_in(faulty.clone());
    let dir = bench.dir.path().join("restored");
    faulty.fail_after(300);
    let ended = restore(&failing, &dir, Point::Newest, &mut |_, _| {}).unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::Unavailable, "{ended}");
    faulty.fail_after(u64::MAX);
    let again = restore(&failing, &dir, Point::Newest, &mut |_, _| {}).unwrap();
    let all = big >> 16;
    assert!(again.chunks <= all - 192, "{} of {all}", again.chunks);
    let bytes = bytes_of(&again.disks[0].path, &again.log_dir);
    let right = |chunk: u64| bytes[chunk as usize * 65536..][..8] == (chunk + 1).to_le_bytes();
    assert!((0..all).all(right));
    let error = restore(&failing, &dir, Point::Newest, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("not empty"), "{error}");
}

/// What an idle log costs.
#[test]
fn an_idle_log_sends_nothing() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    write(&store.disks()[0], 5, 7, 1);
    mark(&store.disks()[0]);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    up.tick().unwrap();
    let before = archive.traffic();
    for _ in 0..50 {
        up.tick().unwrap();
    }
    assert_eq!(archive.traffic(), before);
    // What it knows of the segments by then is not what it goes by later.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    for round in 0..200 {
        up.tick().unwrap();
        write(&store.disks()[0], round % 8 * 40, round as u8, 40);
    }
    let last = mark(&store.disks()[0]);
    assert_eq!(settle(&mut up).last.lsn, last.lsn);
    store.close().unwrap();
}

/// No grace: nothing is being copied.
const AT_ONCE: Duration = Duration::ZERO;
const AN_HOUR: Duration = Duration::from_secs(3600);

/// Keeps what is of this time or newer. What would be removed is what is.
fn expire_before(
    archive: &Archive,
    unix_us: u64,
    keep_daily: u32,
    grace: Duration,
) -> ExpireReport {
    let [planned, done] = [true, false].map(|dry_run| {
        let options = ExpireOptions {
            keep: Duration::ZERO,
            keep_daily,
            grace,
            dry_run,
        };
        let report = archive.block_on(expire_at(archive, &options, unix_us));
        report.unwrap()
    });
    assert_eq!(done, planned);
    done
}

/// The images are copied again and again.
fn often() -> UploadOptions {
    UploadOptions {
        base_every: Some(Duration::ZERO),
        ..UploadOptions::default()
    }
}

/// The first copy of the images.
const FIRST: ObjectId = ObjectId {
    epoch: 1,
    number: 1,
};

/// A log in use whose images were copied four times, with records in between, and the commits after
/// which they were.
fn copied_four_times() -> (Bench, Archive, Store, Vec<(Commit, u8)>) {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    let mut commits = Vec::new();
    for round in 1..=4u8 {
        // No chunk like another, and one that stays.
        write(disk, 200, 99, 8);
        // More than a segment.
        (0..5).for_each(|_| write(disk, 0, round, 128));
        commits.push((mark(disk), round));
        disk.checkpoint().unwrap();
        copy_images(&bench, &archive);
    }
    (bench, archive, store, commits)
}

/// Sends the log, and copies the images.
fn copy_images(bench: &Bench, archive: &Archive) {
    let mut up = Uploader::new(archive, &bench.log(), often()).unwrap();
    let bases = copies(archive);
    while copies(archive) == bases {
        up.tick().unwrap();
    }
}

/// The number of copies of the images.
fn copies(archive: &Archive) -> usize {
    archive.block_on(archive.list(layout::BASES)).unwrap().len()
}

fn reachable(bench: &Bench, archive: &Archive, commits: &[(Commit, u8)]) -> Vec<u8> {
    let reached = commits.iter().filter(|(commit, round)| {
        let restored = bench.restore(archive, Point::Lsn(commit.lsn));
        restored.is_ok_and(|(_dir, back)| {
            let bytes = bytes_of(&back.disks[0].path, &back.log_dir);
            assert_eq!((bytes[0], bytes[200 * 512]), (*round, 99));
            true
        })
    });
    reached.map(|(_, round)| *round).collect()
}

#[test]
fn what_no_kept_point_needs_expires_and_the_log_goes_on() {
    let (bench, archive, store, commits) = copied_four_times();
    let disk = &store.disks()[0];
    assert_eq!(reachable(&bench, &archive, &commits), [1, 2, 3, 4]);
    let gone = expire_before(&archive, commits[2].0.unix_us, 0, AT_ONCE);
    assert!(gone.bases > 0 && gone.parts > 0 && gone.chunks > 0 && gone.bytes > 0);
    assert!(gone.oldest.unwrap().lsn <= commits[2].0.lsn, "{gone:?}");
    assert_eq!(reachable(&bench, &archive, &commits), [3, 4]);
    // Nothing more is too old.
    let again = expire_before(&archive, commits[2].0.unix_us, 0, AT_ONCE);
    assert_eq!((again.bases, again.parts, again.chunks), (0, 0, 0));
    // An uploader that comes later goes on where the last one ended.
    write(disk, 0, 5, 128);
    let newest = (mark(disk), 5);
    let mut up = uploader(&archive, &bench);
    assert_eq!(up.take_reason(), None);
    settle(&mut up);
    let bases = survey(&archive).unwrap().spans[0].bases.len();
    assert!(bases >= 2, "the images were not copied anew: {bases}");
    // The newest images and the log since stay, however old they are.
    let gone = expire_before(&archive, u64::MAX / 2, 0, AT_ONCE);
    assert_eq!(gone.bases, bases as u64 - 1);
    assert_eq!(reachable(&bench, &archive, &[commits[3], newest]), [4, 5]);
    store.close().unwrap();
}

#[test]
fn one_point_of_each_day_stays() {
    let (bench, archive, store, commits) = copied_four_times();
    let newest = commits[3].0.unix_us;
    // The first two copies were made two days ago.
    let names = archive.block_on(archive.list(layout::BASES)).unwrap();
    assert_eq!(names.len(), 4);
    for listed in &names[..2] {
        let bytes = archive.block_on(archive.need(&listed.name)).unwrap();
        let (mut header, root) = object::open::<object::BaseHeader>(&listed.name, &bytes).unwrap();
        header.made_us -= 2 * DAY_US;
        let sealed = object::seal(&header, &root).unwrap();
        archive
            .block_on(archive.put(&listed.name, &sealed.into()))
            .unwrap();
    }
    let gone = expire_before(&archive, newest, 3, AT_ONCE);
    assert_eq!(gone.bases, 2, "the last copy of each day stays");
    assert_eq!(reachable(&bench, &archive, &commits), [2, 4]);
    assert_eq!(survey(&archive).unwrap().spans.len(), 2);
    // Two days later it is too old.
    expire_before(&archive, newest + 2 * DAY_US, 3, AT_ONCE);
    assert_eq!(reachable(&bench, &archive, &commits), [4]);
    store.close().unwrap();
}

#[test]
fn what_a_running_restore_needs_stays() {
    let (bench, archive, store, commits) = copied_four_times();
    let first = archive.block_on(archive.list(layout::BASES)).unwrap();
    assert_eq!(first[0].name, layout::base(FIRST));
    assert!(archive.block_on(read_base(&archive, FIRST)).is_ok());
    let lease = archive.block_on(Lease::take(&archive, FIRST)).unwrap();
    assert!(lease.is_some());
    let newest = commits[3].0.unix_us;
    let gone = expire_before(&archive, newest, 0, AT_ONCE);
    assert_eq!((gone.bases, gone.parts), (2, 0), "{gone:?}");
    assert_eq!(reachable(&bench, &archive, &commits), [1, 2, 3, 4]);
    drop(lease);
    let gone = expire_before(&archive, newest, 0, AT_ONCE);
    assert!(gone.parts > 0 && gone.chunks > 0, "{gone:?}");
    assert_eq!(reachable(&bench, &archive, &commits), [4]);
    let left = archive.block_on(archive.list(layout::LEASES)).unwrap();
    assert!(left.is_empty(), "{left:?}");
    store.close().unwrap();
}

/// The archive begins anew, and the first copy of the images has not ended.
#[test]
fn the_last_way_back_stays_until_there_is_another() {
    let (bench, archive, store, commits) = copied_four_times();
    let disk = &store.disks()[0];
    // Without a push, the log forgets what the archive lacks.
    for round in 0..40 {
        write(disk, 0, round, 128);
        disk.checkpoint().unwrap();
    }
    let mut up = uploader(&archive, &bench);
    assert!(up.take_reason().is_some());
    write(disk, 0, 5, 128);
    let newest = (mark(disk), 5);
    let tick = up.tick().unwrap();
    assert!(!tick.restorable && up.epoch() > 4);
    assert!(expire_before(&archive, newest.0.unix_us, 0, AN_HOUR).bases > 0);
    assert_eq!(reachable(&bench, &archive, &commits), [4]);
    settle(&mut up);
    assert_eq!(reachable(&bench, &archive, &[newest]), [5]);
    let gone = expire_before(&archive, u64::MAX / 2, 0, AT_ONCE);
    assert!(gone.bases > 0, "{gone:?}");
    assert!(reachable(&bench, &archive, &commits).is_empty());
    assert_eq!(reachable(&bench, &archive, &[newest]), [5]);
    store.close().unwrap();
}

/// A restore that was killed keeps nothing for ever.
#[test]
fn a_lease_that_nobody_renews_ends() {
    let (bench, archive, store, commits) = copied_four_times();
    let lease = archive.block_on(Lease::take(&archive, FIRST)).unwrap();
    std::mem::forget(lease);
    expire_before(&archive, commits[3].0.unix_us + 2 * DAY_US, 0, AT_ONCE);
    assert_eq!(reachable(&bench, &archive, &commits), [4]);
    for folder in [layout::LEASES, layout::EXPIRING] {
        let left = archive.block_on(archive.list(folder)).unwrap();
        assert!(left.is_empty(), "{left:?}");
    }
    store.close().unwrap();
}

/// Chunks of a copy that is under way are in no manifest yet.
#[test]
fn chunks_of_a_copy_that_is_under_way_stay() {
    let (bench, archive, store, commits) = copied_four_times();
    let disk = &store.disks()[0];
    write(disk, 0, 5, 128);
    let newest = (mark(disk), 5);
    disk.checkpoint().unwrap();
    let mut up = Uploader::new(&archive, &bench.log(), often()).unwrap();
    while up.tick().unwrap().base.is_none_or(|base| base.sent == 0) {}
    let bases = copies(&archive);
    let now = commits[3].0.unix_us;
    let gone = expire_before(&archive, now, 0, AN_HOUR);
    assert!(gone.bases > 0 && gone.chunks == 0, "{gone:?}");
    let left = bases - gone.bases as usize;
    while copies(&archive) == left {
        up.tick().unwrap();
    }
    assert_eq!(reachable(&bench, &archive, &[commits[3], newest]), [4, 5]);
    store.close().unwrap();
}
