//! Looking at disks that another process has open, on file systems and as users that can't write.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use walvisor_tests::{MemoryFs, have};

use super::raw_client::RawClient;
use super::{Daemon, WALVISOR, create, noise, run_client, text, walvisor};

const LOOKS: [&str; 3] = [
    "disk info disk.img",
    "disk check disk.img",
    "log dump disk.img.wal",
];

#[test]
fn a_disk_in_use_names_its_process_and_how_to_ask_it() {
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

/// Makes a disk whose newest bytes are in its log, because its daemon was killed.
fn killed(dir: &Path) {
    create(dir, "disk.img", "1M");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 4096, &noise(8192));
    client.flush(2);
    daemon.kill();
    let _ = fs::remove_file(dir.join("s"));
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
    let disk = format!(
        "path=raw.img,backend=raw,readonly=on,socket={}",
        socket.display()
    );
    let daemon = Daemon::start(dir, &format!("--disk {disk}"));
    let mut client = RawClient::extended(&socket);
    client.request(0, super::raw_client::READ, 1, 0, 4096);
    assert!(client.reply().data[8..] == noise(4096));
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
}
