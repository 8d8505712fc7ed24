//! Incremental backups of a disk in use, made with QEMU's and libnbd's tools by the map of what has
//! changed since a snapshot.

use std::fs;
use std::path::Path;

use serde_json::Value;
use walvisor_testkit::nbd::{RawClient, WRITE_ZEROES};
use walvisor_tests::have;

use super::{Daemon, client, create, noise, run_client, test_dir, told};

const SIZE: usize = 16 << 20;
const TRIM: u16 = 4;
const SERVED: &str = "nbd+unix:///?socket=s";

/// What a guest does in a day: writes of several lengths, and space that it gives back. Returns the
/// ranges that have changed, as offset and length.
fn pass_day(client: &mut RawClient, disk: &mut [u8], day: usize) -> Vec<(u64, u64)> {
    let start = day << 20;
    for (number, sectors) in [1, 4, 130].into_iter().enumerate() {
        let (at, data) = (start + (number << 18), noise(sectors * 512));
        client.write(1, at as u64, &data);
        disk[at..at + data.len()].copy_from_slice(&data);
    }
    let (at, trimmed, zeroed) = (start - (512 << 10), 100 << 9, 77 << 9);
    for (command, at, len) in [(TRIM, at, trimmed), (WRITE_ZEROES, at + trimmed, zeroed)] {
        client.request(0, command, 1, at as u64, len as u64);
        assert_eq!(client.reply().kind, 0);
        disk[at..at + len].fill(0);
    }
    let changed = [
        (at, trimmed + zeroed),
        (start, 512),
        (start + (1 << 18), 4 << 9),
        (start + (2 << 18), 130 << 9),
    ];
    changed.map(|(at, len)| (at as u64, len as u64)).to_vec()
}

/// The ranges of a map that have a value, as offset and length.
fn ranges(map: &str, keys: [&str; 2], wanted: impl Fn(&Value) -> bool) -> Vec<(u64, u64)> {
    let map: Value = serde_json::from_str(map).unwrap();
    let mut found: Vec<(u64, u64)> = Vec::new();
    for range in map.as_array().unwrap().iter().filter(|range| wanted(range)) {
        let [start, len] = keys.map(|key| range[key].as_u64().unwrap());
        match found.last_mut() {
            Some((before, of)) if *before + *of == start => *of += len,
            _ => found.push((start, len)),
        }
    }
    found
}

/// What nbdinfo says has changed since a snapshot.
fn nbdinfo(dir: &Path, since: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{since}");
    let map = client(dir, "nbdinfo", &["--json", &map, SERVED]);
    ranges(&map, ["offset", "length"], |range| range["type"] == 1)
}

/// The same by qemu-img, which shows what has changed as no data.
fn qemu_img(dir: &Path, since: &str) -> Vec<(u64, u64)> {
    let disk = format!(
        "driver=nbd,server.type=unix,server.path=s,x-dirty-bitmap=qemu:dirty-bitmap:{since}"
    );
    let map = client(
        dir,
        "qemu-img",
        &["map", "--output=json", "--image-opts", &disk],
    );
    ranges(&map, ["start", "length"], |range| range["data"] == false)
}

/// Makes a backup that has these ranges of the disk, on top of `full.raw`, and restores it.
fn back_up(dir: &Path, ranges: &[(u64, u64)]) -> Vec<u8> {
    let qemu_img = |words: &str| {
        let words: Vec<_> = words.split(' ').collect();
        client(dir, "qemu-img", &words);
    };
    qemu_img(&format!("create -q -f qcow2 -F raw -b {SERVED} day.qcow2"));
    let reads = ranges.iter().map(|(at, len)| format!("read {at} {len}"));
    let reads: Vec<_> = reads.collect();
    let mut words = vec!["-C", "-f", "qcow2", "day.qcow2"];
    words.extend(reads.iter().flat_map(|read| ["-c", read.as_str()]));
    client(dir, "qemu-io", &words);
    qemu_img("rebase -u -f qcow2 -F raw -b full.raw day.qcow2");
    qemu_img("convert -O raw day.qcow2 restored.raw");
    fs::read(dir.join("restored.raw")).unwrap()
}

#[test]
fn a_full_and_an_incremental_backup_of_a_disk_in_use_come_back() {
    if !have("nbdinfo", "libnbd-bin") || !have("qemu-io", "qemu-utils") {
        return;
    }
    let dir = &test_dir();
    create(dir, "disk.img", "16M");
    let start = || Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let daemon = start();
    let mut guest = RawClient::extended(&dir.join("s"));
    let mut disk = vec![0; SIZE];
    pass_day(&mut guest, &mut disk, 1);
    told(dir, "snapshot day-1");
    client(dir, "nbdcopy", &[SERVED, "full.raw"]);
    assert!(fs::read(dir.join("full.raw")).unwrap() == disk);
    assert_eq!(nbdinfo(dir, "day-1"), []);
    // Nothing but the snapshot makes this durable before the kill.
    let changed = pass_day(&mut guest, &mut disk, 3);
    told(dir, "snapshot day-3");
    daemon.kill();
    drop(guest);

    let daemon = start();
    assert_eq!(nbdinfo(dir, "day-1"), changed);
    assert_eq!(qemu_img(dir, "day-1"), changed);
    assert!(back_up(dir, &changed) == disk);
    // A client learns which snapshots there are, and is refused one that is gone.
    let mut guest = RawClient::extended(&dir.join("s"));
    pass_day(&mut guest, &mut disk, 5);
    told(dir, "snapshot day-5");
    told(dir, "snapshot day-6");
    told(dir, "snapshot-delete day-6");
    let listed = client(dir, "nbdinfo", &[SERVED]);
    for (name, there) in [("day-1", true), ("day-5", true), ("day-6", false)] {
        let context = format!("qemu:dirty-bitmap:{name}");
        assert_eq!(listed.contains(&context), there, "{listed}");
    }
    let gone = run_client(dir, "nbdinfo", &["--map=qemu:dirty-bitmap:day-6", SERVED]);
    assert!(!gone.status.success());
    drop(guest);
    daemon.stop();

    // A look at a snapshot tells what had changed until then, so a backup can be made of that
    // moment.
    let look = "--disk path=disk.img,at=snapshot:day-3,socket=s";
    let daemon = Daemon::start(dir, look);
    assert_eq!(nbdinfo(dir, "day-1"), changed);
    assert!(!client(dir, "nbdinfo", &[SERVED]).contains("day-5"));
    daemon.stop();
}
