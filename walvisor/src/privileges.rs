//! What a process with disks in use gives up of root once its sockets are bound: all capabilities,
//! and with `--user` root itself.
//!
//! ```text
//!   sockets, certificates ─▶ names of sockets: a child keeps root ─▶ drop ─▶ Landlock ─▶ disks are opened ─▶ seccomp
//! ```
//! Disks are opened afterwards, so what the user may not do with them fails at the start, and not
//! when a log grows.

use std::ffi::{CStr, CString};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, absolute};

use rustix::process::{DumpableBehavior, geteuid, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// The user that a process becomes: `NAME`, or `UID` with `:GID` or without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceUser {
    name: String,
    uid: u32,
    gid: u32,
    /// Further groups.
    groups: Vec<u32>,
}

impl ServiceUser {
    /// Parses the argument of `--user`.
    ///
    /// # Errors
    /// If there is no such user.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        let group = group.map(|group| group.parse::<u32>());
        let group = group
            .transpose()
            .map_err(|_| "give a group as a number".to_owned())?;
        if let Ok(uid) = user.parse() {
            let gid = group.unwrap_or(uid);
            // To the system it means "unchanged".
            if [uid, gid].contains(&u32::MAX) {
                return Err("4294967295 is nobody: give another number".to_owned());
            }
            return Ok(Self {
                name: text.to_owned(),
                uid,
                gid,
                groups: vec![gid],
            });
        }
        let found = find(user).ok_or("there is no such user: give a name, UID or UID:GID")?;
        let (uid, gid) = (found.0, group.unwrap_or(found.1));
        Ok(Self {
            name: user.to_owned(),
            uid,
            gid,
            groups: groups_of(user, gid),
        })
    }

    /// As the user wrote it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The numbers of the user and its group.
    pub fn ids(&self) -> (u32, u32) {
        (self.uid, self.gid)
    }

    /// Makes this process one of the user. Call it while there is one thread.
    fn become_user(&self) -> io::Result<()> {
        let check = |result: i32| match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        let (uid, gid) = (self.uid, self.gid);
        // SAFETY: the list has as many groups as its length says.
        check(unsafe { libc::setgroups(self.groups.len(), self.groups.as_ptr()) })?;
        // SAFETY: these change numbers of the process, no memory.
        check(unsafe { libc::setresgid(gid, gid, gid) })?;
        // SAFETY: as above.
        check(unsafe { libc::setresuid(uid, uid, uid) })?;
        // Otherwise /proc/self would belong to root.
        set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        Ok(())
    }
}

/// The user and the group with a user's name.
fn find(name: &str) -> Option<(u32, u32)> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 16 << 10];
    // SAFETY: the entry is plain data, for which zero is valid.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: the name ends with zero, the buffer has the length that is given, and entry and found
    // outlive the call.
    let failed = unsafe {
        libc::getpwnam_r(
            name.as_ptr(),
            &raw mut entry,
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    (failed == 0 && !found.is_null()).then_some((entry.pw_uid, entry.pw_gid))
}

/// The groups of a user, `gid` among them.
fn groups_of(name: &str, gid: u32) -> Vec<u32> {
    let mut groups = vec![gid; 256];
    let mut count = groups.len() as i32;
    let Ok(name) = CString::new(name) else {
        return vec![gid];
    };
    let name: &CStr = &name;
    // SAFETY: the list has room for `count` groups.
    let found =
        unsafe { libc::getgrouplist(name.as_ptr(), gid, groups.as_mut_ptr(), &raw mut count) };
    groups.truncate(if found < 0 { 1 } else { count as usize });
    groups
}

/// Gives up all capabilities, and becomes `user` if there is one. Call it while there is one
/// thread.
///
/// Root keeps CAP_DAC_OVERRIDE if one of `paths`, a directory on the way to it, or a file in it
/// belongs to somebody else, or is closed to root.
///
/// # Errors
/// If the system refuses.
pub fn drop_root<'a>(
    user: Option<&ServiceUser>,
    mut paths: impl Iterator<Item = &'a Path>,
) -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let kept = if user.is_none() && paths.any(needs_override) {
        CapabilitySet::DAC_OVERRIDE
    } else {
        CapabilitySet::empty()
    };
    for capability in 0..64 {
        if kept.bits() & (1 << capability) == 0 {
            // Not every kernel has each of them, and only CAP_SETPCAP allows this. Without new
            // privileges none comes from there anyway. SAFETY: this changes a bit of the process,
            // no memory.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        }
    }
    if let Some(user) = user {
        user.become_user()?;
    }
    let had = capabilities(None)?;
    let kept = had.permitted & kept;
    let wanted = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    // A service manager's filter may forbid the call, and its unit may have left none.
    if (had.effective | had.permitted | had.inheritable) != kept {
        set_capabilities(None, wanted)?;
    }
    Ok(())
}

/// Whether a path, a directory on the way to it, or a file in it belongs to another user than this
/// process's, or is closed to its own.
fn needs_override(path: &Path) -> bool {
    let me = geteuid().as_raw();
    let closed = |found: io::Result<Metadata>| {
        found.is_ok_and(|found| found.uid() != me || found.mode() & 0o600 != 0o600)
    };
    let path = absolute(path).unwrap_or_else(|_| path.to_owned());
    let inside = fs::read_dir(&path).into_iter().flatten().flatten();
    path.ancestors().map(fs::metadata).any(closed)
        || inside.map(|entry| entry.metadata()).any(closed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn users_are_names_or_numbers() {
        let parse = |text| ServiceUser::parse(text).map(|user| user.ids());
        assert_eq!(parse("root"), Ok((0, 0)));
        assert_eq!(parse("root:7"), Ok((0, 7)));
        assert_eq!(parse("1234"), Ok((1234, 1234)));
        assert_eq!(parse("1234:5"), Ok((1234, 5)));
        for wrong in [
            "",
            "no such user",
            "root:wheel",
            "1:2:3",
            "4294967295:1",
            "1:4294967295",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let root = ServiceUser::parse("root").unwrap();
        assert!(root.groups.contains(&0));
    }

    #[test]
    fn root_keeps_its_override_for_what_is_not_its_own() {
        if !geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("place");
        fs::create_dir(&place).unwrap();
        let image = place.join("image");
        fs::write(&image, "").unwrap();
        let all = [dir.path(), &place, &image, &place.join("not/there")];
        assert!(all.iter().all(|path| !needs_override(path)));
        // A directory of somebody else on the way, which root's own image and log lie in.
        chown(&place, Some(1234), None).unwrap();
        assert!(all.iter().all(|path| needs_override(path)));
        chown(&place, Some(0), None).unwrap();
        // A file of somebody else in a directory.
        chown(&image, Some(1234), None).unwrap();
        assert!(needs_override(&place) && needs_override(&image));
        chown(&image, Some(0), None).unwrap();
        fs::set_permissions(&image, fs::Permissions::from_mode(0o440)).unwrap();
        assert!(needs_override(&image));
    }
}
