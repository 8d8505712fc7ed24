//! A guest's file tree: programs of the unpacked packages with just the shared libraries that they
//! need, packed into an initramfs archive or an ext4 image.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, FileContext, Result};
use crate::process::{command_text, program_error, run};

/// Debian's directory of 64-bit x86 libraries, which the dynamic loader searches by default.
const LIBRARIES: &str = "lib/x86_64-linux-gnu";
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";

/// A file tree under construction.
pub(crate) struct FileTree {
    root: PathBuf,
}

impl FileTree {
    /// Starts an empty tree at `root`.
    pub(crate) fn new(root: PathBuf) -> Result<Self> {
        fs::create_dir_all(&root).at("create", &root)?;
        Ok(Self { root })
    }

    /// Creates empty directories, as mount points.
    pub(crate) fn directories(&self, paths: &[&str]) -> Result<()> {
        for path in paths {
            let path = self.root.join(path);
            fs::create_dir_all(&path).at("create", &path)?;
        }
        Ok(())
    }

    /// Writes one file with permissions `mode`.
    pub(crate) fn file(&self, path: &str, content: &[u8], mode: u32) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.root.join(path);
        let parent = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(parent).at("create", parent)?;
        fs::write(&path, content).at("write", &path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).at("set the mode of", &path)
    }

    /// Installs busybox from the unpacked packages, with a link for each of its commands.
    pub(crate) fn busybox(&self, packages: &Path) -> Result<()> {
        let source = find_in_packages(packages, "bin/busybox")?;
        self.file(
            "bin/busybox",
            &fs::read(&source).at("read", &source)?,
            0o755,
        )?;
        let list = run(Command::new(&source).arg("--list"))?;
        for applet in String::from_utf8_lossy(&list.stdout)
            .lines()
            .filter(|name| *name != "busybox")
        {
            let link = self.root.join("bin").join(applet);
            symlink("busybox", &link).at("create", &link)?;
        }
        Ok(())
    }

    /// Installs `program` of the unpacked packages as `/bin/<its name>`, with the libraries that it
    /// needs. Replaces a busybox link of that name.
    pub(crate) fn program(&self, packages: &Path, program: &str) -> Result<()> {
        let source = find_in_packages(packages, program)?;
        let name = source
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let target = self.root.join("bin").join(&name);
        if target.is_symlink() {
            fs::remove_file(&target).at("remove", &target)?;
        }
        self.file(
            &format!("bin/{name}"),
            &fs::read(&source).at("read", &source)?,
            0o755,
        )?;
        let loader = find_in_packages(packages, LOADER)?;
        self.file(LOADER, &fs::read(&loader).at("read", &loader)?, 0o755)?;
        let search = library_directories(packages)?;
        let mut command = Command::new(&loader);
        command
            .arg("--library-path")
            .arg(search.join(":"))
            .arg("--list")
            .arg(&source);
        for (name, path) in needed_libraries(&mut command)? {
            let target = format!("{LIBRARIES}/{name}");
            if !self.root.join(&target).exists() {
                self.file(&target, &fs::read(&path).at("read", &path)?, 0o644)?;
            }
        }
        Ok(())
    }

    /// Gives `/bin/<program>` a second name.
    pub(crate) fn alias(&self, program: &str, name: &str) -> Result<()> {
        let link = self.root.join("bin").join(name);
        symlink(program, &link).at("create", &link)
    }

    /// Packs the tree into `archive` in the kernel's initramfs format (cpio newc). The kernel
    /// unpacks any number of concatenated archives.
    pub(crate) fn pack_initramfs(&self, archive: &Path) -> Result<()> {
        let mut names = Vec::new();
        list(&self.root, &self.root, &mut names)?;
        names.sort();
        let output = File::create(archive).at("create", archive)?;
        let mut command = Command::new("cpio");
        command
            .args([
                "--quiet",
                "--null",
                "--create",
                "--format=newc",
                "--reproducible",
                "--owner=0:0",
            ])
            .current_dir(&self.root)
            .stdin(Stdio::piped())
            .stdout(output)
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|source| Error::Start {
            command: command_text(&command),
            source,
        })?;
        if let Some(mut stdin) = child.stdin.take() {
            let joined: String = names.iter().map(|name| format!("{name}\0")).collect();
            std::io::Write::write_all(&mut stdin, joined.as_bytes()).at("write to", "cpio")?;
        }
        let output = child.wait_with_output().at("wait for", "cpio")?;
        if output.status.success() {
            Ok(())
        } else {
            Err(program_error(&command, output.status, &output.stderr))
        }
    }

    /// Packs the tree into an ext4 image of `mebibytes` MiB.
    pub(crate) fn pack_ext4(&self, image: &Path, mebibytes: u64) -> Result<()> {
        make_ext4(&self.root, image, mebibytes)
    }
}

/// Creates a sparse ext4 image of `mebibytes` MiB with the files below `content`.
pub(crate) fn make_ext4(content: &Path, image: &Path, mebibytes: u64) -> Result<()> {
    run(Command::new("mke2fs")
        .env("PATH", search_path())
        // The file system is mounted only for minutes, so its journal and inode tables are not
        // worth zeroing.
        .args([
            "-q",
            "-F",
            "-t",
            "ext4",
            "-m",
            "0",
            "-E",
            "lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0",
            "-d",
        ])
        .arg(content)
        .arg(image)
        .arg(format!("{mebibytes}M")))?;
    Ok(())
}

/// The search path with the directories of the file system tools, which may not be on an ordinary
/// user's path.
pub(crate) fn search_path() -> String {
    format!(
        "{}:/usr/sbin:/sbin",
        std::env::var("PATH").unwrap_or_default()
    )
}

/// Runs a `command` that lists libraries as the dynamic loader does, and returns
/// `(file name, path)` for each.
///
/// # Errors
/// A library is missing.
pub(crate) fn needed_libraries(command: &mut Command) -> Result<Vec<(String, PathBuf)>> {
    let output = run(command)?;
    let mut libraries = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        // `libaio.so.1 => /lib/x86_64-linux-gnu/libaio.so.1 (0x...)`. Lines of the vDSO and the
        // loader have no arrow.
        let Some((name, rest)) = line.trim().split_once(" => ") else {
            continue;
        };
        let path = rest.split(" (").next().unwrap_or_default();
        if !path.starts_with('/') {
            return Err(Error::Unusable(format!(
                "{}: library {name} {rest}",
                command_text(command)
            )));
        }
        if !name.starts_with('/') {
            libraries.push((name.to_owned(), PathBuf::from(path)));
        }
    }
    Ok(libraries)
}

/// Finds `path` in the unpacked packages, below `/` or `/usr`.
fn find_in_packages(packages: &Path, path: &str) -> Result<PathBuf> {
    [packages.join(path), packages.join("usr").join(path)]
        .into_iter()
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| Error::Unusable(format!("the downloaded packages do not contain {path}")))
}

/// The library directories of the unpacked packages, with their private subdirectories (ceph has
/// one).
fn library_directories(packages: &Path) -> Result<Vec<String>> {
    let mut directories = Vec::new();
    for parent in [
        packages.join(LIBRARIES),
        packages.join("usr").join(LIBRARIES),
    ] {
        if parent.is_dir() {
            directories.push(parent.display().to_string());
            for entry in fs::read_dir(&parent).at("read", &parent)? {
                let path = entry.at("read", &parent)?.path();
                if path.is_dir() {
                    directories.push(path.display().to_string());
                }
            }
        }
    }
    Ok(directories)
}

/// Lists everything below `directory`, parents first, relative to `root`.
fn list(root: &Path, directory: &Path, names: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(directory).at("read", directory)? {
        let path = entry.at("read", directory)?.path();
        if let Ok(name) = path.strip_prefix(root) {
            names.push(name.display().to_string());
        }
        if path.is_dir() && !path.is_symlink() {
            list(root, &path, names)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_and_a_present_one_is_found() {
        let mut listing = Command::new("printf");
        listing.arg(
            "\tlinux-vdso.so.1 (0x7)\n\tliba.so.1 => /lib/liba.so.1 (0x7)\n\t/lib64/ld.so (0x7)\n",
        );
        let libraries = needed_libraries(&mut listing).unwrap();
        assert_eq!(
            libraries,
            [("liba.so.1".to_owned(), PathBuf::from("/lib/liba.so.1"))]
        );
        let mut listing = Command::new("printf");
        listing.arg("\tliba.so.1 => not found\n");
        let error = needed_libraries(&mut listing).unwrap_err().to_string();
        assert!(error.contains("liba.so.1 not found"), "{error}");
    }
}
