//! Reading a log when it is opened: where it ends, what is damaged, and what it holds of each disk.

pub(crate) mod batch;
pub(crate) mod contents;
pub(crate) mod live;
pub(crate) mod replay;
pub(crate) mod scan;
pub(crate) mod window;
