//! `walvisor serve vhost-user` under user-mode Linux: a guest that cannot reconnect, so a kill of the
//! daemon is a power cut for it.

use std::collections::HashMap;
use std::path::Path;

use walvisor_guest_images::UserMode;
use walvisor_tests::{have, images, serve, succeed};

/// User-mode Linux with the disk at `socket` as /dev/vda.
fn user_mode(socket: &Path) -> UserMode {
    UserMode {
        disks: vec![socket.to_owned()],
        ..UserMode::default()
    }
}

#[test]
fn a_file_system_works_and_is_in_the_image_afterwards() {
    if !have("linux.uml", "user-mode-linux") {
        return;
    }
    let (dir, images) = (tempfile::tempdir().unwrap(), images());
    let dir = dir.path();
    succeed(dir, "disk create disk.img --size 128M");
    let daemon = serve(dir, "--disk path=disk.img,socket=s,serial=the-disk");
    let guest = user_mode(&dir.join("s")).boot(
        dir,
        &images,
        "echo guest: serial $(cat /sys/block/vda/serial) size $(cat /sys/block/vda/size)
         mkfs.ext4 -q /dev/vda && mount -o discard /dev/vda /mnt
         fio --name=verify --directory=/mnt --rw=randwrite --bs=4k-64k --size=24M --fsync=16 --verify=crc32c \
             --do_verify=1 --ioengine=libaio --iodepth=8 --direct=1 --minimal >/dev/null
         echo guest: fio $?
         echo 'it was written' >/mnt/file; rm /mnt/verify*; fstrim /mnt; echo guest: trim $?
         umount /mnt; e2fsck -fn /dev/vda >/dev/null 2>&1; echo guest: fsck $?",
    );
    let mut guest = guest.unwrap();
    assert_eq!(
        guest.wait_for("guest: serial").unwrap(),
        "guest: serial the-disk size 262144"
    );
    assert_eq!(guest.wait_for("guest: fio").unwrap(), "guest: fio 0");
    assert_eq!(guest.wait_for("guest: trim").unwrap(), "guest: trim 0");
    assert_eq!(guest.wait_for("guest: fsck").unwrap(), "guest: fsck 0");
    guest.wait_for("guest: end").unwrap();
    guest.end().unwrap();
    daemon.stop();
    succeed(dir, "disk check disk.img");
    let output = std::process::Command::new("debugfs")
        .args(["-R", "cat /file", "disk.img"])
        .current_dir(dir)
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "it was written\n");
}

/// Four writers, each with files of 4 KiB one after the other, print each file that fsync has
/// acknowledged.
const STORM: &str = "
mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt
store() {
    i=1
    while yes \"$1 $i\" | head -c 4096 | dd of=/mnt/$1.$i bs=4k conv=fsync 2>/dev/null; do
        echo \"guest: stored $1 $i\"
        i=$((i + 1))
    done
}
for writer in a b c d; do store $writer & done
wait
";

#[test]
fn a_kill_of_the_daemon_loses_nothing_that_fsync_acknowledged() {
    if !have("linux.uml", "user-mode-linux") {
        return;
    }
    let (dir, images) = (tempfile::tempdir().unwrap(), images());
    let dir = dir.path();
    for kill_after in [40, 150] {
        let disk = format!("{kill_after}.img");
        let serve = || serve(dir, &format!("--disk path={disk},socket=s"));
        succeed(dir, &format!("disk create {disk} --size 128M"));
        let daemon = serve();
        let mut guest = user_mode(&dir.join("s")).boot(dir, &images, STORM).unwrap();
        let mut stored: HashMap<String, u64> = HashMap::new();
        let mut count = 0;
        while count < kill_after {
            let line = guest.wait_for("guest: stored").unwrap();
            let mut words = line.split(' ').skip(2);
            let writer = words.next().unwrap().to_owned();
            stored.insert(writer, words.next().unwrap().parse().unwrap());
            count += 1;
        }
        daemon.kill();
        drop(guest);

        succeed(dir, &format!("disk check {disk}"));
        let daemon = serve();
        let check: String = stored
            .iter()
            .map(|(writer, last)| {
                format!(
                    "for i in $(seq {last}); do
                         yes \"{writer} $i\" | head -c 4096 | cmp - /mnt/{writer}.$i || echo guest: lost {writer} $i
                     done\n"
                )
            })
            .collect();
        let script = format!(
            "mount /dev/vda /mnt && echo guest: mounted
             {check}
             umount /mnt; e2fsck -fn /dev/vda >/dev/null 2>&1; echo guest: fsck $?"
        );
        let mut guest = user_mode(&dir.join("s"))
            .boot(dir, &images, &script)
            .unwrap();
        guest.wait_for("guest: mounted").unwrap();
        // The guest reports lost files before this line.
        assert_eq!(guest.wait_for("guest: ").unwrap(), "guest: fsck 0");
        guest.wait_for("guest: end").unwrap();
        guest.end().unwrap();
        daemon.stop();
    }
}
