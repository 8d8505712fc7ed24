//! Names of the simulated medium: which path leads to which file, now and after a power cut.
//!
//! Directories are names too: losing one loses everything in it. A name that was created, changed
//! or removed is durable once its directory was synced. Of the unsynced changes a power cut keeps
//! any subset, since directories promise no order. Of a rename it may keep both names, but never
//! neither.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use walvisor_testkit::Random;

use crate::mutant::{Mutant, planted};
use crate::sync::Arc;

/// The value of a name that leads to a directory.
pub(super) const DIRECTORY: usize = usize::MAX;

/// One change of names.
#[derive(Clone, Debug, Hash)]
enum NameChange {
    Set(PathBuf, usize),
    Rename(PathBuf, PathBuf, usize),
    Unset(PathBuf),
}

impl NameChange {
    /// The name that is changed or created.
    fn path(&self) -> &Path {
        match self {
            Self::Set(path, _) | Self::Rename(_, path, _) | Self::Unset(path) => path,
        }
    }

    /// Whether a planted fault keeps the change from becoming durable.
    fn is_left_out(&self) -> bool {
        planted(match self {
            Self::Set(_, DIRECTORY) => Mutant::LogNamesUnsynced,
            Self::Rename(_, to, _) if to.ends_with("control") => Mutant::LogNamesUnsynced,
            Self::Rename(_, to, _) if last(to).starts_with("segment") => {
                Mutant::SegmentNameUnsynced
            }
            Self::Rename(..) => Mutant::ImageNameUnsynced,
            Self::Set(..) | Self::Unset(_) => return false,
        })
    }

    /// `whole`: a rename also removes the old name.
    fn apply(&self, names: &mut BTreeMap<PathBuf, usize>, whole: bool) {
        match self {
            Self::Set(path, file) => drop(names.insert(path.clone(), *file)),
            Self::Unset(path) => drop(names.remove(path)),
            Self::Rename(from, to, file) => {
                names.insert(to.clone(), *file);
                // The old name may lead to another file by now.
                if whole && names.get(from) == Some(file) {
                    names.remove(from);
                }
            }
        }
    }
}

/// The names of the medium. Files are identified by their numbers.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct Names {
    durable: BTreeMap<PathBuf, usize>,
    current: BTreeMap<PathBuf, usize>,
    /// Changes since the last sync of their directories, in order.
    changes: Vec<NameChange>,
}

impl Names {
    pub(super) fn get(&self, path: &Path) -> Option<usize> {
        self.current.get(path).copied()
    }

    /// The file with this name in any directory.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        let mut names = self.current.iter();
        let found = names.find(|(path, _)| path.file_name().is_some_and(|last| last == name));
        found.map(|(_, file)| *file)
    }

    /// The files and their names. Of a file with two, the one that sorts first is last: a segment's
    /// final name, not the one that it was made under.
    pub(super) fn of_files(&self) -> Vec<(usize, Arc<str>)> {
        let files = self.current.iter().rev();
        let files = files.filter(|(_, file)| **file != DIRECTORY);
        files.map(|(path, file)| (*file, last(path))).collect()
    }

    /// Whether the directory exists. The root always does.
    pub(super) fn has_directory(&self, path: &Path) -> bool {
        path.parent().is_none() || self.get(path) == Some(DIRECTORY)
    }

    pub(super) fn in_directory(&self, dir: &Path) -> Vec<OsString> {
        let names = self
            .current
            .keys()
            .filter(|path| path.parent() == Some(dir));
        names
            .filter_map(|path| Some(path.file_name()?.to_owned()))
            .collect()
    }

    /// Whether a file has a name, now or possibly after a power cut.
    pub(super) fn leads_to(&self, file: usize) -> bool {
        let changed = |change: &NameChange| matches!(change, NameChange::Set(_, other) | NameChange::Rename(_, _, other) if *other == file);
        let mut names = self.current.values().chain(self.durable.values());
        names.any(|other| *other == file) || self.changes.iter().any(changed)
    }

    pub(super) fn set(&mut self, path: &Path, file: usize) {
        self.change(NameChange::Set(path.to_owned(), file));
    }

    pub(super) fn unset(&mut self, path: &Path) {
        self.change(NameChange::Unset(path.to_owned()));
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path, file: usize) {
        self.change(NameChange::Rename(from.to_owned(), to.to_owned(), file));
    }

    /// Moves a file, durably.
    pub(super) fn move_file(&mut self, from: &Path, to: &Path) {
        if let Some(file) = self.get(from) {
            self.set(to, file);
            self.unset(from);
            for path in [from, to] {
                self.sync(path.parent().expect("a directory"));
            }
        }
    }

    fn change(&mut self, change: NameChange) {
        change.apply(&mut self.current, true);
        self.changes.push(change);
    }

    /// Makes the names in a directory durable.
    pub(super) fn sync(&mut self, dir: &Path) {
        let here =
            |change: &mut NameChange| change.path().parent() == Some(dir) && !change.is_left_out();
        for change in self.changes.extract_if(.., here) {
            change.apply(&mut self.durable, true);
        }
    }

    /// How many changes a power cut may keep or lose.
    pub(super) fn unsynced(&self) -> usize {
        self.changes.len()
    }

    /// Whether the n-th change is a rename.
    pub(super) fn renames(&self, n: usize) -> bool {
        matches!(self.changes[n], NameChange::Rename(..))
    }

    /// The names after a power cut. `kept` says for the n-th change whether it is lost, kept
    /// without removing the old name, or kept.
    pub(super) fn settle(&mut self, mut kept: impl FnMut(usize) -> NameFate) {
        for (n, change) in std::mem::take(&mut self.changes).into_iter().enumerate() {
            match kept(n) {
                NameFate::Lost => {}
                kept => change.apply(&mut self.durable, kept == NameFate::Whole),
            }
        }
        let lost = |names: &BTreeMap<PathBuf, usize>| {
            let parent_is_there = |path: &PathBuf| {
                let parent = path.parent().expect("no name of the root");
                parent.parent().is_none() || names.get(parent) == Some(&DIRECTORY)
            };
            names.keys().find(|path| !parent_is_there(path)).cloned()
        };
        while let Some(path) = lost(&self.durable) {
            self.durable.remove(&path);
        }
        self.current = self.durable.clone();
    }

    /// Loses power: none, all, the first or any part of the changes are kept.
    pub(super) fn lose_power(&mut self, random: &mut Random) {
        let changes = self.unsynced() as u64;
        if changes == 0 {
            return;
        }
        let (mode, end) = (random.below(4), random.below(changes + 1) as usize);
        self.settle(|n| match mode {
            0 => NameFate::Lost,
            1 => NameFate::Whole,
            2 if n < end => NameFate::Whole,
            2 => NameFate::Lost,
            _ => [NameFate::Lost, NameFate::Added, NameFate::Whole][random.below(3) as usize],
        });
    }
}

/// The fate of a change of names in a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameFate {
    Lost,
    /// The new name of a rename exists, and the old one too.
    Added,
    Whole,
}

/// The last part of a path.
pub(super) fn last(path: &Path) -> Arc<str> {
    let name = path.file_name().expect("a path of a file");
    name.to_string_lossy().into()
}
