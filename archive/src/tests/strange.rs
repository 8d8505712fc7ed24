//! Stores and clocks that fail: the archive uses what is whole, and names what is not.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use object_store::memory::InMemory;
use walvisor_storage::{DiskOptions, Point, Retention, Store, create_disk};

use super::faulty::FaultyStore;
use super::{
    AN_HOUR, AT_ONCE, Bench, archive_in, bytes_of, copied_four_times, copies, copy_images,
    expire_before, mark, often, options, reachable, settle, uploader, write,
};
use crate::base::NOTICE_LAPSE;
use crate::error::{Error, ErrorKind, Result};
use crate::expire::{DAY_US, ExpireNotice, ExpireOptions, Lease, remove_old};
use crate::follow::Replica;
use crate::layout::{self, ObjectId};
use crate::lineage::{Catalog, read_base, read_part};
use crate::object::{self, BaseHeader, Header, Moment, PartHeader, note_clock};
use crate::remote::{Archive, CreateOutcome};
use crate::restore::{RestoreReport, verify};
use crate::survey::survey;
use crate::uploader::{UploadOptions, Uploader, now_us};
use crate::url::ArchiveUrl;

/// An archive in a directory.
fn in_directory(bench: &Bench) -> (PathBuf, Archive) {
    let place = bench.dir.path().join("archive");
    std::fs::create_dir(&place).unwrap();
    let url: ArchiveUrl = format!("file://{}", place.display()).parse().unwrap();
    let archive = Archive::open(&url).unwrap();
    (place, archive)
}

/// The newest manifest.
pub(super) fn newest_base(archive: &Archive) -> ObjectId {
    let catalog = archive.block_on(Catalog::read(archive)).unwrap();
    *catalog.bases.last().unwrap()
}

/// Changes an object's header.
pub(super) fn change<H: Header>(archive: &Archive, name: &str, change: impl FnOnce(&mut H)) {
    let bytes = archive.block_on(archive.need(name)).unwrap();
    let (mut header, body) = object::open::<H>(name, &bytes).unwrap();
    change(&mut header);
    let sealed = object::seal(&header, &body).unwrap();
    archive.block_on(archive.put(name, &sealed.into())).unwrap();
}

pub(super) fn flip(archive: &Archive, name: &str) {
    let mut bytes = archive.block_on(archive.need(name)).unwrap().to_vec();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    archive.block_on(archive.put(name, &bytes.into())).unwrap();
}

fn newest(bench: &Bench, archive: &Archive) -> Result<(tempfile::TempDir, RestoreReport)> {
    bench.restore(archive, Point::Newest)
}

pub(super) fn told<T>(result: Result<T>) -> String {
    result.err().expect("refused").to_string()
}

/// Everything is in the images, and the log has no batch from which to tell its time.
#[test]
fn images_whose_time_is_unknown_are_not_of_all_times() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let before = now_us();
    write(&store.disks()[0], 0, 1, 1);
    store.close().unwrap();
    settle(&mut uploader(&archive, &bench));
    let (base, _) = archive
        .block_on(read_base(&archive, newest_base(&archive)))
        .unwrap();
    assert_eq!(base.exact.unix_us, 0);
    let told = told(bench.restore(&archive, Point::Time(before)));
    assert!(told.contains("nothing in the archive leads to"), "{told}");
    assert_eq!(bench.bytes_at(&archive, Point::Time(now_us()))[0], 1);
}

/// The images are those of an empty log, whose first record is newer than the time.
#[test]
fn nothing_leads_to_a_time_before_the_first_moment() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let before = Point::Time(now_us());
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    write(&store.disks()[0], 0, 1, 1);
    let first = mark(&store.disks()[0]);
    settle(&mut up);
    store.close().unwrap();
    let (disk, raw) = (bench.disk("a"), bench.disk("raw"));
    let by_log =
        walvisor_storage::restore_disk(&disk, &bench.log(), before, &raw, None, &mut |_, _| {});
    by_log.unwrap_err();
    let told = told(bench.restore(&archive, before));
    assert!(told.contains("it reaches from"), "{told}");
    assert_eq!(bench.bytes_at(&archive, Point::Time(first.unix_us))[0], 1);
}

/// The log was written for a while with the clock ahead: a time is that of the last record up to
/// it, as in the log.
#[test]
fn a_time_is_that_of_the_last_record_up_to_it() {
    let records = [10, 20, 500, 510, 30, 40, 900, 60, 35];
    let mut part: PartHeader = serde_json::from_str(
        r#"{"at":{"epoch":1,"number":1},"writer":"","first":null,
            "last":{"lsn":0,"cid":0,"unix_us":0},"pieces":[],"end":null,"root_len":0,
            "root_at":{"epoch":1,"number":1},"segments":[],"made_us":0}"#,
    )
    .unwrap();
    for count in 1..=records.len() {
        part.set_back.clear();
        let mut last = part.last;
        for (lsn, unix_us) in (1..).zip(records).take(count) {
            let next = Moment {
                lsn,
                cid: lsn,
                unix_us,
            };
            note_clock(&mut part.set_back, last, next);
            last = next;
        }
        for at in 0..=1000 {
            let known = part.before(Point::Time(at)).unwrap_or(0);
            let mut rest = (1..).zip(records).take(count);
            let cut = rest.find(|(lsn, unix_us)| *lsn > known && *unix_us > at);
            let reached = cut.map_or(count as u64, |(lsn, _)| lsn - 1);
            let up_to = records.iter().take(count).rposition(|time| *time <= at);
            assert_eq!(reached, up_to.map_or(0, |at| at as u64 + 1), "{count} {at}");
        }
    }
    assert_eq!(part.before(Point::Newest), None);
}

/// The copies' times are those of a clock that was ahead.
#[test]
fn images_are_copied_again_after_a_time_with_the_clock_ahead() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    write(&store.disks()[0], 0, 1, 1);
    settle(&mut uploader(&archive, &bench));
    let name = layout::base(newest_base(&archive));
    change(&archive, &name, |base: &mut BaseHeader| {
        base.made_us += 10 * DAY_US;
    });
    let mut up = uploader(&archive, &bench);
    while copies(&archive) == 1 {
        up.tick().unwrap();
    }
    settle(&mut up);
    assert_eq!(copies(&archive), 2);
}

/// However short the time between two copies is: a push ends.
#[test]
fn copies_of_the_images_leave_time_for_the_log() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    write(&store.disks()[0], 0, 1, 1);
    mark(&store.disks()[0]);
    let mut up = Uploader::new(&archive, &bench.log(), often()).unwrap();
    settle(&mut up);
}

/// Until a copy counts, more time may pass than it has taken.
#[test]
fn the_rest_after_a_copy_begins_when_it_counts() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    write(&store.disks()[0], 0, 1, 1);
    mark(&store.disks()[0]);
    let notice = layout::expiring("1");
    archive
        .block_on(archive.put(&notice, &"{}".into()))
        .unwrap();
    let mut up = Uploader::new(&archive, &bench.log(), often()).unwrap();
    let before = Instant::now();
    while up.tick().unwrap().base.is_none() {}
    let copying = Instant::now();
    while copies(&archive) == 0 {
        up.tick().unwrap();
    }
    let sent = Instant::now();
    while sent.elapsed() <= sent - before {
        up.tick().unwrap();
    }
    let counts = Instant::now();
    archive.block_on(archive.remove(&notice)).unwrap();
    while !up.tick().unwrap().restorable {}
    assert!(up.rest.unwrap() - counts >= counts - copying);
}

/// However long it takes to send what the log gets meanwhile: a push that does not follow ends.
#[test]
fn the_images_are_copied_once_if_once_is_enough() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    for copied in 1..=3 {
        let options = UploadOptions {
            copy_once: true,
            ..often()
        };
        let mut up = Uploader::new(&archive, &bench.log(), options).unwrap();
        while copies(&archive) < copied {
            up.tick().unwrap();
        }
        for _ in 0..10 {
            mark(&store.disks()[0]);
            assert_eq!(up.tick().unwrap().base, None);
            up.rest = None;
        }
    }
}

/// The image can't be read while it is copied.
#[test]
fn a_copy_that_fails_holds_up_no_record() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    mark(&store.disks()[0]);
    settle(&mut uploader(&archive, &bench));
    let (disk, away) = (bench.disk("a"), bench.disk("away"));
    std::fs::rename(&disk, &away).unwrap();
    let mut up = Uploader::new(&archive, &bench.log(), often()).unwrap();
    for _ in 0..3 {
        let last = mark(&store.disks()[0]);
        assert_eq!(up.tick().unwrap().last, last);
        let error = up.take_copy_error().expect("the image is not there");
        assert!(error.to_string().contains("open the base image"), "{error}");
    }
    std::fs::rename(&away, &disk).unwrap();
    while copies(&archive) == 1 {
        up.tick().unwrap();
    }
}

/// Nor does a store that refuses what a copy needs: records are kept, once there are images.
#[test]
fn a_copy_that_the_store_refuses_holds_up_no_record() {
    let (bench, _, store) = Bench::in_use(Retention::All);
    let faulty = Arc::new(FaultyStore::new(bench.store.clone(), 0, 0));
    let archive = archive_in(faulty.clone());
    mark(&store.disks()[0]);
    settle(&mut uploader(&archive, &bench));
    for refused in [layout::EXPIRING, layout::CHUNKS, layout::BASES] {
        let disk = &store.disks()[0];
        // A chunk like no other.
        write(disk, 0, copies(&archive) as u8, 1);
        disk.checkpoint().unwrap();
        // Some copies end, others begin.
        let mut up = Uploader::new(&archive, &bench.log(), often()).unwrap();
        *faulty.refused.lock().unwrap() = Some(refused);
        let mut errors = 0;
        for _ in 0..5 {
            let last = mark(disk);
            let mut kept = 0;
            let tick = up.tick_and_tell(&mut |lsn| kept = lsn).unwrap();
            assert_eq!((tick.last, kept), (last, last.lsn), "{refused}");
            errors += u32::from(up.take_copy_error().is_some());
        }
        assert!(errors > 0, "{refused}");
        *faulty.refused.lock().unwrap() = None;
        let before = copies(&archive);
        while copies(&archive) == before {
            up.tick().unwrap();
        }
    }
}

/// A log that was restored can't have any number of segments.
#[test]
fn the_images_are_copied_again_after_many_segments() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    mark(disk);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    let mut written = 0;
    while copies(&archive) == 1 {
        assert!(written < 2000, "never");
        written += 1;
        write(disk, 0, written as u8, 128);
        up.tick().unwrap();
        if written % 4 == 0 {
            disk.checkpoint().unwrap();
        }
    }
    assert!(written > 150, "{written}");
}

/// An expire has listed the chunks before a push has sent one of them again.
#[test]
fn images_count_once_all_their_chunks_are_certainly_there() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    write(&store.disks()[0], 0, 1, 128);
    store.disks()[0].checkpoint().unwrap();
    let notice = layout::expiring("1");
    let text = "{}".into();
    archive.block_on(archive.put(&notice, &text)).unwrap();
    let mut up = uploader(&archive, &bench);
    while copies(&archive) == 0 {
        assert!(!up.tick().unwrap().restorable);
    }
    let why = up.take_wait().unwrap();
    assert!(why.contains(&notice), "{why}");
    assert!(!up.tick().unwrap().restorable);
    assert_eq!(up.take_wait(), None);
    // What that expire was about to do.
    let chunks = archive.block_on(archive.list(layout::CHUNKS)).unwrap();
    archive.block_on(archive.remove(&chunks[0].name)).unwrap();
    archive.block_on(archive.remove(&notice)).unwrap();
    settle(&mut up);
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 1);
    // Nothing leads to the images that lacked it.
    assert_eq!(copies(&archive), 1);
}

/// Of an expire that was killed, a notice stays, perhaps with the time of a clock that was ahead.
#[test]
fn a_notice_that_nobody_renews_ends() {
    let (bench, _, _store) = Bench::in_use(Retention::Nothing);
    let (place, archive) = in_directory(&bench);
    let expiring = place.join(layout::EXPIRING);
    std::fs::create_dir(&expiring).unwrap();
    let now = SystemTime::now();
    let (minutes, year) = (Duration::from_secs(180), Duration::from_secs(365 * 86400));
    let times = [now - year, now - minutes, now, now + year];
    let put = |name: &str, time| {
        let file = File::create(expiring.join(name)).unwrap();
        file.set_modified(time).unwrap();
    };
    for time in times {
        put("0.json", time);
        let mut up = uploader(&archive, &bench);
        up.watch.lapse = Duration::ZERO;
        let ticks = (0..20).map(|_| up.tick().unwrap());
        assert!(ticks.last().unwrap().restorable);
        assert!(!expiring.join("0.json").exists());
    }
    // Another expire removes them, too, but not that of one that runs.
    for (number, time) in times.into_iter().enumerate() {
        put(&format!("{number}.json"), time);
    }
    expire_before(&archive, 0, 0, AN_HOUR);
    let left = std::fs::read_dir(&expiring).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["2.json"]);
}

/// An expire that can't renew its notice, so that pushes count on its end, has ended.
#[test]
fn nothing_is_removed_without_a_notice() {
    let (_bench, archive, _store, commits) = copied_four_times();
    let objects = || archive.block_on(archive.list("")).unwrap().len();
    let before = objects();
    let mut notice = archive.block_on(ExpireNotice::put(&archive)).unwrap();
    notice.every = Duration::ZERO;
    notice.renewed.set(Instant::now() - NOTICE_LAPSE);
    let options = ExpireOptions {
        keep: Duration::ZERO,
        keep_daily: 0,
        grace: Duration::ZERO,
        dry_run: false,
    };
    let now = commits[3].0.unix_us;
    let told = told(archive.block_on(remove_old(&archive, &options, now, Some(&notice))));
    assert!(told.contains("could not renew its notice"), "{told}");
    assert_eq!(objects(), before + 1);
    // Nor does it go on with what waits for the store.
    let ended = notice.during(std::future::pending::<Result<()>>());
    assert!(archive.block_on(ended).is_err());
}

#[test]
fn an_expire_renews_its_notice_while_it_works() {
    let archive = archive_in(Arc::new(InMemory::new()));
    let mut notice = archive.block_on(ExpireNotice::put(&archive)).unwrap();
    notice.every = Duration::ZERO;
    let put = notice.renewed.get();
    let work = async {
        while notice.renewed.get() == put {
            tokio::task::yield_now().await;
        }
        Ok(())
    };
    archive.block_on(notice.during(work)).unwrap();
}

/// `push` makes the archive whole again.
#[test]
fn chunks_that_the_store_has_lost_are_sent_again() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    write(&store.disks()[0], 0, 1, 128);
    store.disks()[0].checkpoint().unwrap();
    mark(&store.disks()[0]);
    settle(&mut uploader(&archive, &bench));
    let chunks = archive.block_on(archive.list(layout::CHUNKS)).unwrap();
    archive.block_on(archive.remove(&chunks[0].name)).unwrap();
    assert!(newest(&bench, &archive).is_err());
    let mut up = uploader(&archive, &bench);
    up.tick().unwrap();
    let why = up.take_reason().unwrap();
    assert!(why.contains("has lost 1 chunks"), "{why}");
    settle(&mut up);
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 1);
    // A push that goes on sees the loss when it copies the images again.
    let chunks = archive.block_on(archive.list(layout::CHUNKS)).unwrap();
    archive.block_on(archive.remove(&chunks[0].name)).unwrap();
    copy_images(&bench, &archive);
    settle(&mut uploader(&archive, &bench));
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 1);
}

/// `push` makes the archive whole again, as far as the chunks' sizes tell; of the others `verify`
/// says what to do.
#[test]
fn chunks_that_the_store_has_changed_are_sent_again() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    for sector in 0..128 {
        write(&store.disks()[0], sector, sector as u8, 1);
    }
    store.disks()[0].checkpoint().unwrap();
    mark(&store.disks()[0]);
    let whole = || verify(&archive, Point::Newest, &mut |_, _| {});
    settle(&mut uploader(&archive, &bench));
    let chunk = &archive.block_on(archive.list(layout::CHUNKS)).unwrap()[0].name;
    let bytes = archive.block_on(archive.need(chunk)).unwrap();
    for len in [0, 1, bytes.len() - 1] {
        archive
            .block_on(archive.put(chunk, &bytes.slice(..len)))
            .unwrap();
        assert!(whole().is_err());
        settle(&mut uploader(&archive, &bench));
        whole().unwrap();
    }
    flip(&archive, chunk);
    let told = told(whole());
    assert!(told.contains(&format!("object {chunk}")), "{told}");
    assert!(
        told.contains("remove that object from the store, then push"),
        "{told}"
    );
    archive.block_on(archive.remove(chunk)).unwrap();
    settle(&mut uploader(&archive, &bench));
    whole().unwrap();
}

/// Some gateways encrypt what they are given, or compress it: the sizes in their lists are others.
#[test]
fn a_store_whose_list_has_other_sizes_keeps_its_chunks() {
    let bench = Bench::new(&["a"], Retention::Nothing);
    let mut store = FaultyStore::new(bench.store.clone(), 0, 0);
    store.sizes = 40;
    let archive = archive_in(Arc::new(store));
    let store = bench.open(&["a"]);
    write(&store.disks()[0], 0, 1, 128);
    store.disks()[0].checkpoint().unwrap();
    settle(&mut uploader(&archive, &bench));
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    assert_eq!((up.take_reason(), copies(&archive)), (None, 1));
}

/// The last push to a directory was killed before what it had created was synced.
#[test]
fn what_an_earlier_push_has_not_synced_is_written_again_before_it_counts() {
    let (bench, _, store) = Bench::in_use(Retention::All);
    let faulty = Arc::new(FaultyStore::new(bench.store.clone(), 0, 0));
    let mut archive = archive_in(faulty.clone());
    archive.cached = true;
    write(&store.disks()[0], 0, 1, 1);
    mark(&store.disks()[0]);
    settle(&mut uploader(&archive, &bench));
    for folder in [layout::PARTS, layout::BASES] {
        let objects = archive.block_on(archive.list(folder)).unwrap();
        let newest = format!("a/log/{}", objects.last().unwrap().name);
        faulty.cached.lock().unwrap().insert(newest.into());
        let mut kept = 0;
        let mut tell = |lsn| {
            assert!(faulty.cached.lock().unwrap().is_empty(), "{folder} {lsn}");
            kept = lsn;
        };
        uploader(&archive, &bench).tick_and_tell(&mut tell).unwrap();
        assert!(kept > 0);
    }
}

/// In a directory, what can be read back may be in the page cache only.
#[test]
fn an_object_whose_sync_has_failed_is_not_there() {
    let store = Arc::new(FaultyStore::new(Arc::default(), 0, 0));
    let mut archive = archive_in(store.clone());
    let create = |archive: &Archive, name: &str, failures: u64| {
        store.unsynced.store(failures, Ordering::Relaxed);
        let created = archive.block_on(archive.create(name, &"bytes".into()));
        store.unsynced.store(0, Ordering::Relaxed);
        created
    };
    assert_eq!(create(&archive, "one", 1).unwrap(), CreateOutcome::Done);
    archive.cached = true;
    let failed = create(&archive, "two", u64::MAX).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Unavailable);
    // Once it was written again, and that has not failed, it is.
    assert_eq!(create(&archive, "two", 1).unwrap(), CreateOutcome::Done);
    assert_eq!(create(&archive, "three", 1).unwrap(), CreateOutcome::Done);
}

#[test]
fn a_prefix_may_have_any_characters() {
    for prefix in ["a~b", "ü/log", "a#b", "a//b", "a%20b", "a b/"] {
        let bench = Bench::new(&["a"], Retention::Nothing);
        let memory: Arc<InMemory> = Arc::default();
        let archive = Archive::over(memory, prefix.into(), "memory".into(), true).unwrap();
        copy_images(&bench, &archive);
        copy_images(&bench, &archive);
        let first = ObjectId {
            epoch: 1,
            number: 1,
        };
        let lease = archive.block_on(Lease::take(&archive, first)).unwrap();
        assert_eq!(expire_before(&archive, now_us(), 0, AT_ONCE).bases, 0);
        drop(lease);
        assert_eq!(expire_before(&archive, now_us(), 0, AT_ONCE).bases, 1);
        assert_eq!(copies(&archive), 1, "{prefix}");
        settle(&mut uploader(&archive, &bench));
        newest(&bench, &archive).unwrap();
    }
}

#[test]
fn what_is_whole_is_used_beside_what_is_damaged() {
    let (bench, archive, store, commits) = copied_four_times();
    let broken = layout::base(newest_base(&archive));
    flip(&archive, &broken);
    // Older images lead there too.
    assert_eq!(reachable(&bench, &archive, &commits), [1, 2, 3, 4]);
    assert_eq!(survey(&archive).unwrap().spans[0].bases.len(), 3);
    settle(&mut uploader(&archive, &bench));
    // It may name any chunk.
    let gone = expire_before(&archive, commits[3].0.unix_us, 0, AT_ONCE);
    assert!(gone.bases > 0 && gone.chunks == 0, "{gone:?}");
    archive.block_on(archive.remove(&broken)).unwrap();
    let gone = expire_before(&archive, commits[3].0.unix_us, 0, AT_ONCE);
    assert!(gone.chunks > 0, "{gone:?}");
    // A claim: the archive begins anew there.
    flip(&archive, &layout::epoch(2));
    assert!(!survey(&archive).unwrap().spans.is_empty());
    write(&store.disks()[0], 0, 9, 1);
    mark(&store.disks()[0]);
    settle(&mut uploader(&archive, &bench));
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 9);
}

#[test]
fn a_store_that_says_anything_is_bounded() {
    let (bench, archive, _store) = Bench::in_use(Retention::Nothing);
    settle(&mut uploader(&archive, &bench));
    // An epoch of a far future.
    let claim = archive.block_on(archive.need(&layout::epoch(1))).unwrap();
    for far in [u64::MAX, 1 << 60] {
        let name = layout::epoch(far);
        archive.block_on(archive.put(&name, &claim)).unwrap();
        survey(&archive).unwrap();
        archive.block_on(archive.remove(&name)).unwrap();
    }
    // Every object is there.
    let mut has_all = FaultyStore::new(bench.store.clone(), 0, 0);
    has_all.has_all = true;
    let error = survey(&archive_in(Arc::new(has_all))).unwrap_err();
    assert!(error.to_string().contains("list lacks it"), "{error}");
    // A list without end.
    archive.block_on(async {
        for number in 0..20_001 {
            let name = format!("{}/{number}", layout::LEASES);
            archive.put(&name, &"".into()).await.unwrap();
        }
        let error = archive.list(layout::LEASES).await.unwrap_err();
        assert!(error.to_string().contains("or no end"), "{error}");
    });
}

#[test]
fn a_list_without_end_is_refused() {
    let (bench, archive, _store) = Bench::in_use(Retention::Nothing);
    settle(&mut uploader(&archive, &bench));
    let told_by = |names: &[&'static str]| {
        let mut endless = FaultyStore::new(bench.store.clone(), 0, 0);
        endless.endless = Some(names.to_vec());
        let mut archive = archive_in(Arc::new(endless));
        archive.listed_within = std::time::Duration::from_millis(1);
        told(survey(&archive))
    };
    let told = told_by(&[]);
    assert!(told.contains("no name for long"), "{told}");
    for names in [&["1/1"][..], &["1/1", "1/2", "1/3", "1/4", "1/5"]] {
        let told = told_by(names);
        assert!(told.contains("again and again"), "{told}");
    }
}

#[test]
fn a_manifest_or_a_part_of_impossible_numbers_is_damaged() {
    let (bench, archive, _store) = Bench::in_use(Retention::All);
    settle(&mut uploader(&archive, &bench));
    let at = newest_base(&archive);
    let name = layout::base(at);
    let whole = archive.block_on(archive.need(&name)).unwrap();
    let changes: [fn(&mut BaseHeader); 9] = [
        |base| base.chunk_bytes = 0,
        |base| base.chunk_bytes = 8 << 40,
        |base| base.images[0].bytes += 64 << 10,
        |base| drop(base.images[0].chunks.pop()),
        |base| base.images[0].chunks[0] = Some("..".repeat(32)),
        |base| drop(base.images.pop()),
        |base| base.images.push(base.images[0].clone()),
        |base| base.images[0].disk_id += 1,
        |base| {
            base.images[0].bytes -= 64 << 10;
            base.images[0].chunks.pop();
        },
    ];
    for (number, changed) in changes.into_iter().enumerate() {
        change(&archive, &name, changed);
        let read = archive.block_on(read_base(&archive, at));
        let kind = read.map(drop).unwrap_err().kind();
        assert_eq!(kind, ErrorKind::Damaged, "{number}");
        assert!(newest(&bench, &archive).is_err(), "{number}");
        archive.block_on(archive.put(&name, &whole)).unwrap();
    }
    newest(&bench, &archive).unwrap();
    let changes: [fn(&mut BaseHeader); 2] = [
        |base| base.first_sequence = u64::MAX,
        |base| base.images_lsn = u64::MAX,
    ];
    for changed in changes {
        change(&archive, &name, changed);
        let verified = verify(&archive, Point::Newest, &mut |_, _| {});
        assert_eq!(verified.unwrap_err().kind(), ErrorKind::Damaged);
        assert!(newest(&bench, &archive).is_err());
        let replica = bench.dir.path().join("replica");
        assert!(Replica::open(&archive, &replica, &mut |_, _| {}).is_err());
        std::fs::remove_dir_all(replica).unwrap();
        archive.block_on(archive.put(&name, &whole)).unwrap();
    }
    // Names whose numbers nothing can follow.
    for name in ["parts/00000001/18446744073709551615", "parts/00000001/9"] {
        archive.block_on(archive.put(name, &whole)).unwrap();
    }
    survey(&archive).unwrap();
    settle(&mut uploader(&archive, &bench));
    let first = ObjectId {
        epoch: 1,
        number: 1,
    };
    change(&archive, &layout::part(first), |part: &mut PartHeader| {
        let piece = object::PartPiece {
            sequence: 1,
            offset: 0,
            len: u64::MAX / 2 + 1,
        };
        part.pieces = vec![piece; 4];
    });
    let read = archive.block_on(read_part(&archive, first));
    assert_eq!(read.map(drop).unwrap_err().kind(), ErrorKind::Damaged);
}

/// Names in an archive are text for people, and for a terminal nothing else.
#[test]
fn escape_sequences_do_not_reach_a_terminal() {
    let (bench, archive, _store) = Bench::in_use(Retention::Nothing);
    settle(&mut uploader(&archive, &bench));
    let evil = "\x1b]0;owned\x07";
    change(
        &archive,
        &layout::base(newest_base(&archive)),
        |base: &mut BaseHeader| {
            base.images[0].name = evil.to_owned();
        },
    );
    let name = layout::epoch(1);
    let claim = archive.block_on(archive.need(&name)).unwrap();
    let mut claim: serde_json::Value = serde_json::from_slice(&claim).unwrap();
    (claim["owner"], claim["host"]) = (evil.into(), "elsewhere".into());
    let claim = claim.to_string().into();
    archive.block_on(archive.put(&name, &claim)).unwrap();
    let survey = survey(&archive).unwrap();
    let seen = format!("{} {}", survey.owner, survey.spans[0].bases[0].images[0].0);
    let error = Error::new(ErrorKind::Local, evil).to_string();
    for text in [seen, error] {
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

/// A disk whose name is that of the log's directory.
#[test]
fn a_disk_named_log_comes_back_beside_another() {
    let bench = Bench::new(&["other"], Retention::Nothing);
    let place = bench.dir.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let named = place.join("log");
    create_disk(&named, 64 << 10, &bench.log(), &options(Retention::Nothing)).unwrap();
    let disks = [
        DiskOptions::new(bench.disk("other")),
        DiskOptions::new(named),
    ];
    let store = Store::open(&bench.log(), &disks, &options(Retention::Nothing)).unwrap();
    write(&store.disks()[1], 0, 5, 1);
    mark(&store.disks()[1]);
    let archive = bench.archive();
    settle(&mut Uploader::new(&archive, &bench.log(), UploadOptions::default()).unwrap());
    let (_dir, back) = newest(&bench, &archive).unwrap();
    let images: Vec<_> = back
        .disks
        .iter()
        .map(|disk| bytes_of(&disk.path, &back.log_dir)[0])
        .collect();
    assert_eq!(images, [0, 5]);
}

/// The file system of an archive in a directory is not mounted for a while.
#[test]
fn nothing_goes_to_a_directory_that_does_not_have_the_archive() {
    let (bench, _, store) = Bench::in_use(Retention::Nothing);
    let (place, archive) = in_directory(&bench);
    let away = bench.dir.path().join("away");
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    std::fs::rename(&place, &away).unwrap();
    std::fs::create_dir(&place).unwrap();
    write(&store.disks()[0], 3, 9, 1);
    let newest = mark(&store.disks()[0]).lsn;
    for _ in 0..3 {
        let kept = &mut |lsn| assert!(lsn < newest, "nothing has it");
        let told = up.tick_and_tell(kept).unwrap_err();
        assert_eq!(told.kind(), ErrorKind::Unavailable);
        let told = told.to_string();
        assert!(
            told.contains("is not mounted, or another directory"),
            "{told}"
        );
    }
    let strays = std::fs::read_dir(&place).unwrap().count();
    assert_eq!(strays, 0);
    std::fs::remove_dir(&place).unwrap();
    std::fs::rename(&away, &place).unwrap();
    assert_eq!(settle(&mut up).last.lsn, newest);
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[3 * 512], 9);
    store.close().unwrap();
}
