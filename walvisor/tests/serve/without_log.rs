//! `backend=raw`: a client's writes are in the image at once, and nowhere else.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use walvisor_testkit::nbd::{BLOCK_STATUS, FLUSH, READ, RawClient, WRITE, WRITE_ZEROES};
use walvisor_tests::have_python;

use super::lifecycle::WITHOUT_IO_URING;
use super::{Daemon, MIB, WALVISOR, create, noise, text, walvisor};

const TRIM: u16 = 4;

/// Makes an image of 8 MiB without holes, and returns its contents.
fn image(dir: &Path) -> Vec<u8> {
    let data = noise(8 << 20);
    fs::write(dir.join("disk.img"), &data).unwrap();
    data
}

/// Sends every kind of request. `contents` is the disk's contents before, and is updated to those
/// after.
fn use_disk(dir: &Path, contents: &mut [u8]) {
    let mut client = RawClient::extended(&dir.join("s"));
    let mut done = |command, offset: u64, len: usize, data: &[u8]| {
        let payload = u16::from(!data.is_empty()) << 5;
        client.request(payload, command, 1, offset, len as u64);
        client.send(data);
        client.reply()
    };
    let data = noise(3 << 20);
    assert_eq!(done(WRITE, MIB, data.len(), &data).kind, 0);
    contents[1 << 20..4 << 20].copy_from_slice(&data);
    assert_eq!(done(TRIM, 512, 4096, &[]).kind, 0);
    contents[512..4608].fill(0);
    assert_eq!(done(WRITE_ZEROES, 6 * MIB, 1 << 20, &[]).kind, 0);
    contents[6 << 20..7 << 20].fill(0);
    assert_eq!(done(FLUSH, 0, 0, &[]).kind, 0);
    let read = done(READ, 0, contents.len(), &[]);
    assert!(read.data[8..] == *contents);
    assert_ne!(done(BLOCK_STATUS, 0, contents.len(), &[]).data.len(), 0);
    // The data is in the image while it is served, and there is no log.
    assert!(fs::read(dir.join("disk.img")).unwrap() == contents);
    assert!(!fs::exists(dir.join("disk.img.wal")).unwrap());
}

#[test]
fn an_image_is_served_without_a_log_in_every_cache_mode() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut contents = image(dir);
    for cache in ["writeback", "writethrough", "unsafe"] {
        let disk = format!("--disk path=disk.img,backend=raw,socket=s,cache={cache}");
        let daemon = Daemon::start(dir, &disk);
        use_disk(dir, &mut contents);
        // No other daemon can open the image meanwhile, with either backend.
        for backend in ["raw", "wal"] {
            let other = walvisor(
                dir,
                &format!("serve nbd --disk path=disk.img,backend={backend},socket=t"),
            );
            assert_eq!(other.status.code(), Some(1));
            let error = text(&other.stderr);
            assert!(error.contains("already open elsewhere"), "{error}");
        }
        let _ = fs::remove_dir_all(dir.join("disk.img.wal"));
        assert_eq!(daemon.stop(), "");
    }
    assert!(fs::read(dir.join("disk.img")).unwrap() == contents);
}

#[test]
fn an_image_is_served_without_io_uring_too() {
    if !have_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut contents = image(dir);
    let mut python = Command::new("python3");
    python.args(["-c", WITHOUT_IO_URING, WALVISOR, "serve", "nbd"]);
    python.args([
        "--disk",
        "path=disk.img,backend=raw,socket=s,cache=writethrough",
    ]);
    let daemon = Daemon::start_as(dir, python.stdin(Stdio::null()), 1);
    use_disk(dir, &mut contents);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn an_image_with_newer_bytes_in_a_log_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    client.request(1 << 5, WRITE, 1, 0, 512);
    client.send(&[7; 512]);
    assert_eq!(client.reply().kind, 0);
    client.request(0, FLUSH, 2, 0, 0);
    assert_eq!(client.reply().kind, 0);
    daemon.kill();
    let serve = "serve nbd --disk path=disk.img,backend=raw,socket=t";
    let refused = walvisor(dir, serve);
    let error = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(
        error.contains("disk.img") && error.contains("walvisor disk checkpoint"),
        "{error}"
    );
    // The remedy in the message works.
    let checkpoint = walvisor(dir, "disk checkpoint disk.img");
    assert!(checkpoint.status.success(), "{}", text(&checkpoint.stderr));
    let daemon = Daemon::start(dir, "--disk path=disk.img,backend=raw,socket=r,readonly=on");
    let mut client = RawClient::extended(&dir.join("r"));
    client.request(0, READ, 1, 0, 512);
    assert_eq!(client.reply().data[8..], [7; 512]);
    client.request(0, FLUSH, 2, 0, 0);
    assert_eq!(client.reply().kind, 0);
    assert_eq!(daemon.stop(), "");
}
