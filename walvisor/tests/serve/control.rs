//! `walvisor ctl` and daemons with clients.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use walvisor_testkit::nbd::{FLUSH, READ, RawClient, WRITE};
use walvisor_testkit::{MemoryFs, wait_until};

use super::vhost_user::FrontEnd;
use super::{Daemon, MIB, WALVISOR, create, noise, text, walvisor};
use walvisor_storage::{StoreOptions, create_disk};

/// Replies of this kind and above are errors.
const FAILED: u16 = 1 << 15;

/// The output of `walvisor ctl ctl --json WORDS`.
#[track_caller]
pub fn ctl(dir: &Path, words: &str) -> Value {
    let output = walvisor(dir, &format!("ctl ctl --json {words}"));
    assert!(output.status.success(), "{words}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What a change is answered with, for people: a line.
#[test]
fn each_change_tells_people_in_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    create(dir, "b.img", "1M --log disk.img.wal");
    let mut daemon = Daemon::start(
        dir,
        "--control ctl --disk-dir . --disk path=disk.img,socket=s,retain=all",
    );
    let mut client = RawClient::extended(&dir.join("s"));
    for byte in [1, 2] {
        client.write(1, 0, &[byte; 4096]);
        client.flush(2);
    }
    let place = fs::canonicalize(dir).unwrap();
    let place = place.display();
    for (words, line) in [
        ("pause", "paused"),
        ("resume", "running"),
        ("mark one", "marked lsn:3 of cid:3"),
        ("snapshot two", "snapshot 'two' at lsn:3 of cid:3"),
        (
            "snapshot three --alone",
            "snapshot 'three' at lsn:3 of cid:3, of disk 1 alone",
        ),
        ("snapshot-delete two", "snapshot 'two' deleted"),
        ("pause --disk disk.img", "disk.img: paused"),
        (
            "restore --at lsn:1",
            "disk.img: restored in place as of lsn:1, 1 record undone; to undo this, restore --at \
             lsn:3",
        ),
        (
            "restore --at lsn:2",
            "disk.img: restored in place as of lsn:2, 0 records undone and 1 back; to undo this, \
             restore --at lsn:4",
        ),
        (
            "restore --at lsn:2",
            "disk.img: already as of lsn:2: nothing to do",
        ),
        ("resume --disk disk.img", "disk.img: running"),
        ("resize --size 3M", "disk.img: 3 MiB, before 1 MiB"),
        ("set-cache writethrough", "disk.img: writethrough"),
        (
            "set-limit --ops-per-second 5000 --ops-burst 9000 --bytes-per-second 1536M",
            "disk.img: 5000 ops/s (burst 9000), 1.5 GiB/s, weight 100",
        ),
        (
            "set-limit --ops-per-second 0 --bytes-per-second 0 --weight 200",
            "disk.img: no limit, weight 200",
        ),
        (
            "add-disk path=b.img,log=disk.img.wal,socket=s",
            &format!(
                "serving b.img: 1 MiB at nbd+unix:///b.img?socket={place}/s, log disk.img.wal"
            ),
        ),
        (
            "remove-disk b.img",
            "b.img: removed; the log keeps history, and with it this disk's newest records: open \
             the disk together with its log",
        ),
        ("set-retain 5M", "retain=5M: the log keeps its last 5 MiB"),
        (
            "set-retain off --give-up-history",
            &format!(
                "retain=off: the log keeps no history; gave up the rest of the history of \
                 disk.img, {place}/b.img since 2"
            ),
        ),
        ("snapshot-delete three", "snapshot 'three' deleted"),
        ("checkpoint", "disk.img: checkpointed"),
        (
            "look --socket look",
            &format!(
                "serving disk.img as of newest: 3 MiB at nbd+unix:///disk.img?socket={place}/look"
            ),
        ),
        (
            "unlook disk.img",
            &format!("{place}/look: ended, the look at disk.img as of newest"),
        ),
        (
            "remove-disk disk.img",
            "disk.img: removed; its image is complete",
        ),
        ("checkpoint", "no disks"),
        ("shutdown", "shutting down"),
    ] {
        let output = walvisor(dir, &format!("ctl ctl {words}"));
        assert!(output.status.success(), "{words}: {}", text(&output.stderr));
        let told = text(&output.stdout);
        if line.ends_with(" since 2") {
            assert!(told.starts_with(line), "{words}: {told}");
        } else {
            assert_eq!(told, format!("{line}\n"), "{words}");
        }
    }
    let status = daemon.child.wait().unwrap();
    assert_eq!((status.code(), daemon.errors().as_str()), (Some(0), ""));
}

#[test]
fn nbd_clients_are_paused_and_see_a_longer_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    let mut daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    client.request(0, WRITE, 1, 0, 4096);
    client.send(&[7; 4096]);
    assert!(client.reply().kind < FAILED);

    assert_eq!(ctl(dir, "pause"), json!({ "state": "paused" }));
    assert_eq!(ctl(dir, "pause"), json!({ "state": "paused" }));
    client.request(0, FLUSH, 2, 0, 0);
    // A client that connects meanwhile can do its handshake, and its request waits like the others.
    let mut other = RawClient::extended(&dir.join("s"));
    other.request(0, READ, 3, 0, 4096);
    thread::sleep(Duration::from_millis(50));
    let stats = ctl(dir, "stats --json");
    assert_eq!(
        (&stats["kind"], &stats["state"]),
        (&json!("nbd"), &json!("paused"))
    );
    let disk = &stats["disks"][0];
    assert_eq!(
        (&disk["requests"], &disk["flushes"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(ctl(dir, "resume"), json!({ "state": "running" }));
    assert!(client.reply().kind < FAILED);
    assert!(other.reply().kind < FAILED);
    assert_eq!(ctl(dir, "stats --json")["disks"][0]["requests"], 3);

    let name = disk["name"].as_str().unwrap();
    let grown = ctl(dir, &format!("resize --disk {name} --size 4M"));
    assert_eq!(grown["size_bytes"], 4 * MIB);
    // A connected client can access the new sectors, and a new connection learns the new size.
    client.request(0, WRITE, 4, 4 * MIB - 4096, 4096);
    client.send(&[8; 4096]);
    assert!(client.reply().kind < FAILED);
    let set = ctl(dir, "set-cache writethrough");
    assert_eq!(set["cache"], "writethrough");
    assert_eq!(ctl(dir, "set-cache writeback")["cache"], "writeback");
    ctl(dir, "checkpoint");
    let image = fs::read(dir.join("disk.img")).unwrap();
    assert_eq!(image.len() as u64, 4 * MIB);
    assert!(image[..4096] == [7; 4096] && image[4 * MIB as usize - 4096..] == [8; 4096]);
    let text = walvisor(dir, "ctl ctl stats --prometheus").stdout;
    let text = super::text(&text);
    assert_eq!(super::metric(&text, "walvisor_block_writes_total"), 2);
    let counted = |operation: &str| {
        let labels =
            format!("disk=\"{name}\",transport=\"nbd\",queue=\"0\",operation=\"{operation}\"");
        let bucket = format!("walvisor_block_latency_seconds_bucket{{{labels},le=\"+Inf\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&bucket));
        line.map(|count| count.parse::<u64>().unwrap())
    };
    assert_eq!(
        ["read", "write", "flush", "discard"].map(counted),
        [Some(1), Some(2), Some(1), None]
    );
    assert!(text.contains("walvisor_log_group_size_bucket{"), "{text}");
    let latency = &ctl(dir, "stats --json")["disks"][0]["latency"];
    assert_eq!(latency["write"]["count"], 2);
    assert!(latency["write"]["p50_us"].as_u64() <= latency["write"]["p99_us"].as_u64());

    assert_eq!(ctl(dir, "shutdown"), json!({}));
    let status = daemon.child.wait().unwrap();
    assert_eq!((status.code(), daemon.errors().as_str()), (Some(0), ""));
    assert!(!dir.join("ctl").exists() && !dir.join("s").exists());
    let info = walvisor(dir, "disk info --json disk.img").stdout;
    let info: Value = serde_json::from_slice(&info).unwrap();
    assert_eq!(
        (&info["size_bytes"], &info["log"]["records"]),
        (&json!(4 * MIB), &json!(0))
    );
}

/// Each log is told once, with its disks below it, in every format.
#[test]
fn stats_list_each_log_once_and_each_disks_cache_mode_and_condition() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for name in ["a.img", "b.img"] {
        let made = walvisor(dir, &format!("disk create {name} --size 1M --log both"));
        assert!(made.status.success(), "{}", text(&made.stderr));
    }
    create(dir, "c.img", "1M");
    fs::write(dir.join("d.img"), noise(1 << 20)).unwrap();
    let disks = "--disk path=a.img,log=both,socket=a --disk path=c.img,cache=unsafe,socket=c \
                 --disk path=d.img,backend=raw,cache=writethrough,readonly=on,socket=d \
                 --disk path=b.img,log=./both,socket=b,cache=writethrough";
    let daemon = Daemon::start(dir, &format!("--control ctl {disks}"));
    let mut client = RawClient::extended(&dir.join("a"));
    client.write(1, 0, &[7; 4096]);
    client.flush(2);
    let stats = ctl(dir, "stats --json");
    let logs = stats["logs"].as_array().unwrap();
    let told: Vec<_> = logs
        .iter()
        .map(|log| {
            (
                log["path"].as_str().unwrap(),
                &log["disks"],
                &log["flushes"],
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("both", &json!(["a.img", "b.img"]), &json!(1)),
            ("c.img.wal", &json!(["c.img"]), &json!(0)),
        ]
    );
    let told: Vec<_> = stats["disks"].as_array().unwrap().iter().collect();
    for (disk, (name, cache, log)) in told.into_iter().zip([
        ("a.img", "writeback", json!("both")),
        ("c.img", "unsafe", json!("c.img.wal")),
        ("d.img", "writethrough", Value::Null),
        ("b.img", "writethrough", json!("both")),
    ]) {
        assert_eq!(
            (&disk["name"], &disk["cache"], &disk["log"]["path"]),
            (&json!(name), &json!(cache), &log)
        );
        assert_eq!(disk["condition"], json!({ "name": "ok" }));
    }
    let table = text(&walvisor(dir, "ctl ctl stats").stdout);
    let is_head = |line: &&str| {
        ["log ", "disk "]
            .iter()
            .any(|head| line.trim_start().starts_with(head))
    };
    let heads = table.lines().filter(is_head);
    let heads: Vec<_> = heads.filter_map(|line| line.split(':').next()).collect();
    let expected = [
        "log both",
        "  disk a.img",
        "  disk b.img",
        "log c.img.wal",
        "  disk c.img",
        "disk d.img",
    ];
    assert_eq!(heads, expected, "{table}");
    let prometheus = text(&walvisor(dir, "ctl ctl stats --prometheus").stdout);
    for line in [
        "walvisor_log_flushes_total{log=\"both\"} 1",
        "walvisor_disk_info{disk=\"b.img\",transport=\"nbd\",cache=\"writethrough\",log=\"both\"} 1",
        "walvisor_disk_info{disk=\"d.img\",transport=\"nbd\",cache=\"writethrough\",log=\"\"} 1",
        "walvisor_disk_condition{disk=\"a.img\",transport=\"nbd\",condition=\"ok\"} 1",
        "walvisor_disk_condition{disk=\"a.img\",transport=\"nbd\",condition=\"no_space\"} 0",
    ] {
        assert_eq!(prometheus.matches(line).count(), 1, "{line}:\n{prometheus}");
    }
    assert_eq!(prometheus.matches("walvisor_log_syncs_total{").count(), 2);
    // What the guest, or the owner, changes is told; nothing makes an unsafe disk safe.
    ctl(dir, "set-cache writethrough --disk a.img");
    let set = ctl(dir, "set-cache writethrough --disk c.img");
    assert_eq!(set["cache"], "unsafe");
    let stats = ctl(dir, "stats --json");
    let caches = [0, 1].map(|disk| stats["disks"][disk]["cache"].as_str().unwrap());
    assert_eq!(caches, ["writethrough", "unsafe"]);
    drop(client);
    assert_eq!(daemon.stop(), "");
}

/// A disk whose image's file system is full says so, and since when, until there is space.
#[test]
fn stats_report_a_disk_without_space_until_it_has_some() {
    let Some(small) = MemoryFs::tmpfs("size=2m") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let image = small.path().join("disk.img");
    let image = image.to_str().unwrap();
    create(dir, image, "16M --log log");
    let daemon = Daemon::start(
        dir,
        &format!("--control ctl --disk path={image},log=log,socket=s,serial=one"),
    );
    let mut client = RawClient::extended(&dir.join("s"));
    for number in 0..16 {
        client.write(number, number << 20, &noise(1 << 20));
    }
    client.flush(16);
    let checkpoint = walvisor(dir, "ctl ctl checkpoint");
    assert_eq!(checkpoint.status.code(), Some(1));
    let condition = || ctl(dir, "stats --json")["disks"][0]["condition"].clone();
    let began = Instant::now();
    let wait_for = |name: &str| wait_until(name, || condition()["name"] == name);
    wait_for("no_space");
    let told = condition();
    assert!(
        told["error"].as_str().unwrap().contains("disk.img"),
        "{told}"
    );
    assert_eq!(told["refuses_writes"], false);
    let since = Duration::from_micros(told["since_unix_us"].as_u64().unwrap());
    let age = SystemTime::UNIX_EPOCH.elapsed().unwrap() - since;
    assert!(age <= began.elapsed() + Duration::from_secs(120), "{age:?}");
    let table = text(&walvisor(dir, "ctl ctl stats").stdout);
    assert!(
        table.contains(", no space for ") && table.contains(" s, writes go on: "),
        "{table}"
    );
    let prometheus = text(&walvisor(dir, "ctl ctl stats --prometheus").stdout);
    for line in [
        "walvisor_disk_condition{disk=\"one\",transport=\"nbd\",condition=\"no_space\"} 1",
        "walvisor_disk_refuses_writes{disk=\"one\",transport=\"nbd\"} 0",
        &format!(
            "walvisor_disk_trouble_since_seconds{{disk=\"one\",transport=\"nbd\"}} {}",
            since.as_secs()
        ),
    ] {
        assert!(prometheus.contains(line), "{line}:\n{prometheus}");
    }
    small.remount("size=64m");
    wait_for("ok");
    drop(client);
    let errors = daemon.stop();
    assert!(errors.contains("No space left"), "{errors}");
}

/// With on-full=pause writes wait for space, which the statistics tell, and no wait holds up the
/// end.
#[test]
fn requests_wait_for_space_with_on_full_pause() {
    let Some(small) = MemoryFs::tmpfs("size=2m") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let image = small.path().join("disk.img");
    let options = StoreOptions {
        segment_size: MIB,
        max_segments: 4,
        ..StoreOptions::default()
    };
    create_disk(&image, 32 * MIB, &dir.join("log"), &options).unwrap();
    let image_path = image.display();
    let disk = format!("path={image_path},log=log,socket=s,serial=one,on-full=pause");
    const WRITES: u64 = 64;
    const LENGTH: u64 = MIB / 4;
    let write_all = |client: &mut RawClient| {
        for number in 0..WRITES {
            client.request(0, WRITE, number, number * LENGTH, LENGTH);
            client.send(&noise(LENGTH as usize));
        }
    };
    let wait_for = |name: &str, pauses: bool| {
        let began = Instant::now();
        loop {
            let told = ctl(dir, "stats --json")["disks"][0]["condition"].clone();
            if told["name"] == name && told["pauses_writes"] == json!(pauses) {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(120), "{told}");
            thread::sleep(Duration::from_millis(20));
        }
    };
    let told = || fs::read_to_string(dir.join("errors")).unwrap();
    for end in [false, true] {
        let errors = fs::File::create(dir.join("errors")).unwrap();
        let mut command = Command::new(WALVISOR);
        command.args(["serve", "nbd", "--control", "ctl", "--disk", &disk]);
        let mut daemon = Daemon::start_telling(dir, &mut command, errors.into(), 1);
        let client = RawClient::extended(&dir.join("s"));
        // A second descriptor of the connection: the requests are more than the socket's buffers
        // hold.
        let mut sender = RawClient {
            socket: client.socket.try_clone().unwrap(),
        };
        let mut client = client;
        let sending = thread::spawn(move || {
            write_all(&mut sender);
        });
        wait_for("no_space", true);
        // The keeper says so with its next attempt.
        wait_until("its line", || told().contains("wait until there is space"));
        let table = text(&walvisor(dir, "ctl ctl stats").stdout);
        assert!(table.contains(", paused: no space for "), "{table}");
        if end {
            daemon.signal(rustix::process::Signal::TERM);
            let status = daemon.child.wait().unwrap();
            assert_eq!(status.code(), Some(1), "{}", told());
            let _ = sending.join();
            continue;
        }
        small.remount("size=64m");
        for _ in 0..WRITES {
            assert!(client.reply().kind < FAILED);
        }
        client.flush(WRITES);
        sending.join().unwrap();
        drop(client);
        daemon.stop();
        // Once more, with an image that can't grow.
        let file = fs::File::options().write(true).open(&image).unwrap();
        rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            0,
            32 * MIB,
        )
        .unwrap();
        small.remount("size=2m");
    }
}

#[test]
fn a_paused_nbd_server_ends_and_is_resumed_by_whoever_shuts_it_down() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    for end in ["signal", "shutdown"] {
        let mut daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
        let mut client = RawClient::extended(&dir.join("s"));
        ctl(dir, "pause");
        client.request(0, FLUSH, 1, 0, 0);
        if end == "shutdown" {
            ctl(dir, "shutdown");
            let status = daemon.child.wait().unwrap();
            assert_eq!((status.code(), daemon.errors().as_str()), (Some(0), ""));
        } else {
            assert_eq!(daemon.stop(), "");
        }
    }
}

#[test]
fn vhost_user_disks_are_paused_and_grow() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    let arguments = "--control ctl --disk path=disk.img,socket=s,queues=2";
    let mut daemon = Daemon::start_door(dir, "vhost-user", arguments);
    // Pauses work without a front-end, twice, and with one.
    for _ in 0..2 {
        assert_eq!(ctl(dir, "pause"), json!({ "state": "paused" }));
        assert_eq!(ctl(dir, "stats --json")["state"], "paused");
        assert_eq!(ctl(dir, "resume"), json!({ "state": "running" }));
    }
    let mut front_end = FrontEnd::connect(&dir.join("s"));
    assert_eq!(front_end.capacity(), MIB / 512);
    assert_eq!(ctl(dir, "pause"), json!({ "state": "paused" }));
    assert_eq!(front_end.capacity(), MIB / 512, "it is heard all the same");
    ctl(dir, "resume");
    assert_eq!(ctl(dir, "resize --size 2M")["size_bytes"], 2 * MIB);
    // Messages arrive in order: after the pause the session has also handled the resize.
    ctl(dir, "pause");
    assert_eq!(front_end.capacity(), 2 * MIB / 512);
    ctl(dir, "resume");
    ctl(dir, "shutdown");
    let status = daemon.child.wait().unwrap();
    assert_eq!((status.code(), daemon.errors().as_str()), (Some(0), ""));
}

/// Sends `count` reads at once and asserts that exactly `expected` of them are answered; then
/// removes the limit and asserts that the rest are answered too.
fn limited(dir: &Path, count: u64, expected: u64) {
    let mut client = RawClient::extended(&dir.join("s"));
    for cookie in 0..count {
        client.request(0, READ, cookie, cookie * 4096, 4096);
    }
    for cookie in 0..expected {
        assert_eq!(client.reply().cookie, cookie);
    }
    let wait = Some(Duration::from_millis(100));
    client.socket.set_read_timeout(wait).unwrap();
    let mut byte = [0];
    let more = client.socket.peek_one(&mut byte);
    assert!(!more, "more than {expected} went at once");
    let wait = Some(Duration::from_secs(120));
    client.socket.set_read_timeout(wait).unwrap();
    ctl(dir, "set-limit --ops-per-second 0 --bytes-per-second 0");
    for cookie in expected..count {
        assert_eq!(client.reply().cookie, cookie);
    }
}

/// Tells whether there is a byte to read before the time-out.
trait PeekOne {
    fn peek_one(&self, byte: &mut [u8; 1]) -> bool;
}

impl PeekOne for std::os::unix::net::UnixStream {
    fn peek_one(&self, byte: &mut [u8; 1]) -> bool {
        rustix::net::recv(self, &mut byte[..], rustix::net::RecvFlags::PEEK).is_ok()
    }
}

#[test]
fn limits_throttle_requests_and_can_be_lifted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=disk.img,socket=s,ops-per-second=1,ops-burst=7",
    );
    let stats = ctl(dir, "stats --json");
    assert_eq!(stats["disks"][0]["limits"]["ops_burst"], 7);
    ctl(dir, "set-limit --bytes-per-second 1 --bytes-burst 16K");
    limited(dir, 20, 4);
    ctl(dir, "set-limit --bytes-per-second 1 --bytes-burst 32K");
    limited(dir, 20, 8);
    // A new limit starts with a full bucket, and clients that stay below a limit are not held back.
    ctl(dir, "set-limit --ops-per-second 100000");
    let mut client = RawClient::extended(&dir.join("s"));
    for cookie in 0..50 {
        client.request(0, READ, cookie, 0, 4096);
        assert_eq!(client.reply().cookie, cookie);
    }
    drop(client);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn limits_delay_neither_a_pause_nor_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    // The limit would hold the second read back for more than an hour.
    let limits = "bytes-per-second=1,bytes-burst=4K";
    let mut daemon = Daemon::start(
        dir,
        &format!("--control ctl --disk path=disk.img,socket=s,{limits}"),
    );
    let mut client = RawClient::extended(&dir.join("s"));
    for cookie in 0..4 {
        client.request(0, READ, cookie, 0, 4096);
    }
    assert_eq!(client.reply().cookie, 0);
    ctl(dir, "pause");
    for cookie in 1..4 {
        assert_eq!(client.reply().cookie, cookie);
    }
    let stats = ctl(dir, "stats --json");
    let burst = &stats["disks"][0]["limits"]["bytes_burst"];
    assert_eq!(*burst, json!(4096), "the limits are as they were");
    ctl(dir, "resume");
    for cookie in 4..8 {
        client.request(0, READ, cookie, 0, 4096);
    }
    assert_eq!(client.reply().cookie, 4);
    ctl(dir, "shutdown");
    let status = daemon.child.wait().unwrap();
    assert_eq!((status.code(), daemon.errors().as_str()), (Some(0), ""));
}
