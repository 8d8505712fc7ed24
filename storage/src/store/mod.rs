//! Opening and closing, and all that is done to disks and logs that nobody uses.

pub(crate) mod attach;
pub(crate) mod create;
pub(crate) mod discard;
pub(crate) mod dump;
pub(crate) mod image;
pub(crate) mod inspect;
pub(crate) mod open;
pub(crate) mod part;
pub(crate) mod resize;
pub(crate) mod transfer;
pub(crate) mod view;
