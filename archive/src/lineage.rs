//! The way through an archive: which parts follow each other.
//!
//! ```text
//!   epoch 1   1 2 3 4 5 ─┐ after 1/5      (6: a writer that had lost the epoch; on no line)
//!   epoch 2              └ 1 2 3
//!   epoch 3   1 2 3 4        begins anew: a line of its own
//! ```
//! Where parts are missing, because they have expired or the store has lost them, one line ends and
//! another begins.

use std::collections::{BTreeMap, BTreeSet};

use walvisor_storage::LogRoot;

use crate::epoch::{Claim, LogCopy};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{self, ObjectId};
use crate::object::{self, BaseHeader, PartHeader};
use crate::remote::{Archive, ListEntry};

/// Claims that a store's list may lack before the newest one that it has.
const LAG: u64 = 64;
/// Claims, and parts in a row, that it may lack behind.
const MOST_UNLISTED: u64 = 1000;
/// After so many parts that a list lacks, another list tells whether they are only newer.
const RELISTED: u64 = 20;
/// So many of them are enough: a writer may never rest.
const MOST_LISTS: u32 = 5;

/// What an archive has: claims, and the numbers of parts and bases of each epoch.
pub(crate) struct Catalog {
    pub claims: BTreeMap<u64, Claim>,
    /// The error of the first damaged claim. Nobody knows which part its epoch follows.
    pub damaged_claim: Option<Error>,
    /// The lowest and the highest numbers of parts that follow each other, by epoch, in order.
    parts: BTreeMap<u64, Vec<(u64, u64)>>,
    /// The parts in the store's list, with their sizes.
    pub listed_parts: Vec<(ObjectId, u64)>,
    pub bases: Vec<ObjectId>,
}

/// Parts that follow each other, in epochs that continue each other. Oldest first: an epoch, its
/// first part, and its last one that counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lineage(pub Vec<(u64, u64, u64)>);

impl Lineage {
    /// Whether a part is on the line.
    pub(crate) fn has(&self, place: ObjectId) -> bool {
        let mut spans = self.0.iter();
        spans.any(|&(epoch, first, last)| {
            epoch == place.epoch && (first..=last).contains(&place.number)
        })
    }

    /// Whether the images of a base and the line's log lead to its points.
    pub(crate) fn leads(&self, base: &BaseHeader) -> bool {
        self.has(base.first_part) && self.has(base.exact_part)
    }

    /// The parts, in order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = ObjectId> {
        let spans = self.0.clone().into_iter();
        spans.flat_map(|(epoch, first, last)| {
            (first..=last).map(move |number| ObjectId { epoch, number })
        })
    }

    /// The parts from this one on.
    pub(crate) fn from(&self, place: ObjectId) -> impl Iterator<Item = ObjectId> {
        self.parts().skip_while(move |at| *at != place)
    }

    /// The newest part.
    pub(crate) fn end(&self) -> Option<ObjectId> {
        let &(epoch, _, number) = self.0.last()?;
        Some(ObjectId { epoch, number })
    }

    /// Cuts off what is damaged or missing at the end; warnings name it. Returns the header of the
    /// newest part that is whole.
    pub(crate) async fn cut_damaged_end(
        &mut self,
        archive: &Archive,
    ) -> Result<Option<PartHeader>> {
        while let Some(end) = self.end() {
            if let Some(header) = whole_part(archive, end).await? {
                return Ok(Some(header));
            }
            let span = self.0.pop().filter(|span| span.1 < span.2);
            let left = span.map(|(epoch, first, last)| (epoch, first, last - 1));
            self.0.extend(left);
        }
        Ok(None)
    }

    /// The newest epoch that has a part of the line.
    pub(crate) fn epoch(&self) -> u64 {
        self.0.last().map_or(0, |last| last.0)
    }
}

impl Catalog {
    /// Lists an archive. What is in no list yet is asked for by its name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none.
    pub(crate) async fn read(archive: &Archive) -> Result<Self> {
        Self::read_from(archive, None).await
    }

    /// As [`read`](Self::read), without the parts before this one.
    pub(crate) async fn read_from(archive: &Archive, first: Option<ObjectId>) -> Result<Self> {
        let (claims, damaged_claim) = Self::read_claims(archive).await?;
        let before = first.map(|first| {
            layout::part(ObjectId {
                number: first.number.saturating_sub(1),
                ..first
            })
        });
        let mut listed_parts = Vec::new();
        let mut parts: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
        for ListEntry { name, bytes, .. } in
            archive.list_after(layout::PARTS, before.as_deref()).await?
        {
            let Some(place) = place_of(&name) else {
                continue;
            };
            listed_parts.push((place, bytes));
            let runs = parts.entry(place.epoch).or_default();
            match runs.last_mut() {
                Some((_, last)) if place.number == *last + 1 => *last += 1,
                _ => runs.push((place.number, place.number)),
            }
        }
        for (&epoch, runs) in &mut parts {
            // Here, too, the list may lack some.
            let mut listed = std::mem::take(runs).into_iter().peekable();
            while let Some((first, listed_last)) = listed.next() {
                let listed_last = ObjectId {
                    epoch,
                    number: listed_last,
                };
                let next = listed.peek().map_or(u64::MAX, |next| next.0);
                let last = last_in_a_row(archive, listed_last, next).await?;
                match runs.last_mut() {
                    Some((_, before)) if *before + 1 == first => *before = last,
                    _ => runs.push((first, last)),
                }
            }
        }
        let bases = archive.list(layout::BASES).await?;
        let bases = bases.iter().filter_map(|base| place_of(&base.name));
        Ok(Self {
            claims,
            damaged_claim,
            parts,
            listed_parts,
            bases: bases.collect(),
        })
    }

    /// The claims, by epoch.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none.
    pub(crate) async fn claims(archive: &Archive) -> Result<BTreeMap<u64, Claim>> {
        Ok(Self::read_claims(archive).await?.0)
    }

    async fn read_claims(archive: &Archive) -> Result<(BTreeMap<u64, Claim>, Option<Error>)> {
        let listed = archive.list(layout::EPOCHS).await?;
        let numbers = listed
            .iter()
            .filter_map(|claim| layout::number(&claim.name))
            .filter(|epoch| *epoch < u64::MAX - MOST_UNLISTED);
        let shown: BTreeSet<u64> = numbers.collect();
        let mut epochs = shown.clone();
        let newest = *epochs.last().ok_or_else(|| no_archive(archive))?;
        // Some stores' lists lag behind.
        epochs.extend(newest.saturating_sub(LAG).max(1)..=newest + MOST_UNLISTED);
        let (mut claims, mut damaged) = (BTreeMap::new(), None);
        for epoch in epochs {
            match find_claim(archive, epoch).await {
                Ok(Some(claim)) => drop(claims.insert(epoch, claim)),
                Ok(None) if epoch > newest => break,
                Ok(None) if shown.contains(&epoch) => {
                    let why = "the store's list has it, and the store does not";
                    damaged.get_or_insert(Error::damaged(&layout::epoch(epoch), why));
                }
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Damaged => {
                    claims.insert(epoch, Claim::unknown(epoch, &error));
                    damaged.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok((claims, damaged))
    }

    /// The newest epoch.
    pub(crate) fn newest(&self) -> Option<&Claim> {
        self.claims.values().next_back()
    }

    /// The newest claim by which a replica was promoted, after the last claim of this copy of the
    /// log.
    pub(crate) fn promoted_since(&self, copy: &LogCopy) -> Option<&Claim> {
        let newest = self.claims.values().rev();
        let mut since = newest.take_while(|claim| !copy.has_claimed(claim));
        since.find(|claim| claim.promoted)
    }

    /// The manifests of base images, in the order of their places, without their chunks: an archive
    /// may have many, of large disks. A warning names each damaged one, which is left out. Also
    /// returns whether there is any.
    pub(crate) async fn read_bases(&self, archive: &Archive) -> Result<(Vec<BaseHeader>, bool)> {
        let (mut bases, mut damaged) = (Vec::new(), false);
        for &at in &self.bases {
            match whole_base(archive, at).await? {
                Some((mut base, _)) => {
                    base.images.iter_mut().for_each(|image| {
                        image.chunks = Vec::new();
                    });
                    base.stored = Vec::new();
                    bases.push(base);
                }
                None => damaged = true,
            }
        }
        Ok((bases, damaged))
    }

    /// The line of the newest epoch, and those before it that it would continue if no part were
    /// missing, newest first. If they have no part yet, the newest line.
    pub(crate) fn newest_lines(&self) -> Vec<Lineage> {
        let newest = self.newest().map_or(0, |newest| newest.epoch);
        let mut lines = self.lines_to(newest, &mut Vec::new());
        if lines.is_empty() {
            lines = self.lines();
            lines.truncate(1);
        }
        lines
    }

    /// The lines, newest first.
    pub(crate) fn lines(&self) -> Vec<Lineage> {
        let (mut lines, mut done) = (Vec::new(), Vec::new());
        for &epoch in self.claims.keys().rev() {
            if done.contains(&epoch) {
                continue;
            }
            for line in self.lines_to(epoch, &mut done) {
                // Two epochs may follow the same one.
                if !lines.contains(&line) {
                    lines.push(line);
                }
            }
        }
        lines
    }

    /// The line that ends with this epoch, and those before it that it would continue if no part
    /// were missing, newest first. `done` gets all their epochs.
    fn lines_to(&self, epoch: u64, done: &mut Vec<u64>) -> Vec<Lineage> {
        let (mut lines, mut line) = (Vec::new(), Vec::new());
        let (mut at, mut most) = (Some(epoch), u64::MAX);
        // The part that the line follows.
        let mut follows = None;
        while let Some(epoch) = at {
            done.push(epoch);
            let after = self.claims.get(&epoch).and_then(|claim| claim.after);
            // A claim that names a later epoch is nonsense, and would never end.
            let after = after.filter(|after| after.epoch < epoch);
            for &(first, last) in self.parts.get(&epoch).into_iter().flatten().rev() {
                let number = last.min(most);
                if first > number {
                    continue;
                }
                if !line.is_empty() && follows != Some(ObjectId { epoch, number }) {
                    line.reverse();
                    lines.push(Lineage(std::mem::take(&mut line)));
                }
                line.push((epoch, first, number));
                follows = after.filter(|_| first == 1);
            }
            (at, most) = (
                after.map(|after| after.epoch),
                after.map_or(0, |after| after.number),
            );
        }
        line.reverse();
        lines.extend((!line.is_empty()).then_some(Lineage(line)));
        lines
    }
}

/// The number of the last part that follows a listed one in a row, before the number `next`. The
/// store's list may lack some.
async fn last_in_a_row(archive: &Archive, listed: ObjectId, next: u64) -> Result<u64> {
    let name = |number| layout::part(ObjectId { number, ..listed });
    let mut last = listed.number;
    let (mut most, mut lists) = (last.saturating_add(MOST_UNLISTED), 0);
    while lists < MOST_LISTS && last + 1 < next && archive.has(&name(last + 1)).await? {
        last += 1;
        if (most - last).is_multiple_of(RELISTED) {
            let before = name(last - 1);
            let later = archive.list_after(layout::PARTS, Some(&before)).await?;
            let mut later = later.iter().map(|listed| &listed.name);
            if later.next() == Some(&name(last)) {
                // A writer that is faster than these questions.
                while last + 1 < next && later.next() == Some(&name(last + 1)) {
                    last += 1;
                }
                most = last.saturating_add(MOST_UNLISTED);
                lists += 1;
            }
        }
        if last == most {
            let why = "the store's list lacks it, and too many others";
            return Err(Error::damaged(&name(last), why));
        }
    }
    Ok(last)
}

/// The error for an address where no archive is.
pub(crate) fn no_archive(archive: &Archive) -> Error {
    let message = format!("{}: no archive of a log", archive.shown());
    Error::new(
        ErrorKind::NotFound,
        format!("{message}; 'walvisor archive push LOG URL' makes one"),
    )
}

/// The epoch and the number in a name. Nobody counts to numbers that others could not follow.
fn place_of(name: &str) -> Option<ObjectId> {
    let (folder, _) = name.rsplit_once('/')?;
    let number = |name| layout::number(name).filter(|number| *number < u64::MAX - MOST_UNLISTED);
    Some(ObjectId {
        epoch: number(folder)?,
        number: number(name)?,
    })
}

/// Reads a part.
pub(crate) async fn read_part(archive: &Archive, at: ObjectId) -> Result<(PartHeader, Vec<u8>)> {
    open_part(at, &archive.need(&layout::part(at)).await?)
}

/// Reads something again if it is damaged: it may be the answer that is wrong.
async fn twice<T>(read: impl AsyncFn() -> Result<T>) -> Result<T> {
    match read().await {
        Err(error) if error.kind() == ErrorKind::Damaged => read().await,
        read => read,
    }
}

/// Reads a claim.
async fn find_claim(archive: &Archive, epoch: u64) -> Result<Option<Claim>> {
    let name = layout::epoch(epoch);
    twice(async || {
        let found = archive.get(&name).await?;
        let claim = found.map(|bytes| Claim::decode(&bytes, &name, epoch));
        claim.transpose()
    })
    .await
}

/// Reads a part, or says how it is damaged or missing.
pub(crate) async fn try_part(
    archive: &Archive,
    at: ObjectId,
) -> Result<std::result::Result<(PartHeader, Vec<u8>), Error>> {
    match twice(async || read_part(archive, at).await).await {
        Err(error) if error.kind() == ErrorKind::Damaged => Ok(Err(error)),
        read => read.map(Ok),
    }
}

/// Reads the header of a part. `None`: the part is damaged or missing, and a warning names it.
pub(crate) async fn whole_part(archive: &Archive, at: ObjectId) -> Result<Option<PartHeader>> {
    match try_part(archive, at).await? {
        Ok((header, _)) => Ok(Some(header)),
        Err(error) => {
            let archive = archive.shown();
            tracing::warn!("{archive}: {error}; the log counts as ended before it; {MEND_PART}");
            Ok(None)
        }
    }
}

/// What to do about a part that is damaged.
pub(crate) const MEND_PART: &str = "if it stays so, remove that object from the store: the next \
                                    'walvisor archive push' then sends again what the log still has";

/// Reads a part that may not be there yet.
pub(crate) async fn find_part(
    archive: &Archive,
    at: ObjectId,
) -> Result<Option<(PartHeader, Vec<u8>)>> {
    let found = archive.get(&layout::part(at)).await?;
    found.map(|object| open_part(at, &object)).transpose()
}

/// Reads the manifest of base images. `None`: it is damaged or missing, and a warning names it.
pub(crate) async fn whole_base(
    archive: &Archive,
    at: ObjectId,
) -> Result<Option<(BaseHeader, Vec<u8>)>> {
    match twice(async || read_base(archive, at).await).await {
        Err(error) if error.kind() == ErrorKind::Damaged => {
            let archive = archive.shown();
            tracing::warn!(
                "{archive}: {error}; these images are left out, and what only they lead to can't be \
                 restored; if it stays so, remove that object from the store"
            );
            Ok(None)
        }
        read => read.map(Some),
    }
}

fn open_part(at: ObjectId, object: &[u8]) -> Result<(PartHeader, Vec<u8>)> {
    let name = layout::part(at);
    let (header, body) = object::open::<PartHeader>(&name, object)?;
    let lens = header.pieces.iter().map(|piece| piece.len);
    let len = lens.fold(header.root_len, u64::saturating_add);
    if header.at != at || len != body.len() as u64 {
        return Err(Error::damaged(&name, "its header does not fit its body"));
    }
    Ok((header, body))
}

/// Reads the root in a part.
pub(crate) async fn read_root(archive: &Archive, at: ObjectId) -> Result<LogRoot> {
    let (header, body) = read_part(archive, at).await?;
    let root = LogRoot::decode(&body[..header.root_len as usize]);
    root.map_err(|error| Error::damaged(&layout::part(at), error))
}

/// Reads the manifest of base images.
pub(crate) async fn read_base(archive: &Archive, at: ObjectId) -> Result<(BaseHeader, Vec<u8>)> {
    let name = layout::base(at);
    let (header, root) = object::open::<BaseHeader>(&name, &archive.need(&name).await?)?;
    if header.at != at {
        let why = "its header belongs to another object";
        return Err(Error::damaged(&name, why));
    }
    let checked = header.check();
    checked.map_err(|why| Error::damaged(&name, why))?;
    let decoded = LogRoot::decode(&root).map_err(|error| Error::damaged(&name, error))?;
    let of_log = decoded.images().into_iter();
    let copied = header
        .images
        .iter()
        .map(|image| (image.disk_id, image.bytes));
    if !copied.eq(of_log.map(|image| (image.disk_id, image.bytes))) {
        return Err(Error::damaged(
            &name,
            "its images are not those of the log's disks",
        ));
    }
    Ok((header, root))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catalog(claims: &[(u64, Option<(u64, u64)>)], parts: &[(u64, u64, u64)]) -> Catalog {
        let place = |(epoch, number)| ObjectId { epoch, number };
        let claim = |&(epoch, after): &(u64, Option<(u64, u64)>)| Claim {
            epoch,
            writer: String::new(),
            owner: String::new(),
            host: String::new(),
            copy: None,
            directory: None,
            after: after.map(place),
            promoted: false,
            made_us: 0,
        };
        Catalog {
            claims: claims.iter().map(|known| (known.0, claim(known))).collect(),
            parts: parts.iter().fold(BTreeMap::new(), |mut runs, part| {
                let of_epoch: &mut Vec<_> = runs.entry(part.0).or_default();
                of_epoch.push((part.1, part.2));
                runs
            }),
            damaged_claim: None,
            listed_parts: Vec::new(),
            bases: Vec::new(),
        }
    }

    #[test]
    fn a_line_leaves_out_what_a_writer_added_that_had_lost_its_epoch() {
        let catalog = catalog(
            &[(1, None), (2, Some((1, 5))), (3, None), (4, Some((3, 2)))],
            &[(1, 1, 7), (2, 1, 3), (3, 1, 4)],
        );
        let lines = catalog.lines();
        assert_eq!(
            lines,
            [
                Lineage(vec![(3, 1, 2)]),
                Lineage(vec![(1, 1, 5), (2, 1, 3)])
            ]
        );
        let place = |epoch, number| ObjectId { epoch, number };
        assert!(lines[1].has(place(1, 5)) && !lines[1].has(place(1, 6)));
        let parts: Vec<_> = lines[1].from(place(1, 4)).collect();
        assert_eq!(
            parts,
            [
                place(1, 4),
                place(1, 5),
                place(2, 1),
                place(2, 2),
                place(2, 3)
            ]
        );
        assert_eq!(lines[0].end(), Some(place(3, 2)));
    }

    #[test]
    fn a_line_ends_where_parts_are_missing() {
        let catalog = catalog(
            &[(1, None), (2, Some((1, 9))), (3, Some((2, 4)))],
            // 1/4, 1/5 and 2/1 are missing, and 1/10 counts for nobody.
            &[(1, 2, 3), (1, 6, 10), (2, 2, 4), (3, 1, 1)],
        );
        let wanted = [
            Lineage(vec![(2, 2, 4), (3, 1, 1)]),
            Lineage(vec![(1, 6, 9)]),
            Lineage(vec![(1, 2, 3)]),
        ];
        assert_eq!(catalog.lines(), wanted);
    }

    /// Nobody may write such a claim, but a reader must end.
    #[test]
    fn a_claim_of_itself_ends() {
        let catalog = catalog(
            &[(1, Some((2, 1))), (2, Some((2, 1)))],
            &[(2, 1, 2), (1, 1, 1)],
        );
        assert_eq!(
            catalog.lines(),
            [Lineage(vec![(2, 1, 2)]), Lineage(vec![(1, 1, 1)])]
        );
    }
}
