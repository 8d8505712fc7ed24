//! A child process opens the UIO devices of disks that are added later, and does nothing else.
//!
//! The device of a new back store is a new file in /dev. With the right to open it, a process could
//! open every other file there too, such as the machine's disks. So the process forks a child
//! before it gives up its rights. The child opens only devices of target_core_user:
//!
//! ```text
//!   process ── number of the UIO device ──▶ child: is its name that of a back store of walvisor? ─▶ open
//!           ◀── 0 and the descriptor, or an errno ──┘            ends when the process has ended
//! ```

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

use crate::child;
use crate::descriptors;
use crate::landlock::{AllowedPaths, Landlock};

/// The start of the configuration of walvisor's back stores; tcmu-runner calls this a subtype.
pub(super) const SUBTYPE: &str = "walvisor/";

/// The parent's handle of the child. Dropping it ends the child.
#[derive(Debug)]
pub(super) struct Opener(Mutex<OwnedFd>);

impl Opener {
    /// Starts the child, which looks up device names in the directory `uio`. Call it while the
    /// process has one thread.
    pub(super) fn start(uio: &Path) -> io::Result<Self> {
        let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
        let (mine, its) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
        child::start(c"walvisor-uio", &mut [its.as_raw_fd()], || {
            let mut places = AllowedPaths::default();
            places.read(uio);
            places.read(Path::new("/sys/devices"));
            places.device(Path::new("/dev"));
            places.restrict(Landlock::On);
            let _ = answer(&its, uio);
        })?;
        Ok(Self(Mutex::new(mine)))
    }

    /// Opens `/dev/uio<number>`.
    pub(super) fn open(&self, number: u32) -> io::Result<OwnedFd> {
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        send(&*socket, &number.to_ne_bytes(), SendFlags::NOSIGNAL)?;
        let mut answer = [0; 4];
        let (count, device) = loop {
            match descriptors::receive(&*socket, &mut answer) {
                Err(Errno::INTR) => {}
                received => {
                    let (count, devices) = received?;
                    break (count, devices.into_iter().next());
                }
            }
        };
        match (count, i32::from_ne_bytes(answer), device) {
            (4, 0, Some(device)) => Ok(device),
            (4, error, _) => Err(io::Error::from_raw_os_error(error)),
            _ => Err(io::Error::other("the process that opens devices has ended")),
        }
    }
}

/// The child's work: answers requests until its parent has ended.
fn answer(socket: &OwnedFd, uio: &Path) -> rustix::io::Result<()> {
    let mut request = [0; 4];
    loop {
        match rustix::io::read(socket, &mut request) {
            Ok(4) => {}
            Err(Errno::INTR) => continue,
            _ => return Ok(()),
        }
        let opened = open_if_ours(u32::from_ne_bytes(request), uio);
        let error = opened
            .as_ref()
            .map_or_else(|error| error.raw_os_error(), |_| 0);
        let answer = error.to_ne_bytes();
        let device = opened.ok();
        let rights: Vec<_> = device.iter().map(AsFd::as_fd).collect();
        descriptors::send(socket, &answer, &rights)?;
    }
}

fn open_if_ours(number: u32, uio: &Path) -> rustix::io::Result<OwnedFd> {
    let device = format!("uio{number}");
    // tcm-user/<hba>/<name>/<configuration>
    let name = fs::read_to_string(uio.join(&device).join("name")).unwrap_or_default();
    let configuration = name.splitn(4, '/').nth(3).unwrap_or_default();
    if name.starts_with("tcm-user/") && configuration.starts_with(SUBTYPE) {
        open_device(&Path::new("/dev").join(device))
    } else {
        Err(Errno::PERM)
    }
}

/// Opens a UIO device.
pub(super) fn open_device(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    open(path, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Here no device has these names. Opening one is tested with a kernel that has some.
    #[test]
    fn only_devices_of_walvisors_back_stores_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        for (number, name) in [
            (4_000_000, "tcm-user/0/a/walvisor/a.img"),
            (4_000_001, "tcm-user/0/walvisor/qcow/a.img"),
            (4_000_002, "other"),
        ] {
            let device = dir.path().join(format!("uio{number}"));
            fs::create_dir(&device).unwrap();
            fs::write(device.join("name"), format!("{name}\n")).unwrap();
        }
        let errors = [4_000_000, 4_000_001, 4_000_002, 4_000_003]
            .map(|number| open_if_ours(number, dir.path()).unwrap_err());
        assert_eq!(
            errors,
            [Errno::NOENT, Errno::PERM, Errno::PERM, Errno::PERM]
        );
    }

    /// The child's side, here a thread.
    #[test]
    fn requests_are_answered_until_the_parent_ends() {
        let dir = tempfile::tempdir().unwrap();
        let kind = SocketType::SEQPACKET;
        let (mine, its) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let opener = Opener(Mutex::new(mine));
        let uio = dir.path().to_owned();
        let child = std::thread::spawn(move || answer(&its, &uio));
        for number in 0..3 {
            let error = opener.open(number).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        }
        drop(opener);
        child.join().unwrap().unwrap();
    }
}
