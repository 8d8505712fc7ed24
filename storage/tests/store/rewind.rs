//! Disks that are restored in place: what they are then, what can be undone, and when it can't be
//! any more.

mod bench;
mod copying;
mod damage;
mod in_use;
mod leaving;
mod points;
mod told;
