//! Closed loops of requests on a disk: their jobs (`point.rs`), the choice of the next request (`loops.rs`), a client
//! over vhost-user that drives them (`vhost_user.rs`), and their results (`measured.rs`, `sample.rs`).

pub mod loops;
pub mod measured;
pub mod point;
pub mod sample;
pub mod vhost_user;
