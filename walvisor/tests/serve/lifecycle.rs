//! How a daemon starts and ends, and what it says about bad input.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::wait_until;
use walvisor_tests::{have_python, run_sessions};

use super::{Daemon, WALVISOR, assert_says, create, read, refused, succeed, test_dir};

#[test]
fn sockets_are_private_and_gone_at_the_end() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    let mode = || fs::metadata(dir.join("s")).unwrap().permissions().mode() & 0o777;
    for signal in [Signal::TERM, Signal::INT] {
        let mut daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
        assert_eq!(mode(), 0o600);
        // Clients in the handshake and idle clients do not keep the daemon from ending.
        let _choosing = RawClient::greet(&dir.join("s"));
        let mut idle = RawClient::extended(&dir.join("s"));
        daemon.signal(signal);
        assert_eq!(daemon.child.wait().unwrap().code(), Some(0));
        assert!(idle.is_closed());
        assert!(!dir.join("s").exists());
        assert_eq!(daemon.errors(), "");
    }
    let daemon = Daemon::start(dir, "--mode 660 --disk path=disk.img,socket=s");
    assert_eq!(mode(), 0o660);
    daemon.kill();
    // The socket is removed after a kill too.
    wait_until("the socket's end", || !dir.join("s").exists());
    // The daemon replaces a socket that was left behind.
    drop(UnixListener::bind(dir.join("s")).unwrap());
    assert!(dir.join("s").exists());
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    assert_eq!(mode(), 0o600);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn every_thread_is_restricted() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    // 0 is no filter, 2 is one.
    for (option, state) in [("", "2"), ("--seccomp off", "0"), ("--seccomp log", "2")] {
        for door in ["nbd", "vhost-user"] {
            let arguments = format!("--disk path=disk.img,socket=s {option}");
            let daemon = Daemon::start_door(dir, door, &arguments);
            let client = (door == "nbd").then(|| {
                let mut client = RawClient::extended(&dir.join("s"));
                read(&mut client, 0, 4096);
                client
            });
            // The main thread, a listener, a client's thread, and those of the log.
            let filters = daemon.child.thread_status("Seccomp:");
            assert!(client.is_none() || filters.len() >= 4, "{filters:?}");
            assert!(filters.iter().all(|found| found == state), "{filters:?}");
            assert_eq!(daemon.stop(), "");
        }
    }
}

/// A Python script that runs its arguments without io_uring: a filter answers io_uring_setup, 425,
/// with ENOSYS.
pub const WITHOUT_IO_URING: &str = "
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (6, 0, 0, 0x50000 | 38), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *step) for step in code))
class Program(ctypes.Structure):
    _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.c_void_p)]
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0
assert prctl(22, 2, ctypes.byref(Program(4, ctypes.addressof(code))), 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
";

#[test]
fn a_restricted_daemon_does_without_io_uring_too() {
    if !have_python() {
        return;
    }
    let dir = &test_dir();
    create(dir, "disk.img", "256M");
    let mut python = Command::new("python3");
    python.args(["-c", WITHOUT_IO_URING, WALVISOR, "serve", "nbd"]);
    python.args(["--disk", "path=disk.img,socket=s"]);
    let daemon = Daemon::start_as(dir, python.stdin(Stdio::null()), 1);
    let mut client = RawClient::extended(&dir.join("s"));
    // This is more than the log's first segments hold, so it takes new segments and checkpoints.
    let data = vec![7; 4 << 20];
    for piece in 0..48 {
        client.write(piece, piece * data.len() as u64, &data);
        client.flush(piece);
    }
    assert!(read(&mut client, 100 << 20, 4 << 20) == data);
    let opened = format!("/proc/{}/fd", daemon.child.id());
    for opened in fs::read_dir(opened).unwrap() {
        // It may have been closed meanwhile.
        if let Ok(file) = fs::read_link(opened.unwrap().path()) {
            assert!(!file.to_string_lossy().contains("io_uring"), "{file:?}");
        }
    }
    assert_eq!(daemon.stop(), "");
}

#[test]
fn bad_input_is_one_line() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    create(dir, "other.img", "1M");
    fs::write(dir.join("file"), "data").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let taken = format!("serve nbd --disk path=disk.img,port={port}");
    let _daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    refused(dir, &taken, 1, &["port 127.0.0.1:"]);
    run_sessions("bad-input", dir, []);
    assert!(!dir.join("t").exists());
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"data");
}

/// SIGTERM ends a daemon that has no time to copy its log: the daemon says what stays there, and
/// the next one has it. 'disk checkpoint' copies everything, whatever time the daemons had.
#[test]
fn a_close_without_time_says_what_it_leaves() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    let none = "--disk path=disk.img,socket=s,close-seconds=0";
    assert_eq!(Daemon::start(dir, none).stop(), "", "nothing is left");
    let daemon = Daemon::start(dir, none);
    RawClient::extended(&dir.join("s")).write(0, 4096, &[7; 8192]);
    let left = daemon.stop();
    assert_eq!(left.lines().count(), 1, "{left}");
    let parts = [
        "log disk.img.wal: closed with 8192 bytes that",
        "next open goes on",
    ];
    assert_says(&left, &parts);
    assert_eq!(fs::read(dir.join("disk.img")).unwrap(), [0; 1 << 20]);
    let info = succeed(dir, "disk info disk.img");
    assert!(info.contains("1 records, 8 KiB"), "{info}");
    succeed(dir, "disk checkpoint disk.img");
    let image = fs::read(dir.join("disk.img")).unwrap();
    assert_eq!(image[4096..12288], [7; 8192]);
}
