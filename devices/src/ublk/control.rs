//! The driver's control device, /dev/ublk-control, and the devices that it makes.
//!
//! Commands go through a ring that is made while the process is still root. It keeps root's
//! credentials, and can do nothing but send commands to the control device, so the process itself
//! may give up root, the right to make rings, and all files.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use io_uring::register::Restriction;
use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use zerocopy::{FromBytes, IntoBytes};

use super::layout::{
    ControlCommand, DeviceInfo, MAX_DEPTH, MAX_IO_BYTES, Parameters, command, flag, state,
};
use super::queue::QueueRing;

const PATH: &str = "/dev/ublk-control";
/// The driver's devices, one directory for each.
const CLASS: &str = "/sys/class/ublk-char";
/// How long a file of a new device may take to appear, and the kernel to notice that a server is
/// gone.
const PATIENCE: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(20);
/// How often a wait for a device looks whether its server is still there.
const LOOK: Timespec = Timespec::new().nsec(100_000_000);

/// Why a device can't be made, started or removed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver isn't there.
    #[error(
        "the kernel has no ublk ({PATH} is missing): as root run 'modprobe ublk_drv', which takes \
         Linux 6.5 or newer (Debian 12: linux-image-6.12-amd64)"
    )]
    Missing,
    /// The driver is older than this program needs.
    #[error("this kernel's ublk can't copy data for its server: use Linux 6.5 or newer")]
    TooOld,
    /// Another process serves the disk.
    #[error("{path} has this disk already, served by process {process}: stop that first")]
    Served {
        /// The block device.
        path: String,
        /// The process.
        process: i32,
    },
    /// A device waits for its server, and this one can't take it over.
    #[error(
        "{path} waits for this disk, but as it was: with at most {sectors} sectors, the same \
         block-size, readonly and cache mode: serve it so again, or remove the device ('walvisor \
         serve ublk --remove {path}')"
    )]
    Differs {
        /// The block device.
        path: String,
        /// Its size.
        sectors: u64,
    },
    /// The server's threads have ended.
    #[error("{0}: its queues are not served; the daemon's messages say why")]
    Unserved(String),
    /// The system refused a step.
    #[error("ublk: cannot {step}: {error}")]
    Refused {
        /// What was tried.
        step: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

/// Says at which step the system refused.
pub(super) trait StepContext<T> {
    fn during(self, step: &'static str) -> Result<T, DeviceError>;
}

impl<T, E: Into<io::Error>> StepContext<T> for Result<T, E> {
    fn during(self, step: &'static str) -> Result<T, DeviceError> {
        self.map_err(|error| DeviceError::Refused {
            step,
            error: error.into(),
        })
    }
}

/// A ring that is restricted to commands (IORING_OP_URING_CMD) to one file; and the credentials of
/// this moment, if the ring is to keep them.
pub(super) fn restricted_ring<S: squeue::EntryMarker>(
    entries: u32,
    file: &File,
    keeps_credentials: bool,
) -> io::Result<(IoUring<S>, u16)> {
    let ring = IoUring::<S, cqueue::Entry>::builder()
        .setup_r_disabled()
        .setup_coop_taskrun()
        // A child would keep the file open, and the driver waits for its end.
        .dontfork()
        .build(entries)?;
    let submitter = ring.submitter();
    submitter.register_files(&[file.as_raw_fd()])?;
    let personality = if keeps_credentials {
        submitter.register_personality()?
    } else {
        0
    };
    submitter.register_restrictions(&mut [
        Restriction::sqe_op(opcode::UringCmd16::CODE),
        // The only registered file.
        Restriction::sqe_flags_required(squeue::Flags::FIXED_FILE.bits()),
    ])?;
    submitter.register_enable_rings()?;
    Ok((ring, personality))
}

/// A device as its server wants it.
#[derive(Clone, Copy, Debug)]
pub struct WantedDevice {
    /// Its queues, at least 1. The kernel makes no more than it has processors.
    pub queues: u16,
    /// Requests in each queue, at most 4096.
    pub depth: u16,
    /// What the next server of the same disk finds it by. The kernel keeps it.
    pub identity: u64,
    /// Whether it waits for the next server when this one is killed: what was answered must
    /// outlive the process then.
    pub waits: bool,
}

/// A device that is in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// Its number.
    pub number: u32,
    /// See [`WantedDevice::identity`].
    pub identity: u64,
    /// Who serves it.
    pub state: DeviceState,
}

impl FoundDevice {
    /// The path of the disk.
    pub fn path(&self) -> String {
        block_path(self.number)
    }
}

/// Who serves a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// The process with this id.
    Served(i32),
    /// Nobody: its requests wait for the next server.
    Waiting,
    /// Nobody: it was not started, or its server is gone for good.
    Dead,
}

/// The driver's control device.
pub struct ControlDevice {
    ring: Mutex<ControlRing>,
    features: u64,
}

struct ControlRing {
    ring: IoUring<squeue::Entry128>,
    /// Where commands have their values, as long as there is the ring.
    value: Box<[u64; 8]>,
    /// Root's credentials.
    personality: u16,
    sent: u64,
}

impl ControlDevice {
    /// Opens the control device, as root.
    ///
    /// # Errors
    /// If the kernel has no ublk or an old one, or the system refuses.
    pub fn open() -> Result<Arc<Self>, DeviceError> {
        let opened = File::options().read(true).write(true).open(PATH);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DeviceError::Missing);
            }
            opened => opened.during("open /dev/ublk-control (as root)")?,
        };
        let (ring, personality) =
            restricted_ring(4, &file, true).during("make its control ring")?;
        let mut control = Self {
            ring: Mutex::new(ControlRing {
                ring,
                value: Box::default(),
                personality,
                sent: 0,
            }),
            features: 0,
        };
        let mut features = 0_u64;
        let asked = control.exchange(command::GET_FEATURES, u32::MAX, &mut features);
        if asked.is_err() || features & flag::USER_COPY == 0 {
            return Err(DeviceError::TooOld);
        }
        control.features = features;
        Ok(Arc::new(control))
    }

    /// Carries out a command on a device.
    fn run(&self, operation: u32, device: u32, data: u64) -> io::Result<()> {
        let command = ControlCommand::of(device, data);
        self.send(operation, command, &mut [], || true)
    }

    /// Passes a value to a command, and takes the one that it leaves there.
    fn exchange<T: FromBytes + IntoBytes>(
        &self,
        operation: u32,
        device: u32,
        value: &mut T,
    ) -> io::Result<()> {
        let command = ControlCommand::of(device, 0);
        self.send(operation, command, value.as_mut_bytes(), || true)
    }

    /// Sends a command with a value, and waits for its end while `wait` allows it.
    fn send(
        &self,
        operation: u32,
        mut command: ControlCommand,
        value: &mut [u8],
        wait: impl Fn() -> bool,
    ) -> io::Result<()> {
        let mut guard = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        guard.sent += 1;
        let ControlRing {
            ring,
            value: place,
            personality,
            sent,
        } = &mut *guard;
        if !value.is_empty() {
            place.as_mut_bytes()[..value.len()].copy_from_slice(value);
            command.len = value.len() as u16;
            command.address = place.as_mut_ptr().expose_provenance() as u64;
        }
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd80::new(Fixed(0), operation).cmd(bytes);
        let entry = entry.build().personality(*personality).user_data(*sent);
        // SAFETY: the entry names no memory but the ring's place for values.
        let pushed = unsafe { ring.submission().push(&entry) };
        pushed.map_err(io::Error::other)?;
        loop {
            let args = SubmitArgs::new().timespec(&LOOK);
            match ring.submitter().submit_with_args(1, &args) {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
            // A command that nobody waited for may end too.
            let mut ended = ring.completion();
            if let Some(end) = ended.find(|end| end.user_data() == *sent) {
                return match end.result() {
                    0.. => {
                        value.copy_from_slice(&place.as_bytes()[..value.len()]);
                        Ok(())
                    }
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
            drop(ended);
            if !wait() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// The devices of all servers.
    pub fn devices(&self) -> Vec<FoundDevice> {
        let found = self.infos().into_iter().map(|info| FoundDevice {
            number: info.device,
            identity: info.identity,
            state: match info.state {
                state::DEAD => DeviceState::Dead,
                state::LIVE => DeviceState::Served(info.process),
                _ => DeviceState::Waiting,
            },
        });
        found.collect()
    }

    fn infos(&self) -> Vec<DeviceInfo> {
        let entries = fs::read_dir(CLASS).into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_prefix("ublkc")?.parse().ok()
        });
        let info = |device| {
            let mut info = DeviceInfo::default();
            let found = self.exchange(command::GET_INFO, device, &mut info);
            found.is_ok().then_some(info)
        };
        numbers.filter_map(info).collect()
    }

    /// Makes a device, or takes over the one that waits for this disk: its requests wait until the
    /// device is started.
    ///
    /// # Errors
    /// If another process serves it, or the system refuses.
    pub fn raise(self: &Arc<Self>, wanted: &WantedDevice) -> Result<KernelDevice, DeviceError> {
        let mut of_disk = self.infos();
        of_disk.retain(|info| info.identity == wanted.identity);
        for info in of_disk {
            if info.state == state::DEAD {
                let deleted = self.run(command::DELETE, info.device, 0);
                deleted.during("remove a device that was left")?;
            } else if wanted.waits {
                self.start_recovery(&info)?;
                return KernelDevice::open(self, info, Stage::TakenOver);
            }
        }
        let reissue = flag::USER_RECOVERY | flag::USER_RECOVERY_REISSUE;
        let mut info = DeviceInfo {
            queues: wanted.queues,
            depth: wanted.depth.min(MAX_DEPTH as u16),
            max_io_bytes: MAX_IO_BYTES,
            device: u32::MAX,
            flags: flag::USER_COPY | if wanted.waits { reissue } else { 0 },
            identity: wanted.identity,
            ..DeviceInfo::default()
        };
        let added = self.exchange(command::ADD, u32::MAX, &mut info);
        added.during("add a device")?;
        KernelDevice::open(self, info, Stage::Added)
    }

    /// Begins to take a device over from a server that was killed.
    fn start_recovery(&self, info: &DeviceInfo) -> Result<(), DeviceError> {
        let until = Instant::now() + PATIENCE;
        loop {
            let begun = self.run(command::START_RECOVERY, info.device, 0);
            match begun.as_ref().map_err(io::Error::raw_os_error) {
                // The kernel may not have noticed yet that its server is gone.
                Err(Some(libc::EBUSY)) if Instant::now() < until => thread::sleep(RETRY),
                // A process has begun before this one, and ended before it served a queue.
                Err(Some(libc::EINVAL)) if info.state == state::QUIESCED => return Ok(()),
                Err(Some(libc::EBUSY | libc::EINVAL)) => {
                    let (path, process) = (block_path(info.device), info.process);
                    return Err(DeviceError::Served { path, process });
                }
                _ => return begun.during("take over a device"),
            }
        }
    }

    /// Whether this kernel can change a device's size.
    pub(super) fn can_resize(&self) -> bool {
        self.features & flag::UPDATE_SIZE != 0
    }

    /// Tells the kernel a device's size; `false`: this kernel can't change it.
    pub(super) fn resize(&self, number: u32, sectors: u64) -> io::Result<bool> {
        if !self.can_resize() {
            return Ok(false);
        }
        let resized = self.run(command::UPDATE_SIZE, number, sectors);
        resized.map(|()| true)
    }

    /// Removes a device that no process serves. What waits for it fails.
    ///
    /// # Errors
    /// If a process serves it, or the system refuses.
    pub fn remove(&self, number: u32) -> Result<(), DeviceError> {
        let mut info = DeviceInfo::default();
        let found = self.exchange(command::GET_INFO, number, &mut info);
        found.during("find the device")?;
        if info.state != state::DEAD {
            // The kernel refuses it for a device that is served.
            self.start_recovery(&info)?;
            let stopped = self.run(command::STOP, number, 0);
            stopped.during("stop the device")?;
        }
        let deleted = self.run(command::DELETE, number, 0);
        deleted.during("remove the device")
    }
}

/// The path of a device as a disk.
fn block_path(number: u32) -> String {
    format!("/dev/ublkb{number}")
}

/// How far a device has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Added,
    /// It was there before this process, and waits.
    TakenOver,
    Started,
}

/// A device of the driver, which this process serves or is about to. Dropping it removes it from
/// the kernel, unless programs wait for it already: then they wait for the next server.
pub struct KernelDevice {
    control: Arc<ControlDevice>,
    number: u32,
    stage: Stage,
    /// Taken by the device's server, which must end before this is dropped.
    queues: Vec<QueueRing>,
}

impl KernelDevice {
    fn open(
        control: &Arc<ControlDevice>,
        info: DeviceInfo,
        stage: Stage,
    ) -> Result<Self, DeviceError> {
        let mut device = Self {
            control: Arc::clone(control),
            number: info.device,
            stage,
            queues: Vec::new(),
        };
        let path = PathBuf::from(format!("/dev/ublkc{}", info.device));
        let until = Instant::now() + PATIENCE;
        let file = loop {
            match File::options().read(true).write(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < until => {
                    thread::sleep(RETRY);
                }
                opened => break Arc::new(opened.during("open the device")?),
            }
        };
        for queue in 0..info.queues {
            let made = QueueRing::new(&file, queue, info.depth);
            device.queues.push(made.during("make the ring of a queue")?);
        }
        Ok(device)
    }

    /// The path of the disk.
    pub fn path(&self) -> String {
        block_path(self.number)
    }

    pub(super) fn take_queues(&mut self) -> Vec<QueueRing> {
        std::mem::take(&mut self.queues)
    }

    /// Tells a new device what it can do. Returns what a device that waited was told.
    pub(super) fn configure(&self, wanted: &Parameters) -> Result<Parameters, DeviceError> {
        let mut parameters = *wanted;
        if self.stage == Stage::Added {
            let set = self
                .control
                .exchange(command::SET_PARAMETERS, self.number, &mut parameters);
            set.during("set the device's properties")?;
            return Ok(parameters);
        }
        let got = self
            .control
            .exchange(command::GET_PARAMETERS, self.number, &mut parameters);
        got.during("read the device's properties")?;
        if parameters.fits(wanted) {
            return Ok(parameters);
        }
        Err(DeviceError::Differs {
            path: self.path(),
            sectors: parameters.sectors,
        })
    }

    /// Lets the kernel use the device, whose queues are served by now. `served`: whether they still
    /// are.
    pub(super) fn start(&mut self, served: impl Fn() -> bool) -> Result<(), DeviceError> {
        let operation = match self.stage {
            Stage::Added => command::START,
            Stage::TakenOver => command::END_RECOVERY,
            Stage::Started => return Ok(()),
        };
        let process = u64::from(std::process::id());
        let started = ControlCommand::of(self.number, process);
        match self.control.send(operation, started, &mut [], served) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Err(DeviceError::Unserved(self.path()))
            }
            started => {
                started.during("start the device")?;
                self.stage = Stage::Started;
                Ok(())
            }
        }
    }

    /// Takes the disk away from its users. Its requests must still be answered meanwhile.
    pub(super) fn stop(&mut self) -> Result<(), DeviceError> {
        if self.stage == Stage::Started {
            let stopped = self.control.run(command::STOP, self.number, 0);
            stopped.during("stop the device")?;
            self.stage = Stage::Added;
        }
        Ok(())
    }

    /// Its number, and what commands it.
    pub(super) fn handle(&self) -> (u32, Arc<ControlDevice>) {
        (self.number, Arc::clone(&self.control))
    }
}

impl Drop for KernelDevice {
    fn drop(&mut self) {
        // The driver waits for its files to be closed.
        self.queues.clear();
        let until = Instant::now() + PATIENCE;
        let delete = ControlCommand::of(self.number, 0);
        let wait = || Instant::now() < until;
        if self.stage == Stage::Added
            && let Err(error) = self.control.send(command::DELETE, delete, &mut [], wait)
        {
            tracing::error!("{} stays in the kernel: {error}", self.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of one entry of a ring.
    fn result(ring: &mut IoUring, entry: squeue::Entry) -> i32 {
        // SAFETY: the entries below name no memory that does not live long enough.
        unsafe { ring.submission().push(&entry).unwrap() };
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn a_ring_sends_commands_to_its_file_and_does_nothing_else() {
        let file = tempfile::tempfile().unwrap();
        let mut ring = match restricted_ring(2, &file, false) {
            Ok((ring, _)) => ring,
            Err(error) => return println!("skipped: no io_uring here: {error}"),
        };
        let other = io_uring::types::Fd(file.as_raw_fd());
        let bytes = *b"bytes";
        let write = opcode::Write::new(Fixed(0), bytes.as_ptr(), bytes.len() as u32);
        let forbidden = [
            opcode::Nop::new().build(),
            write.build(),
            opcode::OpenAt::new(io_uring::types::Fd(libc::AT_FDCWD), c"/etc/passwd".as_ptr())
                .build(),
            opcode::Close::new(other).build(),
            // A command to a file that is not registered.
            opcode::UringCmd16::new(other, command::FETCH).build(),
        ];
        for entry in forbidden {
            assert_eq!(result(&mut ring, entry), -libc::EACCES);
        }
        // A regular file takes no commands.
        let allowed = opcode::UringCmd16::new(Fixed(0), command::FETCH).build();
        assert_eq!(result(&mut ring, allowed), -libc::EOPNOTSUPP);
        let submitter = ring.submitter();
        assert!(submitter.register_files_update(0, &[-1]).is_err());
        assert!(submitter.register_personality().is_err());
    }
}
