//! The identity of a base image: the mark that it carries, and its inode.

use crate::format::Uuid;

/// The content of a base image's extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ImageMark {
    pub disk: Uuid,
    pub generation: u64,
    /// The newest bytes may be in the disk's log.
    pub open: bool,
}

impl ImageMark {
    /// The mark as text. Its length is fixed, so that a mark that fitted once can always be
    /// replaced.
    pub(crate) fn encode(&self) -> String {
        let state = if self.open { "open" } else { "closed" };
        format!("{} {:016x} {state:<6}", hex(&self.disk), self.generation)
    }

    /// Reads a mark from its text. Version 1 of the format put the UUID alone on the images of open
    /// disks.
    pub(crate) fn decode(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let disk = parse_uuid(words.next()?)?;
        let generation = words.next().map(|word| u64::from_str_radix(word, 16));
        let open = match words.next() {
            None | Some("open") => true,
            Some("closed") => false,
            Some(_) => return None,
        };
        Some(Self {
            disk,
            generation: generation.unwrap_or(Ok(0)).ok()?,
            open,
        })
    }
}

/// A UUID as 32 hex digits.
pub(crate) fn hex(uuid: &Uuid) -> String {
    format!("{:032x}", u128::from_be_bytes(*uuid))
}

/// The UUID of hex digits.
pub(crate) fn parse_uuid(text: &str) -> Option<Uuid> {
    let uuid = u128::from_str_radix(text, 16).ok()?;
    Some(uuid.to_be_bytes())
}

/// The identity of a file on its file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inode {
    pub device: u64,
    pub number: u64,
    /// When the file was made, in nanoseconds since 1970; 0 if the file system does not report it.
    pub born: u64,
    /// When the file was last written to, in the same way.
    pub written: u64,
}
