//! What a command has to do, once it is judged: a few steps on blocks.

use crate::latency::OperationKind;

/// Blocks that follow each other, all of them on the disk when the command was judged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Range {
    pub(super) lba: u64,
    pub(super) blocks: u32,
}

/// A step of a job.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
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

/// What is done with blocks that were read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Then {
    /// They go to the Data-In Buffer, as much as fits.
    Return,
    /// They were readable, and that was the question.
    Forget,
    /// They are to be what the Data-Out Buffer begins with.
    Compare,
    /// Each is to be the one block in the Data-Out Buffer.
    CompareEach,
}

/// Who may change blocks while a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It changes none.
    None,
    /// Anyone.
    Shared,
    /// Nobody: what it reads it goes by.
    Alone,
}

/// What a command has to do.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) kind: Option<OperationKind>,
    pub(super) range: Range,
    pub(super) list: Vec<Range>,
    pub(super) script: [Option<Action>; 3],
    pub(super) change: Change,
}

impl Job {
    /// `script` on `range`.
    pub(super) fn new(kind: OperationKind, range: Range, script: [Option<Action>; 3]) -> Self {
        Self {
            kind: Some(kind),
            range,
            list: Vec::new(),
            script,
            change: Change::None,
        }
    }

    /// Nothing more than what was done when the command was judged.
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
