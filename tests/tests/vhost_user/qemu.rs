//! QEMU's vhost-user-blk: a guest that goes on when the daemon comes back.

use std::time::Duration;

use super::guest::{Guest, have, images};
use super::{Daemon, succeed};

const STORM: &str = "
mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt
# Told from a side, so that the kills come in the middle.
(while sleep 1; do echo guest: at work; done) &
fio --name=storm --directory=/mnt --rw=randwrite --bs=4k --size=16M --loops=6 --ioengine=libaio --iodepth=16 \
    --direct=1 --fsync=16 --verify=crc32c --do_verify=1 --minimal >/dev/null
echo guest: fio $?
umount /mnt; e2fsck -fn /dev/vda >/dev/null 2>&1; echo guest: fsck $?
";

#[test]
fn a_guest_goes_on_when_its_daemon_was_killed_and_is_back() {
    if !have("qemu-system-x86_64", "qemu-system-x86") {
        return;
    }
    let (dir, images) = (tempfile::tempdir().unwrap(), images());
    let dir = dir.path();
    succeed(dir, "disk create disk.img --size 64M");
    let serve = || Daemon::start(dir, "--disk path=disk.img,socket=s,queues=2");
    let mut daemon = serve();
    let mut guest = Guest::qemu(dir, &images, &dir.join("s"), 2, STORM);
    for _ in 0..3 {
        // The last answer comes from the daemon that is killed next.
        guest.wait_for("guest: at work");
        guest.wait_for("guest: at work");
        daemon.kill();
        // Requests pile up meanwhile.
        std::thread::sleep(Duration::from_millis(300));
        daemon = serve();
    }
    assert_eq!(next_result(&mut guest), "guest: fio 0");
    assert_eq!(next_result(&mut guest), "guest: fsck 0");
    guest.wait_for("guest: end");
    assert!(guest.end().success());
    daemon.stop();
    succeed(dir, "disk check disk.img");
}

fn next_result(guest: &mut Guest) -> String {
    loop {
        let line = guest.wait_for("guest: ");
        if line != "guest: at work" {
            return line;
        }
    }
}
