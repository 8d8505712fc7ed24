//! `walvisor serve vhost-user` under Linux guests of other monitors: QEMU in full emulation, alone
//! and under libvirt, and what only takes long under user-mode Linux.

mod largest;
mod libvirt;
mod log_shared;
mod qemu;
mod scsi;

use walvisor_tests::{serve, succeed, user_mode};
