//! A disk in use: ports carry out requests.

pub(crate) mod allocation;
pub(crate) mod changed;
pub(crate) mod handle;
pub(crate) mod port;
pub(crate) mod reads;
