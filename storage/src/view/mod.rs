//! A disk at a moment of its history, from the base images, which hold the horizon, to the newest
//! record.
//!
//! ```text
//!   saved files        base images          log
//!   snapshots ·  ·  ·  horizon ───────────▶ any commit ─────────────▶ newest
//!                      └─ the keeper moves it: fold, checkpoint, close
//! ```
//! A look shows a disk as of any point that is left. It rests on two things that the layers below
//! do: read at a place (`log/reads.rs`), and hold what must stay (`log/holds.rs`).

pub(crate) mod changed;
pub(crate) mod horizon;
pub(crate) mod look;
pub(crate) mod point;
pub(crate) mod rewind_plan;
pub(crate) mod saved;
pub(crate) mod scratch;
