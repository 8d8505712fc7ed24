//! Any frames in any descriptor chains of a network device, in both directions, and any bytes in
//! its rings. What reaches the link and the driver is exactly what a model says, and a reset makes
//! the device work again.
//!
//! An *input* is a byte of options (1: EVENT_IDX), then steps: `queue u8` (its low bit), for the
//! receive queue `length u8` of a frame, `header flags u8`, `head and number of descriptors u8` and
//! the descriptors `place u8, length u8, flags u8`; or 0xff, a length, and that many bytes for the
//! rings of both queues.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::chain::{gather, scatter, walk};
use crate::guest::{MEMORY, QUEUE_SIZE};
use crate::input::Input;
use crate::machine::{LIVE, Machine, NEEDS_RESET};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::net::{Link, NetConfig, NetCounts, NetMetrics, VirtioNet};

/// The rings of a queue take this much; tables for indirect descriptors follow those of both.
const RINGS: u64 = 0x400;
const AVAILABLE: u64 = 0x200;
const USED: u64 = 0x300;
const TABLES: [u64; 2] = [0x800, 0xa00];
/// Frames and buffers lie from here on.
const BUFFERS: u64 = 0x1000;
const MOST_STEPS: usize = 24;

const TRANSMIT: usize = 1;
const HEADER: u64 = 12;
const MOST_FRAME: u64 = 1518;

const LENGTHS: [u32; 16] = [
    0,
    1,
    8,
    11,
    12,
    13,
    26,
    60,
    72,
    512,
    1526,
    1530,
    1531,
    4096,
    0x8000,
    u32::MAX,
];
const FRAMES: [usize; 8] = [0, 1, 14, 60, 1500, 1518, 1519, 9000];
const ODD_PLACES: [u64; 6] = [
    MEMORY as u64 - 1,
    MEMORY as u64 - 12,
    MEMORY as u64 - 64,
    MEMORY as u64,
    u64::MAX - 3,
    1 << 63,
];

struct Driver {
    machine: Machine<VirtioNet>,
    metrics: Arc<NetMetrics>,
    peer: UnixStream,
    /// The available index of each queue. Between steps the used index equals it.
    indices: [u16; 2],
    /// Gives each frame other bytes.
    frames: u8,
}

impl Driver {
    fn new(options: u8) -> Self {
        let (ours, peer) = UnixStream::pair().expect("a socket");
        let config = NetConfig {
            queue_size: QUEUE_SIZE,
            ..NetConfig::new("02:00:00:00:00:01".parse().expect("an address"))
        };
        let device = VirtioNet::new(Link::stream(ours).expect("a link"), config).expect("a device");
        let metrics = device.metrics();
        let irq = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        let mut driver = Self {
            machine: Machine::new(device, irq, options & 1 != 0),
            metrics,
            peer,
            indices: [0; 2],
            frames: 0,
        };
        driver.start();
        driver
    }

    /// Takes the device from reset to DRIVER_OK, with empty rings.
    fn start(&mut self) {
        self.machine.reset();
        self.machine.write(0, &[0; BUFFERS as usize]);
        self.indices = [0; 2];
        let rings = [0, RINGS].map(|rings| [rings, rings + AVAILABLE, rings + USED]);
        self.machine.start(&rings);
    }

    fn step(&mut self, input: &mut Input) {
        let kind = input.byte();
        if kind == 0xff {
            return self.scribble(input);
        }
        let queue = usize::from(kind & 1);
        let frame = if queue == TRANSMIT {
            self.machine.write(BUFFERS, &[0; HEADER as usize]);
            // Flags and gso_type.
            let header = input.byte();
            self.machine.write(BUFFERS, &[header & !2, header >> 1 & 1]);
            Vec::new()
        } else {
            self.frames = self.frames.wrapping_add(1);
            vec![self.frames; input.of(&FRAMES)]
        };
        let shape = input.byte();
        let head = u16::from(shape >> 4);
        let (table, chain) = (queue as u64 * RINGS, (head, shape & 15));
        let place = |input: &mut Input| input.pick(&ODD_PLACES, |byte| BUFFERS + byte * 0x60);
        self.machine
            .lay_chain(table, TABLES, chain, input, &LENGTHS, place);
        self.exchange(queue, head, &frame);
    }

    /// Has the device carry out the chain at `head`, with `frame` if it is a buffer, and compares
    /// with what it should do.
    fn exchange(&mut self, queue: usize, head: u16, frame: &[u8]) {
        let rings = queue as u64 * RINGS;
        let before = self.indices[queue];
        let counts = self.metrics.counts();
        if queue != TRANSMIT {
            self.peer
                .write_all(&(frame.len() as u32).to_be_bytes())
                .expect("a length");
            self.peer.write_all(frame).expect("a frame");
            if frame.len() as u64 > MOST_FRAME {
                // It needs no buffer to be dropped.
                self.wait(|_, now| now.receive_drops > counts.receive_drops);
                return;
            }
        }
        let slot = rings + AVAILABLE + 4 + u64::from(before % QUEUE_SIZE) * 2;
        self.machine.write(slot, &head.to_le_bytes());
        self.indices[queue] = before.wrapping_add(1);
        self.machine
            .set_index(rings + AVAILABLE, self.indices[queue]);
        let mut memory = self.machine.bytes();
        self.machine.notify(queue as u32);

        let Some((readable, writable)) = walk(&memory, rings, head, QUEUE_SIZE) else {
            self.wait(|machine, _| machine.status() & NEEDS_RESET != 0);
            assert_eq!(
                self.machine.index(rings + USED),
                before,
                "a broken chain was used"
            );
            self.start();
            if queue != TRANSMIT {
                self.take_waiting(frame);
            }
            return;
        };
        let wanted = self.indices[queue];
        self.wait(|machine, _| {
            assert_eq!(machine.status(), LIVE, "a chain that can be answered");
            machine.index(rings + USED) == wanted
        });
        let mut any = Vec::new();
        let (written, counted) = if queue == TRANSMIT {
            let len = readable.iter().map(|segment| segment.len).sum::<u64>();
            let bytes = (HEADER + 14..=HEADER + MOST_FRAME)
                .contains(&len)
                .then(|| gather(&memory, &readable, 0, len))
                .flatten();
            match bytes.filter(|bytes| bytes[0] & 1 == 0 && bytes[1] == 0) {
                Some(bytes) => {
                    self.expect_sent(&bytes[HEADER as usize..]);
                    let frames_sent = counts.frames_sent + 1;
                    (
                        0,
                        NetCounts {
                            frames_sent,
                            ..counts
                        },
                    )
                }
                None => {
                    let send_drops = counts.send_drops + 1;
                    (
                        0,
                        NetCounts {
                            send_drops,
                            ..counts
                        },
                    )
                }
            }
        } else {
            let mut bytes = vec![0; HEADER as usize];
            bytes[10] = 1;
            bytes.extend(frame);
            let room = writable.iter().map(|segment| segment.len).sum::<u64>();
            let fits = room >= bytes.len() as u64;
            if fits && scatter(&mut memory, &mut any, &writable, &bytes) {
                let frames_received = counts.frames_received + 1;
                let len = bytes.len() as u32;
                (
                    len,
                    NetCounts {
                        frames_received,
                        ..counts
                    },
                )
            } else {
                let receive_drops = counts.receive_drops + 1;
                (
                    0,
                    NetCounts {
                        receive_drops,
                        ..counts
                    },
                )
            }
        };
        let now = self.metrics.counts();
        let of = |counts: NetCounts| {
            (
                (counts.frames_received, counts.receive_drops),
                (counts.frames_sent, counts.send_drops),
            )
        };
        assert_eq!(of(now), of(counted), "counters");
        let mut bytes = self.machine.bytes();
        for (start, len) in any {
            let range = start..start + len;
            memory[range.clone()].copy_from_slice(&bytes[range]);
        }
        let slot = (rings + USED + 4 + u64::from(before % QUEUE_SIZE) * 8) as usize;
        let overlaps = writable.iter().any(|segment| segment.address < BUFFERS);
        if !overlaps {
            assert_eq!(bytes[slot..slot + 2], head.to_le_bytes(), "used head");
            assert_eq!(
                bytes[slot + 4..slot + 8],
                u32::to_le_bytes(written),
                "used length"
            );
        }
        // The other queue's worker may just ask for doorbells, or for none.
        for rings in [0, RINGS] {
            let used = (rings + USED) as usize..(rings + USED) as usize + 6 + 8 * 16;
            bytes[used.clone()].copy_from_slice(&memory[used]);
        }
        assert!(bytes == memory, "guest memory is not what it should be");
    }

    /// The frame that found a broken chain is still there.
    fn take_waiting(&mut self, frame: &[u8]) {
        let (at, len) = (BUFFERS, 0x1000);
        self.machine.describe(0, 0, at, len, 2, 0);
        self.machine.write(AVAILABLE + 4, &[0; 2]);
        self.machine.write(AVAILABLE + 2, &1_u16.to_le_bytes());
        self.indices[0] = 1;
        self.machine.notify(0);
        self.wait(|machine, _| machine.index(USED) == 1);
        let bytes = self.machine.bytes();
        let from = (at + HEADER) as usize;
        assert_eq!(
            &bytes[from..from + frame.len()],
            frame,
            "a frame that waited"
        );
    }

    fn expect_sent(&mut self, frame: &[u8]) {
        let mut len = [0; 4];
        self.peer.read_exact(&mut len).expect("a length");
        assert_eq!(u32::from_be_bytes(len) as usize, frame.len());
        let mut bytes = vec![0; frame.len()];
        self.peer.read_exact(&mut bytes).expect("a frame");
        assert!(bytes == frame, "a frame was changed");
    }

    /// Writes any bytes into the rings of both queues, their indices included. The device may do
    /// anything with them, except crash or send what is no frame.
    fn scribble(&mut self, input: &mut Input) {
        let len = usize::from(input.byte()) * 8;
        let mut bytes = vec![0; len];
        bytes.fill_with(|| input.byte());
        self.machine.write(0, &bytes);
        let doorbells = self.metrics.counts().doorbells;
        self.machine.notify(0);
        self.machine.notify(1);
        self.wait(|_, counts| counts.doorbells >= doorbells + 2);
        self.start();
        // Whole frames may have been sent out of any memory.
        self.peer.set_nonblocking(true).expect("a mode");
        let mut sent = Vec::new();
        let _ = self.peer.read_to_end(&mut sent);
        self.peer.set_nonblocking(false).expect("a mode");
        let mut rest = &sent[..];
        while let Some((len, more)) = rest.split_first_chunk() {
            let len = u32::from_be_bytes(*len) as usize;
            assert!(
                (14..=MOST_FRAME as usize).contains(&len),
                "a frame of {len}"
            );
            rest = more.get(len..).expect("a whole frame");
        }
        assert!(rest.is_empty(), "a part of a frame");
    }

    /// Waits for the device. libFuzzer's timeout finds a hang.
    fn wait(&mut self, happened: impl Fn(&mut Machine<VirtioNet>, NetCounts) -> bool) {
        while !happened(&mut self.machine, self.metrics.counts()) {
            std::thread::yield_now();
        }
    }
}

/// Runs an input.
///
/// # Panics
/// If the device does what it must not.
pub fn run(input: &[u8]) {
    let mut input = Input::new(input);
    let mut driver = Driver::new(input.byte());
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        driver.step(&mut input);
    }
    // A frame of 60 bytes each way, after all that.
    driver.start();
    driver.step(&mut Input::new(&[0, 3, 0x01, 0, 13, 1]));
    driver.step(&mut Input::new(&[1, 0, 0x01, 0, 8, 0]));
}
