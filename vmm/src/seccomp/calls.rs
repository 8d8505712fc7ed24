//! System calls, grouped by purpose.

use libc::{c_long, c_ulong};

/// The calls for memory, threads, time, a panic's backtrace and the end of a process.
pub(super) const RUNTIME: &[c_long] = &[
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
    // A queue's worker sets its processor affinity.
    libc::SYS_sched_setaffinity,
    // Threads that wait for a device ask for short slices.
    libc::SYS_sched_setattr,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
];

/// The calls with which both I/O engines read and write open files, and wait for them.
pub(super) const OPEN_FILES: &[c_long] = &[
    libc::SYS_close,
    libc::SYS_eventfd2,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_io_uring_enter,
    // Another filter refuses this one with an error.
    libc::SYS_io_uring_setup,
    libc::SYS_lseek,
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
    libc::SYS_sync_file_range,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Further calls of the store: to make and recycle segments, copy to images and exports, punch
/// holes, and mark images.
pub(super) const STORE: &[c_long] = &[
    libc::SYS_copy_file_range,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fgetxattr,
    libc::SYS_flock,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_rename,
    libc::SYS_statx,
    libc::SYS_unlink,
];

/// Further calls to open disks later: to resolve paths, make logs and name their files, judge the
/// clock, and read the size of the machine's memory, which limits disks in memory.
pub(super) const OPENING: &[c_long] = &[
    // Whether a time service keeps the clock.
    libc::SYS_clock_adjtime,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fchmod,
    libc::SYS_mkdir,
    libc::SYS_renameat2,
    libc::SYS_sysinfo,
];

/// The calls for control sockets, which also pass descriptors, and for NBD clients.
pub(super) const CONTROL: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
];

/// The calls for vhost-user front-ends: descriptors in messages, memory shared with front-ends, and
/// signals that do not block.
pub(super) const VHOST_USER: &[c_long] = &[
    libc::SYS_dup,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_memfd_create,
    libc::SYS_sendmsg,
];

/// Further calls for the sockets of disks that are added later. `socket` is allowed too, for Unix
/// stream sockets only.
pub(super) const VHOST_USER_OPENING: &[c_long] = &[
    libc::SYS_bind,
    libc::SYS_fchmodat,
    libc::SYS_listen,
    libc::SYS_unlinkat,
];

/// The calls for the kernel's SCSI target: to add and remove LUNs in configfs.
pub(super) const TCMU: &[c_long] = &[libc::SYS_rmdir, libc::SYS_symlink];

/// The calls of a client of servers on the network: to look up names, and to connect. `socket` is
/// allowed too, for streams, datagrams and the list of the machine's addresses.
pub(super) const CLIENT: &[c_long] = &[
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_setsockopt,
    libc::SYS_socketpair,
    libc::SYS_uname,
];

/// The calls that make and remove files and directories, for an archive in a directory and for
/// what is restored.
pub(super) const FILES: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fchmod,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_mkdir,
    libc::SYS_readlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_rmdir,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
];

/// The calls for event loops.
pub(super) const EPOLL: &[c_long] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
];

/// Further calls for a VM's process: to duplicate doorbells, set stricter filters for some threads,
/// and remove the demo's directory.
pub(super) const VM: &[c_long] = &[libc::SYS_dup, libc::SYS_seccomp, libc::SYS_unlinkat];

/// The calls for a vCPU, which runs the guest, rings doorbells and prints. It neither opens nor
/// syncs files, and maps anonymous memory only.
pub(super) const VCPU: &[c_long] = &[
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_eventfd2,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Further calls for a disk's queue worker and the thread that starts it: to punch holes in a raw
/// image where io_uring is missing.
pub(super) const DISK_WORKER: &[c_long] = &[libc::SYS_dup, libc::SYS_fallocate];

/// Requests that raise the interrupts of a device whose disk has `ioeventfd=off`.
pub(super) const INTERRUPT_IOCTL: &[c_ulong] = &[
    0x4008_ae61, // KVM_IRQ_LINE
    0x4020_aea5, // KVM_SIGNAL_MSI
];

/// Requests for terminals and sockets: to set non-blocking mode, and to ask whether a file is a
/// terminal and how wide it is.
pub(super) const IOCTL: &[c_ulong] = &[libc::FIONBIO, libc::TCGETS, libc::TIOCGWINSZ];

/// Requests that set the modes of the terminal that is the guest's console.
pub(super) const TERMINAL_IOCTL: &[c_ulong] = &[
    libc::TCSETS,
    libc::TCSETSW,
    libc::TCSETSF,
    libc::TCGETS2,
    libc::TCSETS2,
    libc::TCSETSW2,
    libc::TCSETSF2,
];

/// Requests of a running VM to KVM (linux/kvm.h).
pub(super) const KVM_IOCTL: &[c_ulong] = &[
    0xae03,      // KVM_CHECK_EXTENSION
    0xae80,      // KVM_RUN
    0xaead,      // KVM_KVMCLOCK_CTRL
    0x4008_ae61, // KVM_IRQ_LINE
    0x4008_ae6a, // KVM_SET_GSI_ROUTING
    0x4020_ae76, // KVM_IRQFD
    0x4020_aea5, // KVM_SIGNAL_MSI
    0x4040_ae79, // KVM_IOEVENTFD
    0x8090_ae81, // KVM_GET_REGS, for crash reports
    0x8138_ae83, // KVM_GET_SREGS
    0xc018_ae85, // KVM_TRANSLATE
];

/// What building another VM takes, beside what running one takes.
pub(super) const BUILDING: &[c_long] = &[libc::SYS_signalfd4];

/// See [`BUILDING`].
pub(super) const BUILDING_IOCTL: &[c_ulong] = &[
    0xae00,      // KVM_GET_API_VERSION
    0xae01,      // KVM_CREATE_VM
    0xae04,      // KVM_GET_VCPU_MMAP_SIZE
    0xae41,      // KVM_CREATE_VCPU
    0xae47,      // KVM_SET_TSS_ADDR
    0xae60,      // KVM_CREATE_IRQCHIP
    0x4008_ae48, // KVM_SET_IDENTITY_MAP_ADDR
    0x4008_ae89, // KVM_SET_MSRS
    0x4008_ae90, // KVM_SET_CPUID2
    0x4020_ae46, // KVM_SET_USER_MEMORY_REGION
    0x4040_ae77, // KVM_CREATE_PIT2
    0x4090_ae82, // KVM_SET_REGS
    0x4138_ae84, // KVM_SET_SREGS
    0x4400_ae8f, // KVM_SET_LAPIC
    0x8400_ae8e, // KVM_GET_LAPIC
    0xc008_ae05, // KVM_GET_SUPPORTED_CPUID
];
