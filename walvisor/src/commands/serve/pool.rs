//! The disks of a daemon, and the one plan of them.
//!
//! ```text
//!   config check ─────────────────────────────────┐
//!   start: --disk, the file of --config ──────────┤
//!   SIGHUP: what stays, and the file ─────────────┼─▶ plan
//!   add-disk: what is served, and one more ───────┤
//!   save: what the file would say ────────────────┘
//! ```

use std::path::{Path, PathBuf};

use walvisor_devices::nbd::Tls;

use super::door::Doors;
use crate::disk_spec::{DiskSpec, WrittenDisk};
use crate::memory_limit;
use crate::plan::{Plan, look_for_log, real_path};

/// Who has named a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskOrigin {
    /// `--disk`. Such a disk is in no file.
    CommandLine,
    /// The file of `--config`, when it was last read or written.
    File,
    /// `add-disk`, and not the file so far.
    Control,
}

/// What tells a disk from others, whatever it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DiskIdentity {
    /// The image, with links resolved.
    Image(PathBuf),
    /// The image of a look, its point, and its name, since there may be more of that point.
    Look(PathBuf, String, String),
    /// The name of a disk in memory, which has nothing else.
    Memory(String),
}

/// A disk that a daemon serves, or is to serve.
#[derive(Clone, Debug)]
pub(super) struct PoolDisk {
    pub(super) written: WrittenDisk,
    pub(super) origin: DiskOrigin,
    /// Its name in control requests and metrics.
    pub(super) name: String,
    /// As it was when the disk was named: to look for its image again would wait for a file system
    /// that does not answer.
    identity: DiskIdentity,
}

impl PoolDisk {
    pub(super) fn new(written: WrittenDisk, origin: DiskOrigin) -> Self {
        let WrittenDisk { keys, spec } = &written;
        let doors = Doors::new(std::slice::from_ref(spec), 0o600, false, &Tls::Off);
        let name = doors.name(spec);
        let said = keys.iter().find(|(key, _)| key == "at");
        // The check of all disks holds a lock, so it does not look.
        if let Some(log) = spec.log_directory() {
            look_for_log(&log);
        }
        let identity = match (&spec.path, &spec.at) {
            (Some(path), None) => DiskIdentity::Image(real_path(path)),
            (Some(path), Some(at)) => {
                let at = said.map_or_else(|| format!("{at:?}"), |(_, at)| at.clone());
                DiskIdentity::Look(real_path(path), at, name.clone())
            }
            (None, _) => DiskIdentity::Memory(name.clone()),
        };
        Self {
            written,
            origin,
            name,
            identity,
        }
    }

    /// A disk of the command line.
    pub(super) fn of_command_line(spec: DiskSpec) -> Self {
        let keys = Vec::new();
        Self::new(WrittenDisk { keys, spec }, DiskOrigin::CommandLine)
    }

    pub(super) fn spec(&self) -> &DiskSpec {
        &self.written.spec
    }

    /// Its image, with links resolved.
    pub(super) fn image(&self) -> Option<&Path> {
        match &self.identity {
            DiskIdentity::Image(path) => Some(path),
            _ => None,
        }
    }

    /// Whether both are one disk, however it is called. Disks that may share an image have their
    /// names too.
    pub(super) fn is(&self, other: &Self) -> bool {
        match (&self.identity, &other.identity) {
            (DiskIdentity::Image(one), DiskIdentity::Image(two)) if one == two => {
                self.name == other.name || !self.may_share(other)
            }
            (one, two) => one == two,
        }
    }

    /// Whether one image may be that of both.
    fn may_share(&self, other: &Self) -> bool {
        self.spec().read_only && other.spec().read_only
    }

    /// Whether both have one image, and may not. Looks at the past share it.
    fn clashes(&self, other: &Self) -> bool {
        match (&self.identity, &other.identity) {
            (DiskIdentity::Image(one), DiskIdentity::Image(two)) => {
                one == two && !self.may_share(other)
            }
            _ => false,
        }
    }
}

/// The specs of disks.
pub(super) fn specs(disks: &[PoolDisk]) -> Vec<DiskSpec> {
    disks.iter().map(|disk| disk.spec().clone()).collect()
}

/// Plans to serve disks together. Nothing is opened.
///
/// # Errors
/// One line that names the disks: no daemon could serve them together, or not with the memory that
/// their file gives it.
pub(super) fn plan(disks: &[PoolDisk], memory_limit: Option<u64>) -> Result<Plan, String> {
    let pairs = || {
        let places = disks.iter().enumerate();
        places.flat_map(|(place, disk)| disks[..place].iter().map(move |other| (disk, other)))
    };
    if let Some((disk, other)) = pairs().find(|(disk, other)| disk.clashes(other)) {
        return Err(format!(
            "disk '{}': another disk, '{}', has the same image: leave one of them out",
            disk.name, other.name
        ));
    }
    let specs = specs(disks);
    let doors = Doors::new(&specs, 0o600, false, &Tls::Off);
    doors.check(&specs)?;
    let plan = Plan::new(&specs)?;
    // Exports of several sockets may have one name, as long as no file names the disks: what comes
    // and goes with a file is found by its name.
    let from_words = |disk: &PoolDisk| disk.origin == DiskOrigin::CommandLine;
    let same = |(disk, other): &(&PoolDisk, &PoolDisk)| {
        disk.name == other.name && !(from_words(disk) && from_words(other))
    };
    if let Some((disk, other)) = pairs().find(same) {
        return Err(format!(
            "disk '{}': another disk, '{}', is called '{}' too: give one of them its own {}=",
            disk.spec().name(),
            other.spec().name(),
            disk.name,
            doors.of(disk.spec())?.name_key()
        ));
    }
    let memory = memory_limit.map_or(Ok(()), |limit| memory_limit::check(limit, &plan));
    memory.map_err(|error| format!("[defaults]: memory-limit: {error}"))?;
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::disk_spec::DiskCommand;

    fn disk(text: &str) -> PoolDisk {
        let written = WrittenDisk::parse(text, DiskCommand::Serve).unwrap();
        PoolDisk::new(written, DiskOrigin::File)
    }

    #[test]
    fn a_disk_is_its_image_and_point_and_not_its_serial() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        File::create(at("a")).unwrap();
        symlink("a", at("link")).unwrap();
        let of = |name: &str, keys: &str| disk(&format!("path={},door=nbd,port=1{keys}", at(name)));
        let a = of("a", ",serial=x");
        assert!(a.is(&of("link", ",serial=y,readonly=on,log=l")));
        assert!(!a.is(&of("b", ",serial=x")));
        assert!(!a.is(&of("a", ",serial=x,at=-15m")));
        assert!(of("a", ",at=-15m").is(&of("a", ",at=-15m")));
        assert!(!of("a", ",at=-15m").is(&of("a", ",at=-16m")));
        assert!(!of("a", ",at=-15m").is(&of("a", ",at=-15m,serial=x")));
        let memory = |name: &str| {
            disk(&format!(
                "backend=ram,size=1M,door=nbd,port=1,serial={name}"
            ))
        };
        assert!(memory("x").is(&memory("x")) && !memory("x").is(&memory("y")));
    }

    #[test]
    fn two_disks_have_two_names_and_two_images() {
        let both = |texts: [&str; 2], part: &str| {
            let error = plan(&texts.map(disk), None).unwrap_err();
            assert!(error.contains(part), "{texts:?}: {error}");
        };
        both(
            [
                "path=a,door=nbd,port=1,serial=x",
                "path=b,door=vhost-user,socket=s,serial=x",
            ],
            "disk 'b': another disk, 'a', is called 'x' too: give one of them its own serial=",
        );
        both(
            [
                "path=a,door=nbd,port=1",
                "path=./a,door=nbd,port=1,serial=x",
            ],
            "disk 'x': another disk, 'a', has the same image",
        );
        both(
            [
                "backend=ram,size=1M,door=nbd,port=1",
                "backend=ram,size=1M,door=nbd,port=2",
            ],
            "is called 'ram disk' too",
        );
        let looks =
            ["1", "2"].map(|n| disk(&format!("path=a,door=nbd,port=1,at=cid:{n},serial={n}")));
        plan(&looks, None).unwrap();
        let error = plan(&looks, Some(1 << 20)).unwrap_err();
        assert!(error.contains("need"), "{error}");
    }
}
