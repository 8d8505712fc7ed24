//! Looks at disks in use, which their daemon serves: `walvisor ctl SOCKET look`.

use std::fs;
use std::path::Path;

use serde_json::Value;
use walvisor_testkit::nbd::{READ, RawClient, WRITE};
use walvisor_testkit::wait_until;

use super::{Daemon, MIB, create, noise, text, walvisor};

/// Asks the daemon.
#[track_caller]
fn ctl(dir: &Path, request: &str) -> String {
    let output = walvisor(dir, &format!("ctl ctl {request}"));
    assert!(
        output.status.success(),
        "{request}: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

fn refused(dir: &Path, request: &str) -> String {
    let output = walvisor(dir, &format!("ctl ctl {request}"));
    let error = text(&output.stderr);
    assert_eq!(
        (output.status.code(), error.lines().count()),
        (Some(1), 1),
        "{error}"
    );
    error
}

/// The sockets of the looks that are open.
fn open(dir: &Path) -> usize {
    let looks: Value = serde_json::from_str(&ctl(dir, "looks --json")).unwrap();
    looks["looks"].as_array().unwrap().len()
}

/// A disk of 8 MiB in use, its bytes, and its bytes after some of its commits with the LSN of each.
struct DiskInUse {
    client: RawClient,
    bytes: Vec<u8>,
    states: Vec<(u64, Vec<u8>)>,
}

impl DiskInUse {
    fn new(dir: &Path) -> Self {
        Self {
            client: RawClient::extended(&dir.join("s")),
            bytes: vec![0; 8 << 20],
            states: Vec::new(),
        }
    }

    /// Makes a commit, which overwrites half of the one before.
    fn commit(&mut self, number: usize) {
        let at = MIB as usize + number % 100 * (32 << 10);
        let mut data = noise(64 << 10);
        data[..8].copy_from_slice(&number.to_le_bytes());
        self.client.write(1, at as u64, &data);
        self.client.flush(2);
        self.bytes[at..at + data.len()].copy_from_slice(&data);
    }

    /// Names the present state.
    fn note(&mut self, dir: &Path) {
        let name = format!("state-{}", self.states.len());
        let made: Value =
            serde_json::from_str(&ctl(dir, &format!("--json snapshot {name}"))).unwrap();
        ctl(dir, &format!("snapshot-delete {name}"));
        let lsn = made["lsn"].as_u64().unwrap();
        self.states.push((lsn, self.bytes.clone()));
    }
}

fn contents(socket: &Path) -> Vec<u8> {
    let mut client = RawClient::extended(socket);
    client.request(0, READ, 9, 0, 8 * MIB);
    let reply = client.reply();
    assert_eq!(reply.kind, 1);
    reply.data[8..].to_vec()
}

#[test]
fn ten_looks_beside_a_writer_show_their_points() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "8M");
    let disk = "--control ctl --disk path=disk.img,socket=s,retain=all";
    let daemon = Daemon::start(dir, disk);
    let mut busy = DiskInUse::new(dir);
    for number in 0..10 {
        busy.commit(number);
        busy.note(dir);
    }
    let served: Vec<_> = busy
        .states
        .iter()
        .map(|(lsn, _)| format!("look-{lsn}"))
        .collect();
    for ((lsn, _), socket) in busy.states.iter().zip(&served) {
        let told = ctl(
            dir,
            &format!("look --at lsn:{lsn} --keep --socket {socket}"),
        );
        let uri = told.trim_end().rsplit(' ').next().unwrap();
        let place = dir.join(socket);
        assert_eq!(
            uri,
            format!("nbd+unix:///disk.img?socket={}", place.display())
        );
        assert!(told.starts_with(&format!("serving disk.img as of lsn:{lsn}: 8 MiB at ")));
    }
    assert_eq!(open(dir), 10);
    for number in 10..60 {
        busy.commit(number);
    }
    let check = |busy: &DiskInUse| {
        for ((lsn, state), socket) in busy.states.iter().zip(&served) {
            assert!(contents(&dir.join(socket)) == *state, "LSN {lsn}");
        }
    };
    check(&busy);
    // A checkpoint would take from under the looks what they read.
    let checkpoint = refused(dir, "checkpoint --give-up-history");
    assert!(
        checkpoint.contains("a look at a disk needs the log"),
        "{checkpoint}"
    );
    busy.commit(60);
    check(&busy);
    let copy = format!(
        "nbd+unix:///disk.img?socket={}",
        dir.join(&served[4]).display()
    );
    super::client(dir, "nbdcopy", &[&copy, "copy"]);
    assert!(fs::read(dir.join("copy")).unwrap() == busy.states[4].1);
    super::client(
        dir,
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", "copy", &copy],
    );

    // A look that is ended is gone, with the name of its socket.
    let ended: Value =
        serde_json::from_str(&ctl(dir, &format!("--json unlook {}", served[0]))).unwrap();
    assert_eq!(ended["socket"], dir.join(&served[0]).to_str().unwrap());
    assert_eq!(open(dir), 9);
    let gone = |socket: &str| wait_until(socket, || !dir.join(socket).exists());
    gone(&served[0]);
    let again = refused(dir, &format!("unlook {}", served[0]));
    assert!(again.contains("no look '"), "{again}");
    assert!(refused(dir, "unlook disk.img").contains("several looks at 'disk.img'"));

    // One without --keep ends with its last client.
    ctl(dir, "look --socket newest");
    assert_eq!(open(dir), 10);
    let mut first = RawClient::extended(&dir.join("newest"));
    assert!(contents(&dir.join("newest")) == busy.bytes);
    busy.commit(61);
    first.request(0, READ, 9, MIB, 512);
    assert_eq!(first.reply().kind, 1, "it lives as long as one client");
    drop(first);
    gone("newest");
    assert_eq!(open(dir), 9);

    let taken = refused(dir, &format!("look --socket {}", served[1]));
    assert!(taken.contains("a server listens there"), "{taken}");
    for (request, part) in [
        ("look --at lsn:999999 --socket t", "the newest is lsn:"),
        ("look --at soon --socket t", "'soon' is not a point"),
        ("look --disk other --socket t", "no disk 'other'"),
    ] {
        let error = refused(dir, request);
        assert!(error.contains(part), "{error}");
        gone("t");
    }
    drop(busy);
    // The daemon ends, and the looks with it.
    assert_eq!(daemon.stop(), "");
    served.iter().for_each(|socket| gone(socket));
}

/// What is written to a look is seen there alone, also when the look is at a disk that keeps no
/// history, and through any door.
#[test]
fn a_look_with_scratch_accepts_writes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "8M");
    let daemon = Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let mut busy = DiskInUse::new(dir);
    busy.commit(1);
    ctl(dir, "look --scratch --socket t");
    let mut client = RawClient::extended(&dir.join("t"));
    client.write(1, 0, &[0x55; 4096]);
    client.flush(2);
    busy.commit(2);
    client.request(0, READ, 3, 0, 4096);
    assert!(client.reply().data[8..] == [0x55; 4096]);
    assert!(contents(&dir.join("s")) == busy.bytes);
    drop((client, busy));
    wait_until("the look has ended", || open(dir) == 0);
    assert_eq!(daemon.stop(), "");

    let daemon = Daemon::start_door(
        dir,
        "vhost-user",
        "--control ctl --disk path=disk.img,socket=v",
    );
    ctl(dir, "look --socket t");
    let mut client = RawClient::extended(&dir.join("t"));
    client.request(1 << 5, WRITE, 1, 0, 512);
    client.send(&[1; 512]);
    assert_eq!(client.reply().kind, 0x8001);
    drop(client);
    assert_eq!(daemon.stop(), "");
    let daemon = Daemon::start(dir, "--control ctl --disk backend=ram,size=1M,socket=s");
    assert!(refused(dir, "look --socket t").contains("it has no log"));
    assert_eq!(daemon.stop(), "");
}
