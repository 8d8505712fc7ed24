//! What a daemon keeps of root: no capability, and with `--user` not even the user, whatever it
//! does later.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use rustix::process::geteuid;
use walvisor_testkit::give;
use walvisor_testkit::nbd::RawClient;

use super::{Daemon, create, noise, text, walvisor};

/// The user that the tests take; it need not have a name.
const USER: u32 = 54321;

#[track_caller]
fn ctl(dir: &Path, arguments: &str) {
    let output = walvisor(dir, &format!("ctl c {arguments}"));
    assert!(
        output.status.success(),
        "{arguments}: {}",
        text(&output.stderr)
    );
}

/// All that a daemon needs files for: a log that grows, snapshots, disks that come and go.
fn exercise(dir: &Path) {
    let mut client = RawClient::extended_to(&dir.join("s"), "a.img");
    let data = noise(8 << 20);
    for round in 0..20 {
        client.write(round, round % 4 * (8 << 20), &data);
        client.flush(round);
        if round == 10 {
            ctl(dir, "snapshot before");
        }
    }
    ctl(dir, "add-disk path=b.img,socket=s");
    let mut other = RawClient::extended_to(&dir.join("s"), "b.img");
    other.write(1, 0, &data[..4096]);
    other.flush(1);
    drop(other);
    ctl(dir, "remove-disk b.img");
    ctl(dir, "snapshot-delete before");
    ctl(dir, "checkpoint");
}

const SERVE: &str = "--disk path=a.img,socket=s --control c --metrics-listen unix:m --disk-dir .";

#[test]
fn a_daemon_of_root_keeps_no_capability() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "a.img", "64M");
    create(dir, "b.img", "1M");
    let daemon = Daemon::start(dir, SERVE);
    daemon.child.assert_capabilities(0);
    exercise(dir);
    daemon.child.assert_capabilities(0);
    assert_eq!(daemon.stop(), "");
    for socket in ["s", "c", "m"] {
        assert!(!dir.join(socket).exists(), "{socket}");
    }
}

#[test]
fn a_daemon_of_root_keeps_one_capability_for_files_of_others() {
    if !geteuid().is_root() {
        println!("only root opens the files of others");
        return;
    }
    const DAC_OVERRIDE: u64 = 1 << 1;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "a.img", "64M");
    create(dir, "b.img", "1M");
    chown(dir.join("a.img"), Some(USER), None).unwrap();
    fs::set_permissions(dir.join("a.img"), fs::Permissions::from_mode(0o600)).unwrap();
    let daemon = Daemon::start(dir, SERVE);
    daemon.child.assert_capabilities(DAC_OVERRIDE);
    exercise(dir);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_daemon_becomes_the_user_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "a.img", "64M");
    create(dir, "b.img", "1M");
    let serve = format!("{SERVE} --user {USER}");
    let refused = walvisor(dir, &format!("serve nbd {serve}"));
    assert_eq!(refused.status.code(), Some(1));
    let told = text(&refused.stderr);
    if !geteuid().is_root() {
        assert!(
            told.contains("start it as root, or leave --user out"),
            "{told}"
        );
        return;
    }
    assert!(
        told.contains("have to belong to it: chown -R 54321 them"),
        "{told}"
    );
    give(dir, USER);
    let daemon = Daemon::start(dir, &serve);
    for key in ["Uid:", "Gid:"] {
        let all = [(); 4].map(|()| USER.to_string()).join("\t");
        assert!(
            daemon
                .child
                .thread_status(key)
                .iter()
                .all(|ids| *ids == all),
            "{key}"
        );
    }
    let groups = daemon.child.thread_status("Groups:");
    assert!(groups.iter().all(|groups| *groups == USER.to_string()));
    daemon.child.assert_capabilities(0);
    for socket in ["s", "c", "m"] {
        let found = fs::metadata(dir.join(socket)).unwrap();
        assert_eq!((found.uid(), found.gid()), (USER, USER), "{socket}");
    }
    exercise(dir);
    daemon.child.assert_capabilities(0);
    assert_eq!(daemon.stop(), "");
    for socket in ["s", "c", "m"] {
        assert!(!dir.join(socket).exists(), "{socket}");
    }
    for entry in fs::read_dir(dir.join("a.img.wal")).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().uid(), USER);
    }
}
