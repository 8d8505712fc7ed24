//! Looking at disks that another process has open, on file systems and as users that can't write.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use walvisor_testkit::MemoryFs;
use walvisor_testkit::nbd::{RawClient, WRITE};
use walvisor_tests::have;

use super::{
    Daemon, WALVISOR, client, create, ctl_refused, disk_files, noise, read, refused, run_client,
    succeed, test_dir, text,
};

const LOOKS: [&str; 3] = [
    "disk info disk.img",
    "disk check disk.img",
    "log dump disk.img.wal",
];

/// And the command to ask that process, if it has a control socket.
#[test]
fn the_error_for_a_disk_in_use_names_its_process() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    create(dir, "other.img", "1M --log other");
    let other = "--disk path=other.img,log=other,socket=t";
    // Each look waits for seconds before it gives up.
    let controls = ["", "--control ctl ", "--control=./ctl "];
    for (control, look) in controls.into_iter().zip(LOOKS) {
        let arguments = format!("{control}--disk path=disk.img,socket=s {other}");
        let daemon = Daemon::start(dir, &arguments);
        let told = format!("in process {} (walvisor)", daemon.child.id());
        let parts = [
            "already open elsewhere, ",
            &told,
            "; end that process first",
        ];
        let error = refused(dir, &format!("{look} --no-owner"), 1, &parts);
        // What the line says to type works.
        let command = error.trim_end().split_once("or ask it: walvisor ");
        assert_eq!(command.is_some(), !control.is_empty(), "{error}");
        if let Some((_, command)) = command {
            let stats = succeed(Path::new("/"), command);
            assert!(stats.contains("  disk disk.img: "), "{command}: {stats}");
        } else {
            // The image says which log it is on.
            refused(dir, "disk info other.img", 1, &["/other/control", &told]);
        }
        assert_eq!(daemon.stop(), "");
    }
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

/// The bytes that the daemon, which was started with `readonly=on`, serves of the disk that
/// [`killed`] makes.
fn reads(daemon: Daemon, socket: &Path) {
    let mut client = RawClient::extended(socket);
    let data = read(&mut client, 0, 16384);
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
    let out = out.path();
    let image = out.join("fs");
    fs::File::create(&image)
        .unwrap()
        .set_len(512 << 20)
        .unwrap();
    client(out, "mkfs.ext4", &["-q", "fs"]);
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
    let dir = place.path();
    let [s, t] = ["s", "t"].map(|name| out.join(name));
    let disk =
        |keys: &str, socket: &Path| format!("--disk path={keys},socket={}", socket.display());
    let writer = format!("serve nbd {}", disk("disk.img", &s));
    refused(dir, &writer, 1, &["Read-only file system"]);
    // Readers live beside each other, and beside who only looks.
    let second = Daemon::start(dir, &disk("disk.img,readonly=on", &t));
    let first = Daemon::start(dir, &disk("disk.img,readonly=on", &s));
    for look in LOOKS {
        succeed(dir, look);
    }
    let copy = out.join("copy");
    succeed(dir, &format!("disk export disk.img {}", copy.display()));
    assert!(fs::read(copy).unwrap()[4096..12288] == noise(8192));
    reads(first, &s);
    reads(second, &t);
    for (keys, offset) in [
        // An image without a log gets none.
        ("plain.img,readonly=on", 0),
        ("plain.img,backend=raw,readonly=on", 0),
        ("disk.img,at=-0s", 4096),
        ("disk.img,at=-0s,scratch=on", 4096),
    ] {
        let daemon = Daemon::start(dir, &disk(keys, &s));
        let found = read(&mut RawClient::extended(&s), offset, 4096);
        assert!(found == noise(4096), "{keys}");
        assert_eq!(daemon.stop(), "");
    }
    drop(place);
    assert!(fs::read(&image).unwrap() == before, "something was written");
}

/// The same where it could be written: a disk that can only be read is left alone, and the next
/// writer recovers it.
#[test]
fn a_read_only_disk_is_not_changed() {
    let dir = &test_dir();
    killed(dir);
    let before = disk_files(dir);
    let start = |more: &str| Daemon::start(dir, &format!("--disk path=disk.img,socket=s{more}"));
    let daemon = start(",readonly=on --control ctl");
    for request in ["checkpoint", "export -o out", "resize --size 2M"] {
        ctl_refused(dir, request, &["open for reading only"]);
    }
    let writer = "serve nbd --disk path=disk.img,socket=w";
    refused(dir, writer, 1, &["already open elsewhere"]);
    reads(daemon, &dir.join("s"));
    assert!(disk_files(dir) == before, "something was written");
    let daemon = start("");
    let found = read(&mut RawClient::extended(&dir.join("s")), 4096, 8192);
    assert!(found == noise(8192));
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_user_who_may_only_read_can_look() {
    const USER: &str = "--reuid=65534 --regid=65534 --clear-groups --no-new-privs";
    if !have("setpriv", "util-linux") {
        return;
    }
    let dir = &test_dir();
    killed(dir);
    // The program may lie where only its owner can reach it.
    let program = dir.join("walvisor");
    fs::copy(WALVISOR, &program).unwrap();
    let nobody = |look: &str| -> Output {
        let words = USER.split(' ').chain([program.to_str().unwrap()]);
        run_client(
            dir,
            "setpriv",
            &words.chain(look.split(' ')).collect::<Vec<_>>(),
        )
    };
    let allow =
        |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    allow(dir, 0o755);
    let refused = text(&nobody(LOOKS[0]).stderr);
    if refused.starts_with("setpriv: ") {
        return println!("skipped: {}", refused.trim());
    }
    assert!(refused.contains("Permission denied"), "{refused}");
    let log = dir.join("disk.img.wal");
    for entry in fs::read_dir(&log).unwrap() {
        allow(&entry.unwrap().path(), 0o644);
    }
    allow(&log, 0o755);
    allow(&dir.join("disk.img"), 0o644);
    let out = tempfile::tempdir().unwrap();
    allow(out.path(), 0o777);
    let export = format!("disk export disk.img {}", out.path().join("copy").display());
    for look in LOOKS.into_iter().chain([&*export]) {
        let output = nobody(look);
        assert!(output.status.success(), "{look}: {}", text(&output.stderr));
    }
    let socket = out.path().join("s");
    let disk = format!("path=disk.img,readonly=on,socket={}", socket.display());
    let mut command = Command::new("setpriv");
    command
        .args(USER.split(' '))
        .arg(&program)
        .args(["serve", "nbd", "--disk", &disk]);
    reads(Daemon::start_as(dir, &mut command, 1), &socket);
}
