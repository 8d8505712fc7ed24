//! Random messages to the vhost-user server: whatever a front-end sends, the server goes on to serve the next one.

#[path = "support/numbers.rs"]
mod numbers;

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::{BlockConfig, VirtioBlock};
use walvisor_devices::vhost_user::{Server, Service, survive_truncated_memory};

use numbers::Random;

const GET_FEATURES: u32 = 1;
const SECTORS: u64 = 64;
const PAGES: u64 = 16;

impl Random {
    /// A number that is valid in this protocol, or nearly valid, or meaningless.
    fn field(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => self.below(4),
            2 => self.below(4) | self.below(300) << 32,
            3 => 0x1000 * self.below(PAGES + 1),
            4 => 1 << 32 | 1 << 30 | self.below(1 << 15),
            5 => 0x100 * self.below(0x10),
            6 => 1 << self.below(64),
            _ => u64::MAX - self.below(0x2000),
        }
    }
}

fn send(socket: &UnixStream, request: u32, flags: u32, payload: &[u8], files: &[OwnedFd]) {
    let mut bytes = Vec::new();
    for field in [request, flags, payload.len() as u32] {
        bytes.extend_from_slice(&field.to_ne_bytes());
    }
    bytes.extend_from_slice(payload);
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    // The server may have closed the connection already.
    let _ = sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    );
}

fn fields(values: &[u64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

/// Shared memory with rings of 4 descriptors at 0, 0x100 (available) and 0x200 (used), whose contents are partly
/// random.
fn memory(random: &mut Random) -> File {
    let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(PAGES * 0x1000).unwrap();
    let put = |at: u64, bytes: &[u8]| file.write_all_at(bytes, at).unwrap();
    for index in 0..4 {
        let address = match random.below(6) {
            0 => random.field(),
            _ => 0x1000 * random.below(PAGES),
        };
        let len = [0, 1, 16, 16, 512, 513, 4096, u32::MAX][random.below(8) as usize];
        let (flags, next) = (random.below(8) as u16, random.below(6) as u16);
        put(index * 16, &address.to_ne_bytes());
        put(index * 16 + 8, &len.to_ne_bytes());
        put(index * 16 + 12, &flags.to_ne_bytes());
        put(index * 16 + 14, &next.to_ne_bytes());
        put(0x104 + index * 2, &(random.below(5) as u16).to_ne_bytes());
    }
    put(0x102, &(random.below(6) as u16).to_ne_bytes());
    // Every page may serve as a header, and as an indirect table.
    for page in 1..PAGES {
        let header = [random.below(16), random.below(2 * SECTORS)];
        put(page * 0x1000, &fields(&header));
    }
    file
}

fn descriptor(random: &mut Random, memory: &File) -> OwnedFd {
    match random.below(8) {
        0 => File::open("/dev/null").unwrap().into(),
        1 | 2 => memory.try_clone().unwrap().into(),
        _ => eventfd(random.below(4) as u32, EventfdFlags::NONBLOCK).unwrap(),
    }
}

/// A front-end that begins a valid session and continues with random messages.
fn attack(path: &Path, random: &mut Random) {
    let socket = UnixStream::connect(path).expect("the server listens");
    let memory = memory(random);
    if random.below(4) > 0 {
        send(&socket, 2, 1, &fields(&[1 << 32 | 1 << 30]), &[]);
        send(
            &socket,
            16,
            1,
            &fields(&[1 << 0 | 1 << 9 | 1 << 12 | 1 << 15]),
            &[],
        );
        let region = fields(&[1, 0, PAGES * 0x1000, 0, 0]);
        send(
            &socket,
            5,
            1,
            &region,
            &[memory.try_clone().unwrap().into()],
        );
        for ring in 0..2 {
            send(&socket, 8, 1, &fields(&[ring | 4 << 32]), &[]);
            let addresses = [
                ring,
                0x100 * random.below(16),
                0x100 * random.below(16),
                0x100,
                0,
            ];
            send(&socket, 9, 1, &fields(&addresses), &[]);
            let kick = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
            send(&socket, 12, 1, &fields(&[ring]), &[kick]);
            send(&socket, 18, 1, &fields(&[ring | 1 << 32]), &[]);
        }
        // The server answers this once it has handled the messages before, or not at all.
        send(&socket, GET_FEATURES, 1, &[], &[]);
        let _ = (&socket).read(&mut [0; 20]);
    }
    for _ in 0..random.below(12) {
        let request = random.below(42) as u32;
        let payload: Vec<u64> = (0..random.below(10)).map(|_| random.field()).collect();
        let files: Vec<_> = (0..random.below(3).min(random.below(3)))
            .map(|_| descriptor(random, &memory))
            .collect();
        let flags = if random.below(20) == 0 {
            random.field() as u32
        } else {
            1 | (random.below(2) as u32) << 3
        };
        let mut payload = fields(&payload);
        payload.truncate(payload.len() - random.below(8).min(payload.len() as u64) as usize);
        send(&socket, request, flags, &payload, &files);
    }
    // Sometimes the front-end truncates its memory.
    if random.below(3) == 0 {
        memory.set_len(0x1000 * random.below(2)).unwrap();
    }
}

#[test]
fn no_message_harms_the_server() {
    survive_truncated_memory().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let config = BlockConfig {
        queues: 2,
        ..BlockConfig::default()
    };
    let device = VirtioBlock::new(Arc::new(RamDisk::new(SECTORS)), config).unwrap();
    let metrics = device.metrics();
    let listener = UnixListener::bind(&path).unwrap();
    let service = Service::new(listener, device, "ram").unwrap();
    let server = Server::start(vec![service]).unwrap();
    for seed in 1..=2000 {
        attack(&path, &mut Random(seed));
    }
    // A front-end that behaves.
    let mut socket = UnixStream::connect(&path).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    send(&socket, GET_FEATURES, 1, &[], &[]);
    let mut reply = [0; 20];
    socket
        .read_exact(&mut reply)
        .expect("the server still answers");
    assert_eq!(reply[..4], GET_FEATURES.to_ne_bytes());
    // The server must have taken some of the chains for requests, or the test has attacked nothing.
    assert!(metrics.counts().requests > 100, "{:?}", metrics.counts());
    server.stop();
}
