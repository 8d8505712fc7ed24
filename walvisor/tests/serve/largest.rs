//! Disks as large as offsets allow. Their base images are sparse, on a file system that holds files
//! of any length.

use std::fs::File;
use std::path::Path;

use walvisor_testkit::nbd::{BLOCK_STATUS, FLUSH, READ, RawClient, WRITE, WRITE_ZEROES};
use walvisor_tests::have;

use super::vhost_user::Client;
use super::{Daemon, MIB, client, create, refused, succeed, test_dir};

/// The largest disk in bytes that Linux and the NBD protocol can address: offsets are signed.
const LARGEST: u64 = (1 << 63) - 512;
/// The largest disk in bytes that QEMU accepts: it rounds 2^63 - 1 down to its greatest alignment
/// of 1 GiB.
const LARGEST_OF_QEMU: u64 = (1 << 63) - (1 << 30);

/// A directory on a file system that holds files of any length. `None`: there is none, and
/// `skipped: why` was printed.
fn roomy() -> Option<tempfile::TempDir> {
    let dir = tempfile::tempdir_in("/dev/shm");
    let holds = |dir: &Path| File::create(dir.join("probe")).and_then(|file| file.set_len(LARGEST));
    match dir.and_then(|dir| holds(dir.path()).map(|()| dir)) {
        Ok(dir) => Some(dir),
        Err(error) => {
            println!("skipped: /dev/shm holds no file of {LARGEST} bytes: {error}");
            None
        }
    }
}

#[test]
fn the_last_sector_of_the_largest_disk() {
    if !have("nbdsh", "python3-libnbd") || !have("qemu-io", "qemu-utils") {
        return;
    }
    let Some(dir) = roomy() else {
        return;
    };
    let dir = dir.path();
    create(dir, "largest.img", &format!("{LARGEST} --log logs"));
    create(dir, "qemu.img", &format!("{LARGEST_OF_QEMU} --log logs"));
    let serve = "--disk path=largest.img,log=logs,socket=s --disk path=qemu.img,log=logs,socket=q";
    let daemon = Daemon::start(dir, serve);
    let told = client(dir, "nbdinfo", &["--size", daemon.uri()]);
    assert_eq!(told.trim(), LARGEST.to_string());
    daemon.nbdsh(
        "n = h.get_size()
h.pwrite(b'a' * 4096, n - 4096)
h.trim(512, n - 1024)
h.zero(512, n - 512, nbd.CMD_FLAG_FUA)
h.pwrite(b'b' * 512, n - 512)
h.flush()
h.set_strict_mode(0)
for call in [lambda: h.pread(512, n), lambda: h.pwrite(bytes(1024), n - 512), lambda: h.zero(512, \
         (1 << 64) - 512)]:
    try:
        call()
    except nbd.Error:
        continue
    assert False",
    );
    let last = "assert h.pread(4096, h.get_size() - 4096) == b'a' * 3072 + bytes(512) + b'b' * 512";
    daemon.nbdsh(last);
    let write = format!("write -f -P 9 {} 1M", LARGEST_OF_QEMU - MIB);
    let read = format!("read -P 9 {} 1M", LARGEST_OF_QEMU - MIB);
    let commands = ["-f", "raw", "-c", &write, "-c", &read, &daemon.uris[1]];
    let out = client(dir, "qemu-io", &commands);
    assert!(!out.contains("fail"), "{out}");

    // Only extended headers can carry so long a range. The server describes a part of it.
    // Then the disk's end.
    let mut raw = RawClient::extended(&dir.join("s"));
    let mut map = |offset: u64| {
        raw.request(0, BLOCK_STATUS, 1, offset, LARGEST - offset);
        let data = raw.reply().data;
        let longs = data[8..].chunks(8);
        let longs = longs.map(|long| u64::from_be_bytes(long.try_into().unwrap()));
        longs.collect::<Vec<_>>()
    };
    let start = map(0);
    assert!(start[0] >= 1 << 32 && start[1] == 3, "{start:?}");
    let end = map(LARGEST - (1 << 30));
    assert_eq!(end, [(1 << 30) - 4096, 3, 3072, 0, 512, 3, 512, 0]);
    // Zeroes the last 5 TiB except two sectors: more than one record can describe.
    raw.request(0, WRITE_ZEROES, 2, LARGEST - (5 << 40), (5 << 40) - 1024);
    assert_eq!(raw.reply().kind, 0);
    raw.request(1 << 5, WRITE, 3, LARGEST - 1024, 512);
    raw.send(&[3; 512]);
    assert_eq!(raw.reply().kind, 0);
    raw.request(0, FLUSH, 4, 0, 0);
    assert_eq!(raw.reply().kind, 0);
    // The data is read from the log first, then from the base image.
    daemon.kill();
    let last =
        "assert h.pread(4096, h.get_size() - 4096) == bytes(3072) + b'\\x03' * 512 + b'b' * 512";
    for _ in 0..2 {
        let daemon = Daemon::start(dir, serve);
        daemon.nbdsh(last);
        assert_eq!(daemon.stop(), "");
    }
    succeed(dir, "disk check largest.img --log logs");

    let disk = "--disk path=largest.img,log=logs,socket=v";
    let daemon = Daemon::start_door(dir, "vhost-user", disk);
    let mut virtio = Client::connect(&dir.join("v"), 1);
    assert_eq!(virtio.capacity(), LARGEST / 512);
    for byte in [b'b', 4] {
        virtio.read(0, 0, LARGEST - 512, 512);
        virtio.finish(0, 1);
        assert_eq!(virtio.data(0, 512), [byte; 512]);
        virtio.write(0, 0, LARGEST - 512, &[4; 512]);
        virtio.finish(0, 1);
    }
    drop(virtio);
    assert_eq!(daemon.stop(), "");
}

/// A reply to BLOCK_STATUS covers 8 GiB at most, and libnbd and QEMU ask for less than 4 GiB:
/// thousands of requests.
#[test]
fn a_16_tib_disk_has_its_block_status_map() {
    if !have("nbdsh", "python3-libnbd") || !have("qemu-img", "qemu-utils") {
        return;
    }
    let Some(dir) = roomy() else {
        return;
    };
    let dir = dir.path();
    create(dir, "disk.img", "16T");
    let (size, middle, last) = (16_u64 << 40, 8_u64 << 40, 65536);
    let extents = [
        (0, middle, true),
        (middle, 4096, false),
        (middle + 4096, size - middle - 4096 - last, true),
        (size - last, last, false),
    ];
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    daemon.nbdsh(&format!(
        "h.pwrite(b'a' * 4096, {middle})
h.pwrite(b'b' * {last}, {})
h.flush()",
        size - last
    ));
    let arguments = ["map", "-f", "raw", "--output=json", daemon.uri()];
    let map = client(dir, "qemu-img", &arguments);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let map = map.as_array().unwrap().iter();
    let map = map.map(|part| {
        let number = |key: &str| part[key].as_u64().unwrap();
        (number("start"), number("length"), part["zero"] == true)
    });
    assert_eq!(map.collect::<Vec<_>>(), extents);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_disk_that_no_file_system_or_offset_holds_is_refused() {
    let dir = &test_dir();
    let too_long = |size: u64| {
        let file = File::create(dir.join("probe")).unwrap();
        file.set_len(size).is_err()
    };
    let mut cases = vec![((1_u64 << 63).to_string(), "below 2^63")];
    // This exceeds ext4's longest file; other file systems may hold it.
    if too_long(17 << 40) {
        cases.push(("17T".to_owned(), "exceed the longest file"));
    }
    for (size, part) in cases {
        let create = format!("disk create disk.img --size {size}");
        refused(dir, &create, 1, &[part]);
        assert!(!dir.join("disk.img").exists() && !dir.join("disk.img.wal").exists());
    }
    create(dir, "disk.img", "1M");
    if too_long(17 << 40) {
        let longer = "disk resize disk.img --size 17T";
        refused(dir, longer, 1, &["exceed the longest file"]);
        succeed(dir, "disk check disk.img");
        assert_eq!(std::fs::metadata(dir.join("disk.img")).unwrap().len(), MIB);
    }
}

#[test]
fn endless_write_zeroes_delay_neither_other_clients_nor_shutdown() {
    let Some(dir) = roomy() else {
        return;
    };
    let dir = dir.path();
    create(dir, "largest.img", &LARGEST.to_string());
    let daemon = Daemon::start(dir, "--disk path=largest.img,socket=s");
    // This takes millions of records, one after the other.
    let mut endless = RawClient::extended(&dir.join("s"));
    endless.request(0, WRITE_ZEROES, 1, 0, LARGEST);
    let mut others = [(); 4].map(|()| RawClient::extended(&dir.join("s")));
    for round in 0..8 {
        for other in &mut others {
            other.request(0, READ, round, LARGEST - 4096, 4096);
            assert_eq!(other.reply().data[8..], [0; 4096]);
            other.request(0, FLUSH, round, 0, 0);
            assert_eq!(other.reply().kind, 0);
        }
    }
    assert_eq!(daemon.stop(), "");
    // ESHUTDOWN, since a part of the range was not zeroed.
    let reply = endless.reply();
    assert_eq!((reply.kind, reply.cookie), ((1 << 15) + 1, 1));
    assert_eq!(reply.data[..4], 108_u32.to_be_bytes());
}
