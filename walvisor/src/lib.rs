//! The program `walvisor`: its command line, its daemon with any doors, the control socket, the
//! specs of disks, what a process gives up, and the kernel's SCSI target.
//!
//! ```text
//!   main ─▶ cli ─▶ commands ─┬─▶ run ─────▶ Plan ─▶ disks::open ─▶ walvisor_vmm::vm::VmBuilder
//!                            ├─▶ serve ───▶ Plan ─▶ disks::open ─▶ doors: vhost-user, NBD, TCMU (lio), ublk
//!                            └─▶ disk, log, ctl, config, demo
//! ```
//! The terms are those of `docs/glossary.md` in the repository.

pub mod archiving;
mod child;
pub mod cli;
pub mod commands;
pub mod control_socket;
pub mod demo;
mod descriptors;
pub mod disk;
pub mod disk_spec;
pub mod disks;
pub mod landlock;
pub mod lio;
pub mod machine_memory;
pub mod memory_limit;
pub mod metrics;
pub mod metrics_server;
pub mod net_spec;
pub mod network;
pub mod plan;
pub mod point;
pub mod privileges;
pub mod processor_time;
pub mod progress;
mod repeats;
pub mod size;
pub mod table;
