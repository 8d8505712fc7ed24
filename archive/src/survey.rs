//! What an archive has.

use walvisor_storage::Commit;

use crate::error::{Result, printable};
use crate::lineage::Catalog;
use crate::remote::Archive;
use crate::uploader::now_us;

/// What an archive has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The number of the newest epoch: how often an uploader has claimed the archive.
    pub epoch: u64,
    /// Who claimed it: a process and a machine.
    pub owner: String,
    /// The spans of the log, newest first. Each can be restored from its first base on.
    pub spans: Vec<ArchiveEnd>,
    /// Bytes of the parts of the log, as they are stored.
    pub part_bytes: u64,
}

/// A span of the log in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveEnd {
    /// The newest epoch of the span.
    pub epoch: u64,
    /// The newest record.
    pub last: Commit,
    /// How long ago its part was made, in microseconds, by the clocks of both machines.
    pub age_us: u64,
    /// Copies of the base images, oldest first. The disks can be restored to any commit from the
    /// first one's `exact` on.
    pub bases: Vec<ArchiveBase>,
}

/// A copy of the base images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveBase {
    /// The oldest commit to which it leads.
    pub exact: Commit,
    /// Names and sizes of the images, in bytes.
    pub images: Vec<(String, u64)>,
    /// When the copy ended, in microseconds since 1970.
    pub made_us: u64,
}

/// Looks at an archive.
///
/// # Errors
/// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is none; if it can't be read.
pub fn survey(archive: &Archive) -> Result<Survey> {
    archive.block_on(async {
        let catalog = Catalog::read(archive).await?;
        let (bases, _) = catalog.read_bases(archive).await?;
        let mut spans = Vec::new();
        for mut line in catalog.lines() {
            let Some(newest) = line.cut_damaged_end(archive).await? else {
                continue;
            };
            let of_line = bases.iter().filter(|base| line.leads(base));
            spans.push(ArchiveEnd {
                epoch: line.epoch(),
                last: newest.last.into(),
                age_us: now_us().saturating_sub(newest.made_us),
                bases: of_line
                    .map(|base| ArchiveBase {
                        exact: base.exact.into(),
                        images: base
                            .images
                            .iter()
                            .map(|image| (printable(&image.name), image.bytes))
                            .collect(),
                        made_us: base.made_us,
                    })
                    .collect(),
            });
        }
        let newest = catalog.newest();
        Ok(Survey {
            epoch: newest.map_or(0, |claim| claim.epoch),
            owner: newest.map_or_else(String::new, |claim| claim.owner.clone()),
            spans,
            part_bytes: catalog.listed_parts.iter().map(|(_, bytes)| bytes).sum(),
        })
    })
}
