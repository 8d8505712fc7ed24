//! One history: what is done, and the oracle that judges what is left.

use std::collections::{HashMap, VecDeque};
use std::path::Path;

use zerocopy::FromZeros;
use zerocopy::little_endian::{U32, U64};

use super::medium::{Random, Simulated, World};
use crate::catalog::read_control;
use crate::disk::{Disk, DiskState};
use crate::error::ErrorKind;
use crate::format::{
    BLOCK, BatchHeader, CONTROL_MAGIC, CONTROL_SLOT, Control, ControlHeader, Decoded, DiskEntry,
    SegmentHeader, VERSION,
};
use crate::keeper::{ControlFile, Keeper};
use crate::segment::Medium;
use crate::store::assemble;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, RwLock};
use crate::{Buffer, Completion, Failure, Operation, Port};

/// Sectors of each disk.
const SECTORS: u64 = 96;
const SEGMENT: u64 = 64 << 10;

/// What happened in a run, to see that it tried what it should.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub requests: u64,
    pub flushes: u64,
    pub crashes: u64,
    pub recovery_crashes: u64,
    pub checkpoints: u64,
    pub lost_records: u64,
    pub poisoned: u64,
    pub closes: u64,
}

impl Totals {
    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.flushes += other.flushes;
        self.crashes += other.crashes;
        self.recovery_crashes += other.recovery_crashes;
        self.checkpoints += other.checkpoints;
        self.lost_records += other.lost_records;
        self.poisoned += other.poisoned;
        self.closes += other.closes;
    }
}

/// One modification: every sector of a range becomes `value` (0: zeroes).
#[derive(Clone, Copy, Debug)]
struct Change {
    disk: usize,
    sector: u64,
    sectors: u64,
    value: u32,
    completed: bool,
}

/// The value of each sector of each disk.
type Contents = Vec<Vec<u32>>;

fn apply(contents: &mut Contents, change: &Change) {
    let range = change.sector as usize..(change.sector + change.sectors) as usize;
    contents[change.disk][range].fill(change.value);
}

/// A request that has not ended.
enum Open {
    /// Its place in the log's order once it has one; whether it must be durable when it ends.
    Change { index: Option<usize>, through: bool },
    /// What must survive if it succeeds.
    Flush { floor: usize },
    /// The range, and the contents when it was submitted at this length of the order.
    Read {
        disk: usize,
        sector: u64,
        then: Vec<u32>,
        order: usize,
    },
}

struct Client {
    disk: usize,
    port: Port,
    open: HashMap<u64, Open>,
    /// Changes submitted that have no LSN yet, by token, in order.
    unplaced: VecDeque<(u64, Change)>,
}

/// Why a history failed.
pub(super) type Broken = String;

pub(super) struct History {
    random: Random,
    medium: Simulated,
    disks: usize,
    /// The disks before the first change of `order`.
    start: Contents,
    order: Vec<Change>,
    floor: usize,
    next_value: u32,
    /// The sequence that each salt was seen with.
    salts: HashMap<u64, u64>,
    totals: Totals,
}

/// An open store without threads.
struct Running {
    disks: Vec<Disk>,
    keeper: Keeper,
}

impl History {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let disks = 1 + random.below(2) as usize;
        let mut world = World::new(random.next());
        let max_segments = 4 + random.below(3) as u32;
        world.create("control", 2 * CONTROL_SLOT);
        for disk in 0..disks {
            world.create(&format!("base-{disk}"), SECTORS as usize * 512);
        }
        let medium = Simulated {
            world: Arc::new(Mutex::new(world)),
            segment_size: SEGMENT,
        };
        let mut header = ControlHeader::new_zeroed();
        header.magic = CONTROL_MAGIC;
        header.version = U32::new(VERSION);
        header.log = [7; 16];
        header.segment_size = U64::new(medium.segment_size);
        header.max_segments = U32::new(max_segments);
        header.first_sequence = U64::new(1);
        header.next_lsn = U64::new(1);
        header.next_cid = U64::new(1);
        let entries = (0..disks).map(|disk| {
            let mut entry = DiskEntry::new_zeroed();
            entry.disk = [disk as u8 + 1; 16];
            entry.id = U32::new(disk as u32 + 1);
            entry.size = U64::new(SECTORS * 512);
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
            random,
            medium,
            disks,
            start: vec![vec![0; SECTORS as usize]; disks],
            order: Vec::new(),
            floor: 0,
            next_value: 0,
            salts: HashMap::new(),
            totals: Totals::default(),
        }
    }

    /// Runs it to the end.
    pub(super) fn run(mut self) -> Result<Totals, Broken> {
        let incarnations = 1 + self.random.below(3);
        for _ in 0..incarnations {
            self.incarnation()?;
        }
        Ok(self.totals)
    }

    fn open(&self, through: bool) -> crate::Result<Running> {
        let control = read_control(self.medium.file("control"), "control".into())?;
        let mut states: Vec<_> = (0..self.disks)
            .map(|disk| {
                Arc::new(DiskState {
                    id: disk as u32 + 1,
                    uuid: [disk as u8 + 1; 16],
                    path: format!("base-{disk}").into(),
                    sectors: SECTORS,
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
        let (log, keeper) = assemble(medium, Path::new("log"), control, &mut states, true)?;
        let disks = states
            .into_iter()
            .map(|state| Disk {
                log: log.clone(),
                state,
            })
            .collect();
        Ok(Running { disks, keeper })
    }

    /// Opens, works, and loses power or closes; then opens again and judges.
    fn incarnation(&mut self) -> Result<(), Broken> {
        let through = self.random.one_in(4);
        let mut running = self
            .open(through)
            .map_err(|error| format!("opening a good log failed: {error}"))?;
        let crash = !self.random.one_in(5);
        if crash {
            let ticks = self.random.below(60);
            self.medium.lock().ticks = Some(ticks);
        }
        if self.random.one_in(if crash { 8 } else { 3 }) {
            let (count, control) = (self.random.below(8), self.random.one_in(2));
            let mut world = self.medium.lock();
            (world.fail_sync, world.fail_control) =
                (Some(if control { count / 3 } else { count }), control);
        }
        self.work(&mut running)?;
        let closed = if self.medium.lock().crashed {
            Err("power lost".into())
        } else {
            self.close(running)
        };
        match closed {
            Ok(()) => {
                self.totals.closes += 1;
                // Closed: everything is in the base images, and they are plain.
                let bases = self.bases();
                let mut all = self.start.clone();
                self.order.iter().for_each(|change| apply(&mut all, change));
                if bases != all {
                    return Err(format!(
                        "after a clean close the base images differ: {}",
                        difference(&bases, &all)
                    ));
                }
                self.floor = self.order.len();
            }
            Err(_) => self.totals.crashes += 1,
        }
        if self.random.one_in(3) {
            // The process was killed: the cache is still there, and unsynced.
            self.medium.lock().restart();
        } else {
            let after = self.medium.lock().after_crash();
            *self.medium.lock() = after;
        }
        // Recovery loses power too, up to twice.
        for _ in 0..self.random.below(3) {
            let ticks = self.random.below(6);
            self.medium.lock().ticks = Some(ticks);
            let opened = self.open(false);
            if opened.is_err() && !self.medium.lock().crashed {
                return Err(format!(
                    "recovery failed: {}",
                    opened.err().expect("checked")
                ));
            }
            if let Ok(mut running) = opened {
                let _ = running.keeper.step(true);
            }
            self.totals.recovery_crashes += u64::from(self.medium.lock().crashed);
            let after = self.medium.lock().after_crash();
            *self.medium.lock() = after;
        }
        self.judge()
    }

    fn bases(&self) -> Contents {
        let world = self.medium.lock();
        let values = |disk: usize| {
            world
                .contents(&format!("base-{disk}"))
                .chunks(512)
                .map(value_of)
                .collect()
        };
        (0..self.disks).map(values).collect()
    }

    fn close(&mut self, mut running: Running) -> Result<(), Broken> {
        running.keeper.close().map_err(|error| error.to_string())
    }

    /// Works, is killed, and finds some bytes of its log changed: that is reported, or it was beyond what had been
    /// acknowledged or reused, but it never shows as data that is no prefix of what was written.
    pub(super) fn run_damaged(mut self) -> Result<bool, Broken> {
        let mut running = self.open(false).map_err(|error| error.to_string())?;
        self.work(&mut running)?;
        drop(running);
        for _ in 0..1 + self.random.below(3) {
            self.medium.lock().damage();
        }
        match self.open(false) {
            Ok(running) => {
                self.floor = 0;
                self.find_prefix(&running).map(|_| false)
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Damaged | ErrorKind::UnsupportedVersion
                ) =>
            {
                Ok(true)
            }
            Err(error) => Err(format!("damage was reported as something else: {error}")),
        }
    }

    /// Opens what is left and finds the prefix that it is.
    fn judge(&mut self) -> Result<(), Broken> {
        let running = self
            .open(false)
            .map_err(|error| format!("recovery refused a legal crash: {error}"))?;
        self.check_numbers(running.disks[0].log.lock().next_lsn)?;
        let (found, prefix) = self.find_prefix(&running)?;
        self.totals.lost_records += (self.order.len() - prefix) as u64;
        drop(running);
        // What was recovered must be durable from now on, and is where the next incarnation begins.
        let after = self.medium.lock().after_crash();
        *self.medium.lock() = after;
        self.start = found;
        self.order.clear();
        self.floor = 0;
        Ok(())
    }

    /// Reads the disks and finds the longest prefix of the order, not below the floor, that they are.
    fn find_prefix(&self, running: &Running) -> Result<(Contents, usize), Broken> {
        let mut found = Contents::new();
        for disk in &running.disks {
            let mut port = disk.open_port().expect("a port");
            let read = end(
                &mut port,
                Operation::Read {
                    sector: 0,
                    sectors: SECTORS as u32,
                },
            );
            let data = read
                .map_err(|failure| format!("reading after recovery: {failure}"))?
                .expect("data of a read");
            found.push(data.chunks(512).map(value_of).collect());
        }
        let mut contents = self.start.clone();
        self.order[..self.floor]
            .iter()
            .for_each(|change| apply(&mut contents, change));
        let at_floor = contents.clone();
        let mut prefix = (contents == found).then_some(self.floor);
        for (i, change) in self.order.iter().enumerate().skip(self.floor) {
            apply(&mut contents, change);
            if contents == found {
                // The longest: all that are equal are one state.
                prefix = Some(i + 1);
            }
        }
        let Some(prefix) = prefix else {
            return Err(format!(
                "what is left is no prefix of {} changes from {} on; against the shortest legal one: {}",
                self.order.len(),
                self.floor,
                difference(&found, &at_floor)
            ));
        };
        Ok((found, prefix))
    }

    /// Numbers seen on the medium are never given out again: no LSN, no salt.
    fn check_numbers(&mut self, next_lsn: u64) -> Result<(), Broken> {
        for (slot, segment) in self.medium.segments().map_err(|error| error.to_string())? {
            let mut bytes = vec![0; SEGMENT as usize];
            segment
                .file
                .read_exact_at(&mut bytes, 0)
                .map_err(|error| error.to_string())?;
            // Without its header a segment's batches can't be taken for anything.
            let Decoded::Valid(life) = SegmentHeader::decode(&bytes) else {
                continue;
            };
            let (salt, sequence) = (life.salt.get(), life.sequence.get());
            if *self.salts.entry(salt).or_insert(sequence) != sequence {
                return Err(format!(
                    "segment {slot} has the salt {salt} of another sequence"
                ));
            }
            for block in bytes.chunks(BLOCK) {
                let Some((header, len)) = BatchHeader::peek(block) else {
                    continue;
                };
                let ours = header.salt == life.salt
                    && len <= BLOCK
                    && header.descriptors(&block[..len]).is_some();
                let first = header.first_lsn.get();
                if ours && first >= next_lsn {
                    return Err(format!(
                        "LSN {first} stands in segment {slot} and would be given out again"
                    ));
                }
            }
        }
        Ok(())
    }

    fn work(&mut self, running: &mut Running) -> Result<(), Broken> {
        let ports = 1 + self.random.below(3) as usize;
        let mut clients: Vec<Client> = (0..ports)
            .map(|i| {
                let disk = i % self.disks;
                let port = running.disks[disk].open_port().expect("a port");
                Client {
                    disk,
                    port,
                    open: HashMap::new(),
                    unplaced: VecDeque::new(),
                }
            })
            .collect();
        let mut token = 0;
        // A few requests, or enough to go around the ring.
        let requests = if self.random.one_in(8) {
            150
        } else {
            3 + self.random.below(25)
        };
        let mut submitted = 0;
        let mut pause = 0u64;
        for _ in 0..20_000 {
            if self.medium.lock().crashed {
                break;
            }
            pause = pause.saturating_sub(1);
            let idle = clients.iter().all(|client| client.open.is_empty());
            if submitted == requests && idle {
                break;
            }
            let which = self.random.below(ports as u64) as usize;
            match self.random.below(8) {
                0..4 if submitted < requests => {
                    token += 1;
                    submitted += 1;
                    self.totals.requests += 1;
                    self.submit(&mut clients, which, token, running);
                }
                // The keeper's turn: segments, and a checkpoint when one is due or by chance. It blocks until what
                // it waits for is durable: with one thread it has to lead that group itself.
                7 if pause == 0 && !running.disks[0].log.lock().busy => {
                    let forced = self.random.one_in(4);
                    if running.keeper.step(forced).is_err() {
                        // It tries again a second later: much may be written until then.
                        pause = self.random.below(300);
                    }
                }
                _ => {
                    clients[which].port.kick();
                    self.serve(&mut clients, which, running)?;
                }
            }
        }
        let crashed = self.medium.lock().crashed;
        if !crashed && clients.iter().any(|client| !client.open.is_empty()) {
            return Err("requests were never answered".into());
        }
        self.totals.checkpoints += running.disks[0].log_counters().checkpoints;
        self.totals.poisoned +=
            u64::from(running.disks[0].log.poisoned.load(Ordering::Relaxed) && !crashed);
        Ok(())
    }

    fn appended(running: &Running) -> u64 {
        running.disks[0].log.lock().appended
    }

    /// Gives the changes of a client that got an LSN since `before` their place in the order.
    fn place(&mut self, client: &mut Client, running: &Running, before: u64) {
        for _ in before..Self::appended(running) {
            let Some((token, change)) = client.unplaced.pop_front() else {
                continue;
            };
            if let Some(Open::Change { index, .. }) = client.open.get_mut(&token) {
                *index = Some(self.order.len());
            }
            self.order.push(change);
        }
    }

    fn submit(&mut self, clients: &mut [Client], which: usize, token: u64, running: &Running) {
        let disk = clients[which].disk;
        let sectors = 1 + self.random.below(8);
        // Few places, so that requests overlap.
        let sector = self.random.below(SECTORS - sectors);
        let before = Self::appended(running);
        let (operation, open) = match self.random.below(10) {
            0..5 => {
                self.next_value += 1;
                let data =
                    Buffer::from(&self.next_value.to_le_bytes().repeat(sectors as usize * 128)[..]);
                (Operation::Write { sector, data }, None)
            }
            5 => (
                Operation::Discard {
                    sector,
                    sectors: sectors as u32,
                },
                None,
            ),
            6 => (
                Operation::WriteZeroes {
                    sector,
                    sectors: sectors as u32,
                    unmap: self.random.one_in(2),
                },
                None,
            ),
            7 | 8 => {
                self.totals.flushes += 1;
                let completed = self
                    .order
                    .iter()
                    .rposition(|change| change.completed && change.disk == disk);
                (
                    Operation::Flush,
                    Some(Open::Flush {
                        floor: completed.map_or(0, |index| index + 1),
                    }),
                )
            }
            _ => {
                let mut now = self.start.clone();
                self.order.iter().for_each(|change| apply(&mut now, change));
                let then = now[disk][sector as usize..(sector + sectors) as usize].to_vec();
                let open = Open::Read {
                    disk,
                    sector,
                    then,
                    order: self.order.len(),
                };
                (
                    Operation::Read {
                        sector,
                        sectors: sectors as u32,
                    },
                    Some(open),
                )
            }
        };
        let client = &mut clients[which];
        let value = if matches!(operation, Operation::Write { .. }) {
            self.next_value
        } else {
            0
        };
        let open = open.unwrap_or_else(|| {
            client.unplaced.push_back((
                token,
                Change {
                    disk,
                    sector,
                    sectors,
                    value,
                    completed: false,
                },
            ));
            Open::Change {
                index: None,
                through: !running.disks[disk].write_cache(),
            }
        });
        client.open.insert(token, open);
        client.port.submit(token, operation);
        self.place(&mut clients[which], running, before);
    }

    fn serve(
        &mut self,
        clients: &mut [Client],
        which: usize,
        running: &Running,
    ) -> Result<(), Broken> {
        let before = Self::appended(running);
        let mut done: Vec<Completion> = Vec::new();
        clients[which].port.completions(&mut done);
        self.place(&mut clients[which], running, before);
        for Completion { token, result } in done {
            let open = clients[which]
                .open
                .remove(&token)
                .ok_or("a request was answered twice")?;
            let failed = result.is_err();
            if failed
                && !running.disks[0].log.poisoned.load(Ordering::Relaxed)
                && !self.medium.lock().crashed
            {
                return Err(format!("a good request failed: {result:?}"));
            }
            match open {
                Open::Change { index, through } => {
                    clients[which].unplaced.retain(|(other, _)| *other != token);
                    match index {
                        Some(index) if !failed => {
                            self.order[index].completed = true;
                            if through {
                                self.floor = self.floor.max(index + 1);
                            }
                        }
                        None if !failed => {
                            return Err("a change was acknowledged without an LSN".into());
                        }
                        _ => {}
                    }
                }
                Open::Flush { floor } if !failed => self.floor = self.floor.max(floor),
                Open::Flush { .. } => {}
                Open::Read {
                    disk,
                    sector,
                    then,
                    order,
                } => {
                    let Ok(Some(data)) = result else { continue };
                    for (i, (found, &then)) in data.chunks(512).map(value_of).zip(&then).enumerate()
                    {
                        let at = sector + i as u64;
                        // What it was when the read came, or what anyone wrote since.
                        let since = self.order[order..].iter().any(|change| {
                            change.disk == disk
                                && (change.sector..change.sector + change.sectors).contains(&at)
                                && change.value == found
                        });
                        if found != then && !since {
                            return Err(format!(
                                "read of disk {disk} sector {at} gave {found} instead of {then}"
                            ));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// The value that fills a sector; a number no value reaches if the sector is mixed.
fn value_of(sector: &[u8]) -> u32 {
    let value = u32::from_le_bytes(sector[..4].try_into().expect("a sector"));
    let pure = sector.chunks(4).all(|word| word == &sector[..4]);
    if pure { value } else { u32::MAX }
}

fn difference(found: &Contents, wanted: &Contents) -> String {
    let mut text = String::new();
    for (disk, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        for (sector, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            if found != wanted {
                text += &format!("disk {disk} sector {sector}: {found} for {wanted}; ");
            }
        }
    }
    text
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

/// A header change that did not reach the medium is not taken for done: a checkpoint that is tried again has to note
/// again how far it copies.
#[test]
fn a_control_write_that_fails_changes_nothing() {
    let history = History::new(1);
    let mut control = read_control(history.medium.file("control"), "control".into()).unwrap();
    let before = control.control.header;
    {
        let mut world = history.medium.lock();
        (world.fail_sync, world.fail_control) = (Some(0), true);
    }
    let copying = |header: &mut ControlHeader| header.copying_lsn = U64::new(9);
    assert!(control.update(copying).is_err());
    assert_eq!(control.control.header.copying_lsn, before.copying_lsn);
    assert_eq!(control.control.header.generation, before.generation);
    control.update(copying).unwrap();
    let read = read_control(history.medium.file("control"), "control".into()).unwrap();
    assert_eq!(read.control.header.copying_lsn.get(), 9);
}
