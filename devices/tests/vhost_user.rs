//! Random messages to the vhost-user server: whatever a front-end sends, the server goes on to
//! serve the next one.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::{BlockConfig, VirtioBlock};
use walvisor_devices::control::DeviceControl;
use walvisor_devices::transport::Device;
use walvisor_devices::vhost_user::{Server, Service, survive_truncated_memory};
use walvisor_devices::virtio_scsi::VirtioScsi;
use walvisor_testkit::vhost_user::*;
use walvisor_testkit::{Random, wait_until};

const SECTORS: u64 = 64;
const PAGES: u64 = 16;

/// A number that is valid in this protocol, or nearly valid, or meaningless.
fn field(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => random.below(4),
        2 => random.below(4) | random.below(300) << 32,
        3 => 0x1000 * random.below(PAGES + 1),
        4 => 1 << 32 | 1 << 30 | random.below(1 << 15),
        5 => 0x100 * random.below(0x10),
        6 => 1 << random.below(64),
        _ => u64::MAX - random.below(0x2000),
    }
}

/// Shared memory with rings of 4 descriptors at 0, 0x100 (available) and 0x200 (used), whose
/// contents are partly random.
fn rings(random: &mut Random) -> File {
    let file = memory(PAGES * 0x1000);
    let put = |at: u64, bytes: &[u8]| file.write_all_at(bytes, at).unwrap();
    for index in 0..4 {
        let address = match random.below(6) {
            0 => field(random),
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
        put(page * 0x1000, &payload(&header));
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
fn attack(path: &Path, ring_count: u64, random: &mut Random) {
    let mut front_end = FrontEnd::connect(path);
    let memory = rings(random);
    if random.below(4) > 0 {
        front_end.fields(SET_FEATURES, &[FEATURES]);
        let protocol = 1 << 0 | 1 << 9 | 1 << 12 | 1 << 15;
        front_end.fields(SET_PROTOCOL_FEATURES, &[protocol]);
        let region = payload(&[1, 0, PAGES * 0x1000, 0, 0]);
        front_end.message(SET_MEM_TABLE, &region, &[memory.as_fd()]);
        for ring in 0..ring_count {
            front_end.fields(SET_VRING_NUM, &[ring | 4 << 32]);
            let addresses = [
                ring,
                0x100 * random.below(16),
                0x100 * random.below(16),
                0x100,
                0,
            ];
            front_end.fields(SET_VRING_ADDR, &addresses);
            let kick = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
            front_end.message(SET_VRING_KICK, &payload(&[ring]), &[kick.as_fd()]);
            front_end.fields(SET_VRING_ENABLE, &[ring | 1 << 32]);
        }
        // The server answers this once it has handled the messages before, or not at all.
        front_end.fields(GET_FEATURES, &[]);
        let _ = front_end.socket.read(&mut [0; 20]);
    }
    for _ in 0..random.below(12) {
        let request = random.below(42) as u32;
        let values: Vec<u64> = (0..random.below(10)).map(|_| field(random)).collect();
        let files: Vec<_> = (0..random.below(3).min(random.below(3)))
            .map(|_| descriptor(random, &memory))
            .collect();
        let flags = if random.below(20) == 0 {
            field(random) as u32
        } else {
            1 | (random.below(2) as u32) << 3
        };
        let mut payload = payload(&values);
        payload.truncate(payload.len() - random.below(8).min(payload.len() as u64) as usize);
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        front_end.flagged(request, flags, &payload, &files);
    }
    // Sometimes the front-end truncates its memory.
    if random.below(3) == 0 {
        memory.set_len(0x1000 * random.below(2)).unwrap();
    }
}

/// Whether the handler below has had a fault.
static FAULT: AtomicBool = AtomicBool::new(false);

/// A program's own handler of SIGBUS: it puts a page of zeroes where the fault was.
extern "C" fn on_bus_error(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    FAULT.store(true, Ordering::SeqCst);
    let (read, flags) = (
        libc::PROT_READ,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
    );
    // SAFETY: the kernel gives a valid siginfo_t, and the page is one of the mapping that the test
    // has made.
    unsafe {
        let page = (*info).si_addr() as usize & !0xfff;
        libc::mmap(page as *mut libc::c_void, 0x1000, read, flags, -1, 0);
    }
}

/// What a program does that has a handler of its own.
fn survive() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: all fields are integers or optional pointers.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_flags = libc::SA_SIGINFO;
        action.sa_sigaction = on_bus_error as *const () as usize;
        // SAFETY: the handler has the signature that SA_SIGINFO asks for.
        let set = unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
        assert_eq!(set, 0);
        survive_truncated_memory().unwrap();
    });
}

#[test]
fn a_fault_that_no_front_end_has_caused_goes_to_the_handler_before() {
    survive();
    let file = memory(0x1000);
    let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: this is a new mapping, at an address that the system chooses.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            0x1000,
            read,
            shared,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    file.set_len(0).unwrap();
    assert!(!FAULT.load(Ordering::SeqCst));
    // SAFETY: the page stays mapped, by the handler's page if not by the file's.
    assert_eq!(unsafe { page.cast::<u8>().read_volatile() }, 0);
    assert!(FAULT.load(Ordering::SeqCst));
}

/// Lets front-ends attack a server of `device`. Returns whether it still answers.
fn survives<D: Device + 'static>(device: D, ring_count: u64) -> bool {
    survive();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let service = Service::new(listener, device, "ram").unwrap();
    let server = Server::start(vec![service]).unwrap();
    for seed in 1..=2000 {
        attack(&path, ring_count, &mut Random(seed));
    }
    // A front-end that behaves.
    let reply = FrontEnd::connect(&path).ask(GET_FEATURES, &[]);
    server.stop();
    reply.len() == 8
}

fn config() -> BlockConfig {
    BlockConfig {
        queues: 2,
        ..BlockConfig::default()
    }
}

#[test]
fn no_message_harms_the_server() {
    let device = VirtioBlock::new(Arc::new(RamDisk::new(SECTORS)), config()).unwrap();
    let metrics = device.metrics();
    assert!(survives(device, 2));
    // The server must have taken some of the chains for requests, or the test has attacked nothing.
    assert!(metrics.counts().requests > 100, "{:?}", metrics.counts());
}

#[test]
fn no_message_harms_the_server_of_a_scsi_target() {
    let disk = || Arc::new(RamDisk::new(SECTORS));
    let mut device = VirtioScsi::new(disk(), config()).unwrap();
    device.add_unit(disk(), &config()).unwrap();
    let first = device.first_unit();
    assert!(survives(device, 4));
    // Rings must have run. Hardly any of these chains has room for a response; the random inputs of
    // the fuzz target have better ones.
    let counts = first.metrics.counts();
    assert!(counts.doorbells > 100, "{counts:?}");
}

/// Serves a disk. Also returns its owner's control of it, and its socket.
fn serve(place: &Path) -> (Server, Arc<dyn DeviceControl>, FrontEnd) {
    let path = place.join("socket");
    let device = VirtioBlock::new(Arc::new(RamDisk::new(SECTORS)), config()).unwrap();
    let service = Service::new(UnixListener::bind(&path).unwrap(), device, "disk").unwrap();
    let control = service.control();
    let server = Server::start(vec![service]).unwrap();
    let mut front_end = FrontEnd::connect(&path);
    assert_eq!(front_end.ask(GET_FEATURES, &[]).len(), 8);
    (server, control, front_end)
}

/// Bytes that a socket has sent and its peer has not read.
fn unread(socket: &UnixStream) -> i32 {
    let mut bytes = 0;
    // SAFETY: the request writes one number, to `bytes`.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    assert_eq!(done, 0, "TIOCOUTQ");
    bytes
}

#[test]
fn half_a_message_delays_no_pause() {
    let place = tempfile::tempdir().unwrap();
    let (_server, control, mut front_end) = serve(place.path());
    let message = [&header(SET_FEATURES, 8)[..], &payload(&[FEATURES])].concat();
    for cut in [5, 12, 15] {
        front_end.send(&message[..cut]);
        wait_until("the half message", || unread(&front_end.socket) == 0);
        control.pause().unwrap();
        control.resume();
        front_end.send(&message[cut..]);
        assert_eq!(front_end.ask(GET_FEATURES, &[]).len(), 8);
    }
}

#[test]
fn replies_that_nobody_reads_delay_no_pause() {
    let place = tempfile::tempdir().unwrap();
    let (_server, control, mut front_end) = serve(place.path());
    let socket = &mut front_end.socket;
    let asked = header(GET_FEATURES, 0).repeat(1000);
    // Until neither side takes any more.
    let limit = Some(Duration::from_millis(500));
    socket.set_write_timeout(limit).unwrap();
    let mut sent = 0;
    while let Ok(written) = socket.write(&asked[sent % asked.len()..]) {
        sent += written;
    }
    control.pause().unwrap();
    control.resume();
    let mut replies = vec![0; sent / 12 * 20];
    socket.read_exact(&mut replies).unwrap();
    for reply in replies.chunks(20) {
        assert_eq!(reply[..4], GET_FEATURES.to_ne_bytes());
    }
}
