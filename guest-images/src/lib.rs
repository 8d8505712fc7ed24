//! Builds images of Linux guests from distribution packages, and runs jobs with them on a machine
//! whose KVM can run Linux: this one, or one that QEMU emulates. The crate chooses the machine, and
//! prints which.
//!
//! ```text
//!   apt-get download ──▶ GuestImages (cache, checksummed) ─┐
//!                                                          ▼
//!   GuestJob: a shell script + the walvisor binary ──▶ GuestJob::run ──▶ Machine::Direct: sh run.sh
//!                                                     │        Machine::Nested: QEMU ▶ kvm_amd ▶ sh run.sh
//!                                                     ▼
//!                                              JobOutcome: exit status, console, result files
//! ```
//!
//! From the command line:
//!
//! ```text
//! cargo run -p walvisor-guest-images -- boot disk.img              a guest of your own: a raw image with an ext4 root
//! cargo run -p walvisor-guest-images -- build                      images only; prints their directory
//! cargo run -p walvisor-guest-images -- run job.sh [FILE ...]      runs job.sh; FILEs are found in $JOB
//!                                          [--walvisor PATH]       (default: beside this program, or built with cargo)
//!                                          [--results DIR]         copies $RESULTS there
//! cargo run -p walvisor-guest-images -- user-mode script.sh        user-mode Linux, near native: streams its console
//!                                          [--disk SOCKET]         a vhost-user disk, as /dev/vda, /dev/vdb, ...
//!                                          [--module NAME]         loaded before the script runs
//!                                          [--files-of-this-machine]   read-only, in place of busybox and fio in memory
//! cargo run -p walvisor-guest-images -- emulated script.sh         a Debian guest emulated by QEMU: streams its console
//!                                          [-- QEMU ARGUMENTS]     its disks, for instance
//! cargo run -p walvisor-guest-images -- demo                       what `make demo` runs
//! ```
//!
//! A job boots a guest like this (the top of `scripts/run.sh` describes everything that a job may
//! use):
//!
//! ```sh
//! walvisor disk create a.img --size 64M
//! guest_initrd initrd "$JOB/guest.sh" fio          # an initramfs that runs guest.sh, with fio in it
//! run_guest first 120 --kernel "$IMAGES/vmlinux" --initrd initrd --cmdline "console=ttyS0 quiet panic=-1 reboot=t" \
//!     --disk path=a.img,transport=mmio --metrics "$RESULTS/metrics.json"
//! ```
//!
//! The script guest.sh is, for instance,
//! `mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && fio ... && umount /mnt`. The guest then powers
//! off, or reboots if `guest.end=reboot` is on its command line. With `root=/dev/vda` and a copy of
//! `$IMAGES/root.ext4` as the first disk, the same script runs on that root file system.
//!
//! In Rust: `GuestJob::new(script, walvisor_binary(..)?).file("guest.sh", text).run(&cache, &reporter)`.
//! [`GuestJob::run_all`] runs several on one machine.

mod boot;
mod cache;
mod demo;
mod error;
pub mod guest;
mod images;
mod job;
mod kernel;
mod keyboard;
mod machine;
mod metrics;
mod nested;
mod packages;
mod process;
mod program;
mod reporter;
mod scratch;
mod session;
pub mod stop;
mod userland;

pub use boot::OwnGuest;
pub use cache::Cache;
pub use demo::demo;
pub use error::{Error, Result};
pub use guest::{CableEnd, Guest, Libvirt, NewestUserMode, UserMode};
pub use images::{GuestImages, NewerKernel};
pub use job::{GuestJob, JobOutcome};
pub use machine::Machine;
pub use metrics::Metrics;
pub use packages::{install_missing, obstacle};
pub use process::leash;
pub use program::{program, sibling_or_built, walvisor_binary, without_cargo};
pub use reporter::Reporter;
