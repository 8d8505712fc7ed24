//! INQUIRY: who the unit is (SPC-5, 6.7), and the vital product data pages (SPC-5, 7.7; SBC-4, 6.6).

use super::command::{Plan, Request};
use super::sense::Sense;

/// T10 VENDOR IDENTIFICATION.
const VENDOR: &[u8; 8] = b"WALVISOR";
/// PRODUCT IDENTIFICATION.
const PRODUCT: &[u8; 16] = b"Walvisor disk   ";

/// INQUIRY.
pub(super) fn inquiry(request: &Request<'_>) -> Result<Plan, Sense> {
    let allocation = request.length(3, 2);
    if request.byte(2) != 0 {
        return Err(Sense::cdb(2, None));
    }
    let mut bytes = vec![0; 96];
    bytes[2] = 0x07;
    bytes[3] = 0x02;
    bytes[4] = 91;
    bytes[7] = 0x02;
    bytes[8..16].copy_from_slice(VENDOR);
    bytes[16..32].copy_from_slice(PRODUCT);
    Ok(Plan::Answer { bytes, allocation })
}
