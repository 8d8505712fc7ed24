//! `device=scsi`: two LUNs of one target, on one log with a virtio-blk disk and an NBD export.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::virtio::scsi::{EVENTS, lun};
use walvisor_testkit::virtio::{BlockDriver, Piece, VhostUserRegisters, guest_memory};

use super::vhost_user::Client;
use super::{create, ctl, ctl_refused, disk_stats, serve, test_dir};

const DISKS: &str = "--control ctl --disk-dir . \
    --disk path=a,log=log,door=vhost-user,device=scsi,socket=s,queues=2 \
    --disk path=b,log=log,door=vhost-user,device=scsi,socket=s \
    --disk path=c,log=log,door=vhost-user,socket=v \
    --disk path=d,log=log,door=nbd,socket=n";

/// A driver of the target at `s`, which outlives the daemon if it is `kept`.
fn driver(dir: &Path, kept: bool) -> BlockDriver<()> {
    let memory = guest_memory();
    let mut registers = VhostUserRegisters::connect(&dir.join("s"), &memory, 4, ());
    if kept {
        registers.track_in_flight(256);
    }
    let mut driver = BlockDriver::new(Box::new(registers), Arc::clone(&memory), ());
    driver.initialise(u64::MAX);
    for unit in [0, 1] {
        // The unit attention condition of the reset.
        assert_eq!(driver.command(lun(unit), &[0; 6], &[], 0).code(), [0x29, 3]);
    }
    driver
}

/// READ (10) or WRITE (10) of a block.
fn cdb(opcode: u8, lba: u8) -> [u8; 10] {
    [opcode, 0, 0, 0, 0, lba, 0, 0, 1, 0]
}

#[track_caller]
fn write(driver: &mut BlockDriver<()>, unit: u8, lba: u8, byte: u8) {
    let answer = driver.command(lun(unit), &cdb(0x2a, lba), &[byte; 512], 0);
    assert_eq!((answer.verdict(), answer.residual), ((0, 0), 0));
}

#[track_caller]
fn read(driver: &mut BlockDriver<()>, unit: u8, lba: u8) -> Vec<u8> {
    let answer = driver.command(lun(unit), &cdb(0x28, lba), &[], 512);
    assert_eq!(answer.verdict(), (0, 0));
    answer.data
}

fn make_disks(dir: &Path) {
    for disk in ["a", "b", "c", "d"] {
        create(dir, disk, "4M --log log");
    }
}

/// The last write of each driver is not flushed; the driver outlives its daemon.
#[test]
fn two_luns_share_a_log_with_the_disks_of_other_doors() {
    let dir = &test_dir();
    make_disks(dir);
    let daemon = serve(dir, DISKS, 4);
    assert!(daemon.uris[..2].iter().all(|place| place.ends_with("/s")));
    let mut target = driver(dir, true);
    let mut guest = Client::connect(&dir.join("v"), 1);
    let mut export = RawClient::extended_to(&dir.join("n"), "d");
    for unit in [0, 1] {
        write(&mut target, unit, 3, 10 + unit);
        // Block Limits: MAXIMUM ATOMIC TRANSFER LENGTH in blocks.
        let page = target.command(lun(unit), &[0x12, 1, 0xb0, 0, 64, 0], &[], 64);
        let most = u32::from_be_bytes(page.data[44..48].try_into().unwrap());
        assert!(most >= 65536 / 512, "{most}");
    }
    guest.write(0, 0, 0, &[12; 512]);
    guest.finish(0, 1);
    export.write(0, 512, &[13; 512]);
    // SYNCHRONIZE CACHE (10) of one unit: all earlier writes are in the log before it.
    let flushed = target.command(lun(1), &cdb(0x35, 0), &[], 0);
    assert_eq!(flushed.verdict(), (0, 0));
    write(&mut target, 0, 4, 14);
    daemon.kill();
    drop((target, guest, export));

    let daemon = serve(dir, DISKS, 4);
    let mut target = driver(dir, false);
    for (unit, lba, byte) in [(0, 3, 10), (1, 3, 11), (0, 4, 14)] {
        assert_eq!(read(&mut target, unit, lba), [byte; 512]);
    }
    drop(target);
    assert_eq!(daemon.stop(), "");
    for (disk, block, byte) in [
        ("a", 3, 10),
        ("a", 4, 14),
        ("b", 3, 11),
        ("c", 0, 12),
        ("d", 1, 13),
    ] {
        let contents = fs::read(dir.join(disk)).unwrap();
        assert_eq!(contents[block * 512..][..512], [byte; 512], "{disk}");
    }
}

#[test]
fn the_control_socket_controls_each_lun() {
    let dir = &test_dir();
    make_disks(dir);
    let daemon = serve(dir, DISKS, 4);
    let mut target = driver(dir, false);
    let at = target.allocate(16);
    target.rings[EVENTS].add(&[Piece::writable(at, 16)]);
    target.kick(EVENTS);
    assert_eq!(ctl(dir, "resize --disk b --size 8M")["size_bytes"], 8 << 20);
    target.next_used(EVENTS);
    // CAPACITY DATA HAS CHANGED, then READ CAPACITY (10): the last block.
    let capacity = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(target.command(lun(1), &capacity, &[], 8).code(), [0x2a, 9]);
    let answer = target.command(lun(1), &capacity, &[], 8);
    assert_eq!(answer.data[..4], (16 * 1024 - 1_u32).to_be_bytes());
    // MODE SENSE (6) of the caching page: WCE.
    let mut cache = |unit| {
        let answer = target.command(lun(unit), &[0x1a, 8, 8, 0, 64, 0], &[], 64);
        answer.data[4 + 2] & 4 != 0
    };
    assert!(cache(0) && cache(1));
    ctl(dir, "cache --disk a writethrough");
    assert!(!cache(0) && cache(1));
    ctl(dir, "limits --disk b --ops-per-second 1000000");
    ctl(dir, "pause");
    ctl(dir, "resume");
    ctl(dir, "snapshot point");
    write(&mut target, 1, 9, 9);
    let disk = |name: &str| disk_stats(dir, name);
    assert_eq!(disk("b")["writes"], 1);
    assert_eq!(disk("a")["writes"], 0);
    assert_eq!(disk("b")["transport"], "vhost-user");

    // A target's disks come and go together.
    create(dir, "e", "4M");
    for (words, part) in [
        (
            "remove-disk b",
            "they come and go together: stop the daemon",
        ),
        (
            "add-disk path=e,door=vhost-user,device=scsi,socket=s",
            "give this one a socket= of its own",
        ),
    ] {
        ctl_refused(dir, words, &[part]);
    }
    assert_eq!(read(&mut target, 1, 9), [9; 512], "it is served as before");
    ctl(dir, "add-disk path=e,door=vhost-user,device=scsi,socket=t");
    assert!(dir.join("t").exists());
    ctl(dir, "remove-disk e");
    assert!(!dir.join("t").exists());
    drop(target);
    assert_eq!(daemon.stop(), "");
}
