//! Distribution packages: finds their versions, downloads them, and installs those that this
//! machine lacks.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::error::{Error, FileContext, Result};
use crate::process::{is_installed, run};
use crate::reporter::Reporter;

/// The packages that the guests are made of.
pub(crate) const GUEST_PACKAGES: [&str; 7] = [
    "linux-image-cloud-amd64",
    "busybox-static",
    "e2fsprogs",
    "fio",
    "nbd-client",
    "util-linux",
    "xfsprogs",
];

const KERNEL: &str = "linux-image-";
/// The kernel that Debian 12 has beside its own.
pub(crate) const KERNEL_6_12: &str = "linux-image-6.12-cloud-amd64";
/// The packages that a machine with a newer kernel is made of, beside the kernel.
pub(crate) const NEWER_PACKAGES: [&str; 4] = ["busybox-static", "e2fsprogs", "lvm2", "xfsprogs"];

/// How long to wait for another apt, usually the search for updates on a machine that has just
/// booted.
const LOCK_TIMEOUT: Duration = Duration::from_secs(120);

/// One package at one version.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
}

/// What apt says of packages follows from these, unless somebody has changed their contents only.
const APT_STATE: [&str; 3] = [
    "/var/lib/apt/lists",
    "/etc/apt/sources.list",
    "/etc/apt/sources.list.d",
];

/// As [`ask_apt`], which takes seconds, unless its answer of the last time still holds: `kept` has
/// it.
///
/// # Errors
/// As [`ask_apt`], or the answer can't be kept.
pub(crate) fn resolve(
    wanted: &[&str],
    kept: &Path,
    scratch: &Path,
    reporter: &Reporter,
) -> Result<Vec<Package>> {
    keep_answer(wanted, kept, scratch, || ask_apt(wanted, scratch, reporter))
}

/// The answer of `ask` for `wanted`, or that of the last time if apt has learned nothing since.
fn keep_answer(
    wanted: &[&str],
    kept: &Path,
    scratch: &Path,
    ask: impl FnOnce() -> Result<Vec<Package>>,
) -> Result<Vec<Package>> {
    let changed = |path: &&str| {
        let changed = fs::metadata(path).and_then(|found| found.modified());
        format!("{path} {:?}", changed.ok())
    };
    let state: Vec<_> = APT_STATE.iter().map(changed).collect();
    let key = format!("{} {}", state.join(" "), wanted.join(" "));
    let before = fs::read_to_string(kept).unwrap_or_default();
    if let Some((first, rest)) = before.split_once('\n')
        && first == key
        && let Some(packages) = rest.lines().map(parse_list_line).collect()
    {
        return Ok(packages);
    }
    let packages = ask()?;
    let new = scratch.join("versions");
    fs::write(&new, format!("{key}\n{}", list(&packages))).at("write", &new)?;
    fs::rename(&new, kept).at("rename", &new)?;
    Ok(packages)
}

/// Reads `fio=3.33-3`.
fn parse_list_line(line: &str) -> Option<Package> {
    let (name, version) = line.split_once('=')?;
    Some(Package {
        name: name.to_owned(),
        version: version.to_owned(),
    })
}

/// The `wanted` packages and the libraries that they need, in the distribution's current versions.
///
/// # Errors
/// apt is missing, or does not know the packages even after an update.
fn ask_apt(wanted: &[&str], scratch: &Path, reporter: &Reporter) -> Result<Vec<Package>> {
    reporter.progress("asking apt for package versions");
    if !is_installed("apt-get") {
        return Err(Error::Unusable(
            "apt-get is missing: the guest images are built from Debian packages, so build them on \
             Debian or Ubuntu"
                .to_owned(),
        ));
    }
    simulate(wanted, scratch).or_else(|_| {
        update(reporter)?;
        simulate(wanted, scratch)
    })
}

/// Package lists of a release that this machine does not install from.
pub(crate) struct OtherRelease {
    name: &'static str,
    /// Where the lists are kept.
    directory: PathBuf,
}

impl OtherRelease {
    /// The release with the newest kernel that Debian builds for a stable release.
    pub(crate) fn backports(cache: &Path) -> Self {
        Self::new("trixie-backports", cache)
    }

    /// The release with the newest user-mode Linux.
    pub(crate) fn unstable(cache: &Path) -> Self {
        Self::new("sid", cache)
    }

    fn new(name: &'static str, cache: &Path) -> Self {
        let directory = cache.join(name);
        Self { name, directory }
    }

    /// As [`resolve`], without the packages that `wanted` need.
    ///
    /// # Errors
    /// As [`resolve`]; or this machine's lists name no archive of Debian.
    pub(crate) fn resolve(
        &self,
        wanted: &[&str],
        scratch: &Path,
        reporter: &Reporter,
    ) -> Result<Vec<Package>> {
        self.ask(wanted, scratch, reporter, || {
            Ok(wanted.iter().copied().map(str::to_owned).collect())
        })
    }

    /// As [`resolve`](Self::resolve), for the packages that the release's newest kernel consists
    /// of.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn resolve_kernel(
        &self,
        scratch: &Path,
        reporter: &Reporter,
    ) -> Result<Vec<Package>> {
        let meta = "linux-image-cloud-amd64";
        self.ask(&[meta], scratch, reporter, || {
            let depends = ["depends", "--recurse", "--no-recommends", meta];
            let names = run(self.apt("apt-cache").args(depends))?;
            let names = String::from_utf8_lossy(&names.stdout);
            // What else it depends on has other names; lines with a space begin with the relation.
            let parts = ["base", "binary", "modules"].map(|part| format!("linux-{part}-"));
            let is_part = |name: &&str| parts.iter().any(|part| name.starts_with(part));
            Ok(names.lines().filter(is_part).map(str::to_owned).collect())
        })
    }

    /// The versions of the packages that `names` says after an update, or the answer of the last
    /// time.
    fn ask(
        &self,
        wanted: &[&str],
        scratch: &Path,
        reporter: &Reporter,
        names: impl FnOnce() -> Result<Vec<String>>,
    ) -> Result<Vec<Package>> {
        let kept = self.directory.with_extension("versions");
        keep_answer(wanted, &kept, scratch, || {
            self.update(reporter)?;
            let show = ["show", "--no-all-versions"];
            let shown = run(self.apt("apt-cache").args(show).args(names()?))?;
            Ok(parse_stanzas(&String::from_utf8_lossy(&shown.stdout)))
        })
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let directory = self.directory.display();
        for option in [
            format!("Dir::Etc::sourcelist={directory}/sources.list"),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            format!("Dir::State::lists={directory}/lists"),
            format!("Dir::Cache={directory}/cache"),
            "Acquire::Languages=none".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }

    /// Downloads the lists from the archive that this machine installs from.
    fn update(&self, reporter: &Reporter) -> Result<()> {
        reporter.progress(&format!("apt-get update for {}", self.name));
        let archive = match archive()? {
            Some(archive) => archive,
            // Only lists that are there have a label.
            None => {
                update(reporter)?;
                archive()?.ok_or_else(|| {
                    Error::Unusable("apt's sources have no archive of Debian: add one".to_owned())
                })?
            }
        };
        for part in ["lists/partial", "cache/archives/partial"] {
            let path = self.directory.join(part);
            fs::create_dir_all(&path).at("create", &path)?;
        }
        let sources = self.directory.join("sources.list");
        fs::write(&sources, format!("deb {archive} {} main\n", self.name)).at("write", &sources)?;
        run_apt(self.apt("apt-get").args(["-q", "update"]))
    }
}

/// The address of the archive of Debian that this machine installs from.
fn archive() -> Result<Option<String>> {
    let targets = run(Command::new("apt-get")
        .args(["indextargets", "--format", "$(REPO_URI)"])
        .args(["Created-By: Packages", "Label: Debian"]))?;
    let targets = String::from_utf8_lossy(&targets.stdout);
    Ok(targets.lines().next().map(str::to_owned))
}

/// The names and versions of the packages that `apt-cache show` describes.
fn parse_stanzas(shown: &str) -> Vec<Package> {
    let field = |stanza: &str, key: &str| {
        let value = stanza.lines().find_map(|line| line.strip_prefix(key));
        value.map(str::to_owned)
    };
    let packages = shown.split("\n\n").filter_map(|stanza| {
        Some(Package {
            name: field(stanza, "Package: ")?,
            version: field(stanza, "Version: ")?,
        })
    });
    packages.collect()
}

/// Updates apt's package lists.
///
/// # Errors
/// apt fails, usually because the caller is not root.
pub(crate) fn update(reporter: &Reporter) -> Result<()> {
    reporter.progress("apt-get update");
    run_apt(Command::new("apt-get").args(["-q", "update"]))
}

/// Runs apt. If another apt holds the lock of the lists or the downloads, waits for up to two
/// minutes.
fn run_apt(command: &mut Command) -> Result<()> {
    let start = Instant::now();
    loop {
        match run(command) {
            // Only root can get the lock, so only root retries.
            Err(Error::Program { message, .. })
                if message.contains("nable to lock")
                    && rustix::process::geteuid().is_root()
                    && start.elapsed() < LOCK_TIMEOUT =>
            {
                thread::sleep(Duration::from_secs(1));
            }
            ended => return ended.map(drop),
        }
    }
}

/// Asks apt what it would install on a machine without any packages, which is the closure of the
/// dependencies.
fn simulate(wanted: &[&str], scratch: &Path) -> Result<Vec<Package>> {
    let nothing_installed = scratch.join("status");
    fs::write(&nothing_installed, "").at("write", &nothing_installed)?;
    let output = run(Command::new("apt-get")
        .args(["-s", "--no-install-recommends", "-o"])
        .arg(format!(
            "Dir::State::status={}",
            nothing_installed.display()
        ))
        .arg("install")
        .args(wanted))?;
    let mut packages: Vec<_> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(parse_install_line)
        .filter(|package| is_needed(&package.name, wanted))
        .collect();
    packages.sort();
    if let Some(kernel) = wanted.iter().find(|name| name.starts_with(KERNEL))
        && !packages.iter().any(|known| known.name.starts_with(KERNEL))
    {
        return Err(Error::Unusable(format!(
            "apt-get knows no package of the kernel {kernel}"
        )));
    }
    Ok(packages)
}

/// Reads `Inst fio (3.33-3 Debian:12 [amd64])`.
fn parse_install_line(line: &str) -> Option<Package> {
    let mut words = line.strip_prefix("Inst ")?.split(' ');
    Some(Package {
        name: words.next()?.to_owned(),
        version: words.next()?.strip_prefix('(')?.to_owned(),
    })
}

/// Whether a package of the closure is used. Only programs and shared libraries are: no maintainer
/// script runs, so Perl, dpkg and their dependencies are left out.
fn is_needed(name: &str, wanted: &[&str]) -> bool {
    let kernel = name.starts_with(KERNEL);
    let meta = kernel && wanted.contains(&name);
    let library = ["lib", "zlib"].iter().any(|start| name.starts_with(start))
        && !["perl", "python"].iter().any(|part| name.contains(part));
    !meta && (kernel || wanted.contains(&name) || library)
}

/// The packages as text, one per line, which goes into the images' cache key.
pub(crate) fn list(packages: &[Package]) -> String {
    let mut text = String::new();
    for package in packages {
        let _ = writeln!(text, "{}={}", package.name, package.version);
    }
    text
}

/// Downloads `packages` (apt checks their hashes) and unpacks them below `root`. They are of
/// `release`, or of this machine's lists.
///
/// # Errors
/// As [`download`]; or a package cannot be unpacked.
pub(crate) fn unpack(
    packages: &[Package],
    release: Option<&OtherRelease>,
    scratch: &Path,
    root: &Path,
    reporter: &Reporter,
) -> Result<()> {
    let downloads = scratch.join("packages");
    if downloads.exists() {
        // Left over from an attempt with other versions.
        fs::remove_dir_all(&downloads).at("remove", &downloads)?;
    }
    fs::create_dir_all(&downloads).at("create", &downloads)?;
    download(packages, release, &downloads, reporter)?;
    unpack_files(&downloads, root, reporter)?;
    fs::remove_dir_all(&downloads).at("remove", &downloads)
}

/// Downloads `packages` as [`unpack`] does, and leaves them in `directory`.
///
/// # Errors
/// The download fails, for instance because the lists that named these versions are older than the
/// archive.
pub(crate) fn download(
    packages: &[Package],
    release: Option<&OtherRelease>,
    directory: &Path,
    reporter: &Reporter,
) -> Result<()> {
    reporter.progress(&format!("downloading {} packages", packages.len()));
    let mut apt = match release {
        Some(release) => release.apt("apt-get"),
        None => Command::new("apt-get"),
    };
    let names = packages
        .iter()
        .map(|package| format!("{}={}", package.name, package.version));
    run_apt(
        // apt's own download user may not be allowed to write to the caller's cache.
        apt.args(["-q", "-o", "APT::Sandbox::User=root", "download"])
            .args(names)
            .current_dir(directory),
    )
}

/// Unpacks the packages in `directory` below `root`.
///
/// # Errors
/// A package cannot be unpacked.
pub(crate) fn unpack_files(directory: &Path, root: &Path, reporter: &Reporter) -> Result<()> {
    fs::create_dir_all(root).at("create", root)?;
    let mut files: Vec<PathBuf> = fs::read_dir(directory)
        .at("read", directory)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    files.sort();
    for (done, file) in files.iter().enumerate() {
        reporter.progress(&format!(
            "unpacking package {} of {}",
            done + 1,
            files.len()
        ));
        run(Command::new("dpkg-deb").arg("-x").arg(file).arg(root))?;
    }
    Ok(())
}

/// Of `(program, package)` pairs, installs the packages whose programs this machine lacks, and
/// prints a note. Callers take turns, those in other processes too, so that none installs a package
/// twice and none takes a program that is not configured yet.
///
/// # Errors
/// apt fails, usually because the caller is not root.
pub fn install_missing(needs: &[(&str, &str)], reporter: &Reporter) -> Result<()> {
    // Apt's own locks make a second `update` fail at once. Where apt is missing, it fails below.
    let turn = fs::File::open("/var/lib/apt").ok();
    if let Some(turn) = &turn {
        flock(turn, FlockOperation::LockExclusive)
            .map_err(std::io::Error::from)
            .at("lock", Path::new("/var/lib/apt"))?;
    }
    let mut missing: Vec<&str> = needs
        .iter()
        .filter(|(program, _)| !is_installed(program))
        .map(|(_, package)| *package)
        .collect();
    missing.sort_unstable();
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    reporter.note(&format!("installing with apt-get: {}", missing.join(" ")));
    reporter.progress("apt-get install");
    if install(&missing).is_err() {
        update(reporter)?;
        install(&missing)?;
    }
    Ok(())
}

/// Why this machine cannot run Linux guests at all; `None` if nothing is known to stand in the way.
#[must_use]
pub fn obstacle() -> Option<String> {
    let tools = ["qemu-system-x86_64", "cpio", "mke2fs", "lz4"];
    let missing = tools.iter().find(|tool| !is_installed(tool));
    if !is_installed("apt-get") {
        Some("the guest images are built from Debian packages, and apt-get is missing".to_owned())
    } else if let (Some(tool), false) = (missing, rustix::process::geteuid().is_root()) {
        Some(format!("{tool} is missing, and only root can install it"))
    } else {
        None
    }
}

fn install(packages: &[&str]) -> Result<()> {
    run_apt(
        Command::new("apt-get")
            // Another apt may hold the lock, usually on a machine that has just booted.
            .args([
                "-q",
                "-y",
                "-o",
                "DPkg::Lock::Timeout=300",
                "--no-install-recommends",
                "install",
            ])
            .args(packages)
            .env("DEBIAN_FRONTEND", "noninteractive"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let package = |name: &str, version: &str| Package {
            name: name.to_owned(),
            version: version.to_owned(),
        };
        let packages = vec![package("fio", "3.33-3"), package("e2fsprogs", "1.47=~x")];
        let read: Option<Vec<_>> = list(&packages).lines().map(parse_list_line).collect();
        assert_eq!(read, Some(packages));
    }

    #[test]
    fn stanzas_are_read() {
        let shown = "Package: libc6\nVersion: 2.42-1\nDepends: x\n\nPackage: y\nVersion: 1\n";
        let read: Vec<_> = parse_stanzas(shown)
            .into_iter()
            .map(|package| (package.name, package.version))
            .collect();
        let own = |name: &str, version: &str| (name.to_owned(), version.to_owned());
        assert_eq!(read, [own("libc6", "2.42-1"), own("y", "1")]);
        assert_eq!(parse_stanzas("N: nothing\n"), []);
    }

    #[test]
    fn install_lines_are_read() {
        let package = parse_install_line("Inst zlib1g (1:1.2.13.dfsg-1 Debian:12.15 [amd64]) []");
        assert_eq!(
            package,
            Some(Package {
                name: "zlib1g".to_owned(),
                version: "1:1.2.13.dfsg-1".to_owned()
            })
        );
        assert_eq!(parse_install_line("Conf zlib1g (1:1.2.13.dfsg-1)"), None);
        assert_eq!(parse_install_line("Inst broken"), None);
    }

    #[test]
    fn only_the_lock_of_another_apt_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        // The command fails the first time, with `$1` as its message.
        let once = |message: &str| {
            let mut command = Command::new("sh");
            let script = "[ -e \"$0\" ] && exit; : >\"$0\"; echo \"E: $1\" >&2; exit 100";
            command.args(["-c", script]);
            command.arg(directory.path().join(message.len().to_string()));
            run_apt(command.arg(message))
        };
        let waited = once("Unable to lock directory /var/lib/apt/lists/");
        assert_eq!(waited.is_ok(), rustix::process::geteuid().is_root());
        once("Unable to fetch some archives").unwrap_err();
    }

    #[test]
    fn only_programs_libraries_and_the_real_kernel_are_needed() {
        let is_needed = |name| is_needed(name, &GUEST_PACKAGES);
        assert!(is_needed("fio") && is_needed("libc6") && is_needed("zlib1g"));
        assert!(is_needed("linux-image-6.1.0-1-cloud-amd64"));
        assert!(
            !is_needed("linux-image-cloud-amd64"),
            "the meta package holds no kernel"
        );
        assert!(!is_needed("perl") && !is_needed("debconf"));
        assert!(!is_needed("libperl5.36") && !is_needed("libtext-glob-perl"));
    }
}
