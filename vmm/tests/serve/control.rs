//! `walvisor ctl` and daemons with clients.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::raw_client::{FLUSH, READ, RawClient, WRITE};
use super::vhost_user::FrontEnd;
use super::{Daemon, MIB, create, text, walvisor};

/// Replies of this kind and above are errors.
const FAILED: u16 = 1 << 15;

/// The output of `walvisor ctl ctl WORDS`.
#[track_caller]
fn ctl(dir: &Path, words: &str) -> Value {
    let output = walvisor(dir, &format!("ctl ctl {words}"));
    assert!(output.status.success(), "{words}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
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
        let bucket = format!("walvisor_block_latency_us_bucket{{{labels},le=\"+Inf\"}} ");
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

/// Sends `count` reads at once and asserts that exactly `expected` of them are answered; then removes the limit and
/// asserts that the rest are answered too.
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
fn limits_hold_requests_back_and_can_be_taken_away() {
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
fn limits_hold_up_neither_a_pause_nor_the_end() {
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
