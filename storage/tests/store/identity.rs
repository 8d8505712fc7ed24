//! Which image is taken for which disk: the table of docs/operations, on file systems with and
//! without attributes, with and without records in the log.

use std::fs::{
    copy, create_dir, create_dir_all, hard_link, read_dir, remove_dir_all, remove_file, rename,
};
use std::path::{Path, PathBuf};

use walvisor_storage::{
    DiskOptions, EngineKind, ErrorKind, Image, Result, Store, StoreOptions, create_disk,
    discard_log, import_disk, resize_disk,
};

use crate::support::{
    MIB, TestDisk, commit, copy_image, each_file_system, has_attributes, mark, only, port, put,
    read, refused, set_mark, small,
};

const BYTE: &str = "WALVISOR_TEST_BYTE";
const PATHS: &str = "WALVISOR_TEST_CHILD";

fn options() -> StoreOptions {
    small(EngineKind::Auto)
}

fn try_open(log: &Path, images: &[PathBuf]) -> Result<Store> {
    let disks: Vec<_> = images.iter().map(DiskOptions::new).collect();
    Store::open(log, &disks, &options())
}

/// The first byte of each disk's first and 100th sector.
type Bytes = Vec<(u8, u8)>;

fn bytes(store: &Store) -> Bytes {
    let disks = 0..store.disks().len();
    let ports = disks.map(|disk| port(store, disk));
    ports
        .map(|mut port| (read(&mut port, 0, 1)[0], read(&mut port, 100, 1)[0]))
        .collect()
}

/// Starts a process that opens the disks, writes `byte` to the first sector of the first disk,
/// `byte + 1` to that of the second and so on, flushes, and dies.
fn write_and_die(log: &Path, images: &[PathBuf], byte: u8) {
    let paths = std::iter::once(log).chain(images.iter().map(PathBuf::as_path));
    let output = only("identity::a_process_that_dies")
        .env(PATHS, std::env::join_paths(paths).unwrap())
        .env(BYTE, byte.to_string())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{error}");
}

/// The body of such a process; run as a test it does nothing.
#[test]
fn a_process_that_dies() {
    let Some(paths) = std::env::var_os(PATHS) else {
        return;
    };
    let paths: Vec<PathBuf> = std::env::split_paths(&paths).collect();
    let byte: u8 = std::env::var(BYTE).unwrap().parse().unwrap();
    let store = try_open(&paths[0], &paths[1..]).unwrap();
    for (disk, byte) in store.disks().iter().zip(byte..) {
        commit(disk, 0, byte, 1);
    }
    // The process exits without closing anything.
    std::process::exit(7);
}

/// A directory with two disks of one log, which have the same file name in directories of their
/// own: `vms/log`, `vms/1/disk.img`, `vms/2/disk.img`.
struct Site<'a> {
    top: &'a Path,
    vms: PathBuf,
    attributes: bool,
}

fn each_site(test: impl Fn(&Site<'_>)) {
    each_file_system(&["none"], options(), |place| {
        test(&Site {
            top: &place.top,
            vms: place.at("vms"),
            attributes: has_attributes(&place.top),
        });
    });
}

fn with_attributes(test: impl Fn(&Site<'_>)) {
    each_site(|site| {
        if site.attributes {
            test(site);
        }
    });
}

impl Site<'_> {
    fn at(&self, name: &str) -> PathBuf {
        self.top.join(name)
    }

    fn log(&self) -> PathBuf {
        self.vms.join("log")
    }

    fn images(&self) -> [PathBuf; 2] {
        ["1", "2"].map(|name| self.vms.join(name).join("disk.img"))
    }

    fn is_at(&self, vms: PathBuf) -> Site<'_> {
        Site { vms, ..*self }
    }

    /// Makes both disks, anew, with the bytes (1, 1) and (2, 2). `backup` and `plain` are copies of
    /// the first one's image then, with and without its mark. Then sectors 1000 change: neither the
    /// first nor the last block, of which the log has samples. All is closed.
    fn make(&self) {
        let _ = remove_dir_all(&self.vms);
        let images = self.images();
        for image in &images {
            create_dir_all(image.parent().unwrap()).unwrap();
            create_disk(image, MIB, &self.log(), &options()).unwrap();
        }
        for places in [&[0, 100][..], &[1000]] {
            let store = try_open(&self.log(), &images).unwrap();
            for (disk, byte) in store.disks().iter().zip(1..) {
                places
                    .iter()
                    .for_each(|sector| commit(disk, *sector, byte, 1));
            }
            store.close().unwrap();
            if places.len() == 2 {
                copy_image(&images[0], &self.at("backup"));
                copy(&images[0], self.at("plain")).unwrap();
            }
        }
    }

    /// The same, and then a process writes, so that the bytes are (11, 1) and (12, 2). It is killed,
    /// so that each disk has a record in the log, or closes all.
    fn written(&self, killed: bool) {
        self.make();
        write_and_die(&self.log(), &self.images(), 11);
        if !killed {
            try_open(&self.log(), &self.images())
                .unwrap()
                .close()
                .unwrap();
        }
    }

    /// Asserts that both disks have the bytes, wherever they are now, and then their images too.
    #[track_caller]
    fn holds(&self, images: &[PathBuf], want: &[(u8, u8)]) {
        let store = try_open(&self.log(), images).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(bytes(&store), want);
        store.close().unwrap();
        for (image, want) in images.iter().zip(want) {
            let bytes = std::fs::read(image).unwrap();
            assert_eq!((bytes[0], bytes[100 * 512]), *want);
        }
    }

    /// Asserts that opening is refused with a line that has all these parts, and changes nothing.
    #[track_caller]
    fn refuses(&self, images: &[PathBuf], parts: &[&str]) {
        let state = || {
            let control = std::fs::read(self.log().join("control")).unwrap();
            let images = images
                .iter()
                .map(|image| (std::fs::read(image).ok(), mark(image)));
            (control, images.collect::<Vec<_>>())
        };
        let before = state();
        for part in parts {
            refused(
                try_open(&self.log(), images).map(|store| bytes(&store)),
                part,
            );
        }
        assert!(before == state(), "a refusal changes nothing: {parts:?}");
    }
}

enum Seen {
    Opened(&'static [(u8, u8)]),
    /// With this part of the error, where images have marks and where they have none.
    Refused(&'static str, &'static str),
}

use Seen::{Opened, Refused};

/// What happens to the files; the images that are opened then; what becomes of it with records in
/// the log, and without; and what the images hold after the first disk's records were given up.
type Row = (
    &'static str,
    fn(&Site<'_>) -> Vec<PathBuf>,
    Seen,
    Seen,
    &'static [(u8, u8)],
);

const BOTH: &[(u8, u8)] = &[(11, 1), (12, 2)];
const CROSSED: &[(u8, u8)] = &[(12, 2), (11, 1)];
const OLDER: &[(u8, u8)] = &[(1, 1), (12, 2)];

#[rustfmt::skip]
const ROWS: &[Row] = &[
    ("one is moved", |site| {
        let [one, two] = site.images();
        rename(&two, site.at("other.img")).unwrap();
        vec![site.at("other.img"), one]
    }, Opened(CROSSED), Opened(CROSSED), BOTH),
    ("names are exchanged", |site| {
        let ([one, two], between) = (site.images(), site.at("between"));
        rename(&one, &between).unwrap();
        rename(&two, &one).unwrap();
        rename(&between, &two).unwrap();
        vec![one, two]
    }, Opened(CROSSED), Opened(CROSSED), BOTH),
    ("copied without its mark", |site| {
        rename(&site.images()[0], site.at("kept")).unwrap();
        copy(site.at("kept"), &site.images()[0]).unwrap();
        site.images().into()
    }, Refused("no mark", "inode"), Opened(BOTH), OLDER),
    ("an older copy", |site| {
        remove_file(&site.images()[0]).unwrap();
        copy_image(&site.at("backup"), &site.images()[0]);
        site.images().into()
    }, Refused("older", "inode"), Opened(OLDER), OLDER),
    ("an older copy without its mark", |site| {
        remove_file(&site.images()[0]).unwrap();
        copy(site.at("plain"), &site.images()[0]).unwrap();
        site.images().into()
    }, Refused("no mark", "inode"), Opened(OLDER), OLDER),
    // `cp backup disk.img` keeps the inode and its attributes.
    ("an older copy into the file", |site| {
        copy(site.at("plain"), &site.images()[0]).unwrap();
        site.images().into()
    }, Refused("another program wrote to it", "another program wrote to it"), Opened(OLDER), OLDER),
    ("another file", |site| {
        remove_file(&site.images()[0]).unwrap();
        std::fs::write(&site.images()[0], vec![5; MIB as usize]).unwrap();
        site.images().into()
    }, Refused("no mark", "inode"), Opened(&[(5, 5), (12, 2)]), &[(5, 5), (12, 2)]),
    ("its log is an older copy", |site| {
        let older = site.at("older");
        let _ = remove_dir_all(&older);
        copy_all(&site.log(), &older, false);
        let store = try_open(&site.log(), &site.images()).unwrap();
        store.disks().iter().for_each(|disk| commit(disk, 0, 99, 1));
        store.close().unwrap();
        remove_dir_all(site.log()).unwrap();
        rename(&older, site.log()).unwrap();
        site.images().into()
    }, Refused("newer than the log expects", "another program wrote to it"),
        Opened(&[(99, 1), (99, 2)]), &[(99, 1), (99, 2)]),
    ("it has a second name", |site| {
        let _ = remove_file(site.at("link"));
        hard_link(&site.images()[0], site.at("link")).unwrap();
        vec![site.at("link"), site.images()[1].clone()]
    }, Opened(BOTH), Opened(BOTH), BOTH),
    ("it is gone", |site| {
        remove_file(&site.images()[0]).unwrap();
        vec![site.images()[1].clone()]
    }, Refused("1/disk.img", "1/disk.img"), Opened(&[(12, 2)]), &[(12, 2)]),
    ("the image of the other disk is in its place", |site| {
        let [one, two] = site.images();
        remove_file(&one).unwrap();
        copy_image(&two, &one);
        vec![one]
    }, Refused("1 record", "1 record"), Opened(&[(12, 2)]), &[]),
];

#[test]
fn each_image_is_taken_for_its_disk_or_refused() {
    each_site(|site| {
        for (what, change, with_records, without, given_up) in ROWS {
            println!("{what}, in {}", site.top.display());
            for (killed, wanted) in [(true, with_records), (false, without)] {
                site.written(killed);
                let images = change(site);
                let (marked, unmarked) = match wanted {
                    Opened(want) => {
                        site.holds(&images, want);
                        // And one after the other, as the disks are now.
                        for (image, want) in images.iter().zip(*want) {
                            site.holds(std::slice::from_ref(image), &[*want]);
                        }
                        continue;
                    }
                    Refused(marked, unmarked) => (marked, unmarked),
                };
                let why = if site.attributes { marked } else { unmarked };
                site.refuses(&images, &[why, "1 record", "disk discard"]);
                // The other disk can't be opened alone, unless its log is the older one, and keeps its
                // record.
                let (rest, log_is_older) = (&site.images()[1..], *given_up == [(99, 1), (99, 2)]);
                if !log_is_older {
                    let parts = ["only the log names it", "add its image with detached="];
                    site.refuses(rest, &parts);
                }
                let one = &site.images()[0];
                let done = discard_log(one, &site.log()).unwrap();
                assert_eq!((done.records, done.payload_bytes), (Some(1), Some(512)));
                if given_up.is_empty() {
                    // The file at the first disk's path is the other's, and is not touched.
                    remove_file(one).unwrap();
                    site.holds(rest, &[(12, 2)]);
                    continue;
                }
                assert_eq!(done.image_fits, one.exists());
                if log_is_older {
                    discard_log(&rest[0], &site.log()).unwrap();
                }
                site.holds(&images, given_up);
            }
        }
        // The path of a lost image is free for a new disk.
        site.written(true);
        let images = site.images();
        remove_file(&images[0]).unwrap();
        discard_log(&images[0], &site.log()).unwrap();
        create_disk(&images[0], MIB, &site.log(), &options()).unwrap();
        site.holds(&images, &[(0, 0), (12, 2)]);
        let unknown = discard_log(&site.at("unknown.img"), &site.log());
        assert_eq!(refused(unknown, ""), ErrorKind::WrongLog);
        std::fs::write(&images[0], vec![5; MIB as usize / 2]).unwrap();
        site.refuses(&images[..1], &["truncate"]);
    });
}

/// Copies a directory of a site, and images with their marks or without.
fn copy_all(from: &Path, to: &Path, marks: bool) {
    create_dir(to).unwrap();
    for entry in read_dir(from).unwrap() {
        let (entry, to) = (
            entry.as_ref().unwrap(),
            to.join(entry.as_ref().unwrap().file_name()),
        );
        if entry.file_type().unwrap().is_dir() {
            copy_all(&entry.path(), &to, marks);
        } else if marks {
            copy_image(&entry.path(), &to);
        } else {
            copy(entry.path(), to).unwrap();
        }
    }
}

/// The disks of a directory that was moved or copied whole are in the same places relative to their
/// log.
#[test]
fn disks_are_moved_and_copied_together_with_their_log() {
    each_site(|site| {
        site.written(true);
        let moved = site.is_at(site.at("moved"));
        rename(&site.vms, &moved.vms).unwrap();
        moved.holds(&moved.images(), BOTH);
        let plain = site.is_at(site.at("plain-copy"));
        copy_all(&moved.vms, &plain.vms, false);
        plain.holds(&plain.images(), BOTH);
    });
    with_attributes(|site| {
        site.written(true);
        let [left, right] = ["left", "right"].map(|name| site.is_at(site.at(name)));
        for (copied, byte) in [(&left, 51), (&right, 61)] {
            copy_all(&site.vms, &copied.vms, true);
            write_and_die(&copied.log(), &copied.images(), byte);
        }
        // The two copies have diverged: the log of one refuses the images of the other.
        let ([one, other], between) = ([&left, &right].map(|site| &site.vms), site.at("between"));
        rename(one.join("1"), &between).unwrap();
        rename(other.join("1"), one.join("1")).unwrap();
        rename(&between, other.join("1")).unwrap();
        for copied in [&left, &right] {
            copied.refuses(
                &copied.images(),
                &["changed separately", "2 records", "disk discard"],
            );
        }
        site.holds(&site.images(), BOTH);
    });
}

#[test]
fn a_disk_has_one_image() {
    each_site(|site| {
        site.written(false);
        let [one, two] = site.images();
        remove_file(&two).unwrap();
        hard_link(&one, &two).unwrap();
        let opened = try_open(&site.log(), &site.images());
        assert_eq!(
            refused(opened, "each disk needs its own image"),
            ErrorKind::Locked
        );
    });
    with_attributes(|site| {
        site.written(true);
        let ([one, two], copied) = (site.images(), site.at("copy.img"));
        copy_image(&one, &copied);
        // Both at once would be two disks, but the log knows one.
        let all = [&one, &copied, &two].map(Clone::clone);
        site.refuses(&all, &["copy.img", "is open already", "disk import"]);
        site.refuses(&[&copied, &one, &two].map(Clone::clone), &["copy.img"]);
        site.holds(&[copied, two], BOTH);
        site.refuses(&[one], &["a copy", "copy.img", "disk import"]);
    });
}

/// Other programs may use a plain image; one whose newest bytes are in a log is refused.
#[test]
fn only_a_closed_image_is_used_without_its_log() {
    with_attributes(|site| {
        site.written(false);
        let one = &site.images()[0];
        let import = |name: &str| {
            let (new, log) = (site.at(name), site.at(&format!("{name}.wal")));
            import_disk(&new, one, &log, &options(), &mut |_, _| {}).map(drop)
        };
        assert!(mark(one).unwrap().contains(" closed"));
        drop(Image::open(one, true).unwrap());
        import("imported").unwrap();
        let own = mark(one).unwrap();
        assert_ne!(mark(&site.at("imported")).unwrap()[..32], own[..32]);
        write_and_die(&site.log(), &site.images(), 11);
        assert!(mark(one).unwrap().contains(" open"));
        for done in [
            Image::open(one, true).map(drop),
            import("again"),
            try_open(&site.at("none"), std::slice::from_ref(one)).map(drop),
        ] {
            assert_eq!(refused(done, ""), ErrorKind::WrongLog);
        }
        assert!(!site.at("none").exists());
        // Its log is gone for good: the image is used as it is.
        remove_dir_all(site.log()).unwrap();
        let done = discard_log(one, &site.log()).unwrap();
        assert_eq!((done.records, done.image), (None, None));
        assert!(own.starts_with(&done.disk));
        assert_eq!(mark(one), None);
        assert!(discard_log(one, &site.log()).is_err());
        drop(Image::open(one, true).unwrap());
        // The mark of the first format, only a UUID, is one of an open image. One that can't be
        // parsed is not taken for a missing mark.
        set_mark(one, "0123456789abcdef0123456789abcdef");
        assert_eq!(refused(Image::open(one, true), ""), ErrorKind::WrongLog);
        set_mark(one, "something else");
        refused(Image::open(one, true), "user.walvisor.disk");
    });
}

fn generation(image: &Path) -> u64 {
    let text = mark(image).unwrap();
    u64::from_str_radix(text.split(' ').nth(1).unwrap(), 16).unwrap()
}

/// A disk's generation rises whenever it is opened and when a checkpoint writes to its image; other
/// disks keep theirs.
#[test]
fn the_generation_rises_with_what_is_written() {
    with_attributes(|site| {
        site.written(false);
        let both = || site.images().map(|image| generation(&image));
        let closed = both();
        let store = try_open(&site.log(), &site.images()).unwrap();
        let opened = both();
        assert!(opened[0] > closed[0] && opened[1] > closed[1]);
        commit(&store.disks()[0], 8, 5, 8);
        assert_eq!(both(), opened, "a FLUSH has nothing to do with it");
        let copied = [opened[0] + 1, opened[1]];
        // The second one finds nothing to write.
        for _ in 0..2 {
            store.disks()[0].checkpoint().unwrap();
            assert_eq!(both(), copied);
        }
        store.close().unwrap();
        assert_eq!(both(), copied);
    });
}

/// A crash at any point of an open or a checkpoint leaves an image that is accepted: with the old
/// or the new generation.
#[test]
fn both_generations_of_a_checkpoint_that_was_cut_are_accepted() {
    let place = TestDisk::new();
    if !has_attributes(&place.top) {
        return println!("skipped: no attributes in {}", place.top.display());
    }
    let store = place.open();
    commit(&store.disks()[0], 0, 1, 8);
    let before = mark(&place.disk).unwrap();
    let cut = place.crash();
    store.disks()[0].checkpoint().unwrap();
    let (after, next) = (mark(&place.disk).unwrap(), generation(&place.disk));
    store.close().unwrap();
    // With a control file that was written before the checkpoint began, only one generation is
    // accepted.
    set_mark(&cut.disk, &after);
    refused(cut.try_open(&cut.options), "newer");
    // With the control file as it is while the checkpoint runs, both are accepted.
    let control = cut.log().join("control");
    let mut bytes = std::fs::read(&control).unwrap();
    for slot in bytes.chunks_mut(65536) {
        slot[112 + 40..112 + 48].copy_from_slice(&next.to_le_bytes());
        slot[12..16].fill(0);
        let crc = crc32c::crc32c(slot);
        slot[12..16].copy_from_slice(&crc.to_le_bytes());
    }
    std::fs::write(&control, &bytes).unwrap();
    for mark in [before, after] {
        set_mark(&cut.disk, &mark);
        let store = cut.crash();
        let store = store.open();
        assert_eq!(read(&mut port(&store, 0), 0, 8)[0], 1);
    }
}

/// Bytes that a sample covers may be changed by the next checkpoint. A sample that a resize cuts is
/// dropped.
#[test]
fn samples_stay_right_after_a_resize_and_find_a_write_through_another_name() {
    with_attributes(|site| {
        site.written(false);
        let (log, one) = (site.log(), &site.images()[..1]);
        resize_disk(&one[0], MIB / 2, &log, true, &[]).unwrap();
        write_and_die(&log, one, 21);
        resize_disk(&one[0], 2 * MIB, &log, false, &[]).unwrap();
        site.holds(one, &[(21, 1)]);
        write_and_die(&log, one, 31);
        put(&one[0], 0, &[9; 512]);
        site.refuses(one, &["another program wrote to it"]);
    });
}
