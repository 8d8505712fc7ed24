//! The archive's own objects: parts of the log, and manifests of base images.
//!
//! Both have a JSON header and a body, compressed together, and a checksum over everything. The
//! header is text so that people can read it; the body is bytes of the log, as they are.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use walvisor_storage::{Commit, LogPlace, Point};

use crate::error::{Error, ErrorKind, Result};
use crate::layout::ObjectId;

/// The format's version.
pub(crate) const VERSION: u32 = 1;
/// Bytes of the frame before the compressed bytes: magic, version, length of the header, length of
/// the body.
const FRAME: usize = 8 + 4 + 4 + 8;
/// Bytes of the checksum at the end.
const SUM: usize = 32;
/// Most bytes of header and body.
pub(crate) const MOST_BYTES: u64 = if cfg!(test) { 3 << 19 } else { 256 << 20 };
/// Most bytes of a chunk, as it is in the image.
pub(crate) const MOST_CHUNK_BYTES: u64 = 64 << 20;
/// The level of zstd: what a processor compresses faster than a network takes it.
pub(crate) const ZSTD_LEVEL: i32 = 3;

/// An object with a header of this type.
pub(crate) trait Header: Serialize + DeserializeOwned {
    const MAGIC: &'static [u8; 8];
}

/// A point in the log's history, in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moment {
    pub lsn: u64,
    pub cid: u64,
    pub unix_us: u64,
}

impl From<Commit> for Moment {
    fn from(Commit { lsn, cid, unix_us }: Commit) -> Self {
        Self { lsn, cid, unix_us }
    }
}

impl From<Moment> for Commit {
    fn from(Moment { lsn, cid, unix_us }: Moment) -> Self {
        Self { lsn, cid, unix_us }
    }
}

/// The header of a part of the log. The body has the root, if there is one, and then the pieces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartHeader {
    pub at: ObjectId,
    /// The random number of the writer that has the epoch.
    pub writer: String,
    /// The first record; none if there is no piece.
    pub first: Option<Moment>,
    /// The newest record in this part or before.
    pub last: Moment,
    pub pieces: Vec<PartPiece>,
    /// Behind the last piece of this part or before; none: there was no piece yet.
    pub end: Option<NextPiece>,
    /// Bytes of the log's root, which begins the body; 0: none, it is as it was in `root_at`.
    pub root_len: u64,
    /// The part with the newest root.
    pub root_at: ObjectId,
    /// The part in which each segment that the log still needs begins, by sequence.
    pub segments: Vec<(u64, ObjectId)>,
    /// Where the log's clock went back in this part or before: the first record with an earlier time
    /// than the one before it. Only those with no earlier time behind them.
    #[serde(default)]
    pub set_back: Vec<Moment>,
    /// When the part was made, by this machine's clock.
    pub made_us: u64,
}

impl Header for PartHeader {
    const MAGIC: &'static [u8; 8] = b"WALVPART";
}

impl PartHeader {
    /// An LSN up to which no record is after a time, whatever its own time says: the log was as of
    /// the last record up to that time. `None`: there is none.
    pub(crate) fn before(&self, at: Point) -> Option<u64> {
        let Point::Time(unix_us) = at else {
            return None;
        };
        let mut moments = self.set_back.iter().rev();
        let moment = moments.find(|moment| moment.unix_us <= unix_us);
        moment.map(|moment| moment.lsn)
    }
}

/// Notes a record in a list of moments at which the clock went back: `last` is the one before it.
pub(crate) fn note_clock(set_back: &mut Vec<Moment>, last: Moment, next: Moment) {
    if next.unix_us < last.unix_us {
        set_back.retain(|moment| moment.unix_us < next.unix_us);
        set_back.push(next);
    }
}

/// A piece of a segment in a part's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartPiece {
    pub sequence: u64,
    /// Byte offset in the segment.
    pub offset: u64,
    pub len: u64,
}

/// Where the next piece is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NextPiece {
    pub sequence: u64,
    pub salt: u64,
    pub offset: u64,
    pub crc: u32,
    pub lsn: u64,
}

impl From<LogPlace> for NextPiece {
    fn from(place: LogPlace) -> Self {
        let LogPlace {
            sequence,
            salt,
            offset,
            crc,
            lsn,
        } = place;
        Self {
            sequence,
            salt,
            offset,
            crc,
            lsn,
        }
    }
}

impl From<NextPiece> for LogPlace {
    fn from(end: NextPiece) -> Self {
        let NextPiece {
            sequence,
            salt,
            offset,
            crc,
            lsn,
        } = end;
        Self {
            sequence,
            salt,
            offset,
            crc,
            lsn,
        }
    }
}

/// The header of a manifest of base images. The body is the log's root when the copy began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BaseHeader {
    pub at: ObjectId,
    pub writer: String,
    /// The part in which the first segment that the log needs begins.
    pub first_part: ObjectId,
    /// Sequence of that segment.
    pub first_sequence: u64,
    /// The images have no record after this LSN.
    pub images_lsn: u64,
    /// The part with which the images become exact, and its last record.
    pub exact_part: ObjectId,
    pub exact: Moment,
    pub chunk_bytes: u64,
    pub images: Vec<BaseImage>,
    /// Bytes of each chunk that it names, as it is stored, in their order; none, or 0: not known.
    #[serde(default)]
    pub stored: Vec<u32>,
    pub made_us: u64,
}

impl Header for BaseHeader {
    const MAGIC: &'static [u8; 8] = b"WALVBASE";
}

impl BaseHeader {
    /// The hashes of the chunks that it names.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = &str> {
        let images = self.images.iter();
        images.flat_map(|image| image.chunks.iter().flatten().map(String::as_str))
    }

    /// The same with the bytes of each, as it is stored; 0: not known.
    pub(crate) fn stored_chunks(&self) -> impl Iterator<Item = (&str, u32)> {
        let stored = self.stored.iter().copied();
        self.chunks().zip(stored.chain(std::iter::repeat(0)))
    }

    /// Whether a restore can trust it.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        if !(1..=MOST_CHUNK_BYTES).contains(&self.chunk_bytes) {
            return Err(format!("chunks of {} bytes", self.chunk_bytes));
        }
        for image in &self.images {
            let chunks = image.bytes.div_ceil(self.chunk_bytes);
            if image.chunks.len() as u64 != chunks {
                let (name, found) = (&image.name, image.chunks.len());
                return Err(format!("it names {found} chunks of {name}, not {chunks}"));
            }
            let mut hashes = image.chunks.iter().flatten();
            if !hashes.all(|hash| digest(hash).is_some()) {
                return Err("it names a chunk by what is no SHA-256".to_owned());
            }
        }
        Ok(())
    }

    /// Bytes of a chunk of an image; the last one may be shorter.
    pub(crate) fn chunk_len(&self, image: &BaseImage, number: usize) -> u64 {
        let offset = number as u64 * self.chunk_bytes;
        image.bytes.saturating_sub(offset).min(self.chunk_bytes)
    }
}

/// An image in a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BaseImage {
    pub disk_id: u32,
    /// The name of the image's file.
    pub name: String,
    pub bytes: u64,
    /// The SHA-256 of each chunk in hex; none: all zero.
    pub chunks: Vec<Option<String>>,
}

/// The bytes of an object.
pub(crate) fn seal<H: Header>(header: &H, body: &[u8]) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(header).map_err(not_json)?;
    let plain = [&text[..], body].concat();
    if plain.len() as u64 > MOST_BYTES {
        return Err(too_large());
    }
    let packed = pack(&plain)?;
    let mut object = Vec::with_capacity(FRAME + packed.len() + SUM);
    object.extend_from_slice(H::MAGIC);
    object.extend_from_slice(&VERSION.to_le_bytes());
    object.extend_from_slice(&(text.len() as u32).to_le_bytes());
    object.extend_from_slice(&(body.len() as u64).to_le_bytes());
    object.extend_from_slice(&packed);
    let sum = Sha256::digest(&object);
    object.extend_from_slice(&sum);
    Ok(object)
}

/// The header and the body of an object. `name` is for errors.
///
/// # Errors
/// [`ErrorKind::Damaged`] if these are not the bytes that were sealed.
pub(crate) fn open<H: Header>(name: &str, object: &[u8]) -> Result<(H, Vec<u8>)> {
    let damaged = |why: &str| Error::damaged(name, why);
    let framed = object.len().checked_sub(SUM).filter(|len| *len >= FRAME);
    let Some(framed) = framed else {
        return Err(damaged("too short"));
    };
    let (object, sum) = object.split_at(framed);
    if Sha256::digest(object)[..] != *sum {
        return Err(damaged("its checksum is wrong"));
    }
    let number = |at: usize| object[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
    if object[..8] != *H::MAGIC {
        return Err(damaged("another kind of object"));
    } else if number(8) != VERSION {
        let version = number(8);
        // Not damaged: nothing may be cut off or sent again because of it.
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "object {name}: archive format version {version}; this program knows version \
                 {VERSION}: use the program that wrote it"
            ),
        ));
    }
    let header_len = u64::from(number(12));
    let body_len = object[16..24].try_into().map_or(0, u64::from_le_bytes);
    let len = header_len.saturating_add(body_len);
    if len > MOST_BYTES {
        return Err(damaged("its length is impossible"));
    }
    let mut plain = unpack(&object[FRAME..], len as usize);
    let whole = plain.as_mut().filter(|plain| plain.len() as u64 == len);
    let Some(plain) = whole else {
        return Err(damaged("it can't be decompressed"));
    };
    let body = plain.split_off(header_len as usize);
    let header = serde_json::from_slice(plain);
    let header = header.map_err(|error| damaged(&format!("its header is wrong: {error}")))?;
    Ok((header, body))
}

/// The error for what an archive can't hold.
pub(crate) fn too_large() -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!(
            "an object would have more than {} MiB: the disks of this log hold more than an archive \
             can name, about 13 TiB of data; give the largest ones logs and archives of their own",
            MOST_BYTES >> 20
        ),
    )
}

/// The error for a value that is no JSON.
pub(crate) fn not_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::InvalidInput, error.to_string())
}

/// Compresses bytes.
pub(crate) fn pack(plain: &[u8]) -> Result<Vec<u8>> {
    let packed = zstd::bulk::compress(plain, ZSTD_LEVEL);
    packed.map_err(|error| Error::new(ErrorKind::Local, format!("zstd: {error}")))
}

/// Decompresses bytes: at most `most`.
pub(crate) fn unpack(packed: &[u8], most: usize) -> Option<Vec<u8>> {
    zstd::bulk::decompress(packed, most).ok()
}

/// The SHA-256 of bytes, in hex.
pub(crate) fn hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The bytes of a SHA-256 in hex; `None`: it is none.
pub(crate) fn digest(hex: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if hex.len() != 64 || !hex.is_ascii() {
        return None;
    }
    for (byte, at) in digest.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).ok()?;
    }
    Some(digest)
}

/// Bytes in hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> PartHeader {
        let at = ObjectId {
            epoch: 2,
            number: 7,
        };
        PartHeader {
            at,
            writer: "w".into(),
            first: None,
            last: Commit::default().into(),
            pieces: Vec::new(),
            end: None,
            root_len: 0,
            root_at: at,
            segments: vec![(5, at)],
            set_back: Vec::new(),
            made_us: 1,
        }
    }

    #[test]
    fn every_flipped_bit_and_every_shorter_object_is_noticed() {
        let object = seal(&header(), &[7; 100]).unwrap();
        let (read, body) = open::<PartHeader>("part", &object).unwrap();
        assert_eq!((read, &body[..]), (header(), &[7; 100][..]));
        for bit in 0..object.len() * 8 {
            let mut bad = object.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let error = open::<PartHeader>("part", &bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged, "bit {bit}");
        }
        for len in 0..object.len() {
            assert!(open::<PartHeader>("part", &object[..len]).is_err());
        }
        let error = open::<BaseHeader>("part", &object).unwrap_err().to_string();
        assert!(error.contains("another kind"), "{error}");
    }

    /// Whatever can be written can be read.
    #[test]
    fn what_could_not_be_opened_is_not_sealed() {
        let head = serde_json::to_vec(&header()).unwrap().len();
        let most = MOST_BYTES as usize - head;
        let object = seal(&header(), &vec![7; most]).unwrap();
        assert_eq!(open::<PartHeader>("part", &object).unwrap().1.len(), most);
        let refused = seal(&header(), &vec![7; most + 1]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput, "{refused}");
    }

    #[test]
    fn a_later_version_is_named() {
        let mut object = seal(&header(), b"").unwrap();
        object[8] = 2;
        let framed = object.len() - SUM;
        let sum = Sha256::digest(&object[..framed]);
        object[framed..].copy_from_slice(&sum);
        let error = open::<PartHeader>("part", &object).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let error = error.to_string();
        assert!(
            error.contains("version 2; this program knows version 1"),
            "{error}"
        );
    }
}
