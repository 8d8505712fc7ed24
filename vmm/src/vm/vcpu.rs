//! One thread per vCPU: runs the guest, and carries out its register accesses.
//!
//! ```text
//!   KVM_RUN ──▶ exit ──▶ port ──▶ port bus
//!      ▲                 MMIO ──▶ MMIO bus, else the PCI BARs
//!      └─────────────────  └─ no device: reads give all ones, writes vanish
//! ```

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kvm_bindings::kvm_run;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::signal::register_signal_handler;

use super::exits::{ExitCounters, ExitReason};
use crate::arch::x86_64::crash::{self, Crash, CrashReason};
use crate::bus::Bus;
use crate::control::{RunControl, RunEnd, kick_signal};
use crate::pci::PciBus;
use crate::seccomp::{Seccomp, ThreadKind, restrict_thread};

thread_local! {
    /// The `kvm_run` page of the vCPU that this thread runs, null if none.
    static RUNNING: Cell<*mut kvm_run> = const { Cell::new(ptr::null_mut()) };
}

/// The state that the vCPU threads share.
pub struct SharedMachine {
    /// Guest memory.
    pub memory: Arc<GuestMemoryMmap>,
    /// Port accesses.
    pub ports: Bus,
    /// Memory-mapped registers at fixed places.
    pub mmio: Bus,
    /// PCI functions, whose BARs the guest may move.
    pub pci: Arc<PciBus>,
    /// The end and the pauses of the run.
    pub control: Arc<RunControl>,
    /// The moment just before the first KVM_RUN of vCPU 0.
    pub first_run: Arc<OnceLock<Instant>>,
    /// Exits of each vCPU by reason.
    pub exits: Vec<Arc<ExitCounters>>,
}

/// Makes [`kick_signal`] interrupt KVM_RUN instead of ending the process.
///
/// # Errors
/// If the system refuses the handler.
pub fn install_kick_handler() -> io::Result<()> {
    register_signal_handler(kick_signal(), handle_kick).map_err(io::Error::from)
}

/// Makes this thread's vCPU leave KVM_RUN, or not enter it: a signal that arrives just before
/// KVM_RUN must not be lost.
extern "C" fn handle_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let run = RUNNING.get();
    if !run.is_null() {
        // SAFETY: `RUNNING` is set only while `VcpuThread::run` of this very thread holds the vCPU,
        // whose mapping it points into, and a signal handler runs on the thread that set it. KVM
        // reads the byte.
        unsafe { ptr::write_volatile(&raw mut (*run).immediate_exit, 1) };
    }
}

/// Clears [`RUNNING`] when its thread stops running the vCPU, also after a panic.
struct RunningGuard;

impl Drop for RunningGuard {
    fn drop(&mut self) {
        RUNNING.set(ptr::null_mut());
    }
}

/// A vCPU and the state of its thread.
pub struct VcpuThread {
    /// Number of the vCPU, also its APIC id.
    pub id: u8,
    /// KVM's vCPU.
    pub fd: VcpuFd,
    /// The state that all vCPUs share.
    pub machine: Arc<SharedMachine>,
    /// The system call filter of the thread.
    pub seccomp: Seccomp,
}

/// What to do after an exit.
enum NextStep {
    /// Enter the guest again.
    Continue,
    /// The guest asked for a reset by a triple fault, or crashed.
    TripleFault,
    /// The guest cannot go on.
    Crash(CrashReason),
    /// KVM_EXIT_INTERNAL_ERROR: its sub-error is still to be read.
    InternalError,
}

impl VcpuThread {
    /// Runs the vCPU until the run ends. Ends the run if the vCPU cannot go on.
    pub fn run(mut self) {
        let run: *mut kvm_run = self.fd.get_kvm_run();
        RUNNING.set(run);
        let _running = RunningGuard;
        let control = self.machine.control.clone();
        let _entered = control.enter();
        let panicking = PanicGuard {
            id: self.id,
            control: self.machine.control.clone(),
        };
        if let Err(error) = restrict_thread(self.seccomp, ThreadKind::Vcpu) {
            self.crash(CrashReason::Run(error.to_string()));
        }
        if self.id == 0 {
            self.machine.first_run.get_or_init(Instant::now);
        }
        while !control.is_stopping() {
            if control.is_paused() {
                control.park();
                // Tells a guest that uses KVM's clock that it was paused, not stuck. For other
                // guests it fails, which is harmless.
                let _ = self.fd.kvmclock_ctrl();
                continue;
            }
            match self.step(run) {
                NextStep::Continue => {}
                NextStep::TripleFault => {
                    let ended = self.triple_fault();
                    self.machine.control.end(ended);
                }
                NextStep::Crash(reason) => self.crash(reason),
                NextStep::InternalError => {
                    let reason = crash::internal_error(&mut self.fd);
                    self.crash(reason);
                }
            }
        }
        drop(panicking);
    }

    /// Ends the run with a crash.
    fn crash(&mut self, reason: CrashReason) {
        let crash = Crash::capture(self.id, reason, &mut self.fd, &self.machine.memory);
        self.machine.control.end(RunEnd::Crashed(Box::new(crash)));
    }

    /// A reset or a crash? Linux may reset by a triple fault, on any vCPU. A kernel that cannot run
    /// here faults before it has accessed any device.
    fn triple_fault(&mut self) -> RunEnd {
        if self.machine.exits.iter().any(|exits| exits.accesses() > 0) {
            tracing::warn!(
                "vCPU {}: triple fault: the guest is reset, as a PC would be",
                self.id
            );
            return RunEnd::Reset;
        }
        let crash = Crash::capture(
            self.id,
            CrashReason::TripleFault,
            &mut self.fd,
            &self.machine.memory,
        );
        RunEnd::Crashed(Box::new(crash))
    }

    /// Enters the guest once.
    fn step(&mut self, run: *const kvm_run) -> NextStep {
        let machine = &self.machine;
        let (reason, next) = match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                // SAFETY: `run` points to the mapping of the vCPU that `self.fd` keeps; KVM has
                // just filled `io`.
                let width = unsafe { (*run).__bindgen_anon_1.io.size };
                for item in data.chunks_exact_mut(usize::from(width.max(1))) {
                    if !machine.ports.read(u64::from(port), item) {
                        item.fill(0xff);
                    }
                }
                (ExitReason::PortRead, NextStep::Continue)
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                // SAFETY: as above.
                let width = unsafe { (*run).__bindgen_anon_1.io.size };
                for item in data.chunks_exact(usize::from(width.max(1))) {
                    machine.ports.write(u64::from(port), item);
                }
                (ExitReason::PortWrite, NextStep::Continue)
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                if !machine.mmio.read(address, data) && !machine.pci.memory_read(address, data) {
                    data.fill(0xff);
                }
                (ExitReason::MmioRead, NextStep::Continue)
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                if !machine.mmio.write(address, data) {
                    machine.pci.memory_write(address, data);
                }
                (ExitReason::MmioWrite, NextStep::Continue)
            }
            // With an in-kernel interrupt controller, KVM itself waits in HLT. It exits only
            // without one, and then nothing would wake the vCPU.
            Ok(VcpuExit::Hlt) => (ExitReason::Halt, NextStep::Continue),
            Ok(VcpuExit::Intr) => (ExitReason::Interrupted, NextStep::Continue),
            Ok(VcpuExit::Shutdown) => (ExitReason::Other, NextStep::TripleFault),
            Ok(VcpuExit::InternalError) => (ExitReason::Other, NextStep::InternalError),
            Ok(VcpuExit::FailEntry(reason, _)) => (
                ExitReason::Other,
                NextStep::Crash(CrashReason::Entry(reason)),
            ),
            Ok(exit) => (
                ExitReason::Other,
                NextStep::Crash(CrashReason::Exit(format!("{exit:?}"))),
            ),
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {
                self.fd.set_kvm_immediate_exit(0);
                (ExitReason::Interrupted, NextStep::Continue)
            }
            Err(error) => (
                ExitReason::Other,
                NextStep::Crash(CrashReason::Run(error.to_string())),
            ),
        };
        self.machine.exits[usize::from(self.id)].count(reason);
        next
    }
}

/// Ends the run if its thread panics: the other threads would not notice that a vCPU is gone.
struct PanicGuard {
    id: u8,
    control: Arc<RunControl>,
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.end(RunEnd::Crashed(Box::new(Crash {
                vcpu: self.id,
                reason: CrashReason::Panic,
                position: None,
                hardware_virtualisation: true,
            })));
        }
    }
}
