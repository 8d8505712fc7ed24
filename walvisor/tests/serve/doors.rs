//! One daemon whose disks have different doors: one log, one sync for all of them; and the file
//! that describes such a pool.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};
use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::wait_until;
use walvisor_tests::run_sessions;

use super::vhost_user::Client;
use super::{
    Daemon, create, ctl, disk_names, errors, refused, serve, serve_telling, succeed, test_dir,
};

/// Reads a block over vhost-user.
fn read_block(client: &mut Client, offset: u64) -> Vec<u8> {
    client.read(0, 0, offset, 4096);
    client.finish(0, 1);
    client.data(0, 4096)
}

fn contents(dir: &Path, disk: &str) -> Vec<u8> {
    fs::read(dir.join(disk)).unwrap()
}

#[test]
fn disks_behind_two_doors_share_a_log_and_its_syncs() {
    let dir = &test_dir();
    for disk in ["guest", "export"] {
        create(dir, disk, "4M --log log");
    }
    let disks = "--disk path=guest,log=log,door=vhost-user,socket=v --disk \
        path=export,log=log,door=nbd,socket=n";
    let daemon = serve(dir, disks, 2);
    assert!(daemon.uris[0].ends_with("/v"), "{:?}", daemon.uris);
    assert!(daemon.uris[1].starts_with("nbd+unix:///export?socket="));
    let mut guest = Client::connect(&dir.join("v"), 1);
    let mut export = RawClient::extended_to(&dir.join("n"), "export");
    guest.write(0, 0, 4096, &[1; 4096]);
    guest.finish(0, 1);
    export.write(0, 8192, &[2; 4096]);
    // One FLUSH makes the other door's write durable too: both are in the log before it.
    export.flush(1);
    daemon.kill();
    drop(guest);

    // Either disk alone opens the log, and the other's records wait in it.
    let daemon = serve(dir, &format!("{disks} --control ctl --disk-dir ."), 2);
    let mut guest = Client::connect(&dir.join("v"), 1);
    assert_eq!(read_block(&mut guest, 4096), [1; 4096]);
    let stats = ctl(dir, "stats");
    assert_eq!(stats["kind"], "serve");
    let disks = stats["disks"].as_array().unwrap();
    let transports: Vec<_> = disks.iter().map(|disk| disk["transport"].clone()).collect();
    assert_eq!(transports, ["vhost-user", "nbd"]);

    // A disk changes its door while the other is in use.
    let ctl = |words: &str| -> Value { ctl(dir, words) };
    assert_eq!(ctl("remove-disk export")["image"], "complete");
    assert_eq!(contents(dir, "export")[8192..12288], [2; 4096]);
    let added = ctl("add-disk path=export,log=log,door=vhost-user,socket=w");
    assert_eq!(added["disk"], "export");
    let mut export = Client::connect(&dir.join("w"), 1);
    assert_eq!(read_block(&mut export, 8192), [2; 4096]);
    drop(export);
    assert_eq!(ctl("remove-disk export")["image"], "complete");
    ctl("add-disk path=export,log=log,door=nbd,socket=n");
    let mut export = RawClient::extended_to(&dir.join("n"), "export");
    export.write(0, 0, &[3; 4096]);
    export.flush(1);
    assert_eq!(ctl("remove-disk guest")["image"], "complete");
    run_sessions("door-keys", dir, []);
    assert_eq!(daemon.stop(), "");
    assert_eq!(contents(dir, "guest")[4096..8192], [1; 4096]);
    assert_eq!(contents(dir, "export")[..4096], [3; 4096]);
    for socket in ["v", "w", "n", "ctl"] {
        assert!(!dir.join(socket).exists(), "{socket}");
    }
}

#[test]
fn serve_nbd_sets_the_door_of_disks_that_name_none() {
    let dir = &test_dir();
    for disk in ["a", "b"] {
        create(dir, disk, "1M");
    }
    let daemon = Daemon::start(
        dir,
        "--disk path=a,socket=n --disk path=b,door=vhost-user,socket=v",
    );
    assert!(daemon.uris[0].starts_with("nbd+unix:///a"));
    assert_eq!(Client::connect(&dir.join("v"), 1).capacity(), 2048);
    assert_eq!(daemon.stop(), "");
    run_sessions("doors", dir, []);
}

/// Waits until the daemon serves these disks.
#[track_caller]
fn serves(dir: &Path, names: &[&str]) {
    wait_until("the disks", || {
        let mut found = disk_names(dir);
        found.sort_unstable();
        found == names
    });
}

#[test]
fn a_pool_file_is_read_again_on_sighup() {
    let dir = &test_dir();
    for disk in ["a", "b", "c"] {
        create(dir, disk, "1M --log log");
    }
    let defaults = "[defaults]\ndoor = 'nbd'\nlog = 'log'\nsocket = 'n'\n";
    let disk = |keys: &str| format!("[[disk]]\n{keys}\n");
    let (a, b) = (
        disk("path = 'a'"),
        disk("path = 'b'\ndoor = 'vhost-user'\nsocket = 'v'"),
    );
    // As an editor does, with a new file.
    let write = |text: &str| {
        fs::write(dir.join("new"), text).unwrap();
        fs::rename(dir.join("new"), dir.join("pool.toml")).unwrap();
    };
    write(&format!("{defaults}{a}{b}"));
    let checked = succeed(dir, "config check pool.toml --json");
    let checked: Value = serde_json::from_str(&checked).unwrap();
    assert_eq!(checked, json!({ "file": "pool.toml", "disks": 2 }));
    let daemon = serve_telling(dir, "--config pool.toml --control ctl --disk-dir .", 2);
    serves(dir, &["a", "b"]);
    let mut kept = RawClient::extended_to(&dir.join("n"), "a");
    kept.write(0, 0, &[5; 512]);

    // One comes and one goes. The client of the third notices nothing.
    write(&format!("{defaults}{a}{}", disk("path = 'c'")));
    daemon.signal(Signal::HUP);
    serves(dir, &["a", "c"]);
    kept.flush(1);
    let mut client = RawClient::extended_to(&dir.join("n"), "c");
    client.write(2, 0, &[6; 512]);
    drop(client);

    // A file that is wrong changes nothing, and neither do other keys of a disk that is served.
    let told = |part: &str| wait_until(part, || errors(dir).contains(part));
    write("[[disk]]\npath = 'a'\ncashe = 1\n");
    daemon.signal(Signal::HUP);
    told("unknown key 'cashe'");
    serves(dir, &["a", "c"]);
    write(&format!(
        "{defaults}{}{}",
        disk("path = 'a'\nreadonly = true"),
        disk("path = 'c'")
    ));
    daemon.signal(Signal::HUP);
    told("the keys of disk 'a' have changed");
    kept.write(3, 512, &[5; 512]);
    // Neither does one with a disk that can't be added now.
    let outside = tempfile::tempdir().unwrap();
    create(outside.path(), "d", "1M");
    let there = outside.path().join("d");
    let d = disk(&format!("path = '{}'\nlog = '{0}.wal'", there.display()));
    write(&format!("{defaults}{a}{d}"));
    daemon.signal(Signal::HUP);
    told("is not beneath a --disk-dir");
    serves(dir, &["a", "c"]);
    drop(kept);
    daemon.stop();
    assert_eq!(contents(dir, "a")[..1024], [5; 1024]);
    assert_eq!(contents(dir, "c")[..512], [6; 512]);

    // Which mistakes a file may have, `commands::serve::config` shows.
    let none = ["none.toml: No such file"];
    refused(dir, "config check none.toml", 1, &none);
}
