//! `walvisor disk VERB`, whether or not another process has the disk open.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::Value;
use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::wait_until;
use walvisor_tests::have;

use super::{
    Daemon, Process, WALVISOR, create, ctl, noise, read, refused, succeed, test_dir, text, walvisor,
};

/// Makes a disk with 8 KiB in its log, as a killed process leaves it.
fn make(dir: &Path) {
    create(dir, "disk.img", "1M --retain all");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 4096, &noise(8192));
    client.flush(2);
    daemon.kill();
}

/// An answer without what another run has otherwise.
fn answer(dir: &Path, words: &str) -> Value {
    fn clear(value: &mut Value) {
        match value {
            Value::Array(all) => all.iter_mut().for_each(clear),
            Value::Object(all) => {
                for key in [
                    "unix_us",
                    "since_unix_us",
                    "cid",
                    "saved_bytes",
                    "shared",
                    "copied_bytes",
                    // Their names, or the paths of their images.
                    "disks",
                    // What the process has made ready for what comes.
                    "allocated_bytes",
                    "segments",
                    "batches",
                ] {
                    all.remove(key);
                }
                all.values_mut().for_each(clear);
            }
            _ => {}
        }
    }
    let mut answer = serde_json::from_str(&succeed(dir, &format!("{words} --json"))).unwrap();
    clear(&mut answer);
    answer
}

/// What a look at the disk at a point answers. It shows the write, or does not.
fn looked_at(dir: &Path, at: &str, is_written: bool) -> Value {
    let words = format!("disk look disk.img --at {at} --socket l --json");
    let mut command = Command::new(WALVISOR);
    command.args(words.split(' ')).stdout(Stdio::piped());
    let mut look = command.current_dir(dir).spawn().unwrap();
    let mut line = String::new();
    // The command prints a line once clients can connect.
    BufReader::new(look.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let mut answer: Value = serde_json::from_str(&line).unwrap();
    let mut client = RawClient::extended(&dir.join("l"));
    let expected = if is_written {
        noise(8192)
    } else {
        vec![0; 8192]
    };
    assert!(read(&mut client, 4096, 8192) == expected, "{at}");
    drop(client);
    // The look ends with its client, and then its socket is gone.
    assert!(look.wait().unwrap().success(), "{at}");
    wait_until("the end of the look", || !dir.join("l").exists());
    let all = answer.as_object_mut().unwrap();
    all.retain(|key, _| !["socket", "uri"].contains(&key.as_str()));
    answer
}

/// What all verbs answer for a disk. `pause` is called before the disk is restored in place.
fn answers(dir: &Path, pause: impl FnOnce()) -> Vec<Value> {
    let mut all: Vec<_> = [
        "disk snapshot disk.img one",
        "disk snapshot disk.img two --alone",
        "disk mark disk.img here",
        "disk snapshots disk.img",
        "disk export disk.img now.img",
        "disk export disk.img now.img --force",
        "disk restore disk.img --at snapshot:one -o then.img",
        "disk clone disk.img clone.img --at snapshot:one",
        "disk resize disk.img --size 2M",
        "disk snapshot-delete disk.img two",
        "disk info disk.img",
        "disk check disk.img",
        "disk changes disk.img --from lsn:0",
        "disk retain disk.img 50M --give-up-history",
    ]
    .into_iter()
    .map(|words| answer(dir, words))
    .collect();
    // The numbers of the commits are those of other groups.
    let points = answer(dir, "disk points disk.img");
    let named = |point: &&Value| point["kind"] != "commit";
    let points_at = points["points"].as_array().unwrap().iter();
    all.extend(points_at.filter(named).cloned());
    all.push(points["commits"].clone());
    all.push(points["oldest"].clone());
    for (words, part) in [
        ("snapshot disk.img one", "one"),
        ("snapshot-delete disk.img two", "two"),
        ("resize disk.img --size 1M", "1048576"),
        ("export disk.img now.img", "exists"),
        ("restore disk.img --at lsn:999 -o new.img", "lsn:999"),
        ("checkpoint disk.img", "history"),
        ("retain disk.img off", "--give-up-history"),
        ("clone disk.img clone.img", "exists"),
        (
            "clone disk.img new.img --new-log disk.img.wal",
            "its source's log",
        ),
        ("clone disk.img new.img --at lsn:999", "lsn:999"),
        ("changes disk.img --from lsn:999", "lsn:999"),
    ] {
        refused(dir, &format!("disk {words}"), 1, &[part]);
    }
    assert!(!dir.join("new.img").exists(), "half a restore");
    // A log of its own, and nothing in it yet.
    let clone = answer(dir, "disk check clone.img");
    assert_eq!(clone["log"]["records"], 0, "{clone}");
    all.push(looked_at(dir, "lsn:0", false));
    all.push(looked_at(dir, "newest", true));
    all.push(
        succeed(dir, "log dump disk.img.wal --records --json")
            .lines()
            .count()
            .into(),
    );
    for copy in ["now.img", "then.img", "clone.img"] {
        let copied = fs::read(dir.join(copy)).unwrap();
        assert!(
            copied.len() == 1 << 20 && copied[4096..12288] == noise(8192),
            "{copy}"
        );
    }
    pause();
    all.push(answer(dir, "disk restore disk.img --at lsn:0 --in-place"));
    // It holds what is between the two points of the restore.
    all.push(answer(dir, "disk snapshot-delete disk.img one"));
    assert_eq!(
        succeed(dir, "disk checkpoint disk.img --give-up-history"),
        ""
    );
    all
}

#[test]
fn a_disk_that_is_in_use_answers_as_one_that_is_not() {
    let [closed, used] = [test_dir(), test_dir()];
    make(&closed);
    let expected = answers(&closed, || ());
    make(&used);
    let daemon = Daemon::start(&used, "--control ctl --disk path=disk.img,socket=s");
    let found = answers(&used, || {
        let restore = "disk restore disk.img --at lsn:0 --in-place";
        refused(&used, restore, 1, &["/ctl pause --disk disk.img'"]);
        ctl(&used, "pause --disk disk.img");
    });
    assert_eq!(expected, found);
    assert_eq!(daemon.stop(), "");
    // Both disks are what they were before the write.
    for dir in [&closed, &used] {
        assert!(fs::read(dir.join("disk.img")).unwrap() == [0; 2 << 20]);
    }
}

/// However a disk is named, and only if its process can be believed.
#[test]
fn only_the_process_that_has_the_log_is_asked() {
    if !have("flock", "util-linux") || !have("setpriv", "util-linux") {
        return;
    }
    let dir = &test_dir();
    make(dir);
    symlink("disk.img", dir.join("link.img")).unwrap();
    let absolute = dir.join("disk.img").display().to_string();
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=disk.img,socket=s,serial=other-name",
    );
    for (number, path) in [
        "disk.img",
        "./disk.img",
        &absolute,
        "link.img --log disk.img.wal",
    ]
    .into_iter()
    .enumerate()
    {
        let (path, log) = path.split_once(' ').unwrap_or((path, ""));
        succeed(dir, &format!("disk snapshot {path} s{number} {log}"));
    }
    let in_use = "already open elsewhere, in process ";
    refused(
        dir,
        "disk snapshot disk.img s9 --no-owner",
        1,
        &[in_use, "or ask it"],
    );
    assert_eq!(daemon.stop(), "");

    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let error = refused(dir, "disk snapshot disk.img s9", 1, &[in_use]);
    assert!(!error.contains("ask it"), "{error}");
    assert_eq!(daemon.stop(), "");

    // A process with the log that names the socket of another.
    create(dir, "mine.img", "1M");
    let daemon = Daemon::start(dir, "--control ctl --disk path=mine.img,socket=s");
    let mut command = Command::new("flock");
    command.args(["--no-fork", "disk.img.wal/control", "sh", "-c", "read line"]);
    command.args(["--control", "ctl"]).stdin(Stdio::piped());
    let liar = Process::spawn(command.current_dir(dir));
    wait_until("the lock", || {
        let output = walvisor(dir, "disk snapshots disk.img");
        text(&output.stderr).contains("ask it: walvisor ctl ")
    });
    drop(liar);
    assert_eq!(daemon.stop(), "");
}

/// However other disks of the process are called: the image counts, and its log.
#[test]
fn no_other_disk_of_the_process_is_taken_for_the_one_that_is_named() {
    let dir = &test_dir();
    make(dir);
    create(dir, "other.img", "1M --retain all");
    create(dir, "quiet.img", "1M --log disk.img.wal");
    fs::set_permissions(dir.join("disk.img"), Permissions::from_mode(0o640)).unwrap();
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=disk.img,socket=s,serial=other.img \
         --disk path=other.img,socket=t,serial=disk.img",
    );
    succeed(dir, "disk export disk.img now.img");
    let copied = fs::read(dir.join("now.img")).unwrap();
    assert!(copied[4096..12288] == noise(8192), "another disk");
    let mode = fs::metadata(dir.join("now.img")).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o640);
    // The disk is not on that log.
    let wrong = "does not serve this disk of it";
    for verb in [
        "export now2.img",
        "resize --size 2M",
        "restore --at lsn:0 --in-place",
    ] {
        let (verb, rest) = verb.split_once(' ').unwrap();
        let words = format!("disk {verb} other.img {rest} --log disk.img.wal");
        refused(dir, &words, 1, &["other.img: process ", wrong]);
    }
    // It is, and nobody serves it. What concerns the whole log can be done all the same.
    refused(
        dir,
        "disk export quiet.img out --log disk.img.wal",
        1,
        &[wrong],
    );
    succeed(dir, "disk snapshot quiet.img all --log disk.img.wal");
    let listed = succeed(dir, "disk snapshots disk.img");
    assert!(listed.starts_with("all  "), "{listed}");
    // Only a closed disk shrinks.
    let in_use = "already open elsewhere, in process ";
    refused(
        dir,
        "disk resize disk.img --size 512K --shrink",
        1,
        &[in_use],
    );
    assert_eq!(daemon.stop(), "");
}

/// Root does not do what the process of another user says.
#[test]
fn a_process_of_another_user_is_not_asked() {
    if !have("setpriv", "util-linux") {
        return;
    }
    let dir = &test_dir();
    make(dir);
    let program = dir.join("walvisor");
    fs::copy(WALVISOR, &program).unwrap();
    let log = dir.join("disk.img.wal");
    let files = fs::read_dir(&log)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    for path in files.chain([dir.to_path_buf(), log, dir.join("disk.img")]) {
        chown(&path, Some(65534), Some(65534)).unwrap();
    }
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&program)
        .args("serve nbd --control ctl --disk path=disk.img,socket=s".split(' '));
    let daemon = Daemon::start_as(dir, &mut command, 1);
    let parts = ["already open elsewhere", "or ask it: walvisor ctl "];
    refused(dir, "disk export disk.img out.img", 1, &parts[..1]);
    refused(dir, "disk snapshot disk.img s", 1, &parts);
    assert!(!dir.join("out.img").exists());
    assert_eq!(daemon.stop(), "");
}

/// While the process writes, copies to the image and recycles its segments.
#[test]
fn a_log_is_read_while_its_process_writes_it() {
    let dir = &test_dir();
    create(dir, "disk.img", "64M --retain 8M");
    let daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = RawClient::extended(&dir.join("s"));
            let data = noise(256 << 10);
            let mut rounds = 0;
            // At least as much as fills a few segments; no more than 2 GiB.
            while rounds < 1024 || rounds < 8192 && !stop.load(Ordering::Relaxed) {
                client.write(1, rounds % 256 * (256 << 10), &data);
                if rounds % 4 == 0 {
                    client.flush(2);
                }
                rounds += 1;
            }
        });
        let mut newest = 0;
        for round in 0.. {
            if round >= 4 && writer.is_finished() {
                break;
            }
            let info = answer_in_use(dir, "disk info disk.img");
            let lsn = info["log"]["last_lsn"].as_u64().unwrap();
            assert!(lsn >= newest, "{lsn} after {newest}");
            newest = lsn;
            let check = answer_in_use(dir, "disk check disk.img");
            assert_eq!(check["clean"], true, "{check}");
            let points = answer_in_use(dir, "disk points disk.img");
            let oldest = points["oldest"]["lsn"].as_u64().unwrap();
            let commits = points["points"].as_array().unwrap();
            assert!(
                commits
                    .iter()
                    .all(|point| point["lsn"].as_u64() > Some(oldest))
            );
            let changes = answer_in_use(dir, "disk changes disk.img --from newest");
            assert_eq!(changes["changed_bytes"], 0, "{changes}");
            let records = read_in_use(dir, "log dump disk.img.wal --records --json");
            let lsns: Vec<_> = records.lines().map(lsn_of).collect();
            assert!(lsns.is_sorted_by(|one, next| one + 1 == *next), "{lsns:?}");
            stop.store(round >= 4, Ordering::Relaxed);
        }
        writer.join().unwrap();
    });
    // Nobody holds it any more.
    assert_eq!(daemon.stop(), "");
    let check = answer(dir, "disk check disk.img");
    assert_eq!(check["clean"], true, "{check}");
}

/// What a command prints. The writer may need the log's room, until it ends.
fn read_in_use(dir: &Path, words: &str) -> String {
    loop {
        let output = walvisor(dir, words);
        if output.status.success() {
            return text(&output.stdout);
        }
        let error = text(&output.stderr);
        assert!(error.contains("the log needed room"), "{words}: {error}");
    }
}

/// The same, of one that prints JSON.
fn answer_in_use(dir: &Path, words: &str) -> Value {
    serde_json::from_str(&read_in_use(dir, &format!("{words} --json"))).unwrap()
}

/// The LSN in a line of `log dump`.
fn lsn_of(line: &str) -> u64 {
    let record: Value = serde_json::from_str(line).unwrap();
    record["lsn"].as_u64().unwrap()
}
