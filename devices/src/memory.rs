//! Guest memory.

use vm_memory::GuestAddressSpace;

/// Guest memory as transports use it, for instance an `Arc<GuestMemoryMmap>`.
pub trait DeviceMemory: GuestAddressSpace + Send + Sync + 'static {}

impl<M: GuestAddressSpace + Send + Sync + 'static> DeviceMemory for M {}
