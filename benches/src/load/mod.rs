//! Closed loops of requests on a disk: what they do (`point.rs`), which request comes next (`loops.rs`), a client over vhost-user
//! that drives them (`vhost_user.rs`), and what came out (`measured.rs`, `sample.rs`).

pub mod loops;
pub mod measured;
pub mod point;
pub mod sample;
pub mod vhost_user;
