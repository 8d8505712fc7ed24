//! Registers over virtio-pci. It finds them as a driver does, by walking the capabilities.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::EFD_NONBLOCK;
use vmm_sys_util::eventfd::EventFd;
use walvisor_devices::block::VirtioBlock;
use walvisor_devices::interrupt::{MsiMessage, MsiRouter};
use walvisor_devices::transport::{Device, PciTransport};
use walvisor_testkit::wait_until;

use super::mmio::OwnedTransport;
use super::{Memory, Registers};

impl OwnedTransport for PciTransport<Memory, VirtioBlock> {
    fn control(&mut self) -> &mut dyn walvisor_devices::control::ControlTransport {
        self
    }
}

/// The VMM's side of MSI-X: an eventfd per vector, as an irqfd would be.
#[derive(Default)]
pub struct Router {
    vectors: Mutex<HashMap<u16, Vector>>,
}

struct Vector {
    message: MsiMessage,
    routed: u64,
    event: EventFd,
}

impl Router {
    /// The message of the vector, and how often it was routed.
    pub fn route(&self, vector: u16) -> Option<(MsiMessage, u64)> {
        let vectors = self.vectors.lock().expect("vectors");
        vectors
            .get(&vector)
            .map(|vector| (vector.message, vector.routed))
    }

    /// Interrupts since the last call.
    pub fn take(&self, vector: u16) -> u64 {
        let vectors = self.vectors.lock().expect("vectors");
        vectors
            .get(&vector)
            .map_or(0, |vector| vector.event.read().unwrap_or(0))
    }
}

impl MsiRouter for Router {
    fn set_route(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        let mut vectors = self.vectors.lock().expect("vectors");
        let event = EventFd::new(EFD_NONBLOCK)?;
        let entry = vectors.entry(vector).or_insert(Vector {
            message,
            routed: 0,
            event,
        });
        entry.message = message;
        entry.routed += 1;
        Ok(())
    }

    fn trigger(&self, vector: u16) -> io::Result<()> {
        let vectors = self.vectors.lock().expect("vectors");
        vectors
            .get(&vector)
            .expect("a trigger comes after its route")
            .event
            .write(1)
    }
}

/// The location of a virtio structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StructureLocation {
    pub bar: usize,
    pub offset: u64,
    pub len: u64,
}

/// A virtio-pci driver. Vector 0 belongs to the configuration, vector i + 1 to queue i.
pub struct PciDriver<D: Device = VirtioBlock> {
    pub transport: PciTransport<Memory, D>,
    pub router: Arc<Router>,
    pub common: StructureLocation,
    pub notify: StructureLocation,
    pub isr: StructureLocation,
    pub device: StructureLocation,
    /// Offset of the PCI configuration access capability.
    pub pci_cfg: u16,
    /// Offset of the MSI-X capability.
    pub msix: u16,
    /// notify_off_multiplier.
    pub multiplier: u64,
}

impl<D: Device> PciDriver<D> {
    pub fn new(device: D, memory: Memory) -> Self {
        let mut driver = Self::discover(device, memory);
        driver.enable_msix();
        driver
    }

    /// Finds the structures and turns memory decoding on. MSI-X stays off.
    pub fn discover(device: D, memory: Memory) -> Self {
        let router = Arc::new(Router::default());
        let mut transport = PciTransport::new(device, memory, Arc::clone(&router) as _);
        let mut next = 0xc000_0000u64;
        for bar in transport.bars() {
            assert!(!bar.enabled);
            next = next.next_multiple_of(bar.size);
            transport.set_bar(bar.index, next);
            next += bar.size;
        }
        let nowhere = StructureLocation {
            bar: 9,
            offset: 0,
            len: 0,
        };
        let mut driver = Self {
            transport,
            router,
            common: nowhere,
            notify: nowhere,
            isr: nowhere,
            device: nowhere,
            pci_cfg: 0,
            msix: 0,
            multiplier: 0,
        };
        assert!(
            matches!(driver.config(0), [0xf4, 0x1a, 0x41 | 0x42, 0x10]),
            "a network device, or a disk"
        );
        driver.transport.config_write(0x04, &[0x06, 0x04]);
        assert!(driver.transport.bars().iter().all(|bar| bar.enabled));
        let mut at = u16::from(driver.config::<1>(0x34)[0]);
        while at != 0 {
            let [id, next] = driver.config(at);
            match id {
                0x09 => driver.virtio_capability(at),
                0x11 => driver.msix = at,
                other => panic!("capability {other:#x}"),
            }
            at = next.into();
        }
        driver
    }

    fn virtio_capability(&mut self, at: u16) {
        let [cfg_type, bar] = self.config(at + 3);
        let place = StructureLocation {
            bar: bar.into(),
            offset: u32::from_le_bytes(self.config(at + 8)).into(),
            len: u32::from_le_bytes(self.config(at + 12)).into(),
        };
        match cfg_type {
            1 => self.common = place,
            2 => {
                self.notify = place;
                self.multiplier = u32::from_le_bytes(self.config(at + 16)).into();
            }
            3 => self.isr = place,
            4 => self.device = place,
            5 => self.pci_cfg = at,
            other => panic!("cfg_type {other}"),
        }
    }

    /// Enables MSI-X and unmasks every vector, each with a message of its own.
    pub fn enable_msix(&mut self) {
        let control = u16::from_le_bytes(self.config(self.msix + 2));
        for vector in 0..=control & 0x7ff {
            self.set_vector(vector, Self::message(vector), false);
        }
        self.transport
            .config_write(self.msix + 2, &(1u16 << 15).to_le_bytes());
    }

    /// The message that [`enable_msix`](Self::enable_msix) gives a vector.
    pub fn message(vector: u16) -> MsiMessage {
        MsiMessage {
            address: 0xfee0_0000 | 1 << 32,
            data: 0x40 + u32::from(vector),
        }
    }

    /// Writes a whole vector table entry, its mask last.
    pub fn set_vector(&mut self, vector: u16, message: MsiMessage, masked: bool) {
        let (bar, table) = self.msix_table();
        let at = table + u64::from(vector) * 16;
        self.transport
            .bar_write(bar, at, &(message.address as u32).to_le_bytes());
        self.transport
            .bar_write(bar, at + 4, &((message.address >> 32) as u32).to_le_bytes());
        self.transport
            .bar_write(bar, at + 8, &message.data.to_le_bytes());
        self.mask_vector(vector, masked);
    }

    pub fn mask_vector(&mut self, vector: u16, masked: bool) {
        let (bar, table) = self.msix_table();
        let at = table + u64::from(vector) * 16 + 12;
        self.transport
            .bar_write(bar, at, &u32::from(masked).to_le_bytes());
    }

    /// BAR and offset of the vector table.
    pub fn msix_table(&mut self) -> (usize, u64) {
        let table = u32::from_le_bytes(self.config(self.msix + 4));
        ((table & 7) as usize, (table & !7).into())
    }

    /// Whether the vector's pending bit is set.
    pub fn pending(&mut self, vector: u16) -> bool {
        let pba = u32::from_le_bytes(self.config(self.msix + 8));
        let mut quad = [0; 8];
        let at = u64::from(pba & !7) + u64::from(vector / 64) * 8;
        self.transport.bar_read((pba & 7) as usize, at, &mut quad);
        u64::from_le_bytes(quad) >> (vector % 64) & 1 != 0
    }

    pub fn config<const N: usize>(&mut self, offset: u16) -> [u8; N] {
        let mut bytes = [0; N];
        self.transport.config_read(offset, &mut bytes);
        bytes
    }

    pub fn get<const N: usize>(&mut self, field: u64) -> [u8; N] {
        assert!(field + N as u64 <= self.common.len);
        let mut bytes = [0; N];
        self.transport
            .bar_read(self.common.bar, self.common.offset + field, &mut bytes);
        bytes
    }

    pub fn set<const N: usize>(&mut self, field: u64, bytes: [u8; N]) {
        assert!(field + N as u64 <= self.common.len);
        self.transport
            .bar_write(self.common.bar, self.common.offset + field, &bytes);
    }
}

impl<D: Device> Registers for PciDriver<D>
where
    PciTransport<Memory, D>: OwnedTransport,
{
    fn device_features(&mut self) -> u64 {
        self.set(0x00, 1u32.to_le_bytes());
        let high = u32::from_le_bytes(self.get(0x04));
        self.set(0x00, 0u32.to_le_bytes());
        u64::from(high) << 32 | u64::from(u32::from_le_bytes(self.get(0x04)))
    }

    fn set_driver_features(&mut self, features: u64) {
        for half in [1u32, 0] {
            self.set(0x08, half.to_le_bytes());
            self.set(0x0c, ((features >> (32 * half)) as u32).to_le_bytes());
        }
    }

    fn status(&mut self) -> u8 {
        self.get::<1>(0x14)[0]
    }

    fn set_status(&mut self, status: u8) {
        self.set(0x14, [status]);
        if status == 0 {
            // 4.1.4.3.2: the driver waits for the end of the reset.
            wait_until("the end of a reset", || self.get::<1>(0x14) == [0]);
        }
        if status == 1 {
            // The preceding reset has unmapped every vector.
            self.set(0x10, 0u16.to_le_bytes());
            assert_eq!(self.get(0x10), 0u16.to_le_bytes());
        }
    }

    fn generation(&mut self) -> u32 {
        self.get::<1>(0x15)[0].into()
    }

    fn read_config(&mut self, offset: u64, data: &mut [u8]) {
        self.transport
            .bar_read(self.device.bar, self.device.offset + offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.transport
            .bar_write(self.device.bar, self.device.offset + offset, data);
    }

    fn queue_max(&mut self, queue: u16) -> u16 {
        self.set(0x16, queue.to_le_bytes());
        u16::from_le_bytes(self.get(0x18))
    }

    fn set_queue(&mut self, queue: u16, size: u16, addresses: [u64; 3]) {
        self.set(0x16, queue.to_le_bytes());
        assert_eq!(self.get(0x1c), [0, 0], "queue {queue} is in use");
        self.set(0x18, size.to_le_bytes());
        self.set(0x1a, (queue + 1).to_le_bytes());
        assert_eq!(self.get(0x1a), (queue + 1).to_le_bytes());
        for (field, address) in [0x20, 0x28, 0x30].into_iter().zip(addresses) {
            self.set(field, (address as u32).to_le_bytes());
            self.set(field + 4, ((address >> 32) as u32).to_le_bytes());
            assert_eq!(self.get(field), address.to_le_bytes());
        }
        self.set(0x1c, 1u16.to_le_bytes());
        assert_eq!(self.get(0x1c), 1u16.to_le_bytes());
    }

    fn reset_queue(&mut self, queue: u16) {
        self.set(0x16, queue.to_le_bytes());
        self.set(0x3a, 1u16.to_le_bytes());
    }

    fn queue_resetting(&mut self, queue: u16) -> bool {
        self.set(0x16, queue.to_le_bytes());
        self.get(0x3a) != [0, 0]
    }

    fn enable_queue(&mut self, queue: u16) {
        self.set(0x16, queue.to_le_bytes());
        self.set(0x1c, 1u16.to_le_bytes());
    }

    fn disable_queue(&mut self, _queue: u16) {
        // Over PCI only a reset disables a queue.
    }

    fn queue_enabled(&mut self, queue: u16) -> bool {
        self.set(0x16, queue.to_le_bytes());
        self.get(0x1c) != [0, 0]
    }

    fn notify(&mut self, queue: u16) {
        self.set(0x16, queue.to_le_bytes());
        let off = u64::from(u16::from_le_bytes(self.get(0x1e)));
        let at = self.notify.offset + off * self.multiplier;
        self.transport
            .bar_write(self.notify.bar, at, &queue.to_le_bytes());
    }

    fn doorbells(&self) -> Vec<EventFd> {
        let doorbells = self.transport.doorbells().expect("doorbells");
        for (doorbell, queue) in doorbells.iter().zip(0..) {
            assert_eq!(doorbell.bar, self.notify.bar);
            assert_eq!(
                doorbell.offset,
                self.notify.offset + queue * self.multiplier
            );
        }
        doorbells
            .into_iter()
            .map(|doorbell| doorbell.event)
            .collect()
    }

    fn take_queue_interrupts(&mut self, queue: u16) -> u64 {
        self.router.take(queue + 1)
    }

    fn take_config_interrupts(&mut self) -> u64 {
        self.router.take(0)
    }

    fn capacity_changed(&mut self) {
        self.transport.control().capacity_changed();
    }

    fn pause(&mut self) {
        self.transport.control().pause();
    }

    fn resume(&mut self) {
        self.transport.control().resume();
    }

    fn set_write_cache(&mut self, on: bool) -> bool {
        self.transport.control().set_write_cache(on)
    }
}
