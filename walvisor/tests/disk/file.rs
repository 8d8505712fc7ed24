//! `walvisor disk restore --file`: one file of a guest, out of a point of its disk.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use walvisor_storage::{
    BlockingDisk, DiskOptions, Retention, Store, StoreOptions, create_disk, default_log_dir,
};
use walvisor_testkit::process::{Process, client, program, run as run_program, text};
use walvisor_testkit::{unmount, wait_until};
use walvisor_tests::{have, have_all, run_sessions};

use crate::{MIB, done, json, names, refused};

/// What a guest would write to a disk: a file system that this machine has mounted from an image.
struct Guest {
    dir: tempfile::TempDir,
    /// The disk's contents at its last snapshot.
    before: Vec<u8>,
}

impl Guest {
    /// Mounts a new file system of `size` bytes, after `first` bytes of the image; `None`: this
    /// machine can't.
    fn new(file_system: &str, first: u64, size: u64) -> Option<Self> {
        let package = if file_system == "xfs" {
            "xfsprogs"
        } else {
            "e2fsprogs"
        };
        if !have(&format!("mkfs.{file_system}"), package) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let (image, place) = (dir.path().join("guest.raw"), dir.path().join("guest"));
        let len = first + size + first;
        let file = File::create(&image).unwrap();
        file.set_len(len).unwrap();
        fs::create_dir(&place).unwrap();
        let guest = Self {
            before: vec![0; len as usize],
            dir,
        };
        let [image, place] = [image, place].map(|path| path.display().to_string());
        let made = guest.dir().join("made");
        File::create(&made).unwrap().set_len(size).unwrap();
        let made = made.display().to_string();
        let range = format!("loop,offset={first},sizelimit={size}");
        let options = match file_system {
            // Nothing but an fsync writes the journal.
            "ext4" => format!("{range},commit=600"),
            _ => range,
        };
        let ready = run_program(&format!("mkfs.{file_system}"), &["-q", &made]).and_then(|_| {
            let (from, to) = (
                fs::read(&made).unwrap(),
                File::options().write(true).open(&image),
            );
            write_data(&to.unwrap(), &from, first);
            run_program(
                "mount",
                &["-t", file_system, "-o", &options, &image, &place],
            )
        });
        fs::remove_file(&made).unwrap();
        if let Err(why) = ready {
            println!("skipped: no {file_system}: {why}");
            return None;
        }
        create_disk(&guest.disk(), len, &guest.log(), &Self::options()).unwrap();
        Some(guest)
    }

    fn options() -> StoreOptions {
        StoreOptions {
            retain: Some(Retention::All),
            ..StoreOptions::default()
        }
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn disk(&self) -> PathBuf {
        self.dir().join("disk.img")
    }

    fn log(&self) -> PathBuf {
        default_log_dir(&self.disk())
    }

    /// A path as the guest has it.
    fn path(&self, path: &str) -> PathBuf {
        self.dir().join("guest").join(path)
    }

    /// Writes a file, which the journal has when this returns.
    fn write(&self, path: &str, contents: &str) {
        fs::write(self.path(path), contents).unwrap();
        File::open(self.path(path)).unwrap().sync_all().unwrap();
    }

    /// Has the disk hold what the guest has written, as if the guest was killed now, and names
    /// that.
    fn snapshot(&mut self, name: &str) {
        let now = fs::read(self.dir().join("guest.raw")).unwrap();
        let disks = [DiskOptions::new(self.disk())];
        let store = Store::open(&self.log(), &disks, &Self::options()).unwrap();
        let disk = BlockingDisk::new(store.disks()[0].clone());
        for at in (0..now.len()).step_by(64 << 10) {
            let piece = at..now.len().min(at + (64 << 10));
            if now[piece.clone()] != self.before[piece.clone()] {
                disk.write(&now[piece], at as u64).unwrap();
            }
        }
        disk.flush().unwrap();
        disk.backend().snapshot(name.parse().unwrap()).unwrap();
        drop(disk);
        store.close().unwrap();
        self.before = now;
    }

    /// Restores a file, and returns what it has.
    #[track_caller]
    fn restored(&self, words: &str) -> String {
        let _ = fs::remove_file(self.dir().join("out"));
        done(self.dir(), &format!("disk restore disk.img -o out {words}"));
        fs::read_to_string(self.dir().join("out")).unwrap()
    }

    #[track_caller]
    fn refused(&self, words: &str, parts: &[&str]) {
        let _ = fs::remove_file(self.dir().join("out"));
        refused(
            self.dir(),
            &format!("disk restore disk.img -o out {words}"),
            1,
            parts,
        );
        assert!(!self.dir().join("out").exists());
    }

    /// The bytes of the image and of the log.
    fn files(&self) -> Vec<(String, Vec<u8>)> {
        let log = names(&self.log())
            .into_iter()
            .map(|name| self.log().join(name));
        let all = log.chain([self.disk()]);
        all.map(|path| (path.display().to_string(), fs::read(path).unwrap()))
            .collect()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        unmount(&self.path(""));
    }
}

fn write_data(to: &File, from: &[u8], offset: u64) {
    for (at, piece) in (offset..).step_by(4096).zip(from.chunks(4096)) {
        if piece.iter().any(|&byte| byte != 0) {
            to.write_all_at(piece, at).unwrap();
        }
    }
}

/// The loop devices that have a file in `dir`.
fn loop_devices(dir: &Path) -> Vec<String> {
    let devices = fs::read_dir("/sys/block").unwrap();
    let files = devices.map(|device| device.unwrap().path().join("loop/backing_file"));
    let files = files.filter_map(|file| fs::read_to_string(file).ok());
    let dir = dir.display().to_string();
    files.filter(|file| file.starts_with(&dir)).collect()
}

#[test]
fn a_file_comes_back_as_of_each_point_though_only_the_journal_has_it() {
    for (file_system, size) in [("ext4", 64 * MIB), ("xfs", 320 * MIB)] {
        let Some(mut guest) = Guest::new(file_system, 0, size) else {
            continue;
        };
        guest.write("notes", "one");
        guest.snapshot("first");
        guest.write("notes", "the second");
        fs::create_dir_all(guest.path("var/lib")).unwrap();
        guest.write("var/lib/rows", "row");
        guest.snapshot("second");
        fs::remove_file(guest.path("notes")).unwrap();
        guest.write("var/lib/rows", "");
        guest.snapshot("third");

        let before = guest.files();
        let snapshots = json(&done(guest.dir(), "disk snapshots disk.img --json"));
        let lsn = |index: usize| snapshots[index]["lsn"].as_u64().unwrap();
        let us = snapshots[1]["unix_us"].as_i64().unwrap();
        let time = jiff::Timestamp::from_microsecond(us).unwrap();
        let no_file = "there; what is there is \"/\"";
        for (at, path, expected) in [
            ("snapshot:first".to_owned(), "/notes", Ok("one")),
            ("snapshot:first".to_owned(), "var/lib/rows", Err(no_file)),
            (format!("lsn:{}", lsn(1)), "notes", Ok("the second")),
            (format!("time:{time}"), "var/lib/../lib/rows", Ok("row")),
            ("newest".to_owned(), "/notes", Err(no_file)),
            ("newest".to_owned(), "/var/lib/rows", Ok("")),
        ] {
            for no_mount in ["", " --no-mount"] {
                if !no_mount.is_empty() && (file_system == "xfs" || path.contains("..")) {
                    continue;
                }
                let words = format!("--at {at} --file {path}{no_mount}");
                match expected {
                    Ok(expected) => assert_eq!(guest.restored(&words), expected, "{words}"),
                    Err(why) => guest.refused(&words, &[why]),
                }
            }
        }
        if file_system == "xfs" {
            guest.refused("--at newest --file /x --no-mount", &["only ext4"]);
        }
        assert!(
            guest.files() == before,
            "the image and the log are only read"
        );
        // Nothing is copied but the file, and what the journal has.
        for no_mount in ["", " --no-mount"] {
            if no_mount.is_empty() || file_system == "ext4" {
                let words = format!("--at snapshot:second --file notes{no_mount}");
                let _ = fs::remove_file(guest.dir().join("out"));
                let restored = format!("disk restore disk.img -o out {words}");
                let walvisor = program().display().to_string();
                let mut limited = vec!["--fsize=8388608", &walvisor];
                limited.extend(restored.split(' '));
                client(guest.dir(), "prlimit", &limited);
                let out = fs::read_to_string(guest.dir().join("out")).unwrap();
                assert_eq!(out, "the second");
            }
        }
    }
}

#[test]
fn links_stay_in_the_guest_and_only_regular_files_come_out() {
    let Some(mut guest) = Guest::new("ext4", 0, 64 * MIB) else {
        return;
    };
    let link = |target: &str, path: &str| std::os::unix::fs::symlink(target, guest.path(path));
    link("/passwd", "absolute").unwrap();
    link("../../../../../passwd", "relative").unwrap();
    link("/etc/passwd", "host").unwrap();
    link("circle", "circle").unwrap();
    let [pipe, null] = ["pipe", "null"].map(|name| guest.path(name).display().to_string());
    client(guest.dir(), "mkfifo", &[&pipe]);
    client(guest.dir(), "mknod", &[&null, "c", "1", "3"]);
    guest.write("passwd", "the guest's");
    let mode =
        |path: &str, mode| fs::set_permissions(guest.path(path), PermissionsExt::from_mode(mode));
    mode("passwd", 0o6700).unwrap();
    guest.write("escape\u{1b}[2J", "x");
    let sparse = File::create(guest.path("sparse")).unwrap();
    sparse.set_len(40 * MIB).unwrap();
    sparse.write_all_at(b"in the middle", 20 * MIB).unwrap();
    sparse.sync_all().unwrap();
    guest.snapshot("now");
    let dir = guest.dir();
    for path in ["passwd", "absolute", "relative"] {
        assert_eq!(
            guest.restored(&format!("--at newest --file /{path}")),
            "the guest's"
        );
    }
    // No bit that gives rights.
    assert_eq!(dir.join("out").metadata().unwrap().mode() & 0o7777, 0o700);
    run_sessions("files", dir, []);
    guest.refused("--at newest --file none", &["\\u{1b}[2J"]);
    for no_mount in ["", " --no-mount"] {
        let words = format!("--at newest --file sparse{no_mount} --json");
        let _ = fs::remove_file(dir.join("out"));
        let told = json(&done(dir, &format!("disk restore disk.img -o out {words}")));
        assert_eq!(told["size_bytes"], 40 * MIB);
        assert_eq!((&told["mode"], &told["uid"]), (&"0644".into(), &0.into()));
        let out = File::open(dir.join("out")).unwrap();
        let mut middle = [0; 13];
        out.read_exact_at(&mut middle, 20 * MIB).unwrap();
        assert_eq!(&middle, b"in the middle");
        let allocated = out.metadata().unwrap().blocks() * 512;
        assert!(!no_mount.is_empty() || allocated < MIB, "{allocated}");
    }
}

/// Which tables are read, and which entries, `guest_file::volume` shows.
#[test]
fn the_partition_is_found_or_named() {
    if !have_all(&[("sfdisk", "fdisk"), ("mkfs.xfs", "xfsprogs")]) {
        return;
    }
    let Some(mut guest) = Guest::new("ext4", MIB, 64 * MIB) else {
        return;
    };
    let image = guest.dir().join("guest.raw").display().to_string();
    let table = format!(
        "printf 'label: gpt\\nstart=2048,size=131072\\n' | sfdisk -q --no-reread --force {image}"
    );
    client(guest.dir(), "sh", &["-c", &table]);
    guest.write("notes", "one");
    guest.snapshot("now");
    for words in ["", "--partition 1", "--no-mount"] {
        let words = format!("--at newest --file notes {words}");
        assert_eq!(guest.restored(&words), "one");
    }
    let why = "no ext4 or xfs in partition 2: the disk has these partitions: 1 (ext4, 64 MiB)";
    guest.refused("--at newest --file notes --partition 2", &[why]);
}

#[test]
fn a_damaged_file_system_is_refused_and_leaves_nothing() {
    let Some(mut guest) = Guest::new("ext4", 0, 64 * MIB) else {
        return;
    };
    guest.write("notes", "one");
    guest.snapshot("good");
    // The superblock has its magic, and a number of blocks that the image lacks.
    let raw = File::options()
        .write(true)
        .open(guest.dir().join("guest.raw"))
        .unwrap();
    raw.write_all_at(&[0xff; 4], 1024 + 4).unwrap();
    guest.snapshot("bad");
    let words = "--at newest --file notes";
    guest.refused(
        words,
        &[
            "the kernel can't mount its ext4",
            "without --file makes an image",
        ],
    );
    guest.refused(
        &format!("{words} --no-mount"),
        &["debugfs can't read its ext4", "corrupt"],
    );
    assert_eq!(guest.restored("--at snapshot:good --file notes"), "one");
    raw.write_all_at(&[0; 4096], 0).unwrap();
    guest.snapshot("none");
    guest.refused(words, &["no ext4 or xfs: the disk has neither"]);
}

/// Whoever is not root needs no mount for ext4.
#[test]
fn a_user_without_rights_reads_ext4_with_debugfs() {
    let Some(mut guest) = Guest::new("ext4", 0, 64 * MIB) else {
        return;
    };
    guest.write("notes \"quoted\"", "one");
    let notes = guest.path("notes \"quoted\"");
    fs::set_permissions(&notes, PermissionsExt::from_mode(0o444)).unwrap();
    File::open(notes).unwrap().sync_all().unwrap();
    guest.snapshot("now");
    let dir = guest.dir();
    fs::set_permissions(dir, PermissionsExt::from_mode(0o755)).unwrap();
    let theirs = dir.join("theirs");
    fs::create_dir(&theirs).unwrap();
    let theirs = theirs.display().to_string();
    client(dir, "cp", &["-a", "disk.img", "disk.img.wal", &theirs]);
    client(dir, "chown", &["-R", "65534:65534", &theirs]);
    let walvisor = program().display().to_string();
    let mut command = vec![
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        &walvisor,
    ];
    command.extend("disk restore disk.img --at newest -o out --file".split(' '));
    command.push("notes \"quoted\"");
    let theirs = Path::new(&theirs);
    client(theirs, "setpriv", &command);
    assert_eq!(fs::read_to_string(theirs.join("out")).unwrap(), "one");
    // Where a user may open /dev/fuse, as on a usual Debian, nothing is copied.
    fs::remove_file(theirs.join("out")).unwrap();
    let script = "mknod fuse c 10 229 && chmod 666 fuse && mount --bind fuse /dev/fuse && exec \
                  setpriv \"$@\"";
    let mut inside = vec!["-m", "sh", "-euc", script, "sh"];
    command.splice(3..3, ["prlimit", "--fsize=8388608"]);
    inside.extend(command);
    client(theirs, "unshare", &inside);
    assert_eq!(fs::read_to_string(theirs.join("out")).unwrap(), "one");
    let made = theirs.join("out").metadata().unwrap();
    assert_eq!((made.uid(), made.mode() & 0o7777), (65534, 0o444));
}

/// Killed at any moment, it leaves neither a mount nor a loop device nor a file, and at the output
/// nothing or the file.
#[test]
fn a_kill_leaves_nothing_behind() {
    let Some(mut guest) = Guest::new("ext4", 0, 256 * MIB) else {
        return;
    };
    let large = "0123456789abcdef".repeat(4 << 20);
    guest.write("large", &large);
    guest.snapshot("now");
    let dir = guest.dir();
    let temporary = dir.join("temporary");
    fs::create_dir(&temporary).unwrap();
    let out = dir.join("out");
    let signals = [Signal::TERM, Signal::INT, Signal::KILL];
    for (round, signal) in (0..).zip(signals.repeat(2)) {
        let mut command = Command::new(program());
        command
            .args("disk restore disk.img --at newest --file large -o out".split(' '))
            .env("TMPDIR", &temporary)
            .current_dir(dir)
            .stdout(Stdio::null());
        let mut process = Process::spawn(&mut command);
        // Any moment will do, so a machine of any speed.
        std::thread::sleep(Duration::from_millis(60 * round));
        process.signal(signal);
        process.wait().unwrap();
        match fs::read(&out) {
            Ok(whole) => {
                assert!(text(&whole) == large);
                fs::remove_file(&out).unwrap();
            }
            Err(_) => assert!(!names(dir).iter().any(|name| name.contains("out"))),
        }
        assert!(names(&temporary).is_empty());
        wait_until("the loop devices are free", || {
            loop_devices(&temporary).is_empty()
        });
    }
    assert_eq!(
        guest.restored("--at newest --file large").len(),
        large.len()
    );
}
