//! System call filters (seccomp). Even if a client or guest takes control of a thread, the thread
//! can make only the system calls that its process needs.
//!
//! ```text
//!   restrict(mode, profile) ─▶ RUNTIME + STORE + CONTROL + the profile's own ─▶ BPF ─▶ all threads, and those they start
//! ```
//! **A daemon** has one filter for all threads: a thread that serves a client also leads commit
//! groups and opens ports of the store, so separate filters would hardly differ. It is installed
//! when disks and sockets are open, before the first client is served. If disks may be added
//! (`--disk-dir`), it also allows making and locking files, and making Unix stream sockets to
//! listen at for vhost-user.
//!
//! **A VM's process** has one filter for all threads too, and a stricter one for two kinds of them,
//! installed before they touch anything of the guest:
//!
//! * vCPUs may use KVM, events and the console, but neither files nor rings.
//! * Disk workers may use only what is already open. A starter thread of their own kind starts
//!   them, not the vCPU that asks for them.
//!
//! Where other VMs follow in the same process, the thread that ends the run may build them too.
//!
//! Neither can open, make, name or remove a file: an open fails with EACCES, and any other call
//! that is not allowed kills the process. The log's keeper and the thread that ends the run have
//! the wider filter.
//!
//! **A process that archives a log** has one filter too. It alone can make Internet sockets and
//! connect them; Landlock limits the ports.
//!
//! No thread of any of these processes can start a program or another process, make memory
//! executable, make or connect a socket (but for `--disk-dir` and archives), trace, mount, signal
//! another process, or change its credentials.
//!
//! **io_uring.** Seccomp does not see the requests in a ring, so no thread may make one
//! (`io_uring_setup` fails with ENOSYS, and so does `io_uring_register` but for what the store does
//! with a ring that is there; a thread may be making one while it is restricted). The rings of the store are made before, and each is
//! restricted by IORING_REGISTER_RESTRICTIONS to the operations that read and write open files
//! (`walvisor_storage::prepare_rings`). A port for which no ring is left uses system calls.
//!
//! A call that is not allowed kills the process at once (SIGSYS, "Bad system call"), and the next
//! start recovers the disks, as after any kill. With `--seccomp log` the kernel carries the call
//! out and logs its number.

mod calls;

use std::collections::BTreeMap;
use std::str::FromStr;

use libc::{c_long, c_ulong};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Is, SeccompCondition,
    SeccompFilter, SeccompRule,
};

use calls::{
    BUILDING, BUILDING_IOCTL, CLIENT, CONTROL, DISK_WORKER, EPOLL, FILES, INTERRUPT_IOCTL, IOCTL,
    KVM_IOCTL, OPEN_FILES, OPENING, RUNTIME, STORE, TCMU, TERMINAL_IOCTL, VCPU, VHOST_USER,
    VHOST_USER_OPENING, VM,
};

/// What happens on a system call that the filter does not allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// Kill the process
    #[default]
    On,
    /// Install no filter
    Off,
    /// Let the kernel log the call and execute it
    Log,
}

/// What a process is for, which decides the calls that it may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyscallProfile {
    /// Serve disks. NBD needs no further calls.
    Daemon {
        /// Some of the disks are served to vhost-user front-ends.
        vhost_user: bool,
        /// Some of the disks are served to the kernel's SCSI target.
        tcmu: bool,
    },
    /// Run a VM.
    Vm {
        /// Build and run others after it.
        again: bool,
    },
    /// Copy files to a server on the network, and back.
    Archive,
}

/// The threads of a VM that have a stricter filter than the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Runs a vCPU. A guest that breaks out of KVM or of a device's registers ends up here.
    Vcpu,
    /// Serves a disk's queue. A guest that breaks out through a ring or a request ends up here.
    DiskWorker,
}

/// The system refused the filter.
#[derive(Debug, thiserror::Error)]
#[error("seccomp: {0}: '--seccomp off' sets no filter")]
pub struct SeccompError(#[from] seccompiler::Error);

impl FromStr for Seccomp {
    type Err = String;

    /// Parses `on`, `off` or `log`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            "log" => Ok(Self::Log),
            _ => Err("give on, off or log".to_owned()),
        }
    }
}

impl Seccomp {
    /// Its word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Log => "log",
        }
    }

    /// The action for a call that is not allowed; `None` means no filter.
    fn action(self) -> Option<SeccompAction> {
        match self {
            Self::On => Some(SeccompAction::KillProcess),
            Self::Off => None,
            Self::Log => Some(SeccompAction::Log),
        }
    }
}

/// Restricts all threads of this process and those that they will start, for good. `opens`: the
/// process may open more disks.
///
/// # Errors
/// If the kernel has no seccomp, or refuses the filter.
pub fn restrict(mode: Seccomp, profile: SyscallProfile, opens: bool) -> Result<(), SeccompError> {
    let Some(forbidden) = mode.action() else {
        return Ok(());
    };
    // Its first use looks up the vDSO, on kernels before 6.4 with open(2), so it must come before
    // the filter.
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let allowed = of_process(profile, opens).map_err(seccompiler::Error::from)?;
    // A filter cannot see the arguments of clone3, which are in memory. On ENOSYS the C library
    // uses clone instead, and the store does without a ring. Of two filters the stricter one
    // decides.
    let missing = [libc::SYS_clone3, libc::SYS_io_uring_setup];
    let mut missing: Rules = missing.map(|call| (call, vec![])).into();
    let other = |operation| SeccompCondition::new(1, Len::Dword, Is::Ne, operation);
    // IORING_REGISTER_EVENTFD and IORING_UNREGISTER_EVENTFD (linux/io_uring.h).
    let others = [4, 5].map(other).into_iter().collect::<Result<_, _>>();
    let others = others.and_then(SeccompRule::new);
    let others = others.map_err(seccompiler::Error::from)?;
    missing.insert(libc::SYS_io_uring_register, vec![others]);
    let enosys = SeccompAction::Errno(libc::ENOSYS as u32);
    seccompiler::apply_filter_all_threads(&program(missing, SeccompAction::Allow, enosys)?)?;
    if profile == SyscallProfile::Archive {
        // The C library asks services of the machine by such sockets, and does without.
        let unix = SeccompCondition::new(0, Len::Dword, Is::Eq, libc::AF_UNIX as u64);
        let rule = unix.and_then(|unix| SeccompRule::new(vec![unix]));
        let rule = rule.map_err(seccompiler::Error::from)?;
        let unix = BTreeMap::from([(libc::SYS_socket, vec![rule])]);
        let none = SeccompAction::Errno(libc::EAFNOSUPPORT as u32);
        seccompiler::apply_filter_all_threads(&program(unix, SeccompAction::Allow, none)?)?;
    }
    seccompiler::apply_filter_all_threads(&program(allowed, forbidden, SeccompAction::Allow)?)?;
    Ok(())
}

/// Restricts the calling thread, and the threads that it will start, further than [`restrict`] has
/// done with [`SyscallProfile::Vm`].
///
/// # Errors
/// If the kernel refuses the filter.
pub fn restrict_thread(mode: Seccomp, kind: ThreadKind) -> Result<(), SeccompError> {
    let Some(forbidden) = mode.action() else {
        return Ok(());
    };
    let mut allowed = of_thread(kind).map_err(seccompiler::Error::from)?;
    if mode == Seccomp::On {
        // The C library's allocator opens /proc/sys/vm/overcommit_memory when it gives memory back,
        // and does without it if that fails, so an open must fail instead of killing the process.
        let no_open = BTreeMap::from([(libc::SYS_openat, vec![])]);
        let denied = SeccompAction::Errno(libc::EACCES as u32);
        allowed.insert(libc::SYS_openat, vec![]);
        seccompiler::apply_filter(&program(no_open, SeccompAction::Allow, denied)?)?;
    }
    seccompiler::apply_filter(&program(allowed, forbidden, SeccompAction::Allow)?)?;
    Ok(())
}

/// The allowed calls. If a call has rules, one of them must hold.
type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

fn program(
    rules: Rules,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, seccompiler::Error> {
    let arch = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, otherwise, matched, arch)?;
    Ok(filter.try_into()?)
}

fn of_process(profile: SyscallProfile, opens: bool) -> Result<Rules, seccompiler::BackendError> {
    let more = if opens { OPENING } else { &[] };
    let common = [RUNTIME, OPEN_FILES, STORE, CONTROL, EPOLL, more];
    let no_new_privileges = libc::PR_SET_NO_NEW_PRIVS;
    let mut rules = match profile {
        SyscallProfile::Daemon { vhost_user, tcmu } => {
            let of = |door: bool, calls: &'static [c_long]| if door { calls } else { &[] };
            let own = [of(vhost_user, VHOST_USER), of(tcmu, TCMU)].concat();
            allowed(&common, &own, &[], &[])
        }
        SyscallProfile::Vm { again } => {
            let building: (&[c_long], &[c_ulong]) = if again {
                (BUILDING, BUILDING_IOCTL)
            } else {
                (&[], &[])
            };
            let calls = [VM, building.0].concat();
            let ioctl = [TERMINAL_IOCTL, KVM_IOCTL, building.1].concat();
            allowed(&common, &calls, &ioctl, &[no_new_privileges])
        }
        SyscallProfile::Archive => {
            allowed(&common, &[CLIENT, FILES].concat(), &[libc::FIONREAD], &[])
        }
    }?;
    if profile == SyscallProfile::Archive {
        // `allowed` lets others set two options only.
        rules.insert(libc::SYS_setsockopt, vec![]);
        let socket = |family: libc::c_int, argument, is, value| {
            let of_family = SeccompCondition::new(0, Len::Dword, Is::Eq, family as u64)?;
            let condition = SeccompCondition::new(argument, Len::Dword, is, value)?;
            SeccompRule::new(vec![of_family, condition])
        };
        // The machine's addresses, by NETLINK_ROUTE.
        let mut sockets = vec![socket(libc::AF_NETLINK, 2, Is::Eq, 0)?];
        for family in [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX] {
            for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM] {
                sockets.push(socket(family, 1, Is::MaskedEq(0xf), kind as u64)?);
            }
        }
        rules.insert(libc::SYS_socket, sockets);
    }
    let one_of = |argument, values: &[u64]| -> Result<Vec<_>, seccompiler::BackendError> {
        let rules = values.iter().map(|value| {
            let is = SeccompCondition::new(argument, Len::Dword, Is::Eq, *value)?;
            SeccompRule::new(vec![is])
        });
        rules.collect()
    };
    // A restore to a point in a batch opens the disks that it makes.
    if opens || profile == SyscallProfile::Archive {
        let locks = [libc::F_OFD_GETLK, libc::F_OFD_SETLK].map(|command| command as u64);
        let fcntl = rules.entry(libc::SYS_fcntl).or_default();
        fcntl.extend(one_of(1, &locks)?);
    }
    if opens
        && matches!(
            profile,
            SyscallProfile::Daemon {
                vhost_user: true,
                ..
            }
        )
    {
        let calls = VHOST_USER_OPENING.iter().map(|call| (*call, vec![]));
        rules.extend(calls);
        // A datagram socket could send to any socket of the host without a connect.
        let stream = vec![
            SeccompCondition::new(0, Len::Dword, Is::Eq, libc::AF_UNIX as u64)?,
            SeccompCondition::new(1, Len::Dword, Is::MaskedEq(0xf), libc::SOCK_STREAM as u64)?,
        ];
        rules.insert(libc::SYS_socket, vec![SeccompRule::new(stream)?]);
    }
    Ok(rules)
}

fn of_thread(kind: ThreadKind) -> Result<Rules, seccompiler::BackendError> {
    match kind {
        ThreadKind::Vcpu => {
            let mut rules = allowed(&[RUNTIME], VCPU, KVM_IOCTL, &[])?;
            // A vCPU starts no thread: the starter thread starts the queue workers.
            rules.remove(&libc::SYS_clone);
            rules.remove(&libc::SYS_io_uring_register);
            rules.remove(&libc::SYS_setsockopt);
            Ok(rules)
        }
        ThreadKind::DiskWorker => {
            let mut rules = allowed(
                &[RUNTIME, OPEN_FILES, EPOLL],
                DISK_WORKER,
                INTERRUPT_IOCTL,
                &[],
            )?;
            rules.remove(&libc::SYS_setsockopt);
            Ok(rules)
        }
    }
}

/// The rules for the calls in these lists, and for the calls that every thread may make with
/// certain arguments only. `more_ioctl` and `more_prctl` add to those arguments.
fn allowed(
    common: &[&[c_long]],
    own: &[c_long],
    more_ioctl: &[c_ulong],
    more_prctl: &[libc::c_int],
) -> Result<Rules, seccompiler::BackendError> {
    let calls = common.iter().copied().flatten().chain(own);
    let mut rules: Rules = calls.map(|call| (*call, vec![])).collect();
    // The other filter refuses clone3 with an error, so this one must not kill the process for it.
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
    // abort() sends a signal to the process itself.
    let me = u64::from(std::process::id());
    when(libc::SYS_tgkill, 0, Is::Eq, &[me])?;
    // These name threads and their memory.
    let prctl = [libc::PR_SET_NAME, libc::PR_SET_VMA];
    let prctl = prctl.iter().chain(more_prctl);
    let prctl: Vec<u64> = prctl.map(|option| *option as u64).collect();
    when(libc::SYS_prctl, 0, Is::Eq, &prctl)?;
    when(libc::SYS_ioctl, 1, Is::Eq, &[IOCTL, more_ioctl].concat())?;
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
    let keepalive = vec![
        SeccompCondition::new(1, Len::Dword, Is::Eq, libc::SOL_SOCKET as u64)?,
        SeccompCondition::new(2, Len::Dword, Is::Eq, libc::SO_KEEPALIVE as u64)?,
    ];
    // Another filter refuses most of its operations with an error.
    rules.insert(libc::SYS_io_uring_register, vec![]);
    // A thread schedules itself, and no other process of the same user.
    for call in [libc::SYS_sched_setaffinity, libc::SYS_sched_setattr] {
        let own = SeccompCondition::new(0, Len::Dword, Is::Eq, 0)?;
        rules.insert(call, vec![SeccompRule::new(vec![own])?]);
    }
    // MSG_FASTOPEN connects, past the rule for connect and past Landlock.
    let flags = [
        (libc::SYS_sendto, 3),
        (libc::SYS_sendmsg, 2),
        (libc::SYS_sendmmsg, 3),
    ];
    for (call, argument) in flags {
        if let Some(rules) = rules.get_mut(&call) {
            let fast = Is::MaskedEq(libc::MSG_FASTOPEN as u64);
            let connected = SeccompCondition::new(argument, Len::Dword, fast, 0)?;
            *rules = vec![SeccompRule::new(vec![connected])?];
        }
    }
    let setsockopt = rules.entry(libc::SYS_setsockopt).or_default();
    setsockopt.push(SeccompRule::new(keepalive)?);
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::net::TcpListener;
    use std::os::unix::net::{UnixDatagram, UnixListener};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitStatus};
    use std::sync::OnceLock;
    use std::thread;

    use rustix::event::{PollFd, PollFlags, poll};
    use walvisor_devices::backend::{Backend, BackendQueue, Buffer, Operation};
    use walvisor_storage::{EngineKind, Image, RawCache, RawDisk};

    use super::*;

    const ACTION: &str = "WALVISOR_TEST_SECCOMP_ACTION";

    /// An action that the tests below try in a child process.
    fn act(name: &str) {
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
            "memory" => assert_eq!(vec![1_u8; 64 << 20].len(), 64 << 20),
            "thread" => thread::spawn(|| ()).join().unwrap(),
            "no-open" => {
                let error = fs::File::open("/proc/self/status").unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EACCES));
            }
            "interrupts" => {
                for call in INTERRUPT_IOCTL {
                    // SAFETY: there is no such descriptor, so the kernel returns an error and does
                    // nothing.
                    assert_eq!(unsafe { libc::ioctl(-1, *call, 0) }, -1);
                }
            }
            "ring" => {
                let made = io_uring::IoUring::new(2).map(drop);
                let error = made.expect_err("no ring").raw_os_error();
                assert_eq!(error, Some(libc::ENOSYS));
            }
            "ring-change" => {
                const ENABLE_RINGS: libc::c_int = 12;
                // SAFETY: there is no such descriptor, so the kernel returns an error and does
                // nothing.
                unsafe { libc::syscall(libc::SYS_io_uring_register, -1, ENABLE_RINGS, 0, 0) };
                let error = std::io::Error::last_os_error();
                assert_eq!(error.raw_os_error(), Some(libc::ENOSYS));
            }
            "connect" => {
                // SAFETY: there is no such descriptor, so the kernel returns an error and does
                // nothing.
                unsafe { libc::connect(-1, std::ptr::null(), 0) };
            }
            "splice" => {
                let none = std::ptr::null_mut();
                // SAFETY: there is no such descriptor, so the kernel returns an error and does
                // nothing.
                unsafe { libc::splice(-1, none, -1, none, 0, 0) };
            }
            "raw-disk" => raw_disks(),
            // A second filter could not lift the first, but these threads must not install one.
            "lift" => drop(restrict_thread(Seccomp::Log, ThreadKind::DiskWorker)),
            "socket" => drop(TcpListener::bind("127.0.0.1:0")),
            "listener" => {
                let dir = tempfile::tempdir_in("/tmp").unwrap();
                UnixListener::bind(dir.path().join("disk.sock")).unwrap();
            }
            "datagram" => drop(UnixDatagram::unbound()),
            "no-unix" => {
                let error = UnixDatagram::unbound().unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EAFNOSUPPORT));
            }
            "list" => {
                let any = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
                assert!(any.local_addr().is_ok());
            }
            "client" => {
                let error = std::net::TcpStream::connect("localhost:1").unwrap_err();
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
            }
            "raw-socket" => {
                // SAFETY: the kernel returns an error or a descriptor.
                unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP) };
            }
            "packets" => {
                // SAFETY: the kernel returns an error or a descriptor.
                unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0) };
            }
            "audit" => {
                // SAFETY: the kernel returns an error or a descriptor.
                unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_AUDIT) };
            }
            "program" => drop(Command::new("true").spawn()),
            "executable" => {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                let prot = libc::PROT_READ | libc::PROT_EXEC;
                // SAFETY: a new mapping that nothing uses.
                unsafe { libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0) };
            }
            "process" => {
                // SAFETY: the child, if there is one, only aborts.
                if unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } == 0 {
                    std::process::abort();
                }
            }
            "signal" => {
                // SAFETY: signal 0 only asks whether the process exists.
                unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) };
            }
            "fast-open" => {
                let none = std::ptr::null();
                // SAFETY: there is no such descriptor, so the kernel returns an error and does
                // nothing.
                unsafe { libc::sendto(-1, none, 0, libc::MSG_FASTOPEN, none.cast(), 0) };
            }
            "fast-message" => {
                // SAFETY: as above.
                unsafe { libc::sendmsg(-1, std::ptr::null(), libc::MSG_FASTOPEN) };
            }
            "fast-messages" => {
                let flags = libc::MSG_FASTOPEN;
                // SAFETY: as above.
                unsafe { libc::sendmmsg(-1, std::ptr::null_mut(), 0, flags as _) };
            }
            "own-schedule" => {
                rustix::thread::sched_setaffinity(None, &rustix::thread::CpuSet::new())
                    .expect_err("no processor");
            }
            "affinity" => {
                let other = rustix::thread::Pid::from_raw(1);
                let _ = rustix::thread::sched_setaffinity(other, &rustix::thread::CpuSet::new());
            }
            "schedule" => {
                // SAFETY: without attributes the kernel returns an error and does nothing.
                unsafe { libc::syscall(libc::SYS_sched_setattr, 1, 0, 0) };
            }
            name => panic!("{name}"),
        }
    }

    static RAW_DISKS: OnceLock<Vec<RawDisk>> = OnceLock::new();

    /// Opens a raw disk for each engine, before the filters are installed.
    fn open_raw_disks() -> Vec<RawDisk> {
        let dir = tempfile::tempdir().unwrap();
        let open = |(name, engine)| {
            let path = dir.path().join(name);
            fs::write(&path, [1; 8192]).unwrap();
            let image = Image::open(&path, false).unwrap();
            RawDisk::with_engine(image, RawCache::Writethrough, engine).unwrap()
        };
        let engines = [("a", EngineKind::Auto), ("b", EngineKind::Blocking)];
        engines.into_iter().map(open).collect()
    }

    /// The requests of a disk's worker to raw images, whether or not there is a ring for it.
    fn raw_disks() {
        for disk in RAW_DISKS.get().unwrap() {
            let queues = [disk.open_queue().unwrap(), disk.open_queue().unwrap()];
            queues.into_iter().for_each(requests);
        }
    }

    fn requests(mut queue: Box<dyn BackendQueue>) {
        {
            let (sector, sectors) = (0, 8);
            let data = Buffer::zeroed(4096);
            queue.submit(0, Operation::Write { sector, data });
            queue.submit(1, Operation::Discard { sector, sectors });
            for unmap in [false, true] {
                queue.submit(
                    2,
                    Operation::WriteZeroes {
                        sector,
                        sectors,
                        unmap,
                    },
                );
            }
            queue.submit(3, Operation::Read { sector, sectors });
            queue.submit(4, Operation::Flush);
            queue.kick();
            let mut done = Vec::new();
            while done.len() < 6 {
                let event = queue.event();
                poll(&mut [PollFd::new(&event, PollFlags::IN)], None).unwrap();
                queue.completions(&mut done);
            }
            assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
        }
    }

    /// Runs the action `name` under the filter, in a child process.
    fn act_restricted(name: &str, mode: &str) -> ExitStatus {
        let me = std::env::current_exe().unwrap();
        let mut command = Command::new(me);
        command.args([
            "--exact",
            "seccomp::tests::a_restricted_process",
            "--nocapture",
        ]);
        command.env(ACTION, format!("{mode} {name}"));
        command.output().unwrap().status
    }

    /// [`act_restricted`] runs this in a child process. As a test of its own it does nothing.
    #[test]
    fn a_restricted_process() {
        let Ok(text) = std::env::var(ACTION) else {
            return;
        };
        let (mode, name) = text.split_once(' ').unwrap();
        let (of, name) = name.split_once(':').unwrap_or(("", name));
        let mode: Seccomp = mode.parse().unwrap();
        let (adding, name) = (of == "adding", name.to_owned());
        let kind = match of {
            "vcpu" => Some(ThreadKind::Vcpu),
            "worker" => Some(ThreadKind::DiskWorker),
            _ => None,
        };
        if let Some(kind) = kind {
            RAW_DISKS.set(open_raw_disks()).unwrap();
            // One queue gets a ring, and another one does without.
            walvisor_storage::prepare_rings(1);
            restrict(mode, SyscallProfile::Vm { again: false }, false).unwrap();
            let thread = thread::spawn(move || {
                restrict_thread(mode, kind).unwrap();
                act(&name);
            });
            thread.join().unwrap();
            std::process::exit(0);
        }
        // A thread started before the restriction is restricted too.
        let (go, wait) = std::sync::mpsc::channel();
        let earlier = thread::spawn(move || {
            wait.recv().unwrap();
            act(&name);
        });
        // Disks may be added to the daemon.
        let daemon = SyscallProfile::Daemon {
            vhost_user: adding,
            tcmu: false,
        };
        let profile = if of == "archive" {
            SyscallProfile::Archive
        } else {
            daemon
        };
        restrict(mode, profile, adding).unwrap();
        go.send(()).unwrap();
        earlier.join().unwrap();
        std::process::exit(0);
    }

    /// Asserts that each of these actions of `who` is allowed in this mode, or kills the process.
    #[track_caller]
    fn check(who: &str, mode: &str, names: &str, is_allowed: bool) {
        let expected = if is_allowed {
            (Some(0), None)
        } else {
            (None, Some(libc::SIGSYS))
        };
        for name in names.split_whitespace() {
            let name = format!("{who}{name}");
            let ended = act_restricted(&name, mode);
            assert_eq!((ended.code(), ended.signal()), expected, "{mode} {name}");
        }
    }

    #[test]
    fn an_archive_may_connect_and_do_nothing_else_that_a_daemon_may_not() {
        let allowed = "allowed ring client no-unix list own-schedule";
        check("archive:", "on", allowed, true);
        let forbidden = "program process executable signal splice raw-socket packets audit \
                         fast-open fast-message fast-messages affinity schedule";
        check("archive:", "on", forbidden, false);
    }

    #[test]
    fn each_kind_of_thread_may_do_its_work_and_no_more() {
        check("vcpu:", "on", "memory interrupts no-open", true);
        let work = "memory thread raw-disk ring ring-change interrupts no-open";
        check("worker:", "on", work, true);
        for (who, forbidden) in [("vcpu:", "thread ring lift"), ("worker:", "lift")] {
            check(who, "on", forbidden, false);
            check(who, "log", forbidden, true);
            check(who, "on", "socket connect splice", false);
        }
    }

    #[test]
    fn a_forbidden_call_kills_the_process_unless_it_is_only_logged() {
        // A thread may be making a ring while the process is restricted.
        check("", "on", "allowed ring ring-change", true);
        check("adding:", "on", "listener", true);
        let forbidden = "socket connect splice program executable process signal";
        let of_adding = "datagram socket connect program";
        for (who, forbidden) in [("", forbidden), ("adding:", of_adding)] {
            check(who, "on", forbidden, false);
            check(who, "log", forbidden, true);
            check(who, "off", forbidden, true);
        }
    }
}
