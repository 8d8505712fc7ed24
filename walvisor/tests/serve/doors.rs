//! One daemon whose disks have different doors: one log, one sync for all of them.

use std::fs;
use std::path::Path;

use serde_json::Value;
use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::wait_until;
use walvisor_tests::run_sessions;

use super::vhost_user::Client;
use super::{Daemon, create, ctl, serve, test_dir};

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
    let log = "log=log,commit-wait-usec=1000000,commit-wait-count=2";
    let disks = format!(
        "--disk path=guest,{log},door=vhost-user,socket=v --disk path=export,{log},door=nbd,socket=n \
         --control ctl --disk-dir ."
    );
    let daemon = serve(dir, &disks, 2);
    assert!(daemon.uris[0].ends_with("/v"), "{:?}", daemon.uris);
    assert!(daemon.uris[1].starts_with("nbd+unix:///export?socket="));
    let mut guest = Client::connect(&dir.join("v"), 1);
    let mut export = RawClient::extended_to(&dir.join("n"), "export");
    // FLUSHes at both doors share a sync, unless one comes more than a second after the other.
    wait_until("a shared sync", || {
        guest.write(0, 0, 0, &[9; 4096]);
        guest.finish(0, 1);
        export.write(0, 0, &[9; 4096]);
        guest.flush(0, 0);
        guest.kick(0);
        export.flush(1);
        guest.finish(0, 1);
        ctl(dir, "stats")["disks"][0]["sync_sharing"]["with"][0]["disk"] == "export"
    });
    guest.write(0, 0, 4096, &[1; 4096]);
    guest.finish(0, 1);
    export.write(0, 8192, &[2; 4096]);
    // One FLUSH makes the other door's write durable too: both are in the log before it.
    export.flush(1);
    daemon.kill();
    drop(guest);

    // Either disk alone opens the log, and the other's records wait in it.
    let daemon = serve(dir, &disks, 2);
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
