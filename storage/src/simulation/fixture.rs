//! A log and its disks on a simulated medium: made, opened, read.

use std::path::Path;

use zerocopy::FromZeros;
use zerocopy::little_endian::{U32, U64};

use super::medium::{Simulated, World};
use super::oracle::{Contents, value_of};
use crate::catalog::read_control;
use crate::disk::{Disk, DiskState};
use crate::format::{CONTROL_MAGIC, CONTROL_SLOT, Control, ControlHeader, DiskEntry, VERSION};
use crate::keeper::{ControlFile, Keeper};
use crate::store::assemble;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, RwLock};
use crate::{Buffer, CommitWait, Failure, Operation, Port, StoreOptions};

/// How large everything is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub disks: usize,
    /// Sectors of each disk.
    pub sectors: u64,
    /// Bytes.
    pub segment_size: u64,
    pub max_segments: u32,
}

/// What a log is made of, and what the medium holds of it.
pub(super) struct Fixture {
    pub medium: Simulated,
    pub shape: Shape,
    /// See [`StoreOptions::write_per_waiter`].
    pub write_per_waiter: bool,
}

/// An open store without threads.
pub(super) struct Running {
    pub disks: Vec<Disk>,
    pub keeper: Keeper,
}

impl Fixture {
    /// Makes a new log with empty disks.
    pub(super) fn new(mut world: World, shape: Shape) -> Self {
        let Shape { disks, sectors, .. } = shape;
        world.create("control", 2 * CONTROL_SLOT);
        for disk in 0..disks {
            world.create(&format!("base-{disk}"), sectors as usize * 512);
        }
        let medium = Simulated {
            world: Arc::new(Mutex::new(world)),
        };
        let mut header = ControlHeader::new_zeroed();
        header.magic = CONTROL_MAGIC;
        header.version = U32::new(VERSION);
        header.log = [7; 16];
        header.segment_size = U64::new(shape.segment_size);
        header.max_segments = U32::new(shape.max_segments);
        header.first_sequence = U64::new(1);
        header.next_lsn = U64::new(1);
        header.next_cid = U64::new(1);
        let entries = (0..disks).map(|disk| {
            let mut entry = DiskEntry::new_zeroed();
            entry.disk = [disk as u8 + 1; 16];
            entry.id = U32::new(disk as u32 + 1);
            entry.size = U64::new(sectors * 512);
            entry
        });
        let control = Control {
            header,
            disks: entries.collect(),
        };
        let file = medium.file("control");
        ControlFile {
            path: "control".into(),
            file,
            control,
            moved: false,
        }
        .write()
        .expect("a new medium works");
        Self {
            medium,
            shape,
            write_per_waiter: false,
        }
    }

    /// The same log on a medium of its own.
    pub(super) fn with(&self, world: World) -> Self {
        let world = Arc::new(Mutex::new(world));
        Self {
            medium: Simulated { world },
            shape: self.shape,
            write_per_waiter: self.write_per_waiter,
        }
    }

    /// Recovers the log; `through`: in writethrough mode. `commit_wait` is never adaptive: that looks at the clock, and
    /// a seed would not give the same run again.
    pub(super) fn open(&self, through: bool, commit_wait: CommitWait) -> crate::Result<Running> {
        let options = StoreOptions {
            commit_wait,
            write_per_waiter: self.write_per_waiter,
            ..StoreOptions::default()
        };
        let control = read_control(self.medium.file("control"), "control".into())?;
        let mut states: Vec<_> = (0..self.shape.disks)
            .map(|disk| {
                Arc::new(DiskState {
                    id: disk as u32 + 1,
                    uuid: [disk as u8 + 1; 16],
                    path: format!("base-{disk}").into(),
                    sectors: AtomicU64::new(self.shape.sectors),
                    base: self.medium.file(&format!("base-{disk}")).into(),
                    read_only: false,
                    no_flush: false,
                    write_cache: AtomicBool::new(!through),
                    last_lsn: AtomicU64::new(0),
                    index: RwLock::default(),
                })
            })
            .collect();
        let medium = Box::new(self.medium.clone());
        let (log, keeper) = assemble(
            medium,
            Path::new("log"),
            control,
            &mut states,
            &options,
            &mut |_, _| {},
        )?;
        let disks = states
            .into_iter()
            .map(|state| Disk {
                log: log.clone(),
                state,
            })
            .collect();
        Ok(Running { disks, keeper })
    }

    /// What the base images hold, without the log.
    pub(super) fn bases(&self) -> Contents {
        let world = self.medium.lock();
        let values = |disk: usize| {
            world
                .contents(&format!("base-{disk}"))
                .chunks(512)
                .map(value_of)
                .collect()
        };
        (0..self.shape.disks).map(values).collect()
    }

    /// Loses power: of what was not synced any part is left.
    pub(super) fn lose_power(&self) {
        let after = self.medium.lock().after_crash();
        *self.medium.lock() = after;
    }
}

impl Running {
    /// The LSN of the newest record.
    pub(super) fn appended(&self) -> u64 {
        self.disks[0].log.lock().appended
    }

    /// Whether the log has failed.
    pub(super) fn poisoned(&self) -> bool {
        self.disks[0].log.poisoned.load(Ordering::Relaxed)
    }

    /// Reads all disks whole.
    pub(super) fn read(&self) -> Result<Contents, Failure> {
        let read_disk = |disk: &Disk| {
            let mut port = disk.open_port().expect("a port");
            let whole = Operation::Read {
                sector: 0,
                sectors: disk.sectors() as u32,
            };
            let data = end(&mut port, whole)?.expect("data of a read");
            Ok(data.chunks(512).map(value_of).collect())
        };
        self.disks.iter().map(read_disk).collect()
    }
}

/// Runs one request alone to its end.
fn end(port: &mut Port, operation: Operation) -> Result<Option<Buffer>, Failure> {
    port.submit(0, operation);
    let mut done = Vec::new();
    for _ in 0..100_000 {
        port.kick();
        port.completions(&mut done);
        if let Some(end) = done.pop() {
            return end.result;
        }
    }
    panic!("a request alone never ends");
}

/// So many sectors filled with a value.
pub(super) fn filled(value: u32, sectors: u64) -> Buffer {
    Buffer::from(&value.to_le_bytes().repeat(sectors as usize * 128)[..])
}

/// A header change that did not reach the medium is not taken for done: a checkpoint that is tried again has to note
/// again how far it copies.
#[test]
fn a_control_write_that_fails_changes_nothing() {
    let shape = Shape {
        disks: 1,
        sectors: 8,
        segment_size: 64 << 10,
        max_segments: 4,
    };
    let fixture = Fixture::new(World::new(1), shape);
    let mut control = read_control(fixture.medium.file("control"), "control".into()).unwrap();
    let before = control.control.header;
    {
        let mut world = fixture.medium.lock();
        (world.fail_sync, world.fail_control) = (Some(0), true);
    }
    let copying = |header: &mut ControlHeader| header.copying_lsn = U64::new(9);
    assert!(control.update(copying).is_err());
    assert_eq!(control.control.header.copying_lsn, before.copying_lsn);
    assert_eq!(control.control.header.generation, before.generation);
    control.update(copying).unwrap();
    let read = read_control(fixture.medium.file("control"), "control".into()).unwrap();
    assert_eq!(read.control.header.copying_lsn.get(), 9);
}

/// A clock that was a day ahead, and is right again, does not put what comes later before what was there, neither in the
/// running log nor after it was opened again.
#[test]
fn times_in_a_log_never_go_back() {
    let shape = Shape {
        disks: 1,
        sectors: 64,
        segment_size: 64 << 10,
        max_segments: 16,
    };
    let fixture = Fixture::new(World::new(1), shape);
    let commit = |running: &mut Running, value| {
        // Makes room.
        running.keeper.step(false).unwrap();
        let mut port = running.disks[0].open_port().expect("a port");
        let data = filled(value, 8);
        end(&mut port, Operation::Write { sector: 0, data }).unwrap();
        end(&mut port, Operation::Flush).unwrap();
    };
    let mut ahead = 0;
    for opened in 0..3 {
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        commit(&mut running, 2 * opened);
        if opened == 0 {
            let mut state = running.disks[0].log.lock();
            ahead = state.stamps.next() + 86_400_000_000;
            state.stamps = crate::stamp::Stamps::after(ahead);
        }
        commit(&mut running, 2 * opened + 1);
        drop(running);
        fixture.medium.lock().restart();
    }
    let control = read_control(fixture.medium.file("control"), "control".into()).unwrap();
    let mut times = Vec::new();
    crate::recovery::scan(
        &fixture.medium,
        Path::new("log"),
        &control.control,
        &mut |found| times.push(found.batch.unix_us.get()),
        &mut |_, _| {},
    )
    .unwrap();
    assert!(times.len() == 6 && times[0] < ahead, "{times:?}");
    assert!(times[1..].iter().all(|&time| time == ahead), "{times:?}");
}
