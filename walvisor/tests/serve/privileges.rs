//! What a daemon keeps of root: no capability, and with `--user` not even the user, whatever it
//! does later.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use rustix::process::geteuid;
use walvisor_testkit::give;
use walvisor_testkit::nbd::RawClient;

use super::{Daemon, create, noise, refused, test_dir, told};

/// The user that the tests take; it need not have a name.
const USER: u32 = 54321;

/// All that a daemon needs files for: a log that grows, snapshots, disks that come and go.
fn exercise(dir: &Path) {
    let mut client = RawClient::extended_to(&dir.join("s"), "a.img");
    let data = noise(8 << 20);
    for round in 0..20 {
        client.write(round, round % 4 * (8 << 20), &data);
        client.flush(round);
        if round == 10 {
            told(dir, "snapshot before");
        }
    }
    told(dir, "add-disk path=b.img,socket=s");
    let mut other = RawClient::extended_to(&dir.join("s"), "b.img");
    other.write(1, 0, &data[..4096]);
    other.flush(1);
    drop(other);
    told(dir, "remove-disk b.img");
    told(dir, "snapshot-delete before");
    told(dir, "checkpoint");
}

const SERVE: &str = "--disk path=a.img,socket=s --control ctl --metrics-listen unix:m --disk-dir .";
const SOCKETS: [&str; 3] = ["s", "ctl", "m"];

/// None, or one for files of others.
#[test]
fn a_daemon_of_root_keeps_the_capabilities_that_it_needs() {
    const DAC_OVERRIDE: u64 = 1 << 1;
    let dir = &test_dir();
    create(dir, "a.img", "64M");
    create(dir, "b.img", "1M");
    for kept in [0, DAC_OVERRIDE] {
        if kept != 0 {
            if !geteuid().is_root() {
                return println!("only root opens the files of others");
            }
            chown(dir.join("a.img"), Some(USER), None).unwrap();
            fs::set_permissions(dir.join("a.img"), fs::Permissions::from_mode(0o600)).unwrap();
        }
        let daemon = Daemon::start(dir, SERVE);
        daemon.child.assert_capabilities(kept);
        exercise(dir);
        daemon.child.assert_capabilities(kept);
        assert_eq!(daemon.stop(), "");
        for socket in SOCKETS {
            assert!(!dir.join(socket).exists(), "{socket}");
        }
    }
}

#[test]
fn a_daemon_becomes_the_user_that_is_asked_for() {
    let dir = &test_dir();
    create(dir, "a.img", "64M");
    create(dir, "b.img", "1M");
    let serve = format!("{SERVE} --user {USER}");
    let (refusal, root) = if geteuid().is_root() {
        ("have to belong to it: chown -R 54321 them", true)
    } else {
        ("start it as root, or leave --user out", false)
    };
    refused(dir, &format!("serve nbd {serve}"), 1, &[refusal]);
    if !root {
        return;
    }
    give(dir, USER);
    let daemon = Daemon::start(dir, &serve);
    let ids = [(); 4].map(|()| USER.to_string()).join("\t");
    for (key, expected) in [
        ("Uid:", &ids),
        ("Gid:", &ids),
        ("Groups:", &USER.to_string()),
    ] {
        let found = daemon.child.thread_status(key);
        assert!(found.iter().all(|ids| ids == expected), "{key} {found:?}");
    }
    daemon.child.assert_capabilities(0);
    for socket in SOCKETS {
        let found = fs::metadata(dir.join(socket)).unwrap();
        assert_eq!((found.uid(), found.gid()), (USER, USER), "{socket}");
    }
    exercise(dir);
    daemon.child.assert_capabilities(0);
    assert_eq!(daemon.stop(), "");
    for socket in SOCKETS {
        assert!(!dir.join(socket).exists(), "{socket}");
    }
    for entry in fs::read_dir(dir.join("a.img.wal")).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().uid(), USER);
    }
}
