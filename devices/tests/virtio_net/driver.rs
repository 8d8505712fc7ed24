//! A virtio-net driver: that of the tests' kit for block devices, over the same registers, with
//! frames for requests; and the program behind its link.

#[path = "../virtio_blk/driver/mmio.rs"]
#[allow(dead_code, reason = "a block device has more to look at")]
mod mmio;
#[path = "../virtio_blk/driver/pci.rs"]
#[allow(dead_code, reason = "a block device has more to look at")]
mod pci;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use virtio_bindings::virtio_net::{VIRTIO_NET_F_MAC, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::control::ControlTransport;
use walvisor_devices::net::{Link, NetConfig, NetMetrics, VirtioNet};
use walvisor_devices::transport::{MmioTransport, PciTransport};
use walvisor_testkit::virtio::{BlockDriver, Memory, Registers};

use mmio::{MmioDriver, OwnedTransport};
use pci::PciDriver;
pub use walvisor_testkit::virtio::{EVENT_IDX, NEEDS_RESET, Piece, VERSION_1, guest_memory};
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

/// Its owner ends the link, and nothing else.
impl OwnedTransport for MmioTransport<Memory, VirtioNet> {
    fn control(&mut self) -> &mut dyn ControlTransport {
        unreachable!("a network device has no control")
    }
}

impl OwnedTransport for PciTransport<Memory, VirtioNet> {
    fn control(&mut self) -> &mut dyn ControlTransport {
        unreachable!("a network device has no control")
    }
}

/// A driver with a device of its own.
pub type Driver = BlockDriver<Arc<NetMetrics>>;

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

/// What a driver does with a network device.
pub trait NetDriver: Sized {
    /// A device that no driver has initialised yet, and its peer.
    fn attach(kind: Kind, config: NetConfig) -> (Self, Peer);
    /// A live device, with those of the `wanted` features that it offers, and its peer.
    fn start(kind: Kind, config: NetConfig, wanted: u64) -> (Self, Peer);
    /// Adds a receive buffer, and returns its chain and address.
    fn post_buffer(&mut self, len: usize) -> (u16, GuestAddress);
    /// Waits for the next received frame. `buffers`: what [`post_buffer`](Self::post_buffer) has
    /// returned.
    fn receive(&mut self, buffers: &[(u16, GuestAddress)]) -> Vec<u8>;
    /// Adds a frame behind a `header`, and returns its chain.
    fn post_frame(&mut self, header: &[u8], frame: &[u8]) -> u16;
    /// Sends a frame and waits until the device has taken it.
    fn send(&mut self, frame: &[u8]);
    /// Waits for a used chain, also of a device that needs a reset.
    fn wait_used(&mut self, queue: usize) -> (u16, u32);
}

impl NetDriver for Driver {
    fn attach(kind: Kind, config: NetConfig) -> (Self, Peer) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(PATIENCE)).unwrap();
        theirs.set_write_timeout(Some(PATIENCE)).unwrap();
        let memory = guest_memory();
        let device = VirtioNet::new(Link::stream(ours).unwrap(), config).unwrap();
        let metrics = device.metrics();
        let registers: Box<dyn Registers> = match kind {
            Kind::Mmio => Box::new(MmioDriver::new(device, memory.clone())),
            Kind::Pci => Box::new(PciDriver::new(device, memory.clone())),
        };
        (Self::new(registers, memory, metrics), Peer(theirs))
    }

    fn start(kind: Kind, config: NetConfig, wanted: u64) -> (Self, Peer) {
        let (mut driver, peer) = Self::attach(kind, config);
        driver.initialise(wanted);
        (driver, peer)
    }

    fn post_buffer(&mut self, len: usize) -> (u16, GuestAddress) {
        let at = self.allocate(len);
        let head = self.rings[RECEIVE].add(&[Piece::writable(at, len as u32)]);
        (head, at)
    }

    fn receive(&mut self, buffers: &[(u16, GuestAddress)]) -> Vec<u8> {
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

    fn post_frame(&mut self, header: &[u8], frame: &[u8]) -> u16 {
        let bytes = [header, frame].concat();
        let at = self.allocate(bytes.len());
        self.memory.write_slice(&bytes, at).unwrap();
        self.rings[TRANSMIT].add(&[Piece::readable(at, bytes.len() as u32)])
    }

    fn send(&mut self, frame: &[u8]) {
        let head = self.post_frame(&[0; HEADER], frame);
        self.kick(TRANSMIT);
        assert_eq!(self.wait_used(TRANSMIT), (head, 0));
    }

    fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        let mut used = None;
        wait_until("a used chain", || {
            used = self.rings[queue].pop_used();
            used.is_some()
        });
        used.unwrap()
    }
}
