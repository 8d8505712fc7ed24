//! Properties of virtio-pci alone: configuration space, BARs, capabilities (virtio 1.2, 4.1).

use std::sync::Arc;

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::VirtioBlock;

use crate::driver::*;
use crate::gate::Gate;

pub fn block(queues: u16) -> VirtioBlock {
    VirtioBlock::new(Arc::new(RamDisk::new(64)), config(queues)).expect("a device")
}

fn device(queues: u16) -> PciDriver {
    PciDriver::discover(block(queues), guest_memory())
}

/// A driver whose PCI side tests can access: a live device with one queue.
pub struct LiveDevice {
    pub pci: PciDriver,
    pub ring: Ring,
    memory: Memory,
}

impl LiveDevice {
    pub fn start(mut pci: PciDriver, memory: Memory) -> Self {
        let mut ring = Ring::new(
            Arc::clone(&memory),
            64,
            vm_memory::GuestAddress(0x1000),
            false,
        );
        for status in [0, 1, 3] {
            pci.set_status(status);
        }
        pci.set_driver_features(VERSION_1);
        pci.set_status(11);
        pci.set_queue(0, 64, ring.addresses());
        pci.set_status(15);
        assert_eq!(pci.status(), 15);
        // A FLUSH request at 0x8000, its status byte at 0x9000.
        use vm_memory::{Bytes, GuestAddress};
        memory
            .write_obj(VIRTIO_BLK_T_FLUSH, GuestAddress(0x8000))
            .expect("header");
        let head = ring.add(&[
            Piece::readable(GuestAddress(0x8000), 16),
            Piece::writable(GuestAddress(0x9000), 1),
        ]);
        assert_eq!(head, 0);
        Self { pci, ring, memory }
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
    let pci = PciDriver::new(block(queues), Arc::clone(&memory));
    LiveDevice::start(pci, memory)
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
fn bars_are_sized_and_moved() {
    let mut pci = device(1);
    for bar in pci.transport.bars() {
        let register = 0x10 + 4 * bar.index as u16;
        pci.transport.config_write(0x04, &[0, 0]);
        pci.transport.config_write(register, &[0xff; 4]);
        let mask = u32::from_le_bytes(pci.config(register));
        assert_eq!(mask & 0xf, 0, "32-bit memory, not prefetchable");
        assert_eq!(u64::from(!mask) + 1, bar.size);
        assert!(bar.size.is_power_of_two() && bar.size >= 0x1000);
        let address = 0xd000_0000u32 + bar.index as u32 * 0x10_0000;
        pci.transport.config_write(register, &address.to_le_bytes());
        pci.transport.config_write(0x04, &[2, 0]);
        let moved = pci
            .transport
            .bars()
            .into_iter()
            .find(|moved| moved.index == bar.index);
        let moved = moved.expect("the BAR is still there");
        assert_eq!(
            (moved.address, moved.size, moved.enabled),
            (address.into(), bar.size, true)
        );
    }
    // Byte writes work too, and registers without a BAR stay zero.
    pci.transport.config_write(0x13, &[0xe1]);
    assert_eq!(pci.config::<4>(0x10)[3], 0xe1);
    for register in [0x14, 0x1c, 0x24, 0x30] {
        pci.transport.config_write(register, &[0xff; 4]);
        assert_eq!(pci.config::<4>(register), [0; 4]);
    }
}

#[test]
fn a_reset_unmaps_the_vectors() {
    let mut live = live(1);
    live.pci.set_status(0);
    live.pci.set(0x16, 0u16.to_le_bytes());
    assert_eq!(
        (live.pci.get(0x10), live.pci.get(0x1a)),
        ([0xff; 2], [0xff; 2])
    );
    assert_eq!(live.pci.get(0x1c), [0, 0], "and disables the queues");
    // A device reset leaves the PCI configuration unchanged.
    assert_eq!(live.pci.config::<1>(live.pci.msix + 3), [0x80]);
    assert!(live.pci.transport.bars().iter().all(|bar| bar.enabled));
    let memory = Arc::clone(&live.memory);
    let mut live = LiveDevice::start(live.pci, memory);
    live.flush();
    wait_until("an interrupt", || live.pci.router.take(1) == 1);
}

#[test]
fn bars_are_reached_through_configuration_space() {
    let mut live = live(1);
    let (at, common) = (live.pci.pci_cfg, live.pci.common);
    let window = |live: &mut LiveDevice, bar: u8, offset: u32, len: u32| {
        live.pci.transport.config_write(at + 4, &[bar]);
        live.pci
            .transport
            .config_write(at + 8, &offset.to_le_bytes());
        live.pci.transport.config_write(at + 12, &len.to_le_bytes());
    };
    let bar = common.bar as u8;
    window(&mut live, bar, 0x14, 1);
    assert_eq!(live.pci.config::<4>(at + 16)[0], 15, "device_status");
    window(&mut live, bar, 0x12, 2);
    assert_eq!(live.pci.config::<2>(at + 16), [1, 0], "num_queues");
    window(&mut live, bar, 0x00, 4);
    live.pci
        .transport
        .config_write(at + 16, &1u32.to_le_bytes());
    assert_eq!(
        live.pci.get(0x00),
        1u32.to_le_bytes(),
        "device_feature_select"
    );
    // The window writes a doorbell.
    let notify = live.pci.notify;
    window(&mut live, notify.bar as u8, notify.offset as u32, 2);
    live.ring.publish();
    live.pci.transport.config_write(at + 16, &[0, 0]);
    wait_until("the answer", || live.ring.used_index() == 1);
    // Values that are not allowed have no effect.
    for (bar, offset, len) in [
        (bar, 0x14, 3),
        (bar, 0x14, 0),
        (bar, 0x13, 2),
        (bar, 0x14, 8),
        (7, 0, 4),
        (1, 0, 4),
    ]
    .into_iter()
    .chain([
        (bar, 0xffff_fffc, 4),
        (bar, 0x4000, 4),
        (255, 0, 1),
        (bar, u32::MAX, u32::MAX),
    ]) {
        window(&mut live, bar, offset, len);
        live.pci.transport.config_write(at + 16, &[0; 4]);
        live.pci.config::<4>(at + 16);
        assert_eq!(live.pci.status(), 15, "BAR {bar}, {offset:#x}, {len} bytes");
    }
}

#[test]
fn zero_does_not_disable_a_queue() {
    let mut live = live(1);
    live.pci.set(0x16, 0u16.to_le_bytes());
    live.pci.set(0x1c, 0u16.to_le_bytes());
    assert_eq!(live.pci.get(0x1c), 1u16.to_le_bytes(), "4.1.4.3.2");
    live.flush();
}

#[test]
fn halves_of_a_64_bit_field_are_written_on_their_own() {
    let mut pci = device(2);
    for status in [1, 3] {
        pci.set_status(status);
    }
    pci.set(0x16, 1u16.to_le_bytes());
    pci.set(0x20, 0x99aa_bbccu32.to_le_bytes());
    pci.set(0x24, 0xddee_ff00u32.to_le_bytes());
    let whole = 0xddee_ff00_99aa_bbccu64.to_le_bytes();
    assert_eq!(pci.get(0x20), whole, "4.1.3.2");
}

#[test]
fn a_queue_reset_unmaps_its_vector() {
    let memory = guest_memory();
    let mut pci = PciDriver::new(block(1), Arc::clone(&memory));
    for status in [1, 3] {
        pci.set_status(status);
    }
    pci.set_driver_features(VERSION_1 | RING_RESET);
    pci.set_status(11);
    let at = vm_memory::GuestAddress(0x1000);
    let ring = Ring::new(memory, 64, at, false);
    pci.set_queue(0, 64, ring.addresses());
    pci.set_status(15);
    assert_eq!(pci.get(0x1a), [1, 0]);
    pci.reset_queue(0);
    wait_until("the end of the reset", || !pci.queue_resetting(0));
    assert_eq!(pci.get(0x1a), [0xff; 2], "2.6.1.1: the default state");
    assert_eq!(pci.get(0x20), [0; 24], "no addresses");
    assert_eq!(pci.get(0x18), 64u16.to_le_bytes());
    assert_eq!(
        pci.get(0x10),
        [0, 0],
        "the configuration's is not the queue's"
    );
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
fn feature_bits_are_shown_by_their_selector() {
    let mut pci = device(2);
    let offered = pci.device_features();
    for status in [1, 3] {
        pci.set_status(status);
    }
    pci.set_driver_features(offered & !EVENT_IDX);
    for select in [0u32, 1, 2, 3, 31, u32::MAX] {
        pci.set(0x00, select.to_le_bytes());
        pci.set(0x08, select.to_le_bytes());
        let word = |features: u64| match select {
            0 | 1 => (features >> (32 * select)) as u32,
            _ => 0,
        };
        assert_eq!(pci.get(0x04), word(offered).to_le_bytes(), "{select}");
        let driver = offered & !EVENT_IDX;
        assert_eq!(pci.get(0x0c), word(driver).to_le_bytes(), "{select}");
        // There are no feature bits above 63, so a choice of them has no effect.
        if select > 1 {
            pci.set(0x0c, [0xff; 4]);
            assert_eq!(pci.get(0x0c), [0; 4]);
        }
    }
    pci.set_status(11);
    assert_eq!(pci.status(), 11);
}

#[test]
fn a_queue_size_that_is_no_power_of_two_reads_as_none() {
    let mut pci = device(1);
    pci.set(0x16, 0u16.to_le_bytes());
    for size in [3u16, 5, 100, 0x5670, u16::MAX, 0] {
        pci.set(0x18, size.to_le_bytes());
        assert_eq!(pci.get(0x18), [0, 0], "{size}");
    }
    for size in [16u16, 64] {
        pci.set(0x18, size.to_le_bytes());
        assert_eq!(pci.get(0x18), size.to_le_bytes());
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
