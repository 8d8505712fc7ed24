//! The work of a checked command: a few actions on blocks.

use crate::latency::OperationKind;

/// Consecutive blocks. All of them were on the disk when the command was checked.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockRange {
    pub(super) lba: u64,
    pub(super) blocks: u32,
}

/// An action of a job.
#[derive(Clone, Copy, Debug)]
pub(super) enum ScsiAction {
    Flush,
    /// Read the range.
    Read(AfterRead),
    /// Write the range from the Data-Out Buffer, starting at this byte of the buffer.
    Write {
        from: usize,
    },
    /// Write the block in the Data-Out Buffer to every block of the range.
    Fill,
    /// Make the range read as zeroes.
    Zero {
        unmap: bool,
    },
    /// Discard every range of the list.
    Unmap,
    /// Return which blocks from the start of the range on are mapped, as at most `most`
    /// descriptors, truncated to the allocation length.
    LookUp {
        most: usize,
        allocation: usize,
    },
}

/// What to do with blocks that were read.
#[derive(Clone, Copy, Debug)]
pub(super) enum AfterRead {
    /// Copy them to the Data-In Buffer, as much as fits.
    Return,
    /// Drop them: the command only checks that they can be read.
    Forget,
    /// Compare them with the start of the Data-Out Buffer.
    Compare,
    /// Compare each of them with the one block in the Data-Out Buffer.
    CompareEach,
}

/// How a job shares its blocks with other commands while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockAccess {
    /// It changes no blocks.
    ReadOnly,
    /// Other commands may change them too.
    Shared,
    /// No other command may change them: the job relies on what it has read or written, or is
    /// atomic.
    Exclusive,
}

/// The work of a command.
#[derive(Debug)]
pub(super) struct CommandWork {
    pub(super) kind: Option<OperationKind>,
    pub(super) range: BlockRange,
    pub(super) list: Vec<BlockRange>,
    pub(super) actions: [Option<ScsiAction>; 3],
    pub(super) access: BlockAccess,
}

impl CommandWork {
    /// A job that runs `actions` on `range`, one after the other.
    pub(super) fn new(
        kind: OperationKind,
        range: BlockRange,
        actions: [Option<ScsiAction>; 3],
    ) -> Self {
        Self {
            kind: Some(kind),
            range,
            list: Vec::new(),
            actions,
            access: BlockAccess::ReadOnly,
        }
    }

    /// A job without actions: checking the command has done all its work.
    pub(super) fn without_actions() -> Self {
        Self {
            kind: None,
            ..Self::new(OperationKind::Flush, BlockRange::default(), [None; 3])
        }
    }

    pub(super) fn with_access(mut self, access: BlockAccess) -> Self {
        self.access = access;
        self
    }
}
