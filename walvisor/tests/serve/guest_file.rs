//! `walvisor ctl restore --file`: one file of a guest, out of a point of a disk in use.

use std::fs;
use std::path::Path;

use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::wait_until;
use walvisor_tests::{have, run_sessions};

use super::{Daemon, client, ctl, succeed, test_dir};

/// An ext4 of 8 MiB with this file.
fn ext4(dir: &Path, notes: &str) -> Vec<u8> {
    let from = dir.join("from");
    fs::create_dir_all(&from).unwrap();
    fs::write(from.join("notes"), notes).unwrap();
    client(dir, "mkfs.ext4", &["-q", "-F", "-d", "from", "made", "8M"]);
    let made = fs::read(dir.join("made")).unwrap();
    fs::remove_file(dir.join("made")).unwrap();
    made
}

#[test]
fn a_file_comes_out_of_a_disk_that_is_written() {
    if !have("mkfs.ext4", "e2fsprogs") {
        return;
    }
    let dir = &test_dir();
    let [first, second] = ["one", "the second"].map(|notes| ext4(dir, notes));
    fs::write(dir.join("raw"), &first).unwrap();
    succeed(dir, "disk import disk.img raw");
    let daemon = "--control ctl --disk path=disk.img,socket=s,retain=all";
    let _daemon = Daemon::start(dir, daemon);
    let mut guest = RawClient::extended(&dir.join("s"));
    guest.write(1, 0, &first[..512]);
    guest.flush(2);
    ctl(dir, "snapshot first");
    for (number, piece) in (0..).zip(second.chunks(1 << 20)) {
        guest.write(3, number << 20, piece);
    }
    guest.flush(4);
    for no_mount in ["", "--no-mount"] {
        for (at, notes) in [("snapshot:first", "one"), ("newest", "the second")] {
            let words = format!("restore --at {at} --file /notes -o out {no_mount}");
            let told = ctl(dir, &words);
            assert_eq!(
                (&told["disk"], &told["at"]),
                (&"disk.img".into(), &at.into())
            );
            assert_eq!(fs::read_to_string(dir.join("out")).unwrap(), notes);
            fs::remove_file(dir.join("out")).unwrap();
        }
    }
    // The disk was neither restored nor paused, and is written as before.
    guest.write(5, 0, &first[..512]);
    // What the last command read ends with its connection.
    wait_until("the end of its export", || {
        ctl(dir, "exports")["exports"]
            .as_array()
            .unwrap()
            .is_empty()
    });
    run_sessions("guest-file", dir, []);
    assert!(!dir.join("out").exists());
}
