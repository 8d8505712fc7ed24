//! Inputs from files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::bounded::begin;

/// The names that libFuzzer gives to inputs that fail.
const FAILED: [&str; 5] = ["crash-", "leak-", "oom-", "slow-unit-", "timeout-"];

/// Runs all inputs of the directory `corpus`, those first that libFuzzer has seen fail.
///
/// # Panics
/// If there are no inputs, or `run` panics.
pub fn replay(corpus: &Path, run: impl Fn(&[u8])) {
    alone(|| {
        for path in paths(corpus) {
            // The last name is that of an input that ends the process: see it with `--nocapture`.
            println!("{}", path.display());
            run(&fs::read(&path).expect("an input"));
        }
    });
}

/// The inputs of the directory `corpus`.
///
/// # Panics
/// If there are none.
pub fn inputs(corpus: &Path) -> Vec<Vec<u8>> {
    let paths = paths(corpus).into_iter();
    paths
        .map(|path| fs::read(path).expect("an input"))
        .collect()
}

/// Runs inputs of one process one at a time: a limit on allocations is the process's.
pub fn alone(run: impl FnOnce()) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    begin();
    run();
}

fn paths(corpus: &Path) -> Vec<PathBuf> {
    let inputs =
        fs::read_dir(corpus).unwrap_or_else(|error| panic!("{}: {error}", corpus.display()));
    let mut inputs: Vec<PathBuf> = inputs.map(|input| input.expect("a name").path()).collect();
    assert!(!inputs.is_empty(), "{}: no inputs", corpus.display());
    inputs.sort_by_key(|path| {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let failed = FAILED.iter().any(|prefix| name.starts_with(prefix));
        (!failed, name)
    });
    inputs
}
