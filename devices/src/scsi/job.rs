//! The work of a command that has been checked: a few steps on blocks.

use crate::latency::OperationKind;

/// Consecutive blocks, all of them on the disk when the command was checked.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Range {
    pub(super) lba: u64,
    pub(super) blocks: u32,
}

/// A step of a job.
#[derive(Clone, Copy, Debug)]
pub(super) enum ScsiAction {
    Flush,
    /// Read the range.
    Read(Then),
    /// Write the range from the Data-Out Buffer, beginning at this byte of it.
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
}

/// How blocks that were read are used.
#[derive(Clone, Copy, Debug)]
pub(super) enum Then {
    /// Copy them to the Data-In Buffer, as much as fits.
    Return,
    /// Drop them: the command only checks that they are readable.
    Forget,
    /// Compare them with the start of the Data-Out Buffer.
    Compare,
    /// Compare each of them with the one block in the Data-Out Buffer.
    CompareEach,
}

/// Whether other commands may change a job's blocks while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The job changes no blocks.
    None,
    /// Other commands may change the blocks too.
    Shared,
    /// No other command may: the job relies on what it has read or written.
    Alone,
}

/// The work of a command.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) kind: Option<OperationKind>,
    pub(super) range: Range,
    pub(super) list: Vec<Range>,
    pub(super) script: [Option<ScsiAction>; 3],
    pub(super) change: Change,
}

impl Job {
    /// A job that runs `script` on `range`.
    pub(super) fn new(kind: OperationKind, range: Range, script: [Option<ScsiAction>; 3]) -> Self {
        Self {
            kind: Some(kind),
            range,
            list: Vec::new(),
            script,
            change: Change::None,
        }
    }

    /// A job without steps: checking the command has done all its work.
    pub(super) fn nothing() -> Self {
        Self {
            kind: None,
            ..Self::new(OperationKind::Flush, Range::default(), [None; 3])
        }
    }

    pub(super) fn changing(mut self, change: Change) -> Self {
        self.change = change;
        self
    }
}
