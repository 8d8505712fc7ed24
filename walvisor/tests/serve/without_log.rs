//! `backend=raw`: a client's writes are in the image at once, and nowhere else.

use std::fs;
use std::process::{Command, Stdio};

use walvisor_testkit::nbd::{BLOCK_STATUS, RawClient, WRITE_ZEROES};
use walvisor_tests::have_python;

use super::lifecycle::WITHOUT_IO_URING;
use super::{Daemon, MIB, WALVISOR, noise, read, refused, test_dir};

const TRIM: u16 = 4;

/// With io_uring and without.
#[test]
fn an_image_is_served_without_a_log() {
    let dir = &test_dir();
    let mut contents = noise(8 << 20);
    fs::write(dir.join("disk.img"), &contents).unwrap();
    let disk = "path=disk.img,backend=raw,socket=s";
    for without in [false, true] {
        if without && !have_python() {
            return;
        }
        let mut command = if without {
            let mut python = Command::new("python3");
            python.args(["-c", WITHOUT_IO_URING, WALVISOR]);
            python
        } else {
            Command::new(WALVISOR)
        };
        command.args(["serve", "nbd", "--disk", disk]);
        let daemon = Daemon::start_as(dir, command.stdin(Stdio::null()), 1);
        let mut client = RawClient::extended(&dir.join("s"));
        let data = vec![1 + u8::from(without); 3 << 20];
        client.write(1, MIB, &data);
        contents[1 << 20..4 << 20].copy_from_slice(&data);
        for (command, at, len) in [(TRIM, 512, 4096), (WRITE_ZEROES, 6 << 20, 1 << 20)] {
            client.request(0, command, 1, at as u64, len as u64);
            assert_eq!(client.reply().kind, 0);
            contents[at..at + len].fill(0);
        }
        client.flush(2);
        assert!(read(&mut client, 0, 8 * MIB) == contents);
        client.request(0, BLOCK_STATUS, 3, 0, 8 * MIB);
        assert_ne!(client.reply().data.len(), 0);
        // The data is in the image while it is served, and there is no log.
        assert!(fs::read(dir.join("disk.img")).unwrap() == contents);
        assert!(!fs::exists(dir.join("disk.img.wal")).unwrap());
        // No other daemon can open the image meanwhile, with either backend.
        for backend in if without { &["raw"] } else { &["wal"] } {
            let other = format!("serve nbd --disk path=disk.img,backend={backend},socket=t");
            refused(dir, &other, 1, &["already open elsewhere"]);
        }
        let _ = fs::remove_dir_all(dir.join("disk.img.wal"));
        assert_eq!(daemon.stop(), "");
    }
}
