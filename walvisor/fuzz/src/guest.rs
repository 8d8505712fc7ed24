//! Two disks in use: a RAM disk and a raw image, each behind virtio-mmio with a driver that makes
//! requests.

use std::sync::{Arc, Mutex};

use tempfile::NamedTempFile;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::transport::MmioTransport;
use walvisor_devices_fuzz::driver::{self, Bus};
use walvisor_devices_fuzz::guest::{self as memory, QUEUE_SIZE};
use walvisor_devices_fuzz::registers::{Register, mmio_offset};
use walvisor_storage::{EngineKind, Image, RawCache, RawDisk};
use walvisor_vmm::disk::DiskInUse;

/// The names of the disks.
pub const DISKS: [&str; 2] = ["ram", "raw"];
/// The size of each disk in bytes.
pub type Sizes = [u64; 2];
const SIZE: u64 = 64 << 10;

type Transport = MmioTransport<Arc<GuestMemoryMmap>>;

/// One disk and its driver. The transport and the driver use the same memory, one after the other.
struct Driver {
    transport: Arc<Mutex<Transport>>,
    guest: memory::Guest,
}

/// The guest: its two disks and their drivers.
pub struct Guest {
    drivers: Vec<Driver>,
    disks: Vec<DiskInUse>,
    /// Keeps the image file of the raw disk.
    _file: NamedTempFile,
}

impl Guest {
    /// Makes the disks. The driver of the first one is ready.
    pub fn start() -> Self {
        let file = tempfile::Builder::new()
            .tempfile_in("/dev/shm")
            .expect("a file in memory");
        file.as_file().set_len(SIZE).expect("a file in memory");
        let image = Image::open(file.path(), false).expect("an image");
        let raw = RawDisk::with_engine(image, RawCache::Writeback, EngineKind::Blocking);
        let backends: [Arc<dyn Backend>; 2] = [
            Arc::new(RamDisk::new(SIZE / 512)),
            Arc::new(raw.expect("threads")),
        ];
        let (mut drivers, mut disks) = (Vec::new(), Vec::new());
        for (name, backend) in DISKS.into_iter().zip(backends) {
            let device = memory::device_over(Arc::clone(&backend));
            let (metrics, throttle) = (device.metrics(), device.throttle());
            let guest = memory::Guest::default();
            let irq = EventFd::new(EFD_NONBLOCK).expect("a descriptor");
            let transport = MmioTransport::new(device, Arc::clone(&guest.memory), irq);
            let transport = Arc::new(Mutex::new(transport));
            disks.push(DiskInUse {
                name: name.to_owned(),
                transport: "mmio",
                backend,
                metrics,
                throttle,
                device: Arc::new(Arc::downgrade(&transport)),
            });
            drivers.push(Driver { transport, guest });
        }
        driver::start(&mut drivers[0], u64::MAX, QUEUE_SIZE);
        Self {
            drivers,
            disks,
            _file: file,
        }
    }

    /// The disks that the control socket controls.
    pub fn controlled(&self) -> Vec<DiskInUse> {
        self.disks.clone()
    }

    /// The current size of each disk in bytes.
    pub fn sizes(&self) -> Sizes {
        [0, 1].map(|disk: usize| self.disks[disk].backend.sectors() * 512)
    }

    /// Makes one request to the first disk, and does not wait for its completion.
    pub fn request(&mut self) {
        let driver = &mut self.drivers[0];
        driver.guest.offer(0, QUEUE_SIZE, 1, 5, 512);
        driver.notify(0);
    }

    /// Checks that the disks have the sizes that the answers gave, and that they still serve
    /// requests.
    pub fn finish(mut self, sizes: Sizes) {
        assert_eq!(self.sizes(), sizes, "the disks");
        for driver in &mut self.drivers {
            driver::finish(driver);
        }
    }
}

impl Bus for Driver {
    fn guest(&mut self) -> &mut memory::Guest {
        &mut self.guest
    }

    fn get(&mut self, register: Register) -> u32 {
        let mut bytes = [0; 4];
        let mut transport = self.transport.lock().expect("nobody panics");
        transport.read(mmio_offset(register), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn set(&mut self, register: Register, value: u32) {
        let mut transport = self.transport.lock().expect("nobody panics");
        transport.write(mmio_offset(register), &value.to_le_bytes());
    }

    fn notify(&mut self, queue: u16) {
        let mut transport = self.transport.lock().expect("nobody panics");
        transport.write(Transport::QUEUE_NOTIFY, &u32::from(queue).to_le_bytes());
    }
}
