//! MODE SENSE and MODE SELECT (SPC-5, 6.13 to 6.16): the caching and the control mode page.
//!
//! ```text
//!   header 4 or 8 │ block descriptor 0, 8 or 16 │ page │ page        (SPC-5, 7.5.5; SBC-4, 6.5.2)
//! ```

use super::job::{BlockRange, CommandWork, ScsiAction};
use super::plan::{CommandPlan, ScsiRequest};
use super::sense::Sense;
use super::unit::LogicalUnit;
use crate::latency::OperationKind;

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const ALL_PAGES: u8 = 0x3f;
const ALL_SUBPAGES: u8 = 0xff;

/// WCE, in byte 2 of the caching page: writes complete before they are durable.
const WCE: u8 = 0x04;
/// D_SENSE, in byte 2 of the control page: sense data in the descriptor format.
const D_SENSE: u8 = 0x04;

/// PC (SPC-5, table 191): which values of a page the initiator asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PageControl {
    Current,
    /// A mask of the bits that MODE SELECT can change.
    Changeable,
    Default,
}

/// A mode page, including its header of two bytes.
fn page(unit: &LogicalUnit, code: u8, values: PageControl) -> Option<Vec<u8>> {
    let bit_if = |bit: u8, current: bool, changeable: bool, default: bool| {
        let set = match values {
            PageControl::Current => current,
            PageControl::Changeable => changeable,
            PageControl::Default => default,
        };
        if set { bit } else { 0 }
    };
    Some(match code {
        // SBC-4, 6.5.6.
        CACHING => {
            let mut page = vec![0; 20];
            page[..2].copy_from_slice(&[CACHING, 18]);
            let can = unit.can();
            let changeable = can.flush && can.write_cache_toggle;
            page[2] = bit_if(
                WCE,
                unit.write_cache(),
                changeable,
                unit.default_write_cache(),
            );
            page
        }
        // SPC-5, 7.5.13.
        CONTROL => {
            let mut page = vec![0; 12];
            page[..2].copy_from_slice(&[CONTROL, 10]);
            page[2] = bit_if(D_SENSE, unit.descriptor_sense(), true, false);
            if values != PageControl::Changeable {
                // QUEUE ALGORITHM MODIFIER: commands end in any order.
                page[3] = 0x10;
                // BUSY TIMEOUT PERIOD: no limit.
                page[8..10].copy_from_slice(&[0xff, 0xff]);
            }
            page
        }
        _ => return None,
    })
}

/// MODE SENSE (6), (10).
pub(super) fn sense(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let unit = request.unit;
    let short = request.cdb_len() == 6;
    let allocation = if short {
        request.length(4, 1)
    } else {
        request.length(7, 2)
    };
    let values = match request.byte(2) >> 6 {
        0 => PageControl::Current,
        1 => PageControl::Changeable,
        2 => PageControl::Default,
        _ => return Err(Sense::SAVING),
    };
    if !matches!(request.byte(3), 0 | ALL_SUBPAGES) {
        return Err(Sense::cdb(3, None));
    }
    let pages = match request.byte(2) & 0x3f {
        ALL_PAGES => {
            let all = [CACHING, CONTROL].into_iter();
            all.filter_map(|code| page(unit, code, values))
                .flatten()
                .collect()
        }
        code => page(unit, code, values).ok_or(Sense::cdb(2, Some(5)))?,
    };
    let long = !short && request.bit(1, 0x10);
    let descriptor = if request.bit(1, 0x08) {
        Vec::new()
    } else {
        block_descriptor(unit, long)
    };
    // WP, DPOFUA.
    let specific = if unit.can().read_only { 0x90 } else { 0x10 };
    let len = descriptor.len() as u8;
    let mut bytes = if short {
        vec![0, 0, specific, len]
    } else {
        vec![0, 0, 0, specific, u8::from(long), 0, 0, len]
    };
    bytes.extend(descriptor);
    bytes.extend(pages);
    // MODE DATA LENGTH counts the bytes after itself. The whole answer is shorter than 60 bytes.
    if short {
        bytes[0] = (bytes.len() - 1) as u8;
    } else {
        bytes[1] = (bytes.len() - 2) as u8;
    }
    Ok(CommandPlan::Answer { bytes, allocation })
}

/// The short or the long LBA mode parameter block descriptor (SBC-4, 6.5.2.2 and 6.5.2.3).
fn block_descriptor(unit: &LogicalUnit, long: bool) -> Vec<u8> {
    let (blocks, size) = (unit.blocks(), unit.block_size().to_be_bytes());
    let mut descriptor = Vec::with_capacity(16);
    if long {
        descriptor.extend(blocks.to_be_bytes());
        descriptor.extend([0; 4]);
    } else {
        descriptor.extend(u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes());
    }
    // The short descriptor has three bytes for the length, after a reserved byte.
    descriptor.extend(size);
    descriptor
}

/// The changes that a MODE SELECT asks for.
#[derive(Default)]
struct ModeChanges {
    write_cache: Option<bool>,
    descriptor_sense: Option<bool>,
}

/// MODE SELECT (6), (10). The whole list is checked before any of it takes effect.
pub(super) fn select(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let unit = request.unit;
    let (len, header) = match request.cdb_len() {
        6 => (request.length(4, 1), 4),
        _ => (request.length(7, 2), 8),
    };
    // PF: the pages follow the standards. Without it they would be vendor specific.
    if !request.bit(1, 0x10) {
        return Err(Sense::cdb(1, Some(4)));
    }
    if len == 0 {
        return Ok(CommandPlan::Run(CommandWork::without_actions()));
    }
    if len < header || request.data.len() < len {
        return Err(Sense::LIST_LENGTH);
    }
    // At most 64 KiB.
    let mut list = vec![0; len];
    request.data.read(0, &mut list);
    let changes = parse(unit, &list, header)?;

    if let Some(on) = changes.descriptor_sense {
        unit.set_descriptor_sense(on);
    }
    let Some(on) = changes.write_cache.filter(|&on| on != unit.write_cache()) else {
        return Ok(CommandPlan::Run(CommandWork::without_actions()));
    };
    unit.backend().set_write_cache(on);
    // When the cache is turned off, its contents go to the medium before the command ends.
    let flush = (!on).then_some(ScsiAction::Flush);
    let actions = [flush, None, None];
    Ok(CommandPlan::Run(CommandWork::new(
        OperationKind::Flush,
        BlockRange::default(),
        actions,
    )))
}

fn parse(unit: &LogicalUnit, list: &[u8], header: usize) -> Result<ModeChanges, Sense> {
    // MODE DATA LENGTH is reserved here, and nothing in DEVICE-SPECIFIC PARAMETER can be set
    // (SBC-4, 6.5.2.1).
    let (medium_type, length_at) = if header == 4 { (1, 3) } else { (2, 6) };
    if list[medium_type] != 0 {
        return Err(Sense::list(medium_type as u16, None));
    }
    let long = header == 8 && list[4] & 0x01 != 0;
    let descriptor = match header {
        4 => usize::from(list[3]),
        _ => usize::from(u16::from_be_bytes([list[6], list[7]])),
    };
    if descriptor != 0 {
        let current = block_descriptor(unit, long);
        if descriptor != current.len() {
            return Err(Sense::list(length_at, None));
        }
        let Some(given) = list.get(header..header + descriptor) else {
            return Err(Sense::LIST_LENGTH);
        };
        // The number of blocks may be 0, which means "unchanged" (SBC-4, 6.5.2.2). Changing it or
        // the block length would take a FORMAT UNIT.
        let count = if long { 8 } else { 4 };
        let unchanged =
            given[..count] == current[..count] || given[..count].iter().all(|&byte| byte == 0);
        if !unchanged {
            return Err(Sense::list(header as u16, None));
        }
        if given[count..] != current[count..] {
            return Err(Sense::list((header + count) as u16, None));
        }
    }
    let mut changes = ModeChanges::default();
    let mut at = header + descriptor;
    while at < list.len() {
        let Some(&[code, len]) = list.get(at..at + 2) else {
            return Err(Sense::LIST_LENGTH);
        };
        // PS is reserved here, but initiators send back what they received. SPF: no page with
        // subpages can be changed.
        let code = code & 0x7f;
        let Some(current) = page(unit, code, PageControl::Current) else {
            return Err(Sense::list(at as u16, Some(6)));
        };
        if usize::from(len) + 2 != current.len() {
            return Err(Sense::list(at as u16 + 1, None));
        }
        let Some(given) = list.get(at..at + current.len()) else {
            return Err(Sense::LIST_LENGTH);
        };
        let changeable = page(unit, code, PageControl::Changeable).unwrap_or_default();
        for byte in 2..current.len() {
            let wrong = (given[byte] ^ current[byte]) & !changeable[byte];
            if wrong != 0 {
                return Err(Sense::list((at + byte) as u16, Some(wrong.ilog2() as u8)));
            }
        }
        match code {
            CACHING => changes.write_cache = Some(given[2] & WCE != 0),
            _ => changes.descriptor_sense = Some(given[2] & D_SENSE != 0),
        }
        at += current.len();
    }
    Ok(changes)
}
