//! Offsets of the transports' registers, in bytes, for a program that forwards accesses, replaces a
//! doorbell with an ioeventfd, or acts as a driver.
//!
//! ```
//! use walvisor_devices::transport::offsets::{mmio, pci};
//!
//! // The doorbell of queue 3: a register that all queues share, and an address of the queue's own.
//! let (register, value) = (mmio::QUEUE_NOTIFY, 3_u32);
//! let (bar, address) = (pci::NOTIFY_BAR, 3 * u64::from(pci::NOTIFY_OFF_MULTIPLIER));
//! assert_eq!((register, value, bar, address), (0x50, 3, 2, 12));
//! ```

/// virtio over MMIO (virtio 1.2, 4.2.2): offsets in a window of [`SIZE`](self::mmio::SIZE) bytes.
/// Each register has 32 bits.
pub mod mmio {
    /// Size of the window.
    pub const SIZE: u64 = 0x1000;

    /// MagicValue: "virt".
    pub const MAGIC_VALUE: u64 = 0x000;
    /// Version: 2.
    pub const VERSION: u64 = 0x004;
    /// DeviceID: 2, a block device.
    pub const DEVICE_ID: u64 = 0x008;
    /// VendorID.
    pub const VENDOR_ID: u64 = 0x00c;
    /// DeviceFeatures.
    pub const DEVICE_FEATURES: u64 = 0x010;
    /// DeviceFeaturesSel.
    pub const DEVICE_FEATURES_SEL: u64 = 0x014;
    /// DriverFeatures.
    pub const DRIVER_FEATURES: u64 = 0x020;
    /// DriverFeaturesSel.
    pub const DRIVER_FEATURES_SEL: u64 = 0x024;
    /// QueueSel.
    pub const QUEUE_SEL: u64 = 0x030;
    /// QueueNumMax.
    pub const QUEUE_NUM_MAX: u64 = 0x034;
    /// QueueNum.
    pub const QUEUE_NUM: u64 = 0x038;
    /// QueueReady.
    pub const QUEUE_READY: u64 = 0x044;
    /// QueueNotify. An ioeventfd for each queue may replace this register (4-byte write, data match
    /// on the queue's index).
    pub const QUEUE_NOTIFY: u64 = 0x050;
    /// InterruptStatus.
    pub const INTERRUPT_STATUS: u64 = 0x060;
    /// InterruptACK.
    pub const INTERRUPT_ACK: u64 = 0x064;
    /// Status.
    pub const STATUS: u64 = 0x070;
    /// QueueDescLow.
    pub const QUEUE_DESC_LOW: u64 = 0x080;
    /// QueueDescHigh.
    pub const QUEUE_DESC_HIGH: u64 = 0x084;
    /// QueueDriverLow.
    pub const QUEUE_DRIVER_LOW: u64 = 0x090;
    /// QueueDriverHigh.
    pub const QUEUE_DRIVER_HIGH: u64 = 0x094;
    /// QueueDeviceLow.
    pub const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    /// QueueDeviceHigh.
    pub const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    /// SHMLenLow.
    pub const SHM_LEN_LOW: u64 = 0x0b0;
    /// SHMLenHigh.
    pub const SHM_LEN_HIGH: u64 = 0x0b4;
    /// SHMBaseLow.
    pub const SHM_BASE_LOW: u64 = 0x0b8;
    /// SHMBaseHigh.
    pub const SHM_BASE_HIGH: u64 = 0x0bc;
    /// QueueReset.
    pub const QUEUE_RESET: u64 = 0x0c0;
    /// ConfigGeneration.
    pub const CONFIG_GENERATION: u64 = 0x0fc;
    /// The device's configuration space, up to the end of the window. It may be accessed in any
    /// width.
    pub const CONFIG: u64 = 0x100;
}

/// virtio over PCI: the function's BARs, and offsets in them. A driver learns the same from the
/// function's capabilities.
pub mod pci {
    /// Index of the BAR of [`COMMON`], [`ISR`] and [`DEVICE`].
    pub const CONFIG_BAR: usize = 0;
    /// Index of the BAR of the doorbells: queue `i` at `i` times [`NOTIFY_OFF_MULTIPLIER`].
    pub const NOTIFY_BAR: usize = 2;
    /// Index of the BAR of the MSI-X table, which starts at 0. The pending bits start on the page
    /// after it.
    pub const MSIX_BAR: usize = 4;

    /// The common configuration, in [`CONFIG_BAR`].
    pub const COMMON: u64 = 0x0000;
    /// The ISR status, one byte, in [`CONFIG_BAR`].
    pub const ISR: u64 = 0x1000;
    /// The device's configuration space, in [`CONFIG_BAR`].
    pub const DEVICE: u64 = 0x2000;
    /// Bytes from one queue's doorbell to the next, in [`NOTIFY_BAR`].
    pub const NOTIFY_OFF_MULTIPLIER: u32 = 4;

    /// The fields of the common configuration (virtio 1.2, 4.1.4.3): offsets from [`COMMON`].
    pub mod common {
        /// `device_feature_select`, 32 bits.
        pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
        /// `device_feature`, 32 bits.
        pub const DEVICE_FEATURE: u64 = 0x04;
        /// `driver_feature_select`, 32 bits.
        pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
        /// `driver_feature`, 32 bits.
        pub const DRIVER_FEATURE: u64 = 0x0c;
        /// `config_msix_vector`, 16 bits.
        pub const CONFIG_MSIX_VECTOR: u64 = 0x10;
        /// `num_queues`, 16 bits.
        pub const NUM_QUEUES: u64 = 0x12;
        /// `device_status`, 8 bits.
        pub const DEVICE_STATUS: u64 = 0x14;
        /// `config_generation`, 8 bits.
        pub const CONFIG_GENERATION: u64 = 0x15;
        /// `queue_select`, 16 bits.
        pub const QUEUE_SELECT: u64 = 0x16;
        /// `queue_size`, 16 bits.
        pub const QUEUE_SIZE: u64 = 0x18;
        /// `queue_msix_vector`, 16 bits.
        pub const QUEUE_MSIX_VECTOR: u64 = 0x1a;
        /// `queue_enable`, 16 bits.
        pub const QUEUE_ENABLE: u64 = 0x1c;
        /// `queue_notify_off`, 16 bits, in units of
        /// [`NOTIFY_OFF_MULTIPLIER`](super::NOTIFY_OFF_MULTIPLIER).
        pub const QUEUE_NOTIFY_OFF: u64 = 0x1e;
        /// `queue_desc`, 64 bits, or two halves.
        pub const QUEUE_DESC: u64 = 0x20;
        /// `queue_driver`, 64 bits, or two halves.
        pub const QUEUE_DRIVER: u64 = 0x28;
        /// `queue_device`, 64 bits, or two halves.
        pub const QUEUE_DEVICE: u64 = 0x30;
        /// `queue_notify_data`, 16 bits; zero, because it belongs to a feature that is not offered.
        pub const QUEUE_NOTIFY_DATA: u64 = 0x38;
        /// `queue_reset`, 16 bits.
        pub const QUEUE_RESET: u64 = 0x3a;
    }
}
