//! Commands about the unit itself: TEST UNIT READY, REQUEST SENSE, REPORT LUNS, START STOP UNIT and
//! REPORT SUPPORTED OPERATION CODES.

use super::job::{BlockRange, CommandWork, ScsiAction};
use super::plan::{CommandEntry, CommandPlan, ScsiRequest};
use super::sense::Sense;
use crate::latency::OperationKind;

/// TEST UNIT READY (SPC-5, 6.52). Checking the command has already shown that the unit is ready.
pub(super) fn test_unit_ready(_: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    Ok(CommandPlan::Run(CommandWork::without_actions()))
}

/// REQUEST SENSE (SPC-5, 6.40): reports and clears a unit attention condition, or reports that the
/// unit is not ready.
pub(super) fn request_sense(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let unit = request.unit;
    let stopped = unit.is_stopped().then_some(Sense::STOPPED);
    let sense = unit.take_attention().or(stopped).unwrap_or(Sense::NONE);
    let bytes = sense.data(request.bit(1, 0x01)).to_vec();
    let allocation = request.length(4, 1);
    Ok(CommandPlan::Answer { bytes, allocation })
}

/// REPORT LUNS (SPC-5, 6.33), for transports that leave it to their units. Numbers below 256 are in
/// the peripheral format, on bus 0 (SAM-5, 4.7.7.2).
pub(super) fn report_luns(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let mut bytes = vec![0; 8];
    match request.byte(2) {
        // Without and with well known logical units, which do not exist here.
        0x00 | 0x02 => {
            let units = request.unit.units_of_target();
            bytes[..4].copy_from_slice(&(u32::from(units) * 8).to_be_bytes());
            (0..units).for_each(|unit| bytes.extend([0, unit, 0, 0, 0, 0, 0, 0]));
        }
        0x01 => {}
        _ => return Err(Sense::cdb(2, None)),
    }
    let allocation = request.length(6, 4);
    Ok(CommandPlan::Answer { bytes, allocation })
}

/// START STOP UNIT (SBC-4, 5.29). Stopping a unit flushes its cache; a stopped unit refuses
/// commands that need the medium.
pub(super) fn start_stop(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let unit = request.unit;
    let start = request.bit(4, 0x01);
    let no_flush = request.bit(4, 0x04);
    unit.set_stopped(!start);
    let flush = !start && !no_flush && unit.can().flush;
    let actions = [flush.then_some(ScsiAction::Flush), None, None];
    Ok(CommandPlan::Run(CommandWork::new(
        OperationKind::Flush,
        BlockRange::default(),
        actions,
    )))
}

/// REPORT SUPPORTED OPERATION CODES (SPC-5, 6.35).
pub(super) fn report_opcodes(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let timeouts = request.bit(2, 0x80);
    let allocation = request.length(6, 4);
    let opcode = request.byte(3);
    let action = request.number(4, 2);
    let all = || request.commands();
    let mut same = all().filter(|command| command.opcode == opcode).peekable();
    let has_actions = same.peek().map(|command| command.action.is_some());
    let exact = |command: &&CommandEntry| command.action.unwrap_or(0) as u64 == action;
    let bytes = match (request.byte(2) & 0x07, has_actions) {
        (0, _) => list(all(), timeouts),
        // 1 is by opcode alone, 2 by opcode and service action; an opcode of the other kind is an
        // error.
        (1, Some(true)) | (2, Some(false)) => return Err(Sense::cdb(2, Some(2))),
        (1, _) => describe_command(request, same.next(), timeouts),
        // 3: by opcode, and by service action if the opcode has any.
        (2 | 3, _) => describe_command(request, same.find(exact), timeouts),
        _ => return Err(Sense::cdb(2, Some(2))),
    };
    Ok(CommandPlan::Answer { bytes, allocation })
}

/// A command timeouts descriptor without any timeouts (SPC-5, 6.35.4).
const TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The all_commands parameter data (SPC-5, 6.35.2).
fn list<'a>(commands: impl Iterator<Item = &'a CommandEntry>, timeouts: bool) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    for command in commands {
        // CTDP, SERVACTV
        let flags = u8::from(timeouts) << 1 | u8::from(command.action.is_some());
        let action = command.action.unwrap_or(0);
        let len = command.usage.len() as u8;
        bytes.extend([command.opcode, 0, 0, action, 0, flags, 0, len]);
        if timeouts {
            bytes.extend(TIMEOUTS);
        }
    }
    let len = (bytes.len() - 4) as u32;
    bytes[..4].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// The one_command parameter data (SPC-5, 6.35.3).
fn describe_command(
    request: &ScsiRequest<'_>,
    command: Option<&CommandEntry>,
    timeouts: bool,
) -> Vec<u8> {
    let Some(command) = command else {
        // SUPPORT: the command is not supported.
        return vec![0, 0x01, 0, 0];
    };
    // CTDP; SUPPORT: the command is supported as in a standard.
    let flags = u8::from(timeouts) << 7 | 0x03;
    let mut bytes = vec![0, flags, 0, command.usage.len() as u8];
    bytes.extend((0..command.usage.len()).map(|at| command.usage(request.unit, at)));
    if timeouts {
        bytes.extend(TIMEOUTS);
    }
    bytes
}
