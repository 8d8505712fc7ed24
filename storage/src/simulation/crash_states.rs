//! All states that a power cut may leave of writes that were not synced.

use super::medium::StoredFiles;
use super::names::NameFate;

/// Up to this many states, all are built.
const MOST: usize = 4096;

/// A part of the state of which a power cut may leave several versions.
enum CutChoice {
    /// A sector may hold its durable bytes or those of any later write. `cached`: the cached writes
    /// that may have been the last to reach the medium.
    Sector { file: usize, cached: Vec<usize> },
    /// A file may have its durable length, or one of `new` lengths that it got since.
    Length { file: usize, new: usize },
    /// A file's attribute may have its durable value, or one of `new` values that it got since.
    Mark { file: usize, new: usize },
    /// A change of names, by its number, may be lost or kept; a rename may also leave the old name
    /// in place.
    Name { change: usize, renames: bool },
}

impl CutChoice {
    /// The number of versions. In the first, nothing of the change is left; in the last, all of it.
    fn ways(&self) -> usize {
        match self {
            Self::Sector { cached, .. } => 1 + cached.len(),
            Self::Length { new, .. } | Self::Mark { new, .. } => 1 + new,
            Self::Name { renames, .. } => 2 + usize::from(*renames),
        }
    }
}

/// The states that a power cut may leave.
pub(super) struct CrashStates {
    pub states: Vec<StoredFiles>,
    /// Whether there are more states than these. Then only those are built where the changes up to
    /// some time, or from some time on, or only one, or all but one, reached the medium.
    pub bounded: bool,
}

/// Builds the states. Any subset of the written sectors may be there, each in any version.
/// Different subsets that leave the same bytes are one state.
pub(super) fn crash_states(stored: &StoredFiles) -> CrashStates {
    let named = (0..stored.files.len()).filter(|&file| stored.names.leads_to(file));
    let mut open: Vec<CutChoice> = named.flat_map(|file| of_file(file, stored)).collect();
    open.extend((0..stored.names.unsynced()).map(|change| CutChoice::Name {
        change,
        renames: stored.names.renames(change),
    }));
    let total = open
        .iter()
        .try_fold(1usize, |total, open| total.checked_mul(open.ways()));
    let picks = match total {
        Some(total) if total <= MOST => (0..total).map(|state| digits(state, &open)).collect(),
        _ => extremes(&open),
    };
    CrashStates {
        states: picks
            .iter()
            .map(|picks| state(stored, &open, picks))
            .collect(),
        bounded: total.is_none_or(|total| total > MOST),
    }
}

/// The length of a file and those of its sectors that may hold different bytes.
fn of_file(file: usize, stored: &StoredFiles) -> Vec<CutChoice> {
    let state = &stored.files[file];
    let mut offsets: Vec<usize> = Vec::new();
    for (offset, _) in &state.cached {
        if !offsets.contains(offset) {
            offsets.push(*offset);
        }
    }
    let versions = |offset: usize| {
        let durable = state.durable.sector(offset);
        let mut cached: Vec<usize> = Vec::new();
        for (i, (at, bytes)) in state.cached.iter().enumerate() {
            let new = *at == offset
                && durable != Some(&bytes[..])
                && cached.iter().all(|&other| state.cached[other].1 != *bytes);
            if new {
                cached.push(i);
            }
        }
        CutChoice::Sector { file, cached }
    };
    let length = CutChoice::Length {
        file,
        new: state.lengths.len(),
    };
    let mark = CutChoice::Mark {
        file,
        new: state.marks.len(),
    };
    let open = offsets.into_iter().map(versions).chain([length, mark]);
    open.filter(|open| open.ways() > 1).collect()
}

/// The `number`-th combination.
fn digits(mut number: usize, open: &[CutChoice]) -> Vec<usize> {
    let digit = |open: &CutChoice| {
        let digit = number % open.ways();
        number /= open.ways();
        digit
    };
    open.iter().map(digit).collect()
}

fn extremes(open: &[CutChoice]) -> Vec<Vec<usize>> {
    let pick = |keep: &dyn Fn(usize) -> bool| {
        let newest = |i: usize| if keep(i) { open[i].ways() - 1 } else { 0 };
        (0..open.len()).map(newest).collect::<Vec<_>>()
    };
    (0..=open.len())
        .flat_map(|n| {
            [
                pick(&|i| i < n),
                pick(&|i| i >= n),
                pick(&|i| i == n),
                pick(&|i| i != n),
            ]
        })
        .collect()
}

fn state(stored: &StoredFiles, open: &[CutChoice], picks: &[usize]) -> StoredFiles {
    let mut stored = stored.clone();
    let picked = || open.iter().zip(picks);
    for (number, state) in stored.files.iter_mut().enumerate() {
        let cached = std::mem::take(&mut state.cached);
        let kept = picked().filter_map(|(open, pick)| match open {
            CutChoice::Sector { file, cached } if *file == number => {
                cached.get(pick.checked_sub(1)?)
            }
            _ => None,
        });
        let length = picked().find_map(|(open, pick)| match open {
            CutChoice::Length { file, .. } if *file == number => Some(*pick),
            _ => None,
        });
        let mark = picked().find_map(|(open, pick)| match open {
            CutChoice::Mark { file, .. } if *file == number => Some(*pick),
            _ => None,
        });
        let kept = kept.map(|&version| &cached[version]);
        state.settle(length.unwrap_or(0), mark.unwrap_or(0), kept);
    }
    stored.names.settle(|n| {
        let pick = picked().find_map(|(open, pick)| match open {
            CutChoice::Name { change, .. } if *change == n => Some((*pick, open.ways())),
            _ => None,
        });
        match pick {
            None | Some((0, _)) => NameFate::Lost,
            Some((pick, ways)) if pick + 1 == ways => NameFate::Whole,
            Some(_) => NameFate::Added,
        }
    });
    stored
}
