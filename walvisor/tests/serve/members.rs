//! Disks that are added to a daemon and removed from it.

use std::fs;

use serde_json::json;
use walvisor_tests::run_sessions;

use super::{Daemon, create, ctl, ctl_refused, test_dir};

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
