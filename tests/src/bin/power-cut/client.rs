//! A client of a disk. It runs operations that a seed determines, in its own region, and records
//! each state of the region.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use walvisor_testkit::Random;
use walvisor_testkit::nbd::{FLUSH, READ, SimpleClient, TRIM, WRITE, WRITE_ZEROES};

use crate::device_mapper::LogWrites;
use crate::history::{Chain, Mark, State, hash};

/// Longest request: a quarter of the log's segments.
const LONGEST: usize = 64 << 10;
const SECTOR: usize = 512;

/// The logical clock of all clients.
static CLOCK: AtomicU64 = AtomicU64::new(1);

fn tick() -> u64 {
    CLOCK.fetch_add(1, Ordering::AcqRel)
}

/// The kind of load that a client generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// Writes, each followed by a FLUSH.
    Commits,
    /// All kinds of requests, with occasional FLUSHes.
    Mixes,
    /// Large requests with rare FLUSHes.
    Loads,
    /// Large requests with frequent FLUSHes.
    Streams,
    /// Writes, some of them with FUA.
    Forces,
    /// No FLUSH: the client's disk makes every write durable.
    Trusts,
    /// The region is a page of this many bytes: each write is all of it, as a database writes.
    Pages(usize),
}

/// A client of one disk.
pub struct Client {
    /// The client's number in its marks.
    number: usize,
    habit: Habit,
    random: Random,
    region: Vec<u8>,
    /// The states of the client's region so far.
    pub chain: Chain,
}

impl Client {
    /// A client whose region holds `region`.
    pub fn new(
        number: usize,
        habit: Habit,
        seed: u64,
        disk: &str,
        offset: usize,
        region: Vec<u8>,
    ) -> Self {
        Self {
            number,
            habit,
            random: Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ number as u64),
            chain: Chain {
                disk: disk.to_owned(),
                offset,
                len: region.len(),
                states: vec![State {
                    hash: hash(&region),
                    asked: 0,
                    ended: 0,
                }],
            },
            region,
        }
    }

    /// Connects, reads the region, and makes its state durable. After a kill the client continues
    /// from the state that it reads.
    pub fn connect(&mut self, socket: &Path, marks: &LogWrites) -> io::Result<SimpleClient> {
        let mut nbd = SimpleClient::connect(socket, &self.chain.disk)?;
        let (at, len) = (self.chain.offset as u64, self.chain.len);
        nbd.end(READ, at, len, &mut self.region, false)?;
        let now = hash(&self.region);
        // A kill of the daemon loses no answered write.
        let answered = |state: &State| state.ended != u64::MAX;
        let last = self.chain.states.iter().rposition(answered).unwrap_or(0);
        let Some((found, _)) = self.chain.find(last, now) else {
            return Err(io::Error::other(format!(
                "client {} of {}: after a kill its region is no state since the answered {last}",
                self.number, self.chain.disk
            )));
        };
        self.chain.states.push(State {
            hash: now,
            asked: self.chain.states[found].asked,
            ended: tick(),
        });
        nbd.end(FLUSH, 0, 0, &mut [], false)?;
        self.acknowledge(marks)?;
        Ok(nbd)
    }

    /// Puts a mark into the log: all states so far are durable.
    pub fn acknowledge(&self, marks: &LogWrites) -> io::Result<()> {
        let mark = Mark::Acknowledged {
            client: self.number,
            state: self.chain.states.len() - 1,
        };
        marks.mark(&mark.to_text())
    }

    /// Runs one operation, and sometimes a FLUSH after it.
    pub fn step(&mut self, nbd: &mut SimpleClient, marks: &LogWrites) -> io::Result<()> {
        let random = &mut self.random;
        let (longest, zeroes, forced, flushed) = match self.habit {
            Habit::Commits => (8 << 10, false, false, true),
            Habit::Mixes => (
                16 << 10,
                random.one_in(4),
                random.one_in(8),
                random.one_in(4),
            ),
            Habit::Loads => (LONGEST, random.one_in(16), false, random.one_in(12)),
            Habit::Streams => (LONGEST, false, false, random.one_in(2)),
            Habit::Forces => (16 << 10, random.one_in(8), random.one_in(3), false),
            Habit::Trusts => (16 << 10, random.one_in(8), false, false),
            Habit::Pages(len) => (len, false, false, random.one_in(4)),
        };
        let sectors = match self.habit {
            Habit::Pages(len) => len / SECTOR,
            _ => 1 + random.below((longest / SECTOR) as u64) as usize,
        };
        let first = random.below((self.region.len() / SECTOR - sectors + 1) as u64) as usize;
        let (at, len) = (first * SECTOR, sectors * SECTOR);
        let mut data = vec![0; len];
        let request = match (zeroes, random.one_in(2)) {
            (true, true) => TRIM,
            (true, false) => WRITE_ZEROES,
            (false, _) => WRITE,
        };
        if request == WRITE {
            random.fill(&mut data);
        }
        self.region[at..at + len].copy_from_slice(&data);
        // The state is recorded before the request is sent: the write may take effect without an
        // answer.
        let (hash, last) = (hash(&self.region), self.chain.states.last());
        let unchanged = last.filter(|state| state.hash == hash);
        self.chain.states.push(State {
            hash,
            asked: unchanged.map_or_else(tick, |state| state.asked),
            ended: u64::MAX,
        });
        let offset = (self.chain.offset + at) as u64;
        nbd.end(request, offset, len, &mut data, forced)?;
        self.chain.states.last_mut().expect("a state").ended = tick();
        if flushed {
            nbd.end(FLUSH, 0, 0, &mut [], false)?;
        }
        if forced || flushed || self.habit == Habit::Trusts {
            self.acknowledge(marks)?;
        }
        Ok(())
    }
}
