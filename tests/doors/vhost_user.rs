//! `walvisor serve vhost-user` under user-mode Linux.

use walvisor_guest_images::UserMode;
use walvisor_tests::{have, images, serve, succeed};

#[test]
fn a_file_system_works_and_is_in_the_image_afterwards() {
    if !have("linux.uml", "user-mode-linux") {
        return;
    }
    let (dir, images) = (tempfile::tempdir().unwrap(), images());
    let dir = dir.path();
    succeed(dir, "disk create disk.img --size 128M");
    let daemon = serve(dir, "--disk path=disk.img,socket=s,serial=the-disk");
    let with_disk = UserMode {
        disks: vec![dir.join("s")],
        ..UserMode::default()
    };
    let guest = with_disk.boot(
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
