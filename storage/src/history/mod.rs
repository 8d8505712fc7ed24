//! The history of a log's disks, from the base images, which hold the horizon, to the newest
//! record.
//!
//! ```text
//!   saved files        base images          log
//!   snapshots ·  ·  ·  horizon ───────────▶ any commit ─────────────▶ newest
//!                      └─ the keeper moves it: fold, checkpoint, close
//! ```
//! The keeper decides how far the base images follow the newest record, and what has to be saved
//! first. A look shows a disk as of any point that is left. All of it rests on four things that the
//! layers below do: append a record, wait until it is durable, read at a place (`log/reads.rs`),
//! and hold what must stay (`log/holds.rs`).

pub(crate) mod changed;
mod fold;
pub(crate) mod horizon;
pub(crate) mod keeper;
pub(crate) mod look;
mod machine;
pub(crate) mod point;
pub(crate) mod rewind;
pub(crate) mod rewind_plan;
pub(crate) mod saved;
pub(crate) mod saved_file;
mod saving;
pub(crate) mod scratch;
mod spill;
mod troubles;
