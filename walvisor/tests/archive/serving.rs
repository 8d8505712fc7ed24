//! `archive restore --serve`: disks that are used while their images are fetched.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use walvisor_testkit::nbd::{FLUSH, READ, RawClient, WRITE};
use walvisor_testkit::process::{program, succeed, text, walvisor};
use walvisor_testkit::s3::S3;
use walvisor_testkit::{Daemon, Process, Random};

use super::{BLOCK, exported, refused, run, serve_nbd, two_hosts, with_keys};

/// Blocks of a chunk.
const CHUNK: u64 = 1024;
/// Chunks of the disk whose users are killed: many more than come in any round, on any machine.
const CHUNKS: u64 = 64;
/// How often somebody is killed.
const ROUNDS: u64 = 5;

/// A restore of `disk.img` that serves it. It has said that the disk can be used.
fn serve(dir: &Path, url: &str) -> Process {
    // Not `foreign`: a kill must reach the program itself.
    let mut command = Command::new(program());
    let arguments = ["archive", "restore", url, "restored", "--serve", "--json"];
    command.args(arguments).current_dir(dir);
    with_keys(&mut command);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Process::spawn(&mut command);
    let lines = process.first_lines(1);
    if lines.is_empty() {
        let status = process.wait();
        panic!("not served, {status:?}: {}", process.errors());
    }
    assert!(lines[0].contains("restored/disk.img"), "{}", lines[0]);
    process
}

fn start_daemon(dir: &Path, url: &str) -> (Daemon, RawClient) {
    let spec = format!("path=restored/disk.img,socket=nbd.sock,archive={url}");
    let mut command = serve_nbd(Command::new(program()), &spec);
    let daemon = Daemon::start_as(dir, &mut command, 1);
    let client = RawClient::extended(&dir.join("nbd.sock"));
    (daemon, client)
}

/// The number in a block; `None`: the read failed.
fn read(client: &mut RawClient, block: u64) -> Option<u64> {
    client.request(0, READ, block, block * BLOCK as u64, BLOCK as u64);
    let reply = client.reply();
    // NBD_REPLY_TYPE_OFFSET_DATA: an offset, and the data. NBD_REPLY_TYPE_OFFSET_HOLE: a hole.
    match reply.kind {
        1 => Some(u64::from_le_bytes(reply.data[8..16].try_into().unwrap())),
        2 => Some(0),
        _ => None,
    }
}

/// What each block may have: the number of its last FLUSHed write, and of one that was written
/// after that.
#[derive(Default)]
struct Oracle {
    flushed: HashMap<u64, u64>,
    perhaps: HashMap<u64, u64>,
}

impl Oracle {
    fn allows(&self, block: u64, found: u64) -> bool {
        let flushed = self.flushed.get(&block).copied();
        found == flushed.unwrap_or(archived_number(block))
            || self.perhaps.get(&block) == Some(&found)
    }

    /// A block was read: that is what it has from now on.
    fn note(&mut self, block: u64, found: u64) {
        assert!(self.allows(block, found), "block {block} has {found}");
        if self.perhaps.remove(&block) == Some(found) {
            self.flushed.insert(block, found);
        }
    }
}

/// A disk of so many chunks, in an archive. The first block of each has its number, from 1.
fn archived(home: &Path, url: &str, chunks: u64) {
    let raw = std::fs::File::create(home.join("raw")).unwrap();
    raw.set_len(chunks * CHUNK * BLOCK as u64).unwrap();
    for block in (0..chunks).map(|chunk| chunk * CHUNK) {
        let mut bytes = [block as u8; BLOCK];
        bytes[..8].copy_from_slice(&archived_number(block).to_le_bytes());
        raw.write_all_at(&bytes, block * BLOCK as u64).unwrap();
    }
    succeed(home, "disk import disk.img raw");
    run(home, &format!("push disk.img.wal {url}"));
}

/// The number in a block of that disk.
fn archived_number(block: u64) -> u64 {
    if block.is_multiple_of(CHUNK) {
        block + 1
    } else {
        0
    }
}

/// A client writes, FLUSHes and reads while the images are fetched from far away. The restore, the
/// daemon, or both are killed again and again.
#[test]
fn disks_are_used_while_they_are_fetched_whoever_is_killed() {
    let store = S3::start("bucket");
    let url = store.url("bucket/one");
    let (_place, home, elsewhere) = two_hosts();
    archived(&home, &url, CHUNKS);
    let mut random = Random(11);
    // The first block of each chunk, and one other.
    let mut block = move || random.below(CHUNKS) * CHUNK + random.below(2);
    let mut pauses = Random(12);
    let (mut oracle, mut number) = (Oracle::default(), CHUNKS * CHUNK);
    let mut rounds = 0;
    let map = elsewhere.join("restored/disk.img.fetch");
    loop {
        // Chunks are left in all rounds but the last.
        let far = Duration::from_millis(if rounds < ROUNDS { 2000 } else { 0 });
        store.delay_of("/chunks/", far);
        // It may have ended in the last round.
        let mut serving = (rounds == 0 || map.exists()).then(|| serve(&elsewhere, &url));
        let (daemon, mut client) = start_daemon(&elsewhere, &url);
        let at = block();
        let found = read(&mut client, at).expect("a chunk that somebody fetches");
        oracle.note(at, found);
        // Chunks may come faster than rounds pass.
        if rounds >= ROUNDS || !map.exists() {
            assert!(
                rounds >= 2,
                "nothing was left to test after {rounds} rounds"
            );
            if let Some(serving) = &mut serving {
                assert!(serving.wait().unwrap().success());
            }
            assert!(!map.exists());
            drop(client);
            daemon.stop();
            break;
        }
        let who = rounds % 3;
        let pause = Duration::from_millis(pauses.below(120));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(pause);
                if let Some(serving) = serving.as_ref().filter(|_| who != 0) {
                    serving.signal(Signal::KILL);
                }
                if who != 1 {
                    daemon.signal(Signal::KILL);
                }
            });
            for _ in 0..40 {
                let mut bytes = vec![7; BLOCK];
                let at = block();
                number += 1;
                bytes[..8].copy_from_slice(&number.to_le_bytes());
                // The oracle can tell only one unflushed write to a block from the flushed one.
                if oracle.perhaps.contains_key(&at) {
                    continue;
                }
                oracle.perhaps.insert(at, number);
                let written = client.try_request(WRITE, number, at * BLOCK as u64, &bytes);
                if !written || !client.try_request(FLUSH, number, 0, &[]) {
                    break;
                }
                oracle.perhaps.remove(&at);
                oracle.flushed.insert(at, number);
            }
        });
        drop((client, daemon));
        drop(serving);
        rounds += 1;
    }
    let found = exported(&elsewhere, "restored/disk.img");
    for (block, found) in found.iter().enumerate() {
        assert!(
            oracle.allows(block as u64, *found),
            "block {block} has {found}"
        );
    }
    // The archive goes on with what was written here, once the image is complete.
    store.delay_of("/chunks/", Duration::ZERO);
    run(
        &elsewhere,
        &format!("push restored/disk.img.wal {url} --take-over"),
    );
    run(&home, &format!("restore {url} again"));
    assert!(exported(&home, "again/disk.img") == found);
}

/// While chunks do not come, a daemon ends, and what its client has written stays in the log.
/// Without the restore, reads of chunks fail, and say why. Another restore mends it.
#[test]
fn a_disk_whose_chunks_do_not_come_is_written_and_mended() {
    let store = S3::start("bucket");
    let url = store.url("bucket/one");
    let (_place, home, elsewhere) = two_hosts();
    archived(&home, &url, 6);
    store.delay_of("/chunks/", Duration::from_secs(3600));
    let serving = serve(&elsewhere, &url);
    let push = format!("push restored/disk.img.wal {url} --take-over");
    refused(&elsewhere, &push, "not all of the image");
    let start = || {
        let spec = "--disk path=restored/disk.img,socket=nbd.sock,close-seconds=1";
        let daemon = Daemon::start(&elsewhere, spec);
        (daemon, RawClient::extended(&elsewhere.join("nbd.sock")))
    };
    let (daemon, mut client) = start();
    client.write(1, 7 * BLOCK as u64, &[9; BLOCK]);
    client.flush(2);
    client.request(0, READ, 3, 5 * CHUNK * BLOCK as u64, BLOCK as u64);
    daemon.stop();
    let check = walvisor(&elsewhere, "disk check restored/disk.img");
    let unfetched = text(&check.stderr);
    assert_eq!(check.status.code(), Some(1));
    assert!(unfetched.contains("not whole"), "{unfetched}");
    let (mut daemon, mut client) = start();
    drop(serving);
    assert_eq!(read(&mut client, 5 * CHUNK), None);
    client.write(1, 8 * BLOCK as u64, &[8; BLOCK]);
    client.flush(2);
    store.delay(Duration::ZERO);
    let mut serving = serve(&elsewhere, &url);
    assert!(serving.wait().unwrap().success());
    assert_eq!(read(&mut client, 5 * CHUNK), Some(5 * CHUNK + 1));
    drop(client);
    daemon.signal(Signal::TERM);
    let errors = daemon.errors();
    let why = "nobody fetches it: run 'walvisor archive restore' or 'disk clone --serve' again";
    assert!(errors.contains(why), "{errors}");
    let found = exported(&elsewhere, "restored/disk.img");
    let written = [9, 8].map(|byte| u64::from_le_bytes([byte; 8]));
    assert_eq!((found[0], &found[7..9]), (1, &written[..]));
}
