//! Disks as they were: `at=` in a disk's spec, and what a daemon says about its log's history.

use std::fs;

use walvisor_storage::{StoreOptions, create_disk};
use walvisor_testkit::nbd::{FLUSH, RawClient, WRITE};
use walvisor_tests::run_sessions;

use super::vhost_user::Client;
use super::{
    Daemon, MIB, assert_says, create, ctl, disk_files, metric, noise, read, serve, succeed,
    test_dir, told,
};

/// Several daemons and doors at once, and nothing of the disk changes.
#[test]
fn a_disk_is_served_as_of_points() {
    let dir = &test_dir();
    create(dir, "disk.img", "8M");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    for byte in 1..=3 {
        client.write(1, 0, &[byte; 4096]);
        client.flush(2);
    }
    daemon.kill();
    let before = disk_files(dir);
    let disk = |at: &str| format!("--disk path=disk.img,at=lsn:{at}");
    let disks = format!(
        "{},socket=s,serial=one,readonly=on {},socket=s,serial=two,scratch=on",
        disk("1"),
        disk("2")
    );
    let daemon = Daemon::start(dir, &disks);
    // The URIs are in the order of the command line.
    assert!(daemon.uris[0].contains("/one?") && daemon.uris[1].contains("/two?"));
    let [mut one, mut two] =
        ["one", "two"].map(|name| RawClient::extended_to(&dir.join("s"), name));
    assert_eq!(read(&mut one, 0, 4096), [1; 4096]);
    assert_eq!(read(&mut two, 0, 4096), [2; 4096]);
    // A write is refused, and a FLUSH succeeds; what is written with scratch=on is thrown away.
    one.request(1 << 5, WRITE, 1, 0, 512);
    one.send(&[1; 512]);
    assert_eq!(one.reply().kind, 0x8001);
    one.request(0, FLUSH, 2, 0, 0);
    assert_eq!(one.reply().kind, 0);
    two.write(1, 512, &[9; 512]);
    assert_eq!(
        read(&mut two, 0, 1536),
        [[2; 512], [9; 512], [2; 512]].concat()
    );

    let other = Daemon::start_door(dir, "vhost-user", &format!("{},socket=u", disk("3")));
    let mut client = Client::connect(&dir.join("u"), 1);
    assert_eq!(client.capacity(), 8 * MIB / 512);
    client.read(0, 0, 0, 4096);
    client.finish(0, 1);
    assert_eq!(client.data(0, 4096), [3; 4096]);
    drop(client);
    assert_eq!(other.stop(), "");

    create(dir, "other.img", "1M");
    fs::remove_dir_all(dir.join("other.img.wal")).unwrap();
    run_sessions("points", dir, []);
    drop((one, two));
    assert_eq!(daemon.stop(), "");
    assert!(disk_files(dir) == before, "looks change nothing");
}

/// Who sets a retention reads in words what it means. Keeping less gives up what is there only if
/// that is asked for.
#[test]
fn history_is_not_given_up_by_keeping_less_of_it() {
    let dir = &test_dir();
    let created = succeed(dir, "disk create a --size 1M --log log --retain 5M");
    assert_eq!(created, "a: its log log keeps its last 5 MiB\n");
    create(dir, "b", "1M --log log");
    let disk = "--disk path=a,log=log,door=nbd,socket=s";
    // The second line is that of the log.
    let daemon = serve(
        dir,
        &format!("--control ctl --disk-dir . {disk},retain=24h"),
        2,
    );
    assert_eq!(daemon.uris[1], "24h");
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 0, &[1; 4096]);
    client.flush(2);
    run_sessions("history-kept", dir, []);
    client.write(3, 4096, &[2; 4096]);
    client.flush(4);
    drop(client);
    assert_eq!(daemon.stop(), "");

    create(dir, "other", "1M");
    let other = "--control ctl --disk-dir . --disk path=other,door=nbd,socket=s";
    let daemon = serve(dir, other, 1);
    run_sessions("history-given-up", dir, []);
    assert!(!dir.join("c").exists());
    assert_eq!(daemon.stop(), "");
}

/// The owner of a log sees what snapshots and looks need of it, before it is full.
#[test]
fn what_holds_a_log_is_told() {
    const SEGMENT: u64 = 256 << 10;
    let dir = &test_dir();
    let options = StoreOptions {
        segment_size: SEGMENT,
        max_segments: 10,
        ..StoreOptions::default()
    };
    let log = dir.join("disk.img.wal");
    create_disk(&dir.join("disk.img"), 8 * MIB, &log, &options).unwrap();
    let daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    let mut write = |number: u64| {
        client.write(1, number % 200 * 32_768, &noise(32_768));
        client.flush(2);
    };
    let history = || ctl(dir, "stats")["logs"][0]["history"].clone();
    (0..100).for_each(&mut write);
    ctl(dir, "snapshot monday");
    (0..200).for_each(&mut write);
    ctl(dir, "checkpoint");
    let saved = history()["saved_bytes"].as_u64().unwrap();
    let names = fs::read_dir(&log).unwrap().map(|entry| entry.unwrap());
    let files = names.filter(|entry| entry.file_name().to_string_lossy().starts_with("saved-"));
    let in_files: u64 = files.map(|entry| entry.metadata().unwrap().len()).sum();
    assert_eq!((saved, saved > 0), (in_files, true));
    let metrics = told(dir, "stats --prometheus");
    assert_eq!(metric(&metrics, "walvisor_log_saved_bytes"), saved);
    let oldest = "walvisor_log_oldest_snapshot_seconds{log=\"disk.img.wal\",snapshot=\"monday\"} ";
    assert!(metrics.contains(oldest), "{metrics}");
    let stats = told(dir, "stats");
    let held = "for snapshots (1, the oldest 'monday', ";
    assert_says(&stats, &[held, " MiB more beside the log"]);
    ctl(dir, "snapshot-delete monday");
    assert_eq!(history()["saved_bytes"], 0);

    told(dir, "look --at newest --socket l --keep");
    let mut number = 0;
    while history()["pinned_bytes"].as_u64() < Some(8 * SEGMENT) {
        write(number);
        number += 1;
    }
    assert_eq!(history()["room_bytes"], 10 * SEGMENT);
    let metrics = told(dir, "stats --prometheus");
    assert!(metric(&metrics, "walvisor_log_pinned_bytes") >= 8 * SEGMENT);
    // The log's thread carries out the second of these after it has looked at the log.
    ctl(dir, "set-retain off");
    ctl(dir, "set-retain off");
    told(dir, "unlook l");
    drop(client);
    let errors = daemon.stop();
    let line = "80 % of its room, and writes fail at 100 %: an open look holds the log; close it \
                with 'ctl unlook'";
    assert!(
        errors.contains(line) && errors.lines().count() == 1,
        "{errors}"
    );
}
