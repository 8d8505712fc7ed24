//! Disks as they were: `at=` in a disk's spec.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;
use walvisor_testkit::Process;
use walvisor_testkit::nbd::{FLUSH, READ, RawClient, WRITE};

use super::vhost_user::{BUFFER, Client};
use super::{Daemon, MIB, WALVISOR, create, metric, noise, text, walvisor};
use walvisor_storage::{StoreOptions, create_disk};

const TRIM: u16 = 4;

/// Makes a disk of 8 MiB whose daemon was killed after these commits. Returns the state after each
/// of them.
fn killed(dir: &Path, commits: usize) -> Vec<Vec<u8>> {
    create(dir, "disk.img", "8M");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    let mut disk = vec![0; 8 << 20];
    let data = noise(64 << 10);
    let mut states = Vec::new();
    for commit in 0..commits {
        // Each commit overwrites half of the one before.
        let at = MIB as usize + commit * (32 << 10);
        let mut data = data.clone();
        data[..8].copy_from_slice(&commit.to_le_bytes());
        client.write(1, at as u64, &data);
        client.flush(2);
        disk[at..at + data.len()].copy_from_slice(&data);
        states.push(disk.clone());
    }
    daemon.kill();
    states
}

/// The commit IDs in a log.
fn cids(dir: &Path) -> Vec<u64> {
    let dump = text(&walvisor(dir, "log dump disk.img.wal --json").stdout);
    let group = |line: &str| serde_json::from_str::<Value>(line).unwrap()["cid"].as_u64();
    dump.lines().map(|line| group(line).unwrap()).collect()
}

/// All bytes of a served disk.
fn contents(client: &mut RawClient) -> Vec<u8> {
    client.request(0, READ, 9, 0, 8 * MIB);
    let reply = client.reply();
    assert_eq!(reply.kind, 1);
    reply.data[8..].to_vec()
}

/// The bytes of the disk's files.
fn files(dir: &Path) -> Vec<Vec<u8>> {
    let names = fs::read_dir(dir.join("disk.img.wal")).unwrap();
    let mut paths: Vec<_> = names.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.push(dir.join("disk.img"));
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

#[test]
fn ten_points_are_served_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let states = killed(dir, 10);
    let (cids, before) = (cids(dir), files(dir));
    assert_eq!(cids.len(), states.len());
    let disks = cids.iter().map(|cid| {
        format!("--disk path=disk.img,at=cid:{cid},socket=s,serial=cid-{cid},readonly=on ")
    });
    let daemon = Daemon::start(dir, &disks.collect::<String>());
    // The URIs are in the order of the command line.
    for ((cid, uri), state) in cids.iter().zip(&daemon.uris).zip(&states) {
        assert!(uri.contains(&format!("/cid-{cid}?")), "{uri}");
        let copy = format!("copy-{cid}");
        super::client(dir, "nbdcopy", &[uri, &copy]);
        assert!(fs::read(dir.join(copy)).unwrap() == *state, "cid {cid}");
    }
    // Another process looks too.
    let other = format!("--disk path=disk.img,at=cid:{},socket=t", cids[3]);
    let other = Daemon::start(dir, &other);
    let mut client = RawClient::extended(&dir.join("t"));
    assert!(contents(&mut client) == states[3]);
    // A write is refused, and a FLUSH succeeds.
    client.request(1 << 5, WRITE, 1, 0, 512);
    client.send(&[1; 512]);
    assert_eq!(client.reply().kind, 0x8001);
    client.request(0, FLUSH, 2, 0, 0);
    assert_eq!(client.reply().kind, 0);
    drop(client);
    assert_eq!(other.stop(), "");
    // So does one with another door.
    let other = format!("--disk path=disk.img,at=cid:{},socket=u", cids[5]);
    let other = Daemon::start_door(dir, "vhost-user", &other);
    let mut client = Client::connect(&dir.join("u"), 1);
    assert_eq!(client.capacity(), 8 * MIB / 512);
    client.read(0, 0, MIB, BUFFER);
    client.finish(0, 1);
    assert!(client.data(0, BUFFER) == states[5][MIB as usize..][..BUFFER]);
    drop(client);
    assert_eq!(other.stop(), "");
    // Nobody may write meanwhile.
    let refused = walvisor(dir, "disk checkpoint disk.img");
    assert!(text(&refused.stderr).contains("already open elsewhere"));
    assert_eq!(daemon.stop(), "");
    assert!(files(dir) == before, "looks change nothing");
}

/// The client of a scratch disk reads what it wrote; the disk and its log stay as they are.
#[test]
fn writes_to_a_scratch_disk_are_thrown_away() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let states = killed(dir, 4);
    let (cids, before) = (cids(dir), files(dir));
    let disk = format!(
        "--disk path=disk.img,at=cid:{},scratch=on,socket=s",
        cids[1]
    );
    let daemon = Daemon::start(dir, &disk);
    let mut client = RawClient::extended(&dir.join("s"));
    let mut state = states[1].clone();
    let data = noise(MIB as usize);
    for at in [
        3 * MIB as usize / 2,
        5 * MIB as usize,
        8 * MIB as usize - 4096,
    ] {
        let data = &data[..data.len().min(state.len() - at)];
        client.write(1, at as u64, data);
        state[at..at + data.len()].copy_from_slice(data);
    }
    client.request(0, TRIM, 1, 5 * MIB, 8192);
    assert_eq!(client.reply().kind, 0);
    state[5 << 20..(5 << 20) + 8192].fill(0);
    client.flush(2);
    assert!(contents(&mut client) == state);
    assert_eq!(daemon.stop(), "");
    // Another look begins anew.
    let daemon = Daemon::start(dir, &disk);
    let mut client = RawClient::extended(&dir.join("s"));
    assert!(contents(&mut client) == states[1]);
    drop(client);
    assert_eq!(daemon.stop(), "");
    assert!(
        files(dir) == before,
        "the disk and its log are as they were"
    );
}

#[test]
fn looks_at_unreachable_points_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    killed(dir, 2);
    let newest = cids(dir)[1];
    let refused = |disks: &str, status: i32, parts: &[&str]| {
        let output = walvisor(dir, &format!("serve nbd {disks}"));
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
    };
    let future = format!("--disk path=disk.img,socket=s,at=cid:{}", newest + 1);
    let told = format!("the newest is lsn:2 of cid:{newest}");
    refused(&future, 1, &["disk.img.wal", &told]);
    create(dir, "other.img", "1M");
    fs::remove_dir_all(dir.join("other.img.wal")).unwrap();
    refused(
        "--disk path=other.img,socket=s,at=cid:1",
        1,
        &["other.img.wal: no log, so no history"],
    );
    refused(
        "--disk path=disk.img,socket=s --disk path=disk.img,socket=t,at=cid:1",
        2,
        &["disk 'disk.img' has at="],
    );
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    refused(
        "--disk path=disk.img,socket=t,at=cid:1",
        1,
        &["already open elsewhere"],
    );
    assert_eq!(daemon.stop(), "");
}

/// The output of `walvisor ctl ctl WORDS`.
#[track_caller]
fn ctl(dir: &Path, words: &str) -> Value {
    serde_json::from_str(&told(dir, &format!("--json {words}"))).unwrap()
}

/// Who sets a retention reads in words what it means.
#[test]
fn an_amount_of_history_is_said_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let created = walvisor(dir, "disk create a --size 1M --log log --retain 5M");
    assert_eq!(
        text(&created.stdout),
        "a: its log log keeps its last 5 MiB\n",
        "{}",
        text(&created.stderr)
    );
    create(dir, "b", "1M");
    let mut command = Command::new(WALVISOR);
    command.args(["serve", "nbd", "--control", "ctl"]);
    for disk in ["a,log=log,retain=24h", "b"] {
        command.args(["--disk", &format!("path={disk},socket=s")]);
    }
    command
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut daemon = Process::spawn(&mut command);
    let lines = daemon.first_lines(3);
    assert_eq!(lines[2], "log log: keeps the history of the last 24h");
    let told = ctl(dir, "set-retain all --disk a");
    assert_eq!(told["keeps"], "all history, while the log has room");
    let line = "retain=off: the log keeps no history\n";
    assert_eq!(self::told(dir, "set-retain off --disk a"), line);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().unwrap().success());
}

/// Keeping less gives up what is there only if that is asked for; what the present retention
/// has already let go of, or less than was written, is no loss.
#[test]
fn history_is_not_given_up_by_keeping_less_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a", "b"] {
        create(dir, disk, "1M --log log --retain all");
    }
    let serve = "--control ctl --disk-dir . --disk path=a,log=log,socket=s";
    let daemon = Daemon::start(dir, serve);
    let b = fs::canonicalize(dir).unwrap().join("b");
    let b = b.display();
    // There is none yet.
    ctl(dir, "set-retain off");
    ctl(dir, "set-retain all");
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 0, &[1; 4096]);
    client.flush(2);
    // All of it is of the last hour.
    ctl(dir, "set-retain 1h");
    let refused = |words: &str, parts: &[&str]| {
        let output = walvisor(dir, words);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words}: {error}");
        for part in parts {
            assert!(error.contains(part), "{words}: {error}");
        }
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    let lost = format!("(retain=1h), and retain=off would give up a part of it, of a, {b}: it is");
    let lost = [&lost, "kept since 2", "add --give-up-history (in JSON: "];
    refused("ctl ctl set-retain off", &lost);
    assert_eq!(ctl(dir, "snapshots")["retain"], "1h");
    client.write(3, 4096, &[2; 4096]);
    client.flush(4);
    drop(client);
    assert_eq!(daemon.stop(), "");

    // Neither does an open or a new disk.
    let records = || {
        let info = walvisor(dir, "disk info a --log log --json");
        serde_json::from_slice::<Value>(&info.stdout).unwrap()["log"]["history"].clone()
    };
    let before = records();
    let opened = [
        "disk 'a': its log keeps history (retain=1h), and retain=off would give up a part of it, \
         of",
        "open it without retain=, then 'walvisor ctl SOCKET set-retain off --give-up-history'",
    ];
    refused(&format!("serve nbd {serve},retain=off"), &opened);
    let created = [
        "log: ",
        "keeps retain=1h, and retain=30m would give history",
    ];
    refused("disk create c --size 1M --log log --retain 30m", &created);
    assert!(!dir.join("c").exists());
    assert_eq!(records(), before);
    create(dir, "other", "1M");
    let other = "--control ctl --disk-dir . --disk path=other,socket=s";
    let daemon = Daemon::start(dir, other);
    refused(
        "ctl ctl add-disk path=a,log=log,socket=s,retain=off",
        &opened,
    );
    assert_eq!(records(), before);
    ctl(dir, "add-disk path=a,log=log,socket=s");

    let line = told(dir, "set-retain off --disk a --give-up-history");
    let done = format!(
        "retain=off: the log keeps no history; gave up the rest of the history of a, {b} since 2"
    );
    assert!(line.starts_with(&done), "{line}");
    ctl(dir, "checkpoint --disk a");
    // Now there is nothing to lose.
    ctl(dir, "set-retain all --disk a");
    ctl(dir, "set-retain off --disk a");
    assert_eq!(daemon.stop(), "");
}

/// The same as text.
#[track_caller]
fn told(dir: &Path, words: &str) -> String {
    let output = walvisor(dir, &format!("ctl ctl {words}"));
    assert!(output.status.success(), "{words}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A client's disk is named at one moment while the client goes on writing; the log keeps it, and
/// what it is told to keep, over a stop and a kill.
#[test]
fn a_disk_in_use_gets_snapshots_and_keeps_history() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "8M");
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=disk.img,socket=s,retain=64M",
    );
    let mut client = RawClient::extended(&dir.join("s"));
    let mut disk = vec![0; 8 << 20];
    let mut write = |client: &mut RawClient, number: usize| {
        let (at, data) = (number * 7 % 2048 * 4096, [number as u8 + 1; 4096]);
        client.write(1, at as u64, &data);
        disk[at..at + 4096].copy_from_slice(&data);
        disk.clone()
    };
    let mut states = Vec::new();
    for number in 0..20 {
        let state = write(&mut client, number);
        if number % 5 == 4 {
            // No FLUSH: the snapshot makes durable what was written.
            let made = ctl(dir, &format!("snapshot at-{number}"));
            assert_eq!(made["lsn"], number + 1);
            states.push((format!("at-{number}"), state));
        }
    }
    let listed = ctl(dir, "snapshots");
    assert_eq!(listed["retain"], "64M");
    assert_eq!(listed["snapshots"].as_array().unwrap().len(), states.len());
    assert_eq!(ctl(dir, "snapshot-delete at-4")["deleted"], "at-4");
    for (words, expected) in [
        ("snapshot at-9", "exists already"),
        ("snapshot a:b", "is not a valid name for a snapshot"),
        (
            "snapshot-delete at-4",
            "no snapshot 'at-4': the log has at-9, at-14, at-19",
        ),
        (
            "set-retain much",
            "is not an amount of history: give off, all, a time such as 24h",
        ),
        ("set-retain 24", "'24' is not an amount of history"),
    ] {
        let output = walvisor(dir, &format!("ctl ctl {words}"));
        assert_eq!(output.status.code(), Some(1));
        let told = text(&output.stderr);
        assert!(told.contains(expected), "{words}: {told}");
    }
    assert_eq!(ctl(dir, "set-retain 2h")["retain"], "2h");
    let marked = ctl(dir, "mark over-the-socket");
    assert_eq!(
        (&marked["lsn"], &marked["text"]),
        (&21.into(), &"over-the-socket".into())
    );
    let output = walvisor(dir, "ctl ctl mark \u{1b}[2J");
    assert_eq!(output.status.code(), Some(1));
    let told = text(&output.stderr);
    assert!(
        told.contains("is not a valid text for a mark: give one line of 1 to 256 bytes"),
        "{told}"
    );
    daemon.stop();
    let output = walvisor(dir, "disk mark disk.img closed --json");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let dumped = |more: &str| text(&walvisor(dir, &format!("log dump disk.img.wal {more}")).stdout);
    for more in ["", "--records"] {
        let all = dumped(more);
        let place = |text: &str| all.find(text).unwrap_or_else(|| panic!("{text}: {all}"));
        assert!(place("\"over-the-socket\"") < place("\"closed\""));
    }
    assert!(!dumped("--until lsn:21").contains("closed"));
    assert!(!dumped("--since lsn:22").contains("over-the-socket"));
    let group: serde_json::Value = serde_json::from_str(&dumped("--json --since lsn:22")).unwrap();
    assert_eq!(group["marks"][0]["text"], "closed");
    assert_eq!(group["marks"][0]["lsn"], 22);
    let restored = |at: &str| {
        let new = dir.join("new");
        let _ = fs::remove_file(&new);
        let output = walvisor(dir, &format!("disk restore disk.img --at {at} -o new"));
        assert!(output.status.success(), "{}", text(&output.stderr));
        fs::read(new).unwrap()
    };
    let all = |states: &[(String, Vec<u8>)]| {
        for (name, state) in &states[1..] {
            assert!(restored(&format!("snapshot:{name}")) == *state, "{name}");
        }
        // The history is kept too, not only what is named.
        assert!(restored("lsn:5") == states[0].1);
    };
    all(&states);
    let daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    assert_eq!(ctl(dir, "snapshots")["retain"], "2h");
    let mut client = RawClient::extended(&dir.join("s"));
    write(&mut client, 20);
    client.flush(2);
    ctl(dir, "snapshot last");
    daemon.kill();
    all(&states);
    let look = "--disk path=disk.img,at=snapshot:at-14,socket=t";
    let daemon = Daemon::start(dir, look);
    let mut client = RawClient::extended(&dir.join("t"));
    assert!(contents(&mut client) == states[2].1);
    drop(client);
    daemon.stop();
}

/// Ten disks are cloned from one snapshot, and share a log and a daemon. Each has what the snapshot
/// had, and its own writes.
#[test]
fn ten_disks_are_cloned_from_one_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "golden", "8M");
    let daemon = Daemon::start(dir, "--control ctl --disk path=golden,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    let mut state = vec![0; 8 << 20];
    client.write(1, MIB, &noise(64 << 10));
    state[MIB as usize..][..64 << 10].copy_from_slice(&noise(64 << 10));
    ctl(dir, "snapshot installed");
    client.write(1, MIB, &[1; 512]);
    drop(client);
    daemon.stop();
    let names: Vec<_> = (0..10).map(|number| format!("vm-{number}")).collect();
    for name in &names {
        let clone = format!("disk clone golden {name} --new-log vms --at snapshot:installed");
        let cloned = walvisor(dir, &clone);
        assert!(cloned.status.success(), "{}", text(&cloned.stderr));
    }
    let disks = names
        .iter()
        .map(|name| format!("--disk path={name},log=vms,serial={name},socket={name}.sock "));
    let disks: String = disks.collect();
    for after in [false, true] {
        let daemon = Daemon::start(dir, &disks);
        for (number, name) in (1..).zip(&names) {
            let mut client = RawClient::extended(&dir.join(format!("{name}.sock")));
            let mut expected = state.clone();
            if after {
                expected[..4096].fill(number);
            }
            assert!(contents(&mut client) == expected, "{name}");
            client.write(1, 0, &[number; 4096]);
            client.flush(2);
        }
        daemon.kill();
    }
}

/// A disk with a log of its own is restored in place while its daemon goes on with other disks: it
/// is removed, restored, and added again. While it is there, that is refused.
#[test]
fn a_disk_that_a_daemon_has_closed_is_restored_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a", "b"] {
        let created = walvisor(dir, &format!("disk create {disk} --size 1M --retain all"));
        assert!(created.status.success(), "{}", text(&created.stderr));
    }
    let daemon = Daemon::start(
        dir,
        "--disk-dir . --control ctl --disk path=a,serial=a,socket=s --disk \
         path=b,serial=b,socket=t",
    );
    let mut other = RawClient::extended(&dir.join("t"));
    let mut client = RawClient::extended(&dir.join("s"));
    for byte in 1..4 {
        client.write(1, 0, &[byte; 4096]);
        client.flush(2);
    }
    drop(client);
    let restore = "disk restore a --at lsn:1 --in-place";
    let refused = walvisor(dir, restore);
    assert_eq!(refused.status.code(), Some(1));
    let told = text(&refused.stderr);
    assert!(
        told.contains("already open elsewhere, in process"),
        "{told}"
    );
    ctl(dir, "remove-disk a");
    other.write(1, 0, &[9; 4096]);
    other.flush(2);
    let restored = walvisor(dir, restore);
    assert!(restored.status.success(), "{}", text(&restored.stderr));
    ctl(dir, "add-disk path=a,serial=a,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    client.request(0, READ, 9, 0, 4096);
    assert!(client.reply().data[8..] == [1; 4096]);
    drop((client, other));
    daemon.stop();
}

/// The owner of a disk restores it while it is paused, one of two on a log, and the other stays as
/// it is. After a kill both are what they were.
#[test]
fn a_paused_disk_is_restored_in_place_by_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a", "b"] {
        let created = walvisor(
            dir,
            &format!("disk create {disk} --size 1M --retain all --log log"),
        );
        assert!(created.status.success(), "{}", text(&created.stderr));
    }
    let options = "--control ctl --disk path=a,log=log,serial=a,socket=s --disk \
        path=b,log=log,serial=b,socket=t";
    let daemon = Daemon::start(dir, options);
    let mut clients = ["s", "t"].map(|socket| RawClient::extended(&dir.join(socket)));
    for byte in 1..4 {
        for client in &mut clients {
            client.write(1, 0, &[byte; 4096]);
            client.flush(2);
        }
    }
    let byte = |client: &mut RawClient| {
        client.request(0, READ, 9, 0, 4096);
        client.reply().data[8]
    };
    // Another process is sent to the owner, and the owner wants the disk paused.
    let told = walvisor(dir, "disk restore a --log log --at lsn:1 --in-place");
    let told = text(&told.stderr);
    assert!(told.ends_with("/ctl restore\n"), "{told}");
    let refused = walvisor(dir, "ctl ctl restore --disk a --at lsn:1");
    assert_eq!(refused.status.code(), Some(1));
    let told = text(&refused.stderr);
    assert!(
        told.contains("walvisor ctl SOCKET pause --disk a"),
        "{told}"
    );
    let restored = |disk: &str, at: &str| {
        ctl(dir, "pause");
        let told = ctl(dir, &format!("restore --disk {disk} --at {at}"));
        ctl(dir, "resume");
        assert_eq!(told["disk"], disk);
        (told["lsn"].as_u64(), told["from_lsn"].as_u64().unwrap())
    };
    let (lsn, undo) = restored("a", "lsn:1");
    assert_eq!((lsn, undo), (Some(7), 6));
    assert_eq!(clients.each_mut().map(byte), [1, 3]);
    // Nothing is lost by it.
    restored("a", &format!("lsn:{undo}"));
    assert_eq!(clients.each_mut().map(byte), [3, 3]);
    restored("b", "lsn:4");
    assert_eq!(clients.each_mut().map(byte), [3, 2]);
    assert_eq!(restored("b", "newest").0, None);
    ctl(dir, "pause");
    let refused = walvisor(dir, "ctl ctl restore --disk b --at lsn:99");
    let told = text(&refused.stderr);
    assert!(told.contains("the newest is lsn:9"), "{told}");
    ctl(dir, "resume");
    clients[1].write(1, 4096, &[7; 4096]);
    clients[1].flush(2);
    daemon.kill();
    let daemon = Daemon::start(dir, options);
    let mut clients = ["s", "t"].map(|socket| RawClient::extended(&dir.join(socket)));
    assert_eq!(clients.each_mut().map(byte), [3, 2]);
    drop(clients);
    daemon.stop();
    let dump = text(&walvisor(dir, "log dump log").stdout);
    assert!(dump.contains("\"restored in place as of LSN 1\""), "{dump}");
}

/// A log of 2.5 MiB, of a disk of 8 MiB.
fn small_log(dir: &Path) {
    let options = StoreOptions {
        segment_size: 256 << 10,
        max_segments: 10,
        ..StoreOptions::default()
    };
    let log = dir.join("disk.img.wal");
    create_disk(&dir.join("disk.img"), 8 * MIB, &log, &options).unwrap();
}

/// What the only log of a daemon has of its history.
fn log_history(dir: &Path) -> Value {
    ctl(dir, "stats --json")["logs"][0]["history"].clone()
}

/// The bytes of the saved files of the log.
fn saved_bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir.join("disk.img.wal")).unwrap();
    let entries = entries.map(|entry| entry.unwrap());
    let saved = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("saved-"));
    saved.map(|entry| entry.metadata().unwrap().len()).sum()
}

/// A guest writes the whole log many times after a snapshot. What the snapshot needs is saved once,
/// and the log never fills up.
#[test]
fn a_snapshot_costs_what_has_changed_since_and_does_not_fill_the_log() {
    const BLOCKS: u64 = 200;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_log(dir);
    let daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    let mut write = |number: u64| {
        client.write(1, number % BLOCKS * 32_768, &[number as u8; 32_768]);
        client.flush(2);
    };
    (0..BLOCKS).for_each(&mut write);
    ctl(dir, "snapshot monday");
    (1000..1000 + 3 * BLOCKS).for_each(&mut write);
    ctl(dir, "checkpoint");
    let history = log_history(dir);
    assert_eq!(history["pinned_bytes"], 0);
    assert_eq!(history["oldest_snapshot"]["name"], "monday");
    let saved = history["saved_bytes"].as_u64().unwrap();
    assert_eq!(saved, saved_bytes(dir));
    let changed = BLOCKS * 32_768;
    assert!(
        (changed..changed + changed / 16).contains(&saved),
        "{saved}"
    );
    let metrics = told(dir, "stats --prometheus");
    assert_eq!(metric(&metrics, "walvisor_log_saved_bytes"), saved);
    let oldest = "walvisor_log_oldest_snapshot_seconds{log=\"disk.img.wal\",snapshot=\"monday\"} ";
    assert!(metrics.contains(oldest), "{metrics}");
    let stats = told(dir, "stats");
    let line = "for snapshots (1, the oldest 'monday', ";
    assert!(stats.contains(line), "{stats}");
    assert!(stats.contains(" MiB more beside the log"), "{stats}");
    told(dir, "export -o before.img --at snapshot:monday");
    let before = fs::read(dir.join("before.img")).unwrap();
    for (number, block) in before.chunks(32_768).take(BLOCKS as usize).enumerate() {
        assert!(block.iter().all(|byte| *byte == number as u8), "{number}");
    }
    ctl(dir, "snapshot-delete monday");
    assert_eq!(
        (saved_bytes(dir), &log_history(dir)["saved_bytes"]),
        (0, &0.into())
    );
    drop(client);
    assert_eq!(daemon.stop(), "");
}

/// What a snapshot between the two points of a restore in place needs stays in the log, and so does
/// what a look reads.
#[test]
fn a_log_that_is_full_of_pinned_records_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    small_log(dir);
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=disk.img,socket=s,retain=all",
    );
    let mut client = RawClient::extended(&dir.join("s"));
    for name in ["before", "held", "after"] {
        client.write(1, 0, &[7; 512]);
        client.flush(2);
        ctl(dir, &format!("snapshot {name}"));
    }
    drop(client);
    daemon.stop();
    let restored = walvisor(dir, "disk restore disk.img --at snapshot:before --in-place");
    assert!(restored.status.success(), "{restored:?}");
    let daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    ctl(dir, "set-retain off --give-up-history");
    let mut client = RawClient::extended(&dir.join("s"));
    // The other one that was undone.
    ctl(dir, "snapshot-delete after");
    for (begin, end) in [
        ("snapshot other", "snapshot-delete held"),
        ("look --at newest --socket l --keep", "unlook l"),
    ] {
        told(dir, begin);
        let mut number = 0;
        let history = loop {
            client.write(1, number % 200 * 32_768, &[7; 32_768]);
            client.flush(2);
            number += 1;
            let history = log_history(dir);
            if history["pinned_bytes"].as_u64() >= Some(8 * (256 << 10)) {
                break history;
            }
        };
        assert_eq!(history["room_bytes"], 10 * (256 << 10));
        let metrics = told(dir, "stats --prometheus");
        assert!(metric(&metrics, "walvisor_log_pinned_bytes") >= 8 * (256 << 10));
        // The log's thread carries out the second of these after it has looked at the log.
        ctl(dir, "set-retain off");
        ctl(dir, "set-retain off");
        told(dir, end);
        // Now it has seen that the log has room again.
        ctl(dir, "set-retain off");
        ctl(dir, "set-retain off");
    }
    drop(client);
    let errors = daemon.stop();
    let told: Vec<_> = errors.lines().collect();
    assert_eq!(told.len(), 2, "{errors}");
    for (line, who) in told.into_iter().zip([
        "snapshot 'held' needs the log; delete it with 'snapshot-delete held'",
        "a look at a disk needs the log; end it (unlook)",
    ]) {
        let part = format!("80 % of its room, and writes fail at 100 %: {who}");
        assert!(line.contains(&part), "{line}");
    }
}
