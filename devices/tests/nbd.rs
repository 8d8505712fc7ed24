//! The NBD server under random messages: valid sessions with some of their bytes changed, cut off
//! anywhere. Whatever it gets, the server never panics, and the next client finds the disk
//! unchanged or with the requested changes.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::nbd::{Export, Listener, Server, Service, Tls};
use walvisor_testkit::Random;
use walvisor_testkit::nbd::*;

const SESSIONS: u64 = 600;
const SECTORS: u64 = 256;

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
        Some(false) => bytes.extend(option(8, &[])),
        Some(true) => bytes.extend(option(11, &[])),
    }
    bytes.extend(option(3, &[]));
    let mut query = vec![0; 4];
    query.extend(1_u32.to_be_bytes());
    query.extend(15_u32.to_be_bytes());
    query.extend(b"base:allocation");
    bytes.extend(option(10, &query));
    bytes.extend(option(6, &[&name("disk")[..], &[0, 1, 0, 3]].concat()));
    bytes.extend(option(7, &[0; 6]));
    for cookie in 0..1 + random.below(20) {
        let command =
            [READ, WRITE, FLUSH, TRIM, WRITE_ZEROES, BLOCK_STATUS][random.below(6) as usize];
        let length = 512 * random.below(9);
        let offset = 512 * random.below(SECTORS);
        let flags = random.below(2) as u16;
        if extended == Some(true) {
            let payload = if command == WRITE { PAYLOAD_LEN } else { 0 };
            bytes.extend(extended_request(
                flags | payload,
                command,
                cookie,
                offset,
                length,
            ));
        } else {
            bytes.extend(request(flags, command, cookie, offset, length as u32));
        }
        if command == WRITE {
            bytes.resize(bytes.len() + length as usize, 0x5a);
        }
    }
    bytes
}

/// A server of these disks, and its socket's directory.
fn serve(exports: Vec<Export>) -> (Server, TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("s");
    let service = Service {
        listener: Listener::Unix(UnixListener::bind(&path).unwrap()),
        exports,
        tls: Tls::Off,
    };
    (Server::start(vec![service]).unwrap(), place, path)
}

#[test]
fn no_message_harms_the_server() {
    static PANICS: AtomicU32 = AtomicU32::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        before(info);
    }));
    let backend = Arc::new(RamDisk::new(SECTORS));
    let export = Export::new("disk", "in memory", backend);
    let metrics = export.metrics();
    let (server, _place, path) = serve(vec![export]);
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
    // Most sessions must have reached requests, of every kind, and some of the requests must have
    // been invalid.
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

/// Sends a write of the first sector.
fn send_write(client: &mut SimpleClient, cookie: u64) {
    let header = request(0, WRITE, cookie, 0, 512);
    let sent = client.stream.write_all(&[&header[..], &[7; 512]].concat());
    sent.unwrap();
}

/// Reads the reply to a write, which succeeded; `false`: the connection has ended before it.
fn read_reply(client: &mut SimpleClient, cookie: u64) -> bool {
    let reply = simple_reply(&mut client.stream);
    reply.is_ok_and(|reply| {
        assert_eq!(reply, (0, cookie));
        true
    })
}

#[test]
fn exports_come_and_go_and_their_clients_end_in_order() {
    let export = |name, disk| Export::new(name, "", disk);
    let (server, _place, path) = serve(vec![export("stays", Arc::new(RamDisk::new(SECTORS)))]);
    let choose = |export| SimpleClient::connect(&path, export);
    let mut staying = choose("stays").unwrap();
    for round in 0..20 {
        assert!(choose("comes").is_err());
        let disk = Arc::new(RamDisk::new(SECTORS));
        assert!(server.add(0, export("comes", Arc::clone(&disk) as _)));
        assert!(!server.add(0, export("comes", Arc::clone(&disk) as _)));
        assert!(!server.add(1, export("comes", Arc::clone(&disk) as _)));
        // One client waits for its replies, and one does not read any.
        let mut idle = choose("comes").unwrap();
        let mut busy = choose("comes").unwrap();
        send_write(&mut idle, round);
        assert!(read_reply(&mut idle, round));
        for cookie in 0..64 {
            send_write(&mut busy, cookie);
        }
        assert!(server.remove(0, "comes"));
        assert!(!server.remove(0, "comes"));
        assert_eq!(Arc::strong_count(&disk), 1, "nobody uses the disk");
        assert_eq!(idle.stream.read(&mut [0; 16]).unwrap(), 0, "a clean end");
        // What was taken is answered.
        let answered = (0..64).take_while(|cookie| read_reply(&mut busy, *cookie));
        assert!(answered.count() <= 64);
        send_write(&mut staying, round);
        assert!(read_reply(&mut staying, round));
    }
    server.stop();
}

#[test]
fn what_a_client_has_sent_before_its_end_is_carried_out() {
    let (server, _place, path) = serve(vec![Export::new(
        "disk",
        "",
        Arc::new(RamDisk::new(SECTORS)),
    )]);
    for count in [1, 16, 17, 100] {
        let mut client = SimpleClient::connect(&path, "disk").unwrap();
        let requests = (0..count).map(|cookie| request(0, FLUSH, cookie, 0, 0));
        let requests = requests.collect::<Vec<_>>().concat();
        client.stream.write_all(&requests).unwrap();
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert!((0..count).all(|cookie| read_reply(&mut client, cookie)));
        assert!(!read_reply(&mut client, count), "a clean end");
    }
    server.stop();
}

/// A client that has not asked for block sizes may send requests of up to 32 MiB. `integrityhuge`
/// of nbd's own tests sends longer ones, such as the read below.
#[test]
fn a_request_of_more_than_32_mib_is_refused_and_changes_nothing() {
    const LONGEST: usize = 32 << 20;
    const LONGER: usize = 42_380_288;
    let disk = Arc::new(RamDisk::new(LONGER as u64 / 512 + 1024));
    let (server, _place, path) = serve(vec![Export::new("disk", "", disk)]);
    let mut client = SimpleClient::connect(&path, "disk").unwrap();
    let mut answer = |command, data: &mut [u8]| {
        let ended = client.end(command, 481_280, data.len(), data, false);
        ended.map_err(|error| error.raw_os_error())
    };
    const EINVAL: Option<i32> = Some(22);
    assert_eq!(answer(WRITE, &mut vec![1; LONGEST]), Ok(()));
    assert_eq!(answer(WRITE, &mut vec![2; LONGER]), Err(EINVAL));
    assert_eq!(answer(READ, &mut vec![0; LONGER]), Err(EINVAL));
    let mut data = vec![0; LONGEST];
    assert_eq!(answer(READ, &mut data), Ok(()));
    assert!(data.iter().all(|&byte| byte == 1));
    server.stop();
}
