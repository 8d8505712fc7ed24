//! Front-ends that break every rule: each loses its own connection, with a line that says why, and
//! harms no other.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::OFlags;
use rustix::io::ReadWriteFlags;
use walvisor_testkit::vhost_user::*;
use walvisor_testkit::wait_until;

use super::{Client, daemon, test_dir};
use crate::{Daemon, create, noise};

const PATIENCE: Timespec = Timespec {
    tv_sec: 120,
    tv_nsec: 0,
};

/// Two disks on one log. Whatever a front-end does at socket `bad` must not affect `good`.
fn two_disks(dir: &Path) -> (Daemon, Client) {
    for name in ["a.img", "b.img"] {
        create(dir, name, "1M --log log");
    }
    let daemon = daemon(
        dir,
        "--disk path=a.img,log=log,socket=bad --disk path=b.img,log=log,socket=good",
    );
    let client = Client::connect(&dir.join("good"), 1);
    (daemon, client)
}

/// Checks a write, a flush and a read at the good disk.
fn works(client: &mut Client, data: &[u8]) {
    client.write(0, 0, 4096, data);
    client.finish(0, 1);
    client.flush(0, 0);
    client.finish(0, 1);
    client.read(0, 1, 4096, data.len());
    client.finish(0, 1);
    assert_eq!(client.data(1, data.len()), data);
}

type Attack = fn(&mut FrontEnd);

/// A part of the daemon's message, and the attack that must cause it.
const ATTACKS: [(&str, Attack); 46] = [
    ("invalid message header", |it| it.send(&[0xff; 64])),
    ("left in the middle", |it| {
        it.send(&header(GET_FEATURES, 0)[..7]);
        it.socket.shutdown(std::net::Shutdown::Write).unwrap();
    }),
    ("left in the middle", |it| {
        it.send(&header(SET_FEATURES, 8));
        it.send(&[0; 3]);
        it.socket.shutdown(std::net::Shutdown::Write).unwrap();
    }),
    ("message 2 is 4294967295 bytes, more than 4096", |it| {
        it.send(&header(SET_FEATURES, u32::MAX));
    }),
    ("message 2 ends after 4 bytes", |it| {
        it.message(SET_FEATURES, &[0; 4], &[]);
    }),
    ("message 77 is unknown to a disk", |it| it.fields(77, &[])),
    ("comes with descriptors", |it| {
        let file = memory(1);
        it.message(GET_FEATURES, &[], &[file.as_fd()]);
    }),
    ("features 0xffffffffffffffff chosen", |it| {
        it.fields(SET_FEATURES, &[u64::MAX]);
    }),
    ("protocol features", |it| {
        it.fields(SET_PROTOCOL_FEATURES, &[1 << 40]);
    }),
    ("1 memory regions with 0 descriptors", |it| {
        it.fields(SET_MEM_TABLE, &[1, 0, 0x1000, 0, 0]);
    }),
    ("message 5 ends after 8 bytes", |it| {
        let file = memory(0x1000);
        it.message(SET_MEM_TABLE, &payload(&[1]), &[file.as_fd()]);
    }),
    ("its file ends before it", |it| {
        let file = memory(0x1000);
        let region = payload(&[1, 0, 0x2000, 0, 0]);
        it.message(SET_MEM_TABLE, &region, &[file.as_fd()]);
    }),
    ("regions intersect", |it| {
        let file = memory(0x1000);
        let regions = payload(&[2, 0, 0x1000, 0, 0, 0x800, 0x1000, 0x1000, 0]);
        it.message(SET_MEM_TABLE, &regions, &[file.as_fd(), file.as_fd()]);
    }),
    ("without a descriptor", |it| {
        it.fields(ADD_MEM_REG, &[0, 0, 0x1000, 0, 0]);
    }),
    ("ring 7: there are", |it| {
        it.fields(SET_VRING_NUM, &[pair(7, 4)]);
    }),
    ("ring 0 has 3 descriptors", |it| {
        it.fields(SET_VRING_NUM, &[pair(0, 3)]);
    }),
    ("ring 0 has 32768 descriptors", |it| {
        it.fields(SET_VRING_NUM, &[pair(0, 32768)]);
    }),
    ("does not fit in 16 bits", |it| {
        it.fields(SET_VRING_BASE, &[pair(0, 65536)]);
    }),
    ("a kick descriptor is not an event descriptor", |it| {
        let (end, _other) = std::io::pipe().unwrap();
        it.message(SET_VRING_KICK, &payload(&[0]), &[end.as_fd()]);
    }),
    (
        "neither an event descriptor nor a Unix socket: /dev/zero",
        |it| {
            let file = File::open("/dev/zero").unwrap();
            it.message(SET_VRING_CALL, &payload(&[0]), &[file.as_fd()]);
        },
    ),
    (
        "neither an event descriptor nor a Unix socket: /dev/null",
        |it| {
            let file = File::open("/dev/null").unwrap();
            it.message(SET_VRING_ERR, &payload(&[0]), &[file.as_fd()]);
        },
    ),
    (
        "neither an event descriptor nor a Unix socket: pipe:[",
        |it| {
            let (_end, pipe) = std::io::pipe().unwrap();
            it.message(SET_VRING_CALL, &payload(&[0]), &[pipe.as_fd()]);
        },
    ),
    (
        "neither an event descriptor nor a Unix socket: socket:[",
        |it| {
            let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            it.message(SET_VRING_ERR, &payload(&[0]), &[socket.as_fd()]);
        },
    ),
    ("its file is neither in memory", |it| {
        // A file on a file system that controls its own reads, as one in user space does.
        let file = File::open("/sys/kernel/mm/transparent_hugepage/enabled");
        let file = file.or_else(|_| File::open("/sys/kernel/uevent_seqnum"));
        it.share_page(&file.unwrap());
    }),
    ("polling is not supported", |it| {
        it.fields(SET_VRING_KICK, &[1 << 8])
    }),
    ("ring 0 lies outside the memory", |it| {
        let [kick, error] = events();
        it.start_ring(&kick, &error);
    }),
    ("bytes of configuration, more than 256", |it| {
        it.fields(GET_CONFIG, &[pair(0, 4000), 0]);
    }),
    ("a configuration write without its data", |it| {
        it.fields(SET_CONFIG, &[pair(32, 40), 0]);
    }),
    ("an inflight area for 300 queues", |it| {
        it.fields(GET_INFLIGHT_FD, &[0, 0, 128 << 16 | 300]);
    }),
    ("an inflight area of 4096 bytes", |it| {
        let file = memory(100);
        let area = payload(&[4096, 0, 128 << 16 | 1]);
        it.message(SET_INFLIGHT_FD, &area, &[file.as_fd()]);
    }),
    ("invalid message header", |it| {
        // A reply to no request.
        let mut reply = header(GET_FEATURES, 0);
        reply[4] |= 4;
        it.send(&reply);
    }),
    ("message 12 comes with more than one descriptor", |it| {
        let [kick, other] = events();
        let files = [kick.as_fd(), other.as_fd()];
        it.message(SET_VRING_KICK, &payload(&[0]), &files);
    }),
    ("with the flag that there is none", |it| {
        it.fields(SET_VRING_CALL, &[0])
    }),
    ("a ring's descriptor is missing", |it| {
        let [call, _] = events();
        it.message(SET_VRING_CALL, &payload(&[1 << 8]), &[call.as_fd()]);
    }),
    ("memory region of 0x0 bytes", |it| {
        let file = memory(0x1000);
        it.message(ADD_MEM_REG, &payload(&[0; 5]), &[file.as_fd()]);
    }),
    ("its addresses wrap", |it| {
        let file = memory(0x2000);
        let region = payload(&[1, u64::MAX - 0xfff, 0x2000, 0, 0]);
        it.message(SET_MEM_TABLE, &region, &[file.as_fd()]);
    }),
    ("there is no memory region", |it| {
        it.fields(REM_MEM_REG, &[0, 0, 0x1000, 0, 0]);
    }),
    ("logging of memory writes", |it| {
        it.fields(SET_VRING_ADDR, &[pair(0, 1), 0, 0x200, 0x100, 0]);
    }),
    ("without VIRTIO_F_VERSION_1", |it| {
        it.share_page(&memory(0x1000));
        let [kick, _] = events();
        it.fields(SET_FEATURES, &[1 << 30]);
        it.fields(SET_VRING_ADDR, &[0, 0, 0x200, 0x100, 0]);
        it.message(SET_VRING_KICK, &payload(&[0]), &[kick.as_fd()]);
        it.fields(SET_VRING_ENABLE, &[pair(0, 1)]);
    }),
    ("ring 0 is changed while it runs", |it| {
        run(it);
        it.fields(SET_VRING_NUM, &[pair(0, 8)]);
    }),
    ("ring 0 is changed while it runs", |it| {
        run(it);
        it.fields(SET_VRING_BASE, &[pair(0, 1)]);
    }),
    ("ring 0 is moved while it runs", |it| {
        run(it);
        it.fields(SET_VRING_ADDR, &[0, 0x400, 0x200, 0x100, 0]);
    }),
    ("features are changed while a ring runs", |it| {
        run(it);
        it.fields(SET_FEATURES, &[FEATURES | 1 << 9]);
    }),
    ("it has truncated the memory that it shares", |it| {
        let (file, [kick, error]) = (memory(0x1000), events());
        it.share_page(&file);
        it.start_ring(&kick, &error);
        // The reply shows that the daemon has handled all messages before it.
        it.fields(GET_FEATURES, &[]);
        it.reply(GET_FEATURES);
        file.set_len(0).unwrap();
        // The worker takes the doorbell, and reads the ring whose memory is gone.
        rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
    }),
    ("an inflight area without a descriptor", |it| {
        it.fields(SET_INFLIGHT_FD, &[4096, 0, 128 << 16 | 1]);
    }),
    ("inflight area is changed while a ring runs", |it| {
        run(it);
        let file = memory(4096);
        let area = payload(&[4096, 0, 128 << 16 | 1]);
        it.message(SET_INFLIGHT_FD, &area, &[file.as_fd()]);
    }),
];

/// Starts a ring without requests.
fn run(it: &mut FrontEnd) {
    let [kick, error] = events();
    it.share_page(&memory(0x1000));
    it.start_ring(&kick, &error);
}

fn events() -> [std::os::fd::OwnedFd; 2] {
    [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap())
}

#[test]
fn a_bad_front_end_is_reported_and_harmless() {
    let dir = &test_dir();
    let (daemon, mut good) = two_disks(dir);
    let data = noise(4096);
    for (part, attack) in ATTACKS {
        let mut bad = FrontEnd::connect(&dir.join("bad"));
        attack(&mut bad);
        assert!(bad.is_closed(), "{part}");
        works(&mut good, &data);
    }
    // The disk itself still works.
    let mut client = Client::connect(&dir.join("bad"), 1);
    works(&mut client, &data);
    drop((client, good));
    let errors = daemon.stop();
    let lines: Vec<&str> = errors.lines().collect();
    assert_eq!(lines.len(), ATTACKS.len(), "{errors}");
    for ((part, _), line) in ATTACKS.iter().zip(lines) {
        assert!(line.contains("disk 'a.img'"), "{line}");
        assert!(line.contains(part), "{part:?}: {line}");
    }
}

#[test]
fn a_broken_ring_is_signalled_and_others_go_on() {
    let dir = &test_dir();
    let (daemon, mut good) = two_disks(dir);
    let (file, [kick, error]) = (memory(0x1000), events());
    // The available index is ahead by more than the number of descriptors.
    file.write_all_at(&100_u16.to_le_bytes(), 0x102).unwrap();
    let mut bad = FrontEnd::connect(&dir.join("bad"));
    bad.share_page(&file);
    bad.start_ring(&kick, &error);
    let mut fds = [PollFd::new(&error, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&PATIENCE)).unwrap(), 1);
    works(&mut good, &noise(4096));
    // The connection still works.
    bad.fields(GET_FEATURES, &[]);
    assert_eq!(bad.reply(GET_FEATURES).len(), 8);
    drop((bad, good));
    let errors = daemon.stop();
    assert!(errors.contains("available ring is broken"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

/// One that stays in the middle of a message, and one that never reads.
#[test]
fn front_ends_that_say_or_read_nothing_do_not_delay_shutdown() {
    let dir = &test_dir();
    let (daemon, good) = two_disks(dir);
    drop(good);
    let mut half = FrontEnd::connect(&dir.join("bad"));
    half.send(&header(SET_FEATURES, 8));
    // Another front-end waits its turn.
    let _waiting = FrontEnd::connect(&dir.join("bad"));
    let mut deaf = FrontEnd::connect(&dir.join("good"));
    let ask = header(GET_FEATURES, 0).repeat(1000);
    // Sends until neither side takes any more.
    let second = Duration::from_secs(1);
    deaf.socket.set_write_timeout(Some(second)).unwrap();
    while deaf.socket.write(&ask).is_ok() {}
    assert_eq!(daemon.stop(), "");
    assert!(half.is_closed());
}

/// A ring with one request, for the disk's identity, which is made available over and over.
struct Identities {
    /// Kept open, since the ring lives as long as its connection.
    _front_end: FrontEnd,
    page: File,
    kick: OwnedFd,
    available: u16,
}

impl Identities {
    fn start(socket: &Path, call: impl AsFd) -> Self {
        const WRITE: u16 = 2;
        let (page, [_, error]) = (memory(0x1000), events());
        // The daemon shares its open file description, which blocks.
        let kick = eventfd(0, EventfdFlags::empty()).unwrap();
        let put = |at: u64, bytes: &[u8]| page.write_all_at(bytes, at).unwrap();
        let descriptors = [
            (0x400_u64, 16_u32, 1_u16, 1_u16),
            (0x500, 20, 1 | WRITE, 2),
            (0x600, 1, WRITE, 0),
        ];
        for (index, (address, length, flags, next)) in (0..).zip(descriptors) {
            put(index * 16, &address.to_le_bytes());
            put(index * 16 + 8, &length.to_le_bytes());
            put(index * 16 + 12, &flags.to_le_bytes());
            put(index * 16 + 14, &next.to_le_bytes());
        }
        put(0x400, &8_u32.to_le_bytes());
        let mut front_end = FrontEnd::connect(socket);
        front_end.message(SET_VRING_CALL, &payload(&[0]), &[call.as_fd()]);
        front_end.share_page(&page);
        front_end.start_ring(&kick, &error);
        // The reply shows that the daemon has handled all messages before it.
        front_end.fields(GET_FEATURES, &[]);
        front_end.reply(GET_FEATURES);
        Self {
            _front_end: front_end,
            page,
            kick,
            available: 0,
        }
    }

    /// Makes the request available once more, and kicks.
    fn ask(&mut self) {
        self.available = self.available.wrapping_add(1);
        let index = self.available.to_le_bytes();
        self.page.write_all_at(&index, 0x102).unwrap();
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    fn unanswered(&self) -> u16 {
        let mut used = [0; 2];
        self.page.read_exact_at(&mut used, 0x202).unwrap();
        self.available.wrapping_sub(u16::from_le_bytes(used))
    }

    fn is_answered(&self) -> bool {
        self.unanswered() == 0
    }

    fn wait(&self) {
        wait_until("an answer", || self.is_answered());
    }
}

/// Resets the counter of `event`, without waiting.
fn drain(event: &OwnedFd) {
    let mut count = [0; 8];
    let mut buffer = [IoSliceMut::new(&mut count)];
    // An empty counter is no error here.
    let _ = rustix::io::preadv2(event, &mut buffer, u64::MAX, ReadWriteFlags::NOWAIT);
}

#[test]
fn a_front_end_that_reads_its_own_kicks_blocks_nobody() {
    let dir = &test_dir();
    let (daemon, mut good) = two_disks(dir);
    let call = eventfd(0, EventfdFlags::empty()).unwrap();
    let bad = Identities::start(&dir.join("bad"), &call);
    for _ in 0..200 {
        for _ in 0..50 {
            rustix::fs::fcntl_setfl(&bad.kick, OFlags::empty()).unwrap();
            rustix::io::write(&bad.kick, &1_u64.to_ne_bytes()).unwrap();
            drain(&bad.kick);
        }
        // The daemon may never see the last of these kicks.
        works(&mut good, &[7; 512]);
    }
    drop((bad, good));
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_front_end_that_fills_its_call_descriptor_blocks_nobody() {
    let dir = &test_dir();
    let (daemon, mut good) = two_disks(dir);
    let call = eventfd(0, EventfdFlags::empty()).unwrap();
    let mut bad = Identities::start(&dir.join("bad"), &call);
    for _ in 0..100 {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    drain(&call);
                    rustix::fs::fcntl_setfl(&call, OFlags::NONBLOCK).unwrap();
                    // The counter may be full already.
                    let _ = rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes());
                    rustix::fs::fcntl_setfl(&call, OFlags::empty()).unwrap();
                }
            });
            for _ in 0..50 {
                // More available requests than its four descriptors would break the ring.
                if bad.unanswered() < 4 {
                    bad.ask();
                }
                // The wait is bounded: whether the daemon hangs is checked with the other disk.
                let began = Instant::now();
                while !bad.is_answered() && began.elapsed() < Duration::from_millis(20) {
                    std::thread::yield_now();
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        // The counter is full, and this test no longer drains it.
        works(&mut good, &[7; 512]);
    }
    bad.wait();
    drop((bad, good));
    assert_eq!(daemon.stop(), "");
}

/// User-mode Linux passes a socket as call descriptor, which blocks when it is full.
#[test]
fn a_full_socket_as_call_descriptor_blocks_nobody() {
    let (mut end, call) = std::os::unix::net::UnixStream::pair().unwrap();
    let dir = &test_dir();
    let (daemon, mut good) = two_disks(dir);
    let mut bad = Identities::start(&dir.join("bad"), &call);
    for _ in 0..600 {
        bad.ask();
        bad.wait();
    }
    works(&mut good, &[7; 512]);
    // The first of the signals.
    let mut signal = [0; 8];
    end.read_exact(&mut signal).unwrap();
    assert_eq!(u64::from_ne_bytes(signal), 1);
    drop((bad, good));
    assert_eq!(daemon.stop(), "");
}
