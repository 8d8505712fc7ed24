//! INQUIRY: the unit's type, identity and limits (SPC-5, 6.7 and 7.7; SBC-4, 6.6).

use super::data::DataBuffer;
use super::plan::{CommandPlan, ScsiRequest};
use super::provisioning::{MAX_UNMAP_RANGES, MAX_WRITE_SAME_BYTES, max_unmap_blocks};
use super::sense::{Sense, Status};
use super::task::TaskOutcome;
use super::unit::{LogicalUnit, PHYSICAL_BLOCK};

/// T10 VENDOR IDENTIFICATION.
const VENDOR: &[u8; 8] = b"WALVISOR";
/// PRODUCT IDENTIFICATION.
const PRODUCT: &[u8; 16] = b"Virtual disk    ";
/// The standards that the unit follows: SAM-5, SPC-4, SBC-3, SPC-5, SBC-4, no version claimed
/// (SPC-5, table 151).
const VERSIONS: [u16; 5] = [0x00a0, 0x0460, 0x04c0, 0x05c0, 0x0600];

/// OPTIMAL TRANSFER LENGTH in bytes. A log record of this length takes 1 % more room than its
/// payload; a record of one page takes 100 % more. Linux itself makes no longer requests than this.
const OPTIMAL_BYTES: usize = 1 << 20;

/// The vital product data pages in ascending order, as page 00h lists them.
const PAGES: &[(u8, PageBuilder)] = &[
    (0x00, supported),
    (0x80, serial),
    (0x83, identification),
    (0xb0, block_limits),
    (0xb1, characteristics),
    (0xb2, provisioning),
];

/// Returns the bytes after a page's header.
type PageBuilder = fn(&LogicalUnit) -> Vec<u8>;

/// INQUIRY (SPC-5, 6.7).
pub(super) fn inquiry(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let (unit, allocation) = (request.unit, request.length(3, 2));
    let vital = request.bit(1, 0x01);
    let code = request.byte(2);
    let bytes = match PAGES.iter().find(|(page, _)| *page == code) {
        _ if !vital && code == 0 => standard(),
        Some((code, page)) if vital => {
            let page = page(unit);
            let mut bytes = vec![0, *code];
            bytes.extend((page.len() as u16).to_be_bytes());
            bytes.extend(page);
            bytes
        }
        _ => return Err(Sense::cdb(2, None)),
    };
    Ok(CommandPlan::Answer { bytes, allocation })
}

/// Answers a command for a logical unit that the target does not have (SAM-5, 5.11).
pub(crate) fn answer_for_absent_unit(cdb: &[u8], data: &dyn DataBuffer) -> TaskOutcome {
    let answer = match cdb {
        [0x12, 0, 0, high, low, 0, ..] => {
            let mut bytes = standard();
            // PERIPHERAL QUALIFIER 011b: no unit here, and none possible.
            bytes[0] = 0x7f;
            Some((bytes, usize::from(u16::from_be_bytes([*high, *low]))))
        }
        [0x03, descriptors @ (0 | 1), 0, 0, allocation, 0, ..] => {
            let bytes = Sense::NO_UNIT.data(*descriptors == 1).to_vec();
            Some((bytes, usize::from(*allocation)))
        }
        _ => None,
    };
    let data_in = answer.map(|(bytes, allocation)| {
        let len = bytes.len().min(allocation).min(data.len());
        data.write(0, &bytes[..len]);
        len
    });
    match data_in {
        Some(_) => TaskOutcome {
            status: Status::Good,
            sense: None,
            data_in,
        },
        None => refuse(Sense::NO_UNIT),
    }
}

/// Answers a command with a task attribute that the units do not have.
pub(crate) fn refuse_attribute() -> TaskOutcome {
    refuse(Sense::MESSAGE)
}

fn refuse(sense: Sense) -> TaskOutcome {
    TaskOutcome {
        status: Status::CheckCondition,
        sense: Some(sense.data(false)),
        data_in: None,
    }
}

/// Standard INQUIRY data (SPC-5, 6.7.2).
fn standard() -> Vec<u8> {
    let mut bytes = vec![0; 96];
    bytes[2] = 0x06; // SPC-4: initiators older than SPC-5 may not know 07h.
    bytes[3] = 0x02; // response data format
    bytes[4] = 96 - 5;
    bytes[7] = 0x02; // CMDQUE
    bytes[8..16].copy_from_slice(VENDOR);
    bytes[16..32].copy_from_slice(PRODUCT);
    let major = env!("CARGO_PKG_VERSION_MAJOR");
    let revision = format!("{:<4}", [major, env!("CARGO_PKG_VERSION_MINOR")].join("."));
    bytes[32..36].copy_from_slice(&revision.as_bytes()[..4]);
    for (at, version) in VERSIONS.iter().enumerate() {
        let at = 58 + 2 * at;
        bytes[at..at + 2].copy_from_slice(&version.to_be_bytes());
    }
    bytes
}

/// 00h, Supported VPD Pages (SPC-5, 7.7.16).
fn supported(_: &LogicalUnit) -> Vec<u8> {
    PAGES.iter().map(|(code, _)| *code).collect()
}

/// 80h, Unit Serial Number (SPC-5, 7.7.20).
fn serial(unit: &LogicalUnit) -> Vec<u8> {
    unit.serial().as_bytes().to_vec()
}

/// 83h, Device Identification (SPC-5, 7.7.6): two designators of the logical unit, both made of the
/// serial number.
fn identification(unit: &LogicalUnit) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut put = |code_set: u8, kind: u8, designator: &[u8]| {
        bytes.extend([code_set, kind, 0, designator.len() as u8]);
        bytes.extend(designator);
    };
    // T10 vendor ID based, ASCII: at most 8 + 36 bytes.
    put(2, 1, &[VENDOR, unit.serial().as_bytes()].concat());
    // NAA, binary, 60 bits: locally assigned, because the project has no company ID.
    let naa = 3 << 60 | digest(unit.serial().as_bytes()) >> 4;
    put(1, 3, &naa.to_be_bytes());
    bytes
}

/// FNV-1a: as unique as 64 bits allow, and the same in every version.
fn digest(bytes: &[u8]) -> u64 {
    let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// B0h, Block Limits (SBC-4, 6.6.4).
fn block_limits(unit: &LogicalUnit) -> Vec<u8> {
    let mut page = vec![0; 0x3c];
    // Offsets are those of the standard, which count the page's header.
    let mut put =
        |at: usize, field: &[u8]| page[at - 4..at - 4 + field.len()].copy_from_slice(field);
    let in_blocks = |bytes: u64| bytes / u64::from(unit.block_size());
    let physical = PHYSICAL_BLOCK / unit.block_size();
    let optimal = unit.max_transfer_bytes().min(OPTIMAL_BYTES) as u64;
    put(4, &[0x01, unit.max_compare_blocks()]); // WSNZ, MAXIMUM COMPARE AND WRITE LENGTH
    put(6, &(physical as u16).to_be_bytes()); // OPTIMAL TRANSFER LENGTH GRANULARITY
    put(8, &unit.max_transfer_blocks().to_be_bytes()); // MAXIMUM TRANSFER LENGTH
    put(12, &(in_blocks(optimal) as u32).to_be_bytes()); // OPTIMAL TRANSFER LENGTH
    if unit.is_thin() {
        put(20, &max_unmap_blocks(unit.block_size()).to_be_bytes()); // MAXIMUM UNMAP LBA COUNT
        put(24, &(MAX_UNMAP_RANGES as u32).to_be_bytes()); // MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT
        put(28, &physical.to_be_bytes()); // OPTIMAL UNMAP GRANULARITY
        put(32, &[0x80, 0, 0, 0]); // UGAVALID, UNMAP GRANULARITY ALIGNMENT
    }
    put(36, &in_blocks(MAX_WRITE_SAME_BYTES).to_be_bytes()); // MAXIMUM WRITE SAME LENGTH
    let atomic = unit.max_atomic_blocks();
    if atomic > 0 {
        put(44, &atomic.to_be_bytes()); // MAXIMUM ATOMIC TRANSFER LENGTH
        // ATOMIC ALIGNMENT 0: any. ATOMIC TRANSFER LENGTH GRANULARITY 1: any too; Linux takes 0 for
        // a physical block.
        put(52, &1_u32.to_be_bytes());
        // WITH ATOMIC BOUNDARY and MAXIMUM ATOMIC BOUNDARY SIZE 0: one write is one piece.
    }
    page
}

/// B1h, Block Device Characteristics (SBC-4, 6.6.2).
fn characteristics(_: &LogicalUnit) -> Vec<u8> {
    let mut page = vec![0; 0x3c];
    // MEDIUM ROTATION RATE: non-rotating.
    page[1] = 1;
    page
}

/// B2h, Logical Block Provisioning (SBC-4, 6.6.7).
fn provisioning(unit: &LogicalUnit) -> Vec<u8> {
    if unit.is_thin() {
        // LBPU, LBPWS, LBPWS10; LBPRZ: discarded blocks read as zeroes. Thin.
        vec![0, 0xe0 | 1 << 2, 2, 0]
    } else {
        vec![0; 4]
    }
}
