//! The commands: one table by which CDBs are decoded, and which REPORT SUPPORTED OPERATION CODES reads out.

use super::DataBuffer;
use super::inquiry;
use super::io;
use super::sense::Sense;
use super::task::Job;
use super::unit::LogicalUnit;

/// What a command comes to, once it is judged.
pub(super) enum Plan {
    /// Parameter data, cut to the allocation length.
    Answer { bytes: Vec<u8>, allocation: usize },
    /// Work for the backend, or none.
    Run(Job),
}

/// A command as its decoder sees it: a CDB of full length without a bit that the command does not have.
pub(super) struct Request<'a> {
    pub(super) unit: &'a LogicalUnit,
    pub(super) data: &'a dyn DataBuffer,
    cdb: &'a [u8],
}

impl Request<'_> {
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

/// A command of the table.
pub(super) struct Command {
    pub(super) opcode: u8,
    /// The service action in the low five bits of byte 1, for opcodes that have them.
    pub(super) action: Option<u8>,
    /// CDB usage data (SPC-5, 6.35.3): for each byte which bits are evaluated. The length of the CDB is its length.
    pub(super) usage: &'static [u8],
    /// When it is carried out.
    needs: Needs,
    decode: fn(&Request<'_>) -> Result<Plan, Sense>,
}

/// What a command is held up by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Nothing, not even a unit attention condition (SAM-5, 5.14).
    Nothing,
    /// No unit attention condition.
    Unit,
    /// A unit that is not stopped, too.
    Medium,
}

#[rustfmt::skip]
const COMMANDS: &[Command] = {
    use Needs::{Medium, Nothing};
    const ALL: u8 = 0xff;
    const fn row(
        opcode: u8,
        usage: &'static [u8],
        needs: Needs,
        decode: fn(&Request<'_>) -> Result<Plan, Sense>,
    ) -> Command {
        Command { opcode, action: None, usage, needs, decode }
    }
    &[
        row(0x00, &[0x00, 0, 0, 0, 0, 0], Medium, test_unit_ready),
        row(0x12, &[0x12, 0x01, ALL, ALL, ALL, 0], Nothing, inquiry::inquiry),
        row(0x28, &[0x28, 0x18, ALL, ALL, ALL, ALL, 0, ALL, ALL, 0], Medium, io::read_10),
        row(0x2a, &[0x2a, 0x18, ALL, ALL, ALL, ALL, 0, ALL, ALL, 0], Medium, io::write_10),
    ]
};

/// Judges a command.
pub(super) fn judge(unit: &LogicalUnit, cdb: &[u8], data: &dyn DataBuffer) -> Result<Plan, Sense> {
    let command = find(cdb)?;
    let (Some(cdb), Some(_)) = (cdb.get(..command.usage.len()), unit.blocks().checked_sub(1))
    else {
        // The transport has cut it off.
        return Err(Sense::OPERATION_CODE);
    };
    if command.needs != Needs::Nothing
        && let Some(attention) = unit.take_attention()
    {
        return Err(attention);
    }
    for (at, (&byte, &usage)) in cdb.iter().zip(command.usage).enumerate().skip(1) {
        let action = match (at, command.action) {
            (1, Some(_)) => 0x1f,
            _ => 0,
        };
        let extra = byte & !usage & !action;
        if extra != 0 {
            return Err(Sense::cdb(at as u16, Some(extra.ilog2() as u8)));
        }
    }
    if command.needs == Needs::Medium && unit.stopped() {
        return Err(Sense::STOPPED);
    }
    (command.decode)(&Request { unit, data, cdb })
}

/// The command that a CDB begins with.
fn find(cdb: &[u8]) -> Result<&'static Command, Sense> {
    let &opcode = cdb.first().ok_or(Sense::OPERATION_CODE)?;
    let mut same = COMMANDS
        .iter()
        .filter(|command| command.opcode == opcode)
        .peekable();
    same.peek().ok_or(Sense::OPERATION_CODE)?;
    let action = cdb.get(1).map(|byte| byte & 0x1f);
    let mut same = same.filter(|command| command.action.is_none() || command.action == action);
    same.next().ok_or(Sense::cdb(1, Some(4)))
}

/// TEST UNIT READY (SPC-5, 6.52).
fn test_unit_ready(_: &Request<'_>) -> Result<Plan, Sense> {
    Ok(Plan::Run(Job::nothing()))
}
