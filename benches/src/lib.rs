//! What measures: `walvisor-bench`, and what its benchmarks share.
//!
//! ```text
//!   main ─▶ cli ─▶ commit    group commit on a disk's log: the experiments of its sources
//!                  notify    one disk through every path: what a notification and a flush cost
//!                  database  MariaDB and SQLite, which wait for the disk at each commit
//!                  peers     the disk beside those of others: the same client and file system
//!                  tcmu      TCMU against NBD in Linux kernels
//!                  store     the store alone, with no guest, beside a raw file
//! ```
//! The first five give a [`report::Report`]: printed as tables, as JSON, as a page with plots, and as plots alone. What is
//! compared takes turns, so that all see the machine in the same moods.
//!
//! What runs in processes of its own is `walvisor` and `walvisor-guest-images`: `programs.rs` finds them.

pub mod cli;
mod commit;
mod daemon;
mod database;
mod guests;
mod linux;
mod load;
mod notify;
mod output;
mod peers;
mod programs;
pub mod report;
mod session;
mod store;
mod tcmu;
pub mod tiny_guest;
