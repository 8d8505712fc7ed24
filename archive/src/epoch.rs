//! One writer: epochs.
//!
//! A writer claims the next epoch by creating its object, which must not exist. The claim names the
//! part after which the epoch's own parts follow. Whatever an earlier writer still adds to its own
//! epoch behind that part, nobody reads.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result, printable};
use crate::layout::{self, ObjectId};
use crate::object;
use crate::remote::{Archive, CreateOutcome};

/// The file in a log's directory that says which copy of the log it is.
const COPY: &str = "copy";

/// The claim of an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    pub epoch: u64,
    /// A random number of the writer.
    pub writer: String,
    /// Machine and process of the writer, for people.
    pub owner: String,
    /// The writer's machine.
    pub host: String,
    /// Which copy of the log it has, if that came from an archive: a machine may have several, and
    /// two machines may have the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
    /// The directory of the log: its inode, and when that was made. `None`: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// The last part before this epoch's own; none: the epoch begins with a base of its own.
    pub after: Option<ObjectId>,
    /// Whether a replica was promoted with it: then the log that it follows is no more, whether or
    /// not it could go on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub promoted: bool,
    /// When it was claimed, by the writer's clock.
    pub made_us: u64,
}

/// A copy of a log: on which machine, and which one there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogCopy {
    pub host: String,
    /// `None`: it did not come from an archive.
    pub copy: Option<String>,
    /// Its directory, which may be moved within its file system, but not copied.
    pub directory: Option<String>,
}

impl LogCopy {
    /// The one in a log's directory.
    ///
    /// # Errors
    /// If what is noted there can't be read.
    pub(crate) fn at(log_dir: &Path) -> Result<Self> {
        let path = log_dir.join(COPY);
        let copy = match std::fs::read_to_string(&path) {
            Ok(text) => Some(text.trim().to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::local("read", &path, error)),
        };
        Ok(Self {
            host: host(),
            copy,
            directory: Some(directory(log_dir)?),
        })
    }

    /// Notes in a log's directory that it is a copy of its own.
    ///
    /// # Errors
    /// If that can't be written.
    pub(crate) fn begin(log_dir: &Path) -> Result<()> {
        let path = log_dir.join(COPY);
        let write = |random: String| {
            std::fs::write(&path, random)?;
            File::open(&path)?.sync_all()?;
            File::open(log_dir)?.sync_all()
        };
        write(random()?).map_err(|error| Error::local("write", &path, error))
    }

    /// Whether a claim is of this copy in this directory, as far as it tells.
    pub(crate) fn has_claimed_here(&self, claim: &Claim) -> bool {
        let here = claim.directory.is_none() || claim.directory == self.directory;
        self.has_claimed(claim) && here
    }

    /// Whether a claim is of this copy, or of a copy of its directory.
    pub(crate) fn has_claimed(&self, claim: &Claim) -> bool {
        (&claim.host, &claim.copy) == (&self.host, &self.copy)
    }
}

/// What tells a directory from its copies, also after it was moved, and after a restart.
fn directory(path: &Path) -> Result<String> {
    let found = path.metadata();
    let found = found.map_err(|error| Error::local("look at the log's directory", path, error))?;
    // A file system may use an inode's number again.
    let made = found.created().ok();
    let made = made.and_then(|made| made.duration_since(UNIX_EPOCH).ok());
    let made = made.map_or(0, |made| made.as_nanos());
    Ok(format!("{}-{made}", found.ino()))
}

/// A random number, in hex.
pub(crate) fn random() -> Result<String> {
    let read = || {
        let mut bytes = [0; 16];
        std::io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut bytes)?;
        Ok(bytes)
    };
    let bytes: [u8; 16] =
        read().map_err(|error| Error::local("read", Path::new("/dev/urandom"), error))?;
    Ok(object::hex(&bytes))
}

/// This machine's name.
fn host() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match host.trim() {
        "" => "a machine without a name".to_owned(),
        host => host.to_owned(),
    }
}

impl Claim {
    /// The claim in an object. A damaged one counts as that of an unknown writer, and a warning
    /// names it.
    pub(crate) fn of(bytes: &[u8], name: &str, epoch: u64) -> Self {
        Self::decode(bytes, name, epoch).unwrap_or_else(|error| Self::unknown(epoch, &error))
    }

    /// The claim in an object.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`].
    pub(crate) fn decode(bytes: &[u8], name: &str, epoch: u64) -> Result<Self> {
        let claim = serde_json::from_slice(bytes).map_err(|error| Error::damaged(name, error))?;
        match claim {
            Self { epoch: other, .. } if other != epoch => {
                let why = format!("it is the claim of epoch {other}");
                Err(Error::damaged(name, why))
            }
            claim => Ok(Self {
                owner: printable(&claim.owner),
                ..claim
            }),
        }
    }

    /// What counts instead of a damaged claim. A warning names that one.
    pub(crate) fn unknown(epoch: u64, error: &Error) -> Self {
        tracing::warn!("{error}; this program treats the archive as begun anew there");
        Self {
            epoch,
            writer: String::new(),
            owner: "a writer whose claim is damaged".to_owned(),
            host: String::new(),
            copy: None,
            directory: None,
            after: None,
            promoted: false,
            made_us: 0,
        }
    }
}

/// Claims an epoch.
///
/// # Errors
/// [`ErrorKind::Fenced`] if somebody else has claimed it.
pub(crate) async fn claim(archive: &Archive, claim: &Claim) -> Result<()> {
    let text = serde_json::to_vec_pretty(claim).map_err(object::not_json)?;
    let name = layout::epoch(claim.epoch);
    if let CreateOutcome::Taken(found) = archive.create(&name, &Bytes::from(text)).await? {
        let found = Claim::of(&found, &name, claim.epoch);
        // Or an earlier attempt of ours, whose answer was lost.
        if found.writer != claim.writer || found.after != claim.after {
            return Err(lost(archive, &found));
        }
    }
    archive.anchor(&name);
    Ok(())
}

/// Refuses to go on if a later epoch than this one was claimed.
///
/// # Errors
/// [`ErrorKind::Fenced`], with who has it.
pub(crate) async fn refuse_later(archive: &Archive, epoch: u64) -> Result<()> {
    let name = layout::epoch(epoch + 1);
    match archive.get(&name).await? {
        None => Ok(()),
        Some(found) => Err(lost(archive, &Claim::of(&found, &name, epoch + 1))),
    }
}

fn lost(archive: &Archive, claim: &Claim) -> Error {
    Error::new(
        ErrorKind::Fenced,
        format!(
            "{}: {} writes this archive now (epoch {}); stop that one first, or give this log an \
             archive of its own",
            archive.shown(),
            claim.owner,
            claim.epoch
        ),
    )
}

/// Refuses a store that creates an object twice: two writers would overwrite each other's parts.
///
/// # Errors
/// [`ErrorKind::InvalidInput`].
pub(crate) async fn probe(archive: &Archive, random: &str) -> Result<()> {
    if !archive.fencing || archive.refuses_second(&format!("probes/{random}")).await? {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!(
            "{}: the store ignores conditions (If-None-Match), so it can't keep a second writer \
             out; use another store, or make sure yourself that only one log has this archive, and \
             add ?fencing=off to its address",
            archive.shown()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_was_moved_is_the_same_and_one_that_was_made_anew_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let [log, moved] = ["log", "moved"].map(|name| dir.path().join(name));
        std::fs::create_dir(&log).unwrap();
        let copy = LogCopy::at(&log).unwrap();
        let mut claim = Claim::of(b"", "claim", 1);
        (claim.host, claim.directory) = (copy.host.clone(), copy.directory.clone());
        assert!(copy.has_claimed_here(&claim));
        std::fs::rename(&log, &moved).unwrap();
        assert_eq!(LogCopy::at(&moved).unwrap(), copy);
        std::fs::create_dir(&log).unwrap();
        let other = LogCopy::at(&log).unwrap();
        assert!(other.has_claimed(&claim) && !other.has_claimed_here(&claim));
        // Earlier programs have not told it.
        claim.directory = None;
        assert!(other.has_claimed_here(&claim));
    }
}
