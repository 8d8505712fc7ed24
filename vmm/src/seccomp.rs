//! System call filters (seccomp): what a client could make a daemon do, should it ever find a way in, ends where the daemon
//! itself has nothing to do.
//!
//! ```text
//!   restrict(mode, duty) ─▶ RUNTIME + STORE + CONTROL + the duty's own ─▶ BPF ─▶ every thread there is, and those they start
//! ```
//! One filter for all threads, not one for each kind: a thread that serves a client also leads commit groups and opens
//! ports of the store, which takes rings, files and memory, so filters that differ would differ by `accept4` alone. It is
//! installed when disks and sockets are open and before the first client is heard.
//!
//! No thread can start a program or another process, make memory executable, make or connect a socket, trace, mount,
//! signal or change who it is. What is asked of an io_uring is not seen by seccomp: rings stay because they are the store's
//! fast path.
//!
//! A call that is not allowed kills the process at once (SIGSYS, "Bad system call"), and the disks are recovered at the
//! next start, as after any kill. `--seccomp log` lets it pass instead, and the kernel's log tells its number.

use std::collections::BTreeMap;

use clap::ValueEnum;
use libc::{c_long, c_ulong};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Is, SeccompCondition,
    SeccompFilter, SeccompRule,
};

/// What becomes of a system call that is not allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Seccomp {
    /// The process is killed
    #[default]
    On,
    /// Nothing: there is no filter
    Off,
    /// The kernel logs it, and carries it out
    Log,
}

/// What a process is for; it may do what that takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Serve disks to NBD clients.
    Nbd,
    /// Serve disks to vhost-user front-ends.
    VhostUser,
}

/// The system refused the filter.
#[derive(Debug, thiserror::Error)]
#[error("seccomp: {0}: '--seccomp off' does without")]
pub struct SeccompError(#[from] seccompiler::Error);

/// What memory, threads, time, a panic's backtrace and the end of a process take.
const RUNTIME: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getcwd,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_readlink,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    // A queue's worker keeps to its processor.
    libc::SYS_sched_setaffinity,
    // Threads that wait for a device ask for short slices.
    libc::SYS_sched_setattr,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
];

/// What open disks take: both engines, segments that are made and recycled, checkpoints.
const STORE: &[c_long] = &[
    libc::SYS_close,
    libc::SYS_eventfd2,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flock,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_rename,
    libc::SYS_statx,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_unlink,
    libc::SYS_write,
    libc::SYS_writev,
];

/// What a control socket takes.
const CONTROL: &[c_long] = &[libc::SYS_accept4, libc::SYS_recvfrom, libc::SYS_sendto];

/// What NBD clients take.
const NBD: &[c_long] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
    libc::SYS_shutdown,
];

/// What vhost-user front-ends take: descriptors that come with messages, and memory that is shared with them.
const VHOST_USER: &[c_long] = &[
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
    libc::SYS_memfd_create,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// What the libc crate does not have yet: a copy of the auxiliary vector.
const PR_GET_AUXV: libc::c_int = 0x4155_5856;

/// Restricts every thread of this process, and those that they will start. Nothing takes it back.
///
/// # Errors
/// If the kernel has no seccomp, or refuses the filter.
pub fn restrict(mode: Seccomp, duty: Duty) -> Result<(), SeccompError> {
    let forbidden = match mode {
        Seccomp::On => SeccompAction::KillProcess,
        Seccomp::Off => return Ok(()),
        Seccomp::Log => SeccompAction::Log,
    };
    let allowed = allowed(duty).map_err(seccompiler::Error::from)?;
    // What clone3 is to do stands in memory, where no filter looks: a C library that is told that there is none asks
    // clone in its place. Of two filters the stricter one decides.
    let no_clone3 = BTreeMap::from([(libc::SYS_clone3, vec![])]);
    let enosys = SeccompAction::Errno(libc::ENOSYS as u32);
    install(no_clone3, SeccompAction::Allow, enosys)?;
    install(allowed, forbidden, SeccompAction::Allow)?;
    Ok(())
}

fn install(
    rules: BTreeMap<c_long, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<(), seccompiler::Error> {
    let arch = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, otherwise, matched, arch)?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter_all_threads(&program)
}

/// The allowed calls, each with the rules of which one has to hold; none: always.
fn allowed(duty: Duty) -> Result<BTreeMap<c_long, Vec<SeccompRule>>, seccompiler::BackendError> {
    let own = match duty {
        Duty::Nbd => NBD,
        Duty::VhostUser => VHOST_USER,
    };
    let mut rules: BTreeMap<_, _> = [RUNTIME, STORE, CONTROL, own]
        .into_iter()
        .flatten()
        .map(|call| (*call, vec![]))
        .collect();
    // To be refused by the other filter, and not to kill.
    rules.insert(libc::SYS_clone3, vec![]);
    let mut when = |call, argument, is: Is, values: &[u64]| {
        let one_of = values.iter().map(|value| {
            let condition = SeccompCondition::new(argument, Len::Dword, is.clone(), *value)?;
            SeccompRule::new(vec![condition])
        });
        rules.insert(call, one_of.collect::<Result<_, _>>()?);
        Ok(())
    };
    let not_executable = || Is::MaskedEq(libc::PROT_EXEC as u64);
    when(libc::SYS_mmap, 2, not_executable(), &[0])?;
    when(libc::SYS_mprotect, 2, not_executable(), &[0])?;
    let thread = libc::CLONE_THREAD as u64;
    when(libc::SYS_clone, 0, Is::MaskedEq(thread), &[thread])?;
    // abort() signals the process itself.
    let me = u64::from(std::process::id());
    when(libc::SYS_tgkill, 0, Is::Eq, &[me])?;
    // The names of threads and of their memory; where the kernel's own clock is to be found.
    let prctl = [libc::PR_SET_NAME, libc::PR_SET_VMA, PR_GET_AUXV].map(|option| option as u64);
    when(libc::SYS_prctl, 0, Is::Eq, &prctl)?;
    // Sockets that do not block; whether, and how wide, a terminal is there.
    let ioctl: [c_ulong; 3] = [libc::FIONBIO, libc::TCGETS, libc::TIOCGWINSZ];
    when(libc::SYS_ioctl, 1, Is::Eq, &ioctl)?;
    let fcntl = [
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_DUPFD_CLOEXEC,
        libc::F_ADD_SEALS,
        libc::F_GET_SEALS,
    ];
    when(
        libc::SYS_fcntl,
        1,
        Is::Eq,
        &fcntl.map(|command| command as u64),
    )?;
    when(libc::SYS_setsockopt, 1, Is::Eq, &[libc::IPPROTO_TCP as u64])?;
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::net::TcpListener;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitStatus};
    use std::thread;

    use super::*;

    const DEED: &str = "WALVISOR_TEST_SECCOMP_DEED";

    /// What the test below does in a process of its own.
    fn deed(name: &str) {
        match name {
            "allowed" => {
                std::backtrace::Backtrace::force_capture().to_string();
                let mut file = fs::File::open("/proc/self/status").unwrap();
                file.read_to_string(&mut String::new()).unwrap();
                let sum = thread::spawn(|| vec![1_u8; 1 << 20].iter().map(|n| u64::from(*n)).sum());
                let sum: u64 = sum.join().unwrap();
                assert_eq!(sum, 1 << 20);
                thread::sleep(std::time::Duration::from_millis(1));
            }
            "socket" => drop(TcpListener::bind("127.0.0.1:0")),
            "program" => drop(Command::new("true").spawn()),
            "executable" => {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                let prot = libc::PROT_READ | libc::PROT_EXEC;
                // SAFETY: a new mapping, of which nobody makes use.
                unsafe { libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0) };
            }
            "process" => {
                // SAFETY: the child, should there be one, does nothing but end.
                if unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } == 0 {
                    std::process::abort();
                }
            }
            "signal" => {
                // SAFETY: signal 0 only asks whether the process is there.
                unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) };
            }
            name => panic!("{name}"),
        }
    }

    /// Does `name` restricted, in a process of its own.
    fn done(name: &str, mode: &str) -> ExitStatus {
        let me = std::env::current_exe().unwrap();
        let mut command = Command::new(me);
        command.args([
            "--exact",
            "seccomp::tests::a_restricted_process",
            "--nocapture",
        ]);
        command.env(DEED, format!("{mode} {name}"));
        command.output().unwrap().status
    }

    /// Where [`done`] begins; as a test of its own it has nothing to do.
    #[test]
    fn a_restricted_process() {
        let Ok(text) = std::env::var(DEED) else {
            return;
        };
        let (mode, name) = text.split_once(' ').unwrap();
        let mode = Seccomp::from_str(mode, false).unwrap();
        let name = name.to_owned();
        // A thread that was there before is restricted too.
        let (go, wait) = std::sync::mpsc::channel();
        let earlier = thread::spawn(move || {
            wait.recv().unwrap();
            deed(&name);
        });
        restrict(mode, Duty::Nbd).unwrap();
        go.send(()).unwrap();
        earlier.join().unwrap();
        std::process::exit(0);
    }

    #[test]
    fn a_forbidden_call_kills_unless_it_is_only_logged() {
        assert_eq!(done("allowed", "on").code(), Some(0));
        for name in ["socket", "program", "executable", "process", "signal"] {
            assert_eq!(done(name, "on").signal(), Some(libc::SIGSYS), "{name}");
            assert_eq!(done(name, "log").code(), Some(0), "{name}");
            assert_eq!(done(name, "off").code(), Some(0), "{name}");
        }
    }
}
