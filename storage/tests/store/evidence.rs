//! No command takes away the proof that a durable record is damaged.
//!
//! A batch that was durable and rots is told from a torn one by headers behind it, which say how
//! far the log was durable. These may be in a segment that is no part of the log any more: a void
//! one, or one whose own header has rotted.


use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::support::{copy_image, flush, mark, read, wait, write};
use walvisor_storage::{
    BackendQueue, Commit, DiskOptions, ErrorKind, MarkText, Point, Result, Retention, Store,
    StoreOptions, clone_disk, create_disk, discard_log, dump_records, export_disk, import_disk,
    inspect, leave_log, move_to_log, resize_disk, resize_log, restore_disk, rewind_disk,
};

const SIZE: u64 = 1 << 20;
const SEGMENT: u64 = 64 << 10;
const SEGMENTS: u32 = 32;
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

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: SEGMENT,
        max_segments: SEGMENTS,
        ..StoreOptions::default()
    }
}

/// Two disks on one log, in a directory of their own.
struct Bench {
    top: tempfile::TempDir,
}

impl Bench {
    fn at(&self, name: &str) -> PathBuf {
        self.top.path().join(name)
    }

    fn a(&self) -> PathBuf {
        self.at("a")
    }

    fn b(&self) -> PathBuf {
        self.at("b")
    }

    fn log(&self) -> PathBuf {
        self.at("log")
    }

    fn open(&self) -> Result<Store> {
        self.open_keeping(None)
    }

    fn open_keeping(&self, retain: Option<Retention>) -> Result<Store> {
        let disks = [self.a(), self.b()].map(DiskOptions::new);
        let options = StoreOptions {
            retain,
            ..options()
        };
        Store::open(&self.log(), &disks, &options)
    }

    /// A copy of the files, as a process killed now would leave them. If the control file or a mark
    /// is written meanwhile, the copy is repeated: it would mix two moments.
    fn copy(&self) -> Self {
        let state = || {
            let control = std::fs::read(self.log().join("control")).unwrap();
            (control, mark(&self.a()), mark(&self.b()))
        };
        loop {
            let before = state();
            let copy = Self {
                top: tempfile::tempdir().unwrap(),
            };
            copy_dir(self.top.path(), copy.top.path());
            if state() == before {
                return copy;
            }
        }
    }

    /// A log with a damaged record, and the proof that it was durable.
    fn damaged(proof: Proof) -> Self {
        let bench = Self::cut(proof);
        bench.rot();
        bench
    }

    /// A log that a power cut has torn behind its durable records.
    fn cut(proof: Proof) -> Self {
        let bench = Self {
            top: tempfile::tempdir().unwrap(),
        };
        for disk in [bench.a(), bench.b()] {
            create_disk(&disk, SIZE, &bench.log(), &options()).unwrap();
        }
        let store = bench.open().unwrap();
        let [mut a, mut b] = [0, 1].map(|disk| store.disks()[disk].open_port().unwrap());
        write(&mut a, 0, 1, 8);
        flush(&mut a);
        write(&mut b, 0, 1, 8);
        flush(&mut b);
        write(&mut a, 0, 2, 8);
        flush(&mut a);
        // These reach the medium and are not synced: no header says that they were durable.
        for _ in 0..3 {
            write(&mut b, 32, 9, 32);
            if !b.notify_written(7) {
                b.kick();
                assert!(wait(&mut b, 1)[0].result.is_ok());
            }
        }
        let killed = bench.copy();
        drop((a, b));
        drop(store);
        killed.tear(proof);
        killed
    }

    /// The LSNs of the log's records, their segments, and where their payloads are.
    fn records(&self) -> Vec<(u64, PathBuf, u64)> {
        let mut records = Vec::new();
        dump_records(&self.log(), &mut |record| {
            records.push((record.lsn, record.segment.to_owned(), record.offset));
        })
        .unwrap();
        records
    }

    /// Changes the payload of the record.
    fn rot(&self) {
        let records = self.records();
        let (_, segment, payload) = records.iter().find(|(lsn, ..)| *lsn == DAMAGED).unwrap();
        change(segment, payload + 100, &[0xee]);
    }

    fn tear(&self, proof: Proof) {
        let records = self.records();
        let (_, first, _) = records.iter().find(|(lsn, ..)| *lsn == DAMAGED).unwrap();
        let behind = records.iter().filter(|(lsn, ..)| *lsn > DAMAGED);
        let (same, next): (Vec<_>, Vec<_>) = behind.partition(|(_, segment, _)| segment == first);
        assert!(!same.is_empty() && !next.is_empty(), "{records:?}");
        // The power cut took what follows in the same segment, with the headers.
        for (_, segment, offset) in same {
            change(segment, offset - 4096, &[0; 4096]);
        }
        // The number of a file has no meaning. This one is beyond those of a smaller log.
        let (next, far) = (&next[0].1, self.log().join("segment-00012"));
        std::fs::rename(next, &far).unwrap();
        if proof == Proof::Suspect {
            change(&far, 0, &[0xee; 64]);
        }
    }

    /// What `disk check` names as damaged.
    fn named(&self) -> Vec<u64> {
        let log = inspect(&self.a(), &self.log()).unwrap().log.unwrap();
        log.damaged.iter().map(|block| block.lsn).collect()
    }

    fn export(&self, disk: &Path) -> Result<Vec<u8>> {
        let raw = self.at("exported");
        export_disk(disk, &self.log(), &raw, true, None, &mut |_, _| {})?;
        Ok(std::fs::read(raw).unwrap())
    }

    /// Opens the log, does something, and is killed.
    fn killed_after(&mut self, work: impl FnOnce(&mut Store) -> Result<()>) -> Result<()> {
        let mut store = self.open()?;
        let done = work(&mut store);
        let killed = self.copy();
        // Closing copies what it can.
        let _ = store.close();
        *self = killed;
        done
    }
}

fn change(segment: &Path, offset: u64, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(segment).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

/// Copies files and the images' marks. A segment file that is being made is left out.
fn copy_dir(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_string_lossy().ends_with(".new") {
            continue;
        }
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&to).unwrap();
            copy_dir(&entry.path(), &to);
        } else {
            copy_image(&entry.path(), &to);
        }
    }
}

type Command = fn(&mut Bench) -> Result<()>;

/// What a command is expected to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expectation {
    Done,
    /// With an error that names the damage.
    Refused,
}

/// Every command that removes, reuses or rewrites a segment or a slot of the control file.
const COMMANDS: &[(&str, Expectation, Command)] = &[
    ("open and be killed", Expectation::Done, |bench| {
        bench.killed_after(|_| Ok(()))
    }),
    ("open and close", Expectation::Refused, |bench| {
        bench.open()?.close()
    }),
    ("open twice", Expectation::Done, |bench| {
        bench.killed_after(|_| Ok(()))?;
        bench.killed_after(|_| Ok(()))
    }),
    ("write all over the log", Expectation::Done, |bench| {
        bench.killed_after(|store| {
            let mut port = store.disks()[1].open_port()?;
            for byte in 0..20 {
                write(&mut port, 64, byte, 32);
                flush(&mut port);
            }
            Ok(())
        })
    }),
    ("checkpoint", Expectation::Refused, |bench| {
        bench.killed_after(|store| store.disks()[0].checkpoint().map(drop))
    }),
    ("snapshot", Expectation::Done, |bench| {
        bench.killed_after(|store| store.disks()[0].snapshot("s".parse().unwrap()).map(drop))
    }),
    ("snapshot-delete", Expectation::Done, |bench| {
        bench.killed_after(|store| {
            store.disks()[0].snapshot("s".parse().unwrap())?;
            store.disks()[0].delete_snapshot("s".parse().unwrap())
        })
    }),
    ("mark", Expectation::Done, |bench| {
        let text: MarkText = "here".parse().unwrap();
        bench.killed_after(|store| store.mark(&text).map(|_: Commit| ()))
    }),
    ("set-retain", Expectation::Done, |bench| {
        bench.killed_after(|store| store.disks()[0].set_retain(Retention::Bytes(SEGMENT)))
    }),
    ("retain expires", Expectation::Done, |bench| {
        let store = bench.open_keeping(Some(Retention::Bytes(SEGMENT)))?;
        let mut port = store.disks()[1].open_port()?;
        for byte in 0..20 {
            write(&mut port, 64, byte, 32);
            flush(&mut port);
        }
        drop(port);
        let killed = bench.copy();
        drop(store);
        *bench = killed;
        Ok(())
    }),
    ("close a log with history", Expectation::Done, |bench| {
        bench.open_keeping(Some(Retention::All))?.close()
    }),
    ("add a disk", Expectation::Done, |bench| {
        std::fs::write(bench.at("c"), vec![0; SIZE as usize]).unwrap();
        let added = DiskOptions::new(bench.at("c"));
        bench.killed_after(|store| store.add_disk(&added).map(drop))
    }),
    ("remove the other disk", Expectation::Done, |bench| {
        let removed = bench.b();
        bench.killed_after(|store| {
            // Its own records are copied by this.
            assert!(store.disks()[1].checkpoint().is_err());
            store.remove_disk(&removed)
        })
    }),
    ("remove the disk", Expectation::Refused, |bench| {
        let removed = bench.a();
        bench.killed_after(|store| store.remove_disk(&removed))
    }),
    (
        "remove the other disk, keeping its records",
        Expectation::Done,
        |bench| {
            let removed = bench.b();
            bench.killed_after(|store| {
                assert!(store.disks()[1].checkpoint().is_err());
                store.remove_disk_keeping_records(&removed)
            })
        },
    ),
    (
        "restore in place, in use, the other disk",
        Expectation::Refused,
        |bench| bench.killed_after(|store| store.disks()[1].rewind(Point::Lsn(1)).map(drop)),
    ),
    ("export in use", Expectation::Refused, |bench| {
        let target = std::fs::File::create(bench.at("live")).unwrap();
        bench.killed_after(|store| store.disks()[0].export(target, &mut |_, _| true).map(drop))
    }),
    (
        "export in use, the other disk",
        Expectation::Done,
        |bench| {
            let target = std::fs::File::create(bench.at("live")).unwrap();
            bench.killed_after(|store| {
                let disk = &store.disks()[1];
                disk.export_at(Point::Newest, target, &mut |_, _| true)
                    .map(drop)
            })
        },
    ),
    ("grow in use", Expectation::Done, |bench| {
        bench.killed_after(|store| store.disks()[0].grow(2 * SIZE).map(drop))
    }),
    ("log resize to less", Expectation::Refused, |bench| {
        resize_log(&bench.log(), 4 * SEGMENT).map(drop)
    }),
    ("log resize to more", Expectation::Done, |bench| {
        resize_log(&bench.log(), 64 * SEGMENT).map(drop)
    }),
    ("grow", Expectation::Done, |bench| {
        resize_disk(&bench.a(), 2 * SIZE, &bench.log(), false, &[bench.b()]).map(drop)
    }),
    ("shrink", Expectation::Refused, |bench| {
        resize_disk(&bench.a(), 4096, &bench.log(), true, &[bench.b()]).map(drop)
    }),
    ("leave", Expectation::Refused, |bench| {
        leave_log(&bench.a(), &bench.log(), &[bench.b()]).map(drop)
    }),
    ("leave, the other disk", Expectation::Refused, |bench| {
        leave_log(&bench.b(), &bench.log(), &[bench.a()]).map(drop)
    }),
    ("move-log", Expectation::Refused, |bench| {
        move_to_log(
            &bench.a(),
            &bench.log(),
            &bench.at("new"),
            &options(),
            &[bench.b()],
        )
    }),
    ("move-log, the other disk", Expectation::Refused, |bench| {
        move_to_log(
            &bench.b(),
            &bench.log(),
            &bench.at("new"),
            &options(),
            &[bench.a()],
        )
    }),
    ("move-log to it", Expectation::Done, |bench| {
        create_disk(&bench.at("c"), SIZE, &bench.at("c.wal"), &options())?;
        move_to_log(
            &bench.at("c"),
            &bench.at("c.wal"),
            &bench.log(),
            &options(),
            &[],
        )
    }),
    ("create", Expectation::Done, |bench| {
        create_disk(&bench.at("c"), SIZE, &bench.log(), &options())
    }),
    ("import", Expectation::Done, |bench| {
        std::fs::write(bench.at("raw"), vec![5; SIZE as usize]).unwrap();
        let (new, raw) = (bench.at("c"), bench.at("raw"));
        let none = &mut |_, _| {};
        import_disk(&new, &raw, &bench.log(), &options(), none).map(drop)
    }),
    ("clone", Expectation::Refused, |bench| {
        let (new, log) = (bench.at("c"), bench.at("c.wal"));
        let none = &mut |_, _| {};
        clone_disk(&bench.a(), &bench.log(), None, &new, &log, &options(), none).map(drop)
    }),
    ("clone the other disk", Expectation::Done, |bench| {
        let (new, log) = (bench.at("c"), bench.at("c.wal"));
        let none = &mut |_, _| {};
        clone_disk(&bench.b(), &bench.log(), None, &new, &log, &options(), none).map(drop)
    }),
    ("export", Expectation::Refused, |bench| {
        bench.export(&bench.a()).map(drop)
    }),
    ("restore the point", Expectation::Refused, |bench| {
        let (at, raw) = (Point::Lsn(DAMAGED), bench.at("restored"));
        let none = &mut |_, _| {};
        restore_disk(&bench.a(), &bench.log(), at, &raw, None, none).map(drop)
    }),
    (
        "restore in place, the other disk",
        Expectation::Done,
        |bench| rewind_disk(&bench.b(), &bench.log(), Point::Lsn(1)).map(drop),
    ),
    ("restore in place and undo", Expectation::Done, |bench| {
        let done = rewind_disk(&bench.a(), &bench.log(), Point::Lsn(1))?;
        rewind_disk(&bench.a(), &bench.log(), Point::Lsn(done.from_lsn)).map(drop)
    }),
    ("discard of the other disk", Expectation::Done, |bench| {
        discard_log(&bench.b(), &bench.log()).map(drop)
    }),
];

#[test]
fn no_command_takes_the_proof_of_damage_away() {
    let mut wrong = Vec::new();
    for proof in [Proof::Void, Proof::Suspect] {
        let damaged = Bench::damaged(proof);
        assert_eq!(damaged.named(), [DAMAGED], "{proof:?}");
        for (name, expected, command) in COMMANDS {
            let mut bench = damaged.copy();
            let done = command(&mut bench);
            let did = match &done {
                Ok(()) => Expectation::Done,
                Err(error) if error.kind() == ErrorKind::Damaged => Expectation::Refused,
                Err(error) => panic!("{name}, proof in {proof:?}: {error}"),
            };
            let exported = bench.export(&bench.a()).map_err(|error| error.kind());
            let kept = bench.named() == [DAMAGED] && exported == Err(ErrorKind::Damaged);
            if did != *expected || !kept {
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
    for proof in [Proof::Void, Proof::Suspect] {
        let bench = Bench::damaged(proof);
        let other = bench.export(&bench.b()).unwrap();
        discard_log(&bench.a(), &bench.log()).unwrap();
        assert_eq!(bench.named(), [0; 0]);
        assert!(bench.export(&bench.b()).unwrap() == other);
        let store = bench.open().unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        assert!(read(&mut port, 0, 8).iter().all(|&byte| byte == 0));
        drop(port);
        store.close().unwrap();
        assert_eq!(bench.named(), [0; 0]);
    }
}

/// What the removed files prove is in the control file: also what rots later is no torn write.
#[test]
fn a_smaller_log_still_knows_that_its_last_batch_was_durable() {
    let bench = Bench::cut(Proof::Void);
    assert_eq!(bench.named(), [0; 0]);
    resize_log(&bench.log(), 4 * SEGMENT).unwrap();
    assert!(!bench.log().join("segment-00012").exists());
    bench.rot();
    assert_eq!(bench.named(), [DAMAGED]);
    let open = bench.open().unwrap();
    drop(open);
    assert_eq!(bench.named(), [DAMAGED]);
}

#[test]
fn a_file_that_may_have_been_part_of_the_log_is_not_removed() {
    let bench = Bench::cut(Proof::Suspect);
    assert_eq!(bench.named(), [0; 0]);
    let file = bench.log().join("segment-00012");
    let error = resize_log(&bench.log(), 4 * SEGMENT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    let text = error.to_string();
    assert!(
        text.contains(&format!("move {} elsewhere", file.display())),
        "{text}"
    );
    std::fs::rename(&file, bench.at("moved")).unwrap();
    resize_log(&bench.log(), 4 * SEGMENT).unwrap();
    assert_eq!(bench.named(), [0; 0]);
}
