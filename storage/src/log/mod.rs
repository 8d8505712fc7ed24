//! The log in use: records are appended, written in groups and synced, and their waiters get
//! completions.

pub(crate) mod admission;
pub(crate) mod clock;
pub(crate) mod commit;
pub(crate) mod commit_delay;
pub(crate) mod counters;
pub(crate) mod disk_state;
pub(crate) mod file_thread;
pub(crate) mod group_commit;
pub(crate) mod holds;
pub(crate) mod image;
pub(crate) mod orders;
pub(crate) mod pipeline;
pub(crate) mod reads;
pub(crate) mod replica;
pub(crate) mod ring;
pub(crate) mod room;
pub(crate) mod sharing;
pub(crate) mod spill;
pub(crate) mod state;
pub(crate) mod tail;
pub(crate) mod waiters;
