//! A medium: a file in memory that the kernel reads and writes through FUSE. It fails when a test
//! says so, counts the requests to make data durable, and records all that reaches it. It speaks
//! the kernel's protocol itself (`linux/fuse.h`): the mount point is the file, so there are no
//! names to look up.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::mount::MsFlags;
use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, memfd_create, seek};
use rustix::io::Errno;
use walvisor_testkit::{own_mounts, try_unmount};

/// What each sector of a disk's data begins with. Only requests that move such sectors fail: a file
/// system whose own blocks fail stops by itself.
pub const MARK: &[u8; 8] = b"\xdaTaMaRk\xa7";

/// Most bytes that the kernel writes at once.
const LARGEST_WRITE: u32 = 128 << 10;
/// The time that a medium tries before it reports an error.
const FAILURE: Duration = Duration::from_millis(2);

// Requests.
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

// Flags of the opened file, and of the connection.
const DIRECT_IO: u32 = 1;
const ASYNC_READ: u32 = 1;
const BIG_WRITES: u32 = 1 << 5;
const ASYNC_DIO: u32 = 1 << 15;

/// The file, mounted. Dropping it unmounts it.
#[derive(Debug)]
pub struct MediumFile {
    path: PathBuf,
    medium: Arc<Medium>,
    threads: Vec<JoinHandle<()>>,
}

/// What reaches a medium.
#[derive(Clone, Debug)]
pub enum MediumEvent {
    /// These bytes are written at this offset.
    Write(u64, Vec<u8>),
    /// The kernel asks to make durable what was written before.
    Sync,
}

/// All that reached a medium for a while.
#[derive(Debug)]
pub struct Recording {
    /// The medium's content before.
    base: File,
    /// What reached it then, in order.
    pub events: Vec<MediumEvent>,
}

impl Recording {
    /// Writes to the file `path` what a power cut before the event `at` leaves in the worst case:
    /// only what was synced.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn lose_unsynced(&self, at: usize, path: &Path) -> io::Result<()> {
        let synced = self.events[..at]
            .iter()
            .rposition(|event| matches!(event, MediumEvent::Sync));
        self.write_image(synced.unwrap_or(0), path).map(drop)
    }

    /// Writes to the file `path` what a power cut during the write `at` leaves, if it comes after
    /// the write's first `bytes` bytes: those, and all before.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn tear(&self, at: usize, bytes: usize, path: &Path) -> io::Result<()> {
        let image = self.write_image(at, path)?;
        let MediumEvent::Write(offset, data) = &self.events[at] else {
            panic!("event {at} is no write");
        };
        image.write_all_at(&data[..bytes], *offset)
    }

    /// The base, and all writes before the event `at`.
    fn write_image(&self, at: usize, path: &Path) -> io::Result<File> {
        let image = File::create_new(path)?;
        copy_sparse(&self.base, &image)?;
        for event in &self.events[..at] {
            if let MediumEvent::Write(offset, data) = event {
                image.write_all_at(data, *offset)?;
            }
        }
        Ok(image)
    }
}

/// Copies a file's data, and leaves its holes.
fn copy_sparse(from: &File, to: &File) -> io::Result<()> {
    let size = from.metadata()?.len();
    to.set_len(size)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < size {
        at = match seek(from, SeekFrom::Data(at)) {
            Ok(data) => data,
            // No data follows.
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        let end = seek(from, SeekFrom::Hole(at))?;
        while at < end {
            let len = buffer.len().min((end - at) as usize);
            from.read_exact_at(&mut buffer[..len], at)?;
            to.write_all_at(&buffer[..len], at)?;
            at += len as u64;
        }
    }
    Ok(())
}

#[derive(Debug)]
struct Medium {
    memory: File,
    size: u64,
    faults: Mutex<Faults>,
    history: Mutex<History>,
    pace: Mutex<Pace>,
}

/// How long writes take.
#[derive(Debug, Default)]
struct Pace {
    write_time: Duration,
    writing: usize,
}

/// What has reached the medium.
#[derive(Debug, Default)]
struct History {
    syncs: u64,
    /// How long each takes.
    sync_time: Duration,
    recording: Option<Recording>,
}

#[derive(Debug, Default)]
struct Faults {
    /// Writes of data that succeed before the next ones fail, and how many of those fail.
    sound_writes: u64,
    failing_writes: u64,
    reads_fail: bool,
    failed_writes: u64,
    failed_reads: u64,
}

impl MediumFile {
    /// Mounts a file of `size` bytes at the file `path`, for [this thread](own_mounts).
    ///
    /// # Errors
    /// The system refuses it; the text says what.
    pub fn mount(path: &Path, size: u64) -> Result<Self, String> {
        own_mounts().map_err(|error| error.to_string())?;
        let memory = memfd_create("medium", MemfdFlags::CLOEXEC).map(File::from);
        let memory = memory.map_err(|error| error.to_string())?;
        let made = memory.set_len(size).and_then(|()| File::create(path));
        made.map_err(|error| format!("{}: {error}", path.display()))?;
        let kernel = File::options().read(true).write(true).open("/dev/fuse");
        let kernel = kernel.map_err(|error| format!("/dev/fuse: {error}"))?;
        let options = format!(
            "fd={},rootmode=100600,user_id=0,group_id=0",
            kernel.as_raw_fd()
        );
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        nix::mount::mount(Some("medium"), path, Some("fuse"), flags, Some(&*options))
            .map_err(|error| format!("mount {}: {error}", path.display()))?;
        let medium = Arc::new(Medium {
            memory,
            size,
            faults: Mutex::default(),
            history: Mutex::default(),
            pace: Mutex::default(),
        });
        let kernel = Arc::new(kernel);
        let threads = (0..4).map(|_| {
            let (medium, kernel) = (medium.clone(), kernel.clone());
            std::thread::spawn(move || medium.serve(&kernel))
        });
        Ok(Self {
            path: path.to_owned(),
            threads: threads.collect(),
            medium,
        })
    }

    /// How many requests to make data durable there were so far.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.medium.history.lock().unwrap().syncs
    }

    /// Lets each request to make data durable take so long from now on.
    pub fn set_sync_time(&self, time: Duration) {
        self.medium.history.lock().unwrap().sync_time = time;
    }

    /// Lets each write take so long from now on: its bytes reach the medium at the end.
    pub fn set_write_time(&self, time: Duration) {
        self.medium.pace.lock().unwrap().write_time = time;
    }

    /// How many writes are being carried out.
    #[must_use]
    pub fn writing(&self) -> usize {
        self.medium.pace.lock().unwrap().writing
    }

    /// Begins to record.
    ///
    /// # Errors
    /// The medium's content can't be copied.
    pub fn record(&self) -> io::Result<()> {
        let mut history = self.medium.history.lock().unwrap();
        let base = File::from(memfd_create("base", MemfdFlags::CLOEXEC)?);
        copy_sparse(&self.medium.memory, &base)?;
        let events = Vec::new();
        history.recording = Some(Recording { base, events });
        Ok(())
    }

    /// How many events were recorded so far.
    #[must_use]
    pub fn recorded(&self) -> usize {
        let history = self.medium.history.lock().unwrap();
        let recording = history.recording.as_ref();
        recording.map_or(0, |recording| recording.events.len())
    }

    /// Ends a recording.
    #[must_use]
    pub fn end_recording(&self) -> Recording {
        let mut history = self.medium.history.lock().unwrap();
        history.recording.take().expect("a recording")
    }

    /// Lets `failing` writes of data fail, after `sound` ones have succeeded.
    pub fn fail_writes(&self, sound: u64, failing: u64) {
        let mut faults = self.medium.faults.lock().unwrap();
        (faults.sound_writes, faults.failing_writes) = (sound, failing);
    }

    /// Lets all reads of data fail.
    pub fn fail_reads(&self) {
        self.medium.faults.lock().unwrap().reads_fail = true;
    }

    /// Lets nothing fail. Returns how many writes and reads have failed since the last call.
    pub fn heal(&self) -> (u64, u64) {
        let faults = std::mem::take(&mut *self.medium.faults.lock().unwrap());
        (faults.failed_writes, faults.failed_reads)
    }
}

impl Drop for MediumFile {
    fn drop(&mut self) {
        // While it is mounted, the threads wait for requests.
        match try_unmount(&self.path) {
            Ok(()) => self.threads.drain(..).for_each(|thread| {
                let _ = thread.join();
            }),
            Err(why) => println!("the medium stays mounted: {why}"),
        }
    }
}

impl Medium {
    /// Answers the kernel until the file is unmounted.
    fn serve(&self, kernel: &File) {
        // The kernel wants room for its headers too.
        let mut request = vec![0; LARGEST_WRITE as usize + 4096];
        loop {
            let len = match (&*kernel).read(&mut request) {
                Ok(len) => len,
                Err(error) => match Errno::from_io_error(&error) {
                    // A request was taken back before it was read.
                    Some(Errno::NOENT | Errno::INTR | Errno::AGAIN) => continue,
                    _ => return,
                },
            };
            let request = &request[..len];
            let opcode = u32_at(request, 4);
            // These get no answer.
            if [FORGET, BATCH_FORGET, INTERRUPT].contains(&opcode) {
                continue;
            }
            let answer = self.answer(opcode, &request[40..]);
            let (error, body) = match answer {
                Ok(body) => (0, body),
                Err(errno) => (-errno.raw_os_error(), Vec::new()),
            };
            let mut reply = (16 + body.len() as u32).to_ne_bytes().to_vec();
            reply.extend(error.to_ne_bytes());
            reply.extend(&request[8..16]);
            reply.extend(body);
            // The kernel refuses the answer to a request that it has taken back.
            let _ = (&*kernel).write(&reply);
        }
    }

    /// The answer's body to a request with these arguments.
    fn answer(&self, opcode: u32, arguments: &[u8]) -> Result<Vec<u8>, Errno> {
        match opcode {
            INIT => Ok(self.greet(arguments)),
            GETATTR => Ok(self.attributes()),
            // The kernel keeps no pages of it, so each failure is reported to who asked.
            OPEN => Ok(words(&[0, 0, DIRECT_IO, 0])),
            RELEASE => Ok(Vec::new()),
            FSYNC => {
                let mut history = self.history.lock().unwrap();
                history.syncs += 1;
                if let Some(recording) = &mut history.recording {
                    recording.events.push(MediumEvent::Sync);
                }
                let time = history.sync_time;
                drop(history);
                std::thread::sleep(time);
                Ok(Vec::new())
            }
            READ => {
                let mut bytes = vec![0; u32_at(arguments, 16) as usize];
                let read = self.memory.read_at(&mut bytes, u64_at(arguments, 8));
                bytes.truncate(read.map_err(|_| Errno::IO)?);
                if self.read_fails(&bytes) {
                    Err(Errno::IO)
                } else {
                    Ok(bytes)
                }
            }
            WRITE => {
                let (offset, bytes) = (u64_at(arguments, 8), &arguments[40..]);
                let time = self.begin_write();
                std::thread::sleep(time);
                let written = self.carry_out(bytes, offset);
                self.pace.lock().unwrap().writing -= 1;
                written
            }
            _ => Err(Errno::NOSYS),
        }
    }

    /// Counts a write, and returns the time that it takes.
    fn begin_write(&self) -> Duration {
        let mut pace = self.pace.lock().unwrap();
        pace.writing += 1;
        pace.write_time
    }

    fn carry_out(&self, bytes: &[u8], offset: u64) -> Result<Vec<u8>, Errno> {
        if self.write_fails(bytes) {
            std::thread::sleep(FAILURE);
            return Err(Errno::IO);
        }
        // A recording has the writes in the order in which they are carried out.
        let mut history = self.history.lock().unwrap();
        self.write(bytes, offset).map_err(|_| Errno::IO)?;
        if let Some(recording) = &mut history.recording {
            let event = MediumEvent::Write(offset, bytes.to_vec());
            recording.events.push(event);
        }
        Ok(words(&[bytes.len() as u32, 0]))
    }

    /// `fuse_init_out`.
    fn greet(&self, arguments: &[u8]) -> Vec<u8> {
        let (version, readahead) = ([7, 31], u32_at(arguments, 8));
        let (flags, background) = (ASYNC_READ | BIG_WRITES | ASYNC_DIO, 64 << 16 | 64);
        let [major, minor] = version;
        let mut body = vec![major, minor, readahead, flags, background, LARGEST_WRITE, 1];
        body.resize(16, 0);
        words(&body)
    }

    /// `fuse_attr_out`, valid for an hour.
    fn attributes(&self) -> Vec<u8> {
        let (size, blocks) = (self.size, self.size / 512);
        let halves = |long: u64| [long as u32, (long >> 32) as u32];
        let mut body = vec![3600, 0, 0, 0];
        for long in [1, size, blocks, 0, 0, 0] {
            body.extend(halves(long));
        }
        body.extend([0, 0, 0, 0o100600, 1, 0, 0, 0, 4096, 0]);
        words(&body)
    }

    /// Writes to the memory. Zeroes take none.
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if bytes.iter().any(|&byte| byte != 0) {
            return self.memory.write_all_at(bytes, offset);
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.memory, hole, offset, bytes.len() as u64)?)
    }

    fn write_fails(&self, bytes: &[u8]) -> bool {
        let mut faults = self.faults.lock().unwrap();
        if faults.failing_writes == 0 || !has_data(bytes) {
            return false;
        }
        if faults.sound_writes > 0 {
            faults.sound_writes -= 1;
            return false;
        }
        faults.failing_writes -= 1;
        faults.failed_writes += 1;
        true
    }

    fn read_fails(&self, bytes: &[u8]) -> bool {
        let mut faults = self.faults.lock().unwrap();
        let fails = faults.reads_fail && has_data(bytes);
        faults.failed_reads += u64::from(fails);
        fails
    }
}

fn has_data(bytes: &[u8]) -> bool {
    bytes.chunks(512).any(|sector| sector.starts_with(MARK))
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}
