//! Images that are fetched: who may use them meanwhile, and what is there in the end.

use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;

use walvisor_storage::{
    CloneSource, FetchMap, Image, ImageReader, LogRoot, RescueOptions, adopt_image, clone_disk,
    default_log_dir, import_disk, inspect, leave_log, rescue_disk, resize_disk,
};
use walvisor_testkit::{PATIENCE, Random};

use super::faulty::FaultyStore;
use super::*;
use crate::fetch::serve;
use crate::follow::Replica;

/// Sectors of a chunk.
const CHUNK: u64 = 128;

/// An archived disk: chunk N has N + 1 in all its sectors, but the first sector of the disk, which
/// is in the log, has 9.
fn archived() -> (Bench, Arc<FaultyStore>) {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let disk = &store.disks()[0];
    for chunk in 0..SECTORS / CHUNK {
        write(disk, chunk * CHUNK, chunk as u8 + 1, CHUNK as usize);
    }
    disk.checkpoint().unwrap();
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    write(disk, 0, 9, 1);
    mark(disk);
    settle(&mut up);
    drop(up);
    store.close().unwrap();
    let faulty = Arc::new(FaultyStore::new(bench.store.clone(), 0, 0));
    (bench, faulty)
}

/// Serves the archive to `dir`, and calls `use_disks` as soon as the disks are ready. From then on
/// the store answers `requests` requests.
fn served<T>(
    (store, requests): (&Arc<FaultyStore>, u64),
    dir: &Path,
    at: Point,
    use_disks: impl FnOnce(&RestoreReport) -> T,
) -> (Result<RestoreReport>, Option<T>) {
    let archive = archive_in(store.clone());
    let (send, ready) = channel();
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let tell = move |report: &RestoreReport| {
                store.fail_after(requests);
                drop(send.send(report.clone()));
            };
            serve(&archive, dir, at, tell, &mut |_, _| {})
        });
        let used = ready.recv_timeout(PATIENCE).ok();
        let used = used.map(|report| use_disks(&report));
        (serving.join().unwrap(), used)
    })
}

/// While the store does not answer, what is in the log can be read, writes and FLUSHes complete,
/// and only reads of chunks wait. They end when the store answers, and nothing that was written
/// meanwhile is lost.
#[test]
fn requests_wait_only_for_the_chunks_that_they_need() {
    let (bench, faulty) = archived();
    let dir = bench.dir.path().join("restored");
    let away = faulty.clone();
    let (done, store) = served((&faulty, 0), &dir, Point::Newest, |report| {
        let store = open(report);
        let mut port = store.disks()[0].open_port().unwrap();
        let absent = FetchMap::open(&report.disks[0].path).unwrap().unwrap();
        let waits: Vec<_> = (0..4).filter(|chunk| absent.lacks(*chunk)).collect();
        assert!(!waits.is_empty());
        for chunk in &waits {
            let read = Operation::Read {
                sector: *chunk as u64 * CHUNK + 3,
                sectors: 2,
            };
            port.submit(100 + *chunk as u64, read);
        }
        port.submit(
            1,
            Operation::Read {
                sector: 0,
                sectors: 1,
            },
        );
        port.submit(
            2,
            Operation::Write {
                sector: 3 * CHUNK + 5,
                data: queue::fill(77, 2),
            },
        );
        port.submit(3, Operation::Flush);
        let mut tokens: Vec<_> = queue::wait(&mut port, 3)
            .iter()
            .map(|done| {
                (
                    done.token,
                    done.result.as_ref().unwrap().as_ref().map(|data| data[0]),
                )
            })
            .collect();
        tokens.sort();
        assert_eq!(tokens, [(1, Some(9)), (2, None), (3, None)]);
        let second = restore(
            &archive_in(away.clone()),
            &dir,
            Point::Newest,
            &mut |_, _| {},
        );
        assert_eq!(second.unwrap_err().kind(), ErrorKind::InUse);
        // Nobody takes half an image for a whole one.
        let image = &LogRoot::read(&report.log_dir).unwrap().images()[0];
        assert!(ImageReader::open(image).is_err());
        away.fail_after(u64::MAX);
        let done = queue::wait(&mut port, waits.len());
        for done in done {
            let data = done.result.unwrap().unwrap();
            assert!(data.iter().all(|byte| u64::from(*byte) == done.token - 99));
        }
        drop(port);
        store
    });
    done.unwrap();
    let (image, log) = (dir.join("a"), dir.join("a.wal"));
    assert!(FetchMap::open(&image).unwrap().is_none());
    let left = std::fs::read_dir(&dir).unwrap().count();
    assert_eq!(left, 2, "the image and the log");
    store.unwrap().close().unwrap();
    let bytes = bytes_of(&image, &log);
    for (sector, bytes) in (0..).zip(bytes.chunks(512)) {
        let wanted = match sector {
            0 => 9,
            sector if (3 * CHUNK + 5..3 * CHUNK + 7).contains(&sector) => 77,
            sector => sector / CHUNK + 1,
        };
        assert!(
            bytes.iter().all(|byte| u64::from(*byte) == wanted),
            "{sector}"
        );
    }
    // It is a log as any other.
    let opened = [DiskOptions::new(&image)];
    Store::open(&log, &opened, &options(Retention::Nothing)).unwrap();
}

/// A chunk that the store has lost fails the requests that need it, and no others. Once the store
/// has it again, another restore goes on, and what was written meanwhile stays.
#[test]
fn a_lost_chunk_fails_its_requests_and_no_others() {
    let (bench, faulty) = archived();
    let archive = bench.archive();
    let chunks = archive.block_on(archive.list("chunks")).unwrap();
    let lost = &chunks[0].name;
    let whole = archive.block_on(archive.need(lost)).unwrap();
    archive.block_on(archive.remove(lost)).unwrap();
    let dir = bench.dir.path().join("restored");
    let (failed, read) = served((&faulty, u64::MAX), &dir, Point::Newest, |report| {
        let store = open(report);
        let mut port = store.disks()[0].open_port().unwrap();
        queue::write(&mut port, 0, 55, 1);
        let read = |chunk: u64| {
            let operation = Operation::Read {
                sector: chunk * CHUNK + 1,
                sectors: 1,
            };
            queue::run(&mut port, operation).is_ok()
        };
        (0..4).map(read).collect::<Vec<_>>()
    });
    let error = failed.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(error.to_string().contains(&chunks[0].name), "{error}");
    let lost: Vec<_> = read.unwrap();
    assert_eq!(lost.iter().filter(|read| !**read).count(), 1, "{lost:?}");
    // Not to another point, and not from another archive.
    let newest = survey(&archive).unwrap().spans[0].last.lsn;
    let other = serve(&archive, &dir, Point::Lsn(newest), |_| {}, &mut |_, _| {}).unwrap_err();
    let plain = restore(&archive, &dir, Point::Lsn(newest), &mut |_, _| {}).unwrap_err();
    for error in [other, plain] {
        assert!(
            error.to_string().contains("by a restore to newest"),
            "{error}"
        );
    }
    let error = resize_disk(&dir.join("a"), 65536, &dir.join("a.wal"), true, &[]).unwrap_err();
    assert!(
        error.to_string().contains("not all of the image"),
        "{error}"
    );
    archive
        .block_on(archive.put(&chunks[0].name, &whole))
        .unwrap();
    let again = serve(&archive, &dir, Point::Newest, |_| {}, &mut |_, _| {}).unwrap();
    assert_eq!(again.chunks, 1);
    let bytes = bytes_of(&again.disks[0].path, &again.log_dir);
    let sectors: Vec<_> = bytes.chunks(512).map(|sector| sector[0]).collect();
    assert_eq!(sectors[0], 55);
    for (sector, byte) in sectors.iter().enumerate().skip(1) {
        assert_eq!(*byte as u64, sector as u64 / CHUNK + 1, "{sector}");
    }
}

/// A restore that was ended before its log was there begins anew, as one that serves or not.
#[test]
fn either_kind_of_restore_takes_over_from_the_other() {
    let (bench, faulty) = archived();
    let wanted = bench.bytes_at(&bench.archive(), Point::Newest);
    for requests in (0..24).step_by(3) {
        for serve_first in [false, true] {
            let dir = bench.dir.path().join(format!("{requests}-{serve_first}"));
            let archive = archive_in(faulty.clone());
            // A restore that serves asks until the store is back.
            faulty.fail_after(requests);
            let plain = |archive: &Archive| restore(archive, &dir, Point::Newest, &mut |_, _| {});
            let begun = if serve_first {
                let back = faulty.clone();
                let (send, ended) = channel();
                thread::scope(|scope| {
                    scope.spawn(move || {
                        let _ = ended.recv_timeout(Duration::from_millis(20));
                        back.fail_after(u64::MAX);
                    });
                    let served = serve(&archive, &dir, Point::Newest, |_| {}, &mut |_, _| {});
                    let _ = send.send(());
                    served
                })
            } else {
                plain(&archive)
            };
            faulty.fail_after(u64::MAX);
            let done = match begun {
                Ok(done) => done,
                Err(_) if serve_first => plain(&archive).unwrap(),
                Err(_) => serve(&archive, &dir, Point::Newest, |_| {}, &mut |_, _| {}).unwrap(),
            };
            let bytes = bytes_of(&done.disks[0].path, &done.log_dir);
            assert!(bytes == wanted, "{requests} {serve_first}");
        }
    }
}

/// Why nobody can use an image that is not whole: every way to open it says the same.
fn assert_refused(image: &Path, log: &Path) {
    let other = image.with_extension("other");
    let beside = default_log_dir(&other);
    let whole = image.with_extension("whole");
    std::fs::write(&whole, [1; 512]).unwrap();
    let plain = &mut |_, _| {};
    let stores = options(Retention::Nothing);
    let disks = [DiskOptions::new(image)];
    let source = CloneSource {
        path: image.to_owned(),
        log_dir: log.to_owned(),
        at: None,
    };
    let tries = [
        Store::open(log, &disks, &stores).map(drop),
        export_disk(image, log, &other, false, None, plain).map(drop),
        clone_disk(&source, &other, &beside, &stores, plain).map(drop),
        import_disk(&other, image, &beside, &stores, plain).map(drop),
        export_disk(&whole, &default_log_dir(&whole), image, true, None, plain).map(drop),
        inspect(image, log).map(drop),
        resize_disk(image, SECTORS * 1024, log, false, &[]).map(drop),
        Image::open(image, true).map(drop),
    ];
    for (number, told) in tries.into_iter().enumerate() {
        let told = told.unwrap_err().to_string();
        assert!(told.contains("not all of the image"), "{number}: {told}");
    }
    assert!(!other.exists());
    std::fs::remove_file(whole).unwrap();
}

/// Wherever a restore or the first fetch of a replica is ended, nobody can use the disks; another
/// call goes on, and then they are right.
#[test]
fn nobody_uses_a_disk_that_is_not_whole() {
    let (bench, faulty) = archived();
    let wanted = bench.bytes_at(&bench.archive(), Point::Newest);
    let archive = archive_in(faulty.clone());
    for follows in [false, true] {
        let (mut cut, mut whole) = (0, 0);
        for requests in 0.. {
            let dir = bench.dir.path().join(format!("{follows}-{requests}"));
            let (image, log) = (dir.join("a"), dir.join("a.wal"));
            let fetch = || match follows {
                false => restore(&archive, &dir, Point::Newest, &mut |_, _| {}).map(drop),
                true => Replica::open(&archive, &dir, &mut |_, _| {}).map(drop),
            };
            faulty.fail_after(requests);
            let ended = fetch();
            faulty.fail_after(u64::MAX);
            if ended.is_ok() {
                whole = requests;
                break;
            }
            if image.exists() {
                cut += 1;
                assert_refused(&image, &log);
            }
            fetch().unwrap();
            assert!(bytes_of(&image, &log) == wanted, "{follows} {requests}");
        }
        assert!(cut >= 4, "{cut} of {whole}");
    }
}

/// A disk is exported while its chunks are on their way: the export waits for those that it needs.
#[test]
fn an_export_waits_for_the_chunks() {
    let (bench, faulty) = archived();
    let wanted = bench.bytes_at(&bench.archive(), Point::Newest);
    let dir = bench.dir.path().join("restored");
    let away = faulty.clone();
    let (done, bytes) = served((&faulty, 0), &dir, Point::Newest, |report| {
        let image = &report.disks[0].path;
        let map = FetchMap::open(image).unwrap().unwrap();
        assert!((0..map.chunks()).any(|chunk| map.lacks(chunk)));
        assert!(inspect(image, &report.log_dir).unwrap().unfetched > 0);
        thread::scope(|scope| {
            let exported = scope.spawn(|| bytes_of(image, &report.log_dir));
            map.wait_for_ask(0, PATIENCE);
            away.fail_after(u64::MAX);
            exported.join().unwrap()
        })
    });
    done.unwrap();
    assert!(bytes.unwrap() == wanted);
}

/// The log has no records, so nothing has to be copied to an image that lacks chunks. Still nobody
/// makes a plain raw image of it, or says that it is complete.
#[test]
fn no_command_takes_an_image_for_complete_that_lacks_chunks() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    for chunk in 0..SECTORS / CHUNK {
        write(disk, chunk * CHUNK, 1, CHUNK as usize);
    }
    disk.checkpoint().unwrap();
    settle(&mut uploader(&archive, &bench));
    store.close().unwrap();
    let faulty = Arc::new(FaultyStore::new(bench.store.clone(), 0, 0));
    let dir = bench.dir.path().join("restored");
    let (done, used) = served((&faulty, 0), &dir, Point::Newest, |report| {
        let (image, log) = (&report.disks[0].path, &report.log_dir);
        let left = leave_log(image, log, &[]).map(drop).unwrap_err();
        assert!(left.to_string().contains("not all of the image"), "{left}");
        // Nor of a copy without what says so.
        let copy = bench.dir.path().join("copy");
        std::fs::write(&copy, std::fs::read(image).unwrap()).unwrap();
        let rescue = RescueOptions {
            log_wins: true,
            ..RescueOptions::default()
        };
        let out = bench.dir.path().join("out");
        let refused = [
            rescue_disk(&copy, log, &out, rescue, None, &mut |_, _| {}).map(drop),
            adopt_image(&copy, log).map(drop),
        ];
        for refused in refused {
            let told = refused.unwrap_err().to_string();
            assert!(told.contains("not all of the image"), "{told}");
        }
        let disks = [DiskOptions::new(image)];
        let store = Store::open(log, &disks, &options(Retention::Nothing)).unwrap();
        let disk = &store.disks()[0];
        assert!(disk.unfetched() > 0);
        let copied = disk.checkpoint().unwrap_err();
        assert!(
            copied.to_string().contains("not all of the image"),
            "{copied}"
        );
        store.close().unwrap();
        assert!(inspect(image, log).unwrap().unfetched > 0);
        faulty.fail_after(u64::MAX);
    });
    done.unwrap();
    used.unwrap();
    let (image, log) = (dir.join("a"), dir.join("a.wal"));
    leave_log(&image, &log, &[]).unwrap();
    assert!(std::fs::read(&image).unwrap().iter().all(|byte| *byte == 1));
}

/// A restore was ended; when it is run again there are newer images, with zeroes in a chunk that it
/// had fetched.
#[test]
fn a_new_restore_discards_the_partial_images_of_an_earlier_one() {
    for serves in [false, true] {
        let (bench, faulty) = archived();
        let archive = archive_in(faulty.clone());
        let dir = bench.dir.path().join("restored");
        let ended = (0..60).any(|requests| {
            let _ = std::fs::remove_dir_all(&dir);
            faulty.fail_after(requests);
            let ended = restore(&archive, &dir, Point::Newest, &mut |_, _| {}).is_err();
            faulty.fail_after(u64::MAX);
            ended && std::fs::read(dir.join("a")).is_ok_and(|image| image.iter().any(|b| *b != 0))
        });
        assert!(ended, "never in the middle of the images");
        let store = bench.open(&["a"]);
        let mut port = store.disks()[0].open_port().unwrap();
        let zeroes = Operation::WriteZeroes {
            sector: 0,
            sectors: SECTORS as u32,
            unmap: true,
        };
        queue::run(&mut port, zeroes).unwrap();
        drop(port);
        store.disks()[0].checkpoint().unwrap();
        copy_images(&bench, &archive);
        store.close().unwrap();
        let done = if serves {
            serve(&archive, &dir, Point::Newest, |_| {}, &mut |_, _| {})
        } else {
            restore(&archive, &dir, Point::Newest, &mut |_, _| {})
        };
        let done = done.unwrap();
        let bytes = bytes_of(&done.disks[0].path, &done.log_dir);
        assert!(bytes.iter().all(|byte| *byte == 0), "serves: {serves}");
    }
}

/// Random requests, checkpoints and closes while the images are fetched from a store that fails.
#[test]
fn random_requests_while_the_images_are_fetched() {
    let (bench, faulty) = archived();
    let archive = bench.archive();
    let mut served_count = 0;
    for seed in 0..25 {
        let mut random = Random(seed);
        let newest = survey(&archive).unwrap().spans[0].last.lsn;
        let at = match random.below(2) {
            0 => Point::Newest,
            _ => Point::Lsn(newest - random.below(2)),
        };
        let mut now = bench.bytes_at(&archive, at);
        let dir = bench.dir.path().join(format!("restored-{seed}"));
        faulty.fail_one_in([0, 8, 16][random.below(3) as usize]);
        let begun = served((&faulty, u64::MAX), &dir, at, |report| {
            let mut store = open(report);
            for _ in 0..random.below(60) {
                let mut port = store.disks()[0].open_port().unwrap();
                match random.below(16) {
                    0 => drop(store.disks()[0].checkpoint().unwrap()),
                    1 => queue::flush(&mut port),
                    2 => {
                        drop(port);
                        store.close().unwrap();
                        store = open(report);
                    }
                    _ => {
                        let history = format!("seed {seed}");
                        queue::random_request(&mut port, &mut random, &mut now, &history);
                    }
                }
            }
            store.close().unwrap();
        });
        match begun {
            (Ok(_), Some(())) => served_count += 1,
            // It could not begin.
            (Err(_), None) => continue,
            (ended, used) => panic!("seed {seed}: {ended:?}, {used:?}"),
        }
        let bytes = bytes_of(&dir.join("a"), &dir.join("a.wal"));
        assert!(bytes == now, "seed {seed}");
    }
    assert!(served_count >= 8, "{served_count}");
}
