//! The layout of the shared memory (linux/target_core_user.h), for 64-bit kernels. Numbers are in
//! the machine's own byte order, since both sides run on the same machine.
//!
//! ```text
//!   0             ring_offset                      ring_offset + ring_size              the end of the mapping
//!   ├─ mailbox ─┬─┤ entry │ entry │ … │ PAD        ├─ data area: blocks of pages, named by iovecs ─┤
//! ```
//! Offsets below count from the start of the mailbox or of an entry. An entry's length is a
//! multiple of 8. An entry never wraps: a PAD fills the ring's end when the next entry does not fit
//! there. `cmd_head` and `cmd_tail` count from the start of the ring and are less than its size; if
//! they are equal, the ring is empty.

/// The mailbox, at the start of the memory.
pub(super) mod mailbox {
    /// u16: 2.
    pub(crate) const VERSION: usize = 0;
    /// u16: the kernel's capabilities, see [`super::flag`].
    pub(crate) const FLAGS: usize = 2;
    /// u32: the start of the ring, in bytes from the mailbox.
    pub(crate) const RING_OFFSET: usize = 4;
    /// u32: length of the ring in bytes; the data area follows it.
    pub(crate) const RING_SIZE: usize = 8;
    /// u32, written by the kernel: the end of the last entry that it has queued.
    pub(crate) const HEAD: usize = 12;
    /// u32, written by this process, on a cache line of its own: the end of the last entry given
    /// back to the kernel.
    pub(crate) const TAIL: usize = 64;
    /// Length of the mailbox in bytes.
    pub(crate) const LEN: usize = 128;
    /// The version described here.
    pub(crate) const KNOWN_VERSION: u16 = 2;
}

/// The mailbox's flags.
pub(super) mod flag {
    /// Commands may be answered in any order, because a response names its command.
    pub(crate) const OUT_OF_ORDER: u16 = 1 << 0;
    /// A response may say how many bytes were read.
    pub(crate) const READ_LENGTH: u16 = 1 << 1;
}

/// The header of every entry.
pub(super) mod header {
    /// u32: the length of the entry in bytes, with the kind of entry in the low three bits.
    pub(crate) const LEN_OP: usize = 0;
    /// u16: the command's number, from 1. In a response, the number of the command that has ended.
    pub(crate) const ID: usize = 4;
    /// u8, written by this process: see [`super::response`]. At 6 are the kernel's flags; none is
    /// defined.
    pub(crate) const OUR_FLAGS: usize = 7;
    /// Length of the header.
    pub(crate) const LEN: usize = 8;
    /// The bits of LEN_OP that hold the kind of entry.
    pub(crate) const OP: u32 = 7;

    /// Padding up to the end of the ring.
    pub(crate) const PAD: u32 = 0;
    /// A SCSI command.
    pub(crate) const COMMAND: u32 = 1;
    /// A report of a task management function that the kernel has carried out.
    pub(crate) const TASK_MANAGEMENT: u32 = 2;
}

/// A COMMAND entry as the kernel writes it.
pub(super) mod request {
    /// u32: number of iovecs of the data, in either direction.
    pub(crate) const IOVECS: usize = 8;
    /// u32: number of iovecs after those, for the data that a bidirectional command reads.
    pub(crate) const BIDI_IOVECS: usize = 12;
    // At 16 a u32 for protection information: always 0. At 20 padding.
    /// u64: the place of the CDB, in bytes from the mailbox; the CDB lies in the same entry.
    pub(crate) const CDB: usize = 24;
    // At 32 and 40 u64, unused.
    /// The first iovec: two u64, offset from the mailbox and length in bytes.
    pub(crate) const FIRST_IOVEC: usize = 48;
    /// Length of an iovec.
    pub(crate) const IOVEC_LEN: usize = 16;
}

/// A response. It overwrites a request, not necessarily its own, so the worker copies CDBs and
/// iovecs first.
pub(super) mod response {
    /// u8: the SCSI status. At 9 three bytes, unused.
    pub(crate) const STATUS: usize = 8;
    /// u32: bytes that were read, valid with [`READ_LENGTH`]; the kernel takes 0 as "all of them".
    pub(crate) const READ_LEN: usize = 12;
    /// Sense data, if the status is CHECK CONDITION.
    pub(crate) const SENSE: usize = 16;
    /// The most bytes of sense data.
    pub(crate) const SENSE_LEN: usize = 96;
    /// The shortest COMMAND entry: a response fits in it.
    pub(crate) const LEN: usize = SENSE + SENSE_LEN;

    /// A bit of OUR_FLAGS: this process does not know the kind of entry.
    pub(crate) const UNKNOWN_OP: u8 = 1 << 0;
    /// A bit of OUR_FLAGS: READ_LEN is valid.
    pub(crate) const READ_LENGTH: u8 = 1 << 1;
}

/// A TASK_MANAGEMENT entry. It gets no response.
pub(super) mod task_management {
    /// u8: the function.
    pub(crate) const KIND: usize = 8;
    /// u32: number of commands that it has aborted.
    pub(crate) const COUNT: usize = 12;
    // At 16 and 24 u64, unused.
    /// The aborted commands' numbers, u16 each.
    pub(crate) const FIRST_ID: usize = 32;
}
