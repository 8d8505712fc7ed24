//! SIGHUP: a pool's file is carried out as a whole, or not at all.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use serde_json::{Value, json};
use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::{Process, wait_until};

use super::slow_holes::{end, mount, read_from_image};
use super::{
    Daemon, MIB, assert_says, create, ctl, disk_names, errors, refused, serve_command,
    serve_telling, succeed, test_dir,
};

/// The beginning of each file here.
const DEFAULTS: &str = "[defaults]\ndoor = 'nbd'\nlog = 'log'\nsocket = 'n'\n";
const SERVE: &str = "--config pool.toml --control ctl --disk-dir .";

/// A table for each disk, which the keys describe.
fn pool(disks: &[&str]) -> String {
    let tables = disks.iter().map(|keys| format!("[[disk]]\n{keys}\n"));
    DEFAULTS.to_owned() + &tables.collect::<String>()
}

fn write(dir: &Path, disks: &[&str]) {
    fs::write(dir.join("pool.toml"), pool(disks)).unwrap();
}

/// Makes these disks on one log, and serves those of the pool, which keys describe.
#[track_caller]
fn serve_pool(dir: &Path, made: &[&str], served: &[&str]) -> Daemon {
    for disk in made {
        create(dir, disk, "1M --log log");
    }
    write(dir, served);
    serve_telling(dir, SERVE, served.len())
}

/// Has the daemon read its file again, and waits until it has said `part`.
#[track_caller]
fn reload_says(daemon: &Daemon, dir: &Path, part: &str) {
    daemon.signal(Signal::HUP);
    wait_until(part, || errors(dir).contains(part));
}

/// Has the daemon carry out a file with these disks, and waits until it serves them.
#[track_caller]
fn reload(daemon: &Daemon, dir: &Path, disks: &[&str], names: &[&str]) {
    write(dir, disks);
    daemon.signal(Signal::HUP);
    wait_until("the disks", || disk_names(dir) == names);
}

#[test]
fn a_file_that_is_wrong_anywhere_changes_nothing() {
    let dir = &test_dir();
    symlink("c", dir.join("same")).unwrap();
    let disks = ["path = 'a'", "path = 'b'"];
    let daemon = serve_pool(dir, &["a", "b", "c", "d"], &disks);
    let checked = succeed(dir, "config check pool.toml --json");
    let checked: Value = serde_json::from_str(&checked).unwrap();
    assert_eq!(checked, json!({ "file": "pool.toml", "disks": 2 }));
    refused(
        dir,
        "config check none.toml",
        1,
        &["none.toml: No such file"],
    );
    let [mut kept, mut client] =
        ["a", "b"].map(|disk| RawClient::extended_to(&dir.join("n"), disk));
    for (disks, part) in [
        // What the check of the file refuses.
        (
            [
                "path = 'c'\nclose-seconds = 1",
                "path = 'd'\nclose-seconds = 2",
            ],
            "disagree about close-seconds",
        ),
        (
            [
                "path = 'c'\nserial = 'x'",
                "path = 'd'\nserial = 'x'\ndoor = 'vhost-user'\nsocket = 'v'",
            ],
            "disk 'd': another disk, 'c', is called 'x' too",
        ),
        (
            ["path = 'c'", "path = 'same'"],
            "disk 'same': another disk, 'c', has the same image",
        ),
        (
            ["path = 'c'", "path = 'd'\ncashe = 1"],
            "unknown key 'cashe'",
        ),
    ] {
        write(dir, &["path = 'a'", disks[0], disks[1]]);
        refused(dir, "config check pool.toml", 1, &["pool.toml: ", part]);
        refused(dir, "serve --config pool.toml", 1, &["pool.toml: ", part]);
        reload_says(&daemon, dir, part);
        assert_eq!(disk_names(dir), ["a", "b"], "{part}");
    }
    let outside = test_dir();
    create(&outside, "e", "1M");
    let there = outside.join("e");
    let outside = format!("path = '{}'\nlog = '{0}.wal'", there.display());
    for (disks, part) in [
        // What this daemon can't do, after a disk that it could add.
        (
            [
                "path = 'c'",
                "path = 'd'\ndoor = 'vhost-user'\nsocket = 'v'",
            ],
            "started with no disk with door=vhost-user",
        ),
        (
            ["path = 'c'", "path = 'd'\nsocket = 'other'"],
            "only where this daemon listens already",
        ),
        (["path = 'c'", "path = 'missing'"], "missing: "),
        (["path = 'c'", &outside], "is not beneath a --disk-dir"),
    ] {
        write(dir, &["path = 'a'", disks[0], disks[1]]);
        reload_says(&daemon, dir, part);
        assert_eq!(disk_names(dir), ["a", "b"], "{part}");
    }
    // A pipe that nobody writes to would not end, nor would a request to stop be heard meanwhile.
    let pool = dir.join("pool.toml");
    fs::remove_file(&pool).unwrap();
    mknodat(CWD, &pool, FileType::Fifo, Mode::RUSR, 0).unwrap();
    reload_says(&daemon, dir, "not a regular file");
    fs::remove_file(&pool).unwrap();
    let told = errors(dir);
    assert_eq!(told.lines().count(), 9, "{told}");
    for line in told.lines() {
        assert!(line.contains("pool.toml: "), "{line}");
        assert!(line.ends_with("the disks stay as they are"), "{line}");
    }
    client.write(1, 0, &[7; 512]);
    kept.write(1, 0, &[5; 512]);
    // Nothing of the refused files is in the way of one that is right. The client of a disk that
    // stays notices nothing.
    let disks = ["path = 'a'", "path = 'c'", "path = 'd'"];
    reload(&daemon, dir, &disks, &["a", "c", "d"]);
    assert!(client.is_closed());
    assert_eq!(errors(dir), told);
    kept.flush(2);
    drop(kept);
    RawClient::extended_to(&dir.join("n"), "c").write(2, 0, &[6; 512]);
    daemon.stop();
    for (disk, byte) in [("a", 5), ("b", 7), ("c", 6)] {
        let image = fs::read(dir.join(disk)).unwrap();
        assert_eq!(image[..512], [byte; 512], "{disk}");
    }
}

/// One that SIGHUP has removed is named as `ctl remove-disk` names it; one that may not go stays,
/// with all else.
#[test]
fn a_disk_that_goes_is_named() {
    let dir = &test_dir();
    for disk in ["a", "b", "c"] {
        create(dir, disk, "1M --log log");
    }
    let scsi =
        |disk: &str| format!("path = '{disk}'\ndoor = 'vhost-user'\ndevice = 'scsi'\nsocket = 'v'");
    write(dir, &["path = 'a'", &scsi("b"), &scsi("c")]);
    let [said, errors] = ["said", "errors"].map(|name| File::create(dir.join(name)).unwrap());
    let mut command = serve_command(SERVE);
    command.current_dir(dir).stdout(said).stderr(errors);
    let daemon = Process::spawn(&mut command);
    let says = |name: &str, part: &str| {
        wait_until(part, || {
            fs::read_to_string(dir.join(name)).unwrap().contains(part)
        });
    };
    says("said", "serving c: ");
    write(dir, &[&scsi("b")]);
    daemon.signal(Signal::HUP);
    says("errors", "disk 'c': its SCSI target");
    assert_eq!(disk_names(dir), ["a", "b", "c"]);
    write(dir, &[&scsi("b"), &scsi("c")]);
    daemon.signal(Signal::HUP);
    says("said", "\na: removed; its image is complete\n");
    assert_eq!(disk_names(dir), ["b", "c"]);
}

#[test]
fn disks_are_known_by_their_images_whatever_their_serials() {
    let dir = &test_dir();
    fs::create_dir(dir.join("sub")).unwrap();
    create(dir, "b", "2M --log log");
    symlink("sub/a", dir.join("link")).unwrap();
    let daemon = serve_pool(dir, &["sub/a"], &["path = 'sub/a'\nserial = 'x'"]);
    let mut client = RawClient::extended_to(&dir.join("n"), "x");
    // The same disk, which keeps its clients.
    write(dir, &["path = 'link'\nserial = 'y'"]);
    reload_says(&daemon, dir, "the keys of disk 'x' have changed");
    client.write(1, 0, &[7; 512]);
    let passes = |disk: &str, mib: u64| {
        write(dir, &[disk]);
        daemon.signal(Signal::HUP);
        wait_until("the other disk", || {
            ctl(dir, "stats")["disks"][0]["size_bytes"] == mib * MIB
        });
    };
    // Another disk with the same serial.
    passes("path = 'b'\nserial = 'x'", 2);
    assert!(client.is_closed());
    assert_eq!(disk_names(dir), ["x"]);
    // The name of a disk at its door is not that by which the daemon knows it.
    for (disk, mib) in [("path = 'sub/a'", 1), ("path = 'b'\nserial = 'a'", 2)] {
        passes(disk, mib);
        drop(RawClient::extended_to(&dir.join("n"), "a"));
    }
    fs::remove_file(dir.join("pool.toml")).unwrap();
    let part = "pool.toml: No such file or directory (os error 2); the disks";
    reload_says(&daemon, dir, part);
    daemon.stop();
}

/// Pools whose files are links that are swapped. The daemon may read nothing else of `dir`.
#[test]
fn a_file_behind_links_is_read_again() {
    let dir = &test_dir();
    for place in ["disks", "etc", "links", "versions", "elsewhere"] {
        fs::create_dir(dir.join(place)).unwrap();
    }
    for disk in ["a", "b", "c"] {
        create(dir, &format!("disks/{disk}"), "1M --log disks/log");
    }
    let version = |name: &str, disks: &[&str]| {
        let keys: Vec<_> = disks
            .iter()
            .map(|disk| format!("path = 'disks/{disk}'"))
            .collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let text = pool(&keys).replace("log = 'log'", "log = 'disks/log'");
        fs::write(dir.join(name), text).unwrap();
    };
    let swap = |link: &str, to: &str| {
        symlink(to, dir.join("new")).unwrap();
        fs::rename(dir.join("new"), dir.join(link)).unwrap();
    };
    version("versions/1.toml", &["a"]);
    swap("links/current.toml", "../versions/1.toml");
    swap("etc/pool.toml", "../links/current.toml");
    let arguments = "--config etc/pool.toml --control ctl --disk-dir disks";
    let daemon = serve_telling(dir, arguments, 1);
    let reload = |disks: &[&str]| {
        daemon.signal(Signal::HUP);
        let names: Vec<_> = disks.iter().map(|disk| format!("disks/{disk}")).collect();
        wait_until("the disks", || disk_names(dir) == names);
    };
    version("versions/1.toml", &["a", "b"]);
    reload(&["a", "b"]);
    version("versions/2.toml", &["a", "c"]);
    swap("links/current.toml", "../versions/2.toml");
    reload(&["a", "c"]);
    version("links/3.toml", &["a"]);
    swap("etc/pool.toml", "../links/3.toml");
    reload(&["a"]);
    assert_eq!(errors(dir), "");
    version("elsewhere/4.toml", &["a", "b"]);
    swap("etc/pool.toml", "../elsewhere/4.toml");
    reload_says(&daemon, dir, "etc/pool.toml: Permission denied");
    let parts = [
        "/etc, ",
        "/links, ",
        "/versions: ",
        "start the daemon again",
    ];
    assert_says(&errors(dir), &parts);
    assert_eq!(disk_names(dir), ["disks/a"]);
    daemon.stop();
}

/// Its log is open, so the disk can't set its keys, and need not.
#[test]
fn a_disk_joins_a_log_whose_keys_are_in_the_defaults() {
    let dir = &test_dir();
    for disk in ["a", "b"] {
        create(dir, disk, "1M --log log");
    }
    let write = |disks: &[&str], retain: &str| {
        let defaults = format!("{DEFAULTS}retain = '{retain}'\n");
        let text = pool(disks).replace(DEFAULTS, &defaults);
        fs::write(dir.join("pool.toml"), text).unwrap();
    };
    write(&["path = 'a'"], "1h");
    let daemon = serve_telling(dir, SERVE, 1);
    write(&["path = 'a'", "path = 'b'"], "2h");
    reload_says(&daemon, dir, "retain=2h differs from retain= of its log");
    assert_eq!(disk_names(dir), ["a"]);
    write(&["path = 'a'", "path = 'b'"], "1h");
    daemon.signal(Signal::HUP);
    wait_until("the disk", || disk_names(dir) == ["a", "b"]);
    daemon.stop();
}

/// Without --disk-dir it has given up most system calls, and the check of a file makes none of them.
#[test]
fn a_daemon_that_opens_no_more_disks_lets_disks_go() {
    let dir = &test_dir();
    for disk in ["a", "b", "c"] {
        create(dir, disk, "1M --log log");
    }
    write(dir, &["path = 'a'", "path = 'b'"]);
    let daemon = serve_telling(dir, "--config pool.toml --control ctl", 2);
    for (disk, name) in [
        ("path = 'c'", "'c'"),
        ("backend = 'ram'\nsize = '1M'", "'ram disk'"),
        (
            "path = 'c'\nserial = 'v'\ndoor = 'vhost-user'\nsocket = 'v'",
            "'v'",
        ),
        ("path = 'c'\nserial = 't'\ndoor = 'tcmu'\nname = 't'", "'t'"),
    ] {
        write(dir, &["path = 'a'", disk]);
        let part = format!("disk {name}: this daemon gave up the right to open disks");
        reload_says(&daemon, dir, &part);
        assert_eq!(disk_names(dir), ["a", "b"]);
    }
    reload(&daemon, dir, &["path = 'a'"], &["a"]);
    daemon.stop();
}

#[test]
fn a_removal_that_waits_does_not_make_the_daemon_deaf() {
    let dir = &test_dir();
    let Some(slow) = mount(dir) else {
        return;
    };
    const SLOW: &str = "path = 'slow/disk.img'\nlog = 'slow-log'\nserial = 'slow'";
    let mut daemon = serve_pool(dir, &["a", "b"], &["path = 'a'", SLOW]);
    let mut client = RawClient::extended_to(&dir.join("n"), "slow");
    slow.halt();
    read_from_image(dir, &mut client);
    reload(&daemon, dir, &["path = 'a'"], &["a"]);
    // A request to read the file again has to wait.
    write(dir, &["path = 'a'", "path = 'b'"]);
    daemon.signal(Signal::HUP);
    slow.resume();
    assert_eq!(client.reply().cookie, 3);
    wait_until("the disk", || disk_names(dir) == ["a", "b"]);
    let disks = ["path = 'a'", "path = 'b'", SLOW];
    reload(&daemon, dir, &disks, &["a", "b", "slow"]);
    let mut client = RawClient::extended_to(&dir.join("n"), "slow");
    slow.halt();
    read_from_image(dir, &mut client);
    write(dir, &["path = 'a'"]);
    daemon.signal(Signal::HUP);
    wait_until("the removal", || {
        !disk_names(dir).contains(&"slow".to_owned())
    });
    end(&mut daemon);
    assert_eq!(daemon.child.wait().unwrap().code(), Some(1));
    let told = errors(dir);
    assert!(told.contains("disk 'slow' does not answer"), "{told}");
}
