//! Looking at disks that another process has open, on file systems and as users that can't write.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use walvisor_testkit::MemoryFs;
use walvisor_testkit::nbd::{READ, RawClient, WRITE};
use walvisor_tests::have;

use super::{Daemon, WALVISOR, create, noise, run_client, text, walvisor};

const LOOKS: [&str; 3] = [
    "disk info disk.img",
    "disk check disk.img",
    "log dump disk.img.wal",
];

#[test]
fn the_error_for_a_disk_in_use_names_its_process_and_the_command_to_ask_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    for control in ["", "--control ctl ", "--control=./ctl "] {
        let arguments = format!("{control}--disk path=disk.img,socket=s");
        let daemon = Daemon::start(dir, &arguments);
        for look in LOOKS {
            let output = walvisor(dir, look);
            let error = text(&output.stderr);
            assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1));
            let told = format!(
                "already open elsewhere, in process {} (walvisor); end that process first",
                daemon.child.id()
            );
            assert!(error.contains(&told), "{error}");
            // What the line says to type works.
            let command = error.trim_end().split_once("or ask it: walvisor ");
            assert_eq!(command.is_some(), !control.is_empty(), "{error}");
            if let Some((_, command)) = command {
                let stats = text(&walvisor(Path::new("/"), command).stdout);
                assert!(stats.contains("  disk disk.img: "), "{command}: {stats}");
            }
        }
        assert_eq!(daemon.stop(), "");
    }
}

/// Without the disk's log, a command is told which one that is; with it, who has it open.
#[test]
fn the_error_for_a_disk_in_use_names_its_log_and_its_process() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    succeeds(&walvisor(dir, "disk create disk.img --size 1M --log other"));
    let daemon = Daemon::start(dir, "--disk path=disk.img,log=other,socket=s");
    let told = text(&walvisor(dir, "disk info disk.img").stderr);
    assert!(told.contains("/other, not in disk.img.wal"), "{told}");
    let told = text(&walvisor(dir, "disk info disk.img --log other").stderr);
    let process = format!("in process {} (walvisor)", daemon.child.id());
    assert!(told.contains(&process), "{told}");
    assert_eq!(daemon.stop(), "");
}

/// Makes a disk whose newest bytes are in its log, because its daemon was killed.
fn killed(dir: &Path) {
    create(dir, "disk.img", "1M");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 4096, &noise(8192));
    client.flush(2);
    daemon.kill();
}

#[track_caller]
fn succeeds(output: &Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_read_only_file_system_can_be_looked_at() {
    let Some(place) = MemoryFs::tmpfs("size=512m") else {
        return;
    };
    let (dir, out) = (place.path(), tempfile::tempdir().unwrap());
    killed(dir);
    fs::write(dir.join("raw.img"), noise(1 << 20)).unwrap();
    let before = LOOKS.map(|look| succeeds(&walvisor(dir, look)));
    assert!(before[0].contains("unapplied  1 records"), "{}", before[0]);
    place.remount("ro");
    let table = |look| {
        let text = succeeds(&walvisor(dir, look));
        // The last column before the disks is the age.
        text.lines().count()
    };
    assert_eq!(
        LOOKS.map(table),
        before.each_ref().map(|text| text.lines().count())
    );
    let export = format!("disk export disk.img {}", out.path().join("out").display());
    succeeds(&walvisor(dir, &export));
    let exported = fs::read(out.path().join("out")).unwrap();
    assert!(exported[4096..12288] == noise(8192));
    let socket = out.path().join("s");
    for (disk, offset) in [
        ("path=raw.img,backend=raw,readonly=on", 0),
        ("path=disk.img,at=-0s", 4096),
        ("path=disk.img,at=-0s,scratch=on", 4096),
    ] {
        let daemon = Daemon::start(dir, &format!("--disk {disk},socket={}", socket.display()));
        let mut client = RawClient::extended(&socket);
        client.request(0, READ, 1, offset, 4096);
        assert!(client.reply().data[8..] == noise(4096), "{disk}");
        drop(client);
        assert_eq!(daemon.stop(), "");
    }
}

/// The bytes that the daemon, which was started with `readonly=on`, serves of the disk that
/// [`killed`] makes.
fn reads(daemon: Daemon, socket: &Path) {
    let mut client = RawClient::extended(socket);
    client.request(0, READ, 1, 0, 16384);
    let data = client.reply().data[8..].to_vec();
    assert!(data[..4096] == [0; 4096] && data[12288..] == [0; 4096]);
    assert!(data[4096..12288] == noise(8192), "the log is not merged");
    client.request(0, WRITE, 2, 0, 512);
    client.send(&[1; 512]);
    assert!(client.reply().kind >= 1 << 15, "it was written");
    client.flush(3);
    drop(client);
    assert_eq!(daemon.stop(), "");
}

/// A disk whose newest bytes are only in its log is read where nothing can be written, and is the
/// same afterwards.
#[test]
fn a_disk_with_a_log_is_served_from_a_read_only_file_system() {
    if !have("mkfs.ext4", "e2fsprogs") {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let image = out.path().join("fs");
    fs::File::create(&image)
        .unwrap()
        .set_len(512 << 20)
        .unwrap();
    let made = run_client(out.path(), "mkfs.ext4", &["-q", image.to_str().unwrap()]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    let Some(place) = MemoryFs::ext4(&image, "rw") else {
        return;
    };
    killed(place.path());
    fs::write(place.path().join("plain.img"), noise(1 << 20)).unwrap();
    drop(place);
    let before = fs::read(&image).unwrap();
    let Some(place) = MemoryFs::ext4(&image, "ro") else {
        return;
    };
    let socket = out.path().join("s");
    let disk = |name: &str, socket: &Path| {
        format!("--disk path={name},readonly=on,socket={}", socket.display())
    };
    let refused = walvisor(
        place.path(),
        &format!("serve nbd --disk path=disk.img,socket={}", socket.display()),
    );
    assert!(text(&refused.stderr).contains("Read-only file system"));
    // Readers live beside each other, and beside who only looks.
    let other = out.path().join("t");
    let second = Daemon::start(place.path(), &disk("disk.img", &other));
    let first = Daemon::start(place.path(), &disk("disk.img", &socket));
    for look in LOOKS {
        succeeds(&walvisor(place.path(), look));
    }
    let copy = out.path().join("copy");
    let export = format!("disk export disk.img {}", copy.display());
    succeeds(&walvisor(place.path(), &export));
    assert!(fs::read(copy).unwrap()[4096..12288] == noise(8192));
    reads(first, &socket);
    reads(second, &other);
    // An image without a log gets none.
    let daemon = Daemon::start(place.path(), &disk("plain.img", &socket));
    let mut client = RawClient::extended(&socket);
    client.request(0, READ, 1, 0, 4096);
    assert!(client.reply().data[8..] == noise(4096));
    drop(client);
    assert_eq!(daemon.stop(), "");
    drop(place);
    assert!(fs::read(&image).unwrap() == before, "something was written");
}

/// The same where it could be written: a disk that can only be read is left alone, and the next
/// writer recovers it.
#[test]
fn a_read_only_disk_is_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    killed(dir);
    let state = || {
        let mut files = vec![dir.join("disk.img")];
        let log = fs::read_dir(dir.join("disk.img.wal")).unwrap();
        files.extend(log.map(|entry| entry.unwrap().path()));
        files.sort();
        let read = |path: &PathBuf| (path.clone(), fs::read(path).unwrap());
        files.iter().map(read).collect::<Vec<_>>()
    };
    let before = state();
    let start = |more: &str| Daemon::start(dir, &format!("--disk path=disk.img,socket=s{more}"));
    let daemon = start(",readonly=on --control ctl");
    for (request, part) in [
        ("checkpoint", "open for reading only"),
        ("export -o out", "open for reading only"),
        ("resize --size 2M", "open for reading only"),
    ] {
        let output = walvisor(dir, &format!("ctl ctl {request}"));
        assert!(
            text(&output.stderr).contains(part),
            "{}",
            text(&output.stderr)
        );
    }
    let writer = walvisor(dir, "serve nbd --disk path=disk.img,socket=w");
    assert!(text(&writer.stderr).contains("already open elsewhere"));
    reads(daemon, &dir.join("s"));
    assert!(state() == before, "something was written");
    let daemon = start("");
    let mut client = RawClient::extended(&dir.join("s"));
    client.request(0, READ, 1, 4096, 8192);
    assert!(client.reply().data[8..] == noise(8192));
    drop(client);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_user_who_may_only_read_can_look() {
    if !have("setpriv", "util-linux") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    killed(dir);
    // The program may lie where only its owner can reach it.
    let program = dir.join("walvisor");
    fs::copy(WALVISOR, &program).unwrap();
    let nobody = |look: &str| {
        let user = "--reuid=65534 --regid=65534 --clear-groups --no-new-privs";
        let words = user.split(' ').chain([program.to_str().unwrap()]);
        run_client(
            dir,
            "setpriv",
            &words.chain(look.split(' ')).collect::<Vec<_>>(),
        )
    };
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let refused = nobody(LOOKS[0]);
    if text(&refused.stderr).starts_with("setpriv: ") {
        return println!("skipped: {}", text(&refused.stderr).trim());
    }
    assert!(text(&refused.stderr).contains("Permission denied"));
    let log = dir.join("disk.img.wal");
    for entry in fs::read_dir(&log).unwrap() {
        let path = entry.unwrap().path();
        fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    }
    fs::set_permissions(&log, Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(dir.join("disk.img"), Permissions::from_mode(0o644)).unwrap();
    for look in LOOKS {
        succeeds(&nobody(look));
    }
    let out = tempfile::tempdir().unwrap();
    fs::set_permissions(out.path(), Permissions::from_mode(0o777)).unwrap();
    succeeds(&nobody(&format!(
        "disk export disk.img {}",
        out.path().join("copy").display()
    )));
    let socket = out.path().join("s");
    let mut command = Command::new("setpriv");
    command
        .args("--reuid=65534 --regid=65534 --clear-groups --no-new-privs".split(' '))
        .arg(&program)
        .args(["serve", "nbd", "--disk"])
        .arg(format!(
            "path=disk.img,readonly=on,socket={}",
            socket.display()
        ));
    reads(Daemon::start_as(dir, &mut command, 1), &socket);
}
