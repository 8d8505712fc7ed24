//! The way through an archive: which parts follow each other.
//!
//! ```text
//!   epoch 1   1 2 3 4 5 ─┐ after 1/5      (6: a writer that had lost the epoch; on no line)
//!   epoch 2              └ 1 2 3
//!   epoch 3   1 2 3 4        begins anew: a line of its own
//! ```

use std::collections::BTreeMap;

use walvisor_storage::LogRoot;

use crate::epoch::Claim;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{self, Place};
use crate::object::{self, BaseHeader, PartHeader};
use crate::remote::Archive;

/// What an archive has: claims, and the numbers of parts and bases of each epoch.
pub(crate) struct Catalog {
    pub claims: BTreeMap<u64, Claim>,
    /// The lowest and the highest number of the parts that follow each other up to there, by epoch.
    parts: BTreeMap<u64, (u64, u64)>,
    pub part_bytes: u64,
    pub bases: Vec<Place>,
}

/// Parts that follow each other, in epochs that continue each other. Oldest first: an epoch, its
/// first part, and its last one that counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line(pub Vec<(u64, u64, u64)>);

impl Line {
    /// Whether a part is on the line.
    pub(crate) fn has(&self, place: Place) -> bool {
        let mut spans = self.0.iter();
        spans.any(|&(epoch, first, last)| {
            epoch == place.epoch && (first..=last).contains(&place.number)
        })
    }

    /// The parts from this one on.
    pub(crate) fn from(&self, place: Place) -> impl Iterator<Item = Place> {
        let spans = self.0.clone().into_iter();
        let all = spans.flat_map(|(epoch, first, last)| {
            (first..=last).map(move |number| Place { epoch, number })
        });
        all.skip_while(move |at| *at != place)
    }

    /// The newest part.
    pub(crate) fn end(&self) -> Option<Place> {
        let &(epoch, _, number) = self.0.last()?;
        Some(Place { epoch, number })
    }

    /// The newest epoch that has a part of the line.
    pub(crate) fn epoch(&self) -> u64 {
        self.0.last().map_or(0, |last| last.0)
    }
}

impl Catalog {
    /// Lists an archive.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none.
    pub(crate) async fn read(archive: &Archive) -> Result<Self> {
        let mut claims = BTreeMap::new();
        for (name, _) in archive.list(layout::EPOCHS).await? {
            if layout::number(&name).is_none() {
                continue;
            }
            let claim = Claim::of(&archive.need(&name).await?, &name)?;
            claims.insert(claim.epoch, claim);
        }
        if claims.is_empty() {
            return Err(no_archive(archive));
        }
        let mut parts: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        let mut part_bytes = 0;
        for (name, bytes) in archive.list(layout::PARTS).await? {
            let Some(place) = place_of(&name) else {
                continue;
            };
            part_bytes += bytes;
            let known = parts.get(&place.epoch).copied();
            match known {
                // A hole: what is behind it follows nothing.
                Some((_, last)) if place.number != last + 1 => {}
                Some((first, _)) => drop(parts.insert(place.epoch, (first, place.number))),
                None => drop(parts.insert(place.epoch, (place.number, place.number))),
            }
        }
        // Some stores' lists lag behind.
        for (&epoch, (_, last)) in &mut parts {
            while archive
                .has(&layout::part(Place {
                    epoch,
                    number: *last + 1,
                }))
                .await?
            {
                *last += 1;
            }
        }
        let bases = archive.list(layout::BASES).await?;
        let bases = bases.iter().filter_map(|(name, _)| place_of(name));
        Ok(Self {
            claims,
            parts,
            part_bytes,
            bases: bases.collect(),
        })
    }

    /// The newest epoch.
    pub(crate) fn newest(&self) -> Option<&Claim> {
        self.claims.values().next_back()
    }

    /// The lines, newest first.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let (mut lines, mut done) = (Vec::new(), Vec::new());
        for &epoch in self.claims.keys().rev() {
            if done.contains(&epoch) {
                continue;
            }
            let (mut line, mut at, mut most) = (Vec::new(), Some(epoch), u64::MAX);
            while let Some(epoch) = at {
                done.push(epoch);
                if let Some(&(first, last)) = self.parts.get(&epoch)
                    && first <= last.min(most)
                {
                    line.push((epoch, first, last.min(most)));
                }
                let after = self.claims.get(&epoch).and_then(|claim| claim.after);
                // A claim that names a later epoch is nonsense, and would never end.
                let after = after.filter(|after| after.epoch < epoch);
                (at, most) = (
                    after.map(|after| after.epoch),
                    after.map_or(0, |after| after.number),
                );
            }
            line.reverse();
            if !line.is_empty() {
                lines.push(Line(line));
            }
        }
        lines
    }
}

/// The error for an address where no archive is.
pub(crate) fn no_archive(archive: &Archive) -> Error {
    let message = format!("{}: no archive of a log", archive.shown());
    Error::new(
        ErrorKind::NotFound,
        format!("{message}; 'walvisor archive push LOG URL' makes one"),
    )
}

/// The epoch and the number in a name.
fn place_of(name: &str) -> Option<Place> {
    let (folder, _) = name.rsplit_once('/')?;
    Some(Place {
        epoch: layout::number(folder)?,
        number: layout::number(name)?,
    })
}

/// Reads a part.
pub(crate) async fn read_part(archive: &Archive, at: Place) -> Result<(PartHeader, Vec<u8>)> {
    let name = layout::part(at);
    let (header, body) = object::open::<PartHeader>(&name, &archive.need(&name).await?)?;
    let pieces: u64 = header.pieces.iter().map(|piece| piece.len).sum();
    if header.at != at || header.root_len.saturating_add(pieces) != body.len() as u64 {
        return Err(Error::damaged(&name, "its header does not fit its body"));
    }
    Ok((header, body))
}

/// Reads the root in a part.
pub(crate) async fn read_root(archive: &Archive, at: Place) -> Result<LogRoot> {
    let (header, body) = read_part(archive, at).await?;
    let root = LogRoot::decode(&body[..header.root_len as usize]);
    root.map_err(|error| Error::damaged(&layout::part(at), error))
}

/// Reads the manifest of base images.
pub(crate) async fn read_base(archive: &Archive, at: Place) -> Result<(BaseHeader, Vec<u8>)> {
    let name = layout::base(at);
    let (header, root) = object::open::<BaseHeader>(&name, &archive.need(&name).await?)?;
    if header.at != at || header.chunk_bytes == 0 {
        return Err(Error::damaged(
            &name,
            "its header belongs to another object",
        ));
    }
    Ok((header, root))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catalog(claims: &[(u64, Option<(u64, u64)>)], parts: &[(u64, u64, u64)]) -> Catalog {
        let place = |(epoch, number)| Place { epoch, number };
        let claim = |&(epoch, after): &(u64, Option<(u64, u64)>)| Claim {
            epoch,
            writer: String::new(),
            owner: String::new(),
            host: String::new(),
            after: after.map(place),
            made_us: 0,
        };
        Catalog {
            claims: claims.iter().map(|known| (known.0, claim(known))).collect(),
            parts: parts
                .iter()
                .map(|&(epoch, first, last)| (epoch, (first, last)))
                .collect(),
            part_bytes: 0,
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
            [Line(vec![(3, 1, 2)]), Line(vec![(1, 1, 5), (2, 1, 3)])]
        );
        let place = |epoch, number| Place { epoch, number };
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

    /// Nobody may write such a claim, but a reader must end.
    #[test]
    fn a_claim_of_itself_ends() {
        let catalog = catalog(
            &[(1, Some((2, 1))), (2, Some((2, 1)))],
            &[(2, 1, 2), (1, 1, 1)],
        );
        assert_eq!(
            catalog.lines(),
            [Line(vec![(2, 1, 2)]), Line(vec![(1, 1, 1)])]
        );
    }
}
