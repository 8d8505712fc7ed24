//! No command takes away the proof that a durable record is damaged.
//!
//! A batch that was durable and rots is told from a torn one by headers behind it, which say how
//! far the log was durable. These may be in a segment that is no part of the log: a void one, or one
//! whose own header has rotted.

use std::path::{Path, PathBuf};

use walvisor_storage::{
    BackendQueue, ErrorKind, Point, Result, Retention, Store, StoreOptions, clone_disk,
    create_disk, discard_log, dump_records, import_disk, leave_log, move_to_log, resize_disk,
    resize_log, rewind_disk,
};

use crate::support::{MIB, TestDisk, all, commit, port, put, read, refused, wait, write};

const SEGMENT: u64 = 64 << 10;
/// The record of disk `a` that rots. Its sectors then have the byte 2, and had 1 before.
const DAMAGED: u64 = 3;

/// Which segment has the proof that the damaged record was durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// One that does not follow the log's end: what came before it was torn by a power cut.
    Void,
    /// One whose own header has rotted.
    Suspect,
}

const PROOFS: [Proof; 2] = [Proof::Void, Proof::Suspect];

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: SEGMENT,
        max_segments: 32,
        ..StoreOptions::default()
    }
}

fn far(place: &TestDisk) -> PathBuf {
    place.segment(12)
}

/// A log with a damaged record, and the proof that it was durable.
fn damaged(proof: Proof) -> TestDisk {
    let place = cut(proof);
    rot(&place);
    place
}

/// A log that a power cut has torn behind its durable records.
fn cut(proof: Proof) -> TestDisk {
    let place = TestDisk::made(&["a", "b"], MIB, options());
    let store = place.open();
    let [a, b] = [0, 1].map(|disk| &store.disks()[disk]);
    commit(a, 0, 1, 8);
    commit(b, 0, 1, 8);
    commit(a, 0, 2, 8);
    // These reach the medium and are not synced: no header says that they were durable.
    let mut unsynced = b.open_port().unwrap();
    for _ in 0..3 {
        write(&mut unsynced, 32, 9, 32);
        if !unsynced.notify_written(7) {
            unsynced.kick();
            assert!(wait(&mut unsynced, 1)[0].result.is_ok());
        }
    }
    let killed = place.crash();
    drop(unsynced);
    drop(store);
    tear(&killed, proof);
    killed
}

/// The LSNs of the log's records, their segments, and where their payloads are.
fn records(place: &TestDisk) -> Vec<(u64, PathBuf, u64)> {
    let mut records = Vec::new();
    dump_records(&place.log(), &mut |record| {
        records.push((record.lsn, record.segment.to_owned(), record.offset));
    })
    .unwrap();
    records
}

/// Changes the payload of the record.
fn rot(place: &TestDisk) {
    let records = records(place);
    let (_, segment, payload) = records.iter().find(|(lsn, ..)| *lsn == DAMAGED).unwrap();
    put(segment, payload + 100, &[0xee]);
}

fn tear(place: &TestDisk, proof: Proof) {
    let records = records(place);
    let (_, first, _) = records.iter().find(|(lsn, ..)| *lsn == DAMAGED).unwrap();
    let behind = records.iter().filter(|(lsn, ..)| *lsn > DAMAGED);
    let (same, next): (Vec<_>, Vec<_>) = behind.partition(|(_, segment, _)| segment == first);
    assert!(!same.is_empty() && !next.is_empty(), "{records:?}");
    // The power cut took what follows in the same segment, with the headers.
    for (_, segment, offset) in same {
        put(segment, offset - 4096, &[0; 4096]);
    }
    // The number of a file has no meaning. This one is beyond those of a smaller log.
    std::fs::rename(&next[0].1, far(place)).unwrap();
    if proof == Proof::Suspect {
        put(&far(place), 0, &[0xee; 64]);
    }
}

/// What `disk check` names as damaged.
fn named(place: &TestDisk) -> Vec<u64> {
    place
        .report()
        .damaged
        .iter()
        .map(|block| block.lsn)
        .collect()
}

/// Opens the log, does something, and is killed: the files of that moment take the place of these.
fn killed_with(
    place: &mut TestDisk,
    retain: Option<Retention>,
    work: impl FnOnce(&mut Store) -> Result<()>,
) -> Result<()> {
    let options = StoreOptions {
        retain,
        ..options()
    };
    let mut store = place.try_open(&options)?;
    let done = work(&mut store);
    let killed = place.crash();
    // Closing copies what it can.
    let _ = store.close();
    *place = killed;
    done
}

fn killed(place: &mut TestDisk, work: impl FnOnce(&mut Store) -> Result<()>) -> Result<()> {
    killed_with(place, None, work)
}

/// Writes more to the other disk than the log holds.
fn fill_log(store: &mut Store) -> Result<()> {
    (0..20).for_each(|byte| commit(&store.disks()[1], 64, byte, 32));
    Ok(())
}

fn export(store: &Store, place: &Path, disk: usize) -> Result<()> {
    let (target, disk) = (std::fs::File::create(place).unwrap(), &store.disks()[disk]);
    match disk.path().ends_with("a") {
        true => disk.export(target, &mut |_, _| true).map(drop),
        false => disk
            .export_at(Point::Newest, target, &mut |_, _| true)
            .map(drop),
    }
}

fn cloned(place: &TestDisk, disk: usize) -> Result<()> {
    let (new, log, disk) = (place.at("c"), place.at("c.wal"), &place.disks()[disk]);
    let source = place.source(disk, None);
    clone_disk(&source, &new, &log, &options(), &mut |_, _| {}).map(drop)
}

/// Leaves the log, or moves to a new one.
fn gone(place: &TestDisk, disk: usize, moves: bool) -> Result<()> {
    let (log, disks) = (place.log(), place.disks());
    let others = [disks[1 - disk].clone()];
    if moves {
        move_to_log(&disks[disk], &log, &place.at("new"), &options(), &others)
    } else {
        leave_log(&disks[disk], &log, &others).map(drop)
    }
}

fn removed(place: &mut TestDisk, disk: usize, keeping: bool) -> Result<()> {
    let path = place.disks()[disk].clone();
    killed(place, |store| {
        // The other disk's own records are copied by this.
        assert!(disk == 0 || store.disks()[1].checkpoint().is_err());
        if keeping {
            store.remove_disk_keeping_records(&path)
        } else {
            store.remove_disk(&path)
        }
    })
}

fn resized(place: &TestDisk, bytes: u64, shrink: bool) -> Result<()> {
    resize_disk(
        &place.disk,
        bytes,
        &place.log(),
        shrink,
        &place.disks()[1..],
    )
    .map(drop)
}

type Command = fn(&mut TestDisk) -> Result<()>;

/// Every command that removes, reuses or rewrites a segment or a slot of the control file, and
/// whether it is carried out or refused with an error that names the damage.
#[rustfmt::skip]
const COMMANDS: &[(&str, bool, Command)] = &[
    ("open and be killed", true, |place| killed(place, |_| Ok(()))),
    ("open twice", true, |place| killed(place, |_| Ok(())).and_then(|()| killed(place, |_| Ok(())))),
    ("open and close", false, |place| place.try_open(&options())?.close()),
    ("close a log with history", true, |place| {
        let options = StoreOptions { retain: Some(Retention::All), ..options() };
        place.try_open(&options)?.close()
    }),
    ("write all over the log", true, |place| killed(place, fill_log)),
    ("retain expires", true, |place| killed_with(place, Some(Retention::Bytes(SEGMENT)), fill_log)),
    ("set-retain", true, |place| {
        killed(place, |store| store.disks()[0].set_retain(Retention::Bytes(SEGMENT)))
    }),
    ("checkpoint", false, |place| killed(place, |store| store.disks()[0].checkpoint().map(drop))),
    ("snapshot", true, |place| {
        killed(place, |store| store.disks()[0].snapshot("s".parse()?).map(drop))
    }),
    ("snapshot-delete", true, |place| killed(place, |store| {
        store.disks()[0].snapshot("s".parse()?)?;
        store.disks()[0].delete_snapshot("s".parse()?)
    })),
    ("mark", true, |place| killed(place, |store| store.mark(&"here".parse()?).map(drop))),
    ("add a disk", true, |place| {
        let added = place.at("c");
        std::fs::write(&added, vec![0; MIB as usize]).unwrap();
        killed(place, |store| store.add_disk(&walvisor_storage::DiskOptions::new(added)).map(drop))
    }),
    ("remove the disk", false, |place| removed(place, 0, false)),
    ("remove the other disk", true, |place| removed(place, 1, false)),
    ("remove the other disk, keeping its records", true, |place| removed(place, 1, true)),
    ("restore in place, in use, the other disk", false, |place| {
        killed(place, |store| store.disks()[1].rewind(Point::Lsn(1)).map(drop))
    }),
    ("restore in place, the other disk", true, |place| {
        rewind_disk(&place.disks()[1], &place.log(), Point::Lsn(1)).map(drop)
    }),
    ("restore in place and undo", true, |place| {
        let done = rewind_disk(&place.disk, &place.log(), Point::Lsn(1))?;
        rewind_disk(&place.disk, &place.log(), Point::Lsn(done.from_lsn)).map(drop)
    }),
    ("export in use", false, |place| {
        let live = place.at("live");
        killed(place, |store| export(store, &live, 0))
    }),
    ("export in use, the other disk", true, |place| {
        let live = place.at("live");
        killed(place, |store| export(store, &live, 1))
    }),
    ("export", false, |place| place.exported(&place.disk).map(drop)),
    ("restore the point", false, |place| place.as_of(&place.disk, Point::Lsn(DAMAGED)).map(drop)),
    ("clone", false, |place| cloned(place, 0)),
    ("clone the other disk", true, |place| cloned(place, 1)),
    ("grow in use", true, |place| killed(place, |store| store.disks()[0].grow(2 * MIB).map(drop))),
    ("grow", true, |place| resized(place, 2 * MIB, false)),
    ("shrink", false, |place| resized(place, 4096, true)),
    ("log resize to less", false, |place| resize_log(&place.log(), 4 * SEGMENT).map(drop)),
    ("log resize to more", true, |place| resize_log(&place.log(), 64 * SEGMENT).map(drop)),
    ("leave", false, |place| gone(place, 0, false)),
    ("leave, the other disk", false, |place| gone(place, 1, false)),
    ("move-log", false, |place| gone(place, 0, true)),
    ("move-log, the other disk", false, |place| gone(place, 1, true)),
    ("move-log to it", true, |place| {
        let (disk, log) = (place.at("c"), place.at("c.wal"));
        create_disk(&disk, MIB, &log, &options())?;
        move_to_log(&disk, &log, &place.log(), &options(), &[])
    }),
    ("create", true, |place| create_disk(&place.at("c"), MIB, &place.log(), &options())),
    ("import", true, |place| {
        let (new, raw) = (place.at("c"), place.at("raw"));
        std::fs::write(&raw, vec![5; MIB as usize]).unwrap();
        import_disk(&new, &raw, &place.log(), &options(), &mut |_, _| {}).map(drop)
    }),
    ("discard of the other disk", true, |place| discard_log(&place.disks()[1], &place.log()).map(drop)),
];

#[test]
fn no_command_takes_the_proof_of_damage_away() {
    let mut wrong = Vec::new();
    for proof in PROOFS {
        let damaged = damaged(proof);
        assert_eq!(named(&damaged), [DAMAGED], "{proof:?}");
        for (name, expected, command) in COMMANDS {
            let mut place = damaged.crash();
            let done = command(&mut place);
            if let Err(error) = &done {
                assert_eq!(
                    error.kind(),
                    ErrorKind::Damaged,
                    "{name}, proof in {proof:?}: {error}"
                );
            }
            let exported = place.exported(&place.disk).map_err(|error| error.kind());
            let kept = named(&place) == [DAMAGED] && exported == Err(ErrorKind::Damaged);
            if done.is_ok() != *expected || !kept {
                wrong.push(format!(
                    "{name}, proof in {proof:?}: kept: {kept}, {done:?}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What was damaged is given up only by the command that says so. The other disk keeps its records.
#[test]
fn only_a_discard_gives_damage_up() {
    for proof in PROOFS {
        let place = damaged(proof);
        let other = &place.disks()[1];
        let before = place.exported(other).unwrap();
        discard_log(&place.disk, &place.log()).unwrap();
        assert_eq!(named(&place), [0; 0]);
        assert!(place.exported(other).unwrap() == before);
        let store = place.open();
        assert!(all(&read(&mut port(&store, 0), 0, 8), 0));
        store.close().unwrap();
        assert_eq!(named(&place), [0; 0]);
    }
}

/// What the removed files prove is in the control file: also what rots later is no torn write. A
/// file that may have been part of the log is not removed.
#[test]
fn a_smaller_log_still_knows_that_its_last_batch_was_durable() {
    for proof in PROOFS {
        let place = cut(proof);
        assert_eq!(named(&place), [0; 0]);
        let shrink = || resize_log(&place.log(), 4 * SEGMENT);
        if proof == Proof::Suspect {
            let part = format!("move {} elsewhere", far(&place).display());
            assert_eq!(refused(shrink(), &part), ErrorKind::Damaged);
            std::fs::rename(far(&place), place.at("moved")).unwrap();
            shrink().unwrap();
            assert_eq!(named(&place), [0; 0]);
            continue;
        }
        shrink().unwrap();
        assert!(!far(&place).exists());
        rot(&place);
        assert_eq!(named(&place), [DAMAGED]);
        drop(place.open());
        assert_eq!(named(&place), [DAMAGED]);
    }
}
