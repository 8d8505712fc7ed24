//! Incremental backups of a disk in use, made with QEMU's and libnbd's tools by the map of what has
//! changed since a snapshot.

use std::fs;
use std::path::Path;

use serde_json::Value;
use walvisor_testkit::nbd::{RawClient, WRITE_ZEROES};
use walvisor_tests::have;

use super::{Daemon, client, create, noise, run_client, text, walvisor};

const SIZE: usize = 16 << 20;
const TRIM: u16 = 4;
const SERVED: &str = "nbd+unix:///?socket=s";

/// What the disk holds, and which of its sectors have changed since the last snapshot.
struct Model {
    bytes: Vec<u8>,
    changed: Vec<bool>,
}

impl Model {
    fn write(&mut self, client: &mut RawClient, at: usize, len: usize, seed: u8) {
        let mut data = noise(len);
        data.iter_mut().for_each(|byte| *byte ^= seed);
        client.write(1, at as u64, &data);
        self.bytes[at..at + len].copy_from_slice(&data);
        self.changed[at / 512..(at + len) / 512].fill(true);
    }

    fn zero(&mut self, client: &mut RawClient, command: u16, at: usize, len: usize) {
        client.request(0, command, 1, at as u64, len as u64);
        assert_eq!(client.reply().kind, 0);
        self.bytes[at..at + len].fill(0);
        self.changed[at / 512..(at + len) / 512].fill(true);
    }

    /// What a guest does in a day: writes of many lengths, and space that it gives back.
    fn day(&mut self, client: &mut RawClient, day: usize) {
        for number in 0..40 {
            let at = (day * 977 + number * 4099) * 512 % (SIZE - (1 << 20));
            self.write(
                client,
                at,
                (1 + number * 3 % 130) * 512,
                (day * 40 + number) as u8,
            );
        }
        self.zero(client, TRIM, day << 20, 100 << 9);
        self.zero(client, WRITE_ZEROES, (day << 20) + (300 << 10), 77 << 9);
    }

    /// The changed ranges: offset and length in bytes.
    fn take_changed(&mut self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for at in (0..self.changed.len()).filter(|&at| self.changed[at]) {
            let at = at as u64 * 512;
            match ranges.last_mut() {
                Some((start, len)) if *start + *len == at => *len += 512,
                _ => ranges.push((at, 512)),
            }
        }
        self.changed.fill(false);
        ranges
    }
}

fn snapshot(dir: &Path, name: &str) {
    let made = walvisor(dir, &format!("ctl ctl snapshot {name}"));
    assert!(made.status.success(), "{}", text(&made.stderr));
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

/// Makes a backup that has these ranges of the disk, on top of another backup.
fn back_up(dir: &Path, ranges: &[(u64, u64)], new: &str, (on, format): (&str, &str)) {
    client(
        dir,
        "qemu-img",
        &[
            "create", "-q", "-f", "qcow2", "-F", "raw", "-b", SERVED, new,
        ],
    );
    let reads: Vec<_> = ranges
        .iter()
        .map(|(at, len)| format!("read {at} {len}"))
        .collect();
    let mut words = vec!["-C", "-f", "qcow2", new];
    words.extend(reads.iter().flat_map(|read| ["-c", read.as_str()]));
    client(dir, "qemu-io", &words);
    client(
        dir,
        "qemu-img",
        &["rebase", "-u", "-f", "qcow2", "-F", format, "-b", on, new],
    );
}

/// Restores a backup with those that it is on top of.
fn restored(dir: &Path, backup: &str) -> Vec<u8> {
    client(
        dir,
        "qemu-img",
        &["convert", "-O", "raw", backup, "restored.raw"],
    );
    fs::read(dir.join("restored.raw")).unwrap()
}

#[test]
fn a_full_and_three_incremental_backups_of_a_disk_in_use_come_back() {
    if !have("nbdinfo", "libnbd-bin") || !have("qemu-io", "qemu-utils") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "16M");
    let start = || Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let daemon = start();
    let mut guest = RawClient::extended(&dir.join("s"));
    let mut model = Model {
        bytes: vec![0; SIZE],
        changed: vec![false; SIZE / 512],
    };
    model.day(&mut guest, 0);
    snapshot(dir, "day-0");
    model.take_changed();
    client(dir, "nbdcopy", &[SERVED, "full.raw"]);
    assert!(fs::read(dir.join("full.raw")).unwrap() == model.bytes);
    assert_eq!(nbdinfo(dir, "day-0"), []);

    model.day(&mut guest, 1);
    let changed = model.take_changed();
    snapshot(dir, "day-1");
    assert_eq!(nbdinfo(dir, "day-0"), changed);
    back_up(dir, &changed, "1.qcow2", ("full.raw", "raw"));
    let first = model.bytes.clone();

    // Nothing but the snapshot makes this durable before the kill.
    model.day(&mut guest, 2);
    let second_changed = model.take_changed();
    snapshot(dir, "day-2");
    daemon.kill();
    drop(guest);
    let daemon = start();
    assert_eq!(nbdinfo(dir, "day-1"), second_changed);
    back_up(dir, &second_changed, "2.qcow2", ("1.qcow2", "qcow2"));
    let second = model.bytes.clone();

    let mut guest = RawClient::extended(&dir.join("s"));
    model.day(&mut guest, 3);
    let changed = model.take_changed();
    snapshot(dir, "day-3");
    assert_eq!(qemu_img(dir, "day-2"), changed);
    assert_eq!(nbdinfo(dir, "day-2"), changed);
    back_up(dir, &changed, "3.qcow2", ("2.qcow2", "qcow2"));

    assert!(restored(dir, "1.qcow2") == first);
    assert!(restored(dir, "2.qcow2") == second);
    assert!(restored(dir, "3.qcow2") == model.bytes);

    // A client learns which snapshots there are, and is refused one that is gone.
    let deleted = walvisor(dir, "ctl ctl snapshot-delete day-0");
    assert!(deleted.status.success());
    let listed = client(dir, "nbdinfo", &[SERVED]);
    for (name, there) in [("day-0", false), ("day-1", true), ("day-3", true)] {
        let context = format!("qemu:dirty-bitmap:{name}");
        assert_eq!(listed.contains(&context), there, "{listed}");
    }
    let gone = run_client(dir, "nbdinfo", &["--map=qemu:dirty-bitmap:day-0", SERVED]);
    assert!(!gone.status.success());
    drop(guest);
    daemon.stop();

    // A look at a snapshot tells what had changed until then, so a backup can be made of that
    // moment.
    let look = "--disk path=disk.img,at=snapshot:day-2,socket=s";
    let daemon = Daemon::start(dir, look);
    assert_eq!(nbdinfo(dir, "day-1"), second_changed);
    assert!(!client(dir, "nbdinfo", &[SERVED]).contains("day-3"));
    daemon.stop();
}
