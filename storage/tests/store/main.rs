//! The store from outside: its promises, tested on files that a crash, simulated by copying them,
//! leaves behind. One program, for each one takes a second to link.

mod changes;
mod checkpoint;
mod close;
mod commits;
mod damage;
mod evidence;
mod examples;
mod exports;
mod history;
mod identity;
mod killed;
mod log_size;
mod looks;
mod marks;
mod members;
mod memory;
mod progress;
mod replica;
mod retain;
mod rewind;
mod rot;
mod saved;
mod sharing;
mod space;
mod summaries;
#[path = "../support/mod.rs"]
mod support;
mod unpolled;
