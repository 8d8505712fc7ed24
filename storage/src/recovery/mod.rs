//! A log that was left is read: where it ends, what is damaged, what each disk has in it.

pub(crate) mod replay;
pub(crate) mod scan;
pub(crate) mod window;
