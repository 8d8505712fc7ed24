//! One batch of a log, read in place or from its segment's summary, and the verification of its
//! payloads.

use std::ops::Range;

use crate::catalog::control::unknown_version;
use crate::error::Result;
use crate::format::{self, BLOCK, BatchHeader, Descriptor};
use crate::mutant::{Mutant, planted};
use crate::recovery::window::Window;

/// A batch with a valid header.
pub(crate) struct Batch {
    pub header: BatchHeader,
    pub descriptors: Vec<Descriptor>,
    /// Checksums of the blocks of all payloads.
    pub checksums: Vec<u32>,
    /// Byte offset of the header in the segment.
    pub offset: u64,
    /// Byte offset of the first payload.
    pub payload_at: u64,
    /// `None`: the segment's summary has the header, and the batch itself was not read.
    pub verified: Option<BatchCheck>,
}

/// The result of checking a batch in place.
pub(crate) struct BatchCheck {
    /// The header is there.
    pub in_place: bool,
    /// Indexes of the blocks whose checksum is wrong.
    pub wrong: Vec<usize>,
}

impl Batch {
    /// Reads the batch header at `offset`. `None` if there is none with a valid CRC and this log's
    /// UUID.
    pub(crate) fn at(window: &mut Window, log: &[u8; 16], offset: u64) -> Result<Option<Self>> {
        if offset + BLOCK as u64 > window.size() {
            return Ok(None);
        }
        let block = window.bytes(offset, BLOCK)?;
        let Some((_, len)) = BatchHeader::peek(block) else {
            return Ok(None);
        };
        if offset + len as u64 > window.size() {
            return Ok(None);
        }
        match Self::parse(window.bytes(offset, len)?, log, offset) {
            Some((batch, _)) if !batch.header.is_known() => {
                Err(unknown_version(window.path(), batch.header.version.get()))
            }
            found => Ok(found.map(|(batch, _)| batch)),
        }
    }

    /// The batch whose header is at the start of `bytes`, and the length of the header with
    /// descriptors and checksums. In the segment, the header is at `offset`. `None` without a valid
    /// CRC and this log's UUID.
    pub(crate) fn parse(bytes: &[u8], log: &[u8; 16], offset: u64) -> Option<(Self, usize)> {
        let (header, len) = BatchHeader::peek(bytes)?;
        let numbers = [
            header.sequence,
            header.cid,
            header.first_lsn,
            header.durable_lsn,
        ];
        // No counter ever gets near the end of u64, so this header is not ours.
        if header.log != *log || !format::counted(&numbers) {
            return None;
        }
        let (descriptors, checksums) = header.records(bytes.get(..len)?)?;
        let batch = Self {
            header,
            descriptors,
            checksums,
            offset,
            payload_at: offset + len.next_multiple_of(BLOCK) as u64,
            verified: None,
        };
        Some((batch, len))
    }

    /// Whether all bytes of the batch are known to be in place.
    pub(crate) fn is_whole(&self) -> bool {
        let verified = self.verified.as_ref();
        verified.is_some_and(|found| found.in_place && found.wrong.is_empty())
    }

    pub(crate) fn last_lsn(&self) -> u64 {
        let others = self.descriptors.len() as u64 - 1;
        self.header.first_lsn.get().saturating_add(others)
    }

    /// The offset after the batch, where the next one is expected.
    pub(crate) fn end(&self) -> u64 {
        let payload: u64 = self.descriptors.iter().map(Descriptor::payload_len).sum();
        (self.payload_at + payload).next_multiple_of(BLOCK as u64)
    }

    /// The records, oldest first: LSN, descriptor, byte offset of the payload in the segment, and
    /// indexes of its blocks.
    pub(crate) fn records(&self) -> impl Iterator<Item = (u64, &Descriptor, u64, Range<usize>)> {
        let (mut at, mut block) = (self.payload_at, 0);
        let records = (self.header.first_lsn.get()..).zip(&self.descriptors);
        records.map(move |(lsn, descriptor)| {
            let (offset, first) = (at, block);
            at += descriptor.payload_len();
            block += descriptor.checksums();
            (lsn, descriptor, offset, first..block)
        })
    }

    /// Verifies the batch in place.
    pub(crate) fn verify(&mut self, window: &mut Window) -> Result<()> {
        let found = Self::at(window, &self.header.log, self.offset)?;
        // The CRC covers the descriptors and the checksums too.
        let in_place = found.is_some_and(|found| found.header.crc == self.header.crc);
        self.verify_payloads(window, in_place)
    }

    /// Verifies the payloads. `in_place`: the header is in place.
    pub(crate) fn verify_payloads(&mut self, window: &mut Window, in_place: bool) -> Result<()> {
        let mut wrong = Vec::new();
        let (mut at, mut number) = (self.payload_at, 0);
        for descriptor in &self.descriptors {
            let end = at + descriptor.payload_len();
            while at < end {
                let block_end = end.min(at + BLOCK as u64);
                let mut crc = 0;
                while at < block_end {
                    let bytes = window.bytes_up_to(at, block_end)?;
                    crc = crc32c::crc32c_append(crc, bytes);
                    at += bytes.len() as u64;
                }
                if crc != self.checksums[number] && !planted(Mutant::RecoverySkipsChecksum) {
                    wrong.push(number);
                }
                number += 1;
            }
        }
        self.verified = Some(BatchCheck { in_place, wrong });
        Ok(())
    }
}
