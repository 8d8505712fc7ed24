//! QEMU's vhost-user-scsi under Debian's Linux 6.12: what the guest's kernel makes of a target.

use walvisor_guest_images::Guest;
use walvisor_tests::{have, newer_images, serve, succeed};

/// The guest's script: it prints what the kernel says of each LUN, copies bytes, and waits until
/// LUN 1 has grown.
const SCRIPT: &str = "
lun() { ls -d /sys/bus/scsi/devices/*:0:0:$1/block/* 2>/dev/null; }
until [ -n \"$(lun 0)\" ] && [ -n \"$(lun 1)\" ]; do sleep 0.1; done
for number in 0 1; do
    disk=$(lun $number)
    echo guest: lun $number: $(cat $disk/size) sectors, $(cat $disk/queue/write_cache), fua $(cat $disk/queue/fua)
    # MAXIMUM ATOMIC TRANSFER LENGTH: bytes 44 to 47.
    echo guest: lun $number: limits $(hexdump -v -e '/1 \"%02x\"' $disk/device/vpd_pgb0 | cut -c 89-96)
    echo guest: atomic $(cat $disk/queue/atomic_write_unit_max_bytes)
done
dd if=/dev/urandom of=/bytes bs=64k count=64 2>/dev/null
dd if=/bytes of=/dev/$(basename $(lun 1)) bs=64k conv=fsync 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
dd if=/dev/$(basename $(lun 1)) bs=64k count=64 2>/dev/null | cmp - /bytes && echo guest: read back
echo guest: waits
until [ \"$(cat $(lun 1)/size)\" = 262144 ]; do sleep 0.1; done
echo guest: grown
";

#[test]
fn linux_sees_two_luns_their_atomic_writes_and_a_resize() {
    if !have("qemu-system-x86_64", "qemu-system-x86") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a", "b"] {
        succeed(dir, &format!("disk create {disk} --size 64M --log log"));
    }
    let arguments = "--control ctl --disk path=a,log=log,device=scsi,socket=s,queues=2 \
        --disk path=b,log=log,device=scsi,socket=s";
    let daemon = serve(dir, arguments);
    let device = "vhost-user-scsi-pci,chardev=s,num_queues=2,hotplug=on,param_change=on";
    let socket = format!("socket,id=s,path={}", dir.join("s").display());
    let qemu = ["-chardev", &socket, "-device", device].map(str::to_owned);
    let mut guest = Guest::qemu(dir, &newer_images(), &qemu, SCRIPT).unwrap();
    let mut next = || guest.wait_for("guest: ").unwrap();
    for number in 0..2 {
        let seen = format!("guest: lun {number}: 131072 sectors, write back, fua 1");
        assert_eq!(next(), seen);
        let limits = next();
        let blocks = limits.rsplit(' ').next().unwrap();
        let blocks = u32::from_str_radix(blocks, 16).expect("a number of blocks");
        assert!(blocks >= 65536 / 512, "{limits}");
        let atomic = next();
        let bytes: u32 = atomic["guest: atomic ".len()..].parse().expect("bytes");
        assert!(bytes >= 65536, "{atomic}");
    }
    assert_eq!(next(), "guest: read back");
    assert_eq!(next(), "guest: waits");
    succeed(dir, "ctl ctl resize --disk b --size 128M");
    assert_eq!(next(), "guest: grown");
    assert_eq!(next(), "guest: end");
    assert!(guest.end().unwrap().success());
    daemon.stop();
}
