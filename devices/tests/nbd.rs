//! The NBD server under random messages: valid sessions with some of their bytes changed, cut off anywhere. Whatever it
//! gets, the server never panics, and the next client finds the disk unchanged or with the requested changes.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::nbd::{Export, Listener, Server, Service, Tls};
use walvisor_testkit::Random;

const SESSIONS: u64 = 600;
const SECTORS: u64 = 256;

fn option(bytes: &mut Vec<u8>, option: u32, data: &[u8]) {
    bytes.extend(b"IHAVEOPT");
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
}

/// A whole session in order, with requests of every kind.
fn session(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::from(3_u32.to_be_bytes());
    let extended = match random.below(3) {
        0 => None,
        1 => Some(false),
        _ => Some(true),
    };
    match extended {
        None => {}
        Some(false) => option(&mut bytes, 8, &[]),
        Some(true) => option(&mut bytes, 11, &[]),
    }
    option(&mut bytes, 3, &[]);
    let mut query = vec![0; 4];
    query.extend(1_u32.to_be_bytes());
    query.extend(15_u32.to_be_bytes());
    query.extend(b"base:allocation");
    option(&mut bytes, 10, &query);
    option(
        &mut bytes,
        6,
        &[0, 0, 0, 4, b'd', b'i', b's', b'k', 0, 1, 0, 3],
    );
    option(&mut bytes, 7, &[0; 6]);
    for cookie in 0..1 + random.below(20) {
        let command = [0, 1, 3, 4, 6, 7][random.below(6) as usize];
        let length = 512 * random.below(9);
        let offset = 512 * random.below(SECTORS);
        let payload = u16::from(extended == Some(true) && command == 1) << 5;
        let magic: u32 = match extended {
            Some(true) => 0x21e4_1c71,
            _ => 0x2560_9513,
        };
        bytes.extend(magic.to_be_bytes());
        bytes.extend((payload | random.below(2) as u16).to_be_bytes());
        bytes.extend((command as u16).to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match extended {
            Some(true) => bytes.extend(length.to_be_bytes()),
            _ => bytes.extend((length as u32).to_be_bytes()),
        }
        if command == 1 {
            bytes.resize(bytes.len() + length as usize, 0x5a);
        }
    }
    bytes
}

#[test]
fn no_message_harms_the_server() {
    static PANICS: AtomicU32 = AtomicU32::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        before(info);
    }));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let backend = Arc::new(RamDisk::new(SECTORS));
    let export = Export::new("disk", "in memory", backend);
    let metrics = export.metrics();
    let server = Server::start(vec![Service {
        listener: Listener::Unix(UnixListener::bind(&path).unwrap()),
        exports: vec![export],
        tls: Tls::Off,
    }])
    .unwrap();
    let mut random = Random(0x5eed);
    for _ in 0..SESSIONS {
        let mut bytes = session(&mut random);
        for _ in 0..random.below(4) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] = random.below(256) as u8;
        }
        if random.below(2) == 0 {
            bytes.truncate(random.below(bytes.len() as u64) as usize);
        }
        let mut client = UnixStream::connect(&path).unwrap();
        let timeout = Some(Duration::from_secs(120));
        client.set_read_timeout(timeout).unwrap();
        // The server may have closed the connection already.
        let _ = client.write_all(&bytes);
        let _ = client.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        match client.read_to_end(&mut answer) {
            Ok(_) => assert!(answer.starts_with(b"NBDMAGICIHAVEOPT")),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
    server.stop();
    assert_eq!(PANICS.load(Ordering::SeqCst), 0);
    let counts = metrics.counts();
    println!("{counts:?}");
    // Most sessions must have reached requests, of every kind, and some of the requests must have been invalid.
    assert!(
        counts.reads > 100 && counts.writes > 100 && counts.flushes > 100,
        "{counts:?}"
    );
    assert!(
        counts.discards > 100 && counts.write_zeroes > 100,
        "{counts:?}"
    );
    assert!(counts.errors > 10 && counts.bytes_written > 0, "{counts:?}");
}

/// A client without structured replies that has chosen an export; `None`: the server has no such export.
fn choose(path: &std::path::Path, export: &str) -> Option<UnixStream> {
    let mut socket = UnixStream::connect(path).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    socket.read_exact(&mut [0; 18]).unwrap();
    let mut bytes = Vec::from(3_u32.to_be_bytes());
    option(&mut bytes, 1, export.as_bytes());
    socket.write_all(&bytes).unwrap();
    socket.read_exact(&mut [0; 10]).ok().map(|()| socket)
}

/// Sends a write of the first sector.
fn send_write(socket: &mut UnixStream, cookie: u64) -> std::io::Result<()> {
    let mut bytes = header(1, cookie, 0, 512);
    bytes.resize(bytes.len() + 512, 7);
    socket.write_all(&bytes)
}

/// Reads the reply to a write, which succeeded; `false`: the connection has ended before it.
fn read_reply(socket: &mut UnixStream, cookie: u64) -> bool {
    let mut reply = [0; 16];
    let whole = socket.read_exact(&mut reply).is_ok();
    if whole {
        assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
        assert_eq!(reply[8..], cookie.to_be_bytes());
    }
    whole
}

#[test]
fn exports_come_and_go_and_their_clients_end_in_order() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("s");
    let export = |name, disk| Export::new(name, "", disk);
    let server = Server::start(vec![Service {
        listener: Listener::Unix(UnixListener::bind(&path).unwrap()),
        exports: vec![export("stays", Arc::new(RamDisk::new(SECTORS)))],
        tls: Tls::Off,
    }])
    .unwrap();
    let mut staying = choose(&path, "stays").unwrap();
    for round in 0..20 {
        assert!(choose(&path, "comes").is_none());
        let disk = Arc::new(RamDisk::new(SECTORS));
        assert!(server.add(0, export("comes", Arc::clone(&disk) as _)));
        assert!(!server.add(0, export("comes", Arc::clone(&disk) as _)));
        assert!(!server.add(1, export("comes", Arc::clone(&disk) as _)));
        // One client waits for its replies, and one does not read any.
        let mut idle = choose(&path, "comes").unwrap();
        let mut busy = choose(&path, "comes").unwrap();
        send_write(&mut idle, round).unwrap();
        assert!(read_reply(&mut idle, round));
        for cookie in 0..64 {
            send_write(&mut busy, cookie).unwrap();
        }
        assert!(server.remove(0, "comes"));
        assert!(!server.remove(0, "comes"));
        assert_eq!(Arc::strong_count(&disk), 1, "nobody uses the disk");
        assert_eq!(idle.read(&mut [0; 16]).unwrap(), 0, "a clean end");
        // What was taken is answered.
        let answered = (0..64).take_while(|cookie| read_reply(&mut busy, *cookie));
        assert!(answered.count() <= 64);
        send_write(&mut staying, round).unwrap();
        assert!(read_reply(&mut staying, round));
    }
    server.stop();
}

/// A request's header.
fn header(command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = Vec::from(0x2560_9513_u32.to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// A client that has not asked for block sizes may send requests of up to 32 MiB. `integrityhuge` of nbd's own tests sends
/// longer ones, such as the read below.
#[test]
fn a_request_of_more_than_32_mib_is_refused_and_changes_nothing() {
    const LONGEST: usize = 32 << 20;
    const LONGER: usize = 42_380_288;
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("s");
    let disk = Arc::new(RamDisk::new(LONGER as u64 / 512 + 1024));
    let server = Server::start(vec![Service {
        listener: Listener::Unix(UnixListener::bind(&path).unwrap()),
        exports: vec![Export::new("disk", "", disk)],
        tls: Tls::Off,
    }])
    .unwrap();
    let mut client = choose(&path, "disk").unwrap();
    let mut answer = |command, len: usize, payload: &[u8]| {
        let mut request = header(command, 7, 481_280, len as u32);
        request.extend(payload);
        client.write_all(&request).unwrap();
        let mut reply = [0; 16];
        client.read_exact(&mut reply).unwrap();
        assert_eq!(
            (&reply[..4], &reply[8..]),
            (&[0x67, 0x44, 0x66, 0x98][..], &7_u64.to_be_bytes()[..])
        );
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        let mut data = vec![0; if command == 0 && error == 0 { len } else { 0 }];
        client.read_exact(&mut data).unwrap();
        (error, data)
    };
    const EINVAL: u32 = 22;
    assert_eq!(answer(1, LONGEST, &vec![1; LONGEST]).0, 0);
    assert_eq!(answer(1, LONGER, &vec![2; LONGER]).0, EINVAL);
    assert_eq!(answer(0, LONGER, &[]).0, EINVAL);
    let (error, data) = answer(0, LONGEST, &[]);
    assert!(error == 0 && data.iter().all(|&byte| byte == 1));
    server.stop();
}
