//! Checkpoints: copying the log to the base images, so that its segments become free.

mod closing;
pub(crate) mod copy;
mod fold;
pub(crate) mod keeper;
pub(crate) mod members;
mod orders;
pub(crate) mod pace;
mod preallocate;
pub(crate) mod readahead;
mod rewind;
mod runs;
pub(crate) mod saved_file;
mod saving;
mod troubles;
