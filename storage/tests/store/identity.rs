//! Which image is taken for which disk: moved, copied, swapped, linked or replaced, on file systems
//! with and without attributes, with and without records in the log. These tests are in a file, and
//! so a process, of their own: between fork and exec, a child holds the locks of every other test
//! in its parent.


use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{MemoryFs, TestDisk, copy_image, flush, mark, read, small, write};
use walvisor_storage::{
    DiskOptions, EngineKind, Error, ErrorKind, Image, Store, create_disk, discard_log, import_disk,
    inspect,
};

const SIZE: u64 = 1 << 20;

/// Two disks on one log, with the same file name and size, in directories of their own.
struct TestDir {
    /// The directory that contains `vms`.
    top: PathBuf,
    attributes: bool,
    // Dropped before `_dir`: the file system is unmounted before its directory is removed.
    _small: Option<MemoryFs>,
    _dir: tempfile::TempDir,
}

/// Runs the test on a file system with attributes and on one without.
fn each_file_system(test: impl Fn(&TestDir)) {
    let dir = tempfile::tempdir().unwrap();
    let top = dir.path().to_owned();
    let site = TestDir::new(top, dir, None);
    if site.attributes {
        test(&site)
    } else {
        println!(
            "skipped: no attributes in {}",
            std::env::temp_dir().display()
        )
    }
    // ramfs has no user attributes, no birth times, and no O_DIRECT.
    if let Some(small) = MemoryFs::ramfs() {
        let dir = tempfile::tempdir().unwrap();
        let site = TestDir::new(small.path().to_owned(), dir, Some(small));
        assert!(!site.attributes);
        test(&site);
    }
}

/// Runs the test only on the file system with attributes.
fn with_attributes(test: impl Fn(&TestDir)) {
    each_file_system(|site| {
        if site.attributes {
            test(site);
        }
    });
}

fn image(vms: &Path, number: u8) -> PathBuf {
    vms.join(number.to_string()).join("disk.img")
}

fn try_open(log: &Path, images: &[&Path]) -> Result<Store, Error> {
    let disks: Vec<_> = images.iter().map(DiskOptions::new).collect();
    Store::open(log, &disks, &small(EngineKind::Auto))
}

/// The first byte of each disk's first and 100th sector.
fn bytes(store: &Store) -> Vec<(u8, u8)> {
    let disks = store.disks().iter();
    disks
        .map(|disk| {
            let mut port = disk.open_port().unwrap();
            (read(&mut port, 0, 1)[0], read(&mut port, 100, 1)[0])
        })
        .collect()
}

impl TestDir {
    fn new(top: PathBuf, dir: tempfile::TempDir, small: Option<MemoryFs>) -> Self {
        let probe = top.join("probe");
        std::fs::write(&probe, "").unwrap();
        let flags = rustix::fs::XattrFlags::empty();
        let set = rustix::fs::setxattr(&probe, "user.walvisor.test", b"1", flags);
        Self {
            top,
            attributes: set.is_ok(),
            _small: small,
            _dir: dir,
        }
    }

    fn vms(&self) -> PathBuf {
        self.top.join("vms")
    }

    fn log(&self) -> PathBuf {
        self.vms().join("log")
    }

    /// Disk `number`'s image.
    fn image(&self, number: u8) -> PathBuf {
        image(&self.vms(), number)
    }

    /// Creates both disks, writes (1, 1) to the first and (2, 2) to the second, and closes them.
    fn close_both(&self) {
        for number in [1, 2] {
            std::fs::create_dir_all(self.vms().join(number.to_string())).unwrap();
            let options = small(EngineKind::Auto);
            create_disk(&self.image(number), SIZE, &self.log(), &options).unwrap();
        }
        let (one, two) = (self.image(1), self.image(2));
        let store = try_open(&self.log(), &[&one, &two]).unwrap();
        for (number, disk) in (1..).zip(store.disks()) {
            let mut port = disk.open_port().unwrap();
            write(&mut port, 0, number, 1);
            write(&mut port, 100, number, 1);
        }
        store.close().unwrap();
    }

    /// As [`close_both`](Self::close_both); then a process writes (11, 1) and (12, 2) and is
    /// killed, so both disks have a record in the log.
    fn kill_both(&self) {
        self.close_both();
        write_and_die(&self.log(), &[&self.image(1), &self.image(2)], 11);
    }

    /// Asserts that both disks have the bytes `want`, wherever they are now.
    #[track_caller]
    fn expect(&self, log: &Path, images: &[&Path], want: &[(u8, u8)]) {
        let store = try_open(log, images).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(bytes(&store), want);
        store.close().unwrap();
        // The images have the same bytes.
        for (image, want) in images.iter().zip(want) {
            let bytes = std::fs::read(image).unwrap();
            assert_eq!((bytes[0], bytes[100 * 512]), *want);
        }
    }
}

/// Asserts that opening is refused with a one-line error that contains each of `parts`, and changes
/// nothing.
#[track_caller]
fn refused(log: &Path, images: &[&Path], parts: &[&str]) {
    let state = || {
        let control = std::fs::read(log.join("control")).unwrap();
        let images = images.iter();
        let images: Vec<_> = images
            .map(|image| (std::fs::read(image).ok(), mark(image)))
            .collect();
        (control, images)
    };
    let before = state();
    let error = match try_open(log, images) {
        Ok(store) => panic!("opened, with {:?}", bytes(&store)),
        Err(error) => error,
    };
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    for part in parts {
        assert!(text.contains(part), "no {part:?}: {text}");
    }
    assert!(before == state(), "a refusal changes nothing: {text}");
}

const BOTH_WAYS: [&str; 3] = ["1 record", "back", "disk discard"];

/// Parts of the error for a log with records of a disk that was not asked for.
const UNNAMED: [&str; 4] = [
    "1 record of another disk",
    "only the log names it",
    "open both disks together, add its image with detached=",
    "disk discard",
];

const CHILD: &str = "WALVISOR_TEST_CHILD";

/// Starts a process that opens the disks, writes `byte` to the first sector of the first disk,
/// `byte + 1` to that of the second and so on, flushes, and dies.
fn write_and_die(log: &Path, images: &[&Path], byte: u8) {
    let mut paths = vec![log];
    paths.extend(images);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "identity::a_process_that_dies", "--nocapture"])
        .env(CHILD, std::env::join_paths(paths).unwrap())
        .env("WALVISOR_TEST_BYTE", byte.to_string())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{error}");
}

/// The body of such a process; run as a test it does nothing.
#[test]
fn a_process_that_dies() {
    let Some(paths) = std::env::var_os(CHILD) else {
        return;
    };
    let paths: Vec<PathBuf> = std::env::split_paths(&paths).collect();
    let byte = std::env::var("WALVISOR_TEST_BYTE").unwrap();
    let images: Vec<&Path> = paths[1..].iter().map(PathBuf::as_path).collect();
    let store = try_open(&paths[0], &images).unwrap();
    for (i, disk) in (0..).zip(store.disks()) {
        let mut port = disk.open_port().unwrap();
        write(&mut port, 0, byte.parse::<u8>().unwrap() + i, 1);
        flush(&mut port);
    }
    // The process exits without closing anything.
    std::process::exit(7);
}

#[test]
fn moved_disks_keep_their_bytes() {
    each_file_system(|site| {
        site.close_both();
        let data = site.top.join("data");
        std::fs::rename(site.vms(), &data).unwrap();
        let (log, one, two) = (data.join("log"), image(&data, 1), image(&data, 2));
        site.expect(&log, &[&one, &two], &[(1, 1), (2, 2)]);
        write_and_die(&log, &[&one, &two], 11);
        // Once more, with records in the log. One disk moves further than the other, and gets
        // another name there.
        std::fs::rename(&data, site.vms()).unwrap();
        let other = site.top.join("other.img");
        std::fs::rename(site.image(2), &other).unwrap();
        site.expect(&site.log(), &[&other, &site.image(1)], &[(12, 2), (11, 1)]);
    });
}

#[test]
fn images_that_change_their_names_are_still_the_same_disks() {
    for killed in [false, true] {
        each_file_system(|site| {
            if killed {
                site.kill_both()
            } else {
                site.close_both()
            }
            let (one, two, between) = (site.image(1), site.image(2), site.top.join("between"));
            std::fs::rename(&one, &between).unwrap();
            std::fs::rename(&two, &one).unwrap();
            std::fs::rename(&between, &two).unwrap();
            let first = if killed { [11, 12] } else { [1, 2] };
            let want = [(first[1], 2), (first[0], 1)];
            site.expect(&site.log(), &[&one, &two], &want);
            // And one after the other, as the disks are now.
            site.expect(&site.log(), &[&two], &want[1..]);
            site.expect(&site.log(), &[&one], &want[..1]);
        });
    }
}

#[test]
fn a_copy_without_its_mark_is_no_place_for_records() {
    each_file_system(|site| {
        site.kill_both();
        let (one, kept) = (site.image(1), site.top.join("kept"));
        std::fs::rename(&one, &kept).unwrap();
        // Copied without attributes, as `cp` does.
        std::fs::copy(&kept, &one).unwrap();
        let why = if site.attributes { "no mark" } else { "inode" };
        refused(&site.log(), &[&one, &site.image(2)], &BOTH_WAYS);
        refused(&site.log(), &[&one, &site.image(2)], &[why]);
        assert_eq!(
            inspect(&one, &site.log()).unwrap_err().kind(),
            ErrorKind::WrongLog
        );
        // Opening the other disk alone is refused too.
        refused(&site.log(), &[&site.image(2)], &UNNAMED);
        // The first remedy that the error names.
        std::fs::rename(&kept, &one).unwrap();
        site.expect(&site.log(), &[&one, &site.image(2)], &[(11, 1), (12, 2)]);
    });
}

#[test]
fn a_copy_with_its_mark_is_the_image_and_the_original_is_not_any_more() {
    with_attributes(|site| {
        site.kill_both();
        let (one, two, copy) = (site.image(1), site.image(2), site.top.join("copy.img"));
        copy_image(&one, &copy);
        // Both at once would be two disks, but the log knows one.
        refused(
            &site.log(),
            &[&one, &copy, &two],
            &["copy.img", "is open already", "disk import"],
        );
        refused(&site.log(), &[&copy, &one, &two], &["copy.img"]);
        site.expect(&site.log(), &[&copy, &two], &[(11, 1), (12, 2)]);
        refused(&site.log(), &[&one], &["a copy", "copy.img", "disk import"]);
    });
}

/// A closed disk can be restored from a backup.
#[test]
fn without_records_any_image_of_the_size_is_the_disk_at_its_path() {
    each_file_system(|site| {
        site.close_both();
        let (one, two) = (site.image(1), site.image(2));
        let (backup, plain) = (site.top.join("backup"), site.top.join("plain"));
        copy_image(&one, &backup);
        std::fs::copy(&one, &plain).unwrap();
        write_and_die(&site.log(), &[&one, &two], 21);
        site.expect(&site.log(), &[&one, &two], &[(21, 1), (22, 2)]);
        // Restored with its mark, without, and into the existing file.
        for restored in [&backup, &plain] {
            std::fs::remove_file(&one).unwrap();
            copy_image(restored, &one);
            site.expect(&site.log(), &[&one, &two], &[(1, 1), (22, 2)]);
        }
        std::fs::write(&one, vec![5; SIZE as usize]).unwrap();
        site.expect(&site.log(), &[&one, &two], &[(5, 5), (22, 2)]);
        // From then on the image is known as any other.
        write_and_die(&site.log(), &[&one], 31);
        std::fs::rename(&one, site.top.join("away")).unwrap();
        std::fs::copy(&plain, &one).unwrap();
        refused(&site.log(), &[&one, &two], &BOTH_WAYS);
        // An image of another size is refused.
        site.expect(&site.log(), &[&site.top.join("away")], &[(31, 5)]);
        std::fs::rename(site.top.join("away"), &one).unwrap();
        site.expect(&site.log(), &[&one], &[(31, 5)]);
        std::fs::write(&one, vec![5; SIZE as usize / 2]).unwrap();
        refused(&site.log(), &[&one], &["truncate"]);
    });
}

#[test]
fn an_older_image_is_refused_and_can_be_taken_all_the_same() {
    each_file_system(|site| {
        site.close_both();
        let (one, two, backup) = (site.image(1), site.image(2), site.top.join("backup"));
        copy_image(&one, &backup);
        write_and_die(&site.log(), &[&one, &two], 11);
        std::fs::rename(&backup, &one).unwrap();
        let why = if site.attributes { "older" } else { "inode" };
        refused(&site.log(), &[&one], &BOTH_WAYS);
        refused(&site.log(), &[&one], &[why]);
        let done = discard_log(&one, &site.log()).unwrap();
        assert_eq!((done.records, done.payload_bytes), (Some(1), Some(512)));
        assert_eq!((done.image, done.image_fits), (Some(one.clone()), true));
        // The other disk keeps its record; this one has the contents of the backup.
        let report = inspect(&two, &site.log()).unwrap().log.unwrap();
        assert_eq!(report.records, 1);
        site.expect(&site.log(), &[&one, &two], &[(1, 1), (12, 2)]);
    });
}

/// `cp backup disk.img` keeps the inode and its attributes.
#[test]
fn an_older_copy_written_over_the_image_is_noticed() {
    each_file_system(|site| {
        site.close_both();
        let (one, backup) = (site.image(1), site.top.join("backup"));
        std::fs::copy(&one, &backup).unwrap();
        // The write goes to the image, in the middle of the disk; its first and last block do not
        // change.
        let store = try_open(&site.log(), &[&one]).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 1000, 77, 1);
        drop(port);
        store.close().unwrap();
        write_and_die(&site.log(), &[&one], 11);
        let newest = std::fs::read(&one).unwrap();
        std::fs::write(&one, std::fs::read(&backup).unwrap()).unwrap();
        refused(&site.log(), &[&one], &BOTH_WAYS);
        refused(&site.log(), &[&one], &["another program wrote to it"]);
        std::fs::write(&one, &newest).unwrap();
        site.expect(&site.log(), &[&one], &[(11, 1)]);
    });
}

#[test]
fn an_older_log_is_refused_by_a_newer_image() {
    each_file_system(|site| {
        site.kill_both();
        let (one, two, older) = (site.image(1), site.image(2), site.top.join("older"));
        std::fs::create_dir(&older).unwrap();
        for entry in std::fs::read_dir(site.log()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), older.join(entry.file_name())).unwrap();
        }
        let store = try_open(&site.log(), &[&one, &two]).unwrap();
        for disk in store.disks() {
            write(&mut disk.open_port().unwrap(), 0, 99, 1);
        }
        store.close().unwrap();
        std::fs::remove_dir_all(site.log()).unwrap();
        std::fs::rename(&older, site.log()).unwrap();
        let why = if site.attributes {
            "newer than the log expects"
        } else {
            "another program wrote to it"
        };
        refused(&site.log(), &[&one, &two], &BOTH_WAYS);
        refused(&site.log(), &[&one, &two], &[why]);
        // After their records are given up, the images are used as they are.
        for image in [&one, &two] {
            assert_eq!(discard_log(image, &site.log()).unwrap().records, Some(1));
        }
        site.expect(&site.log(), &[&one, &two], &[(99, 1), (99, 2)]);
    });
}

#[test]
fn one_image_with_two_names_is_one_disk() {
    each_file_system(|site| {
        site.close_both();
        let (one, two) = (site.image(1), site.image(2));
        std::fs::remove_file(&two).unwrap();
        std::fs::hard_link(&one, &two).unwrap();
        let began = Instant::now();
        let error = try_open(&site.log(), &[&one, &two]).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Locked);
        assert!(
            error.to_string().contains("each disk needs its own image"),
            "{error}"
        );
        assert!(
            began.elapsed() < Duration::from_secs(2),
            "nobody is waited for"
        );
        site.expect(&site.log(), &[&two], &[(1, 1)]);
        site.expect(&site.log(), &[&one], &[(1, 1)]);
        // The same with records of the disk, opened by the second name.
        write_and_die(&site.log(), &[&one], 41);
        site.expect(&site.log(), &[&two], &[(41, 1)]);
    });
}

#[test]
fn the_image_of_another_disk_is_refused() {
    each_file_system(|site| {
        site.kill_both();
        let (one, two) = (site.image(1), site.image(2));
        std::fs::remove_file(&one).unwrap();
        copy_image(&two, &one);
        // Alone the file is the second disk's image, and the first disk's is missing.
        let parts: &[&str] = if site.attributes {
            &UNNAMED
        } else {
            &BOTH_WAYS
        };
        refused(&site.log(), &[&one], parts);
        refused(&site.log(), &[&one, &two], &["1/disk.img"]);
        // The second disk keeps its record when the first's are given up. The file at the first
        // disk's path is not touched.
        let before = mark(&one);
        let done = discard_log(&one, &site.log()).unwrap();
        assert_eq!((done.records, done.image_fits), (Some(1), !site.attributes));
        assert!(mark(&one) == before);
        std::fs::remove_file(&one).unwrap();
        site.expect(&site.log(), &[&two], &[(12, 2)]);
    });
}

#[test]
fn the_records_of_a_lost_image_can_be_given_up() {
    each_file_system(|site| {
        site.kill_both();
        let (one, two) = (site.image(1), site.image(2));
        std::fs::remove_file(&one).unwrap();
        refused(&site.log(), &[&two], &UNNAMED);
        refused(&site.log(), &[&two], &["1/disk.img"]);
        let done = discard_log(&one, &site.log()).unwrap();
        assert_eq!((done.records, done.image_fits), (Some(1), false));
        site.expect(&site.log(), &[&two], &[(12, 2)]);
        // The path is free for a new disk.
        let options = small(EngineKind::Auto);
        create_disk(&one, SIZE, &site.log(), &options).unwrap();
        site.expect(&site.log(), &[&one, &two], &[(0, 0), (12, 2)]);
        let unknown = site.top.join("unknown.img");
        let error = discard_log(&unknown, &site.log()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WrongLog);
    });
}

/// The disks of a directory that was copied whole are in the same places relative to their log.
#[test]
fn disks_copied_together_with_their_log_go_on_beside_the_originals() {
    let copy = |site: &TestDir, name: &str, marks: bool| {
        let to = site.top.join(name);
        for part in ["log", "1", "2"] {
            std::fs::create_dir_all(to.join(part)).unwrap();
            for entry in std::fs::read_dir(site.vms().join(part)).unwrap() {
                let entry = entry.unwrap();
                let to = to.join(part).join(entry.file_name());
                if marks {
                    copy_image(&entry.path(), &to)
                } else {
                    std::fs::copy(entry.path(), to).unwrap();
                }
            }
        }
        to
    };
    each_file_system(|site| {
        site.close_both();
        let plain = copy(site, "plain", false);
        let disks = [image(&plain, 1), image(&plain, 2)];
        site.expect(
            &plain.join("log"),
            &[&disks[0], &disks[1]],
            &[(1, 1), (2, 2)],
        );
    });
    with_attributes(|site| {
        site.kill_both();
        let [left, right] = ["left", "right"].map(|name| copy(site, name, true));
        for (dir, byte) in [(&left, 51), (&right, 61)] {
            write_and_die(&dir.join("log"), &[&image(dir, 1), &image(dir, 2)], byte);
        }
        // The two copies have diverged: the log of one refuses the images of the other.
        let between = site.top.join("between");
        std::fs::rename(image(&left, 1), &between).unwrap();
        std::fs::rename(image(&right, 1), image(&left, 1)).unwrap();
        std::fs::rename(&between, image(&right, 1)).unwrap();
        for dir in [&left, &right] {
            let parts = [
                "changed separately",
                "2 records",
                BOTH_WAYS[1],
                BOTH_WAYS[2],
            ];
            refused(&dir.join("log"), &[&image(dir, 1), &image(dir, 2)], &parts);
        }
        let own = |dir: &Path| [image(dir, 1), image(dir, 2)];
        let [one, two] = own(&site.vms());
        site.expect(&site.log(), &[&one, &two], &[(11, 1), (12, 2)]);
    });
}

/// Other programs may use a plain image; one whose newest bytes are in a log is refused.
#[test]
fn only_a_closed_image_is_used_without_its_log() {
    with_attributes(|site| {
        site.close_both();
        let (one, two) = (site.image(1), site.image(2));
        let text = mark(&one).unwrap();
        assert!(text.contains(" closed"), "{text}");
        drop(Image::open(&one, true).unwrap());
        let options = small(EngineKind::Auto);
        let imported = site.top.join("imported");
        import_disk(
            &imported,
            &one,
            &site.top.join("new.log"),
            &options,
            &mut |_, _| {},
        )
        .unwrap();
        assert_ne!(mark(&imported).unwrap()[..32], text[..32]);
        write_and_die(&site.log(), &[&one, &two], 11);
        let text = mark(&one).unwrap();
        assert!(text.contains(" open"), "{text}");
        for error in [
            Image::open(&one, true).unwrap_err(),
            import_disk(
                &site.top.join("again"),
                &one,
                &site.top.join("again.log"),
                &options,
                &mut |_, _| {},
            )
            .unwrap_err(),
            try_open(&site.top.join("none"), &[&one]).err().unwrap(),
        ] {
            assert_eq!(error.kind(), ErrorKind::WrongLog, "{error}");
        }
        // Its log is gone for good: the image is used as it is.
        std::fs::remove_dir_all(site.log()).unwrap();
        let done = discard_log(&one, &site.log()).unwrap();
        assert_eq!((done.records, done.image), (None, None));
        assert!(text.starts_with(&done.disk));
        assert_eq!(mark(&one), None);
        assert!(discard_log(&one, &site.log()).is_err());
        drop(Image::open(&one, true).unwrap());
    });
}

/// A mark from before this program's present format: only the UUID.
#[test]
fn the_mark_of_the_first_format_is_one_of_an_open_image() {
    with_attributes(|site| {
        let disk = site.top.join("disk.img");
        std::fs::write(&disk, vec![0; SIZE as usize]).unwrap();
        let set = |text: &str| {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&disk, "user.walvisor.disk", text.as_bytes(), flags).unwrap();
        };
        set("0123456789abcdef0123456789abcdef");
        let error = Image::open(&disk, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WrongLog);
        // A mark that can't be parsed is not taken for a missing mark.
        set("something else");
        let error = Image::open(&disk, true).unwrap_err();
        assert!(error.to_string().contains("user.walvisor.disk"), "{error}");
    });
}

/// A disk's generation rises whenever it is opened and when a checkpoint writes to its image; other
/// disks keep theirs.
#[test]
fn the_generation_rises_with_what_is_written() {
    with_attributes(|site| {
        site.close_both();
        let (one, two) = (site.image(1), site.image(2));
        let generation = |image: &Path| {
            let text = mark(image).unwrap();
            u64::from_str_radix(text.split(' ').nth(1).unwrap(), 16).unwrap()
        };
        let both = || (generation(&one), generation(&two));
        let closed = both();
        let store = try_open(&site.log(), &[&one, &two]).unwrap();
        let opened = both();
        assert!(opened.0 > closed.0 && opened.1 > closed.1);
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 8, 5, 8);
        flush(&mut port);
        assert_eq!(both(), opened, "a FLUSH has nothing to do with it");
        store.disks()[0].checkpoint().unwrap();
        assert_eq!(both(), (opened.0 + 1, opened.1));
        store.disks()[0].checkpoint().unwrap();
        assert_eq!(both(), (opened.0 + 1, opened.1), "nothing was written");
        drop(port);
        store.close().unwrap();
        assert_eq!(both(), (opened.0 + 1, opened.1));
    });
}

/// A crash at any point of an open or a checkpoint leaves an image that is accepted: with the old
/// or the new generation.
#[test]
fn both_generations_of_a_checkpoint_that_was_cut_are_accepted() {
    with_attributes(|_| {
        let place = TestDisk::new();
        let store = place.open();
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 0, 1, 8);
        flush(&mut port);
        let before = mark(&place.disk).unwrap();
        let cut = place.crash();
        store.disks()[0].checkpoint().unwrap();
        let after = mark(&place.disk).unwrap();
        drop(port);
        store.close().unwrap();
        // With a control file that was written before the checkpoint began, only one generation is
        // accepted.
        let set = |mark: &str| {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&cut.disk, "user.walvisor.disk", mark.as_bytes(), flags).unwrap();
        };
        set(&after);
        refused(&cut.log(), &[&cut.disk], &["newer"]);
        // With the control file as it is while the checkpoint runs, both are accepted.
        let control = cut.log().join("control");
        let mut bytes = std::fs::read(&control).unwrap();
        let next = u64::from_str_radix(after.split(' ').nth(1).unwrap(), 16).unwrap();
        for slot in bytes.chunks_mut(65536) {
            slot[96 + 40..96 + 48].copy_from_slice(&next.to_le_bytes());
            slot[12..16].fill(0);
            let crc = crc32c::crc32c(slot);
            slot[12..16].copy_from_slice(&crc.to_le_bytes());
        }
        std::fs::write(&control, &bytes).unwrap();
        for mark in [before, after] {
            set(&mark);
            let again = cut.crash();
            let store = again.open();
            assert_eq!(read(&mut store.disks()[0].open_port().unwrap(), 0, 8)[0], 1);
        }
    });
}

/// Bytes that a sample covers may be changed by the next checkpoint. A sample that a resize cuts is
/// dropped.
#[test]
fn a_resize_and_a_file_that_is_written_through_another_name_keep_the_samples_right() {
    with_attributes(|site| {
        site.close_both();
        let one = site.image(1);
        walvisor_storage::resize_disk(&one, SIZE / 2, &site.log(), true, &[]).unwrap();
        write_and_die(&site.log(), &[&one], 11);
        walvisor_storage::resize_disk(&one, 2 * SIZE, &site.log(), false, &[]).unwrap();
        site.expect(&site.log(), &[&one], &[(11, 1)]);
        write_and_die(&site.log(), &[&one], 21);
        let file = std::fs::File::options().write(true).open(&one).unwrap();
        file.write_all_at(&[9; 512], 0).unwrap();
        refused(&site.log(), &[&one], &["another program wrote to it"]);
    });
}
