//! Interrupts into the guest: pins of the I/O APIC, and messages (MSI-X). Each is raised through an
//! irqfd, or by an ioctl if the disk has `ioeventfd=off`.
//!
//! ```text
//!   GSI 0..23   pins, routed by KVM to the I/O APIC (and 0..15 to the PIC): serial line, virtio-mmio
//!   GSI 24..    one per MSI-X vector in use: address and data from the driver
//! ```
//!
//! KVM_SET_GSI_ROUTING replaces the whole table, so the router keeps the table, pins included.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_msi,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::interrupt::{EdgeLine, MsiMessage, MsiRouter};

use crate::arch::x86_64::layout;
use crate::disk::Notifications;

/// The GSI routing table of a VM.
pub struct GsiRouter {
    vm: Arc<VmFd>,
    table: Mutex<Table>,
}

/// The part of the routing table that changes.
struct Table {
    next_gsi: u32,
    messages: BTreeMap<u32, MsiMessage>,
}

impl GsiRouter {
    /// The table that KVM_CREATE_IRQCHIP sets up: pins only.
    pub fn new(vm: Arc<VmFd>) -> Self {
        let table = Table {
            next_gsi: layout::IO_APIC_PINS,
            messages: BTreeMap::new(),
        };
        Self {
            vm,
            table: Mutex::new(table),
        }
    }

    /// An eventfd that raises an edge on pin `gsi`.
    ///
    /// # Errors
    /// If the system refuses a descriptor or KVM the pin.
    pub fn pin(&self, gsi: u32) -> io::Result<EventFd> {
        let event = EventFd::new(EFD_NONBLOCK)?;
        self.vm.register_irqfd(&event, gsi)?;
        Ok(event)
    }

    /// Pin `gsi`, raised by KVM_IRQ_LINE.
    pub fn line(&self, gsi: u32) -> InterruptLine {
        let vm = self.vm.clone();
        InterruptLine { vm, gsi }
    }

    /// Allocates an unused GSI.
    fn new_gsi(&self) -> u32 {
        let mut table = self.table.lock().expect("a thread panicked in set_message");
        let gsi = table.next_gsi;
        table.next_gsi += 1;
        gsi
    }

    /// Routes `gsi` to `message`, and gives KVM the new table.
    fn set_message(&self, gsi: u32, message: MsiMessage) -> io::Result<()> {
        let mut table = self.table.lock().expect("a thread panicked in set_message");
        if table.messages.get(&gsi) == Some(&message) {
            return Ok(());
        }
        table.messages.insert(gsi, message);
        let mut entries = pin_routes();
        entries.extend(
            table
                .messages
                .iter()
                .map(|(gsi, message)| message_route(*gsi, *message)),
        );
        let routing = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| io::Error::other("the guest uses more MSI-X vectors than KVM routes"))?;
        self.vm.set_gsi_routing(&routing)?;
        Ok(())
    }
}

/// KVM's default routes: each pin goes to the I/O APIC, and the first 16 to the two PICs as well.
fn pin_routes() -> Vec<kvm_irq_routing_entry> {
    let route = |gsi, irqchip, pin| kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            irqchip: kvm_irq_routing_irqchip { irqchip, pin },
        },
        ..Default::default()
    };
    let mut routes = Vec::new();
    for gsi in 0..layout::IO_APIC_PINS {
        match gsi {
            0..8 => routes.push(route(gsi, KVM_IRQCHIP_PIC_MASTER, gsi)),
            8..16 => routes.push(route(gsi, KVM_IRQCHIP_PIC_SLAVE, gsi - 8)),
            _ => {}
        }
        routes.push(route(gsi, KVM_IRQCHIP_IOAPIC, gsi));
    }
    routes
}

/// The route of a GSI to a message.
fn message_route(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            msi: kvm_irq_routing_msi {
                address_lo: message.address as u32,
                address_hi: (message.address >> 32) as u32,
                data: message.data,
                ..Default::default()
            },
        },
        ..Default::default()
    }
}

/// A pin without an irqfd.
pub struct InterruptLine {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl EdgeLine for InterruptLine {
    /// Raises an edge, with two calls: KVM takes levels, and the I/O APIC detects edges (82093AA,
    /// 3.2.4).
    fn pulse(&self) -> io::Result<()> {
        self.vm.set_irq_line(self.gsi, true)?;
        Ok(self.vm.set_irq_line(self.gsi, false)?)
    }
}

/// How a vector is raised.
enum Vector {
    /// By this eventfd, which KVM turns into the message that this GSI is routed to.
    Irqfd(u32, EventFd),
    /// By KVM_SIGNAL_MSI.
    Message(MsiMessage),
}

/// The MSI-X vectors of one PCI function. With irqfds a vector gets its GSI and its irqfd when it
/// is first routed.
pub struct FunctionVectors {
    router: Arc<GsiRouter>,
    notifications: Notifications,
    vectors: Mutex<BTreeMap<u16, Vector>>,
}

impl FunctionVectors {
    /// No vectors yet.
    pub fn new(router: Arc<GsiRouter>, notifications: Notifications) -> Self {
        Self {
            router,
            notifications,
            vectors: Mutex::new(BTreeMap::new()),
        }
    }
}

impl MsiRouter for FunctionVectors {
    fn set_route(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        let mut vectors = self.vectors.lock().expect("a thread panicked in set_route");
        if self.notifications == Notifications::Exits {
            vectors.insert(vector, Vector::Message(message));
            return Ok(());
        }
        if let Some(Vector::Irqfd(gsi, _)) = vectors.get(&vector) {
            return self.router.set_message(*gsi, message);
        }
        let gsi = self.router.new_gsi();
        self.router.set_message(gsi, message)?;
        let event = EventFd::new(EFD_NONBLOCK)?;
        self.router.vm.register_irqfd(&event, gsi)?;
        vectors.insert(vector, Vector::Irqfd(gsi, event));
        Ok(())
    }

    fn trigger(&self, vector: u16) -> io::Result<()> {
        let vectors = self.vectors.lock().expect("a thread panicked in set_route");
        match vectors.get(&vector) {
            Some(Vector::Irqfd(_, event)) => event.write(1),
            Some(Vector::Message(message)) => {
                let sent = self.router.vm.signal_msi(kvm_msi {
                    address_lo: message.address as u32,
                    address_hi: (message.address >> 32) as u32,
                    data: message.data,
                    ..Default::default()
                });
                match sent {
                    // A message to a processor that does not exist (KVM returns EPERM) is lost, as
                    // on hardware.
                    Err(error) if error.errno() != libc::EPERM => Err(error.into()),
                    _ => Ok(()),
                }
            }
            None => Err(io::Error::from(io::ErrorKind::NotFound)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_takes_the_table_and_a_vector_keeps_its_gsi() {
        let vm = match crate::probe::open().map(|kvm| kvm.create_vm()) {
            Ok(Ok(vm)) => Arc::new(vm),
            Ok(Err(error)) => panic!("cannot create a VM: {error}"),
            Err(error) => return println!("skipped: {error}"),
        };
        vm.create_irq_chip().unwrap();
        let router = Arc::new(GsiRouter::new(vm));
        router.pin(layout::COM1_GSI).unwrap();
        let vectors = FunctionVectors::new(router.clone(), Notifications::Eventfds);
        assert!(vectors.trigger(0).is_err(), "not routed yet");
        for data in [0x41, 0x42] {
            vectors
                .set_route(
                    0,
                    MsiMessage {
                        address: 0xfee0_0000,
                        data,
                    },
                )
                .unwrap();
            vectors.trigger(0).unwrap();
        }
        vectors
            .set_route(
                7,
                MsiMessage {
                    address: 0xfee0_1000,
                    data: 0x43,
                },
            )
            .unwrap();
        vectors.trigger(7).unwrap();
        assert_eq!(router.table.lock().unwrap().messages.len(), 2);

        let message = MsiMessage {
            address: 0xfee0_0000,
            data: 0x44,
        };
        let called = FunctionVectors::new(router.clone(), Notifications::Exits);
        assert!(called.trigger(0).is_err(), "not routed yet");
        called.set_route(0, message).unwrap();
        called.trigger(0).unwrap();
        router.line(layout::MMIO_GSIS[0]).pulse().unwrap();
        let routed = router.table.lock().unwrap().messages.len();
        assert_eq!(routed, 2, "a vector raised by an ioctl needs no route");
    }
}
