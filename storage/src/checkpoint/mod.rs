//! The log is copied to the base images, and its segments become free.

pub(crate) mod ahead;
pub(crate) mod copy;
pub(crate) mod keeper;
