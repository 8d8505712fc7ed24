//! Records a machine's life through dm-log-writes. Disks on logs of small segments are made,
//! imported, served, killed, served again, closed, resized, and served once more.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use nix::mount::{MsFlags, mount, umount};
use nix::sys::signal::Signal;
use walvisor_storage::{StoreOptions, create_disk, import_disk};
use walvisor_testkit::Random;
use walvisor_testkit::nbd::SimpleClient;

use crate::client::{Client, Habit};
use crate::device_mapper::LogWrites;
use crate::faults::{Conditions, Fault, Program};
use crate::history::{History, Mark};

/// Where the file system that loses power is mounted.
pub const MOUNT: &str = "/mnt/cut";
const SOCKET: &str = "/run/nbd";
const CONTROL: &str = "/run/control";
/// Number of operations of the client that is alone on its disk.
const ALONE: usize = 40;
/// The file that disks are imported from.
const RAW: &str = "/run/raw";

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Bytes of each client's region, unless that is a page. The regions of a disk's clients follow
/// each other from the disk's start.
const REGION: usize = 128 * KIB;
/// Bytes of the file that `b.img` is imported from, and of the disk after it was shrunk.
const IMPORTED: usize = 3 * MIB;
const SHRUNK: usize = 2 * MIB;

/// The disk of pages without a log. Its image is all that there is.
pub const RAW_DISK: &str = "raw.img";
/// The same disk with a log.
const PAGES_DISK: &str = "p.img";
/// MariaDB's pages, and the longest that Linux 7.2 writes atomically to a file of ext4.
const PAGES: [Habit; 8] = {
    let (large, small) = (Habit::Pages(64 * KIB), Habit::Pages(16 * KIB));
    [large, large, large, large, small, small, small, small]
};

/// The parameters of a recording.
pub struct Plan {
    /// `ext4` or `xfs`.
    pub file_system: String,
    pub conditions: Conditions,
    /// Whether there is only a disk of pages; and then, whether it has a log.
    pub pages: Option<bool>,
    pub seed: u64,
    /// Number of operations of each client in each of the three periods in which disks are served.
    pub operations: usize,
    /// The `walvisor` program.
    pub walvisor: PathBuf,
    /// The block devices of the file system and of dm-log-writes' log.
    pub data: PathBuf,
    pub log: PathBuf,
}

/// The content that `b.img` is imported from.
pub fn imported(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; IMPORTED];
    Random(seed).fill(&mut bytes);
    bytes
}

/// The path of a disk's image.
pub fn image(name: &str) -> PathBuf {
    Path::new(MOUNT).join(name)
}

/// The log of a disk: `d.img` has one of its own, all other disks share one.
pub fn log_of(name: &str) -> PathBuf {
    image(if name == "d.img" { "d.log" } else { "log" })
}

/// Makes `a.img` or a disk with imported content, and a log of small segments. `power-cut make`
/// calls this in a process of its own.
pub fn make(name: &str) -> io::Result<()> {
    let (path, log) = (image(name), log_of(name));
    let options = |max_segments| StoreOptions {
        segment_size: 256 << 10,
        max_segments,
        ..StoreOptions::default()
    };
    let made = match name {
        // Allocated and written: a page is overwritten in its place.
        RAW_DISK => {
            std::fs::copy(RAW, &path)?;
            return std::fs::File::open(&path)?.sync_all();
        }
        "a.img" => create_disk(&path, 4 * MIB as u64, &log, &options(8)),
        // The whole image is allocated, so no checkpoint makes the file system commit its metadata
        // of other files. The log has the fewest segments: soon the last is in use, and then no
        // further segment is made.
        _ => import_disk(&path, Path::new(RAW), &log, &options(4), &mut |_, _| {}).map(drop),
    };
    made.map_err(io::Error::other)
}

struct Recorder<'a> {
    plan: &'a Plan,
    marks: LogWrites,
    clients: Vec<Client>,
}

/// Records the machine's life and returns its history. The log of dm-log-writes is complete then.
pub fn record(plan: &Plan) -> io::Result<History> {
    let sectors = std::fs::read_to_string(
        Path::new("/sys/block")
            .join(plan.data.file_name().expect("a device"))
            .join("size"),
    )?;
    let sectors = sectors.trim().parse().map_err(io::Error::other)?;
    let marks = LogWrites::create(&plan.data, sectors, &plan.log)?;
    let device = marks.path();
    let make: &[&str] = match plan.file_system.as_str() {
        "xfs" => &["mkfs.xfs", "--unsupported", "-q", "-f", "-K"],
        _ => &[
            "mkfs.ext4",
            "-q",
            "-F",
            "-Enodiscard,lazy_itable_init=0,lazy_journal_init=0",
            "-Jsize=4",
        ],
    };
    ended(
        Command::new(make[0])
            .args(&make[1..])
            .arg(&device)
            .status()?
            .code(),
        make[0],
    )?;
    std::fs::create_dir_all(MOUNT)?;
    // With a long commit interval the file system commits only when a program asks for it.
    let options = (plan.file_system == "ext4").then_some("commit=300");
    mount(
        Some(&device),
        MOUNT,
        Some(plan.file_system.as_str()),
        MsFlags::empty(),
        options,
    )?;
    // SAFETY: sync takes no arguments and returns nothing.
    unsafe { libc::sync() };
    let mut recorder = Recorder {
        plan,
        marks,
        clients: Vec::new(),
    };
    recorder.live()?;
    umount(MOUNT)?;
    recorder.marks.remove()?;
    let chains = recorder.clients.into_iter().map(|client| client.chain);
    Ok(History {
        file_system: plan.file_system.clone(),
        seed: plan.seed,
        chains: chains.collect(),
    })
}

fn ended(status: Option<i32>, what: &str) -> io::Result<()> {
    match status {
        Some(0) => Ok(()),
        status => Err(io::Error::other(format!("{what}: status {status:?}"))),
    }
}

impl Recorder<'_> {
    fn mark(&self, mark: &Mark) -> io::Result<()> {
        self.marks.mark(&mark.to_text())
    }

    /// Runs a command that gives the disk `name` this size.
    fn size(&self, name: &str, size: usize, mut command: Command) -> io::Result<()> {
        let (disk, size) = (name.to_owned(), size as u64);
        self.mark(&Mark::Wanted {
            disk: disk.clone(),
            size,
        })?;
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let what = format!("{command:?}");
        let mut conditions = self.plan.conditions;
        // Without these syncs the log or the image itself would be lost, which the judge finds
        // whatever checkpoints do.
        if matches!(conditions.fault, Some(Fault::Control | Fault::Base)) {
            conditions.fault = None;
        }
        ended(Some(Program::start(command, conditions)?.wait()?), &what)?;
        self.mark(&Mark::Made { disk, size })
    }

    fn walvisor(&self, arguments: &str) -> Command {
        let mut command = Command::new(&self.plan.walvisor);
        command.args(arguments.split(' ')).current_dir(MOUNT);
        command
    }

    fn add_clients(&mut self, disk: &str, contents: &[u8], habits: &[Habit]) {
        for &habit in habits {
            let beside = self
                .clients
                .iter()
                .filter(|client| client.chain.disk == disk);
            let at = beside.map(|client| client.chain.len).sum();
            let len = match habit {
                Habit::Pages(len) => len,
                _ => REGION,
            };
            let number = self.clients.len();
            let region = contents[at..at + len].to_vec();
            let client = Client::new(number, habit, self.plan.seed, disk, at, region);
            self.clients.push(client);
        }
    }

    /// Makes a disk with the library, which allows small segments.
    fn make(&self, name: &str, size: usize) -> io::Result<()> {
        let mut myself = Command::new(std::env::current_exe()?);
        myself.args(["make", name]);
        self.size(name, size, myself)
    }

    fn live(&mut self) -> io::Result<()> {
        use Habit::{Commits, Forces, Loads, Mixes, Streams, Trusts};
        self.mark(&Mark::Begin)?;
        let contents = imported(self.plan.seed);
        std::fs::write(RAW, &contents)?;
        if let Some(logged) = self.plan.pages {
            let disk = if logged { PAGES_DISK } else { RAW_DISK };
            self.make(disk, IMPORTED)?;
            self.add_clients(disk, &contents, &PAGES);
            return self.serve(&[disk], self.plan.operations, false);
        }
        self.make("d.img", IMPORTED)?;
        // A single client: no sync for other clients makes its writes durable. All its data fits
        // into the first segment. Writes that the disk answers from memory go to the log at a
        // FLUSH, in one durable write.
        self.add_clients("d.img", &contents, &[Commits]);
        self.serve(&["d.img,answer=memory"], ALONE, false)?;
        // The last segment is made and used, with no other operation that makes the file system
        // commit.
        self.add_clients("d.img", &contents, &[Streams, Streams]);
        self.serve(&["d.img"], self.plan.operations, false)?;

        self.make("a.img", 4 * MIB)?;
        self.add_clients("a.img", &vec![0; 4 * MIB], &[Commits, Mixes, Loads]);

        let import = self.walvisor(&format!("disk import b.img {RAW} --log log"));
        self.size("b.img", IMPORTED, import)?;
        self.add_clients("b.img", &contents, &[Forces, Loads, Commits]);

        self.serve(&["a.img", "b.img"], self.plan.operations, true)?;
        self.serve(&["a.img", "b.img"], self.plan.operations, false)?;

        self.size(
            "a.img",
            5 * MIB,
            self.walvisor("disk resize a.img --size 5M --log log"),
        )?;
        let shrink = self.walvisor("disk resize b.img --size 2M --shrink --log log");
        self.size("b.img", SHRUNK, shrink)?;
        self.size(
            "c.img",
            MIB,
            self.walvisor("disk create c.img --size 1M --log log"),
        )?;
        self.add_clients("c.img", &vec![0; MIB], &[Trusts, Trusts]);

        let import = self.walvisor(&format!("disk import e.img {RAW} --log log"));
        self.size("e.img", IMPORTED, import)?;

        let disks = [
            "a.img,answer=memory",
            "b.img,answer=memory",
            "c.img,cache=writethrough",
        ];
        self.serve(&disks, self.plan.operations, false)?;
        self.size(
            "b.img",
            IMPORTED,
            self.walvisor("disk resize b.img --size 3M --log log"),
        )
    }

    /// Serves these disks, each with the options on its line. Each client runs so many
    /// `operations`, with checkpoints meanwhile. The daemon stops when all are done, or is killed
    /// when two thirds are.
    fn serve(&mut self, disks: &[&str], operations: usize, killed: bool) -> io::Result<()> {
        let mut command = self.walvisor("serve nbd --control");
        command
            .arg(CONTROL)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let names = disks.iter().filter_map(|disk| disk.split(',').next());
        let names: Vec<&str> = names.collect();
        for (disk, name) in disks.iter().zip(&names) {
            let place = match *name {
                RAW_DISK => "backend=raw".to_owned(),
                _ => format!("log={}", log_of(name).display()),
            };
            command
                .arg("--disk")
                .arg(format!("path={disk},{place},socket={SOCKET}"));
        }
        let mut clients: Vec<&mut Client> = self
            .clients
            .iter_mut()
            .filter(|client| names.contains(&client.chain.disk.as_str()))
            .collect();
        let daemon = Program::start(command, self.plan.conditions)?;
        let marks = &self.marks;
        let (done, cut) = (AtomicUsize::new(0), AtomicBool::new(false));
        let wanted = operations * clients.len();
        let worked: Vec<io::Result<()>> = thread::scope(|scope| {
            let (daemon, done, cut) = (&daemon, &done, &cut);
            let work = |client: &mut Client| {
                let mut nbd = connect(client, daemon, marks)?;
                for _ in 0..operations {
                    client.step(&mut nbd, marks)?;
                    let number = done.fetch_add(1, Ordering::AcqRel) + 1;
                    if killed && number == wanted * 2 / 3 {
                        cut.store(true, Ordering::Release);
                        daemon.signal(Signal::SIGKILL)?;
                    }
                }
                Ok(())
            };
            let working: Vec<_> = clients
                .iter_mut()
                .map(|client| {
                    scope.spawn(move || match work(client) {
                        // The kill ends each client, also one that is still connecting.
                        Err(_) if cut.load(Ordering::Acquire) => Ok(()),
                        worked => worked,
                    })
                })
                .collect();
            let under_way = || working.iter().any(|client| !client.is_finished());
            while under_way() {
                // A disk that is served alone must fill its log before a checkpoint empties it.
                if done.load(Ordering::Acquire) > 0 && disks.len() > 1 {
                    // The checkpoint fails if the daemon has ended meanwhile.
                    let _ = checkpoint();
                }
                thread::sleep(Duration::from_millis(50));
            }
            let ended = working
                .into_iter()
                .map(|client| client.join().expect("no client panics"));
            ended.collect()
        });
        if !killed {
            daemon.signal(Signal::SIGTERM)?;
        }
        let status = daemon.wait()?;
        worked.into_iter().collect::<io::Result<()>>()?;
        if killed {
            return Ok(());
        }
        ended(Some(status), "walvisor serve nbd")?;
        // A clean close makes all writes durable.
        clients
            .iter_mut()
            .try_for_each(|client| client.acknowledge(marks))
    }
}

/// Connects the client as soon as the daemon serves.
fn connect(client: &mut Client, daemon: &Program, marks: &LogWrites) -> io::Result<SimpleClient> {
    loop {
        match client.connect(Path::new(SOCKET), marks) {
            Err(error)
                if daemon.runs()
                    && matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) =>
            {
                thread::sleep(Duration::from_millis(20));
            }
            connected => return connected,
        }
    }
}

/// Asks the daemon for a checkpoint, which copies the log to the images.
fn checkpoint() -> io::Result<()> {
    use std::io::{Read, Write};
    let mut control = std::os::unix::net::UnixStream::connect(CONTROL)?;
    control.write_all(b"{\"execute\": \"checkpoint\"}\n")?;
    control.read_exact(&mut [0])
}
