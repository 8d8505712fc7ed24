//! Interrupts over PCI: MSI-X, its masks and pending bits, the ISR status (virtio 1.2, 4.1.4.5 and
//! 4.1.5; PCI 3.0, 6.8.2).

use std::sync::Arc;

use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::pci::{LiveDevice, block, live};

#[test]
fn every_queue_has_a_vector_of_its_own() {
    let mut driver = Driver::start(Kind::Pci, RamDisk::new(64), config(3), EVERYTHING);
    for queue in [2, 0, 1] {
        let before = driver.counts().interrupts;
        driver.flush(queue);
        wait_until("an interrupt", || driver.counts().interrupts == before + 1);
        for other in 0..3 {
            let expected = u64::from(other == queue as u16);
            assert_eq!(driver.registers.take_queue_interrupts(other), expected);
        }
    }
}

#[test]
fn a_vector_rewritten_while_masked_is_routed_anew_before_it_is_sent() {
    let mut live = live(1);
    live.flush();
    wait_until("an interrupt", || live.pci.router.take(1) == 1);
    assert_eq!(live.pci.router.route(1), Some((<PciDriver>::message(1), 1)));
    // Masking and unmasking alone do not change the route.
    live.pci.mask_vector(1, true);
    live.pci.mask_vector(1, false);
    assert_eq!(live.pci.router.route(1), Some((<PciDriver>::message(1), 1)));
    let message = walvisor_devices::interrupt::MsiMessage {
        address: 0xfee0_1000,
        data: 0x99,
    };
    live.pci.mask_vector(1, true);
    live.flush();
    wait_until("the pending bit", || live.pci.pending(1));
    live.pci.set_vector(1, message, false);
    assert_eq!(live.pci.router.route(1), Some((message, 2)));
    assert_eq!(live.pci.router.take(1), 1);
}

#[test]
fn without_msix_the_isr_tells() {
    let memory = guest_memory();
    let pci = PciDriver::discover(block(1), Arc::clone(&memory));
    let mut live = LiveDevice::start(pci, memory);
    assert_eq!((status_interrupt(&mut live), isr(&mut live)), (0, 0));
    live.flush();
    wait_until("the bit", || status_interrupt(&mut live) != 0);
    // The bit is read-only, and reading the Status register does not clear it.
    live.pci.transport.config_write(0x06, &[0, 0]);
    assert_ne!(status_interrupt(&mut live), 0);
    assert_eq!((isr(&mut live), status_interrupt(&mut live)), (1, 0));
    assert_eq!(isr(&mut live), 0, "cleared by the read");
    assert_eq!(live.pci.router.route(1), None);
    // MSI-X, enabled later, does not send earlier interrupts.
    live.pci.enable_msix();
    assert!(!live.pci.pending(1));
    live.flush();
    wait_until("an interrupt", || live.pci.router.take(1) == 1);
    assert_eq!(isr(&mut live), 0, "with MSI-X the vector tells");
}

#[test]
fn the_isr_names_configuration_changes_even_under_msix() {
    let mut live = live(1);
    // A queue breaks, and the device announces DEVICE_NEEDS_RESET.
    live.ring.offer(u16::MAX);
    live.ring.publish();
    live.pci.notify(0);
    wait_until("an interrupt", || live.pci.router.take(0) == 1);
    assert_eq!(status_interrupt(&mut live), 0, "messages need no pin");
    assert_eq!((isr(&mut live), isr(&mut live)), (2, 0), "4.1.4.5.1");
}

/// The ISR status, which a read clears.
fn isr(live: &mut LiveDevice) -> u8 {
    let (place, mut byte) = (live.pci.isr, [0]);
    live.pci
        .transport
        .bar_read(place.bar, place.offset, &mut byte);
    byte[0]
}

/// Interrupt Status of the PCI Status register.
fn status_interrupt(live: &mut LiveDevice) -> u8 {
    live.pci.config::<1>(0x06)[0] & 1 << 3
}

#[test]
fn every_event_can_have_every_vector_and_none() {
    let mut live = live(3);
    for vector in 0..4u16 {
        live.pci.set(0x16, 0u16.to_le_bytes());
        live.pci.set(0x1a, vector.to_le_bytes());
        assert_eq!(live.pci.get(0x1a), vector.to_le_bytes());
        live.flush();
        wait_until("an interrupt", || live.pci.router.take(vector) == 1);
        live.pci.set(0x10, vector.to_le_bytes());
        assert_eq!(live.pci.get(0x10), vector.to_le_bytes());
    }
    // 4.1.5.3.1, 4.1.5.4.1: without a vector, no interrupt is sent.
    for field in [0x1a, 0x10] {
        live.pci.set(field, 0xffffu16.to_le_bytes());
    }
    live.flush();
    live.ring.offer(u16::MAX);
    live.ring.publish();
    live.pci.notify(0);
    wait_until("DEVICE_NEEDS_RESET", || {
        live.pci.status() & NEEDS_RESET != 0
    });
    std::thread::sleep(A_WHILE);
    for vector in 0..4 {
        assert_eq!(live.pci.router.take(vector), 0);
        assert!(!live.pci.pending(vector));
    }
}

#[test]
fn pending_bits_are_read_only_and_end_with_a_reset() {
    let mut live = live(1);
    live.pci.mask_vector(1, true);
    live.flush();
    wait_until("the pending bit", || live.pci.pending(1));
    let pba = u32::from_le_bytes(live.pci.config(live.pci.msix + 8));
    let (bar, at) = ((pba & 7) as usize, u64::from(pba & !7));
    live.pci.transport.bar_write(bar, at, &[0; 8]);
    live.pci.transport.bar_write(bar, at, &[0xff; 8]);
    assert!(live.pci.pending(1) && !live.pci.pending(0));
    // MSI-X is switched off and on again, or masked as a whole: pending vectors stay pending, and
    // are sent once unmasked and enabled.
    for off in [0, 0xc0] {
        let control = live.pci.msix + 3;
        live.pci.transport.config_write(control, &[off]);
        live.pci.mask_vector(1, false);
        assert_eq!(live.pci.router.take(1), 0);
        live.pci.transport.config_write(control, &[0x80]);
        assert_eq!(live.pci.router.take(1), 1);
        assert!(!live.pci.pending(1));
        live.pci.mask_vector(1, true);
        live.flush();
        wait_until("the pending bit", || live.pci.pending(1));
    }
    // A reset of the device clears interrupts that are still pending.
    live.pci.set_status(0);
    live.pci.mask_vector(1, false);
    assert_eq!((live.pci.router.take(1), live.pci.pending(1)), (0, false));
}
