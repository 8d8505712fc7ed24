//! `walvisor ctl SOCKET save-config FILE`: writes to the file of `--config` which disks the daemon serves.
//! The client does it, because the daemon has given up the right to write there. The daemon only
//! says what it serves: the caller names the file.
//!
//! The rest of the file stays as it is, comments, order and all. The new text is
//! read again before it takes the place of the old one.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use tempfile::Builder;
use toml_edit::{ArrayOfTables, DocumentMut, Item, RawString, Table, TomlError};

use super::config::{PoolText, parse};
use super::pool::{DiskOrigin, PoolDisk};
use crate::commands::CommandError;
use crate::disk_spec::{DiskCommand, DiskSpec, LogOptions, WrittenDisk};
use crate::plan::real_path;

/// What a daemon says of its pool.
pub(in crate::commands) struct ServedPool<'a> {
    /// The file that it reads.
    pub config: &'a Path,
    /// The door of a disk that names none.
    pub kind: DiskCommand,
    /// The specs of the disks, without those of its command line, and their logs.
    pub disks: Vec<(String, Option<PathBuf>)>,
    /// Logs, and images of disks that were removed from each and of which it keeps records.
    pub detached: Vec<(PathBuf, String)>,
}

/// What a file says that it did not say before.
#[derive(Default)]
pub(in crate::commands) struct SavedChanges {
    /// The names of the disks that came.
    pub added: Vec<String>,
    /// The names of the disks that left.
    pub removed: Vec<String>,
    /// The images of disks that left and of which their log keeps records.
    pub detached: Vec<String>,
    /// Those whose log has only disks of the command line.
    pub unnamed: Vec<String>,
}

/// A table of a disk.
struct SavedTable {
    spec: DiskSpec,
    /// The directory of its log, with links resolved.
    log: Option<PathBuf>,
    /// The images that it lets the log copy its records to.
    detached: Vec<PathBuf>,
}

/// Writes to the file which disks are served, unless it says so already.
///
/// # Errors
/// If it is not the file that the daemon reads, if it can't be read or written, or if it can't say
/// what the daemon serves. It is then as it was.
pub(in crate::commands) fn save(
    path: &Path,
    served: &ServedPool<'_>,
) -> Result<SavedChanges, CommandError> {
    let in_file = |error: String| CommandError::Failed(format!("{}: {error}", path.display()));
    let failed = |error: io::Error| in_file(error.to_string());
    let path = path.canonicalize().map_err(failed)?;
    if !served
        .config
        .canonicalize()
        .is_ok_and(|config| config == path)
    {
        let config = served.config.display();
        return Err(in_file(format!(
            "the daemon reads another file, {config}: save to that file"
        )));
    }
    let text = fs::read_to_string(&path).map_err(failed)?;
    let (changed, saved) = change(&text, served).map_err(in_file)?;
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
    let _ = fchown(file.as_file(), Some(found.uid()), Some(found.gid()));
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

/// The text with the disks that are served.
fn change(text: &str, served: &ServedPool<'_>) -> Result<(String, SavedChanges), String> {
    let PoolText {
        disks, defaults, ..
    } = parse(text, served.kind)?;
    let missing = served.disks.iter().map(|(spec, log)| {
        let disk = WrittenDisk::parse(spec, served.kind);
        disk.map(|disk| (disk, log.clone()))
    });
    let mut missing: Vec<_> = missing
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    // The daemon resolves the directories that the file names.
    let logs = missing.iter();
    let logs: Vec<_> = logs
        .map(|(disk, log)| (disk.spec.log_directory(), log.clone()))
        .collect();
    let log_of = |disk: &WrittenDisk| {
        let directory = disk.spec.log_directory();
        let known = logs.iter().find(|(named, _)| *named == directory);
        known.map_or_else(
            || directory.as_deref().map(real_path),
            |(_, log)| log.clone(),
        )
    };
    let name = |disk: &WrittenDisk| PoolDisk::new(disk.clone(), DiskOrigin::File).name;
    let mut document: DocumentMut = text.parse().map_err(|error: TomlError| error.to_string())?;
    let trailing = document.trailing().as_str().unwrap_or_default().to_owned();
    let tables = document
        .get_mut("disk")
        .and_then(Item::as_array_of_tables_mut);
    let tables = tables.ok_or("its disks are in one line: write a table [[disk]] for each")?;
    assert_eq!(tables.len(), disks.len(), "each table is a disk");
    // Comments above a table that goes stay, above what follows it.
    let (mut left, mut comments) = (Vec::<SavedTable>::new(), String::new());
    let (mut saved, mut lost) = (SavedChanges::default(), Vec::new());
    for disk in &disks {
        let decor = tables.get_mut(left.len()).expect("a table").decor_mut();
        comments += decor
            .prefix()
            .and_then(RawString::as_str)
            .unwrap_or_default();
        let detached = disk.spec.detached.clone();
        let found = missing
            .iter()
            .position(|(served, _)| disk.describes(served));
        if let Some(place) = found {
            decor.set_prefix(std::mem::take(&mut comments));
            let (WrittenDisk { spec, .. }, log) = missing.remove(place);
            left.push(SavedTable {
                spec,
                log,
                detached,
            });
        } else {
            comments.truncate(comments.trim_end_matches([' ', '\t']).len());
            tables.remove(left.len());
            let log = log_of(disk);
            let detached = detached
                .into_iter()
                .map(|image| image.display().to_string());
            lost.extend(detached.filter_map(|image| Some((log.clone()?, image))));
            saved.removed.push(name(disk));
        }
    }
    comments += &trailing;
    for (wanted, log) in missing {
        let name = name(&wanted);
        let shares = log.is_some() && left.iter().any(|table| table.log == log);
        let own = beside_defaults(&wanted, &defaults, shares, served.kind)
            .map_err(|error| format!("disk '{name}': {error}"))?;
        let own = own
            .into_iter()
            .map(|(key, value)| (key, toml_edit::value(value)));
        let mut table: Table = own.collect();
        table
            .decor_mut()
            .set_prefix(std::mem::take(&mut comments) + "\n");
        tables.push(table);
        left.push(SavedTable {
            detached: wanted.spec.detached.clone(),
            spec: wanted.spec,
            log,
        });
        saved.added.push(name);
    }
    for (log, image) in &lost {
        // The next start does not open a log that has no table left.
        detach(tables, &mut left, (log, image), &mut saved.detached)?;
    }
    // The next start can't open an image that is gone, and says what its log keeps.
    let there = |(_, image): &&(PathBuf, String)| Path::new(image).exists();
    for (log, image) in served.detached.iter().filter(there) {
        if !detach(tables, &mut left, (log, image), &mut saved.detached)? {
            saved.unnamed.push(image.clone());
        }
    }
    document.set_trailing(comments);
    let changed = document.to_string();
    // What was written must be read.
    parse(&changed, served.kind)?.plan(&[])?;
    Ok((changed, saved))
}

/// Names the image of a removed disk in a table of its log, so that the next start copies the log's
/// records to it. Adds the image to `detached` if no table named it. `false`: the log has no table.
fn detach(
    tables: &mut ArrayOfTables,
    left: &mut [SavedTable],
    (log, image): (&Path, &str),
    detached: &mut Vec<String>,
) -> Result<bool, String> {
    let on_log = |table: &SavedTable| table.log.as_deref() == Some(log) && table.spec.at.is_none();
    let is_known = |table: &SavedTable| {
        let mut images = table.detached.iter().chain(&table.spec.path);
        on_log(table) && images.any(|other| other == Path::new(image))
    };
    if left.iter().any(is_known) {
        return Ok(true);
    }
    let Some(place) = left.iter().position(on_log) else {
        return Ok(false);
    };
    if image.contains(':') {
        return Err(format!(
            "the log {} keeps records of '{image}', which was removed, and detached= can't name it \
             because of its ':': add the disk again, or give up the log's history",
            log.display()
        ));
    }
    let table = &mut left[place];
    table.detached.push(image.into());
    let all: Vec<_> = table
        .detached
        .iter()
        .map(|image| image.display().to_string())
        .collect();
    let written = tables.get_mut(place).expect("each disk has a table");
    written["detached"] = toml_edit::value(all.join(":"));
    detached.push(image.to_owned());
    Ok(true)
}

/// The fewest keys that describe the disk beside the file's defaults. `shares`: another disk sets the
/// options of its log.
fn beside_defaults(
    WrittenDisk {
        keys: own,
        spec: wanted,
    }: &WrittenDisk,
    defaults: &[(String, String)],
    shares: bool,
    kind: DiskCommand,
) -> Result<Vec<(String, String)>, String> {
    let mut fewest = own.clone();
    fewest.retain(|key| !defaults.contains(key));
    let mut with_log = own.clone();
    let log = wanted.log_directory().filter(|_| wanted.log.is_none());
    with_log.extend(log.map(|log| ("log".to_owned(), log.display().to_string())));
    // A point such as -15m is another one each time.
    let described = |keys: &[(String, String)]| {
        let keys: Vec<_> = keys
            .iter()
            .filter(|(key, _)| key != "at")
            .cloned()
            .collect();
        let mut spec = DiskSpec::from_keys(&keys, kind).ok()?;
        spec.log = spec.log_directory();
        if shares {
            spec.log_options = LogOptions::default();
        }
        Some(spec)
    };
    let served = described(own);
    for keys in [fewest, own.clone(), with_log.clone()] {
        if described(&DiskSpec::with_defaults(&keys, defaults, kind)) == served {
            return Ok(keys);
        }
    }
    let all = DiskSpec::with_defaults(&with_log, defaults, kind);
    let refused = all[with_log.len()..].iter().find(|default| {
        let one = [&with_log[..], &[(*default).clone()]].concat();
        described(&one) != described(&with_log)
    });
    let refused = refused.map(|(key, value)| format!("{key}={value}"));
    Err(format!(
        "[defaults] would set {}: add the disk again with that key spelled out",
        refused.unwrap_or_default()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# Our pool.\n[defaults]\nsocket = 's' # one for all\nlog = 'pool.wal'\nretain = '24h'\n\n\
        # The first.\n[[disk]]\npath = 'a'\n\n# The second,\n# of Ann.\n [[disk]] # b\npath = 'b'\nserial = 'x'\n\n\
        # Last words.\n";

    /// The disks of the file, as a daemon serves them.
    const A: &str = "path=a,socket=s,log=pool.wal,retain=24h";
    const B: &str = "path=b,serial=x,socket=s,log=pool.wal,retain=24h";

    fn changed(text: &str, served: &[&str]) -> Result<(String, SavedChanges), String> {
        let log = |text: &str| {
            let disk = WrittenDisk::parse(text, DiskCommand::Nbd).ok()?;
            disk.spec.log_directory()
        };
        let served = ServedPool {
            config: Path::new("pool.toml"),
            kind: DiskCommand::Nbd,
            disks: served
                .iter()
                .map(|text| ((*text).to_owned(), log(text)))
                .collect(),
            detached: Vec::new(),
        };
        change(text, &served)
    }

    #[test]
    fn only_the_tables_of_disks_that_came_or_went_change() {
        let (text, saved) = changed(FILE, &[A, B]).unwrap();
        assert_eq!((text.as_str(), saved.removed.len()), (FILE, 0));
        let (text, saved) = changed(FILE, &[A, "path=c,,1,log=pool.wal,socket=s"]).unwrap();
        let without = FILE.replace(" [[disk]] # b\npath = 'b'\nserial = 'x'\n", "");
        let table = "\n[[disk]]\npath = \"c,1\"\n";
        assert_eq!(text, format!("{without}{table}"));
        assert_eq!(
            (saved.added, saved.removed),
            (vec!["c,1".to_owned()], vec!["x".to_owned()])
        );
        // What was saved is there, and what belongs to its log is said by another disk.
        let (again, saved) = changed(&text, &[A, "path=c,,1,log=pool.wal,socket=s"]).unwrap();
        assert_eq!((again, saved.added.len()), (text, 0));
        // The order of the keys is nobody's business.
        let b = "retain=24h,log=pool.wal,socket=s,serial=x,path=b";
        assert_eq!(changed(FILE, &[b, A]).unwrap().0, FILE);
        // One that was removed and added again takes its new keys.
        let b = "path=b,serial=x,socket=s,log=pool.wal,cache=unsafe";
        let (text, _) = changed(FILE, &[A, b]).unwrap();
        assert!(text.ends_with("cache = \"unsafe\"\n"), "{text}");
    }

    #[test]
    fn defaults_do_not_change_a_disk_that_is_saved() {
        // It has a log of its own, which the file has to say, and its history.
        let error = changed(FILE, &[A, B, "path=c,socket=s"]).err().unwrap();
        assert!(
            error.contains("disk 'c': [defaults] would set retain=24h"),
            "{error}"
        );
        let (text, _) = changed(FILE, &[A, B, "path=c,socket=s,retain=24h"]).unwrap();
        assert!(
            text.ends_with("retain = \"24h\"\nlog = \"c.wal\"\n"),
            "{text}"
        );
        let error = changed(FILE, &[]).err().unwrap();
        assert!(error.contains("no disk: give a table"), "{error}");
    }

    #[test]
    fn detached_images_stay_with_their_log() {
        let table = |keys: &str| format!("[[disk]]\nsocket = 's'\n{keys}\n");
        let a = table("path = 'a'");
        let x = table("path = 'x'\nlog = 'l'\ndetached = 'y:z'");
        let z = table("path = 'z'\nlog = 'l'");
        let text = format!("{a}{x}{z}");
        let (left, saved) = changed(&text, &["path=a,socket=s", "path=z,socket=s,log=l"]).unwrap();
        assert_eq!(left, format!("{a}{z}detached = \"y\"\n"));
        assert_eq!(
            (saved.detached, saved.unnamed.len()),
            (vec!["y".to_owned()], 0)
        );
        // Nobody opens that log.
        let (left, saved) = changed(&text, &["path=a,socket=s"]).unwrap();
        assert_eq!(left, a);
        assert_eq!((saved.detached.len(), saved.unnamed.len()), (0, 0));
    }

    #[test]
    fn a_file_that_no_daemon_could_serve_is_not_written() {
        let error = changed(FILE, &[A, B, "path=./a,serial=y,socket=s,log=pool.wal"]);
        let error = error.err().unwrap();
        assert!(error.contains("has the same image"), "{error}");
    }

    #[test]
    fn a_file_whose_disks_are_one_line_is_left_alone() {
        let a = "{ path = 'a', socket = 's' }";
        let b = "[[disk]]\npath = 'b'\nsocket = '''\n[[disk]]'''\n";
        let served = ["path=b,socket=[[disk]]"];
        let error = changed(&format!("disk = [{a}, {a}]\n"), &served);
        let error = error.err().unwrap();
        assert!(error.contains("write a table [[disk]] for each"), "{error}");
        // What looks like a table, in a text.
        let (text, _) =
            changed(&format!("[[disk]]\npath = 'a'\nsocket = 's'\n{b}"), &served).unwrap();
        assert_eq!(text, b);
    }
}
