//! What the tests of all crates share: drivers, clients, and fixtures.
//!
//! ```text
//!   virtio: BlockDriver ── Ring, guest memory   nbd: handshake, requests, replies, two clients
//!             └─ Registers: mmio, pci, vhost-user (each beside the tests that make such a device)
//!   vhost_user: FrontEnd (any bytes)            queue: requests to a backend without a front-end
//!   vhost_user_client: a third party's driver   process: programs that end with the test
//!   hostile: attacks over NBD and vhost-user, and the client beside them
//!   http: requests to a server                  random, seeds, wait, files, memory_fs, log_lines
//!   s3: a server of objects that fails, or is far away
//! ```
//! What returns no `Result` panics if it fails, and so does a wait that takes longer than
//! [`PATIENCE`]: the test has failed then.
//!
//! It depends on `walvisor-block` only, so that unit tests of the other crates can use it too: with
//! their own types, and not with those of a second copy of the crate.
//!
//! These stay apart, on purpose:
//!
//! * the embedded guest's driver (`guest-images/guest`), because it has no standard library, and
//!   drives real registers;
//! * the fuzz targets' driver (`devices/fuzz`): every byte that it writes comes from the input, and
//!   its memory has guard pages;
//! * [`vhost_user_client`] over the crate `virtio-driver` and
//!   `walvisor/tests/serve/vhost_user/cloud_hypervisor.rs` over the crate `vhost`: their authors
//!   read the specification on their own;
//! * the ring of `walvisor/tests/serve/vhost_user/hostile.rs`, a page in which one request is made
//!   available over and over.

mod files;
pub mod hostile;
pub mod http;
mod log_lines;
mod memory_fs;
pub mod nbd;
pub mod process;
pub mod queue;
mod random;
pub mod s3;
mod seeds;
mod test_dir;
pub mod vhost_user;
pub mod vhost_user_client;
pub mod virtio;
mod wait;

pub use files::{copy_image, copy_log, give, mark};
pub use log_lines::LogLines;
pub use memory_fs::{FrozenFs, MemoryFs, own_mounts, try_unmount, unmount};
pub use process::{Daemon, Process, leash};
pub use random::{Random, noise, pattern};
pub use seeds::Seeds;
pub use test_dir::{TestDir, test_dir};
pub use wait::{PATIENCE, wait_until};
