//! `walvisor-bench`, and the parts that its benchmarks share.
//!
//! ```text
//!   main ─▶ cli ─▶ commit    group commit on a disk's log: the experiments of its sources
//!                  notify    one disk through every path: what a notification and a flush cost
//!                  database  MariaDB, PostgreSQL, SQLite and etcd, whose commits wait for the disk
//!                  peers     the disk compared with those of others: the same client and file system
//!                  neighbours a disk's commits beside clients that take all they can get
//!                  fsync     what each way to have a disk does with a FLUSH
//!                  archive   commits with the log in a second place, and that wait for it
//!                  tcmu      TCMU against NBD in Linux kernels
//!                  sustained the disk over minutes: each second's rate, the longest wait, the time to close
//!                  drbd      the disk on a block device that DRBD copies to a second machine, and a failover
//!                  start     a guest, with a disk and without: time and memory
//!                  store     the store without a guest, compared with a raw file
//! ```
//! A file in `matrices/` says what each measures: the rows, the sides that take turns in each, so
//! that all see the machine in the same states, the columns of the table and the plots. `bench/` is
//! the runner of all of them; what is left of a benchmark is what a side does in a turn. The result
//! is a `report::Report`, as tables, as JSON, as a page with plots, or as plots alone.
//!
//! `walvisor` and `walvisor-guest-images` run in processes of their own: `programs.rs` finds these
//! programs.

mod archive;
mod bench;
mod bench_dirs;
mod blocks;
pub mod cli;
mod commit;
mod console;
mod daemon;
mod database;
mod drbd;
mod exits;
mod fsync;
mod guests;
mod linux;
mod load;
mod neighbours;
mod notify;
mod output;
mod peers;
mod programs;
mod report;
mod serve;
mod session;
mod start;
mod store;
mod sustained;
mod tcmu;
mod tiny_guest;
mod volume;
