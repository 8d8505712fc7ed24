//! A virtio-net driver for tests, and the program behind its link.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use virtio_bindings::virtio_net::{VIRTIO_NET_F_MAC, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::interrupt::{MsiMessage, MsiRouter};
use walvisor_devices::net::{Link, NetConfig, NetMetrics, VirtioNet};
use walvisor_devices::transport::{MmioTransport, PciTransport};

pub use walvisor_testkit::virtio::{
    BROKEN_CHAINS, DRIVER_OK, EVENT_IDX, MEMORY_END, Memory, NEEDS_RESET, Piece, Ring, VERSION_1,
    guest_memory,
};
pub use walvisor_testkit::{PATIENCE, wait_until};

pub const INDIRECT: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
pub const MAC: u64 = 1 << VIRTIO_NET_F_MAC;
pub const MTU: u64 = 1 << VIRTIO_NET_F_MTU;
pub const STATUS: u64 = 1 << VIRTIO_NET_F_STATUS;
pub const EVERYTHING: u64 = u64::MAX;

/// Long enough for a forbidden event to happen if it would.
pub const A_WHILE: Duration = Duration::from_millis(50);

pub const RECEIVE: usize = 0;
pub const TRANSMIT: usize = 1;
pub const HEADER: usize = 12;

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Mmio,
    Pci,
}

/// One test for each transport.
macro_rules! on_both_transports {
    ($($name:ident,)*) => {
        mod mmio {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::Mmio); })*
        }
        mod pci {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::Pci); })*
        }
    };
}
pub(crate) use on_both_transports;

/// Counts interrupts of each vector: the configuration's is the last one.
#[derive(Default)]
struct Vectors(Mutex<[u64; 3]>);

impl MsiRouter for Vectors {
    fn set_route(&self, _: u16, _: MsiMessage) -> io::Result<()> {
        Ok(())
    }

    fn trigger(&self, vector: u16) -> io::Result<()> {
        self.0.lock().unwrap()[usize::from(vector)] += 1;
        Ok(())
    }
}

enum Transport {
    Mmio(MmioTransport<Memory, VirtioNet>, EventFd),
    Pci(Box<PciTransport<Memory, VirtioNet>>, Arc<Vectors>),
}

/// The registers of either transport: the offset over MMIO, and the one in the common configuration
/// with its width.
#[derive(Clone, Copy)]
struct Register(u64, u64, usize);

const FEATURES_SELECT: Register = Register(0x14, 0x00, 4);
const FEATURES: Register = Register(0x10, 0x04, 4);
const CHOICE_SELECT: Register = Register(0x24, 0x08, 4);
const CHOICE: Register = Register(0x20, 0x0c, 4);
const DEVICE_STATUS: Register = Register(0x70, 0x14, 1);
const GENERATION: Register = Register(0xfc, 0x15, 1);
const QUEUE_SELECT: Register = Register(0x30, 0x16, 2);
const QUEUE_SIZE: Register = Register(0x38, 0x18, 2);
const QUEUE_ENABLE: Register = Register(0x44, 0x1c, 2);
const QUEUE_ADDRESSES: [Register; 3] = [
    Register(0x80, 0x20, 4),
    Register(0x90, 0x28, 4),
    Register(0xa0, 0x30, 4),
];

/// A driver with a device of its own.
pub struct Driver {
    transport: Transport,
    pub memory: Memory,
    pub rings: Vec<Ring>,
    pub metrics: Arc<NetMetrics>,
    pub features: u64,
    next_page: u64,
    config_interrupts: u64,
}

/// The program at the other end.
pub struct Peer(pub UnixStream);

impl Peer {
    pub fn send(&mut self, frame: &[u8]) {
        self.0
            .write_all(&(frame.len() as u32).to_be_bytes())
            .expect("a length");
        self.0.write_all(frame).expect("a frame");
    }

    pub fn receive(&mut self) -> Vec<u8> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).expect("a length");
        let mut frame = vec![0; u32::from_be_bytes(len) as usize];
        self.0.read_exact(&mut frame).expect("a frame");
        frame
    }
}

pub fn config() -> NetConfig {
    NetConfig {
        queue_size: 64,
        ..NetConfig::new("02:11:22:33:44:55".parse().unwrap())
    }
}

/// A frame with a content of its own.
pub fn frame(number: u32, len: usize) -> Vec<u8> {
    let number = number.to_le_bytes();
    (0..len).map(|at| number[at % 4] ^ (at / 4) as u8).collect()
}

impl Driver {
    /// A device that no driver has initialised yet, and its peer.
    pub fn attach(kind: Kind, config: NetConfig) -> (Self, Peer) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(PATIENCE)).unwrap();
        theirs.set_write_timeout(Some(PATIENCE)).unwrap();
        let driver = Self::with_link(kind, Link::stream(ours).unwrap(), config);
        (driver, Peer(theirs))
    }

    pub fn with_link(kind: Kind, link: Link, config: NetConfig) -> Self {
        let memory = guest_memory();
        let device = VirtioNet::new(link, config).unwrap();
        let metrics = device.metrics();
        let transport = match kind {
            Kind::Mmio => {
                let irq = EventFd::new(EFD_NONBLOCK).unwrap();
                let line = irq.try_clone().unwrap();
                Transport::Mmio(MmioTransport::new(device, memory.clone(), line), irq)
            }
            Kind::Pci => {
                let vectors = Arc::<Vectors>::default();
                let mut function = PciTransport::new(device, memory.clone(), vectors.clone());
                let mut identity = [0; 4];
                function.config_read(0, &mut identity);
                assert_eq!(u32::from_le_bytes(identity), 0x1041_1af4);
                enable_msix(&mut function);
                Transport::Pci(Box::new(function), vectors)
            }
        };
        Self {
            transport,
            memory,
            rings: Vec::new(),
            metrics,
            features: 0,
            next_page: 0x1000,
            config_interrupts: 0,
        }
    }

    /// A live device, with those of the `wanted` features that it offers, and its peer.
    pub fn start(kind: Kind, config: NetConfig, wanted: u64) -> (Self, Peer) {
        let (mut driver, peer) = Self::attach(kind, config);
        driver.initialise(wanted);
        (driver, peer)
    }

    fn get(&mut self, register: Register) -> u32 {
        let mut bytes = [0; 4];
        match &mut self.transport {
            Transport::Mmio(transport, _) => transport.read(register.0, &mut bytes),
            Transport::Pci(function, _) => {
                function.bar_read(0, register.1, &mut bytes[..register.2]);
            }
        }
        u32::from_le_bytes(bytes)
    }

    fn set(&mut self, register: Register, value: u32) {
        let bytes = value.to_le_bytes();
        match &mut self.transport {
            Transport::Mmio(transport, _) => transport.write(register.0, &bytes),
            Transport::Pci(function, _) => {
                function.bar_write(0, register.1, &bytes[..register.2]);
            }
        }
    }

    pub fn offered(&mut self) -> u64 {
        let [low, high] = [0, 1].map(|half| {
            self.set(FEATURES_SELECT, half);
            u64::from(self.get(FEATURES))
        });
        high << 32 | low
    }

    pub fn status(&mut self) -> u8 {
        self.get(DEVICE_STATUS) as u8
    }

    pub fn set_status(&mut self, status: u8) {
        self.set(DEVICE_STATUS, status.into());
    }

    pub fn generation(&mut self) -> u32 {
        self.get(GENERATION)
    }

    pub fn read_config<const N: usize>(&mut self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        match &mut self.transport {
            Transport::Mmio(transport, _) => transport.read(0x100 + offset, &mut bytes),
            Transport::Pci(function, _) => function.bar_read(0, 0x2000 + offset, &mut bytes),
        }
        bytes
    }

    pub fn write_config(&mut self, offset: u64, bytes: &[u8]) {
        match &mut self.transport {
            Transport::Mmio(transport, _) => transport.write(0x100 + offset, bytes),
            Transport::Pci(function, _) => function.bar_write(0, 0x2000 + offset, bytes),
        }
    }

    pub fn notify(&mut self, queue: usize) {
        match &mut self.transport {
            Transport::Mmio(transport, _) => {
                transport.write(
                    MmioTransport::<Memory>::QUEUE_NOTIFY,
                    &(queue as u32).to_le_bytes(),
                );
            }
            Transport::Pci(function, _) => {
                function.bar_write(2, 4 * queue as u64, &(queue as u16).to_le_bytes());
            }
        }
    }

    /// Configuration change interrupts since the start.
    pub fn config_interrupts(&mut self) -> u64 {
        match &mut self.transport {
            Transport::Mmio(transport, irq) => {
                if irq.read().is_ok() {
                    let mut causes = [0; 4];
                    transport.read(0x60, &mut causes);
                    transport.write(0x64, &causes);
                    self.config_interrupts += u64::from(causes[0] >> 1 & 1);
                }
                self.config_interrupts
            }
            Transport::Pci(_, vectors) => vectors.0.lock().unwrap()[2],
        }
    }

    /// Initialises the device (virtio 1.2, 3.1.1), with a ring for each queue.
    pub fn initialise(&mut self, wanted: u64) {
        self.set_status(0);
        self.set_status(1);
        self.set_status(1 | 2);
        self.features = self.offered() & (wanted | VERSION_1);
        for half in [0, 1] {
            self.set(CHOICE_SELECT, half);
            self.set(CHOICE, (self.features >> (32 * half)) as u32);
        }
        self.set_status(1 | 2 | 8);
        assert_eq!(self.status(), 1 | 2 | 8, "the features are accepted");
        self.rings.clear();
        for queue in 0..2 {
            let size = 64;
            let pages = self.allocate(Ring::bytes(size));
            let event_idx = self.features & EVENT_IDX != 0;
            let ring = Ring::new(self.memory.clone(), size, pages, event_idx);
            self.set(QUEUE_SELECT, queue);
            self.set(QUEUE_SIZE, size.into());
            for (register, address) in QUEUE_ADDRESSES.into_iter().zip(ring.addresses()) {
                self.set(register, address as u32);
                let Register(mmio, pci, width) = register;
                self.set(Register(mmio + 4, pci + 4, width), (address >> 32) as u32);
            }
            if let Transport::Pci(function, _) = &mut self.transport {
                function.bar_write(0, 0x1a, &(queue as u16).to_le_bytes());
                function.bar_write(0, 0x10, &2_u16.to_le_bytes());
            }
            self.set(QUEUE_ENABLE, 1);
            self.rings.push(ring);
        }
        self.set_status(1 | 2 | 8 | DRIVER_OK);
    }

    /// Fresh guest pages, which are never freed.
    pub fn allocate(&mut self, bytes: usize) -> GuestAddress {
        let at = self.next_page;
        self.next_page += (bytes as u64).next_multiple_of(0x1000);
        assert!(self.next_page <= MEMORY_END, "no guest memory is left");
        GuestAddress(at)
    }

    /// Adds a receive buffer, and returns its chain and address.
    pub fn post_buffer(&mut self, len: usize) -> (u16, GuestAddress) {
        let at = self.allocate(len);
        let head = self.rings[RECEIVE].add(&[Piece::writable(at, len as u32)]);
        (head, at)
    }

    /// Waits for the next received frame. `buffers`: what [`post_buffer`](Self::post_buffer) has
    /// returned.
    pub fn receive(&mut self, buffers: &[(u16, GuestAddress)]) -> Vec<u8> {
        let (head, written) = self.wait_used(RECEIVE);
        let &(_, at) = buffers
            .iter()
            .find(|(posted, _)| *posted == head)
            .expect("a posted buffer");
        let mut bytes = vec![0; written as usize];
        self.memory.read_slice(&mut bytes, at).unwrap();
        assert_eq!(
            bytes[..HEADER],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0],
            "no offload, one buffer"
        );
        bytes.split_off(HEADER)
    }

    /// Adds a frame behind a `header`, in pieces of `piece` bytes, and returns its chain.
    pub fn post_frame(&mut self, header: &[u8], frame: &[u8], piece: usize) -> u16 {
        let bytes = [header, frame].concat();
        let at = self.allocate(bytes.len().max(1));
        self.memory.write_slice(&bytes, at).unwrap();
        let pieces: Vec<Piece> = (0..bytes.len())
            .step_by(piece)
            .map(|from| {
                let len = piece.min(bytes.len() - from);
                Piece::readable(GuestAddress(at.0 + from as u64), len as u32)
            })
            .collect();
        self.rings[TRANSMIT].add(&pieces)
    }

    /// Publishes what was added, and rings if the device wants that.
    pub fn kick(&mut self, queue: usize) {
        if self.rings[queue].publish() {
            self.notify(queue);
        }
    }

    /// Sends a frame and waits until the device has taken it.
    pub fn send(&mut self, frame: &[u8]) {
        let head = self.post_frame(&[0; HEADER], frame, 1 << 20);
        self.kick(TRANSMIT);
        assert_eq!(self.wait_used(TRANSMIT), (head, 0));
    }

    pub fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        let mut used = None;
        wait_until("a used chain", || {
            used = self.rings[queue].pop_used();
            used.is_some()
        });
        used.unwrap()
    }

    pub fn wait_for_needs_reset(&mut self) {
        wait_until("DEVICE_NEEDS_RESET", || self.status() & NEEDS_RESET != 0);
    }
}

/// Lets each queue and the configuration have a vector.
fn enable_msix(function: &mut PciTransport<Memory, VirtioNet>) {
    for vector in 0..3 {
        // Address, data, and an open mask.
        for (offset, value) in [(0, 0xfee0_0000_u32), (4, 0), (8, vector), (12, 0)] {
            function.bar_write(4, u64::from(vector) * 16 + offset, &value.to_le_bytes());
        }
    }
    let mut capability = [0];
    function.config_read(0x34, &mut capability);
    loop {
        let at = u16::from(capability[0]);
        let mut id = [0];
        function.config_read(at, &mut id);
        if id[0] == 0x11 {
            function.config_write(at + 2, &0x8000_u16.to_le_bytes());
            return;
        }
        function.config_read(at + 1, &mut capability);
    }
}
