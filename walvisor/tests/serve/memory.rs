//! Clients that take all memory they can get: the daemon stays within its limit, and the others are
//! served.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use walvisor_testkit::nbd::{
    FLUSH, PAYLOAD_LEN, READ, RawClient, SimpleClient, WRITE, extended_request, request,
};
use walvisor_testkit::wait_until;

use super::{Daemon, MIB, WALVISOR, create, refused, succeed, test_dir};

/// What an NBD client may ask for.
const LONGEST: u64 = 32 * MIB;

/// A cgroup with a memory limit. Dropping this removes it; its processes must have ended.
struct Cgroup(PathBuf);

impl Cgroup {
    /// `None`: this machine doesn't let the test make one.
    fn with_memory(bytes: u64) -> Option<Self> {
        let cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let places = cgroups.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let (mount, file) = match controllers {
                "" => ("/sys/fs/cgroup", "memory.max"),
                "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
                _ => return None,
            };
            Some((Path::new(mount).join(&path[1..]), file))
        });
        let mut places = places.chain([(Path::new("/sys/fs/cgroup").to_owned(), "memory.max")]);
        places.find_map(|(above, file)| {
            let path = above.join(format!("walvisor-test-{}", std::process::id()));
            fs::create_dir(&path).ok()?;
            let group = Self(path);
            // Without the controller the directory has no such file, and none can be made there.
            fs::write(group.0.join(file), bytes.to_string()).ok()?;
            Some(group)
        })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// A daemon with ten disks, each with a log of its own, at the socket `s`: in a cgroup of 256 MiB
/// if there can be one, else with the limit that it would take from that.
fn ten_disks(dir: &Path) -> (Daemon, Option<Cgroup>) {
    let mut arguments = String::new();
    for disk in 0..10 {
        create(dir, &format!("{disk}.img"), "64M");
        arguments += &format!(" --disk path={disk}.img,socket=s");
    }
    let group = Cgroup::with_memory(256 * MIB);
    let mut command = Command::new("sh");
    match &group {
        Some(group) => {
            let procs = group.0.join("cgroup.procs");
            let script = format!(
                "echo $$ > {} && exec {WALVISOR} serve nbd --control c{arguments}",
                procs.display()
            );
            command.args(["-c", &script]);
        }
        None => {
            println!("no cgroup: --memory-limit instead");
            let script =
                format!("exec {WALVISOR} serve nbd --memory-limit 192M --control c{arguments}");
            command.args(["-c", &script]);
        }
    }
    command.stdin(Stdio::null());
    (
        Daemon::start_telling(dir, &mut command, Stdio::piped(), 10),
        group,
    )
}

/// Sends what the socket takes, without waiting: the daemon may have disconnected the client.
fn send_some(client: &mut UnixStream, bytes: &[u8]) {
    client.set_nonblocking(true).unwrap();
    let _ = client.write(bytes);
    client.set_nonblocking(false).unwrap();
}

/// A client that asks for ten times the longest read and reads no reply, with or without structured
/// replies, or for many short ones, or announces the longest write and sends only some of it.
fn greedy(dir: &Path, number: usize) -> UnixStream {
    let (path, export) = (dir.join("s"), format!("{}.img", number % 10));
    match number % 4 {
        0 => {
            let mut client = RawClient::extended_to(&path, &export);
            for cookie in 0..10 {
                let ask = extended_request(0, READ, cookie, 0, LONGEST);
                send_some(&mut client.socket, &ask);
            }
            client.socket
        }
        1 => {
            let mut client = SimpleClient::connect(&path, &export).unwrap();
            let asks = request(0, READ, 0, 0, LONGEST as u32).repeat(10);
            send_some(&mut client.stream, &asks);
            client.stream
        }
        2 => {
            let mut client = SimpleClient::connect(&path, &export).unwrap();
            let asks = request(0, READ, 0, 0, 512).repeat(1 << 14);
            send_some(&mut client.stream, &asks);
            client.stream
        }
        _ => {
            let mut client = RawClient::extended_to(&path, &export);
            let announced = extended_request(PAYLOAD_LEN, WRITE, 0, 0, LONGEST);
            send_some(&mut client.socket, &announced);
            send_some(&mut client.socket, &vec![7; 4 << 20]);
            client.socket
        }
    }
}

#[test]
fn clients_that_take_all_memory_leave_the_daemon_and_others_alive() {
    let dir = &test_dir();
    let (daemon, group) = ten_disks(dir);
    let path = dir.join("s");
    let mut victim = RawClient::extended_to(&path, "0.img");
    let mut clients: Vec<_> = (0..120).map(|number| greedy(dir, number)).collect();
    for cookie in 0..200 {
        victim.write(cookie, cookie % 16 * 4096, &[cookie as u8; 4096]);
        victim.flush(cookie);
        // Those that announced a write send more of it.
        let number = cookie as usize % 120;
        if number % 4 == 3 {
            send_some(&mut clients[number], &vec![7; 1 << 20]);
        }
    }
    // A large request waits, until the greediest client has left. Who is slow to send or to read so
    // much, as on a busy machine, may be that client.
    const LARGE: usize = 16 << 20;
    for (command, before) in [(WRITE, 9), (READ, 0)] {
        let mut data = vec![before; LARGE];
        wait_until("a large request", || {
            let mut client = SimpleClient::connect(&path, "0.img").unwrap();
            let done = client.end(command, LARGE as u64, LARGE, &mut data, false);
            done.is_ok()
        });
        assert!(data == vec![9; LARGE]);
    }
    let stats = succeed(dir, "ctl c stats");
    println!("{stats}");
    assert!(stats.contains(" of 192 MiB are set aside\n"));
    let peak = daemon.peak_memory();
    println!(
        "at most {} MiB resident, in a cgroup: {}",
        peak >> 20,
        group.is_some()
    );
    assert!(peak <= 192 * MIB * 11 / 10, "{} MiB", peak >> 20);
    victim.request(0, FLUSH, 3, 0, 0);
    assert_eq!(victim.reply().kind, 0);
    // Clients that read nothing do not delay the daemon's end.
    let errors = daemon.stop();
    drop(clients);
    println!("{errors}");
    let told = "an NBD client was disconnected: it held ";
    assert!(errors.contains(told), "{errors}");
}

/// So do disks in memory, and the checksums of the history that a log may keep.
#[test]
fn disks_need_memory_of_the_limit() {
    let dir = &test_dir();
    create(dir, "a.img", "1M");
    let disk = "--disk path=a.img,socket=s";
    for (disks, limit) in [
        (disk, "16M"),
        ("--disk backend=ram,size=64M,socket=r", "64M"),
    ] {
        let begin = format!(
            "walvisor: --memory-limit {limit}: too small: this process and its disks need "
        );
        let serve = format!("serve nbd {disks} --memory-limit {limit}");
        let told = refused(dir, &serve, 2, &[&begin]);
        let least = told[begin.len()..].split(';').next().unwrap();
        let arguments = format!("{disks} --memory-limit {least}");
        assert_eq!(Daemon::start(dir, &arguments).stop(), "");
    }
    let ram = "--disk backend=ram,size=8M,socket=r";
    let arguments = format!("{disk} {ram} --control c --memory-limit 128M");
    let daemon = Daemon::start(dir, &arguments);
    let used = || {
        let stats: serde_json::Value =
            serde_json::from_str(&succeed(dir, "ctl c stats --json")).unwrap();
        stats["memory"]["used_bytes"].as_u64().unwrap()
    };
    let before = used();
    succeed(dir, "ctl c set-retain 10G --disk a.img");
    let more = used() - before;
    assert!((10 << 20..12 << 20).contains(&more), "{more} bytes");
    let too_much = "ctl c set-retain 200G --disk a.img";
    refused(dir, too_much, 1, &["more memory than is free: retain less"]);
    assert!(used() - before == more);
    assert_eq!(daemon.stop(), "");
}
