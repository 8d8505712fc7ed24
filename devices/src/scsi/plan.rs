//! How a command is checked: its row in the table, the request that its decoder gets, and the
//! resulting plan.

use super::data::DataBuffer;
use super::job::CommandWork;
use super::sense::Sense;
use super::unit::LogicalUnit;

/// The result of checking a command.
pub(super) enum CommandPlan {
    /// Parameter data, truncated to the allocation length.
    Answer { bytes: Vec<u8>, allocation: usize },
    /// Work for the backend, possibly none.
    Run(CommandWork),
}

/// A command as its decoder gets it: the CDB has its full length, and sets no bit that the command
/// does not use.
pub(super) struct ScsiRequest<'a> {
    pub(super) unit: &'a LogicalUnit,
    pub(super) data: &'a dyn DataBuffer,
    pub(super) cdb: &'a [u8],
    /// The table that the command is in.
    pub(super) table: &'static [CommandEntry],
}

impl ScsiRequest<'_> {
    /// The commands that the unit supports.
    pub(super) fn commands(&self) -> impl Iterator<Item = &'static CommandEntry> {
        let is_supported = |command: &&CommandEntry| command.is_supported(self.unit);
        self.table.iter().filter(is_supported)
    }

    pub(super) fn cdb_len(&self) -> usize {
        self.cdb.len()
    }

    pub(super) fn byte(&self, at: usize) -> u8 {
        self.cdb[at]
    }

    /// Whether any bit of `mask` is set in a byte.
    pub(super) fn bit(&self, at: usize, mask: u8) -> bool {
        self.cdb[at] & mask != 0
    }

    /// `bytes` bytes, at most 8, as a big-endian number.
    pub(super) fn number(&self, at: usize, bytes: usize) -> u64 {
        let number = |number, byte: &u8| number << 8 | u64::from(*byte);
        self.cdb[at..at + bytes].iter().fold(0, number)
    }

    /// An allocation or parameter list length of at most 4 bytes.
    pub(super) fn length(&self, at: usize, bytes: usize) -> usize {
        self.number(at, bytes) as usize
    }
}

/// Checks the fields of a command and makes its plan.
pub(super) type Decoder = fn(&ScsiRequest<'_>) -> Result<CommandPlan, Sense>;

/// A command of the table.
pub(super) struct CommandEntry {
    pub(super) opcode: u8,
    /// The service action in the low five bits of byte 1, for opcodes that have them.
    pub(super) action: Option<u8>,
    /// CDB usage data (SPC-5, 6.35.3): the bits of each byte that are evaluated. The CDB has the
    /// same length.
    pub(super) usage: &'static [u8],
    /// Bits of byte 1 that are valid only if blocks can be unmapped. [`ALL`]: the whole command is.
    pub(super) thin: u8,
    /// Whether it needs a disk whose writes are all-or-nothing.
    pub(super) atomic: bool,
    pub(super) needs: Precondition,
    pub(super) decode: Decoder,
}

/// What a command requires of the unit's state.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Precondition {
    /// Nothing: it runs even if a unit attention condition is pending (SAM-5, 5.14).
    Nothing,
    /// No pending unit attention condition.
    Unit,
    /// No pending unit attention condition, and a unit that is not stopped.
    Medium,
}

impl CommandEntry {
    pub(super) const fn new(needs: Precondition, usage: &'static [u8], decode: Decoder) -> Self {
        Self {
            opcode: usage[0],
            action: None,
            usage,
            thin: 0,
            atomic: false,
            needs,
            decode,
        }
    }

    /// A command with a service action, which is in the usage data.
    pub(super) const fn action(needs: Precondition, usage: &'static [u8], decode: Decoder) -> Self {
        let mut command = Self::new(needs, usage, decode);
        command.action = Some(usage[1] & ACTION);
        command
    }

    pub(super) const fn with_thin_bits(mut self, bits: u8) -> Self {
        self.thin = bits;
        self
    }

    pub(super) const fn if_atomic(mut self) -> Self {
        self.atomic = true;
        self
    }

    /// Byte `at` of the usage data.
    pub(super) fn usage(&self, unit: &LogicalUnit, at: usize) -> u8 {
        match at {
            1 if self.thin != 0 && !unit.is_thin() => self.usage[at] & !self.thin,
            _ => self.usage[at],
        }
    }

    pub(super) fn is_supported(&self, unit: &LogicalUnit) -> bool {
        (self.thin != ALL || unit.is_thin()) && (!self.atomic || unit.max_atomic_blocks() > 0)
    }
}

pub(super) const ACTION: u8 = 0x1f;

pub(super) const ALL: u8 = 0xff;
