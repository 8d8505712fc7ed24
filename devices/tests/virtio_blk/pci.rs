//! Properties of virtio-pci alone: configuration space, BARs, capabilities (virtio 1.2, 4.1).

use std::sync::Arc;

use virtio_bindings::virtio_blk::*;
use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::VirtioBlock;

use crate::driver::*;
use crate::gate::Gate;

fn device(queues: u16) -> PciDriver {
    let disk = Arc::new(RamDisk::new(64));
    PciDriver::discover(
        VirtioBlock::new(disk, config(queues)).expect("a device"),
        guest_memory(),
    )
}

/// A driver whose PCI side tests can access: a live device with one queue.
pub struct LiveDevice {
    pub pci: PciDriver,
    pub ring: Ring,
}

impl LiveDevice {
    pub fn start(mut pci: PciDriver, memory: Memory) -> Self {
        let mut ring = Ring::new(Arc::clone(&memory), 64, GuestAddress(0x1000), false);
        for status in [0, 1, 3] {
            pci.set_status(status);
        }
        pci.set_driver_features(VERSION_1);
        pci.set_status(11);
        pci.set_queue(0, 64, ring.addresses());
        pci.set_status(15);
        assert_eq!(pci.status(), 15);
        // A FLUSH request at 0x8000, its status byte at 0x9000.
        memory
            .write_obj(VIRTIO_BLK_T_FLUSH, GuestAddress(0x8000))
            .expect("header");
        let head = ring.add(&[
            Piece::readable(GuestAddress(0x8000), 16),
            Piece::writable(GuestAddress(0x9000), 1),
        ]);
        assert_eq!(head, 0);
        Self { pci, ring }
    }

    /// Makes one request and waits until the device has used it.
    pub fn flush(&mut self) {
        let before = self.ring.used_index();
        self.ring.publish();
        self.pci.notify(0);
        wait_until("the answer", || self.ring.used_index() != before);
        self.ring.take_used_keep_chain().expect("a used chain");
        self.ring.offer(0);
    }
}

pub fn live(queues: u16) -> LiveDevice {
    let memory = guest_memory();
    let disk = Arc::new(RamDisk::new(64));
    let device = VirtioBlock::new(disk, config(queues)).expect("a device");
    LiveDevice::start(PciDriver::new(device, Arc::clone(&memory)), memory)
}

#[test]
fn the_function_is_a_modern_block_device() {
    let mut pci = device(2);
    assert_eq!(
        pci.config::<4>(0x08),
        [1, 0x00, 0x80, 0x01],
        "revision 1, mass storage, other"
    );
    assert_eq!(
        pci.config::<1>(0x0e),
        [0],
        "a single-function type 0 header"
    );
    assert_eq!(pci.config::<2>(0x2c), [0xf4, 0x1a]);
    assert!(u16::from_le_bytes(pci.config(0x2e)) >= 0x40, "4.1.2.1");
    assert_eq!(pci.config::<1>(0x3d), [0], "no INTx");
    for offset in (0x100..0x1000).step_by(4) {
        assert_eq!(pci.config::<4>(offset), [0; 4], "no extended capability");
    }
    assert!(pci.common.len >= 0x38 && pci.isr.len >= 1 && pci.device.len >= 60);
    assert!(pci.notify.len >= 8, "two queues");
    assert_ne!(pci.notify.bar, pci.common.bar);
    let (msix_bar, _) = pci.msix_table();
    assert_ne!(pci.notify.bar, msix_bar);
    assert_ne!(pci.pci_cfg, 0);
    let control = u16::from_le_bytes(pci.config(pci.msix + 2));
    assert_eq!(control, 2, "three vectors, disabled, not masked");
}

#[test]
fn every_capability_is_as_it_must_be() {
    for queues in [1, 4, 64, 256] {
        let mut pci = device(queues);
        let mut kinds = Vec::new();
        let mut at = u16::from(pci.config::<1>(0x34)[0]);
        while at != 0 {
            let [id, next, len, kind] = pci.config(at);
            if id == 0x09 {
                // 4.1.4.2: 16 bytes and the type's extra field: a multiplier, or the window's data.
                let extra = if matches!(kind, 2 | 5) { 4 } else { 0 };
                assert_eq!(len, 16 + extra, "cfg_type {kind}");
                assert!(next == 0 || u16::from(next) >= at + u16::from(len));
                kinds.push(kind);
            }
            at = next.into();
        }
        kinds.sort_unstable();
        assert_eq!(kinds, [1, 2, 3, 4, 5], "each structure, once");
        assert!(pci.common.offset.is_multiple_of(4), "4.1.4.3.1");
        assert!(pci.device.offset.is_multiple_of(4), "4.1.4.6.1");
        assert!(pci.isr.len >= 1, "4.1.4.5.1");
        // 4.1.4.4.1.
        let multiplier = pci.multiplier;
        assert!(pci.notify.offset.is_multiple_of(2));
        assert!(multiplier.is_power_of_two() && multiplier.ilog2().is_multiple_of(2));
        assert!(pci.notify.len >= 2);
        for queue in 0..queues {
            pci.set(0x16, queue.to_le_bytes());
            let off = u64::from(u16::from_le_bytes(pci.get(0x1e)));
            assert!(pci.notify.len >= off * multiplier + 2, "queue {queue}");
        }
        for bar in pci.transport.bars() {
            for place in [pci.common, pci.notify, pci.isr, pci.device] {
                let inside = place.bar != bar.index || place.offset + place.len <= bar.size;
                assert!(inside, "{place:?}");
            }
        }
    }
}

#[test]
fn a_reset_returns_at_once_and_ends_with_the_requests_in_flight() {
    let gate = Gate::new(RamDisk::new(64));
    let (memory, block) = (
        guest_memory(),
        VirtioBlock::new(Arc::new(gate.clone()), config(1)).expect("a device"),
    );
    let pci = PciDriver::discover(block, memory.clone());
    let mut live = LiveDevice::start(pci, memory);
    live.ring.publish();
    live.pci.notify(0);
    wait_until("a request in flight", || gate.submitted() == 1);
    // The disk answers only when the gate opens: a write that waited for it would never return.
    live.pci.set(0x14, [0]);
    assert_eq!(live.pci.status(), 15, "the reset goes on");
    // Until it has ended, no queue starts again.
    live.pci.enable_queue(0);
    assert_eq!((gate.opened(), gate.queues()), (1, 1));
    gate.open();
    wait_until("the end of the reset", || live.pci.status() == 0);
    assert_eq!((gate.queues(), gate.leaked()), (0, 0));
    assert!(!live.pci.queue_enabled(0));
}
