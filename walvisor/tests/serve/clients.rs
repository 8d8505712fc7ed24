//! Third-party clients: libnbd's programs, QEMU's, fio.

use std::fs;

use serde_json::Value;
use walvisor_tests::have;

use super::{Daemon, MIB, client, create, noise, run_client, test_dir};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn nbdinfo_sees_the_features_of_each_disk() {
    if !have("nbdinfo", "libnbd-bin") {
        return;
    }
    let dir = &test_dir();
    create(dir, "a.img", "8M --log logs");
    create(dir, "b.img", "1M --log logs");
    let daemon = Daemon::start(
        dir,
        "--disk path=a.img,log=logs,socket=s --disk \
         path=b.img,log=logs,socket=s,serial=second,readonly=on",
    );
    let list = json(&client(
        dir,
        "nbdinfo",
        &["--json", "--list", "nbd+unix:///?socket=s"],
    ));
    let exports = list["exports"].as_array().unwrap();
    let names: Vec<_> = exports
        .iter()
        .map(|export| &export["export-name"])
        .collect();
    assert_eq!(names, ["a.img", "second"]);
    let told = |uri: &str| json(&client(dir, "nbdinfo", &["--json", uri]))["exports"][0].clone();
    let (a, b) = (told(&daemon.uris[0]), told(&daemon.uris[1]));
    assert_eq!(
        (&a["export-size"], &b["export-size"]),
        (&(8 * MIB).into(), &MIB.into())
    );
    for can in "multi_conn flush fua trim zero fast_zero df".split(' ') {
        assert_eq!(a[format!("can_{can}")], true, "{can}: {a}");
    }
    assert_eq!(
        (&a["is_read_only"], &b["is_read_only"]),
        (&false.into(), &true.into())
    );
    assert_eq!(b["can_trim"], false);
    assert_eq!(
        (&a["block_size_minimum"], &a["block_size_preferred"]),
        (&512.into(), &4096.into())
    );
    assert_eq!(a["contexts"][0], "base:allocation");
    // With two disks the empty name is ambiguous.
    let output = run_client(dir, "nbdinfo", &["nbd+unix:///?socket=s"]);
    assert!(!output.status.success());
    assert_eq!(daemon.stop(), "");
}

#[test]
fn nbdcopy_copies_data_and_holes_in_and_out() {
    if !have("nbdcopy", "libnbd-bin") {
        return;
    }
    let dir = &test_dir();
    create(dir, "disk.img", "32M");
    let mut raw = vec![0; 32 << 20];
    raw[3 << 20..8 << 20].copy_from_slice(&noise(5 << 20));
    fs::write(dir.join("in.raw"), &raw).unwrap();
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    client(dir, "nbdcopy", &["--flush", "in.raw", daemon.uri()]);
    let map = json(&client(dir, "nbdinfo", &["--json", "--map", daemon.uri()]));
    let map: Vec<_> = map
        .as_array()
        .unwrap()
        .iter()
        .map(|extent| {
            (
                extent["length"].as_u64().unwrap() / MIB,
                extent["type"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(map, [(3, 3), (5, 0), (24, 3)]);
    client(dir, "nbdcopy", &[daemon.uri(), "out.raw"]);
    assert!(fs::read(dir.join("out.raw")).unwrap() == raw);
    assert_eq!(daemon.stop(), "");
    // After an orderly end the image holds the whole disk.
    assert!(fs::read(dir.join("disk.img")).unwrap() == raw);
}

#[test]
fn qemu_writes_and_finds_what_it_wrote() {
    if !have("qemu-img", "qemu-utils") {
        return;
    }
    let dir = &test_dir();
    create(dir, "disk.img", "16M");
    fs::write(dir.join("in.raw"), noise(16 << 20)).unwrap();
    let daemon = Daemon::start(dir, "--disk path=disk.img,port=0");
    assert!(
        daemon.uri().starts_with("nbd://127.0.0.1:"),
        "{}",
        daemon.uri()
    );
    for words in ["convert -n -f raw -O raw", "compare -f raw -F raw"] {
        let words = words.split(' ').chain(["in.raw", daemon.uri()]);
        client(dir, "qemu-img", &words.collect::<Vec<_>>());
    }
    let commands = [
        "write -P 7 1M 64k",
        "write -f -P 8 2M 4k",
        "discard 3M 1M",
        "write -z 4M 1M",
        "write -zu 5M 1M",
        "aio_write -P 9 6M 512k",
        "aio_write -P 10 7M 512k",
        "aio_flush",
        "flush",
        "read -P 7 1M 64k",
        "read -P 8 2M 4k",
        "read -P 0 3M 3M",
        "read -P 9 6M 512k",
        "read -P 10 7M 512k",
    ];
    let mut arguments = vec!["-f", "raw"];
    arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
    arguments.push(daemon.uri());
    let out = client(dir, "qemu-io", &arguments);
    assert!(!out.contains("fail"), "{out}");
    assert_eq!(daemon.stop(), "");
    let image = fs::read(dir.join("disk.img")).unwrap();
    assert!(image[1 << 20..][..64 << 10].iter().all(|&byte| byte == 7));
    assert!(image[3 << 20..6 << 20].iter().all(|&byte| byte == 0));
}

#[test]
fn the_longest_request_is_served_and_an_impossible_one_is_an_error() {
    if !have("nbdsh", "python3-libnbd") {
        return;
    }
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    create(dir, "long.img", "64M");
    let daemon = Daemon::start(
        dir,
        "--disk path=disk.img,socket=s --disk path=long.img,socket=l --disk backend=ram,size=64K,readonly=on,socket=r",
    );
    // The longest request, 32 MiB, is twice the log's longest record; the second client asks for no
    // block size.
    daemon.nbdsh(
        "import errno, os
def fails(code, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errnum == code, (error, code)
    else:
        assert False, (call, arguments)
h.set_strict_mode(0)
fails(errno.EINVAL, h.pread, 3, 5)
fails(errno.EINVAL, h.pwrite, b'abc', 512)
fails(errno.EINVAL, h.pread, 4096, 1 << 20)
fails(errno.EINVAL, h.pread, 4096, (1 << 63) - 512)
fails(errno.ENOSPC, h.pwrite, bytes(4096), (1 << 20) - 512)
fails(errno.ENOSPC, h.zero, 1 << 20, 512)
fails(errno.EINVAL, h.trim, 1 << 31, 0)
fails(errno.EINVAL, h.cache, 4096, 0)
r = nbd.NBD()
r.set_strict_mode(0)
r.connect_unix('r')
fails(errno.EPERM, r.pwrite, bytes(512), 0)
fails(errno.EPERM, r.trim, 512, 0)
fails(errno.EPERM, r.zero, 512, 0)
r.flush()
assert r.pread(65536, 0) == bytes(65536)
h.pwrite(b'x' * 512, 512)
h.zero(1 << 20, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)
assert h.pread(1 << 20, 0, nbd.CMD_FLAG_DF) == bytes(1 << 20)
data = os.urandom(32 << 20)
l = nbd.NBD()
l.set_strict_mode(0)
l.connect_unix('l')
l.pwrite(data, 4096)
old = nbd.NBD()
old.set_request_structured_replies(False)
old.set_opt_mode(True)
old.connect_unix('l')
old.set_export_name('long.img')
old.opt_go()
assert old.pread(32 << 20, 4096) == data
old.shutdown()",
    );
    assert_eq!(daemon.stop(), "");
}
