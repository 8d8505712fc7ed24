//! `walvisor serve vhost-user` under Linux guests of other monitors: QEMU in full emulation, alone
//! and under libvirt.

mod libvirt;
mod qemu;
mod scsi;

use walvisor_tests::{serve, succeed};
