//! Every kind of request from a driver in user space, over several queues and connections.

use super::{BUFFER, Client, daemon};
use crate::{MIB, create, metric, noise};

#[test]
fn a_driver_in_user_space_reads_what_it_wrote_over_every_queue_and_connection() {
    every_queue_and_connection("wal");
}

#[test]
fn a_driver_in_user_space_reads_what_it_wrote_without_a_log() {
    every_queue_and_connection("raw");
}

fn every_queue_and_connection(backend: &str) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "16M");
    let daemon = daemon(
        dir,
        &format!("--disk path=disk.img,backend={backend},socket=s,queues=4 --metrics metrics.txt"),
    );
    let socket = dir.join("s");
    let data = noise(16 * BUFFER);
    let piece = |index: usize| &data[index * BUFFER..][..BUFFER];
    // libblkio connects once to read the disk's properties, and again to do I/O.
    for _ in 0..3 {
        let client = Client::connect(&socket, 1);
        assert_eq!(client.capacity(), 16 * MIB / 512);
        assert_eq!(client.num_queues(), 4);
    }
    let mut client = Client::connect(&socket, 4);
    for queue in 0..4 {
        for slot in queue * 4..queue * 4 + 4 {
            client.write(queue, slot, (slot * BUFFER) as u64, piece(slot));
        }
        client.finish(queue, 4);
        client.flush(queue, 0);
        client.finish(queue, 1);
    }
    // Another queue reads the data that one queue wrote.
    for slot in 0..16 {
        let queue = 3 - slot / 4;
        client.read(queue, slot, (slot * BUFFER) as u64, BUFFER);
        client.finish(queue, 1);
        assert_eq!(client.data(slot, BUFFER), piece(slot), "slot {slot}");
    }
    client.discard(1, 0, 0, BUFFER as u64);
    client.write_zeroes(1, 1, BUFFER as u64, BUFFER as u64);
    client.finish(1, 2);
    drop(client);

    let mut client = Client::connect(&socket, 2);
    for slot in 0..16 {
        client.read(1, slot, (slot * BUFFER) as u64, BUFFER);
    }
    client.finish(1, 16);
    for slot in 0..16 {
        let expected = match slot {
            0 | 1 => &vec![0; BUFFER],
            slot => piece(slot),
        };
        assert_eq!(client.data(slot, BUFFER), expected, "slot {slot}");
    }
    // A read beyond the end fails, and later requests succeed.
    client.read(0, 0, 16 * MIB, 512);
    client.kick(0);
    assert_eq!(client.completions(0), [(0, -libc::EIO)]);
    client.read(0, 0, 16 * MIB - 512, 512);
    client.finish(0, 1);
    drop(client);
    assert_eq!(daemon.stop(), "");

    let metrics = std::fs::read_to_string(dir.join("metrics.txt")).unwrap();
    assert_eq!(metric(&metrics, "walvisor_block_writes_total"), 16);
    assert_eq!(metric(&metrics, "walvisor_block_flushes_total"), 4);
    assert_eq!(metric(&metrics, "walvisor_block_errors_total"), 1);
    let image = std::fs::read(dir.join("disk.img")).unwrap();
    assert_eq!(image[2 * BUFFER..16 * BUFFER], data[2 * BUFFER..]);
}

#[test]
fn the_next_front_end_waits_until_the_first_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    let daemon = daemon(dir, "--disk path=disk.img,socket=s");
    let socket = dir.join("s");
    let mut first = Client::connect(&socket, 1);
    let second = std::thread::spawn({
        let socket = socket.clone();
        move || {
            let mut client = Client::connect(&socket, 1);
            client.read(0, 0, 0, 512);
            client.finish(0, 1);
            client.data(0, 512)
        }
    });
    for byte in 1..=100 {
        first.write(0, 0, 0, &[byte; 512]);
        first.finish(0, 1);
    }
    assert!(!second.is_finished());
    // The request in flight ends although its front-end leaves.
    first.write(0, 0, 0, &[101; 512]);
    first.kick(0);
    drop(first);
    let read = second.join().unwrap();
    assert!(read == [100; 512] || read == [101; 512]);
    assert_eq!(daemon.stop(), "");
}
