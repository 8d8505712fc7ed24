//! A disk at a moment, copied into a file: import, export, restore, clone.

pub(crate) mod clone;
pub(crate) mod fetcher;
pub(crate) mod live_export;
pub(crate) mod transfer;
pub(crate) mod yielding_look;
