//! A base image whose file system does not answer: only who needs that file system has to wait.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process, waitid};
use walvisor_testkit::nbd::{BLOCK_STATUS, READ, RawClient};
use walvisor_testkit::{Process, wait_until};
use walvisor_tests::have;

use super::{
    Daemon, client, create, ctl, ctl_begun, ctl_refused, disk_names, disk_stats, read, test_dir,
    told,
};

/// No request takes this long.
const LIMIT: Duration = Duration::from_secs(60);

/// An image in a file system whose program can be halted.
pub(super) struct SlowFileSystem {
    fuse: Process,
    mountpoint: std::path::PathBuf,
}

impl SlowFileSystem {
    /// 16 MiB at `mountpoint/disk.img`. `None`: this machine has no FUSE, and `skipped: why` was
    /// printed.
    fn mount(mountpoint: &Path) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() {
            println!("skipped: no /dev/fuse");
            return None;
        }
        std::fs::create_dir(mountpoint).unwrap();
        let image = mountpoint.join("disk.img");
        let mut command = Command::new("nbdfuse");
        command
            // Without this the kernel would cache attributes for a second instead of asking the
            // program.
            .args(["-o", "attr_timeout=0"])
            .arg(&image)
            .args(["--command", "nbdkit", "-s", "--exit-with-parent"])
            .args(["memory", "16M"])
            .stdin(Stdio::null());
        let fuse = Process::spawn(&mut command);
        let slow = Self {
            fuse,
            mountpoint: mountpoint.to_owned(),
        };
        wait_until("nbdfuse's mount", || image.exists());
        Some(slow)
    }

    /// Halts the program. SIGSTOP goes to one of its threads, and the others still answer until
    /// that thread has run.
    pub(super) fn halt(&self) {
        self.fuse.signal(Signal::STOP);
        let stopped = WaitId::Pid(self.fuse.pid());
        let status = waitid(stopped, WaitIdOptions::STOPPED).unwrap().unwrap();
        assert!(status.stopped(), "nbdfuse ended");
    }

    /// Lets the program run again.
    pub(super) fn resume(&self) {
        self.fuse.signal(Signal::CONT);
    }
}

impl Drop for SlowFileSystem {
    fn drop(&mut self) {
        // A process that waits for a halted program could not be killed.
        self.fuse.signal(Signal::CONT);
        let unmount = Command::new("fusermount3")
            .arg("-u")
            .arg(&self.mountpoint)
            .status();
        if !unmount.is_ok_and(|status| status.success()) {
            self.fuse.signal(Signal::KILL);
        }
        let _ = self.fuse.wait();
    }
}

/// A file system as above. `None`: this machine has none, and `skipped: why` was printed.
pub(super) fn mount(dir: &Path) -> Option<SlowFileSystem> {
    let here = have("nbdsh", "python3-libnbd")
        && have("nbdfuse", "libnbd-bin")
        && have("nbdkit", "nbdkit")
        && have("fusermount3", "fuse3");
    here.then(|| SlowFileSystem::mount(&dir.join("slow")))
        .flatten()
}

#[test]
fn a_file_system_that_is_slow_to_find_holes_delays_nobody_else() {
    let dir = &test_dir();
    let Some(slow) = mount(dir) else {
        return;
    };
    create(dir, "other.img", "16M");
    let daemon = Daemon::start(
        dir,
        "--disk path=slow/disk.img,log=slow-log,socket=s --disk path=other.img,socket=t",
    );
    let mut asking = RawClient::extended(&dir.join("s"));
    slow.halt();
    asking.request(0, BLOCK_STATUS, 1, 0, 16 << 20);
    // Clients of the other disk, more than there are threads; each sends every kind of request.
    let script = "
clients = [nbd.NBD() for _ in range(CLIENTS)]
for c in clients:
    c.add_meta_context('base:allocation')
    c.connect_unix('t')
for n, c in enumerate(clients):
    c.pwrite(bytes([n + 1]) * 4096, n * 4096)
    c.flush()
    assert c.pread(4096, n * 4096) == bytes([n + 1]) * 4096
    found = []
    c.block_status(4096, n * 4096, lambda *told: found.append(told))
    assert found[0][2] == [4096, 0], found
print('all')
";
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let script = script.replace("CLIENTS", &(threads + 1).min(100).to_string());
    assert_eq!(client(dir, "nbdsh", &["-c", &script]), "all\n");
    // The client that asked also goes on, with requests that do not need that file system.
    asking.write(2, 4096, &[7; 4096]);
    asking.flush(3);
    slow.resume();
    let told = asking.reply();
    assert_eq!((told.kind, told.cookie), (6, 1));
    drop(asking);
    assert_eq!(daemon.stop(), "");
}

/// Has the program run again after [`LIMIT`], so that a request that waits for it ends, and the
/// test fails. It does nothing once what is returned is dropped.
fn resume_late(slow: &SlowFileSystem) -> Sender<()> {
    let (over, wait) = channel();
    let fuse = slow.fuse.pid();
    thread::spawn(move || {
        if wait.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            let _ = kill_process(fuse, Signal::CONT);
        }
    });
    over
}

const SLOW_AND_A: &str = "--control ctl --disk-dir in \
    --disk path=slow/disk.img,log=slow-log,socket=s,serial=slow --disk path=in/a,socket=s,serial=a";

/// A slow file system, and the daemon of its disk and of another; two more could be added. `None`:
/// as for [`mount`].
fn serve_slow_and_a(dir: &Path) -> Option<(SlowFileSystem, Daemon)> {
    let slow = mount(dir)?;
    std::fs::create_dir(dir.join("in")).unwrap();
    for disk in ["in/a", "in/b", "in/c"] {
        create(dir, disk, "1M");
    }
    Some((slow, Daemon::start(dir, SLOW_AND_A)))
}

/// A client of the slow disk, whose file system it halts once 4 KiB are stable.
fn write_and_halt(dir: &Path, slow: &SlowFileSystem) -> RawClient {
    let mut client = RawClient::extended_to(&dir.join("s"), "slow");
    client.write(1, 4096, &[7; 4096]);
    client.flush(2);
    slow.halt();
    client
}

/// Asks for bytes that are in the image only, and waits until the daemon at `ctl` does, too.
pub(super) fn read_from_image(dir: &Path, client: &mut RawClient) {
    client.request(0, READ, 3, 1 << 20, 4096);
    wait_until("the read", || disk_stats(dir, "slow")["reads"] == 1);
}

/// As [`serve_slow_and_a`], and the slow disk does not answer a read.
fn serve_and_read(dir: &Path) -> Option<(SlowFileSystem, Daemon, RawClient)> {
    let (slow, daemon) = serve_slow_and_a(dir)?;
    let mut client = write_and_halt(dir, &slow);
    read_from_image(dir, &mut client);
    Some((slow, daemon, client))
}

/// More clients of another disk than there are threads go on beside a read of an image that does not
/// answer.
#[test]
fn a_read_that_is_not_answered_delays_no_other_disk() {
    let dir = &test_dir();
    let Some((slow, daemon)) = serve_slow_and_a(dir) else {
        return;
    };
    let mut client = write_and_halt(dir, &slow);
    let late = resume_late(&slow);
    read_from_image(dir, &mut client);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let others = (0..=threads).map(|_| RawClient::extended_to(&dir.join("s"), "a"));
    for mut other in others.collect::<Vec<_>>() {
        other.write(1, 0, &[8; 4096]);
        other.flush(2);
    }
    assert!(late.send(()).is_ok(), "a disk waited for another's image");
    slow.resume();
    assert_eq!(client.reply().cookie, 3);
    drop(client);
    assert_eq!(daemon.stop(), "");
}

/// A disk is to be added whose log is where nobody answers.
#[test]
fn an_addition_that_waits_for_a_directory_delays_no_other() {
    let dir = &test_dir();
    let Some((slow, daemon)) = serve_slow_and_a(dir) else {
        return;
    };
    slow.halt();
    let late = resume_late(&slow);
    let mut waits = ctl_begun(dir, "add-disk path=in/b,log=slow/log,socket=s,serial=b");
    ctl(dir, "add-disk path=in/c,socket=s,serial=c");
    ctl(dir, "remove-disk c");
    assert!(late.send(()).is_ok(), "a disk waited for another's log");
    slow.resume();
    assert!(!waits.wait().unwrap().success());
    assert_eq!(disk_names(dir), ["slow", "a"]);
    daemon.stop();
}

#[test]
fn a_removal_that_waits_for_its_image_delays_no_other_request() {
    removal_delays_no_other_request(false);
}

#[test]
fn a_removal_that_waits_for_a_read_delays_no_other_request() {
    removal_delays_no_other_request(true);
}

fn removal_delays_no_other_request(reads: bool) {
    let dir = &test_dir();
    let Some((slow, daemon)) = serve_slow_and_a(dir) else {
        return;
    };
    let client = write_and_halt(dir, &slow);
    let mut client = reads.then_some(client);
    if let Some(client) = &mut client {
        read_from_image(dir, client);
    }
    let mut removal = ctl_begun(dir, "remove-disk slow");
    let late = resume_late(&slow);
    // The disk leaves the list at once, and has to be read and copied then.
    wait_until("the removal", || disk_names(dir) == ["a"]);
    ctl(dir, "add-disk path=in/b,socket=s,serial=b");
    assert_eq!(disk_names(dir), ["a", "b"]);
    let busy = "disk 'slow' is being added or removed: wait for that, then add it again";
    ctl_refused(dir, "add-disk path=in/c,socket=s,serial=slow", &[busy]);
    ctl(dir, "limits --disk a --ops-per-second 1000");
    ctl(dir, "remove-disk a");
    let mut other = RawClient::extended_to(&dir.join("s"), "b");
    other.write(1, 0, &[8; 4096]);
    other.flush(2);
    assert!(late.send(()).is_ok(), "a request waited for the image");
    slow.resume();
    if let Some(client) = &mut client {
        assert_eq!(client.reply().cookie, 3);
    }
    assert!(removal.wait().unwrap().success());
    assert_eq!(disk_names(dir), ["b"]);
    assert_eq!(daemon.stop(), "");
    let image = std::fs::read(dir.join("slow/disk.img")).unwrap();
    assert_eq!(image[4096..8192], [7; 4096]);
}

/// Asserts that the daemon ends with status 1 and one line that says `why`.
#[track_caller]
fn ends_because(mut daemon: Daemon, why: &str) {
    let status = daemon.child.wait().unwrap();
    let told = daemon.errors();
    assert_eq!(status.code(), Some(1), "{told}");
    assert!(told.contains(why), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
}

/// Asserts that the daemon ends because of its slow disk, and that the next one has what was
/// stable.
#[track_caller]
fn ends_without_answer(daemon: Daemon, dir: &Path, slow: &SlowFileSystem) {
    ends_because(daemon, "disk 'slow' does not answer");
    slow.resume();
    let daemon = Daemon::start(dir, SLOW_AND_A);
    let mut client = RawClient::extended_to(&dir.join("s"), "slow");
    assert_eq!(read(&mut client, 4096, 4096), [7; 4096]);
    drop(client);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_daemon_ends_in_a_bounded_time_though_a_disk_does_not_answer() {
    let dir = &test_dir();
    let Some((slow, daemon, _client)) = serve_and_read(dir) else {
        return;
    };
    daemon.signal(Signal::TERM);
    ends_without_answer(daemon, dir, &slow);
}

/// Its image has to be copied.
#[test]
fn a_log_that_is_not_closed_is_named() {
    let dir = &test_dir();
    let Some((slow, mut daemon)) = serve_slow_and_a(dir) else {
        return;
    };
    drop(write_and_halt(dir, &slow));
    end(&mut daemon);
    let log = dir.join("slow-log").canonicalize().unwrap();
    let why = format!("ERROR log {} is not closed, and another", log.display());
    ends_because(daemon, &why);
}

/// Sends SIGTERM until the daemon has ended.
#[track_caller]
pub(super) fn end(daemon: &mut Daemon) {
    wait_until("the daemon's end", || {
        daemon.signal(Signal::TERM);
        daemon.child.try_wait().unwrap().is_some()
    });
}

#[test]
fn a_second_signal_ends_a_daemon_at_once() {
    let dir = &test_dir();
    let Some((slow, mut daemon, _client)) = serve_and_read(dir) else {
        return;
    };
    // The removal waits, too.
    let _removal = ctl_begun(dir, "remove-disk slow");
    wait_until("the removal", || disk_names(dir) == ["a"]);
    end(&mut daemon);
    ends_without_answer(daemon, dir, &slow);
}

#[test]
fn an_export_whose_image_does_not_answer_can_be_cancelled() {
    let dir = &test_dir();
    let Some(slow) = mount(dir) else {
        return;
    };
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=slow/disk.img,log=log,socket=s,serial=slow",
    );
    slow.halt();
    let mut export = ctl_begun(dir, "export -o copy");
    wait_until("the export", || {
        ctl(dir, "exports")["exports"] != serde_json::json!([])
    });
    let told = told(dir, "export-cancel slow");
    assert!(
        told.starts_with("slow: export as of newest cancelled at 0 B of ") && told.ends_with("B\n"),
        "{told}"
    );
    slow.resume();
    assert_eq!(export.wait().unwrap().code(), Some(1));
    assert!(!dir.join("copy").exists());
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_pause_of_a_disk_that_does_not_answer_fails() {
    let dir = &test_dir();
    let Some((slow, daemon, mut client)) = serve_and_read(dir) else {
        return;
    };
    let late = resume_late(&slow);
    let silent = "disk 'slow': the disk does not answer its requests in flight";
    ctl_refused(dir, "pause --disk slow", &[silent]);
    ctl(dir, "limits --disk a --ops-per-second 1000");
    assert!(late.send(()).is_ok(), "a request waited for the image");
    slow.resume();
    assert_eq!(client.reply().cookie, 3);
    client.write(4, 8192, &[7; 4096]);
    drop(client);
    assert_eq!(daemon.stop(), "");
}
