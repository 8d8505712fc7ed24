//! Status and sense data: how a command ended, and exactly why it failed (SPC-5, 4.4; SAM-5, 5.3).

use std::ops::Deref;

use crate::backend::Failure;

/// How a command ended (SAM-5, 5.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The command was carried out.
    Good = 0x00,
    /// The command failed; the sense data says why.
    CheckCondition = 0x02,
    /// The command did not begin, and may be sent again.
    Busy = 0x08,
    /// The command was aborted.
    TaskAborted = 0x40,
}

/// Sense data as the application client gets it, in the fixed format (18 bytes) or the descriptor
/// format.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SenseData {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl SenseData {
    /// Its maximum length in bytes.
    pub const MAX: usize = 28;
}

impl Deref for SenseData {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for SenseData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:02x?}", &**self)
    }
}

/// Sense keys (SPC-5, table 48).
mod key {
    pub(super) const NO_SENSE: u8 = 0x0;
    pub(super) const NOT_READY: u8 = 0x2;
    pub(super) const MEDIUM_ERROR: u8 = 0x3;
    pub(super) const ILLEGAL_REQUEST: u8 = 0x5;
    pub(super) const UNIT_ATTENTION: u8 = 0x6;
    pub(super) const DATA_PROTECT: u8 = 0x7;
    pub(super) const MISCOMPARE: u8 = 0xe;
}

/// Points to the field of the CDB or the parameter list that is in error (SPC-5, 4.4.2.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FieldPointer {
    in_cdb: bool,
    byte: u16,
    /// The field's most significant bit, if the field is less than a byte.
    bit: Option<u8>,
}

/// Why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sense {
    key: u8,
    /// Additional sense code and qualifier.
    code: u16,
    information: Option<u64>,
    field: Option<FieldPointer>,
}

impl Sense {
    pub(super) const NONE: Self = Self::new(key::NO_SENSE, 0x0000);
    /// LOGICAL UNIT NOT READY, INITIALIZING COMMAND REQUIRED.
    pub(super) const STOPPED: Self = Self::new(key::NOT_READY, 0x0402);
    /// UNRECOVERED READ ERROR.
    pub(super) const READ_ERROR: Self = Self::new(key::MEDIUM_ERROR, 0x1100);
    /// WRITE ERROR.
    pub(super) const WRITE_ERROR: Self = Self::new(key::MEDIUM_ERROR, 0x0c00);
    /// PARAMETER LIST LENGTH ERROR.
    pub(super) const LIST_LENGTH: Self = Self::new(key::ILLEGAL_REQUEST, 0x1a00);
    /// INVALID COMMAND OPERATION CODE.
    pub(super) const OPERATION_CODE: Self = Self::new(key::ILLEGAL_REQUEST, 0x2000).at_cdb(0, None);
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE.
    pub(super) const OUT_OF_RANGE: Self = Self::new(key::ILLEGAL_REQUEST, 0x2100);
    /// LOGICAL UNIT NOT SUPPORTED.
    pub(super) const NO_UNIT: Self = Self::new(key::ILLEGAL_REQUEST, 0x2500);
    /// INVALID MESSAGE ERROR: a task attribute that the unit does not have.
    pub(super) const MESSAGE: Self = Self::new(key::ILLEGAL_REQUEST, 0x4900);
    /// WRITE PROTECTED.
    pub(super) const WRITE_PROTECTED: Self = Self::new(key::DATA_PROTECT, 0x2700);
    /// SAVING PARAMETERS NOT SUPPORTED.
    pub(super) const SAVING: Self = Self::new(key::ILLEGAL_REQUEST, 0x3900);
    /// BUS DEVICE RESET FUNCTION OCCURRED.
    pub(super) const RESET: Self = Self::new(key::UNIT_ATTENTION, 0x2903);
    /// CAPACITY DATA HAS CHANGED.
    pub(super) const CAPACITY_CHANGED: Self = Self::new(key::UNIT_ATTENTION, 0x2a09);

    const fn new(key: u8, code: u16) -> Self {
        Self {
            key,
            code,
            information: None,
            field: None,
        }
    }

    const fn at_cdb(mut self, byte: u16, bit: Option<u8>) -> Self {
        self.field = Some(FieldPointer {
            in_cdb: true,
            byte,
            bit,
        });
        self
    }

    /// INVALID FIELD IN CDB; `bit`: the field's most significant bit, if the field is not whole
    /// bytes.
    pub(super) const fn cdb(byte: u16, bit: Option<u8>) -> Self {
        Self::new(key::ILLEGAL_REQUEST, 0x2400).at_cdb(byte, bit)
    }

    /// INVALID FIELD IN PARAMETER LIST.
    pub(super) const fn list(byte: u16, bit: Option<u8>) -> Self {
        let mut sense = Self::new(key::ILLEGAL_REQUEST, 0x2600);
        sense.field = Some(FieldPointer {
            in_cdb: false,
            byte,
            bit,
        });
        sense
    }

    /// MISCOMPARE DURING VERIFY OPERATION; `offset`: of the first byte of the Data-Out Buffer that
    /// differs (SBC-4, 5.3).
    pub(super) const fn miscompare(offset: u64) -> Self {
        let mut sense = Self::new(key::MISCOMPARE, 0x1d00);
        sense.information = Some(offset);
        sense
    }

    /// The sense for a failed backend operation. `io` is the one for an error of the medium.
    pub(super) const fn of(failure: Failure, io: Self) -> Self {
        match failure {
            // The disk has changed since the command was checked.
            Failure::OutOfRange => Self::OUT_OF_RANGE,
            Failure::TooLarge => Self::new(key::ILLEGAL_REQUEST, 0x2400),
            Failure::ReadOnly => Self::WRITE_PROTECTED,
            Failure::Io => io,
        }
    }

    /// Current sense data, in the descriptor format (SPC-5, 4.4.2) or the fixed one (4.4.3).
    pub(super) fn data(&self, descriptors: bool) -> SenseData {
        let mut bytes = [0; SenseData::MAX];
        let code = self.code.to_be_bytes();
        let specific = self.field.map_or([0; 3], |field| {
            let place = if field.in_cdb { 0x40 } else { 0 };
            let bit = field.bit.map_or(0, |bit| 0x08 | bit);
            let byte = field.byte.to_be_bytes();
            [0x80 | place | bit, byte[0], byte[1]]
        });
        if !descriptors {
            bytes[0] = 0x70;
            bytes[2] = self.key;
            // VALID is set only if the information fits in four bytes.
            if let Some(information) = self.information.and_then(|value| u32::try_from(value).ok())
            {
                bytes[0] |= 0x80;
                bytes[3..7].copy_from_slice(&information.to_be_bytes());
            }
            bytes[7] = 10;
            bytes[12..14].copy_from_slice(&code);
            bytes[15..18].copy_from_slice(&specific);
            return SenseData { bytes, len: 18 };
        }
        bytes[..4].copy_from_slice(&[0x72, self.key, code[0], code[1]]);
        let mut len = 8;
        if let Some(information) = self.information {
            bytes[len..len + 4].copy_from_slice(&[0x00, 0x0a, 0x80, 0]);
            bytes[len + 4..len + 12].copy_from_slice(&information.to_be_bytes());
            len += 12;
        }
        if self.field.is_some() {
            bytes[len..len + 2].copy_from_slice(&[0x02, 0x06]);
            bytes[len + 4..len + 7].copy_from_slice(&specific);
            len += 8;
        }
        bytes[7] = (len - 8) as u8;
        let len = len as u8;
        SenseData { bytes, len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_format() {
        let sense = Sense::cdb(7, Some(3)).data(false);
        assert_eq!(
            *sense,
            [
                0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xcb, 0, 7
            ]
        );
        let sense = Sense::miscompare(0x01020304).data(false);
        assert_eq!(
            *sense,
            [
                0xf0, 0, 0xe, 1, 2, 3, 4, 10, 0, 0, 0, 0, 0x1d, 0, 0, 0, 0, 0
            ]
        );
        let sense = Sense::miscompare(1 << 32).data(false);
        assert_eq!(sense[0], 0x70, "does not fit, so it is not valid");
        let sense = Sense::list(0x1234, None).data(false);
        assert_eq!(sense[12..], [0x26, 0, 0, 0x80, 0x12, 0x34]);
    }

    #[test]
    fn descriptor_format() {
        assert_eq!(*Sense::NONE.data(true), [0x72, 0, 0, 0, 0, 0, 0, 0]);
        let sense = Sense::miscompare(0x0102_0304_0506).data(true);
        assert_eq!(
            *sense,
            [
                0x72, 0xe, 0x1d, 0, 0, 0, 0, 12, 0, 0xa, 0x80, 0, 0, 0, 1, 2, 3, 4, 5, 6
            ]
        );
        let sense = Sense::list(3, Some(7)).data(true);
        assert_eq!(
            *sense,
            [0x72, 5, 0x26, 0, 0, 0, 0, 8, 2, 6, 0, 0, 0x8f, 0, 3, 0]
        );
    }
}
