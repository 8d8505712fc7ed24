//! The write-ahead-logged block store. Knows no virtio and no KVM.

mod buffer;
mod request;

pub use buffer::{BUFFER_ALIGN, Buffer};
pub use request::{Completion, Failure, MAX_REQUEST_BYTES, Operation, SECTOR_SIZE};
