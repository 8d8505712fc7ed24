//! Front-ends that come one after the other.

use super::{Client, daemon, test_dir};
use crate::create;

#[test]
fn the_next_front_end_waits_until_the_first_has_gone() {
    let dir = &test_dir();
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
