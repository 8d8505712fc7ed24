//! `walvisor serve vhost-user` under Linux guests of other monitors: QEMU in full emulation, alone
//! and under libvirt, and what only takes long under user-mode Linux.

mod largest;
mod libvirt;
mod log_shared;
mod qemu;
mod scsi;

use std::path::Path;

use walvisor_guest_images::UserMode;
use walvisor_tests::{serve, succeed};

/// User-mode Linux with the disk at `socket` as /dev/vda.
fn user_mode(socket: &Path) -> UserMode {
    UserMode {
        disks: vec![socket.to_owned()],
        ..UserMode::default()
    }
}
