//! Clients that break the protocol, die in the middle or never read: each harms only itself. What
//! such a client costs in memory, `memory` shows.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::io::ioctl_fionread;
use walvisor_testkit::nbd::{
    BLOCK_STATUS, FLUSH, READ, RawClient, WRITE, WRITE_ZEROES, extended_request,
};
use walvisor_testkit::wait_until;

use super::{Daemon, MIB, create, noise, read, succeed, test_dir};

const PAYLOAD: u16 = 1 << 5;
const ERROR: u16 = (1 << 15) + 1;

fn served(dir: &Path) -> Daemon {
    create(dir, "disk.img", "64M");
    Daemon::start(dir, "--disk path=disk.img,socket=s")
}

/// Asserts that the next reply is an error, with this number.
#[track_caller]
fn fails(client: &mut RawClient, cookie: u64, errno: u32) {
    let reply = client.reply();
    let error = u32::from_be_bytes(reply.data[..4].try_into().unwrap());
    assert_eq!((reply.kind, reply.cookie, error), (ERROR, cookie, errno));
}

#[test]
fn extended_headers_carry_long_ranges() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = served(dir.path());
    let mut client = RawClient::extended(&dir.path().join("s"));
    client.request(PAYLOAD, WRITE, 1, 4096, 8192);
    client.send(&[5; 8192]);
    client.request(0, FLUSH, 2, 0, 0);
    let mut cookies = [client.reply(), client.reply()].map(|reply| {
        assert_eq!((reply.kind, reply.data.len()), (0, 0));
        reply.cookie
    });
    cookies.sort();
    assert_eq!(cookies, [1, 2]);
    client.request(0, READ, 3, 0, 16384);
    let reply = client.reply();
    assert_eq!((reply.kind, reply.cookie, reply.offset), (1, 3, 0));
    assert_eq!(reply.data[..8], [0; 8]);
    let data = &reply.data[8..];
    let expected = [[0; 4096], [5; 4096], [5; 4096], [0; 4096]].concat();
    assert!(data == expected);
    client.request(0, BLOCK_STATUS, 4, 0, 64 << 20);
    let reply = client.reply();
    assert_eq!((reply.kind, reply.cookie), (6, 4));
    let longs: Vec<u64> = reply.data[8..]
        .chunks(8)
        .map(|long| u64::from_be_bytes(long.try_into().unwrap()))
        .collect();
    assert_eq!(longs, [4096, 3, 8192, 0, (64 << 20) - 12288, 3]);
    // One range is longer than the disk, the other overflows.
    for (cookie, length) in [(5, 1 << 40), (6, u64::MAX)] {
        client.request(0, WRITE_ZEROES, cookie, 512, length);
        fails(&mut client, cookie, 28);
    }
    // The server skips a payload where none belongs.
    client.request(PAYLOAD, READ, 7, 0, 4096);
    client.send(&[0xff; 4096]);
    fails(&mut client, 7, 22);
    // It also skips a payload that is too long.
    client.request(PAYLOAD, WRITE, 8, 0, (32 << 20) + 512);
    client.send(&vec![0xff; (32 << 20) + 512]);
    fails(&mut client, 8, 22);
    client.request(0, READ, 9, 0, (32 << 20) + 512);
    fails(&mut client, 9, 22);
    client.request(0, READ, 10, 0, 512);
    assert_eq!(client.reply().data[8..], [0; 512]);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn garbage_ends_its_connection_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let daemon = served(dir.path());
    let mut good = RawClient::extended(&path);
    good.write(0, 0, &[1; 512]);

    let unknown_flags = || {
        let mut client = RawClient {
            socket: std::os::unix::net::UnixStream::connect(&path).unwrap(),
        };
        client.take(18);
        client.send(&[0xff; 4]);
        client
    };
    let garbage_option = || {
        let mut client = RawClient::greet(&path);
        client.send(&noise(64));
        client
    };
    let endless_option = || {
        let mut client = RawClient::greet(&path);
        client.send(b"IHAVEOPT\x00\x00\x00\x07\xff\xff\xff\xff");
        client
    };
    let no_such_export = || {
        let mut client = RawClient::greet(&path);
        client.option(1, b"nobody");
        client
    };
    let garbage_request = || {
        let mut client = RawClient::extended(&path);
        client.send(&noise(4096));
        client
    };
    let makers: [&dyn Fn() -> RawClient; 5] = [
        &unknown_flags,
        &garbage_option,
        &endless_option,
        &no_such_export,
        &garbage_request,
    ];
    for maker in makers {
        let mut client = maker();
        assert!(client.is_closed());
        assert_eq!(read(&mut good, 0, 512), [1; 512]);
    }
    let errors = daemon.stop();
    assert_eq!(errors.lines().count(), makers.len(), "{errors}");
}

#[test]
fn malformed_options_get_an_error_and_negotiation_continues() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = served(dir.path());
    let mut client = RawClient::greet(&dir.path().join("s"));
    const INVALID: u32 = (1 << 31) + 3;
    const UNSUPPORTED: u32 = (1 << 31) + 1;
    const POLICY: u32 = (1 << 31) + 2;
    let name_too_long: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0, 0];
    for (option, data, expected) in [
        (7, &[][..], INVALID),
        (7, name_too_long, INVALID),
        (6, &[0, 0, 0, 0, 0xff, 0xff, 0, 0], INVALID),
        (3, b"x", INVALID),
        (8, b"x", INVALID),
        // SET_META_CONTEXT before structured replies.
        (10, &[0; 8], INVALID),
        // STARTTLS, which the server refuses unless TLS is configured.
        (5, &[], POLICY),
        (5, b"x", INVALID),
        (0xffff_ffff, b"anything", UNSUPPORTED),
        (8, &[], 1),
        (10, &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], INVALID),
        (10, &[0; 9], INVALID),
        (6, &[0, 0, 0, 1, b'x', 0, 0], (1 << 31) + 6),
    ] {
        client.option(option, data);
        let (replied, kind, _) = client.option_reply();
        assert_eq!((replied, kind), (option, expected), "{option} {data:?}");
    }
    client.option(2, &[]);
    assert_eq!(client.option_reply().1, 1);
    assert!(client.is_closed());
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_client_that_dies_in_the_middle_of_a_write_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let daemon = served(dir.path());
    for sent in [0, 1, 4096, 65535] {
        let mut client = RawClient::extended(&path);
        // A whole write before the incomplete one takes effect.
        client.request(PAYLOAD, WRITE, 0, 1 << 20, 512);
        client.send(&[2; 512]);
        client.request(PAYLOAD, WRITE, 1, 0, 65536);
        client.send(&vec![0xee; sent]);
    }
    // The same with half a header.
    let mut client = RawClient::extended(&path);
    client.send(&[0x21, 0xe4, 0x1c]);
    drop(client);
    assert!(read(&mut RawClient::extended(&path), 0, 65536) == [0; 65536]);
    assert_eq!(daemon.stop(), "");
    let image = fs::read(dir.path().join("disk.img")).unwrap();
    assert!(image[..1 << 20].iter().all(|&byte| byte == 0));
    assert!(image[1 << 20..][..512].iter().all(|&byte| byte == 2));
}

#[test]
fn a_client_that_never_stops_sending_does_not_delay_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = served(dir.path());
    let client = RawClient::greet(&dir.path().join("s"));
    let (mut asking, mut reading) = (client.socket.try_clone().unwrap(), client.socket);
    let answered = AtomicUsize::new(0);
    // Both threads end when the server closes the connection.
    thread::scope(|scope| {
        let list = b"IHAVEOPT\x00\x00\x00\x03\x00\x00\x00\x00".repeat(256);
        scope.spawn(move || while asking.write_all(&list).is_ok() {});
        scope.spawn(|| {
            let mut bytes = [0; 1 << 16];
            while let Ok(count @ 1..) = reading.read(&mut bytes) {
                answered.fetch_add(count, Ordering::Relaxed);
            }
        });
        wait_until("many answers", || {
            answered.load(Ordering::Relaxed) > 1 << 16
        });
        assert_eq!(daemon.stop(), "");
    });
}

/// Replies take all room while the client reads nothing; what it had asked for before is answered
/// once it reads.
#[test]
fn reads_that_wait_for_room_are_answered_once_the_client_reads() {
    const READS: u64 = 3;
    const LENGTH: u64 = 32 * MIB;
    let dir = &test_dir();
    fs::write(dir.join("raw"), noise((READS * LENGTH) as usize)).unwrap();
    succeed(dir, "disk import disk.img raw");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    let request = |number| extended_request(0, READ, number, number * LENGTH, LENGTH);
    let requests: Vec<u8> = (0..READS).flat_map(request).collect();
    client.send(&requests);
    // The daemon writes until the socket is full.
    wait_until("replies", || {
        ioctl_fionread(&client.socket).unwrap() > 1 << 16
    });
    let (mut ended, mut bytes) = (0, 0);
    while ended < READS {
        let header = client.take(32);
        ended += u64::from(header[5] & 1);
        let length = u64::from_be_bytes(header[24..].try_into().unwrap());
        bytes += client.take(length as usize).len() as u64;
    }
    assert!(bytes >= READS * LENGTH, "{bytes}");
    drop(client);
    assert_eq!(daemon.stop(), "");
}
