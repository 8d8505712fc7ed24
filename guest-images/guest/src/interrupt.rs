//! Interrupts for a program in ring 3: descriptor table, local APIC, I/O APIC, and the stubs of
//! ring 0.
//!
//! ```text
//!   ring 3   ......┐                  ┌....... int3 ─┐                           ┌.......
//!   ring 0         └ count, EOI, iret ┘              └ sti; hlt ─ count, EOI, .. ┘
//! ```
//!
//! Only the stubs run in ring 0. A KVM that interprets ring 0 must know their instructions, so the
//! stubs use plain moves, and INT3 is the way in (such a KVM delivers exceptions of ring 3, but not
//! INT n).

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use walvisor_guest::contract::BootInfo;
use walvisor_guest::error::Error;
use walvisor_guest::register::{Registers, write_port};
use walvisor_guest::transport::Interrupts;

use crate::exception;

/// Interrupts received so far.
static COUNT: AtomicU64 = AtomicU64::new(0);

global_asm!(
    r#"
    .text
    # A device's interrupt: count it, and tell the local APIC that it is done.
    .balign 16
interrupt_stub:
    push rax
    inc qword ptr [rip + {count}]
    mov eax, {eoi}
    mov dword ptr [rax], 0
    pop rax
    iretq

    # INT3 in ring 3: sleep unless the count differs from RSI. Interrupts are off until STI, which lets none in
    # before HLT, so none is missed in between. Ring 3 goes on with interrupts on.
    .balign 16
wait_stub:
    or qword ptr [rsp + 16], 0x200
    cmp qword ptr [rip + {count}], rsi
    jne 1f
    sti
    hlt
1:  iretq

    .balign 16
spurious_stub:
    iretq

    # Exceptions: back to ring 3, at `exception` on a fresh stack, with vector, error code and place.
    .macro exception_stub vector
    .balign 16
    .if (\vector == 8) || (\vector >= 10 && \vector <= 14) || (\vector == 17) || (\vector == 21)
    .else
    push 0
    .endif
    push \vector
    jmp exception_common
    .endm
    .balign 16
exception_stubs:
    .altmacro
    .set vector, 0
    .rept 32
    exception_stub %vector
    .set vector, vector + 1
    .endr
    .noaltmacro
    .balign 16
exception_common:
    pop rdi
    pop rsi
    mov rdx, qword ptr [rsp]
    lea rax, [rip + {exception}]
    mov qword ptr [rsp], rax
    lea rax, [rip + stack_top - 8]
    mov qword ptr [rsp + 24], rax
    iretq
    "#,
    count = sym COUNT,
    eoi = const LOCAL_APIC + EOI,
    exception = sym exception,
);

unsafe extern "C" {
    fn interrupt_stub();
    fn wait_stub();
    fn spurious_stub();
    fn exception_stubs();
}

const EXCEPTIONS: u8 = 32;
const EXCEPTION_STRIDE: u64 = 16;
const BREAKPOINT: u8 = 3;
/// The vector of source 0. The line of the I/O APIC and each MSI-X message have a vector of their
/// own, so that two interrupts at the same time are counted as two.
const FIRST_VECTOR: u8 = 0x30;
const SOURCES: u8 = 32;
const SPURIOUS: u8 = 0xff;

/// An interrupt gate to 64-bit code of ring 0 (Intel SDM volume 3, 6.14.1). The gate clears the
/// interrupt flag.
const GATE: u64 = 0x8e00;
const GATE_FROM_RING_3: u64 = 0xee00;
const CODE: u64 = 0x08;

// Local APIC, Intel SDM volume 3, 11.4.
const LOCAL_APIC: u64 = 0xfee0_0000;
const ID: u64 = 0x20;
const EOI: u64 = 0xb0;
const SPURIOUS_VECTOR: u64 = 0xf0;
const ENABLE: u32 = 1 << 8;
const LINT0: u64 = 0x350;
const MASKED: u32 = 1 << 16;

// I/O APIC, 82093AA data sheet, 3.0.
const IO_APIC: u64 = 0xfec0_0000;
const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;
const REDIRECTION: u32 = 0x10;

/// The data ports of the two 8259 interrupt controllers, which hold their masks.
const PIC_MASKS: [u16; 2] = [0x21, 0xa1];

/// The processor's interrupt controllers.
#[derive(Debug)]
pub struct Controller {
    local_apic: Registers,
    io_apic: Registers,
    /// One more than the source of the next line.
    next_line: u8,
}

impl Controller {
    /// Fills in the descriptor table, masks the 8259s, switches the local APIC on and then enables
    /// interrupts.
    ///
    /// # Safety
    /// `info` names the descriptor table in use, and no other code sets interrupts up.
    pub unsafe fn start(info: &BootInfo) -> Self {
        let gate = |vector: u8, stub: u64, kind: u64| {
            let at = info.idt as usize + usize::from(vector) * 16;
            let entry = core::ptr::with_exposed_provenance_mut::<[u64; 2]>(at);
            let low = stub & 0xffff | CODE << 16 | kind << 32 | (stub >> 16 & 0xffff) << 48;
            // SAFETY: the table has 256 entries of 16 bytes, and no interrupt of this vector is
            // enabled yet.
            unsafe { entry.write_volatile([low, stub >> 32]) };
        };
        for vector in 0..EXCEPTIONS {
            let stub = exception_stubs as *const () as u64 + u64::from(vector) * EXCEPTION_STRIDE;
            gate(vector, stub, GATE);
        }
        gate(BREAKPOINT, wait_stub as *const () as u64, GATE_FROM_RING_3);
        for source in 0..SOURCES {
            gate(
                FIRST_VECTOR + source,
                interrupt_stub as *const () as u64,
                GATE,
            );
        }
        gate(SPURIOUS, spurious_stub as *const () as u64, GATE);

        for port in PIC_MASKS {
            // SAFETY: with every line masked, the 8259s do not interrupt this program.
            unsafe { write_port(port, 0xff) };
        }
        // SAFETY: these are the architectural addresses of the local APIC and the first I/O APIC,
        // which are not memory.
        let (local_apic, io_apic) =
            unsafe { (Registers::new(LOCAL_APIC), Registers::new(IO_APIC)) };
        local_apic.write32(LINT0, MASKED);
        local_apic.write32(SPURIOUS_VECTOR, ENABLE | u32::from(SPURIOUS));
        let controller = Self {
            local_apic,
            io_apic,
            next_line: SOURCES,
        };
        // The count never reaches this value, so this call does not wait: it only enables
        // interrupts.
        controller.wait(u64::MAX);
        controller
    }

    fn id(&self) -> u32 {
        self.local_apic.read32(ID) >> 24
    }
}

impl Interrupts for Controller {
    fn count(&self) -> u64 {
        COUNT.load(Ordering::Acquire)
    }

    fn wait(&self, seen: u64) {
        // SAFETY: the stub changes no register and no memory; the handlers that run meanwhile
        // change COUNT. It runs on a stack of its own.
        unsafe { asm!("int3", in("rsi") seen) };
    }

    fn connect_line(&mut self, gsi: u32) {
        // Lines take their vectors from the end of the range, messages from its start.
        self.next_line = self.next_line.saturating_sub(1);
        let vector = FIRST_VECTOR + self.next_line;
        let redirect = |half: u32, value: u32| {
            self.io_apic.write32(SELECT, REDIRECTION + gsi * 2 + half);
            self.io_apic.write32(WINDOW, value);
        };
        redirect(1, self.id() << 24);
        // Fixed delivery, physical destination, active high, edge, not masked.
        redirect(0, u32::from(vector));
    }

    fn message(&mut self, number: u16) -> Result<(u64, u32), Error> {
        match u8::try_from(number) {
            Ok(number) if number < self.next_line => {
                let address = LOCAL_APIC | u64::from(self.id()) << 12;
                Ok((address, u32::from(FIRST_VECTOR + number)))
            }
            _ => Err(Error::Pci("more interrupt vectors than expected")),
        }
    }
}
