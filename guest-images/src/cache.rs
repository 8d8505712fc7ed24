//! The cache of built images, outside the source tree.
//!
//! ```text
//!   inputs (package versions, scripts) ──SHA-256──▶ key
//!   <root>/guest-<key>/            complete or absent: built elsewhere, then renamed
//!       ...                        the files
//!       SHA256SUMS                 checked at every use; a damaged entry is rebuilt
//!   <root>/guest.lock              held while an entry is checked or built
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use crate::error::{Error, FileContext, Result};
use crate::reporter::Reporter;

/// The file of an entry that lists the SHA-256 of the others.
pub(crate) const MANIFEST: &str = "SHA256SUMS";
/// Entries that were not used for this long are removed when a new entry is built.
const MAX_UNUSED: Duration = Duration::from_secs(14 * 24 * 3600);

/// Where built images are kept.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens the cache at `explicit`, or else `$WALVISOR_CACHE`, `$XDG_CACHE_HOME/walvisor` or
    /// `~/.cache/walvisor`. Creates it if it is missing.
    ///
    /// # Errors
    /// No directory is known, or it cannot be created.
    pub fn open(explicit: Option<PathBuf>) -> Result<Self> {
        let set = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let root = explicit
            .or_else(|| set("WALVISOR_CACHE"))
            .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("walvisor")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/walvisor")))
            .ok_or_else(|| {
                Error::Unusable(
                    "no place for built images: set WALVISOR_CACHE to a directory".to_owned(),
                )
            })?;
        fs::create_dir_all(&root).at("create", &root)?;
        let root = root.canonicalize().at("open", &root)?;
        Ok(Self { root })
    }

    /// The cache's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Takes the lock called `name`. If another process holds it, prints a note and waits.
    ///
    /// # Errors
    /// The lock file cannot be created or locked.
    pub(crate) fn lock(&self, name: &str, reporter: &Reporter) -> Result<File> {
        let path = self.root.join(format!("{name}.lock"));
        let file = File::create(&path).at("create", &path)?;
        if file.try_lock().is_err() {
            reporter.note(&format!(
                "waiting for another process: {} is locked",
                path.display()
            ));
            file.lock().at("lock", &path)?;
        }
        Ok(file)
    }

    /// Returns the directory of this `kind` for these `inputs`. If it is not in the cache yet,
    /// `build` fills it.
    ///
    /// # Errors
    /// The errors of `build`; the unfinished directory is removed.
    pub(crate) fn entry(
        &self,
        kind: &str,
        inputs: &[&[u8]],
        reporter: &Reporter,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let directory = self.root.join(format!("{kind}-{}", key(inputs)));
        let lock = self.lock(kind, reporter)?;
        if directory.exists() {
            match verify(&directory) {
                Ok(()) => {
                    touch(&directory);
                    return Ok(directory);
                }
                Err(damage) => {
                    reporter.note(&format!("rebuilding the {kind} images: {damage}"));
                    fs::remove_dir_all(&directory).at("remove", &directory)?;
                }
            }
        } else {
            reporter.note(&format!(
                "building the {kind} images in {}",
                directory.display()
            ));
        }
        // Because this process holds the lock, an unfinished directory is what a killed build has
        // left.
        let unfinished = self.root.join(format!("{kind}.unfinished"));
        if unfinished.exists() {
            fs::remove_dir_all(&unfinished).at("remove", &unfinished)?;
        }
        fs::create_dir(&unfinished).at("create", &unfinished)?;
        let built = build(&unfinished).and_then(|()| seal(&unfinished));
        if let Err(error) = built {
            let _ = fs::remove_dir_all(&unfinished);
            return Err(error);
        }
        fs::rename(&unfinished, &directory).at("rename", &unfinished)?;
        self.remove_unused(kind);
        drop(lock);
        Ok(directory)
    }

    /// Removes entries of `kind` that have not been used for a long time. Best effort: they only
    /// take space.
    fn remove_unused(&self, kind: &str) {
        let prefix = format!("{kind}-");
        for entry in fs::read_dir(&self.root).into_iter().flatten().flatten() {
            let old = entry
                .path()
                .join(MANIFEST)
                .metadata()
                .and_then(|metadata| metadata.modified())
                .is_ok_and(|used| used.elapsed().is_ok_and(|age| age > MAX_UNUSED));
            if old && entry.file_name().to_string_lossy().starts_with(&prefix) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

fn key(inputs: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for input in inputs {
        // The length separates the inputs: ("ab", "c") is not ("a", "bc").
        hash.update((input.len() as u64).to_le_bytes());
        hash.update(input);
    }
    hash.finalize()
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// SHA-256 of a file, in hexadecimal.
pub(crate) fn checksum(path: &Path) -> Result<String> {
    let mut file = File::open(path).at("open", path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).at("read", path)? {
            0 => break,
            count => hash.update(&buffer[..count]),
        }
    }
    Ok(hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

fn checksums(directory: &Path) -> Result<BTreeMap<String, String>> {
    let mut sums = BTreeMap::new();
    for entry in fs::read_dir(directory).at("read", directory)? {
        let entry = entry.at("read", directory)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != MANIFEST {
            sums.insert(name, checksum(&entry.path())?);
        }
    }
    Ok(sums)
}

/// Writes the manifest, and makes the entry durable before it is renamed.
fn seal(directory: &Path) -> Result<()> {
    let text: String = checksums(directory)?
        .iter()
        .map(|(name, sum)| format!("{sum}  {name}\n"))
        .collect();
    let manifest = directory.join(MANIFEST);
    fs::write(&manifest, text).at("write", &manifest)?;
    for entry in fs::read_dir(directory).at("read", directory)? {
        let path = entry.at("read", directory)?.path();
        File::open(&path)
            .and_then(|file| file.sync_all())
            .at("sync", &path)?;
    }
    Ok(())
}

fn verify(directory: &Path) -> Result<()> {
    let manifest = directory.join(MANIFEST);
    let text = fs::read_to_string(&manifest).at("read", &manifest)?;
    let expected: BTreeMap<String, String> = text
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(sum, name)| (name.to_owned(), sum.to_owned()))
        .collect();
    if expected.is_empty() || checksums(directory)? != expected {
        return Err(Error::Unusable(format!(
            "{} does not match its checksums",
            directory.display()
        )));
    }
    Ok(())
}

/// Marks the entry as just used. Best effort: the time only decides when it is removed.
fn touch(directory: &Path) {
    if let Ok(manifest) = File::options().append(true).open(directory.join(MANIFEST)) {
        let _ = manifest.set_modified(SystemTime::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn an_entry_is_built_once_per_input_and_again_after_damage() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(root.path().to_owned())).unwrap();
        let reporter = Reporter::quiet(None);
        let builds = Cell::new(0);
        let entry = |inputs: &[&[u8]]| {
            cache
                .entry("thing", inputs, &reporter, |directory| {
                    builds.set(builds.get() + 1);
                    fs::write(directory.join("file"), "content").at("write", directory)
                })
                .unwrap()
        };
        let first = entry(&[b"a", b"bc"]);
        assert_eq!(entry(&[b"a", b"bc"]), first);
        assert_eq!(builds.get(), 1);
        assert_ne!(entry(&[b"ab", b"c"]), first);
        assert_eq!(builds.get(), 2);
        fs::write(first.join("file"), "c0ntent").unwrap();
        assert_eq!(entry(&[b"a", b"bc"]), first);
        assert_eq!(builds.get(), 3);
        assert_eq!(fs::read_to_string(first.join("file")).unwrap(), "content");
    }

    #[test]
    fn a_failed_build_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(root.path().to_owned())).unwrap();
        let result = cache.entry("thing", &[b"x"], &Reporter::quiet(None), |directory| {
            fs::write(directory.join("half"), "").at("write", directory)?;
            Err(Error::Unusable("broken".to_owned()))
        });
        assert_eq!(result.unwrap_err().to_string(), "broken");
        let left: Vec<_> = fs::read_dir(root.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, ["thing.lock"]);
    }

    #[test]
    fn two_builders_of_one_entry_do_not_collide() {
        let root = tempfile::tempdir().unwrap();
        let builds = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cache = Cache::open(Some(root.path().to_owned())).unwrap();
                    let build = |directory: &Path| {
                        builds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(50));
                        fs::write(directory.join("file"), "content").at("write", directory)
                    };
                    cache
                        .entry("thing", &[b"x"], &Reporter::quiet(None), build)
                        .unwrap();
                });
            }
        });
        assert_eq!(builds.into_inner(), 1);
    }
}
