//! `walvisor-bench`, and the parts that its benchmarks share.
//!
//! ```text
//!   main ─▶ cli ─▶ commit    group commit on a disk's log: the experiments of its sources
//!                  notify    one disk through every path: what a notification and a flush cost
//!                  database  MariaDB, PostgreSQL and SQLite, which wait for the disk at each commit
//!                  peers     the disk compared with those of others: the same client and file system
//!                  neighbours a disk's commits beside clients that take all they can get
//!                  tcmu      TCMU against NBD in Linux kernels
//!                  sustained the disk over minutes: each second's rate, the longest wait, the time to close
//!                  drbd      the disk on a block device that DRBD copies to a second machine, and a failover
//!                  store     the store without a guest, compared with a raw file
//! ```
//! All but the last declare a `Matrix` (matrix.rs): rows, the sides that take turns in each, so that all see the machine in the same
//! states, and the columns of a table. The result is a [`report::Report`], as tables, as JSON, as a page with plots, or as plots
//! alone. A new comparison is a new plan of a side, what a side does in a turn, and its columns.
//!
//! `walvisor` and `walvisor-guest-images` run in processes of their own: `programs.rs` finds these programs.

mod bench;
mod blocks;
pub mod cli;
mod commit;
mod console;
mod daemon;
mod database;
mod drbd;
mod exits;
mod guests;
mod linux;
mod load;
mod neighbours;
mod notify;
mod output;
mod peers;
mod place;
mod programs;
pub mod report;
mod session;
mod store;
mod sustained;
mod tcmu;
pub mod tiny_guest;
