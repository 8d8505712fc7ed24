//! Back stores of target_core_user.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::opener::SUBTYPE;
use super::target::{
    LioTarget, Result, StepContext, TargetError, directories, get, make_directory, name_of,
    remove_directory, set,
};

/// The two values of a back store's alias, which records its durability.
const DURABLE: &str = "durable";
const VOLATILE: &str = "volatile";
/// Longest configuration string that the kernel keeps, in bytes.
const MAX_CONFIG: usize = 255;
/// How many HBA numbers are tried: more than a machine has.
const MAX_HBAS: u32 = 4096;

/// The properties of a back store to make.
#[derive(Clone, Debug)]
pub struct BackstoreSpec {
    /// Its name.
    pub name: String,
    /// The path of its image, which tells people and the next process what the back store is for.
    pub image: String,
    /// Its unit serial number.
    pub serial: String,
    /// Its logical block size in bytes.
    pub block_size: u32,
    /// Limit on the logical blocks of one command.
    pub max_blocks: u32,
    /// Seconds after which the kernel times a command out; `None` keeps the kernel's default.
    pub timeout: Option<u32>,
}

impl BackstoreSpec {
    /// The configuration string. Characters of the path that would end it in the kernel's parser
    /// are replaced. Of a path that is too long, the end is kept.
    fn config(&self) -> String {
        let clean: String = self
            .image
            .chars()
            .map(|c| if c == ',' || c.is_control() { '_' } else { c })
            .collect();
        let room = MAX_CONFIG - SUBTYPE.len();
        let start = clean.ceil_char_boundary(clean.len().saturating_sub(room));
        format!("{SUBTYPE}{}", clean[start..].trim_start_matches('/'))
    }
}

/// A back store: `core/user_<hba>/<name>`.
#[derive(Clone, Debug)]
pub struct Backstore {
    pub(super) target: LioTarget,
    /// The number after `user_` in its directory's name.
    pub hba: u32,
    /// Its name.
    pub name: String,
    pub(super) directory: PathBuf,
}

impl Backstore {
    fn at(target: &LioTarget, hba: u32, name: &str) -> Self {
        let directory = target.core().join(format!("user_{hba}")).join(name);
        Self {
            target: target.clone(),
            hba,
            name: name.to_owned(),
            directory,
        }
    }

    /// Every back store of target_core_user, including those of other programs.
    pub fn all(target: &LioTarget) -> Vec<Self> {
        let mut found = Vec::new();
        for hba in directories(&target.core()) {
            let number = name_of(&hba)
                .strip_prefix("user_")
                .and_then(|number| number.parse().ok());
            let Some(number) = number else { continue };
            let names = directories(&hba).into_iter().map(|path| name_of(&path));
            found.extend(names.map(|name| Self::at(target, number, &name)));
        }
        found
    }

    /// The back stores that are walvisor's.
    pub fn ours(target: &LioTarget) -> Vec<Self> {
        let all = Self::all(target).into_iter();
        all.filter(|store| store.config().starts_with(SUBTYPE))
            .collect()
    }

    /// Makes a back store, enabled and without a size. If there is an enabled one for the same
    /// image, returns it unchanged, with `true`. One that was never enabled is made again.
    ///
    /// # Errors
    /// If the name is taken, or the kernel refuses. Whatever this call has made by then is removed
    /// again.
    pub fn raise(target: &LioTarget, wanted: &BackstoreSpec) -> Result<(Self, bool)> {
        let (name, config) = (&wanted.name, wanted.config());
        let standing = Self::all(target)
            .into_iter()
            .find(|store| store.name == *name);
        if let Some(store) = standing {
            let known = store.config();
            if store.enabled() && known == config {
                store.check_blocks(wanted)?;
                return Ok((store, true));
            }
            let half_built = known.is_empty() || known.starts_with(SUBTYPE);
            if store.enabled() || !half_built {
                return Err(TargetError::Taken(format!(
                    "a back store '{name}' exists ({}, of '{known}'): give the disk another name=, \
                     or remove that one first",
                    store.directory.display()
                )));
            }
            store.remove()?;
        }
        let hba = Self::new_hba(target)?;
        let store = Self::at(target, hba, name);
        let built = store.build(wanted, &config);
        if built.is_err()
            && let Err(error) = store.remove()
        {
            tracing::warn!("{error}");
        }
        built.map(|()| (store, false))
    }

    /// Refuses another block size for an existing back store, because its initiators still use the
    /// old one.
    fn check_blocks(&self, wanted: &BackstoreSpec) -> Result<()> {
        let known: Option<u32> = get(&self.directory.join("attrib/hw_block_size"))
            .parse()
            .ok();
        match known.filter(|known| *known != wanted.block_size) {
            None => Ok(()),
            Some(known) => Err(TargetError::Taken(format!(
                "disk '{0}' stands in the target with blocks of {known} bytes, in which its \
                 initiators count: give block-size={known}, or remove it first ('walvisor serve \
                 tcmu --remove {0}')",
                self.name
            ))),
        }
    }

    /// Makes the first free directory `user_N`.
    fn new_hba(target: &LioTarget) -> Result<u32> {
        let core = target.core();
        for hba in 0..MAX_HBAS {
            let path = core.join(format!("user_{hba}"));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(hba),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                // The kernel has already asked modprobe for the module, so it is missing.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => {
                    return Err(TargetError::Missing {
                        what: "the kernel module target_core_user is not loaded".to_owned(),
                        command: "modprobe target_core_user",
                    });
                }
                Err(error) => return Err(error).during("make", &path),
            }
        }
        Err(TargetError::Taken(format!(
            "{} has {MAX_HBAS} back stores of target_core_user",
            core.display()
        )))
    }

    fn build(&self, wanted: &BackstoreSpec, config: &str) -> Result<()> {
        make_directory(&self.directory)?;
        let control = self.directory.join("control");
        // The kernel must not wait for answers to its events: if the handler is killed, it would
        // wait for ever.
        for value in [
            format!("dev_config={config}"),
            format!("hw_block_size={}", wanted.block_size),
            format!("hw_max_sectors={}", wanted.max_blocks),
            "nl_reply_supported=-1".to_owned(),
        ] {
            set(&control, &value)?;
        }
        set(&self.directory.join("enable"), "1")?;
        if let Some(timeout) = wanted.timeout {
            let attribute = self.directory.join("attrib/cmd_time_out");
            set(&attribute, &timeout.to_string())?;
        }
        let serial = self.directory.join("wwn/vpd_unit_serial");
        set(&serial, &wanted.serial)
    }

    /// Its directory in configfs.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its configuration string.
    pub fn config(&self) -> String {
        get(&self.directory.join("attrib/dev_config"))
    }

    /// The path of its image, if it is walvisor's.
    pub fn image(&self) -> Option<String> {
        self.config().strip_prefix(SUBTYPE).map(str::to_owned)
    }

    /// Its size in bytes, as the kernel knows it.
    pub fn size(&self) -> Option<u64> {
        get(&self.directory.join("attrib/dev_size")).parse().ok()
    }

    /// Whether it was enabled, which completes it.
    pub fn enabled(&self) -> bool {
        get(&self.directory.join("enable")) == "1"
    }

    /// Sets the size in bytes that the kernel reports.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_size(&self, bytes: u64) -> Result<()> {
        let attribute = self.directory.join("attrib/dev_size");
        set(&attribute, &bytes.to_string())
    }

    /// Records whether completed writes outlive the process that serves the disk. The kernel keeps
    /// the record for the next process.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_durable(&self, durable: bool) -> Result<()> {
        let alias = self.directory.join("alias");
        set(&alias, if durable { DURABLE } else { VOLATILE })
    }

    /// The durability that was recorded last.
    pub fn is_durable(&self) -> bool {
        get(&self.directory.join("alias")) == DURABLE
    }

    /// Makes initiators wait: the kernel answers their commands with BUSY, and they retry. `false`
    /// ends that.
    ///
    /// # Errors
    /// If the kernel refuses, or is older than 4.20.
    pub fn block(&self, blocked: bool) -> Result<()> {
        let attribute = self.directory.join("action/block_dev");
        set(&attribute, if blocked { "1" } else { "0" })
    }

    /// Completes the commands that a dead handler has left in the ring, with BUSY if `retry`, else
    /// with an error.
    ///
    /// # Errors
    /// If the kernel refuses, or is older than 4.20.
    pub fn reset_ring(&self, retry: bool) -> Result<()> {
        let attribute = self.directory.join("action/reset_ring");
        set(&attribute, if retry { "1" } else { "2" })
    }

    /// Removes it. No fabric may export it, and no process may have it open.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove(&self) -> Result<()> {
        remove_directory(&self.directory)?;
        let hba = self.directory.parent().unwrap_or(&self.directory);
        if directories(hba).is_empty() {
            remove_directory(hba)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_fits_the_kernels_parser() {
        let config = |image: &str| {
            let wanted = BackstoreSpec {
                name: "n".to_owned(),
                image: image.to_owned(),
                serial: String::new(),
                block_size: 512,
                max_blocks: 8,
                timeout: None,
            };
            wanted.config()
        };
        assert_eq!(config("/var/a.img"), "walvisor/var/a.img");
        assert_eq!(config("a,b\nc"), "walvisor/a_b_c");
        let long = config(&"ü/".repeat(200));
        assert!(long.len() <= MAX_CONFIG && long.ends_with("ü/"), "{long}");
    }
}
