//! A volume of a disk as a file of this machine, without a copy: a file system in user space (FUSE)
//! that is this one file. No directory shows it.
//!
//! ```text
//!   loop device, debugfs ──▶ the file ──▶ kernel ──▶ /dev/fuse ──▶ child ──▶ the disk, which is read
//!                                                                    └─ what was written: scratch
//! ```
//! The child ends once nobody has the file. It is one because no process may serve what it has open
//! itself: when it is killed, the kernel closes its files one by one, and one of them would wait
//! for an answer for ever. Root mounts the file system; for another user the child does so in a
//! user namespace. Where neither works, the file is a copy.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use rustix::process::{Pid, WaitOptions, getgid, getuid, waitpid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use serde::{Deserialize, Serialize};
use walvisor_storage::{Progress, scratch_file};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::volume::{FileSystem, ReadDisk, Volume};
use crate::descriptors;
use crate::progress::with_bar;

/// Bytes that are read or written at a time at most.
const MOST_BYTES: u32 = 1 << 20;
/// How long the child may take to end.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of a page: what was written is kept by page.
const PAGE: u64 = 4096;
/// The version of the protocol of `linux/fuse.h`.
const VERSION: [u32; 2] = [7, 31];
/// `FUSE_ASYNC_READ`, `FUSE_BIG_WRITES` and `FUSE_MAX_PAGES`.
const FLAGS: u32 = 1 | 1 << 5 | 1 << 22;
/// Length of `struct fuse_in_header`, and of that of a READ or a WRITE.
const HEADER: usize = 40;
const TRANSFER: usize = 40;

/// `struct fuse_out_header`.
#[derive(Immutable, IntoBytes)]
#[repr(C)]
struct ReplyHeader {
    len: u32,
    error: i32,
    unique: u64,
}

/// `struct fuse_init_out`.
#[derive(FromZeros, Immutable, IntoBytes)]
#[repr(C)]
struct InitReply {
    version: [u32; 2],
    max_readahead: u32,
    flags: u32,
    background: [u16; 2],
    max_write: u32,
    time_granularity: u32,
    max_pages: u16,
    alignment: u16,
    unused: [u32; 8],
}

/// `struct fuse_attr_out`.
#[derive(FromZeros, Immutable, IntoBytes)]
#[repr(C)]
struct Attributes {
    valid_seconds: u64,
    valid_nanoseconds: [u32; 2],
    inode: u64,
    size: u64,
    blocks: u64,
    times: [u64; 3],
    nanoseconds: [u32; 3],
    mode: u32,
    links: u32,
    uid: u32,
    gid: u32,
    device: u32,
    block_size: u32,
    flags: u32,
}

/// What the file has: a range of a disk, and what was written to it.
struct Contents {
    read: ReadDisk,
    bytes: Range<u64>,
    /// Pages that were written, and where the scratch file has them.
    written: HashMap<u64, u64>,
    scratch: File,
}

impl Contents {
    fn len(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// The bytes of a range, as far as the file goes.
    fn read(&self, at: u64, len: u64) -> io::Result<Vec<u8>> {
        let end = at.saturating_add(len).min(self.len());
        let first = at / PAGE * PAGE;
        if at >= end {
            return Ok(Vec::new());
        }
        let mut bytes = vec![0; (end.next_multiple_of(PAGE).min(self.len()) - first) as usize];
        (self.read)(&mut bytes, self.bytes.start + first)?;
        for (page, piece) in (first / PAGE..).zip(bytes.chunks_mut(PAGE as usize)) {
            if let Some(&place) = self.written.get(&page) {
                self.scratch.read_exact_at(piece, place)?;
            }
        }
        bytes.truncate((end - first) as usize);
        bytes.drain(..(at - first) as usize);
        Ok(bytes)
    }

    fn write(&mut self, at: u64, mut data: &[u8]) -> io::Result<()> {
        let mut at = at;
        if at
            .checked_add(data.len() as u64)
            .is_none_or(|end| end > self.len())
        {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        while !data.is_empty() {
            let (page, within) = (at / PAGE, (at % PAGE) as usize);
            let mut bytes = self.read(page * PAGE, PAGE)?;
            let count = data.len().min(bytes.len() - within);
            bytes[within..within + count].copy_from_slice(&data[..count]);
            let next = self.written.len() as u64 * PAGE;
            let place = self.written.get(&page).copied().unwrap_or(next);
            self.scratch.write_all_at(&bytes, place)?;
            self.written.insert(page, place);
            (at, data) = (at + count as u64, &data[count..]);
        }
        Ok(())
    }
}

/// A disk that is open in a child.
pub struct OpenedDisk {
    /// How it is read.
    pub read: ReadDisk,
    /// Bytes of it.
    pub bytes: u64,
    /// Its name.
    pub name: String,
}

/// A volume that a child serves.
pub struct ServedVolume {
    /// What and where it is.
    pub volume: Volume,
    /// The name of its disk.
    pub name: String,
    /// The file, until this is dropped.
    file: Option<File>,
    child: Pid,
}

/// What the child says, with the descriptor of the file.
#[derive(Deserialize, Serialize)]
enum ChildReport {
    Volume {
        name: String,
        xfs: bool,
        partition: Option<u32>,
        bytes: Range<u64>,
    },
    Failed(String),
}

impl ServedVolume {
    /// Serves a volume of a disk as a file, which may be written: that changes nothing on the disk.
    /// `open` opens the disk, in the child. `partition`: as for [`Volume::find`]. Call it while the
    /// process has one thread.
    ///
    /// # Errors
    /// One line: the disk can't be opened, or has no such volume; or the system refuses.
    pub fn start(
        partition: Option<u32>,
        open: impl FnOnce() -> Result<OpenedDisk, String>,
    ) -> Result<Self, String> {
        let failed = |error: io::Error| format!("can't read it in a child: {error}");
        let (socket, theirs) = UnixStream::pair().map_err(failed)?;
        let threads = std::fs::read_dir("/proc/self/task").map_err(failed)?;
        assert_eq!(
            threads.count(),
            1,
            "a child would have only one of the threads"
        );
        // SAFETY: there is one thread, so the child may do whatever this process may.
        let child = match unsafe { libc::fork() } {
            0 => {
                drop(socket);
                serve(&theirs, partition, open);
                std::process::exit(0)
            }
            child => Pid::from_raw(child).ok_or_else(|| failed(io::Error::last_os_error()))?,
        };
        drop(theirs);
        let (told, file) = receive(&socket).map_err(failed)?;
        match (serde_json::from_slice(&told), file) {
            (
                Ok(ChildReport::Volume {
                    name,
                    xfs,
                    partition,
                    bytes,
                }),
                Some(file),
            ) => {
                // Only then the kernel knows whose file it is.
                fstat(&file).map_err(|error| failed(error.into()))?;
                // The mount ends once nobody has the file open, and with it the child.
                let place = format!("/proc/self/fd/{}", file.as_raw_fd());
                let file = File::options().read(true).write(true).open(place);
                let file_system = if xfs {
                    FileSystem::Xfs
                } else {
                    FileSystem::Ext4
                };
                Ok(Self {
                    volume: Volume {
                        file_system,
                        partition,
                        bytes,
                    },
                    name,
                    file: Some(file.map_err(failed)?),
                    child,
                })
            }
            (Ok(ChildReport::Failed(why)), _) => Err(why),
            _ => Err("the child that reads it has ended".to_owned()),
        }
    }

    /// The file.
    pub(super) fn file(&self) -> &File {
        self.file.as_ref().expect("it is there until the drop")
    }
}

impl Drop for ServedVolume {
    fn drop(&mut self) {
        drop(self.file.take());
        // The child has the disk open, so the next command might find it in use.
        let began = Instant::now();
        while let Ok(None) = waitpid(Some(self.child), WaitOptions::NOHANG)
            && began.elapsed() < END_LIMIT
        {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// What the child says, and the descriptor that comes with it.
fn receive(socket: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut told = vec![0; 64 << 10];
    let (count, files) = descriptors::receive(socket, &mut told)?;
    told.truncate(count);
    Ok((told, files.into_iter().next()))
}

/// Says something, with a descriptor.
fn tell(socket: &UnixStream, report: &ChildReport, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    descriptors::send(socket, &serde_json::to_vec(report)?, file.as_slice())?;
    Ok(())
}

/// The child: mounts, opens the disk, passes the mount on, and answers the kernel until it is gone.
fn serve(
    socket: &UnixStream,
    partition: Option<u32>,
    open: impl FnOnce() -> Result<OpenedDisk, String>,
) {
    // While there is one thread: the disk has its own.
    let mounted = mounted().or_else(|_| {
        enter_namespace()?;
        mounted()
    });
    let found = open().and_then(|disk| {
        let volume = Volume::find(&disk.read, disk.bytes, partition);
        let volume = volume.map_err(|why| format!("{}: {why}", disk.name))?;
        let scratch = scratch_file().map_err(|error| error.to_string())?;
        Ok((disk, volume, scratch))
    });
    let (disk, volume, scratch) = match found {
        Ok(found) => found,
        // Whoever waits for it is gone, or is told.
        Err(why) => return tell(socket, &ChildReport::Failed(why), None).unwrap_or_default(),
    };
    let told = ChildReport::Volume {
        name: disk.name,
        xfs: volume.file_system == FileSystem::Xfs,
        partition: volume.partition,
        bytes: volume.bytes.clone(),
    };
    let (device, mount) = match mounted {
        Ok(mounted) => mounted,
        Err(why) => {
            tracing::info!("the volume is copied: {why}");
            let copied = with_bar("copying", |progress| {
                copy_volume(&disk.read, &volume, &scratch, progress)
            });
            let _ = match copied {
                Ok(()) => tell(socket, &told, Some(scratch.as_fd())),
                Err(why) => tell(socket, &ChildReport::Failed(why), None),
            };
            return;
        }
    };
    let passed = tell(socket, &told, Some(mount.as_fd()));
    drop(mount);
    // Whoever reads this program's output does not wait for the child.
    let quiet = File::options().read(true).write(true).open("/dev/null");
    let quiet = quiet.and_then(|null| {
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        Ok(dup2_stderr(&null)?)
    });
    if passed.is_ok() && quiet.is_ok() {
        let contents = Contents {
            read: disk.read,
            bytes: volume.bytes,
            written: HashMap::new(),
            scratch,
        };
        // Until the mount is gone.
        let _ = answer_all(&File::from(device), contents);
    }
}

/// Copies a volume to a new file.
fn copy_volume(
    read: &ReadDisk,
    volume: &Volume,
    copy: &File,
    progress: Progress<'_>,
) -> Result<(), String> {
    let write_failed = |error| {
        format!("can't write its copy to TMPDIR, or to /var/tmp if that is not set: {error}")
    };
    let (start, end) = (volume.bytes.start, volume.bytes.end);
    copy.set_len(end - start).map_err(write_failed)?;
    let mut piece = vec![0; MOST_BYTES as usize];
    for at in (start..end).step_by(piece.len()) {
        let piece = &mut piece[..(end - at).min(MOST_BYTES.into()) as usize];
        read(piece, at).map_err(|error| error.to_string())?;
        for (place, page) in (at - start..)
            .step_by(PAGE as usize)
            .zip(piece.chunks(PAGE as usize))
        {
            if page.iter().any(|&byte| byte != 0) {
                copy.write_all_at(page, place).map_err(write_failed)?;
            }
        }
        progress(at - start + piece.len() as u64, end - start);
    }
    Ok(())
}

/// Opens /dev/fuse and mounts its file system.
fn mounted() -> io::Result<(OwnedFd, OwnedFd)> {
    let device = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let mount = mount(device.as_fd())?;
    Ok((device, mount))
}

/// Makes this process one that may mount, in a user namespace of its own.
fn enter_namespace() -> io::Result<()> {
    let (user, group) = (getuid().as_raw(), getgid().as_raw());
    let flags = libc::CLONE_NEWUSER | libc::CLONE_NEWNS;
    // SAFETY: the call changes nothing but the namespaces of this process, which has one thread.
    if unsafe { libc::unshare(flags) } != 0 {
        return Err(io::Error::last_os_error());
    }
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{group} {group} 1"))
}

/// Mounts the file system whose requests come from `device`. It is one regular file.
fn mount(device: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [
        ("source", "walvisor".to_owned()),
        ("fd", device.as_raw_fd().to_string()),
        ("rootmode", "100600".to_owned()),
        ("user_id", getuid().as_raw().to_string()),
        ("group_id", getgid().as_raw().to_string()),
    ] {
        fsconfig_set_string(context.as_fd(), key, value)?;
    }
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// Answers the kernel's requests until the mount is gone.
fn answer_all(mut device: &File, mut contents: Contents) -> io::Result<()> {
    let mut request = vec![0; MOST_BYTES as usize + 4096];
    loop {
        let count = match device.read(&mut request) {
            // The request was interrupted before it was read.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::ENOENT)) => {
                continue;
            }
            count => count?,
        };
        let request = &request[..count];
        if count < HEADER {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let unique = number(request, 8, 8);
        let Some(done) = carry_out(request, &mut contents) else {
            continue;
        };
        let (error, data) = match done {
            Ok(data) => (0, data),
            Err(error) => (-error.raw_os_error().unwrap_or(libc::EIO), Vec::new()),
        };
        let header = ReplyHeader {
            len: (size_of::<ReplyHeader>() + data.len()) as u32,
            error,
            unique,
        };
        // One that was interrupted takes no answer.
        let _ = device.write(&[header.as_bytes(), &data].concat());
    }
}

/// The number of `len` bytes at `at`; 0 if there is none.
fn number(request: &[u8], at: usize, len: usize) -> u64 {
    let mut bytes = [0; 8];
    if let Some(given) = request.get(at..at + len) {
        bytes[..len].copy_from_slice(given);
    }
    u64::from_ne_bytes(bytes)
}

/// Carries out a request, and returns the answer, if it takes one.
fn carry_out(request: &[u8], contents: &mut Contents) -> Option<io::Result<Vec<u8>>> {
    let (at, len) = (
        number(request, HEADER + 8, 8),
        number(request, HEADER + 16, 4),
    );
    // The opcodes of `linux/fuse.h`.
    Some(match number(request, 4, 4) {
        // FORGET, INTERRUPT, BATCH_FORGET.
        2 | 36 | 42 => return None,
        // GETATTR, SETATTR: its times change, and its size does not.
        3 | 4 => Ok(attributes(contents.len()).as_bytes().to_vec()),
        // OPEN: a handle that is 0, and no flags.
        14 => Ok(vec![0; 16]),
        // READ.
        15 => contents.read(at, len.min(MOST_BYTES.into())),
        // WRITE: it tells how much.
        16 => {
            let data = request.get(HEADER + TRANSFER..).unwrap_or_default();
            let data = &data[..data.len().min(len as usize)];
            let written = contents.write(at, data);
            written.map(|()| (data.len() as u64).to_ne_bytes().to_vec())
        }
        // RELEASE, FSYNC, FLUSH, DESTROY: what was written is thrown away at the end.
        18 | 20 | 25 | 38 => Ok(Vec::new()),
        // INIT.
        26 => {
            let mut init = InitReply::new_zeroed();
            init.version = VERSION;
            init.max_readahead = number(request, HEADER + 8, 4) as u32;
            init.flags = FLAGS & number(request, HEADER + 12, 4) as u32;
            init.max_write = MOST_BYTES;
            init.time_granularity = 1;
            init.max_pages = (u64::from(MOST_BYTES) / PAGE) as u16;
            Ok(init.as_bytes().to_vec())
        }
        _ => Err(io::Error::from_raw_os_error(libc::ENOSYS)),
    })
}

fn attributes(size: u64) -> Attributes {
    let mut attributes = Attributes::new_zeroed();
    attributes.valid_seconds = 3600;
    attributes.inode = 1;
    attributes.size = size;
    attributes.blocks = size / 512;
    attributes.mode = 0o100_600;
    attributes.links = 1;
    attributes.uid = getuid().as_raw();
    attributes.gid = getgid().as_raw();
    attributes.block_size = PAGE as u32;
    attributes
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use walvisor_testkit::Random;

    use super::*;

    #[test]
    fn what_is_written_is_read_and_changes_nothing_on_the_disk() {
        let disk: Arc<Vec<u8>> = Arc::new((0..100_352_u32).map(|at| (at / 512) as u8).collect());
        let from = Arc::clone(&disk);
        let read: ReadDisk = Arc::new(move |bytes: &mut [u8], at: u64| {
            assert!(at.is_multiple_of(512) && bytes.len().is_multiple_of(512));
            bytes.copy_from_slice(&from[at as usize..at as usize + bytes.len()]);
            Ok(())
        });
        let bytes = 1024..disk.len() as u64;
        let mut model = disk[1024..].to_vec();
        let mut contents = Contents {
            read,
            bytes,
            written: HashMap::new(),
            scratch: tempfile::tempfile().unwrap(),
        };
        let len = model.len();
        let mut random = Random(1);
        let mut below = |limit: usize| random.below(limit as u64) as usize;
        for round in 0..300 {
            let at = below(len);
            let count = below(len - at).min(9000);
            if round % 3 == 0 {
                let data = vec![round as u8; count];
                contents.write(at as u64, &data).unwrap();
                model[at..at + count].copy_from_slice(&data);
            }
            let at = below(len + 9000);
            let read = contents.read(at as u64, count as u64).unwrap();
            let expected = &model[at.min(len)..(at + count).min(len)];
            assert!(read == expected, "{at} {count}");
        }
        assert!(contents.write(len as u64 - 1, &[1, 2]).is_err());
        assert!(contents.write(u64::MAX, &[1]).is_err());
    }
}
