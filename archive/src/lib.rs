#![doc = include_str!("../README.md")]
//!
//! The terms are those of `docs/glossary.md` in the repository.
//!
//! # Where things are
//!
//! ```text
//!   Uploader ── log pieces, roots, chunks of images ──▶ Remote ──▶ an object store
//!   restore, verify, Survey  ◀── parts, manifests, chunks ──┘
//! ```
//! `remote` speaks with the store, `object` and `layout` are the format (see `FORMAT.md`), `epoch`
//! keeps it to one writer, `uploader` and `base` fill it, `line` finds a way through it, `restore`
//! brings a log back, `serving` does so while the disks are in use already, `follow` keeps a copy
//! of it up to date, `expire` removes what is too old.

mod base;
mod epoch;
mod error;
mod expire;
mod follow;
mod layout;
mod lineage;
mod object;
mod remote;
mod restore;
mod serving;
mod survey;
#[cfg(test)]
mod tests;
mod uploader;
mod url;

pub use base::{BaseProgress, CHUNK_BYTES};
pub use error::{Error, ErrorKind, Result};
pub use expire::{ExpireOptions, ExpireReport, expire};
pub use follow::{Promotion, Replica, ReplicaState};
pub use remote::{Archive, Traffic};
pub use restore::{RestoreReport, RestoredDisk, restore, verify};
pub use serving::serve;
pub use survey::{ArchiveBase, ArchiveEnd, Survey, survey};
pub use uploader::{BUSY_CHECK, IDLE_CHECK, Tick, UploadOptions, Uploader};
pub use url::ArchiveUrl;
