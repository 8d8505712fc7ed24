//! Programs that run as if a line of their code were missing: one kind of sync does nothing and
//! reports success. The programs themselves are unchanged: a seccomp filter stops them at their
//! syncs, and a tracer skips some of these.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread::{self, JoinHandle};

use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};

/// The kind of sync that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The flag `RWF_DSYNC` of writes.
    Dsync,
    /// fdatasync and fsync of segments.
    Segments,
    /// fdatasync and fsync of the control file.
    Control,
    /// fdatasync and fsync of base images.
    Base,
    /// fdatasync and fsync of directories.
    Directories,
}

impl Fault {
    /// The fault that a command line names.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "dsync" => Self::Dsync,
            "segments" => Self::Segments,
            "control" => Self::Control,
            "base" => Self::Base,
            "directories" => Self::Directories,
            _ => return None,
        })
    }

    /// Whether the fault leaves out the syncs of the file at `path`.
    fn skips(self, path: &Path) -> bool {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match self {
            Self::Dsync => false,
            Self::Segments => name.starts_with("segment-"),
            Self::Control => name.starts_with("control"),
            Self::Base => name.contains(".img") && path.is_file(),
            Self::Directories => path.is_dir(),
        }
    }
}

/// The conditions under which programs run.
#[derive(Clone, Copy, Debug)]
pub struct Conditions {
    /// The kind of sync that is left out, if any.
    pub fault: Option<Fault>,
    /// Whether io_uring is available.
    pub io_uring: bool,
}

/// A program that was started.
pub struct Program {
    pid: Pid,
    tracer: JoinHandle<io::Result<i32>>,
}

impl Program {
    /// Starts `command` under `conditions`.
    pub fn start(mut command: Command, conditions: Conditions) -> io::Result<Self> {
        let filter = filter(conditions).map_err(io::Error::other)?;
        let traced = conditions.fault.is_some();
        // SAFETY: the closure makes only system calls and takes no lock: the filter was compiled
        // before the fork.
        unsafe {
            command.pre_exec(move || {
                if traced {
                    ptrace::traceme()?;
                }
                if filter.is_empty() {
                    Ok(())
                } else {
                    apply_filter(&filter).map_err(|_| io::ErrorKind::Unsupported.into())
                }
            });
        }
        let (sender, started) = std::sync::mpsc::channel();
        // Only the thread that starts a traced program can trace it. So each program has a thread
        // of its own while it runs.
        let tracer = thread::spawn(move || {
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(error) => {
                    let _ = sender.send(Err(error));
                    return Ok(-1);
                }
            };
            let pid = Pid::from_raw(child.id() as i32);
            let _ = sender.send(Ok(pid));
            match conditions.fault {
                Some(fault) => trace(pid, fault),
                None => Ok(child.wait()?.code().unwrap_or(-1)),
            }
        });
        let pid = started.recv().map_err(io::Error::other)??;
        Ok(Self { pid, tracer })
    }

    /// Whether the program still runs.
    pub fn runs(&self) -> bool {
        !self.tracer.is_finished()
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill(self.pid, signal)?)
    }

    /// Waits for the program's end. Returns its status, or -1 if a signal ended it.
    pub fn wait(self) -> io::Result<i32> {
        self.tracer.join().expect("the tracer does not panic")
    }
}

fn filter(conditions: Conditions) -> Result<BpfProgram, seccompiler::Error> {
    let mut program = BpfProgram::new();
    if conditions.fault.is_some() {
        let calls = [libc::SYS_pwritev2, libc::SYS_fdatasync, libc::SYS_fsync];
        program = compile(&calls, SeccompAction::Trace(0))?;
    }
    if !conditions.io_uring {
        program = compile(
            &[libc::SYS_io_uring_setup],
            SeccompAction::Errno(libc::ENOSYS as u32),
        )?;
    }
    Ok(program)
}

fn compile(calls: &[i64], action: SeccompAction) -> Result<BpfProgram, seccompiler::Error> {
    let rules: BTreeMap<_, _> = calls.iter().map(|&call| (call, Vec::new())).collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, TargetArch::x86_64)?;
    Ok(filter.try_into()?)
}

/// Lets the traced program run to its end, without the syncs that `fault` leaves out.
fn trace(program: Pid, fault: Fault) -> io::Result<i32> {
    // The program stops right after exec.
    waitpid(program, None)?;
    ptrace::setoptions(
        program,
        Options::PTRACE_O_TRACESECCOMP
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK
            | Options::PTRACE_O_EXITKILL,
    )?;
    let mut resume = (program, None);
    loop {
        // The call fails if the program was killed meanwhile. The wait below then returns its end.
        let _ = ptrace::cont(resume.0, resume.1);
        // Waits for the program's threads too, but not for children of other threads of this
        // process.
        let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        resume = match waitpid(None, Some(flags))? {
            WaitStatus::Exited(pid, status) if pid == program => return Ok(status),
            WaitStatus::Signaled(pid, ..) if pid == program => return Ok(-1),
            WaitStatus::PtraceEvent(pid, _, event) => {
                if event == libc::PTRACE_EVENT_SECCOMP {
                    // The call fails if the program was killed meanwhile: it has no registers any
                    // more.
                    let _ = leave_out(pid, fault);
                }
                (pid, None)
            }
            // A new thread begins with this stop.
            WaitStatus::Stopped(pid, Signal::SIGSTOP) => (pid, None),
            WaitStatus::Stopped(pid, signal) => (pid, Some(signal)),
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => {
                // A thread ended, so there is no thread to resume.
                (Pid::from_raw(0), None)
            }
            other => return Err(io::Error::other(format!("unexpected: {other:?}"))),
        };
    }
}

/// Changes the system call that `thread` is about to make, if `fault` leaves it out.
fn leave_out(thread: Pid, fault: Fault) -> io::Result<()> {
    let mut registers = ptrace::getregs(thread)?;
    if registers.orig_rax == libc::SYS_pwritev2 as u64 {
        if fault == Fault::Dsync {
            registers.r9 &= !(libc::RWF_DSYNC as u64);
            ptrace::setregs(thread, registers)?;
        }
        return Ok(());
    }
    let file = std::fs::read_link(format!("/proc/{thread}/fd/{}", registers.rdi))?;
    if fault.skips(&file) {
        // The kernel skips the system call, and the program sees success.
        registers.orig_rax = u64::MAX;
        registers.rax = 0;
        ptrace::setregs(thread, registers)?;
    }
    Ok(())
}
