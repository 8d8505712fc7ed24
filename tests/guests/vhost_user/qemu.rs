//! QEMU's vhost-user-blk: a guest that continues when the daemon is restarted.

use std::path::Path;
use std::time::Duration;

use super::{serve, succeed};
use walvisor_guest_images::Guest;
use walvisor_guest_images::guest::vhost_user_disk;
use walvisor_tests::{have, images};

/// The guest's script: it makes a file system and runs fio in it.
fn storm(loops: u32) -> String {
    format!(
        "mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt
         # Told from a side, so that the kills come in the middle, and only when the disk has answered: QEMU 7.2 waits for
         # ever if a daemon dies while the two shake hands.
         (while sleep 0.5 && [ ! -e /over ]; do dd if=/dev/zero of=/mnt/beat bs=4k count=1 conv=fsync 2>/dev/null && echo guest: at work; done) &
         fio --name=storm --directory=/mnt --rw=randwrite --bs=4k --size=16M --loops={loops} --ioengine=libaio \\
             --iodepth=16 --direct=1 --fsync=16 --verify=crc32c --do_verify=1 --minimal >/dev/null
         echo guest: fio $?
         touch /over; wait; umount /mnt; e2fsck -fn /dev/vda >/dev/null 2>&1; echo guest: fsck $?"
    )
}

#[test]
fn a_guest_goes_on_when_its_daemon_was_killed_and_is_back() {
    if !have("qemu-system-x86_64", "qemu-system-x86") {
        return;
    }
    goes_on(3, "", |dir| {
        let disk = vhost_user_disk(0, &dir.join("s"), 2);
        Guest::qemu(dir, &images(), &disk, &storm(3)).unwrap()
    });
}

/// Starts a guest on the disk at `s`. While fio runs there, kills the daemon up to `kills` times.
/// The daemon has `option`.
fn goes_on(kills: u32, option: &str, start: impl FnOnce(&Path) -> Guest) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    succeed(dir, "disk create disk.img --size 64M");
    let arguments = format!("--disk path=disk.img,socket=s,queues=2 {option}");
    let mut daemon = serve(dir, &arguments);
    let mut guest = start(dir);
    let (mut results, mut killed) = (Vec::new(), 0);
    loop {
        // Two answers, so that the last one comes from the daemon that is killed next.
        let mut answers = 0;
        while killed < kills && answers < 2 && results.is_empty() {
            let line = guest.wait_for("guest: ").unwrap();
            answers += u32::from(line == "guest: at work");
            results.extend(result(line));
        }
        if answers < 2 {
            break;
        }
        daemon.kill();
        killed += 1;
        // The guest's requests pile up meanwhile.
        std::thread::sleep(Duration::from_millis(300));
        daemon = serve(dir, &arguments);
        // Lines from before the restart are not answers of the new daemon.
        results.extend(guest.take_lines().into_iter().filter_map(result));
    }
    assert!(killed > 0, "fio ended before the first kill");
    while results.len() < 3 {
        results.extend(result(guest.wait_for("guest: ").unwrap()));
    }
    assert_eq!(results, ["guest: fio 0", "guest: fsck 0", "guest: end"]);
    println!("{killed} of {kills} kills came before fio's end");
    assert!(guest.end().unwrap().success());
    daemon.stop();
    succeed(dir, "disk check disk.img");
}

/// The line, if it reports how a step ended.
fn result(line: String) -> Option<String> {
    let starts = ["guest: fio ", "guest: fsck ", "guest: end"];
    starts
        .iter()
        .any(|start| line.starts_with(start))
        .then_some(line)
}
