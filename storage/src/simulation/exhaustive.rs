//! Every history of up to two requests on two ports, every moment to lose power in it, and every
//! state that may be left; of up to three requests if asked to.
//!
//! A *history* is one to three requests (a write of one sector, one of two that overlaps it, a
//! discard, a flush), each on either port. After each of them nothing happens, or one port or the
//! other is served, or a checkpoint is done; at the end both are served until every request has
//! completed. (The first request is always on the first port: the ports are alike.) Each history
//! runs with one disk, and with two disks on a segment nearly full, so that the log goes on in the
//! next. The medium does everything as early and as late as it can. The modes are writeback with
//! changes that complete at once, writeback with changes that complete once they are written, and
//! writethrough. In the first mode the images have attributes, whose changes may be lost too; in
//! the others they have none.
//!
//! Power may be lost before each sync and at the end: any state that can be left at another moment
//! can be left at the next of these. There every subset of the unsynced sectors is judged
//! ([`crash_states`] says what is done if there are too many; [`Totals::bounded`] counts those).
//! The process may also be killed there, with everything still in the cache. In the recovery of
//! each state power is lost again at every moment, with every subset. Finally, data that a recovery
//! has shown must stay.
//!
//! All of this is done for one request; for two, without a power loss in a recovery. With
//! `WALVISOR_EXHAUSTIVE=3` it is done for two, and three are tried too: in the mode with changes
//! that complete at once, with only the port of the last request served in between, and without a
//! power loss in a recovery. `WALVISOR_EXHAUSTIVE=full` drops these limits and takes some ten
//! minutes.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::rc::Rc;

use super::clients::Clients;
use super::crash_states::crash_states;
use super::fixture::{Fixture, RunningStore, Shape, filled};
use super::medium::{EngineTiming, StoredFiles, World};
use super::oracle::{DiskContents, Oracle, Violation};
use super::{Total, killers, on_all_cores};
use crate::log::clock::LogClock;
use crate::{CommitWait, Operation};

/// The time of all batches, in microseconds since 1970: some 280,000 years from now.
const FAR_FUTURE: u64 = 1 << 63;

#[derive(Clone, Copy, Debug)]
struct Setting {
    disks: usize,
    pace: EngineTiming,
    through: bool,
    /// Whether changes complete once they are written.
    written: bool,
}

/// All settings: writeback with changes that complete at once comes first, then writeback with
/// changes that complete once they are written, then writethrough.
fn settings() -> Vec<Setting> {
    let setting = |i: usize| Setting {
        disks: 1 + i % 2,
        pace: [EngineTiming::AtOnce, EngineTiming::Late][i / 2 % 2],
        through: i / 4 == 2,
        written: i / 4 == 1,
    };
    (0..12).map(setting).collect()
}

/// One step of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    WriteOne(usize),
    WriteTwo(usize),
    Discard(usize),
    Flush(usize),
    Nothing,
    Serve(usize),
    Checkpoint,
}

use Step::{Checkpoint, Discard, Flush, Nothing, Serve, WriteOne, WriteTwo};

/// The requests to a port.
const REQUESTS: [fn(usize) -> Step; 4] = [WriteOne, WriteTwo, Discard, Flush];

/// All histories of `requests` requests. The last step changes fastest, so neighbours share their
/// beginnings.
fn histories(requests: usize, either: bool) -> Vec<Vec<Step>> {
    let mut histories = vec![Vec::new()];
    for i in 0..requests {
        let ports = if i == 0 { 0..1 } else { 0..2 };
        let last = i + 1 == requests;
        histories = histories
            .into_iter()
            .flat_map(|steps: Vec<Step>| {
                let with = move |(port, request, between): (usize, fn(usize) -> Step, Step)| {
                    let mut steps = steps.clone();
                    steps.extend([request(port), between]);
                    steps
                };
                let choices = ports.clone().flat_map(move |port| {
                    let between = match (either, last) {
                        (true, _) => vec![Nothing, Serve(0), Serve(1), Checkpoint],
                        (false, false) => vec![Nothing, Serve(port), Checkpoint],
                        (false, true) => vec![Nothing, Checkpoint],
                    };
                    REQUESTS.into_iter().flat_map(move |request| {
                        let between = between.clone().into_iter();
                        between.map(move |between| (port, request, between))
                    })
                });
                choices.map(with)
            })
            .collect();
    }
    histories
}

/// Counters of the exploration.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    histories: u64,
    crash_points: u64,
    states: u64,
    recovery_crash_points: u64,
    recovery_states: u64,
    /// Crash points where not every subset was judged.
    bounded: u64,
    /// How many of these differ, and so were recovered, and not only judged.
    distinct_crash_points: u64,
    distinct_states: u64,
    distinct_recovery_states: u64,
}

impl Total for Totals {
    fn add(&mut self, other: &Self) {
        self.histories += other.histories;
        self.crash_points += other.crash_points;
        self.states += other.states;
        self.recovery_crash_points += other.recovery_crash_points;
        self.recovery_states += other.recovery_states;
        self.bounded += other.bounded;
        self.distinct_crash_points += other.distinct_crash_points;
        self.distinct_states += other.distinct_states;
        self.distinct_recovery_states += other.distinct_recovery_states;
    }
}

/// The result of a recovery.
struct RecoveryResult {
    found: DiskContents,
    /// The state at each of its syncs.
    moments: Vec<StoredFiles>,
    end: StoredFiles,
}

/// What crash points and the recoveries of states showed, by the hashes of the states. Many
/// histories leave equal states; of those one is recovered. All are judged, for what they may show
/// differs. (Two states among a million have the same hash once in 40 million runs.)
#[derive(Default)]
struct RecoveryCache {
    crash_points: HashMap<u64, Rc<Outcome>>,
    /// A recovery may lose power.
    first: HashMap<u64, Rc<Outcome>>,
    /// The recovery after that does not.
    second: HashMap<u64, Rc<DiskContents>>,
    /// All contents that were found.
    contents: HashSet<Rc<DiskContents>>,
}

/// What may be found after a crash. Equal contents are in it once.
#[derive(Default)]
struct Outcome {
    /// Found by a recovery from the state as it is, without a power cut.
    plain: Rc<DiskContents>,
    /// Found by all other recoveries.
    others: HashSet<Rc<DiskContents>>,
    /// What was tried to find them.
    tried: Totals,
}

impl RecoveryCache {
    /// Returns the same contents for equal ones, to save memory.
    fn shared(&mut self, contents: DiskContents) -> Rc<DiskContents> {
        if let Some(known) = self.contents.get(&contents) {
            return known.clone();
        }
        let contents = Rc::new(contents);
        self.contents.insert(contents.clone());
        contents
    }
}

impl Outcome {
    /// Adds what a power cut in or after the recovery may show.
    fn add(&mut self, recovered: &Self) {
        self.others.extend(recovered.others.iter().cloned());
        self.tried.add(&recovered.tried);
    }
}

fn hash(stored: &StoredFiles) -> u64 {
    let mut hasher = DefaultHasher::new();
    stored.hash(&mut hasher);
    hasher.finish()
}

struct Explorer<'a> {
    fixture: Fixture,
    oracle: Oracle,
    totals: Totals,
    recoveries: &'a mut RecoveryCache,
    next_value: u32,
    /// Whether power is lost in recoveries too.
    deep: bool,
}

impl<'a> Explorer<'a> {
    /// Runs one history. Moments before step `from` were judged in another history with the same
    /// beginning.
    fn run(
        part: Exploration,
        steps: &[Step],
        from: usize,
        recoveries: &'a mut RecoveryCache,
    ) -> Result<Totals, Violation> {
        let setting = part.setting;
        let shape = Shape {
            disks: setting.disks,
            sectors: 8,
            segment_size: 64 << 10,
            max_segments: 4,
        };
        let mut world = World::new(1);
        world.without_attributes = setting.through || setting.written;
        let fixture = Fixture::new(world, shape);
        let mut running = fixture
            .open(setting.through, CommitWait::NONE)
            .map_err(|error| format!("opening a new log: {error}"))?;
        let mut explorer = Self {
            oracle: Oracle::new(fixture.bases()),
            fixture,
            totals: Totals::default(),
            recoveries,
            next_value: 0,
            deep: part.deep,
        };
        explorer.oracle.written = setting.written;
        // Stop the clock, so that different histories may leave the same bytes.
        running.disks[0].log.lock().clock = LogClock::stopped(FAR_FUTURE);
        let mut clients = Clients::open(&running, 2, false);
        running
            .keeper
            .step(false)
            .map_err(|error| error.to_string())?;
        if setting.disks == 2 {
            // Six small batches leave room for one more in the segment.
            for _ in 0..6 {
                explorer.step(&mut running, &mut clients, WriteOne(0), false)?;
                explorer.step(&mut running, &mut clients, Flush(0), false)?;
                explorer.drain(&mut running, &mut clients, false)?;
            }
        }
        {
            let mut world = explorer.fixture.medium.lock();
            world.pace = setting.pace;
            world.moments = Some(Vec::new());
        }
        for (i, &step) in steps.iter().enumerate() {
            explorer.step(&mut running, &mut clients, step, i >= from)?;
        }
        explorer.drain(&mut running, &mut clients, true)?;
        if !explorer.oracle.idle() {
            return Err("requests were never answered".into());
        }
        drop((running, clients));
        let end = explorer.fixture.medium.lock().stored();
        explorer.judge_crash(&end)?;
        explorer.totals.histories = 1;
        Ok(explorer.totals)
    }

    fn step(
        &mut self,
        running: &mut RunningStore,
        clients: &mut Clients,
        step: Step,
        judged: bool,
    ) -> Result<(), Violation> {
        let mut submit = |which, operation| {
            clients.submit(&mut self.oracle, running, which, operation);
            Ok(())
        };
        let mut write = |which, sectors| {
            self.next_value += 1;
            let data = filled(self.next_value, sectors);
            submit(which, Operation::Write { sector: 1, data })
        };
        match step {
            WriteOne(which) => write(which, 1),
            WriteTwo(which) => write(which, 2),
            Discard(which) => {
                let (sector, sectors) = (2, 2);
                submit(which, Operation::Discard { sector, sectors })
            }
            Flush(which) => submit(which, Operation::Flush),
            Nothing => Ok(()),
            Serve(which) => self.serve(running, clients, which, judged),
            Checkpoint => {
                // The checkpoint waits for records to become durable: with one thread, no group of
                // another port may be in flight.
                for _ in 0..20 {
                    if running.disks[0].log.lock().is_idle() {
                        break;
                    }
                    self.serve(running, clients, 0, judged)?;
                    self.serve(running, clients, 1, judged)?;
                }
                running
                    .keeper
                    .step(true)
                    .map_err(|error| format!("a checkpoint failed: {error}"))?;
                self.judge_moments(judged)
            }
        }
    }

    fn serve(
        &mut self,
        running: &RunningStore,
        clients: &mut Clients,
        which: usize,
        judged: bool,
    ) -> Result<(), Violation> {
        let done = clients.poll(&mut self.oracle, running, which);
        // Judges before the oracle learns which requests have ended.
        self.judge_moments(judged)?;
        Clients::complete(&mut self.oracle, running, &self.fixture, which, done)
    }

    /// Serves both ports until nothing is left to do.
    fn drain(
        &mut self,
        running: &mut RunningStore,
        clients: &mut Clients,
        judged: bool,
    ) -> Result<(), Violation> {
        for _ in 0..50 {
            if self.oracle.idle() {
                break;
            }
            self.serve(running, clients, 0, judged)?;
            self.serve(running, clients, 1, judged)?;
            if running.disks[0].log.lock().is_idle() {
                running
                    .keeper
                    .step(false)
                    .map_err(|error| error.to_string())?;
                self.judge_moments(judged)?;
            }
        }
        Ok(())
    }

    fn judge_moments(&mut self, judged: bool) -> Result<(), Violation> {
        let moments = {
            let mut world = self.fixture.medium.lock();
            world.moments.replace(Vec::new()).unwrap_or_default()
        };
        if judged {
            for stored in moments {
                self.judge_crash(&stored)?;
            }
        }
        Ok(())
    }

    /// Judges the states that a power loss at this moment may leave, and the one that a kill
    /// leaves: its writes are still in the cache, and power may be lost later.
    fn judge_crash(&mut self, stored: &StoredFiles) -> Result<(), Violation> {
        let hash = hash(stored);
        let outcome = match self.recoveries.crash_points.get(&hash) {
            Some(outcome) => outcome.clone(),
            None => {
                let outcome = Rc::new(self.explore_crash(stored)?);
                self.recoveries.crash_points.insert(hash, outcome.clone());
                outcome
            }
        };
        self.oracle.judge_killed(&outcome.plain)?;
        for found in &outcome.others {
            self.oracle.judge(found)?;
        }
        self.totals.add(&outcome.tried);
        Ok(())
    }

    fn explore_crash(&mut self, stored: &StoredFiles) -> Result<Outcome, Violation> {
        let left = crash_states(stored);
        let mut outcome = Outcome::default();
        outcome.tried.crash_points = 1;
        outcome.tried.bounded = u64::from(left.bounded);
        for state in left.states {
            let recovered = self.recover(state)?;
            outcome.others.insert(recovered.plain.clone());
            outcome.add(&recovered);
        }
        let killed = self.recover(stored.clone())?;
        outcome.plain = killed.plain.clone();
        outcome.add(&killed);
        Ok(outcome)
    }

    /// Recovers, with another power cut at every moment of the recovery and after it.
    fn recover(&mut self, stored: StoredFiles) -> Result<Rc<Outcome>, Violation> {
        let hash = hash(&stored);
        if let Some(outcome) = self.recoveries.first.get(&hash) {
            return Ok(outcome.clone());
        }
        let RecoveryResult {
            found,
            moments,
            end,
        } = self.read(stored, self.deep)?;
        let mut outcome = Outcome {
            plain: self.recoveries.shared(found),
            ..Outcome::default()
        };
        outcome.tried.states = 1;
        for stored in moments {
            outcome.tried.recovery_crash_points += 1;
            let left = crash_states(&stored);
            outcome.tried.bounded += u64::from(left.bounded);
            for state in left.states {
                outcome.tried.recovery_states += 1;
                outcome.others.insert(self.recover_again(state)?);
            }
        }
        // A reader may have acted on data that recovery has shown.
        if end.files.iter().any(|file| !file.cached.is_empty()) {
            for state in crash_states(&end).states {
                outcome.tried.recovery_states += 1;
                if self.recover_again(state)? != outcome.plain {
                    return Err("what a recovery had shown was gone after a power cut".into());
                }
            }
        }
        let outcome = Rc::new(outcome);
        self.recoveries.first.insert(hash, outcome.clone());
        Ok(outcome)
    }

    /// Recovers once more, without another power cut.
    fn recover_again(&mut self, stored: StoredFiles) -> Result<Rc<DiskContents>, Violation> {
        let hash = hash(&stored);
        if let Some(found) = self.recoveries.second.get(&hash) {
            return Ok(found.clone());
        }
        let found = self.read(stored, false)?.found;
        let found = self.recoveries.shared(found);
        self.recoveries.second.insert(hash, found.clone());
        Ok(found)
    }

    /// Opens and reads what is left; `noted`: also records the state at each sync.
    fn read(&self, stored: StoredFiles, noted: bool) -> Result<RecoveryResult, Violation> {
        // Later on the same medium, so its random numbers go on.
        let mut world = self.fixture.medium.lock().clone();
        (world.files, world.names) = (stored.files, stored.names);
        world.pace = EngineTiming::AtOnce;
        world.moments = noted.then(Vec::new);
        let fixture = self.fixture.with(world);
        let running = fixture
            .open(false, CommitWait::NONE)
            .map_err(|error| format!("recovery refused a legal crash: {error}"))?;
        let moments = fixture.medium.lock().moments.take().unwrap_or_default();
        let end = fixture.medium.lock().stored();
        let found = running
            .read()
            .map_err(|failure| format!("reading: {failure}"))?;
        Ok(RecoveryResult {
            found,
            moments,
            end,
        })
    }
}

/// The index of the first step in which two histories of equal length differ.
fn differ(one: &[Step], other: &[Step]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

/// One setting with histories of one length.
#[derive(Clone, Copy, Debug)]
struct Exploration {
    setting: Setting,
    requests: usize,
    /// Whether either port may be served between the requests.
    either: bool,
    /// Whether power is lost in recoveries too.
    deep: bool,
}

impl Exploration {
    /// Runs all histories of the part; stops at the first that breaks a promise.
    fn explore(self) -> Result<Totals, Violation> {
        let histories = histories(self.requests, self.either);
        let mut totals = Totals::default();
        let mut recoveries = RecoveryCache::default();
        let mut last: &[Step] = &[];
        for steps in &histories {
            let ran = Explorer::run(self, steps, differ(last, steps), &mut recoveries);
            totals.add(&ran.map_err(|broken| format!("{broken}\nin {self:?}: {steps:?}"))?);
            last = steps;
        }
        totals.distinct_crash_points = recoveries.crash_points.len() as u64;
        totals.distinct_states = recoveries.first.len() as u64;
        totals.distinct_recovery_states = recoveries.second.len() as u64;
        Ok(totals)
    }
}

/// How much is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    /// Up to two requests; power is lost in the recoveries of one.
    Usual,
    /// Up to three; power is lost in the recoveries of two.
    Three,
    Full,
}

impl Extent {
    fn from_environment() -> Self {
        match std::env::var("WALVISOR_EXHAUSTIVE").as_deref() {
            Err(_) => Self::Usual,
            Ok("3") => Self::Three,
            Ok("full") => Self::Full,
            Ok(other) => panic!("WALVISOR_EXHAUSTIVE={other}: it is 3 or full"),
        }
    }

    /// The long ones first.
    fn explorations(self) -> Vec<Exploration> {
        let with = |requests, either, deep| {
            let one = move |setting| Exploration {
                setting,
                requests,
                either,
                deep,
            };
            settings().into_iter().map(one)
        };
        let full = self == Self::Full;
        let three = with(3, full, full).filter(|part| match self {
            Self::Usual => false,
            Self::Three => !(part.setting.through || part.setting.written),
            Self::Full => true,
        });
        let two = with(2, true, self != Self::Usual);
        three.chain(two).chain(with(1, true, true)).collect()
    }
}

#[test]
fn all_small_histories_keep_the_promises() {
    let extent = Extent::from_environment();
    let parts = extent.explorations();
    let totals: Totals = on_all_cores(0..parts.len() as u64, |number| {
        let explored = parts[number as usize].explore();
        explored.unwrap_or_else(|broken| panic!("{broken}"))
    });
    println!("{extent:?}: {totals:?}");
    assert_eq!(
        totals.bounded, 0,
        "crash points where not all states were judged"
    );
}

/// The planted faults that show within two small requests.
#[test]
fn small_histories_notice_planted_faults() {
    let settings = settings();
    killers::SMALL_HISTORIES.assert_all(|number| {
        let number = number as usize;
        let (requests, setting) = (number / 12 % 2 + 1, settings[number % 12]);
        let part = Exploration {
            setting,
            requests,
            either: false,
            deep: false,
        };
        std::panic::catch_unwind(|| part.explore()).ok()?.err()
    });
}
