//! Disks that are added to the daemon and removed from it.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::json;
use walvisor_tests::run_sessions;

use super::{Client, FrontEnd, daemon, test_dir};
use crate::{create, ctl};

#[test]
fn disks_come_and_go_while_a_front_end_uses_another() {
    let dir = &test_dir();
    for disk in ["stays", "comes"] {
        create(dir, disk, "4M --log log");
    }
    let running = daemon(
        dir,
        "--control ctl --disk-dir . --mode 660 --disk path=stays,log=log,socket=s",
    );
    let mut staying = Client::connect(&dir.join("s"), 1);
    for round in 1..=2 {
        let added = ctl(dir, "add-disk path=comes,log=log,socket=t,queues=2");
        let place = dir.canonicalize().unwrap().join("t");
        assert_eq!(added["place"], json!(place));
        let mode = fs::metadata(&place).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
        let mut client = Client::connect(&place, 2);
        assert_eq!(client.capacity() * 512, 4 << 20);
        client.read(0, 0, 0, 4096);
        client.finish(0, 1);
        assert_eq!(client.data(0, 4096), [round - 1; 4096]);
        // One FLUSH covers both disks' writes; the other queue's write is not flushed at all.
        staying.write(0, 0, 0, &[round; 4096]);
        client.write(0, 0, 0, &[round; 4096]);
        client.write(1, 1, 8192, &[round; 4096]);
        staying.finish(0, 1);
        client.finish(0, 1);
        client.finish(1, 1);
        staying.flush(0, 0);
        staying.finish(0, 1);
        // The removal disconnects the front-end, and one that waits for its turn.
        let mut waiting = FrontEnd::connect(&place);
        let removed = ctl(dir, "remove-disk comes");
        assert_eq!(
            removed,
            json!({ "disk": "comes", "image": "complete", "log": "log" })
        );
        assert!(waiting.is_closed() && !place.exists());
        let image = fs::read(dir.join("comes")).unwrap();
        assert!(image[..4096] == [round; 4096] && image[8192..12288] == [round; 4096]);
    }
    run_sessions("sockets", dir, []);
    // A disk that is there at the end leaves no socket behind.
    ctl(dir, "add-disk path=comes,log=log,socket=t");
    drop(staying);
    ctl(dir, "remove-disk stays");
    assert_eq!(running.stop(), "");
    assert!(!dir.join("s").exists() && !dir.join("t").exists());
    assert_eq!(fs::read(dir.join("stays")).unwrap()[..4096], [2; 4096]);
}
