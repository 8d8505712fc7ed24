//! Disks that are added to a daemon and removed from it.

use std::fs;

use serde_json::json;
use walvisor_testkit::nbd::RawClient;
use walvisor_tests::run_sessions;

use super::{Daemon, create, ctl, ctl_refused, refused, succeed, test_dir};

#[test]
fn impossible_additions_and_removals_are_one_line_errors() {
    let dir = &test_dir();
    for sub in ["in", "out"] {
        fs::create_dir(dir.join(sub)).unwrap();
    }
    for disk in ["first", "in/a", "in/b", "out/c"] {
        create(dir, disk, "1M");
    }
    std::os::unix::fs::symlink("../out/c", dir.join("in/link")).unwrap();
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk-dir in --disk path=first,socket=s",
    );
    assert_eq!(
        ctl(dir, "add-disk path=in/a,socket=s")["size_bytes"],
        1 << 20
    );
    run_sessions("members", dir, []);
    ctl(dir, "pause");
    ctl_refused(
        dir,
        "add-disk path=in/b,socket=s",
        &["the disks are paused"],
    );
    // A disk that is paused can go.
    ctl(dir, "remove-disk in/a");
    ctl(dir, "resume");
    // None of them has left anything behind, and the first disk may go too.
    assert_eq!(ctl(dir, "add-disk path=in/b,socket=s")["log"], "in/b.wal");
    ctl(dir, "remove-disk first");
    ctl(dir, "remove-disk in/b");
    ctl_refused(
        dir,
        "remove-disk in/b",
        &["no disk 'in/b': there are no disks"],
    );
    assert_eq!(ctl(dir, "stats")["disks"], json!([]));
    assert!(!dir.join("out/log").exists());
    assert_eq!(daemon.stop(), "");

    let daemon = Daemon::start(dir, "--control ctl --disk path=first,socket=s");
    for (disk, part) in [
        (
            "path=in/a",
            "start it with --disk-dir DIR, a directory above in/a",
        ),
        ("backend=ram,size=1M", "start it with --disk-dir DIR\n"),
    ] {
        ctl_refused(dir, &format!("add-disk {disk},socket=s"), &[part]);
    }
    // Without the option disks can go all the same.
    assert_eq!(ctl(dir, "remove-disk first")["image"], "complete");
    assert_eq!(daemon.stop(), "");
    run_sessions("disk-dir", dir, []);
}

/// A daemon opens the images that it is told of, whatever its log says.
#[test]
fn an_image_that_only_the_log_names_is_not_opened() {
    let dir = &test_dir();
    for disk in ["a", "b"] {
        succeed(dir, &format!("disk create {disk} --size 1M --log log"));
    }
    let [a, b] = ["a", "b"].map(|disk| format!("--disk path={disk},log=log,socket={disk}.sock"));
    let daemon = Daemon::start(dir, &format!("{a} {b}"));
    let mut client = RawClient::extended_to(&dir.join("b.sock"), "b");
    client.write(1, 0, &[7; 4096]);
    client.flush(2);
    daemon.kill();

    let first = || fs::read(dir.join("b")).unwrap()[..4096].to_vec();
    let serve = format!("serve nbd {a}");
    for arguments in [&*serve, "disk checkpoint a --log log"] {
        let record = "the log holds 1 record of another disk, last at ";
        let image = "/b, which is not opened because only the log names it";
        refused(dir, arguments, 1, &[record, image]);
    }
    assert_eq!(first(), [0; 4096]);

    let daemon = Daemon::start(dir, &format!("{a},detached=a:b"));
    assert_eq!(daemon.stop(), "");
    assert_eq!(first(), [7; 4096]);
}
