//! Writes to a block device from several threads until it is told to stop, and knows what the
//! device must hold: no request may fail, each answered write must be read back at any time, and
//! after the last FLUSH the device must equal the oracle's own copy.
//!
//! ```text
//!   block-oracle DEVICE WRITERS DIRECTORY
//! ```
//! DIRECTORY/flushes is the number of FLUSHes answered so far. The program ends once there is a
//! file DIRECTORY/stop, and leaves its copy of the device's beginning in DIRECTORY/expected.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::io::ReadWriteFlags;
use walvisor_testkit::Random;

const BLOCK: usize = 4096;
/// Blocks of each writer.
const BLOCKS: usize = 256;
/// The most blocks of a request.
const LONGEST: usize = 16;
/// linux/fs.h.
const BLKDISCARD: libc::c_ulong = 0x1277;
const BLKZEROOUT: libc::c_ulong = 0x127f;

/// Memory that is aligned as O_DIRECT wants it.
#[repr(align(4096))]
struct Aligned([u8; BLOCK * LONGEST]);

/// The contents of a block after the change with this number; 0: zeroes.
fn contents(block: usize, change: u64, into: &mut [u8]) {
    into.fill(0);
    if change > 0 {
        Random((block as u64) << 40 | change).fill(into);
    }
}

/// The blocks of one thread.
struct Writer<'a> {
    device: &'a File,
    /// Its first block on the device.
    first: usize,
    /// By block, the change that it must hold.
    changes: Vec<u64>,
    changed: u64,
    random: Random,
    memory: Box<Aligned>,
}

impl Writer<'_> {
    fn offset(&self, block: usize) -> u64 {
        ((self.first + block) * BLOCK) as u64
    }

    /// A range of its blocks.
    fn range(&mut self) -> (usize, usize) {
        let len = 1 + self.random.below(LONGEST as u64) as usize;
        (self.random.below((BLOCKS - len) as u64) as usize, len)
    }

    fn change(&mut self) -> io::Result<()> {
        let (block, len) = self.range();
        self.changed += 1;
        let kind = self.random.below(10);
        let change = if kind < 2 { 0 } else { self.changed };
        if kind < 2 {
            let range = [self.offset(block), (len * BLOCK) as u64];
            let request = if kind == 0 { BLKDISCARD } else { BLKZEROOUT };
            // SAFETY: the kernel reads the two numbers of the range.
            let done = unsafe { libc::ioctl(self.device.as_raw_fd(), request, range.as_ptr()) };
            if done != 0 {
                return Err(io::Error::last_os_error());
            }
        } else {
            let offset = self.offset(block);
            let data = &mut self.memory.0[..len * BLOCK];
            for (place, data) in data.chunks_mut(BLOCK).enumerate() {
                contents(self.first + block + place, change, data);
            }
            // Some with FUA.
            let flags = if kind == 2 {
                ReadWriteFlags::DSYNC
            } else {
                ReadWriteFlags::empty()
            };
            let wrote = rustix::io::pwritev2(self.device, &[IoSlice::new(data)], offset, flags)?;
            if wrote != data.len() {
                return Err(io::Error::other(format!("wrote {wrote} bytes only")));
            }
        }
        self.changes[block..block + len].fill(change);
        Ok(())
    }

    fn check(&mut self, block: usize, len: usize) -> io::Result<()> {
        let offset = self.offset(block);
        let data = &mut self.memory.0[..len * BLOCK];
        self.device.read_exact_at(data, offset)?;
        let mut wanted = [0; BLOCK];
        for (place, data) in data.chunks(BLOCK).enumerate() {
            let (block, change) = (self.first + block + place, self.changes[block + place]);
            contents(block, change, &mut wanted);
            if data != wanted {
                return Err(io::Error::other(format!(
                    "violation: block {block} does not hold change {change}"
                )));
            }
        }
        Ok(())
    }

    /// Writes, flushes and checks until `stop` is there.
    fn run(&mut self, flushes: &AtomicU64, stop: &Path) -> io::Result<()> {
        while !stop.exists() {
            for _ in 0..1 + self.random.below(4) {
                self.change()?;
            }
            self.device.sync_data()?;
            flushes.fetch_add(1, Ordering::Relaxed);
            let (block, len) = self.range();
            self.check(block, len)?;
        }
        for block in (0..BLOCKS).step_by(LONGEST) {
            self.check(block, LONGEST)?;
        }
        Ok(())
    }
}

fn run(arguments: &[String]) -> io::Result<()> {
    let [device, writers, directory] = arguments else {
        return Err(io::Error::other("usage: DEVICE WRITERS DIRECTORY"));
    };
    let writers: usize = writers.parse().map_err(io::Error::other)?;
    let directory = Path::new(directory);
    let stop = directory.join("stop");
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).custom_flags(libc::O_DIRECT);
    let device = options.open(device)?;
    let flushes = AtomicU64::new(0);
    let (device, flushes, stop) = (&device, &flushes, &stop);
    let ended: Vec<io::Result<Vec<u64>>> = thread::scope(|scope| {
        let writers = (0..writers).map(|number| {
            scope.spawn(move || {
                let mut writer = Writer {
                    device,
                    first: number * BLOCKS,
                    changes: vec![0; BLOCKS],
                    changed: 0,
                    random: Random(number as u64),
                    memory: Box::new(Aligned([0; BLOCK * LONGEST])),
                };
                let ended = writer.run(flushes, stop);
                ended.map(|()| writer.changes)
            })
        });
        let writers: Vec<_> = writers.collect();
        while !writers.iter().all(|writer| writer.is_finished()) {
            thread::sleep(Duration::from_millis(50));
            let count = flushes.load(Ordering::Relaxed).to_string();
            let new = directory.join("flushes.new");
            fs::write(&new, count).expect("there is space");
            fs::rename(&new, directory.join("flushes")).expect("it is there");
        }
        writers
            .into_iter()
            .map(|writer| writer.join().unwrap())
            .collect()
    });
    let mut expected = Vec::new();
    for (number, changes) in ended.into_iter().enumerate() {
        for (block, change) in changes?.into_iter().enumerate() {
            let at = expected.len();
            expected.resize(at + BLOCK, 0);
            contents(number * BLOCKS + block, change, &mut expected[at..]);
        }
    }
    fs::write(directory.join("expected"), expected)?;
    println!("flushes {}", flushes.load(Ordering::Relaxed));
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}
