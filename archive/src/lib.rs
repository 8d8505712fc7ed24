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
//! keeps it to one writer, `uploader` and `base` fill it, `lineage` finds a way through it,
//! `restore` brings a log back, `fetch` its images, `follow` keeps a copy of it up to date,
//! `expire` removes what is too old.

mod base;
mod epoch;
mod error;
mod expire;
mod fetch;
mod follow;
mod layout;
mod lineage;
mod object;
mod remote;
mod restore;
mod survey;
#[cfg(test)]
mod tests;
mod uploader;
mod url;

pub use base::{BaseProgress, CHUNK_BYTES};
pub use error::{Error, ErrorKind, Result};
pub use expire::{ExpireOptions, ExpireReport, expire};
pub use fetch::{restore, serve};
pub use follow::{Promotion, Replica, ReplicaReport};
pub use remote::{Archive, Traffic};
pub use restore::{RestoreReport, RestoredDisk, verify};
pub use survey::{ArchiveBase, ArchiveEnd, Survey, survey};
pub use uploader::{BUSY_CHECK, IDLE_CHECK, Tick, UploadOptions, Uploader};
pub use url::ArchiveUrl;
