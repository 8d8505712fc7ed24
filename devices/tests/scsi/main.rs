//! The SCSI block device server from the initiator's side: CDBs and data buffers, over a RAM disk,
//! a raw image and a disk with a write-ahead log.

mod driver;

mod atomic;
mod blocks;
mod identity;
mod modes;
mod opcodes;
mod order;
mod provisioning;
mod random;
mod refusals;
