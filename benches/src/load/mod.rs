//! Closed loops of requests on a disk: the jobs and the choice of the next request (`loops.rs`),
//! and clients over vhost-user and NBD that drive them.

pub mod loops;
pub mod nbd;
pub mod vhost_user;
