//! A base image whose file system does not answer when asked for holes: only the client that asked
//! has to wait.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};
use walvisor_testkit::nbd::{BLOCK_STATUS, RawClient};
use walvisor_testkit::{Process, wait_until};
use walvisor_tests::have;

use super::{Daemon, client, create};

/// An image in a file system whose program can be halted.
struct SlowFileSystem {
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
    fn halt(&self) {
        self.fuse.signal(Signal::STOP);
        let stopped = WaitId::Pid(self.fuse.pid());
        let status = waitid(stopped, WaitIdOptions::STOPPED).unwrap().unwrap();
        assert!(status.stopped(), "nbdfuse ended");
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

#[test]
fn a_file_system_that_is_slow_to_find_holes_delays_nobody_else() {
    let here = have("nbdsh", "python3-libnbd")
        && have("nbdfuse", "libnbd-bin")
        && have("nbdkit", "nbdkit")
        && have("fusermount3", "fuse3");
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(slow) = here
        .then(|| SlowFileSystem::mount(&dir.join("slow")))
        .flatten()
    else {
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
    slow.fuse.signal(Signal::CONT);
    let told = asking.reply();
    assert_eq!((told.kind, told.cookie), (6, 1));
    drop(asking);
    assert_eq!(daemon.stop(), "");
}
