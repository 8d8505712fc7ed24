//! Exports: the fabrics through which initiators see a back store.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::backstore::Backstore;
use super::target::{
    LioTarget, Result, StepContext, TargetError, directories, get, make_directory, name_of,
    remove_directory, set,
};
use crate::disk_spec::Fabric;

/// How often, and how far apart, to check for the disk's name, which the kernel's disk driver
/// assigns some time after the LUN appears.
const NAME_TRIES: u32 = 40;
const NAME_WAIT: Duration = Duration::from_millis(50);

/// A LUN of a fabric: `<fabric>/<wwn>/tpgt_N/lun/lun_N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetExport {
    /// Its directory.
    lun: PathBuf,
}

impl TargetExport {
    /// Every LUN of this back store, in any fabric.
    pub fn of(store: &Backstore) -> Vec<Self> {
        let mut found = Vec::new();
        let fabrics = directories(&store.target.root());
        for fabric in fabrics.iter().filter(|path| !path.ends_with("core")) {
            let portals = directories(fabric)
                .into_iter()
                .flat_map(|wwn| directories(&wwn));
            for lun in portals.flat_map(|portal| directories(&portal.join("lun"))) {
                let export = Self { lun };
                if export.link_to(store).is_some() {
                    found.push(export);
                }
            }
        }
        found
    }

    /// Makes the target `wwn` in `fabric`, with a LUN that is still empty.
    ///
    /// # Errors
    /// If the fabric's module is missing, or the target already has a LUN 0. Whatever this call has
    /// made by then is removed again.
    pub fn prepare(target: &LioTarget, fabric: Fabric, wwn: &str) -> Result<Option<Self>> {
        let (name, module, command) = match fabric {
            Fabric::Loop => ("loopback", "tcm_loop", "modprobe tcm_loop"),
            Fabric::Vhost => ("vhost", "vhost_scsi", "modprobe vhost_scsi"),
            Fabric::None => return Ok(None),
        };
        let root = target.root().join(name);
        if let Err(error) = fs::create_dir(&root)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            // The kernel has already asked modprobe for the module, so it is missing.
            if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) {
                let what = format!("the kernel module {module} is not loaded");
                return Err(TargetError::Missing { what, command });
            }
            if error.kind() == io::ErrorKind::PermissionDenied {
                return Err(TargetError::Taken(format!(
                    "{0} did not exist when this process gave up its rights: run '{command} && \
                     mkdir {0}', and restart it",
                    root.display()
                )));
            }
            return Err(error).during("make", &root);
        }
        let export = Self {
            lun: root.join(wwn).join("tpgt_1/lun/lun_0"),
        };
        if export.is_linked() {
            return Err(TargetError::Taken(format!(
                "{} exports something else: give the disk another wwn=",
                export.lun.display()
            )));
        }
        let built = export.build();
        if built.is_err()
            && let Err(error) = export.remove()
        {
            tracing::warn!("{error}");
        }
        built.map(|()| Some(export))
    }

    fn build(&self) -> Result<()> {
        let portal = self.portal();
        let wwn = portal.parent().unwrap_or(portal);
        make_directory(wwn)?;
        make_directory(portal)?;
        let nexus = portal.join("nexus");
        if !get(&nexus).starts_with("naa.") {
            set(&nexus, &initiator(&name_of(wwn)))?;
        }
        make_directory(&self.lun)
    }

    /// The directory `tpgt_N`.
    fn portal(&self) -> &Path {
        let lists = self.lun.parent().unwrap_or(&self.lun);
        lists.parent().unwrap_or(lists)
    }

    /// The target's name in its fabric.
    pub fn wwn(&self) -> String {
        name_of(self.portal().parent().unwrap_or(Path::new("")))
    }

    /// The fabric's directory in configfs.
    pub fn fabric(&self) -> &Path {
        let wwn = self.portal().parent().unwrap_or(&self.lun);
        wwn.parent().unwrap_or(wwn)
    }

    /// Whether [`prepare`](Self::prepare) makes targets of its fabric.
    pub fn is_simple(&self) -> bool {
        ["loopback", "vhost"].contains(&&*name_of(self.fabric()))
    }

    fn links(&self) -> impl Iterator<Item = PathBuf> {
        let entries = fs::read_dir(&self.lun).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.is_symlink())
    }

    fn is_linked(&self) -> bool {
        self.links().next().is_some()
    }

    fn link_to(&self, store: &Backstore) -> Option<PathBuf> {
        let end = Path::new("core")
            .join(format!("user_{}", store.hba))
            .join(&store.name);
        let is = |path: &PathBuf| fs::read_link(path).is_ok_and(|to| to.ends_with(&end));
        self.links().find(is)
    }

    /// Shows the back store to initiators. Those on this machine send commands at once, so a
    /// handler must be running.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn link(&self, store: &Backstore) -> Result<()> {
        let link = self.lun.join(&store.name);
        symlink(&store.directory, &link).during("link", &link)
    }

    /// Takes the disk away from initiators. They may flush it first, so a handler must be running.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn unlink(&self) -> Result<()> {
        for link in self.links() {
            fs::remove_file(&link).during("remove", &link)?;
        }
        Ok(())
    }

    /// Removes the LUN, which must be empty, and its target, if the target has no other LUN.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove(&self) -> Result<()> {
        remove_directory(&self.lun)?;
        let portal = self.portal();
        let Some(wwn) = portal.parent() else {
            return Ok(());
        };
        if !directories(&portal.join("lun")).is_empty() {
            return Ok(());
        }
        let nexus = portal.join("nexus");
        if get(&nexus).starts_with("naa.") {
            set(&nexus, "NULL")?;
        }
        remove_directory(portal)?;
        let other = directories(wwn);
        if other.iter().any(|path| name_of(path).starts_with("tpgt_")) {
            return Ok(());
        }
        remove_directory(wwn)
    }

    /// The SCSI address on this machine, `host:channel:target:lun`.
    fn address(&self) -> Option<String> {
        let address = get(&self.portal().join("address"));
        let lun = name_of(&self.lun);
        let lun = lun.strip_prefix("lun_")?;
        (!address.is_empty()).then(|| format!("{address}:{lun}"))
    }

    /// The disk's current name on this machine, such as `/dev/sda`.
    pub fn disk_now(&self) -> Option<String> {
        let device = Path::new("/sys/bus/scsi/devices").join(self.address()?);
        let disk = directories(&device.join("block")).pop()?;
        Some(format!("/dev/{}", name_of(&disk)))
    }

    /// The disk's name on this machine, once the kernel's disk driver has assigned it; the SCSI
    /// address, if it does not.
    pub fn disk(&self) -> Option<String> {
        for _ in 0..NAME_TRIES {
            if let Some(disk) = self.disk_now() {
                return Some(disk);
            }
            self.address()?;
            thread::sleep(NAME_WAIT);
        }
        Some(format!("SCSI address {}", self.address()?))
    }

    /// Where initiators find the LUN, to print.
    pub fn place(&self) -> String {
        let fabric = name_of(self.fabric());
        format!("{fabric} {}", self.wwn())
    }
}

/// The name of the only initiator of a target: the target's own name with its last digit changed.
fn initiator(wwn: &str) -> String {
    let (start, last) = wwn.split_at(wwn.len().saturating_sub(1));
    let digit = u8::from_str_radix(last, 16).unwrap_or(0);
    format!("{start}{:x}", digit ^ 1)
}
