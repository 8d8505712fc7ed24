//! The table of commands. CDBs are checked against it, and it answers REPORT SUPPORTED OPERATION
//! CODES.

use super::capacity::{read_capacity_10, read_capacity_16};
use super::control::{report_luns, report_opcodes, request_sense, start_stop, test_unit_ready};
use super::data::DataBuffer;
use super::inquiry::inquiry;
use super::io::{read, synchronize, write, write_atomic};
use super::mode;
use super::plan::{ACTION, ALL, CommandEntry, CommandPlan, Decoder, Precondition, ScsiRequest};
use super::provisioning::{lba_status, unmap, write_same};
use super::sense::Sense;
use super::unit::LogicalUnit;
use super::verify::{compare_and_write, verify, write_and_verify};

/// The table, in the order of opcodes.
#[rustfmt::skip]
const COMMANDS: &[CommandEntry] = {
    use Precondition::{Medium, Nothing, Unit};
    const A: u8 = ALL;
    const fn row(needs: Precondition, usage: &'static [u8], decode: Decoder) -> CommandEntry {
        CommandEntry::new(needs, usage, decode)
    }
    const fn act(needs: Precondition, usage: &'static [u8], decode: Decoder) -> CommandEntry {
        CommandEntry::action(needs, usage, decode)
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
        row(Medium, &[0x41, 0x08, A, A, A, A, 0, A, A, 0], write_same).with_thin_bits(0x08),
        row(Medium, &[0x42, 0, 0, 0, 0, 0, 0, A, A, 0], unmap).with_thin_bits(ALL),
        row(Unit, &[0x55, 0x10, 0, 0, 0, 0, 0, A, A, 0], mode::select),
        row(Unit, &[0x5a, 0x18, A, A, 0, 0, 0, A, A, 0], mode::sense),
        row(Medium, &[0x88, 0x18, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], read),
        row(Medium, &[0x89, 0x18, A, A, A, A, A, A, A, A, 0, 0, 0, A, 0, 0], compare_and_write),
        row(Medium, &[0x8a, 0x18, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], write),
        row(Medium, &[0x8e, 0x16, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], write_and_verify),
        row(Medium, &[0x8f, 0x16, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], verify),
        row(Medium, &[0x91, 0x02, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], synchronize),
        row(Medium, &[0x93, 0x09, A, A, A, A, A, A, A, A, A, A, A, A, 0, 0], write_same).with_thin_bits(0x08),
        row(Medium, &[0x9c, 0x18, A, A, A, A, A, A, A, A, 0, 0, A, A, 0, 0], write_atomic)
            .if_atomic(),
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

/// The index of each opcode's first row, or the length of the table if it has none.
const FIRST: [u8; 256] = {
    let mut first = [COMMANDS.len() as u8; 256];
    let mut at = COMMANDS.len();
    while at > 0 {
        at -= 1;
        first[COMMANDS[at].opcode as usize] = at as u8;
    }
    first
};

/// Checks a command and plans its work.
pub(super) fn plan_command(
    unit: &LogicalUnit,
    cdb: &[u8],
    data: &dyn DataBuffer,
) -> Result<CommandPlan, Sense> {
    let command = find(cdb).filter(|command| command.is_supported(unit));
    let command = command.ok_or(Sense::OPERATION_CODE)?;
    if command.needs != Precondition::Nothing
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
        // The transport has truncated the CDB: report the first missing byte.
        return Err(Sense::cdb(cdb.len() as u16, None));
    };
    for (at, byte) in cdb.iter().enumerate().skip(1) {
        let extra = byte & !command.usage(unit, at);
        if extra != 0 {
            return Err(Sense::cdb(at as u16, Some(extra.ilog2() as u8)));
        }
    }
    if command.needs == Precondition::Medium && unit.is_stopped() {
        return Err(Sense::STOPPED);
    }
    (command.decode)(&ScsiRequest {
        unit,
        data,
        cdb,
        table: COMMANDS,
    })
}

/// The row of a CDB's opcode and service action, or a row of the opcode with another service
/// action.
fn find(cdb: &[u8]) -> Option<&'static CommandEntry> {
    let &opcode = cdb.first()?;
    let rows = COMMANDS.get(FIRST[usize::from(opcode)].into()..)?;
    let action = cdb.get(1).map(|byte| byte & ACTION);
    let mut same = rows.iter().take_while(|command| command.opcode == opcode);
    let exact = same
        .clone()
        .find(|command| command.action.is_none() || command.action == action);
    exact.or(same.next())
}
