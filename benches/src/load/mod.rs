//! Closed loops of requests on a disk: their jobs (`point.rs`), the choice of the next request (`loops.rs`), clients
//! over vhost-user and NBD that drive them (`vhost_user.rs`, `nbd.rs`), and their results (`measured.rs`, `sample.rs`).

pub mod loops;
pub mod measured;
pub mod nbd;
pub mod point;
pub mod sample;
pub mod vhost_user;
