//! The store from outside: its promises, tested on files that a crash, simulated by copying them,
//! leaves behind. One program, for each one takes a second to link.

mod bench;
mod checkpoint;
mod clones;
mod close;
mod commits;
mod damage;
mod evidence;
mod examples;
mod exports;
mod identity;
mod killed;
mod log_size;
mod marks;
mod members;
mod memory;
mod past;
mod replica;
mod retain;
mod rewinds;
mod sharing;
mod snapshots;
mod space;
#[path = "../support/mod.rs"]
mod support;
mod unpolled;
