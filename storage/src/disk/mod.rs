//! A disk in use: ports carry out requests.

pub(crate) mod handle;
pub(crate) mod port;
