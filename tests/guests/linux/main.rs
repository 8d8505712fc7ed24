//! Linux guests of `walvisor run`, and daemons under Debian's kernels. Each case is a job; those for
//! one kernel share an emulated machine, which boots once. `WALVISOR_GUESTS=boot,net` runs some only.

mod boot;
mod clock;
mod disks;
mod kill;
mod net;
mod tcmu;
mod ublk;

use walvisor_guest_images::NewerKernel;
use walvisor_tests::{GuestCase, run_cases};

const CASES: [GuestCase; 10] = [
    boot::CASE,
    kill::CASE,
    net::CASE,
    tcmu::VHOST,
    disks::ATOMIC,
    disks::CASE,
    clock::CASE,
    tcmu::ATOMIC,
    ublk::KILLS,
    ublk::RESIZE,
];

#[test]
fn on_the_kernel_of_debian_12() {
    run_cases(&CASES, None);
}

#[test]
fn on_linux_6_12() {
    run_cases(&CASES, Some(NewerKernel::V6_12));
}

#[test]
fn on_the_newest_kernel() {
    run_cases(&CASES, Some(NewerKernel::Newest));
}
