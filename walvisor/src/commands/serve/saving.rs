//! `walvisor ctl SOCKET save`: writes to the file of `--config` which disks were added and removed
//! since the daemon began. The client does it, because the daemon has given up the right to write
//! there.
//!
//! The rest of the file stays as it is, comments, order and all. The new text is
//! read again before it takes the place of the old one.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;

use tempfile::Builder;
use toml_edit::{DocumentMut, Item, RawString, Table, TomlError};
use walvisor_devices::nbd::Tls;

use super::config::{PoolText, parse};
use super::door::Doors;
use crate::commands::CommandError;
use crate::disk_spec::{DiskCommand, DiskSpec, split_keys};
use crate::disks::{LOG_KEYS, real_path};

/// What a daemon's control socket was told to change.
pub(in crate::commands) struct PoolChanges {
    /// The door of a disk that names none.
    pub kind: DiskCommand,
    /// The specs of the disks that were added.
    pub added: Vec<String>,
    /// The names of those that were removed.
    pub removed: Vec<String>,
}

/// The names of the disks that came into the file, and of those that left it.
pub(in crate::commands) struct SavedChanges {
    pub added: Vec<String>,
    pub removed: Vec<String>,
}

/// Writes the changes to the file, unless it has them already.
///
/// # Errors
/// If the file can't be read or written, or can't say what the daemon serves. It is then as it was.
pub(in crate::commands) fn save(
    path: &Path,
    changes: &PoolChanges,
) -> Result<SavedChanges, CommandError> {
    let in_file = |error: String| CommandError::Failed(format!("{}: {error}", path.display()));
    let failed = |error: io::Error| in_file(error.to_string());
    let path = path.canonicalize().map_err(failed)?;
    let text = fs::read_to_string(&path).map_err(failed)?;
    let (changed, saved) = change(&text, changes).map_err(in_file)?;
    if changed != text {
        replace(&path, &text, &changed).map_err(failed)?;
    }
    Ok(saved)
}

/// Puts a new text in the place of the `old` one, at once.
fn replace(path: &Path, old: &str, new: &str) -> io::Result<()> {
    let directory = path.parent().unwrap_or(path);
    let found = fs::metadata(path)?;
    let mut file = Builder::new().prefix(".walvisor-").tempfile_in(directory)?;
    file.write_all(new.as_bytes())?;
    // Only root may give a file away.
    let _ = chown(file.path(), Some(found.uid()), Some(found.gid()));
    let permissions: Permissions = found.permissions();
    file.as_file().set_permissions(permissions)?;
    file.as_file().sync_all()?;
    if fs::read_to_string(path)? != old {
        return Err(io::Error::other(
            "it was changed in the meantime: try again",
        ));
    }
    file.persist(path)?;
    File::open(directory)?.sync_all()
}

/// The name of a disk in control requests.
fn name(spec: &DiskSpec) -> String {
    Doors::new(std::slice::from_ref(spec), 0o600, false, &Tls::Off).name(spec)
}

/// The text with the changes.
fn change(text: &str, changes: &PoolChanges) -> Result<(String, SavedChanges), String> {
    let PoolText {
        disks, defaults, ..
    } = parse(text, changes.kind)?;
    let mut document: DocumentMut = text.parse().map_err(|error: TomlError| error.to_string())?;
    let trailing = document.trailing().as_str().unwrap_or_default().to_owned();
    let tables = document
        .get_mut("disk")
        .and_then(Item::as_array_of_tables_mut);
    let tables = tables.ok_or("its disks are in one line: write a table [[disk]] for each")?;
    assert_eq!(tables.len(), disks.len(), "each table is a disk");
    // Comments above a table that goes stay, above what follows it.
    let (mut left, mut removed, mut comments) = (Vec::new(), Vec::new(), String::new());
    for disk in &disks {
        let decor = tables.get_mut(left.len()).expect("a table").decor_mut();
        comments += decor
            .prefix()
            .and_then(RawString::as_str)
            .unwrap_or_default();
        let name = name(&disk.spec);
        if changes.removed.contains(&name) {
            comments.truncate(comments.trim_end_matches([' ', '\t']).len());
            tables.remove(left.len());
            removed.push(name);
        } else {
            decor.set_prefix(std::mem::take(&mut comments));
            left.push(disk.spec.clone());
        }
    }
    comments += &trailing;
    let mut added = Vec::new();
    for spec in &changes.added {
        let own = split_keys(spec).map_err(|error| error.to_string())?;
        let wanted = DiskSpec::from_keys(&own, changes.kind).map_err(|error| error.to_string())?;
        let name = name(&wanted);
        if left.iter().any(|spec| self::name(spec) == name) {
            continue;
        }
        let own = beside_defaults(own, &wanted, &defaults, &left, changes.kind)
            .map_err(|error| format!("disk '{name}': {error}"))?;
        let own = own
            .into_iter()
            .map(|(key, value)| (key, toml_edit::value(value)));
        let mut table: Table = own.collect();
        table
            .decor_mut()
            .set_prefix(std::mem::take(&mut comments) + "\n");
        tables.push(table);
        left.push(wanted);
        added.push(name);
    }
    document.set_trailing(comments);
    let changed = document.to_string();
    // What was written must be read.
    parse(&changed, changes.kind)?;
    Ok((changed, SavedChanges { added, removed }))
}

/// The keys with which the disk is what it is, although the file has defaults.
fn beside_defaults(
    own: Vec<(String, String)>,
    wanted: &DiskSpec,
    defaults: &[(String, String)],
    others: &[DiskSpec],
    kind: DiskCommand,
) -> Result<Vec<(String, String)>, String> {
    let log = wanted.log_directory();
    let mut with_log = own.clone();
    if wanted.log.is_none()
        && let Some(log) = &log
    {
        with_log.push(("log".to_owned(), log.display().to_string()));
    }
    // What belongs to a log is said by its other disks too.
    let real = |spec: &DiskSpec| spec.log_directory().map(|log| real_path(&log));
    let shares = log.is_some() && others.iter().any(|other| real(other) == real(wanted));
    let mut refused = None;
    for keys in [own, with_log] {
        let all = DiskSpec::with_defaults(&keys, defaults, kind);
        let mut from_file = all[keys.len()..].iter();
        let same = |(key, value): &(String, String)| {
            let more = [&keys[..], &[(key.clone(), value.clone())]].concat();
            let both = (
                DiskSpec::from_keys(&more, kind),
                DiskSpec::from_keys(&keys, kind),
            );
            both.0 == both.1 || shares && LOG_KEYS.contains(&key.as_str())
        };
        match from_file.find(|default| !same(default)) {
            None => return Ok(keys),
            Some((key, value)) => refused = Some(format!("{key}={value}")),
        }
    }
    Err(format!(
        "the file's [defaults] would give it {}: remove it, and add it with that key as you want \
         it",
        refused.unwrap_or_default()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# Our pool.\n[defaults]\nsocket = 's' # one for all\nlog = 'pool.wal'\nretain = '24h'\n\n\
        # The first.\n[[disk]]\npath = 'a'\n\n# The second,\n# of Ann.\n [[disk]] # b\npath = 'b'\nserial = 'x'\n\n\
        # Last words.\n";

    fn changed(added: &[&str], removed: &[&str]) -> Result<(String, SavedChanges), String> {
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect();
        let changes = PoolChanges {
            kind: DiskCommand::Nbd,
            added: texts(added),
            removed: texts(removed),
        };
        change(FILE, &changes)
    }

    #[test]
    fn only_the_tables_of_disks_that_came_or_went_change() {
        let (text, saved) = changed(&[], &["unknown"]).unwrap();
        assert_eq!((text.as_str(), saved.removed.len()), (FILE, 0));
        let (text, saved) = changed(&["path=c,,1,log=pool.wal,socket=s"], &["x"]).unwrap();
        let without = FILE.replace(" [[disk]] # b\npath = 'b'\nserial = 'x'\n", "");
        let table = "\n[[disk]]\npath = \"c,1\"\nlog = \"pool.wal\"\nsocket = \"s\"\n";
        assert_eq!(text, format!("{without}{table}"));
        assert_eq!(
            (saved.added, saved.removed),
            (vec!["c,1".to_owned()], vec!["x".to_owned()])
        );
        // A disk that is there already is not added, and one that was removed and added again takes
        // its new keys.
        assert_eq!(changed(&["path=b,serial=x,socket=s"], &[]).unwrap().0, FILE);
        let (text, _) = changed(
            &["path=b,serial=x,socket=s,log=pool.wal,cache=unsafe"],
            &["x"],
        )
        .unwrap();
        assert!(text.ends_with("cache = \"unsafe\"\n"), "{text}");
    }

    #[test]
    fn defaults_do_not_change_a_disk_that_is_saved() {
        // It has a log of its own, which the file has to say, and its history.
        let error = changed(&["path=c,socket=s"], &[]).err().unwrap();
        assert!(
            error.contains("disk 'c': the file's [defaults] would give it retain=24h"),
            "{error}"
        );
        let (text, _) = changed(&["path=c,socket=s,retain=24h"], &[]).unwrap();
        assert!(
            text.ends_with("retain = \"24h\"\nlog = \"c.wal\"\n"),
            "{text}"
        );
        let error = changed(&[], &["a", "x"]).err().unwrap();
        assert!(error.contains("no disk: give a table"), "{error}");
    }

    #[test]
    fn a_file_whose_disks_are_one_line_is_left_alone() {
        let changes = PoolChanges {
            kind: DiskCommand::Nbd,
            added: Vec::new(),
            removed: vec!["a".to_owned()],
        };
        let a = "{ path = 'a', socket = 's' }";
        let b = "[[disk]]\npath = 'b'\nsocket = '''\n[[disk]]'''\n";
        let error = change(&format!("disk = [{a}, {a}]\n"), &changes);
        let error = error.err().unwrap();
        assert!(error.contains("write a table [[disk]] for each"), "{error}");
        // What looks like a table, in a text.
        let (text, _) = change(
            &format!("[[disk]]\npath = 'a'\nsocket = 's'\n{b}"),
            &changes,
        )
        .unwrap();
        assert_eq!(text, b);
    }
}
