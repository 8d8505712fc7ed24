//! The kernel's SCSI target (LIO) as configfs shows it: back stores of target_core_user, and the
//! fabrics that export them.
//!
//! ```text
//!   /sys/kernel/config/target/
//!     core/user_N/NAME/                                    Backstore: control, enable, attrib/, action/   backstore.rs
//!     loopback|vhost/naa.…/tpgt_1/lun/lun_0/NAME ─▶ there  Export: who sees it                            export.rs
//!   /sys/class/uio/uioM/name = tcm-user/N/NAME/walvisor/…  Uio: the way to its ring                       uio.rs
//!                                                          opened before or by a child process              opener.rs
//!   netlink, family TCM-USER, group config                 Events: what an administrator changes          events.rs
//! ```
//! If a step fails, the steps before it are undone, so nothing half-built stays. Only back stores
//! whose configuration names walvisor are ever changed.

mod backstore;
mod disk;
mod events;
mod export;
mod opener;
mod refusal;
mod target;
mod uio;

pub use backstore::{Backstore, BackstoreSpec};
pub use disk::LioDisk;
pub use events::{Events, TargetChange};
pub use export::TargetExport;
pub use target::{LioTarget, TargetError};
pub use uio::Uio;

#[cfg(test)]
mod tests;
