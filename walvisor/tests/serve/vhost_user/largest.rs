//! Disks as large as offsets allow, with a driver in user space.

use super::{BUFFER, Client, daemon};
use crate::largest::{LARGEST, roomy};
use crate::{create, noise, text, walvisor};

#[test]
fn the_last_sector_of_the_largest_disk() {
    let Some(dir) = roomy() else {
        return;
    };
    let dir = dir.path();
    create(dir, "largest.img", &LARGEST.to_string());
    let serve = || daemon(dir, "--disk path=largest.img,socket=s,queues=2");
    let daemon = serve();
    let data = noise(BUFFER);
    let mut client = Client::connect(&dir.join("s"), 2);
    assert_eq!(client.capacity(), LARGEST / 512);
    let start = LARGEST - BUFFER as u64;
    client.write(0, 0, start, &data);
    client.finish(0, 1);
    client.discard(1, 1, LARGEST - 2048, 512);
    client.write_zeroes(1, 2, LARGEST - 1024, 512);
    client.finish(1, 2);
    client.flush(1, 0);
    client.finish(1, 1);
    // Offsets beyond the end, across it, and where the offset no longer fits.
    for offset in [LARGEST, LARGEST - 512, 1 << 63, u64::MAX - 511] {
        client.write(0, 3, offset, &[1; 1024]);
        client.kick(0);
        assert_eq!(client.completions(0), [(3, -libc::EIO)], "{offset:#x}");
        client.read(0, 3, offset, 1024);
        client.kick(0);
        assert_eq!(client.completions(0), [(3, -libc::EIO)], "{offset:#x}");
        client.write_zeroes(0, 3, offset, 1024);
        client.kick(0);
        assert_eq!(client.completions(0), [(3, -libc::EIO)], "{offset:#x}");
    }
    let mut expected = data.clone();
    for hole in [2048, 1024] {
        expected[BUFFER - hole..][..512].fill(0);
    }
    let reads_back = |client: &mut Client| {
        client.read(1, 4, start, BUFFER);
        client.finish(1, 1);
        assert!(client.data(4, BUFFER) == expected);
        client.read(1, 4, 1 << 62, 4096);
        client.finish(1, 1);
        assert_eq!(client.data(4, 4096), [0; 4096]);
    };
    reads_back(&mut client);
    drop(client);
    // The data is read from the log first, then from the base image.
    daemon.kill();
    for _ in 0..2 {
        let daemon = serve();
        reads_back(&mut Client::connect(&dir.join("s"), 2));
        assert_eq!(daemon.stop(), "");
    }
    let output = walvisor(dir, "disk check largest.img");
    assert!(output.status.success(), "{}", text(&output.stderr));
}
