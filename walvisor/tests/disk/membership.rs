//! Disks that join a log, leave it, and move to another.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;

/// A disk with records in its log leaves it; a raw image joins an existing log, as a copy and
/// itself.
#[test]
fn disks_leave_and_join_logs() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let dir = crashed.as_path();
    let printed = done(dir, "disk leave disk.img");
    assert_eq!(
        printed,
        "disk.img: a raw image now; the log in disk.img.wal has no more disks: remove that \
         directory\n"
    );
    assert!(std::fs::read(dir.join("disk.img")).unwrap() == unclosed_bytes());
    refused(dir, "disk leave disk.img", 1, &["no disk yet", "log=DIR"]);
    refused(
        dir,
        "disk leave disk.img --log none",
        1,
        &["no log at none"],
    );

    done(dir, "disk create other.img --size 1M --log shared");
    done(dir, "disk import copy.img disk.img --log shared");
    let printed = done(dir, "disk move-log disk.img shared");
    assert_eq!(
        printed,
        "disk.img: on the log in shared now, which keeps no history; open it with log=shared\n"
    );
    let info = json(&done(dir, "disk info disk.img --log shared --json"));
    let on_log = info["log"]["disks"].as_array().unwrap();
    assert_eq!(on_log.len(), 3);
    for name in ["disk.img", "copy.img"] {
        done(
            dir,
            &format!("disk export {name} out.img --log shared --force"),
        );
        assert!(std::fs::read(dir.join("out.img")).unwrap() == unclosed_bytes());
    }
    refused(
        dir,
        "disk move-log disk.img ./shared --log shared",
        1,
        &["log already"],
    );
    let left = json(&done(dir, "disk leave copy.img --log shared --json"));
    assert_eq!(left["disks_left"].as_array().unwrap().len(), 2);
    done(dir, "disk check disk.img --log shared");
}

/// Wherever `disk move-log` is killed, the disk opens with one of the two logs, and the same
/// command ends the move.
#[test]
fn a_move_that_was_killed_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let expected = unclosed_bytes();
    let export = |dir: &Path, log: &str| {
        let output = walvisor(
            dir,
            &format!("disk export disk.img out.img --force --log {log}"),
        );
        let same = || std::fs::read(dir.join("out.img")).unwrap() == expected;
        output.status.success() && same()
    };
    let (mut killed, mut wait) = (0, Duration::ZERO);
    loop {
        let work = tempfile::tempdir().unwrap();
        let dir = work.path();
        crash(
            &crashed.join("disk.img.wal"),
            &[&crashed.join("disk.img")],
            dir,
        );
        let mut child = Command::new(WALVISOR)
            .args(["disk", "move-log", "disk.img", "new"])
            .current_dir(dir)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(wait);
        // SIGKILL; the process may have ended.
        let _ = child.kill();
        let ended = child.wait().unwrap().success();
        assert!(
            export(dir, "disk.img.wal") || export(dir, "new"),
            "after {wait:?}"
        );
        done(dir, "disk move-log disk.img new");
        assert!(export(dir, "new"), "after {wait:?}");
        if ended {
            break;
        }
        killed += 1;
        // Each kill comes a little later, until the move ends before it.
        wait = wait * 21 / 20 + Duration::from_millis(1);
    }
    assert!(killed > 0);
}
