//! `walvisor ctl export`: copies of disks in use.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use rustix::process::Signal;
use serde_json::json;
use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::{MemoryFs, wait_until};
use walvisor_tests::run_sessions;

use super::{Daemon, MIB, assert_says, create, ctl, ctl_begun, ctl_refused, noise, test_dir, told};

/// Whoever is killed, the file at the name is whole or missing, and the next export succeeds.
#[test]
fn a_kill_leaves_no_part_of_a_copy_at_its_name() {
    let dir = &test_dir();
    create(dir, "disk.img", "8M");
    let start = || Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let daemon = start();
    RawClient::extended(&dir.join("s")).write(1, 0, &noise(1 << 20));
    let begin = || {
        let client = ctl_begun(dir, "export -o copy");
        wait_until("a part", || dir.join("copy.walvisor-part").exists());
        client
    };
    // A daemon that is stopped answers nothing, so the kill comes before the end.
    daemon.signal(Signal::STOP);
    let mut client = begin();
    client.kill().unwrap();
    client.wait().unwrap();
    daemon.signal(Signal::CONT);
    assert!(!dir.join("copy").exists());
    let copied = |name: &str| {
        let line = format!("{name}: exported disk.img: 8 MiB, 1 MiB of them copied\n");
        assert_eq!(told(dir, &format!("export -o {name}")), line);
        let bytes = fs::read(dir.join(name)).unwrap();
        assert!(bytes[..1 << 20] == noise(1 << 20) && bytes.len() == 8 << 20);
        assert!(!dir.join(format!("{name}.walvisor-part")).exists());
    };
    copied("copy");
    fs::remove_file(dir.join("copy")).unwrap();
    daemon.signal(Signal::STOP);
    let mut client = begin();
    daemon.kill();
    let (status, error) = (client.wait().unwrap(), client.errors());
    assert_eq!(
        (status.code(), error.lines().count()),
        (Some(1), 1),
        "{error}"
    );
    // The kill came after the client's request or before it.
    let either = ["its process", "running with --control ctl"];
    assert!(either.iter().any(|part| error.contains(part)), "{error}");
    assert!(!dir.join("copy").exists() && !dir.join("copy.walvisor-part").exists());
    let daemon = start();
    copied("copy");
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_failed_export_is_one_line_and_harms_no_disk() {
    let dir = &test_dir();
    create(dir, "disk.img", "8M");
    fs::write(dir.join("raw.img"), noise(1 << 20)).unwrap();
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=disk.img,socket=s --disk path=raw.img,backend=raw,socket=r",
    );
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 0, &noise(4 << 20));
    fs::write(dir.join("mine"), "mine").unwrap();
    run_sessions("exports", dir, []);
    assert!(!dir.join("out").exists() && !dir.join("out.walvisor-part").exists());
    assert_eq!(fs::read(dir.join("mine")).unwrap(), b"mine");
    assert_eq!(
        ctl(dir, "export --disk disk.img -o mine --force"),
        json!({
            "disk": "disk.img",
            "raw": "mine",
            "size_bytes": 8 * MIB,
            "copied_bytes": 4 * MIB,
            "shared": false,
        })
    );
    assert!(fs::read(dir.join("mine")).unwrap()[..4 << 20] == noise(4 << 20));
    assert_eq!(ctl(dir, "exports"), json!({ "exports": [] }));
    let socket = UnixStream::connect(dir.join("ctl")).unwrap();
    let mut lines = BufReader::new(&socket);
    (&socket)
        .write_all(
            b"{\"execute\": \"export\", \"arguments\": {\"disk\": \"disk.img\"}, \"id\": 7}\n",
        )
        .unwrap();
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_says(&line, &["SCM_RIGHTS", "\"id\":7"]);
    if let Some(small) = MemoryFs::tmpfs("size=1m") {
        let out = small.path().join("out");
        let words = format!("--disk disk.img -o {}", out.display());
        let parts = ["the exported file: ", "No space left on device"];
        ctl_refused(dir, &format!("export {words}"), &parts);
        assert_eq!(fs::read_dir(small.path()).unwrap().count(), 0);
    }
    client.write(2, 4 << 20, &noise(4096));
    client.flush(3);
    drop(client);
    assert_eq!(daemon.stop(), "");
}
