//! The image: its entry, its panic handler, and the sequence of its steps. It runs in ring 3 from
//! its first instruction on.
#![no_std]
#![no_main]

mod console;
mod interrupt;
mod intrinsics;

use core::arch::global_asm;
use core::fmt::Write;
#[cfg(not(test))]
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicU32, Ordering};

use console::Console;
use interrupt::Controller;
use walvisor_guest::block::Block;
use walvisor_guest::conformance;
use walvisor_guest::contract::{BootInfo, GuestMessage, Outcome, Task, WORDS};
use walvisor_guest::error::Error;
use walvisor_guest::job;
use walvisor_guest::load;
use walvisor_guest::memory::Arena;
use walvisor_guest::mmio::Mmio;
use walvisor_guest::pci::Pci;
use walvisor_guest::register::{Registers, write_port, write_port16};
use walvisor_guest::transport::Transport;

global_asm!(
    r#"
    .section .text.start, "ax"
    .global _start
_start:
    lea rsp, [rip + stack_top]
    call {main}
    ud2

    .section .bss.stack, "aw", @nobits
    .balign 16
    .skip 65536
    .global stack_top
stack_top:
    .text
    "#,
    main = sym main,
);

unsafe extern "C" {
    /// End of the image, from the linker script.
    static image_end: u8;
}

extern "C" fn main(boot: u64) -> ! {
    let words = core::ptr::with_exposed_provenance::<[u64; WORDS]>(boot as usize);
    // SAFETY: the VMM passes the address of its words, and memory is mapped one to one.
    let Some(info) = BootInfo::from_words(unsafe { words.read_volatile() }) else {
        writeln!(Console, "@fail guest no boot information").ok();
        reset()
    };
    RESET.store(
        u32::from(info.reset_port) << 8 | u32::from(info.reset_value),
        Ordering::Relaxed,
    );
    // SAFETY: the magic number was right, so the other words are valid; no other code sets the
    // processor up.
    let mut controller = unsafe { Controller::start(&info) };
    // Each device in turn gets an arena over the same memory: the first device was reset before the
    // second starts.
    let transports = match info.task {
        Task::Load(load) if load.pci => &["pci"][..],
        Task::Load(_) => &["mmio"],
        Task::Job | Task::Conformance => &["mmio", "pci"],
    };
    // SAFETY: the VMM's words and the BARs say where its devices are, which is outside of memory.
    let registers = |address| unsafe { Registers::new(address) };
    for &transport in transports {
        // SAFETY: no other code uses the RAM after the image, and a device that was reset no longer
        // accesses it.
        let mut arena = unsafe { free_memory(&info) };
        let outcome = match transport {
            "mmio" => Mmio::find(&info, registers, &mut controller).and_then(|mut mmio| {
                writeln!(
                    Console,
                    "mmio: block device at {:#x}, line {}",
                    mmio.address, mmio.gsi
                )
                .ok();
                drive(&info, &mut mmio, &controller, &mut arena, 1)
            }),
            _ => Pci::find(&info, registers, &mut controller).and_then(|mut pci| {
                writeln!(
                    Console,
                    "pci: block device 00:{:02x}.0, {} MSI-X vectors",
                    pci.device, pci.vectors
                )
                .ok();
                drive(&info, &mut pci, &controller, &mut arena, 2)
            }),
        };
        match outcome {
            Ok(TaskResult::Job(outcome)) => {
                writeln!(Console, "{}", GuestMessage::End(transport, outcome)).ok()
            }
            Ok(TaskResult::Load) => None,
            Ok(TaskResult::Cases(count)) => {
                writeln!(Console, "{}", GuestMessage::Checked(transport, count)).ok()
            }
            Err(error) => writeln!(Console, "@fail {transport} {error}").ok(),
        };
    }
    writeln!(Console, "{}", GuestMessage::<&str>::Off).ok();
    // SAFETY: the virtual machine ends here; no memory is used any more.
    unsafe { write_port16(info.off_port, info.off_value) };
    reset()
}

/// The result of the task on one disk.
enum TaskResult {
    Job(Outcome),
    Cases(u32),
    /// The load has already printed its result.
    Load,
}

fn drive(
    info: &BootInfo,
    transport: &mut dyn Transport,
    controller: &Controller,
    arena: &mut Arena,
    seed: u32,
) -> Result<TaskResult, Error> {
    if info.task == Task::Conformance {
        let end = info.memory_end;
        return conformance::run(transport, controller, arena, end, &mut Console)
            .map(TaskResult::Cases);
    }
    let mut block = Block::start(transport, controller, arena)?;
    let outcome = match info.task {
        Task::Load(load) => {
            // SAFETY: the instruction only reads a counter, which ring 3 may do (CR4.TSD is clear).
            let mut now = || unsafe { core::arch::x86_64::_rdtsc() };
            load::run(&mut block, &load, &mut now, &mut Console).map(|()| TaskResult::Load)
        }
        Task::Job | Task::Conformance => {
            job::run(&mut block, arena, seed, &mut Console).map(TaskResult::Job)
        }
    };
    block.stop();
    outcome
}

/// The RAM after the image.
///
/// # Safety
/// As for [`Arena::new`]: no earlier arena over this RAM is in use any more.
unsafe fn free_memory(info: &BootInfo) -> Arena {
    let start = (&raw const image_end).expose_provenance();
    let length = (info.memory_end as usize).saturating_sub(start);
    // SAFETY: the linker script puts `image_end` after everything that the image uses, RAM extends
    // to `memory_end`, and the caller guarantees the rest.
    unsafe { Arena::new(core::ptr::with_exposed_provenance_mut(start), length) }
}

/// The port and the value that reset the virtual machine, once the boot information is read.
static RESET: AtomicU32 = AtomicU32::new(0);

/// Ends the virtual machine after a failure.
fn reset() -> ! {
    let reset = RESET.load(Ordering::Relaxed);
    loop {
        // SAFETY: the virtual machine ends here; no memory is used any more. Without boot
        // information this is a write to port 0, which has no device, until the VMM's time limit is
        // over.
        unsafe { write_port((reset >> 8) as u16, reset as u8) };
    }
}

/// Reports an exception that ring 3 has caused, and ends the virtual machine.
extern "C" fn exception(vector: u64, code: u64, instruction: u64) -> ! {
    writeln!(
        Console,
        "@fail guest exception {vector}, code {code:#x}, at {instruction:#x}"
    )
    .ok();
    reset()
}

// Tools that build all targets build this file with the test harness, which has a panic handler of
// its own.
#[cfg(not(test))]
#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let line = info.location().map_or(0, |location| location.line());
    let file = info.location().map_or("", |location| location.file());
    writeln!(
        Console,
        "@fail guest panic: {} ({file}:{line})",
        info.message()
    )
    .ok();
    reset()
}
