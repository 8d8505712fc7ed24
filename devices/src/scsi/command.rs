//! The commands: one table by which CDBs are judged, and which REPORT SUPPORTED OPERATION CODES reads out.

use super::DataBuffer;
use super::capacity::{read_capacity_10, read_capacity_16};
use super::control::{report_luns, report_opcodes, request_sense, start_stop, test_unit_ready};
use super::inquiry::inquiry;
use super::io::{read, synchronize, write};
use super::mode;
use super::provisioning::{lba_status, unmap, write_same};
use super::sense::Sense;
use super::task::Job;
use super::unit::LogicalUnit;
use super::verify::{compare_and_write, verify, write_and_verify};

/// What a command comes to, once it is judged.
pub(super) enum Plan {
    /// Parameter data, to be cut to the allocation length.
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

/// How a command is judged.
type Decoder = fn(&Request<'_>) -> Result<Plan, Sense>;

/// A command of the table.
pub(super) struct Command {
    pub(super) opcode: u8,
    /// The service action in the low five bits of byte 1, for opcodes that have them.
    pub(super) action: Option<u8>,
    /// Which bits of each byte are evaluated: CDB usage data (SPC-5, 6.35.3). The CDB is as long.
    pub(super) usage: &'static [u8],
    /// Bits of byte 1 that mean something only where blocks can be unmapped; all of them: so does the command.
    thin: u8,
    needs: Needs,
    decode: Decoder,
}

/// What a command needs to be carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Nothing, not even that no unit attention condition is left (SAM-5, 5.14).
    Nothing,
    /// No unit attention condition.
    Unit,
    /// A unit that is not stopped, too.
    Medium,
}

impl Command {
    const fn new(needs: Needs, usage: &'static [u8], decode: Decoder) -> Self {
        Self {
            opcode: usage[0],
            action: None,
            usage,
            thin: 0,
            needs,
            decode,
        }
    }

    /// One with a service action, which is in the usage data.
    const fn action(needs: Needs, usage: &'static [u8], decode: Decoder) -> Self {
        let mut command = Self::new(needs, usage, decode);
        command.action = Some(usage[1] & ACTION);
        command
    }

    const fn thin(mut self, bits: u8) -> Self {
        self.thin = bits;
        self
    }

    /// Byte `at` of the usage data.
    pub(super) fn usage(&self, unit: &LogicalUnit, at: usize) -> u8 {
        match at {
            1 if self.thin != 0 && !unit.thin() => self.usage[at] & !self.thin,
            _ => self.usage[at],
        }
    }

    fn offered(&self, unit: &LogicalUnit) -> bool {
        self.thin != ALL || unit.thin()
    }
}

const ACTION: u8 = 0x1f;
const ALL: u8 = 0xff;

/// The table, in the order of opcodes.
#[rustfmt::skip]
const COMMANDS: &[Command] = {
    use Needs::{Medium, Nothing, Unit};
    const A: u8 = ALL;
    const fn row(needs: Needs, usage: &'static [u8], decode: Decoder) -> Command {
        Command::new(needs, usage, decode)
    }
    const fn act(needs: Needs, usage: &'static [u8], decode: Decoder) -> Command {
        Command::action(needs, usage, decode)
    }
    &[
        row(Medium, &[0x00, 0, 0, 0, 0, 0], test_unit_ready),
        row(Nothing, &[0x03, 0x01, 0, 0, A, 0], request_sense),
        row(Medium, &[0x08, 0x1f, A, A, A, 0], read),
        row(Medium, &[0x0a, 0x1f, A, A, A, 0], write),
        row(Nothing, &[0x12, 0x01, A, A, A, 0], inquiry),
        row(Unit, &[0x15, 0x10, 0, 0, A, 0], mode::select),
        row(Unit, &[0x1a, 0x08, A, A, A, 0], mode::sense),
        row(Unit, &[0x1b, 0x01, 0, 0, 0x05, 0], start_stop),
        row(Medium, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], read_capacity_10),
        row(Medium, &[0x28, 0x18, A, A, A, A, 0, A, A, 0], read),
        row(Medium, &[0x2a, 0x18, A, A, A, A, 0, A, A, 0], write),
        row(Medium, &[0x2e, 0x16, A, A, A, A, 0, A, A, 0], write_and_verify),
        row(Medium, &[0x2f, 0x16, A, A, A, A, 0, A, A, 0], verify),
        row(Medium, &[0x35, 0x02, A, A, A, A, 0, A, A, 0], synchronize),
        row(Medium, &[0x41, 0x08, A, A, A, A, 0, A, A, 0], write_same).thin(0x08),
        row(Medium, &[0x42, 0, 0, 0, 0, 0, 0, A, A, 0], unmap).thin(ALL),
        row(Unit, &[0x55, 0x10, 0, 0, 0, 0, 0, A, A, 0], mode::select),
        row(Unit, &[0x5a, 0x18, A, A, 0, 0, 0, A, A, 0], mode::sense),
        row(Medium, &[0x88, 0x18, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], read),
        row(Medium, &[0x89, 0x18, A, A, A, A, A, A, A, A, 0, 0, 0, A, 0, 0], compare_and_write),
        row(Medium, &[0x8a, 0x18, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], write),
        row(Medium, &[0x8e, 0x16, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], write_and_verify),
        row(Medium, &[0x8f, 0x16, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], verify),
        row(Medium, &[0x91, 0x02, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], synchronize),
        row(Medium, &[0x93, 0x09, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], write_same).thin(0x08),
        act(Medium, &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, A, A, A, A, 0, 0], read_capacity_16),
        act(Medium, &[0x9e, 0x12, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], lba_status),
        row(Nothing, &[0xa0, 0, A, 0, 0, 0, A, A, A, A, 0, 0], report_luns),
        act(Unit, &[0xa3, 0x0c, 0x87, A, A, A, A, A, A, A, 0, 0], report_opcodes),
        row(Medium, &[0xa8, 0x18, A, A, A, A, A, A, A, A, 0, 0], read),
        row(Medium, &[0xaa, 0x18, A, A, A, A, A, A, A, A, 0, 0], write),
        row(Medium, &[0xae, 0x16, A, A, A, A, A, A, A, A, 0, 0], write_and_verify),
        row(Medium, &[0xaf, 0x16, A, A, A, A, A, A, A, A, 0, 0], verify),
    ]
};

/// The first row of each opcode; none: the length of the table.
const FIRST: [u8; 256] = {
    let mut first = [COMMANDS.len() as u8; 256];
    let mut at = COMMANDS.len();
    while at > 0 {
        at -= 1;
        first[COMMANDS[at].opcode as usize] = at as u8;
    }
    first
};

/// The commands that a unit has.
pub(super) fn commands(unit: &LogicalUnit) -> impl Iterator<Item = &'static Command> {
    COMMANDS.iter().filter(|command| command.offered(unit))
}

/// Judges a command.
pub(super) fn judge(unit: &LogicalUnit, cdb: &[u8], data: &dyn DataBuffer) -> Result<Plan, Sense> {
    let command = find(cdb).filter(|command| command.offered(unit));
    let command = command.ok_or(Sense::OPERATION_CODE)?;
    if command.needs != Needs::Nothing
        && let Some(attention) = unit.take_attention()
    {
        return Err(attention);
    }
    if command
        .action
        .is_some_and(|action| cdb.get(1).map(|byte| byte & ACTION) != Some(action))
    {
        return Err(Sense::cdb(1, Some(4)));
    }
    let Some(cdb) = cdb.get(..command.usage.len()) else {
        // The transport has cut it off: the first field that is not there.
        return Err(Sense::cdb(cdb.len() as u16, None));
    };
    for (at, byte) in cdb.iter().enumerate().skip(1) {
        let extra = byte & !command.usage(unit, at);
        if extra != 0 {
            return Err(Sense::cdb(at as u16, Some(extra.ilog2() as u8)));
        }
    }
    if command.needs == Needs::Medium && unit.stopped() {
        return Err(Sense::STOPPED);
    }
    (command.decode)(&Request { unit, data, cdb })
}

/// The command that a CDB begins with; one with another service action, if there is none with this one.
fn find(cdb: &[u8]) -> Option<&'static Command> {
    let &opcode = cdb.first()?;
    let rows = COMMANDS.get(FIRST[usize::from(opcode)].into()..)?;
    let action = cdb.get(1).map(|byte| byte & ACTION);
    let mut same = rows.iter().take_while(|command| command.opcode == opcode);
    let exact = same
        .clone()
        .find(|command| command.action.is_none() || command.action == action);
    exact.or(same.next())
}
