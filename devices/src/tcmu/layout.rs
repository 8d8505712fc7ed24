//! What lies where in the shared memory (linux/target_core_user.h), for 64-bit kernels. Numbers are in the machine's own
//! byte order: both sides run on it.
//!
//! ```text
//!   0             ring_offset                      ring_offset + ring_size              the end of the mapping
//!   ├─ mailbox ─┬─┤ entry │ entry │ … │ PAD        ├─ data area: blocks of pages, named by iovecs ─┤
//! ```
//! Offsets below count from the start of the mailbox or of an entry. An entry's length is a multiple of 8, and an entry
//! never wraps: what is left at the ring's end is a PAD. `cmd_head` and `cmd_tail` count from the start of the ring and are
//! less than its size; equal means empty.

/// The mailbox: once, at the start of the memory.
pub(super) mod mailbox {
    /// u16: 2.
    pub(crate) const VERSION: usize = 0;
    /// u16: what the kernel can do, see [`super::flag`].
    pub(crate) const FLAGS: usize = 2;
    /// u32: where the ring begins, in bytes from the mailbox.
    pub(crate) const RING_OFFSET: usize = 4;
    /// u32: length of the ring in bytes; the data area follows it.
    pub(crate) const RING_SIZE: usize = 8;
    /// u32, the kernel's: behind the last entry that it has made.
    pub(crate) const HEAD: usize = 12;
    /// u32, ours, on a cache line of its own: behind the last entry that is done with.
    pub(crate) const TAIL: usize = 64;
    /// Length of the mailbox in bytes.
    pub(crate) const LEN: usize = 128;
    /// The version that is described here.
    pub(crate) const KNOWN_VERSION: u16 = 2;
}

/// Of the mailbox's flags.
pub(super) mod flag {
    /// Commands may be answered in any order: a response names its command.
    pub(crate) const OUT_OF_ORDER: u16 = 1 << 0;
    /// A response may say how many bytes were read.
    pub(crate) const READ_LENGTH: u16 = 1 << 1;
    /// The kernel tells of aborts and resets, if it is asked to (`tmr_notification`).
    #[cfg(any(test, fuzzing))]
    pub(crate) const TASK_MANAGEMENT: u16 = 1 << 2;
    /// A response may keep its data blocks until later. Not used: data is copied before the backend gets it.
    #[cfg(any(test, fuzzing))]
    pub(crate) const KEEP_BUFFER: u16 = 1 << 3;
}

/// Every entry begins so.
pub(super) mod header {
    /// u32: the length of the entry in bytes, with what it is in the low three bits.
    pub(crate) const LEN_OP: usize = 0;
    /// u16: the command's number, from 1. In a response, the number of the command that has ended.
    pub(crate) const ID: usize = 4;
    /// u8, ours: see [`super::response`]. At 6 are the kernel's flags, of which there is none.
    pub(crate) const OUR_FLAGS: usize = 7;
    /// Length of the header.
    pub(crate) const LEN: usize = 8;
    /// The bits of LEN_OP that say what the entry is.
    pub(crate) const OP: u32 = 7;

    /// Nothing: the rest of the ring.
    pub(crate) const PAD: u32 = 0;
    /// A SCSI command.
    pub(crate) const COMMAND: u32 = 1;
    /// A task management function that the kernel has carried out.
    pub(crate) const TASK_MANAGEMENT: u32 = 2;
}

/// A COMMAND as the kernel makes it.
pub(super) mod request {
    /// u32: iovecs of the data, whichever its direction.
    pub(crate) const IOVECS: usize = 8;
    /// u32: iovecs behind those, for what a bidirectional command reads.
    pub(crate) const BIDI_IOVECS: usize = 12;
    // At 16 u32, for protection information: always 0. At 20 padding.
    /// u64: where the CDB is, in bytes from the mailbox; it lies in the same entry.
    pub(crate) const CDB: usize = 24;
    // At 32 and 40 u64, unused.
    /// The first iovec: two u64, offset from the mailbox and length in bytes.
    pub(crate) const FIRST_IOVEC: usize = 48;
    /// Length of an iovec.
    pub(crate) const IOVEC_LEN: usize = 16;
}

/// What takes the place of a request when it, or another, has ended: CDB and iovecs have to be copied before that.
pub(super) mod response {
    /// u8: the SCSI status. At 9 three bytes, unused.
    pub(crate) const STATUS: usize = 8;
    /// u32: bytes that were read, if [`READ_LENGTH`] says so; 0 is taken for all.
    pub(crate) const READ_LEN: usize = 12;
    /// Sense data, where the status is CHECK CONDITION.
    pub(crate) const SENSE: usize = 16;
    /// Room for sense data.
    pub(crate) const SENSE_LEN: usize = 96;
    /// Shortest COMMAND: a response fits.
    pub(crate) const LEN: usize = SENSE + SENSE_LEN;

    /// Of our flags: the entry is of no kind that is known.
    pub(crate) const UNKNOWN_OP: u8 = 1 << 0;
    /// Of our flags: READ_LEN holds.
    pub(crate) const READ_LENGTH: u8 = 1 << 1;
}

/// A TASK_MANAGEMENT entry. It wants no response.
pub(super) mod task_management {
    /// u8: which function.
    pub(crate) const KIND: usize = 8;
    /// u32: commands that it has aborted.
    pub(crate) const COUNT: usize = 12;
    // At 16 and 24 u64, unused.
    /// Their numbers, u16 each.
    pub(crate) const FIRST_ID: usize = 32;
}
