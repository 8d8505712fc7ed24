//! Sockets that a service manager keeps open: systemd's own activation, and restarts during which
//! no client is refused.

use std::fs;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

use walvisor_testkit::nbd::{READ, RawClient, WRITE};
use walvisor_testkit::process::assert_refused;
use walvisor_testkit::{http, wait_until};
use walvisor_tests::have;

use super::vhost_user::Client;
use super::{Daemon, WALVISOR, client, create, test_dir};

/// `walvisor serve nbd` with `socket` as descriptor 3. A shell runs `variables` first; $$ in it is
/// the daemon's pid.
fn activated(dir: &Path, socket: impl Into<OwnedFd>, variables: &str, arguments: &str) -> Command {
    let mut command = Command::new("sh");
    let script = format!("exec 3<&0 </dev/null; {variables} exec {WALVISOR} serve nbd {arguments}");
    command
        .args(["-c", &script])
        .current_dir(dir)
        .stdin(socket.into());
    command
}

#[test]
fn systemd_starts_the_daemon_when_a_client_comes() {
    if !have("systemd-socket-activate", "systemd") || !have("nbdinfo", "libnbd-bin") {
        return;
    }
    let dir = &test_dir();
    create(dir, "a.img", "1M");
    create(dir, "b.img", "2M");
    create(dir, "c.img", "4M");
    // Finds a free port.
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap();
    drop(port);
    let path = dir.join("s");
    let mut command = Command::new("systemd-socket-activate");
    command
        .args(["-l", path.to_str().unwrap(), "-l", &address.to_string()])
        .args(["-l", dir.join("m").to_str().unwrap()])
        .args(["-l", dir.join("v").to_str().unwrap()])
        .args(["--fdname=one:two:three:four", WALVISOR, "serve", "nbd"])
        .args(["--disk", "path=c.img,door=vhost-user,socket=v"])
        // One disk names its socket by a relative path.
        .args(["--disk", "path=a.img,socket=s", "--disk"])
        .arg(format!("path=b.img,port={}", address.port()))
        .args(["--metrics-listen", "unix:m"])
        .stdin(Stdio::null());
    // The daemon prints nothing before a client connects.
    let daemon = Daemon::start_as(dir, &mut command, 0);
    let places = [path, dir.join("m"), dir.join("v")];
    wait_until("the sockets", || places.iter().all(|place| place.exists()));
    let size = |uri: &str| client(dir, "nbdinfo", &["--size", uri]);
    assert_eq!(size("nbd+unix:///?socket=s").trim(), "1048576");
    assert_eq!(size(&format!("nbd://{address}")).trim(), "2097152");
    let mut front_end = Client::connect(&places[2], 1);
    assert_eq!(front_end.capacity(), 8192);
    front_end.write(0, 0, 4096, &[7; 4096]);
    front_end.finish(0, 1);
    drop(front_end);
    let scraper = UnixStream::connect(dir.join("m")).unwrap();
    http::get(scraper, "/metrics").unwrap();
    let errors = daemon.stop();
    assert!(!errors.contains("walvisor:"), "{errors}");
    // systemd removes the sockets, not the daemon.
    assert!(places.iter().all(|place| place.exists()));
}

#[test]
fn a_restart_refuses_nobody() {
    let dir = &test_dir();
    create(dir, "disk.img", "8M");
    let path = dir.join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let start = || {
        let socket = listener.try_clone().unwrap();
        let variables = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=disk";
        let mut command = activated(dir, socket, variables, "--disk path=disk.img,socket=s");
        Daemon::start_as(dir, &mut command, 1)
    };
    for round in 0_u8..3 {
        // This client may connect while no daemon runs.
        let early = std::thread::scope(|scope| {
            let early = scope.spawn(|| RawClient::extended(&path));
            let daemon = start();
            let mut early = early.join().unwrap();
            early.request(0, READ, 1, 4096, 4096);
            assert_eq!(early.reply().data[8..], [round; 4096]);
            early.request(1 << 5, WRITE, 2, 4096, 4096);
            early.send(&[round + 1; 4096]);
            assert_eq!(early.reply().kind, 0);
            assert_eq!(daemon.stop(), "");
            early
        });
        drop(early);
        assert!(path.exists());
    }
}

#[test]
fn inherited_sockets_must_belong_to_disks() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    let ours = "LISTEN_PID=$$ LISTEN_FDS=1";
    let refused = |socket: OwnedFd, variables: &str, parts: &[&str]| {
        let mut command = activated(dir, socket, variables, "--disk path=disk.img,socket=s");
        println!("{variables}");
        assert_refused(&command.output().unwrap(), 1, parts);
        assert!(!dir.join("s").exists());
    };
    let unix = UnixListener::bind(dir.join("t")).unwrap();
    let named = format!("{ours} LISTEN_FDNAMES=disk.socket");
    refused(
        unix.into(),
        &named,
        &[
            "'disk.socket'",
            "/t, where no disk",
            "socket=/",
            "--metrics-listen unix:/",
        ],
    );
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("port={},", tcp.local_addr().unwrap().port());
    refused(
        tcp.into(),
        ours,
        &["socket listens at 127.0.0.1:", &port, "address=127.0.0.1"],
    );
    let file = || OwnedFd::from(fs::File::open(dir.join("disk.img")).unwrap());
    refused(file(), ours, &["descriptor 3", "does not listen"]);
    let (connected, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    refused(connected.into(), ours, &["descriptor 3", "does not listen"]);
    for count in ["x", "-1", "99999999999"] {
        let variables = format!("LISTEN_PID=$$ LISTEN_FDS={count}");
        refused(file(), &variables, &["LISTEN_FDS", count]);
    }
    let variables = "exec 3<&-; LISTEN_PID=$$ LISTEN_FDS=1";
    refused(file(), variables, &["descriptor 3", "not open"]);
    // The variables name another process, so the daemon ignores the descriptor.
    let unix = UnixListener::bind(dir.join("u")).unwrap();
    let variables = "LISTEN_PID=1 LISTEN_FDS=1";
    let mut command = activated(dir, unix, variables, "--disk path=disk.img,socket=s");
    let daemon = Daemon::start_as(dir, &mut command, 1);
    let _ = RawClient::extended(&dir.join("s"));
    assert_eq!(daemon.stop(), "");
    assert!(!dir.join("s").exists() && dir.join("u").exists());
}
