//! `walvisor ctl` and daemons with clients.

use std::fs;
use std::io::Write;
use std::thread;

use rustix::net::{RecvFlags, recv};
use rustix::process::Signal;
use serde_json::{Value, json};
use walvisor_storage::{StoreOptions, create_disk};
use walvisor_testkit::nbd::{FLUSH, PAYLOAD_LEN, READ, RawClient, WRITE, extended_request};
use walvisor_testkit::{MemoryFs, wait_until};
use walvisor_tests::run_sessions;

use super::{
    Daemon, MIB, create, ctl, errors, metric, noise, serve_telling, succeed, test_dir, told,
};

/// Replies of this kind and above are errors.
const FAILED: u16 = 1 << 15;

/// Waits until a daemon ends by itself, with status 0 and without a word.
#[track_caller]
fn ends(mut daemon: Daemon) {
    let status = daemon.child.wait().unwrap();
    assert_eq!((status.code(), daemon.errors().as_str()), (Some(0), ""));
}

/// What a change, or a word that is wrong, is answered with, for people.
#[test]
fn each_change_tells_people_in_a_line() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    create(dir, "b.img", "1M --log disk.img.wal");
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk-dir . --disk path=disk.img,socket=s,retain=all",
    );
    let mut client = RawClient::extended(&dir.join("s"));
    for byte in [1, 2] {
        client.write(1, 0, &[byte; 4096]);
        client.flush(2);
    }
    run_sessions("changes", dir, []);
    ends(daemon);
}

#[test]
fn nbd_clients_are_paused_and_see_a_longer_disk() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    let daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 0, &[7; 4096]);

    assert_eq!(ctl(dir, "pause"), json!({ "state": "paused" }));
    assert_eq!(ctl(dir, "pause"), json!({ "state": "paused" }));
    client.request(0, FLUSH, 2, 0, 0);
    // A client that connects meanwhile can do its handshake, and its request waits like the others.
    let mut other = RawClient::extended(&dir.join("s"));
    other.request(0, READ, 3, 0, 4096);
    assert!(!is_answered(&client));
    let stats = ctl(dir, "stats");
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
    assert_eq!(ctl(dir, "stats")["disks"][0]["requests"], 3);

    let name = disk["name"].as_str().unwrap();
    let grown = ctl(dir, &format!("resize --disk {name} --size 4M"));
    assert_eq!(grown["size_bytes"], 4 * MIB);
    // A connected client can access the new sectors, and a new connection learns the new size.
    client.write(4, 4 * MIB - 4096, &[8; 4096]);
    ctl(dir, "checkpoint");
    let image = fs::read(dir.join("disk.img")).unwrap();
    assert_eq!(image.len() as u64, 4 * MIB);
    assert!(image[..4096] == [7; 4096] && image[4 * MIB as usize - 4096..] == [8; 4096]);
    let text = told(dir, "stats --prometheus");
    assert_eq!(metric(&text, "walvisor_block_writes_total"), 2);
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
    let latency = &ctl(dir, "stats")["disks"][0]["latency"];
    assert_eq!(latency["write"]["count"], 2);
    assert!(latency["write"]["p50_us"].as_u64() <= latency["write"]["p99_us"].as_u64());

    // A request that waits for the end of a pause delays nobody.
    ctl(dir, "pause");
    client.request(0, FLUSH, 5, 0, 0);
    assert_eq!(ctl(dir, "shutdown"), json!({}));
    ends(daemon);
    assert!(!dir.join("ctl").exists() && !dir.join("s").exists());
    let info: Value = serde_json::from_str(&succeed(dir, "disk info --json disk.img")).unwrap();
    assert_eq!(
        (&info["size_bytes"], &info["log"]["records"]),
        (&json!(4 * MIB), &json!(0))
    );
}

/// Each log is told once, with its disks below it, in every format.
#[test]
fn stats_list_each_log_once_and_each_disks_cache_mode_and_condition() {
    let dir = &test_dir();
    for name in ["a.img", "b.img"] {
        create(dir, name, "1M --log both");
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
    let stats = ctl(dir, "stats");
    let logs = stats["logs"].as_array().unwrap();
    let found: Vec<_> = logs
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
        found,
        [
            ("both", &json!(["a.img", "b.img"]), &json!(1)),
            ("c.img.wal", &json!(["c.img"]), &json!(0)),
        ]
    );
    let disks = stats["disks"].as_array().unwrap();
    for (disk, (name, cache, log)) in disks.iter().zip([
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
    let table = told(dir, "stats");
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
    let prometheus = told(dir, "stats --prometheus");
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
    ctl(dir, "cache writethrough --disk a.img");
    let set = ctl(dir, "cache writethrough --disk c.img");
    assert_eq!(set["cache"], "unsafe");
    let stats = ctl(dir, "stats");
    let caches = [0, 1].map(|disk| stats["disks"][disk]["cache"].as_str().unwrap());
    assert_eq!(caches, ["writethrough", "unsafe"]);
    drop(client);
    assert_eq!(daemon.stop(), "");
}

/// A disk whose image's file system is full says so, and since when. With on-full=pause writes wait,
/// and no wait holds up the end. How they go on once there is space, the store shows.
#[test]
fn stats_tell_of_a_disk_without_space() {
    const LENGTH: u64 = MIB / 4;
    let Some(small) = MemoryFs::tmpfs("size=2m") else {
        return;
    };
    let dir = &test_dir();
    let image = small.path().join("disk.img");
    let options = StoreOptions {
        segment_size: MIB,
        max_segments: 4,
        ..StoreOptions::default()
    };
    create_disk(&image, 32 * MIB, &dir.join("log"), &options).unwrap();
    let arguments = format!(
        "nbd --control ctl --disk path={},log=log,socket=s,serial=one,on-full=pause",
        image.display()
    );
    let mut daemon = serve_telling(dir, &arguments, 1);
    let mut client = RawClient::extended(&dir.join("s"));
    let sending = thread::spawn(move || {
        let data = noise(LENGTH as usize);
        // The daemon's end ends this.
        for number in 0.. {
            let request =
                extended_request(PAYLOAD_LEN, WRITE, number, number % 128 * LENGTH, LENGTH);
            if client
                .socket
                .write_all(&[&request, &data[..]].concat())
                .is_err()
            {
                break;
            }
        }
    });
    let condition = || ctl(dir, "stats")["disks"][0]["condition"].clone();
    wait_until("the condition", || {
        let told = condition();
        told["name"] == "no_space" && told["pauses_writes"] == json!(true)
    });
    // The keeper says so with its next attempt.
    wait_until("its line", || {
        errors(dir).contains("wait until there is space")
    });
    let table = told(dir, "stats");
    assert!(table.contains(", paused: no space for "), "{table}");
    let condition = condition();
    let error = condition["error"].as_str().unwrap();
    assert!(error.contains("disk.img"), "{error}");
    let since = condition["since_unix_us"].as_u64().unwrap() / 1_000_000;
    let prometheus = told(dir, "stats --prometheus");
    for (name, more, value) in [
        ("condition", ",condition=\"no_space\"", 1),
        ("pauses_writes", "", 1),
        ("refuses_writes", "", 0),
        ("trouble_since_seconds", "", since),
    ] {
        let line =
            format!("walvisor_disk_{name}{{disk=\"one\",transport=\"nbd\"{more}}} {value}\n");
        assert!(prometheus.contains(&line), "{line}:\n{prometheus}");
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.child.wait().unwrap().code(), Some(1));
    sending.join().unwrap();
    assert!(errors(dir).contains("No space left"), "{}", errors(dir));
}

/// Whether there is a reply to read already.
fn is_answered(client: &RawClient) -> bool {
    let mut byte = [0];
    recv(
        &client.socket,
        &mut byte[..],
        RecvFlags::PEEK | RecvFlags::DONTWAIT,
    )
    .is_ok()
}

/// A limit of a byte per second holds a read back for more than an hour. It is lifted, or ends with
/// a pause, a removal or the daemon.
#[test]
fn limits_throttle_requests_and_delay_nothing_else() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    create(dir, "other.img", "1M");
    let disk = |name: &str, limit: &str| format!("--disk path={name},socket=s,serial={limit}");
    let daemon = Daemon::start(
        dir,
        &format!(
            "--control ctl {},ops-per-second=1,ops-burst=7 {},bytes-per-second=1,bytes-burst=4K",
            disk("disk.img", "ops"),
            disk("other.img", "bytes")
        ),
    );
    let limits = |disk: usize| ctl(dir, "stats")["disks"][disk]["limits"].clone();
    assert_eq!(limits(0)["ops_burst"], 7);
    let mut ops = RawClient::extended_to(&dir.join("s"), "ops");
    let ask = |client: &mut RawClient| {
        for cookie in 0..20 {
            client.request(0, READ, cookie, cookie * 4096, 4096);
        }
    };
    let answers = |client: &mut RawClient, cookies: std::ops::Range<u64>| {
        for cookie in cookies {
            assert_eq!(client.reply().cookie, cookie);
        }
    };
    for blocks in [4, 8] {
        let burst = blocks * 4096;
        let limit = format!("limits --disk ops --bytes-per-second 1 --bytes-burst {burst}");
        ctl(dir, &limit);
        ask(&mut ops);
        answers(&mut ops, 0..blocks);
        // A request and its answer later.
        ctl(dir, "stats");
        assert!(!is_answered(&ops), "more than {blocks} went at once");
        let lifted = "limits --disk ops --ops-per-second 0 --bytes-per-second 0";
        ctl(dir, lifted);
        answers(&mut ops, blocks..20);
    }
    // A new limit starts with a full bucket, and clients that stay below a limit are not held back.
    ctl(dir, "limits --disk ops --ops-per-second 100000");
    ask(&mut ops);
    answers(&mut ops, 0..20);

    let mut bytes = RawClient::extended_to(&dir.join("s"), "bytes");
    ask(&mut bytes);
    answers(&mut bytes, 0..1);
    ctl(dir, "pause");
    answers(&mut bytes, 1..20);
    assert_eq!(
        limits(1)["bytes_burst"],
        4096,
        "the limits are as they were"
    );
    ctl(dir, "resume");
    ask(&mut bytes);
    answers(&mut bytes, 0..1);
    assert_eq!(ctl(dir, "remove-disk bytes")["image"], "complete");
    assert!(bytes.is_closed());
    let limit = "limits --disk ops --bytes-per-second 1 --bytes-burst 4K";
    ctl(dir, limit);
    ask(&mut ops);
    answers(&mut ops, 0..1);
    ctl(dir, "shutdown");
    ends(daemon);
}
