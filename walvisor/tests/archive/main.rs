//! `walvisor archive`: a log that goes to a store over HTTP, a host that dies, disks that come back
//! elsewhere.

mod damage;
mod serving;
mod versitygw;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use walvisor_testkit::nbd::{FLUSH, PAYLOAD_LEN, RawClient, WRITE, extended_request};
use walvisor_testkit::process::{
    Limited, assert_refused, assert_says, create, foreign, program, succeed, text,
};
use walvisor_testkit::s3::{KEYS, S3};
use walvisor_testkit::{Daemon, Process, Random, test_dir, wait_until};

use versitygw::Versitygw;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 64;

/// `walvisor archive` in `dir`, with the words of `arguments` and keys for the store.
fn archive(dir: &Path, arguments: &str) -> Command {
    let mut command = foreign(dir, program());
    command.arg("archive").args(arguments.split_whitespace());
    with_keys(&mut command);
    command
}

fn with_keys(command: &mut Command) {
    command.envs(KEYS);
}

/// Serves `disk.img` in `dir` with these options too. Returns the daemon and a client.
fn serve(dir: &Path, options: &str) -> (Daemon, RawClient) {
    let spec = format!("path=disk.img,socket=nbd.sock{options}");
    let mut command = serve_nbd(Command::new(program()), &spec);
    let daemon = Daemon::start_as(dir, &mut command, 1);
    let client = RawClient::extended(&dir.join("nbd.sock"));
    (daemon, client)
}

/// Makes `command`, the program, serve a disk over NBD, with keys for the store.
fn serve_nbd(mut command: Command, spec: &str) -> Command {
    command.args(["serve", "nbd", "--control", "ctl", "--disk", spec]);
    with_keys(&mut command);
    command
}

fn output(command: &mut Command) -> Output {
    command.output().expect("timeout(1) starts")
}

/// Runs `walvisor archive` in `dir`, asserts that it succeeds, and returns its stdout.
#[track_caller]
fn run(dir: &Path, arguments: &str) -> String {
    done(&mut archive(dir, arguments))
}

#[track_caller]
fn done(command: &mut Command) -> String {
    let output = output(command);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Asserts that `walvisor archive` refuses that with status 1.
#[track_caller]
fn refused(dir: &Path, arguments: &str, part: &str) {
    assert_refused(&output(&mut archive(dir, arguments)), 1, &[part]);
}

fn number(line: &str, key: &str) -> u64 {
    let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
    line[key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key} in {line}"))
}

/// Directories for two hosts.
fn two_hosts() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let (home, elsewhere) = (place.path().join("home"), place.path().join("elsewhere"));
    fs::create_dir(&home).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    (place, home, elsewhere)
}

/// Serves a disk, writes its first block, flushes, and closes the disk.
fn write_once(dir: &Path, disk: &str, byte: u8) {
    let daemon = Daemon::start(dir, &format!("--disk path={disk},socket=nbd.sock"));
    let mut client = RawClient::extended(&dir.join("nbd.sock"));
    client.write(1, 0, &[byte; BLOCK]);
    client.flush(2);
    drop(client);
    daemon.stop();
}

/// A batch comes as a whole, so the restore opens the disk, within its sandbox, to go back into it.
#[test]
fn a_disk_comes_back_as_of_a_point_in_a_batch() {
    let (_place, home, elsewhere) = two_hosts();
    create(&home, "disk.img", "1M");
    let (daemon, mut client) = serve(&home, ",retain=all");
    let mut requests = Vec::new();
    for block in 0..32_u64 {
        let (offset, length) = (block * BLOCK as u64, BLOCK as u64);
        requests.extend(extended_request(PAYLOAD_LEN, WRITE, block, offset, length));
        requests.extend([1; BLOCK]);
    }
    client.send(&requests);
    (0..32).for_each(|_| assert_eq!(client.reply().kind, 0));
    client.flush(1000);
    drop(client);
    daemon.stop();
    let dumped = done(foreign(&home, program()).args([
        "log",
        "dump",
        "disk.img.wal",
        "--records",
        "--json",
    ]));
    let records = dumped.lines().map(|line| {
        let keys = ["lsn", "payload_offset", "payload_bytes", "sector"];
        keys.map(|key| number(line, key))
    });
    let records: Vec<_> = records.collect();
    // No header comes between it and the one before.
    let pair = records
        .windows(2)
        .find(|pair| pair[1][1] == pair[0][1] + pair[0][2]);
    let pair = pair.expect("a batch of some records");
    let (at, behind) = (pair[0][0], pair[1][3] as usize * 512);
    fs::create_dir(home.join("archive")).unwrap();
    let url = format!("file://{}", home.join("archive").display());
    run(&home, &format!("push disk.img.wal {url}"));
    run(&elsewhere, &format!("restore {url} restored --at lsn:{at}"));
    let restored = elsewhere.join("restored");
    done(foreign(&restored, program()).args(["disk", "export", "disk.img", "raw"]));
    let raw = fs::read(restored.join("raw")).unwrap();
    assert_eq!(raw[behind], 0, "what follows the point does not count");
    assert_eq!(
        raw.iter().filter(|byte| **byte == 1).count(),
        BLOCK * at as usize
    );
}

/// Writes the next block, with its number, and flushes.
fn write_next(client: &mut RawClient, written: &mut u64) {
    assert!(try_next(client, written), "a FLUSH failed");
}

/// A process that follows, and the newest LSN that it has told.
struct Follower {
    process: Process,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Follower {
    /// A push that follows the log in `dir`.
    fn start(dir: &Path, url: &str, told: &'static AtomicU64) -> Self {
        Self::run(dir, &["push", "disk.img.wal", url, "--follow"], told)
    }

    fn run(dir: &Path, arguments: &[&str], told: &'static AtomicU64) -> Self {
        let mut command = Command::new(program());
        command
            .arg("archive")
            .args(arguments)
            .args(["--json", "--interval", "50ms"])
            .current_dir(dir);
        with_keys(&mut command);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Process::spawn(&mut command);
        let lines = Limited(process.stdout.take().expect("a pipe"));
        let thread = std::thread::spawn(move || {
            use std::io::BufRead;
            // A kill may cut the last line.
            for line in std::io::BufReader::new(lines).lines().map_while(Result::ok) {
                let is_there = ["\"restorable\":true", "\"made_us\":"];
                if line.ends_with('}') && is_there.iter().any(|key| line.contains(key)) {
                    told.fetch_max(number(&line, "lsn"), Ordering::SeqCst);
                }
            }
        });
        Self {
            process,
            thread: Some(thread),
        }
    }

    /// Kills it. What it has told is known then.
    fn kill(mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// The same by way of a real server, which is killed again and again while a daemon archives its
/// log. Then the host is gone, and another user restores elsewhere.
#[test]
fn a_real_server_has_what_was_told_to_be_archived() {
    let (place, home, elsewhere) = two_hosts();
    let Some(mut server) = Versitygw::start(place.path()) else {
        return;
    };
    let url = server.url("vm");
    create(&home, "disk.img", "1M --retain 1h");
    let options = format!(",archive={url},archive-interval=50ms");
    let (daemon, mut client) = serve(&home, &options);
    let mut random = Random(3);
    let (mut written, mut kills, mut told) = (0_u64, 0, 0);
    while kills < 3 {
        write_next(&mut client, &mut written);
        if random.below(20) > 0 {
            continue;
        }
        if !server.is_running() {
            server.restart();
            continue;
        }
        let progress = archive_of(&home);
        if progress["restorable"] == true && progress["lsn"].as_u64() > Some(told) {
            told = progress["lsn"].as_u64().unwrap();
            server.kill();
            kills += 1;
        }
    }
    server.restart();
    let before = told;
    wait_until("the archive to go on", || {
        write_next(&mut client, &mut written);
        told = archive_of(&home)["lsn"].as_u64().unwrap();
        told > before
    });
    kill_with_push(daemon);
    fs::remove_dir_all(&home).unwrap();

    // Nobody else may look into a temporary directory.
    for dir in [place.path(), &elsewhere] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let walvisor = place.path().join("walvisor");
    fs::copy(program(), &walvisor).unwrap();
    let as_nobody = |arguments: &str| {
        let mut command = foreign(&elsewhere, "setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&walvisor)
            .args(arguments.split_whitespace());
        with_keys(&mut command);
        done(&mut command)
    };
    let newest = number(
        &as_nobody(&format!("archive restore {url} back --json")),
        "lsn",
    );
    println!("{written} commits, {told} told, {newest} restored, {kills} kills of the server");
    assert!(
        (told..=written).contains(&newest),
        "{told} {newest} {written}"
    );
    for round in 0..4 {
        let at = 1 + random.below(newest);
        as_nobody(&format!("archive restore {url} {round} --at lsn:{at}"));
        as_nobody(&format!("disk export {round}/disk.img {round}.raw"));
        assert_as_of(&elsewhere.join(format!("{round}.raw")), at);
    }
}

/// A replica follows a disk that is written, and can be read. Then it takes over, although the old
/// host still runs.
#[test]
fn a_replica_follows_is_read_and_takes_over() {
    static PUSHED: AtomicU64 = AtomicU64::new(0);
    static FOLLOWED: AtomicU64 = AtomicU64::new(0);
    let store = S3::start("bucket");
    let url = store.url("bucket/one");
    let (_place, home, elsewhere) = two_hosts();
    create(&home, "disk.img", "1M --retain 1h");
    let (daemon, mut client) = serve(&home, "");
    let mut written = 0_u64;
    let mut write_until = |what: &str, enough: &mut dyn FnMut() -> bool| {
        wait_until(what, || {
            write_next(&mut client, &mut written);
            enough()
        });
        written
    };
    let push = Follower::start(&home, &url, &PUSHED);
    write_until("the archive's first images", &mut || {
        PUSHED.load(Ordering::SeqCst) > 0
    });
    // Another push goes on where one was killed.
    push.kill();
    let before = PUSHED.load(Ordering::SeqCst);
    let mut push = Follower::start(&home, &url, &PUSHED);
    write_until("the other push", &mut || {
        PUSHED.load(Ordering::SeqCst) > before
    });
    let follow = Follower::run(&elsewhere, &["follow", &url, "replica"], &FOLLOWED);
    let written = write_until("the replica", &mut || FOLLOWED.load(Ordering::SeqCst) > 10);
    let newest = exported(&elsewhere, "replica/disk.img").into_iter().max();
    assert!((10..=written).contains(&newest.unwrap()), "{newest:?}");
    let part = "another process follows there; end that one first";
    refused(&elsewhere, &format!("promote {url} replica"), part);
    follow.kill();

    let pushed = PUSHED.load(Ordering::SeqCst);
    let promoted = run(&elsewhere, &format!("promote {url} replica --json"));
    assert!(number(&promoted, "lsn") >= pushed, "{promoted} {pushed}");
    // The old host's push ends when it has something to send.
    write_until("the old push's end", &mut || {
        push.process.try_wait().unwrap().is_some()
    });
    let errors = push.process.errors();
    let told = "(a promoted replica) writes this archive now (epoch 3)";
    assert!(errors.contains(told), "{errors}");
    push.kill();
    daemon.kill();
    write_once(&elsewhere, "replica/disk.img", 7);
    let pushed = run(
        &elsewhere,
        &format!("push replica/disk.img.wal {url} --json"),
    );
    assert_eq!(number(&pushed, "lsn"), number(&promoted, "lsn") + 1);
    let part = "the directory is not empty";
    refused(&elsewhere, &format!("follow {url} replica"), part);
}

/// What a daemon says of its log's archive.
fn archive_of(dir: &Path) -> serde_json::Value {
    let told = succeed(dir, "ctl ctl stats --json");
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    told["logs"][0]["archive"].clone()
}

/// A daemon has its log archived: all of it when it ends, and also when it is killed. The disk goes
/// on without the store, and when another push has taken the archive over.
#[test]
fn a_daemon_archives_its_log() {
    let store = S3::start("bucket");
    let url = store.url("bucket/one");
    let (_place, home, elsewhere) = two_hosts();
    create(&home, "disk.img", "1M --retain 1h");
    let options = format!(",archive={url},archive-interval=50ms");
    let start = || serve(&home, &options);
    let in_archive = || {
        let verified = output(&mut archive(&elsewhere, &format!("verify {url} --json")));
        verified
            .status
            .success()
            .then(|| number(&text(&verified.stdout), "lsn"))
    };
    let mut written = 0_u64;
    let (daemon, mut client) = start();
    write_next(&mut client, &mut written);
    wait_until("the archive", || {
        let told = archive_of(&home);
        told["restorable"] == true && told["lsn"] == written
    });
    let told = archive_of(&home);
    assert!(told["running"] == true && told["error"].is_null(), "{told}");
    assert!(told["lag_us"].is_u64(), "{told}");
    // One that can't have the disk leaves the archive to this one.
    let spec = format!("path=disk.img,socket=other.sock{options}");
    let mut second = foreign(&home, program());
    second.args(["serve", "nbd", "--disk", &spec]);
    with_keys(&mut second);
    let locked = output(&mut second);
    assert!(
        !locked.status.success() && text(&locked.stderr).contains("open elsewhere"),
        "{locked:?}"
    );
    write_next(&mut client, &mut written);
    wait_until("the archive to go on", || {
        archive_of(&home)["lsn"] == written
    });
    let shown = succeed(&home, "ctl ctl stats");
    let everything = format!("archive: {url} has everything up to ");
    assert_says(&shown, &[&everything]);
    (0..20).for_each(|_| write_next(&mut client, &mut written));
    drop(client);
    daemon.stop();
    assert_eq!(in_archive(), Some(written));

    let (daemon, mut client) = start();
    (0..20).for_each(|_| write_next(&mut client, &mut written));
    daemon.kill();
    wait_until("the push of a killed daemon", || {
        in_archive() == Some(written)
    });

    let (daemon, mut client) = start();
    write_next(&mut client, &mut written);
    wait_until("another push", || archive_of(&home)["lsn"] == written);
    store.fail_one_in(1);
    (0..20).for_each(|_| write_next(&mut client, &mut written));
    wait_until("an error of the store", || {
        archive_of(&home)["error"].is_string()
    });
    store.fail_one_in(0);
    wait_until("the archive to catch up", || {
        archive_of(&home)["lsn"] == written
    });
    // Another process takes the archive over, and the daemon's push ends.
    run(&home, &format!("push disk.img.wal {url}"));
    wait_until("the end of the daemon's push", || {
        write_next(&mut client, &mut written);
        archive_of(&home)["running"] == false
    });
    let told = archive_of(&home)["error"].to_string();
    assert!(told.contains("writes this archive now"), "{told}");
    let shown = succeed(&home, "ctl ctl stats");
    assert!(shown.contains("; its push has ended: "), "{shown}");
    write_next(&mut client, &mut written);
    drop(client);
    daemon.stop();
}

/// A daemon whose FLUSHes wait for the archive, and a client.
fn start_synchronous(home: &Path, url: &str) -> (Daemon, RawClient) {
    // Only a FLUSH makes the push send something.
    let options = format!(",archive={url},archive-interval=1h,archive-sync=on");
    serve(home, &options)
}

/// Kills a daemon and its push at once, which would end by itself soon after the daemon.
fn kill_with_push(daemon: Daemon) {
    let push = push_of(&daemon);
    rustix::process::kill_process(push, rustix::process::Signal::KILL).unwrap();
    daemon.kill();
}

/// The process that pushes a daemon's log.
fn push_of(daemon: &Daemon) -> rustix::process::Pid {
    let parent = format!("PPid:\t{}\n", daemon.pid());
    let processes = fs::read_dir("/proc").unwrap();
    let mut numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let child = numbers.find(|number: &i32| {
        let of = |name: &str| fs::read_to_string(format!("/proc/{number}/{name}"));
        let is = |name: &str, words: &str| of(name).is_ok_and(|text| text.contains(words));
        // Another one removes the names of sockets.
        is("status", &parent) && is("cmdline", "archive\0push\0")
    });
    rustix::process::Pid::from_raw(child.expect("a push")).expect("a process")
}

/// The number in each block of a disk that is not in use, or is a replica.
#[track_caller]
fn exported(dir: &Path, disk: &str) -> Vec<u64> {
    succeed(dir, &format!("disk export {disk} look.raw --force"));
    numbers(&dir.join("look.raw"))
}

/// The number in each block of an image.
fn numbers(image: &Path) -> Vec<u64> {
    let bytes = fs::read(image).unwrap();
    let blocks = bytes.chunks(BLOCK);
    let numbers = blocks.map(|block| u64::from_le_bytes(block[..8].try_into().unwrap()));
    numbers.collect()
}

/// Asserts that an image has each block as it was as of an LSN.
#[track_caller]
fn assert_as_of(image: &Path, at: u64) {
    let found = numbers(image);
    for block in 0..BLOCKS {
        // The newest write to this block up to there.
        let mut newest = (1..=at).rev().take(BLOCKS as usize);
        let wanted = newest.find(|number| number % BLOCKS == block);
        assert_eq!(
            found[block as usize],
            wanted.unwrap_or(0),
            "block {block} as of lsn:{at}"
        );
    }
}

/// Writes the next block and flushes; returns whether both succeeded.
fn try_next(client: &mut RawClient, written: &mut u64) -> bool {
    let number = *written + 1;
    let block = [&number.to_le_bytes()[..], &[number as u8; BLOCK - 8]].concat();
    client.write(number, number % BLOCKS * BLOCK as u64, &block);
    client.request(0, FLUSH, number, 0, 0);
    let good = client.reply().kind == 0;
    *written += u64::from(good);
    good
}

/// The host is gone at once, daemon and push: every FLUSH that was answered is in the archive. The
/// store fails in between.
#[test]
fn with_archive_sync_every_flush_is_in_the_archive_when_the_host_is_gone() {
    let store = S3::start("bucket");
    let url = store.url("bucket/one");
    let (_place, home, elsewhere) = two_hosts();
    create(&home, "disk.img", "1M");
    let (mut written, mut random) = (0, Random(3));
    for round in 0..3 {
        if round == 2 {
            // What is written without the archive is a hole in it.
            let (daemon, mut client) = serve(&home, "");
            (0..5).for_each(|_| write_next(&mut client, &mut written));
            drop(client);
            daemon.stop();
        }
        let (daemon, mut client) = start_synchronous(&home, &url);
        write_next(&mut client, &mut written);
        wait_until("the push to tell of it", || {
            archive_of(&home)["lsn"] == written
        });
        let told = archive_of(&home);
        assert_eq!(told["waiting_requests"], 0);
        // Also after the archive began anew.
        assert_eq!(told["restorable"], true);
        store.fail_one_in(if round == 1 { 5 } else { 0 });
        for _ in 0..random.below(20) {
            write_next(&mut client, &mut written);
        }
        kill_with_push(daemon);
        store.fail_one_in(0);
        let restored = format!("restored-{round}");
        run(&elsewhere, &format!("restore {url} {restored}"));
        let found = exported(&elsewhere, &format!("{restored}/disk.img"));
        assert_eq!(found.into_iter().max(), Some(written));
    }
}

/// A FLUSH waits for as long as the store is away. Whoever takes the archive over has every FLUSH
/// that was answered, and no later one succeeds.
#[test]
fn with_archive_sync_no_flush_succeeds_once_a_replica_was_promoted() {
    static FOLLOWED: AtomicU64 = AtomicU64::new(0);
    let store = S3::start("bucket");
    let url = store.url("bucket/one");
    let (_place, home, elsewhere) = two_hosts();
    create(&home, "disk.img", "1M --retain 1h");
    let (daemon, mut client) = start_synchronous(&home, &url);
    let mut written = 0;
    write_next(&mut client, &mut written);
    store.fail_one_in(1);
    client.write(7, 2 * BLOCKS * BLOCK as u64, &[0; BLOCK]);
    client.request(0, FLUSH, 8, 0, 0);
    wait_until("a FLUSH that waits, and an error of the store", || {
        let told = archive_of(&home);
        told["waiting_requests"] == 1 && told["error"].is_string()
    });
    store.fail_one_in(0);
    assert_eq!(client.reply().kind, 0);
    let follow = Follower::run(&elsewhere, &["follow", &url, "replica"], &FOLLOWED);
    wait_until("the replica", || {
        write_next(&mut client, &mut written);
        FOLLOWED.load(Ordering::SeqCst) > 0
    });
    follow.kill();
    let promote = || run(&elsewhere, &format!("promote {url} replica"));
    let promoted = std::thread::scope(|scope| {
        let promoted = scope.spawn(promote);
        while try_next(&mut client, &mut written) {}
        promoted.join().unwrap()
    });
    assert!(!try_next(&mut client, &mut written));
    assert_eq!(archive_of(&home)["running"], false);
    drop(client);
    daemon.stop();
    let newest = exported(&elsewhere, "replica/disk.img").into_iter().max();
    let newest = newest.unwrap();
    // The last one may be there without an answer.
    assert!(
        (written..=written + 1).contains(&newest),
        "{promoted}: {newest} of {written}"
    );
}

/// As a file system that is mounted again: Landlock keeps the push to the directory that was there.
#[test]
fn with_archive_sync_flushes_fail_once_the_directory_of_the_archive_is_another() {
    let (place, home, elsewhere) = two_hosts();
    let [store, away] = ["store", "away"].map(|name| place.path().join(name));
    fs::create_dir(&store).unwrap();
    let url = format!("file://{}", store.display());
    create(&home, "disk.img", "1M");
    let (daemon, mut client) = start_synchronous(&home, &url);
    let mut written = 0;
    write_next(&mut client, &mut written);
    fs::rename(&store, &away).unwrap();
    done(foreign(&home, "cp").args(["-r", "../away", "../store"]));
    if try_next(&mut client, &mut written) {
        println!("skipped: this kernel has no Landlock");
        return;
    }
    let told = archive_of(&home);
    let error = told["error"].as_str().unwrap();
    assert_says(error, &["mounted again", "start the process again"]);
    drop(client);
    daemon.stop();
    let (daemon, mut client) = start_synchronous(&home, &url);
    write_next(&mut client, &mut written);
    drop(client);
    daemon.stop();
    run(&elsewhere, &format!("restore {url} back"));
    let newest = exported(&elsewhere, "back/disk.img").into_iter().max();
    assert_eq!(newest, Some(written));
}

/// The first copy of the images counts once an expire has ended, whatever the interval is.
#[test]
fn with_archive_sync_a_flush_waits_for_an_expire_and_no_longer() {
    let (place, home, _) = two_hosts();
    let store = place.path().join("store");
    let notice = store.join("expiring/0.json");
    fs::create_dir_all(store.join("expiring")).unwrap();
    fs::write(&notice, "{}").unwrap();
    create(&home, "disk.img", "1M");
    let url = format!("file://{}", store.display());
    let archive = format!("archive={url},archive-interval=1h,archive-sync=on");
    let spec = format!("path=disk.img,socket=nbd.sock,{archive}");
    let mut command = serve_nbd(Command::new(program()), &spec);
    let told = place.path().join("told");
    let errors = fs::File::create(&told).unwrap();
    let daemon = Daemon::start_telling(&home, &mut command, errors.into(), 1);
    let mut client = RawClient::extended(&home.join("nbd.sock"));
    let writer = std::thread::spawn(move || write_next(&mut client, &mut 0));
    wait_until("the push to see the notice", || {
        let told = fs::read_to_string(&told).unwrap();
        told.contains("removes what is too old (expiring/0.json)")
    });
    assert!(!writer.is_finished());
    fs::remove_file(&notice).unwrap();
    writer.join().unwrap();
    daemon.stop();
}

/// The store is away while a client writes: its writes wait once the archive lacks its limit, and
/// go on when it is back. The archive has no hole. A daemon with writes that wait ends all the same.
#[test]
fn with_archive_limit_writes_wait_and_the_archive_gets_no_hole() {
    let store = S3::start("bucket");
    let url = store.url("bucket/one");
    let (_place, home, elsewhere) = two_hosts();
    create(&home, "disk.img", "1M");
    let options = format!(",archive={url},archive-interval=50ms,archive-limit=1M,retain=");
    let spec = format!("path=disk.img,socket=nbd.sock{options}off");
    let refused = output(&mut serve_nbd(foreign(&home, program()), &spec));
    let refused = text(&refused.stderr);
    assert!(refused.contains("set retain=1h, for example"), "{refused}");
    let (daemon, mut client) = serve(&home, &format!("{options}1h"));
    let mut written = 0_u64;
    write_next(&mut client, &mut written);
    wait_until("the archive", || {
        archive_of(&home)["restorable"] == true && archive_of(&home)["lag_bytes"] == 0
    });
    store.fail_one_in(1);
    let writer = std::thread::spawn(move || {
        while written < 600 {
            write_next(&mut client, &mut written);
        }
        written
    });
    let wait_for_writes = || {
        wait_until("writes to wait", || {
            archive_of(&home)["writes_wait"] == true
        });
        let lacks = archive_of(&home)["lag_bytes"].as_u64().unwrap();
        assert!((1 << 20..2 << 20).contains(&lacks), "{lacks} bytes");
    };
    wait_for_writes();
    let shown = succeed(&home, "ctl ctl stats");
    assert!(shown.contains("MiB, so writes wait"), "{shown}");
    let mut other = RawClient::extended(&home.join("nbd.sock"));
    other.flush(1);
    store.fail_one_in(0);
    let written = writer.join().unwrap();
    wait_until("the archive", || archive_of(&home)["lsn"] == written);
    let told = archive_of(&home);
    assert_eq!(
        (&told["writes_wait"], &told["lag_bytes"]),
        (&false.into(), &0.into())
    );
    run(&elsewhere, &format!("restore {url} back --at lsn:5"));
    let found = exported(&elsewhere, "back/disk.img");
    assert_eq!(found[..7], [0, 1, 2, 3, 4, 5, 0]);

    store.fail_one_in(1);
    let writer = std::thread::spawn(move || {
        // The one that waits fails, when the daemon ends.
        (0..1000).any(|number| {
            other.request(PAYLOAD_LEN, WRITE, number, 0, BLOCK as u64);
            other.send(&[7; BLOCK]);
            other.reply().kind != 0
        })
    });
    wait_for_writes();
    let errors = daemon.stop();
    assert_says(&errors, &["requests that wait for its archive fail"]);
    assert!(writer.join().unwrap());
}

/// Keys are never shown, and a store that is away is named.
#[test]
fn what_can_not_be_done_is_said_in_one_line() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    let place = dir.join("archive");
    let url = format!("file://{}", place.display());
    let says = |words: &str, status: i32, told: &str| {
        let output = output(&mut archive(dir, &words.replace("URL", &url)));
        let errors = assert_refused(&output, status, &[told]);
        assert!(!errors.contains("secret") && errors.len() < 600, "{errors}");
    };
    says("push disk.img.wal http://x/y", 2, "s3:// or file://");
    let with_key = "push disk.img.wal s3://k:secret@b/y";
    says(with_key, 2, "AWS_ACCESS_KEY_ID");
    says("push disk.img.wal file:///nowhere/at/all", 1, "mkdir -p");
    says("expire URL --keep 0s", 2, "give a time such as");
    // Nobody listens where this one did.
    let away = S3::start("bucket").url("bucket/a");
    says(
        &format!("push disk.img.wal {away}"),
        1,
        "nothing answers there: check the endpoint",
    );
    let mut keyless = archive(dir, &format!("push disk.img.wal {away}"));
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
        keyless.env_remove(name);
    }
    // The service that would give some.
    keyless
        .env("HOME", dir.join("."))
        .env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9");
    assert_refused(
        &output(&mut keyless),
        1,
        &["no keys are set: give AWS_ACCESS_KEY_ID"],
    );
    let store = S3::start("bucket");
    let missing = store.url("another/a");
    says(&format!("push disk.img.wal {missing}"), 1, "NoSuchBucket");
    says(&format!("status {missing}"), 1, "make the bucket first");
    for told in ["mkdir -p", "no archive of a log"] {
        says("status URL", 1, told);
        says("expire URL --keep 30d", 1, told);
        says("restore URL back", 1, told);
        says("verify URL", 1, told);
        let _ = fs::create_dir(&place);
    }
    says("push disk.img URL", 1, "this is not a log");
    let pushed = run(dir, &format!("push disk.img.wal {url}"));
    assert!(pushed.contains("archived up to lsn:0"), "{pushed}");
    let why = "nothing in the archive leads to cid:900; it reaches from";
    says("restore URL back --at cid:900", 1, why);
    says("restore URL .", 1, "the directory is not empty");
    says("promote URL typo", 1, "no replica is there");
    assert!(!dir.join("typo").exists());
    run(dir, &format!("restore {url} back"));
    let bytes = succeed(dir, "disk info back/disk.img --json");
    assert_eq!(number(&bytes, "size_bytes"), 1 << 20);
}

#[test]
fn what_is_too_old_expires_and_the_rest_comes_back() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    create(dir, "disk.img", "1M");
    fs::create_dir(dir.join("archive")).unwrap();
    let url = format!("file://{}/archive", dir.display());
    let run = |words: &str| run(dir, words);
    for byte in [1, 2] {
        write_once(dir, "disk.img", byte);
        // Each push copies the images.
        run(&format!("push disk.img.wal {url} --base-every 1ms"));
    }
    let all = format!("expire {url} --keep 1ms --grace 1ms");
    let planned = run(&format!("{all} --dry-run"));
    let told = "would remove copies of the images: ";
    assert!(planned.starts_with(told), "{planned}");
    run(&format!("restore {url} old --at lsn:1"));
    // What is young stays.
    let kept = run(&format!("expire {url} --keep 1d --json"));
    assert_eq!((number(&kept, "images"), number(&kept, "parts")), (0, 0));
    let removed = run(&format!("{all} --json"));
    assert!(number(&removed, "images") > 0, "{removed}");
    assert_eq!(number(&removed, "chunks"), 1, "{removed}");
    let part = "it reaches from lsn:2";
    refused(dir, &format!("restore {url} older --at lsn:1"), part);
    // What a push that was killed has left.
    let left = dir.join("archive/parts/00000001/0000000009#1");
    fs::write(&left, "half a part").unwrap();
    run(&all);
    assert!(!left.exists());
    let mode = |name: &str| fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o777;
    let modes = (mode("archive/log.json"), mode("archive/parts"));
    assert_eq!(modes, (0o600, 0o700));
    run(&format!("verify {url}"));
    let shown = run(&format!("status {url}"));
    assert_says(&shown, &["any point from lsn:", "disk.img (1 MiB)"]);
    run(&format!("restore {url} back"));
    succeed(dir, "disk export back/disk.img back.raw");
    assert_eq!(fs::read(dir.join("back.raw")).unwrap()[0], 2);
}
