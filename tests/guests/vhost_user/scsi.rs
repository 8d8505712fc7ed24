//! QEMU's vhost-user-scsi under newer kernels: what the guest's kernel makes of a target, and which
//! volumes and file systems pass its atomic writes on.

use walvisor_guest_images::guest::END;
use walvisor_guest_images::{Guest, NewerKernel};
use walvisor_tests::{have, newer_images, serve, succeed, with_program};

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
    let mut guest = Guest::qemu(dir, &newer_images(NewerKernel::V6_12), &qemu, SCRIPT).unwrap();
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

#[test]
fn atomic_writes_reach_volumes_and_files() {
    if !have("qemu-system-x86_64", "qemu-system-x86") {
        return;
    }
    for kernel in [NewerKernel::V6_12, NewerKernel::Newest] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        for (disk, size) in [("a", "64M"), ("b", "512M")] {
            succeed(dir, &format!("disk create {disk} --size {size} --log log"));
        }
        let disk = |name: &str| format!("--disk path={name},log=log,device=scsi,socket=s ");
        let daemon = serve(dir, &(disk("a") + &disk("b")));
        let socket = format!("socket,id=s,path={}", dir.join("s").display());
        let device = "vhost-user-scsi-pci,chardev=s";
        let qemu = ["-chardev", &socket, "-device", device].map(str::to_owned);
        let script = include_str!("../../scripts/atomic-volumes.sh");
        let script = with_program(dir, "atomic", script);
        let mut guest = Guest::qemu(dir, &newer_images(kernel), &qemu, &script).unwrap();
        let version = guest.wait_for("guest: Linux ").unwrap();
        let version = &version["guest: ".len()..];
        // What the program prints of each place: its unit, and its writes.
        let mut places: Vec<(String, u32, Vec<String>)> = Vec::new();
        loop {
            let line = guest.wait_for("guest: ").unwrap();
            if line == END {
                break;
            }
            let text = &line["guest: ".len()..];
            println!("{version}: {text}");
            if let Some(unit) = text.strip_prefix("statx ") {
                places.last_mut().unwrap().1 = unit.parse().unwrap();
            } else if text.starts_with("RWF_ATOMIC ") {
                places.last_mut().unwrap().2.push(text.to_owned());
            } else {
                places.push((text.to_owned(), 0, Vec::new()));
            }
        }
        let found: Vec<_> = places.iter().map(|(place, ..)| place.as_str()).collect();
        assert_eq!(found, ["disk", "volume", "ext4", "xfs", "ext4 by default"]);
        for (place, unit, written) in &places {
            // Linux 6.12 has atomic writes for disks only.
            let most = match (place.as_str(), kernel) {
                ("disk", _) => 256 << 10,
                ("ext4 by default", _) | (_, NewerKernel::V6_12) => continue,
                _ => 64 << 10,
            };
            assert!(*unit >= most, "{version}: {place}: {unit}");
            let whole = format!("RWF_ATOMIC {}: read back", 64 << 10);
            assert!(written.contains(&whole), "{version}: {place}: {written:?}");
        }
        assert!(guest.end().unwrap().success());
        daemon.stop();
    }
}
