//! All that a power cut may leave of what was written and not synced.

use super::medium::{FileState, SECTOR};

/// Up to so many states are all made.
const MOST: usize = 4096;

/// A sector that may hold its durable bytes or any of what was written to it since.
struct Torn {
    file: usize,
    /// Which of the file's cached writes may have been the last that reached the medium.
    cached: Vec<usize>,
}

/// What a power cut may leave.
pub(super) struct CrashStates {
    pub states: Vec<Vec<FileState>>,
    /// There are more than these: only those where the writes up to some time or from some time on, one alone or all
    /// but one reached the medium.
    pub bounded: bool,
}

/// See the module's documentation. Any subset of the sectors written may be there, each in any version. Different
/// subsets that leave the same bytes are one state.
pub(super) fn crash_states(files: &[FileState]) -> CrashStates {
    let torn: Vec<Torn> = (0..files.len())
        .flat_map(|file| torn_sectors(file, &files[file]))
        .collect();
    let total = torn.iter().try_fold(1usize, |total, sector| {
        total.checked_mul(1 + sector.cached.len())
    });
    // For each torn sector 0: its durable bytes, n: the n-th version after them.
    let picks = match total {
        Some(total) if total <= MOST => (0..total).map(|state| digits(state, &torn)).collect(),
        _ => extremes(&torn),
    };
    CrashStates {
        states: picks
            .iter()
            .map(|picks| state(files, &torn, picks))
            .collect(),
        bounded: total.is_none_or(|total| total > MOST),
    }
}

/// The sectors of a file that may hold different bytes.
fn torn_sectors(file: usize, state: &FileState) -> Vec<Torn> {
    let mut offsets: Vec<usize> = Vec::new();
    for (offset, _) in &state.cached {
        if !offsets.contains(offset) {
            offsets.push(*offset);
        }
    }
    let versions = |offset: usize| {
        let durable = &state.durable[offset..offset + SECTOR];
        let mut cached: Vec<usize> = Vec::new();
        for (i, (at, bytes)) in state.cached.iter().enumerate() {
            let new = *at == offset
                && bytes != durable
                && cached.iter().all(|&other| state.cached[other].1 != *bytes);
            if new {
                cached.push(i);
            }
        }
        Torn { file, cached }
    };
    let torn = offsets.into_iter().map(versions);
    torn.filter(|torn| !torn.cached.is_empty()).collect()
}

/// The `number`-th combination.
fn digits(mut number: usize, torn: &[Torn]) -> Vec<usize> {
    let digit = |sector: &Torn| {
        let digit = number % (1 + sector.cached.len());
        number /= 1 + sector.cached.len();
        digit
    };
    torn.iter().map(digit).collect()
}

fn extremes(torn: &[Torn]) -> Vec<Vec<usize>> {
    let pick = |keep: &dyn Fn(usize) -> bool| {
        let newest = |i: usize| if keep(i) { torn[i].cached.len() } else { 0 };
        (0..torn.len()).map(newest).collect::<Vec<_>>()
    };
    (0..=torn.len())
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

fn state(files: &[FileState], torn: &[Torn], picks: &[usize]) -> Vec<FileState> {
    let mut files = files.to_vec();
    for (file, state) in files.iter_mut().enumerate() {
        let cached = std::mem::take(&mut state.cached);
        let kept = torn
            .iter()
            .zip(picks)
            .filter(|(sector, _)| sector.file == file);
        let kept = kept.filter_map(|(sector, pick)| sector.cached.get(pick.checked_sub(1)?));
        state.settle(kept.map(|&version| &cached[version]));
    }
    files
}
