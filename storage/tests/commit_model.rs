//! A model of the commit protocol, every state of which is visited: writes, FLUSHes that share
//! syncs, syncs that fail, kills, power cuts, recovery and restores in place.
//!
//! ```text
//!   Write ─▶ appended ─ BeginWrite, EndWrite ─▶ written ─ BeginSync, EndSync ─▶ durable ─▶ FLUSHes are answered
//!                          │ a batch is cached      a failed sync leaves it unsure │ and poisons the log
//!                          ▼                                                       ▼
//!   Kill, PowerCut: cached and unsure batches stay or go, in any combination ─▶ recovery, and on from there
//! ```
//! The histories of `storage/src/simulation` run the store's own code, on random paths. This runs
//! none of it, and leaves out no path: it checks the idea, for a few records, clients and crashes.
//! What is here stands for, in `storage/src`: `Write` for `Committer::append`, `BeginWrite` to
//! `EndSync` for `Committer::begin` and `end`, poisoning for `LogState::poison`, recovery for
//! `recovery/scan.rs` and `replay.rs`, and `Rewind` for `keeper/rewind.rs`.
//!
//! Each planted mistake is one that a promise forbids, and is found.

use std::collections::BTreeSet;

use stateright::{Checker, HasDiscoveries, Model, Property};

/// Clients, each with one FLUSH at a time.
const CLIENTS: usize = 2;

/// What a protocol may get wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// A FLUSH is answered once its records are written.
    AckBeforeSync,
    /// A sync counts for what was written while it ran.
    SyncCoversLater,
    /// After a failed sync there is another one, and no poison.
    FailedSyncRetried,
    /// A FLUSH that comes during a sync asks for no other one.
    LateFlushForgotten,
    /// A batch says that records before it are durable that are only written.
    DurableTooEarly,
    /// Recovery accepts a batch of an earlier life that lies behind the newest one.
    StaleBatchAccepted,
    /// Recovery takes what it has read for durable.
    RecoveryUnsynced,
    /// Recovery reads what a failed sync has left in the page cache.
    RecoveryTrustsCache,
    /// Recovery forgets that the disk went back.
    RewindForgotten,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Record {
    /// Each write has a number of its own.
    Write(u8),
    /// The disk goes back to what it was as of this LSN.
    Rewind(u8),
}

/// How safe a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Residence {
    /// In the page cache: a sync makes it durable.
    Cached,
    /// A sync of it has failed. It may be on the medium, and no later sync writes it.
    Unsure,
    Durable,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Batch {
    /// The life that wrote it, and its number there: what its checksum tells apart.
    id: (u8, u8),
    /// The batch before it.
    previous: Option<(u8, u8)>,
    /// LSN of its first record.
    first: u8,
    records: Vec<Record>,
    /// The durable LSN when it was made.
    durable: u8,
    residence: Residence,
    /// The batch that was there before, and comes back if this one never reaches the medium.
    over: Option<Box<Batch>>,
}

impl Batch {
    fn last(&self) -> u8 {
        self.first + self.records.len() as u8 - 1
    }
}

/// What may still happen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Budget {
    writes: u8,
    rewinds: u8,
    flushes: u8,
    failures: u8,
    crashes: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// Counts recoveries.
    life: u8,
    /// Batches of this life.
    batches: u8,
    /// All records of the log; the one with LSN 1 comes first.
    log: Vec<Record>,
    written: u8,
    durable: u8,
    /// The LSN to which a batch is being written.
    writing: Option<u8>,
    /// The LSN that the sync under way covers.
    syncing: Option<u8>,
    /// Somebody wants a sync.
    wanted: bool,
    poisoned: bool,
    /// The log's blocks, in order. A batch that was lost leaves a gap.
    medium: Vec<Option<Batch>>,
    /// Where the next batch goes.
    end: usize,
    /// The LSNs that the clients' FLUSHes wait for.
    waiting: [Option<u8>; CLIENTS],
    /// The newest LSN that a FLUSH was told is durable.
    acknowledged: u8,
    left: Budget,
    /// The promise that a crash has shown to be broken.
    broken: Option<Violation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Violation {
    /// Promise 1.
    AcknowledgedLost,
    /// Promise 3.
    NoPrefix,
    /// The disk is not what its records make of it.
    WrongContent,
    /// Promise 4, the other way round: a legal crash is told as damage.
    LegalCrashRefused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Write(usize),
    Rewind(u8),
    Flush(usize),
    BeginWrite,
    EndWrite {
        failed: bool,
    },
    BeginSync,
    EndSync {
        failed: bool,
    },
    /// The process ends, and the page cache stays. The unsure batches with these bits are on the
    /// medium.
    Kill(u8),
    /// The batches with these bits are on the medium.
    PowerCut(u8),
}

struct Protocol {
    budget: Budget,
    mistake: Option<Mistake>,
}

/// What these records make of an empty disk: the writes that it shows.
fn content(records: &[Record]) -> BTreeSet<u8> {
    let Some((newest, before)) = records.split_last() else {
        return BTreeSet::new();
    };
    match *newest {
        Record::Write(number) => {
            let mut shown = content(before);
            shown.insert(number);
            shown
        }
        Record::Rewind(to) => content(&before[..usize::from(to)]),
    }
}

impl State {
    /// Answers a FLUSH of these records.
    fn acknowledge(&mut self, lsn: u8) {
        self.acknowledged = self.acknowledged.max(lsn);
    }

    /// Answers the FLUSHes that wait for records up to `lsn`.
    fn answer_until(&mut self, lsn: u8) {
        for client in 0..CLIENTS {
            if let Some(wanted) = self.waiting[client].take_if(|wanted| *wanted <= lsn) {
                self.acknowledge(wanted);
            }
        }
    }

    /// Fails all FLUSHes, and all that come.
    fn poison(&mut self) {
        (self.poisoned, self.writing, self.syncing) = (true, None, None);
        (self.waiting, self.wanted) = ([None; CLIENTS], false);
    }

    /// How many batches may be there after a crash, or not.
    fn uncertain(&self, residences: &[Residence]) -> u32 {
        let batches = self.medium.iter().flatten();
        let count = batches.filter(|batch| residences.contains(&batch.residence));
        count.count() as u32
    }

    /// Keeps, of the batches that are in one of `residences`, those with these bits, which then are
    /// `safe`.
    fn keep(&mut self, bits: u8, residences: &[Residence], safe: Residence) {
        let mut bits = (0..).map(|bit| bits & (1 << bit) != 0);
        for slot in &mut self.medium {
            let uncertain = slot
                .as_mut()
                .filter(|batch| residences.contains(&batch.residence));
            if let Some(batch) = uncertain {
                batch.residence = safe;
                if !bits.next().expect("a bit for each") {
                    *slot = slot.take().and_then(|batch| batch.over).map(|batch| *batch);
                }
            }
        }
    }

    /// Opens the log again.
    fn recover(&mut self, mistake: Option<Mistake>) {
        let (mut records, mut end, mut newest) = (Vec::new(), 0, None);
        for batch in self.medium.iter().map_while(Option::as_ref) {
            let follows = batch.previous == newest || mistake == Some(Mistake::StaleBatchAccepted);
            if !follows || usize::from(batch.first) != records.len() + 1 {
                break;
            }
            records.extend(&batch.records);
            (end, newest) = (end + 1, Some(batch.id));
        }
        let known = records.len() as u8;
        let rest = self.medium[end..].iter().flatten();
        let is_prefix = records.len() <= self.log.len() && records == self.log[..records.len()];
        let shown: Vec<_> = match mistake {
            Some(Mistake::RewindForgotten) => {
                let writes = records.iter().copied();
                writes
                    .filter(|record| matches!(record, Record::Write(_)))
                    .collect()
            }
            _ => records.clone(),
        };
        self.broken = if { rest }.any(|batch| batch.durable > known) {
            Some(Violation::LegalCrashRefused)
        } else if !is_prefix {
            Some(Violation::NoPrefix)
        } else if known < self.acknowledged {
            Some(Violation::AcknowledgedLost)
        } else if content(&shown) != content(&records) {
            Some(Violation::WrongContent)
        } else {
            None
        };
        let synced = !matches!(
            mistake,
            Some(Mistake::RecoveryUnsynced | Mistake::RecoveryTrustsCache)
        );
        for batch in self.medium[..end].iter_mut().flatten() {
            let is_cached = batch.residence == Residence::Cached;
            if synced || is_cached && mistake == Some(Mistake::RecoveryTrustsCache) {
                batch.residence = Residence::Durable;
                batch.over = None;
            }
        }
        self.poison();
        (self.life, self.batches, self.poisoned) = (self.life + 1, 0, false);
        (self.written, self.durable) = (known, known);
        (self.log, self.end) = (records, end);
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            life: 0,
            batches: 0,
            log: Vec::new(),
            written: 0,
            durable: 0,
            writing: None,
            syncing: None,
            wanted: false,
            poisoned: false,
            medium: Vec::new(),
            end: 0,
            waiting: [None; CLIENTS],
            acknowledged: 0,
            left: self.budget.clone(),
            broken: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.broken.is_some() {
            return;
        }
        let State { left, poisoned, .. } = state;
        let appended = state.log.len() as u8;
        for client in (0..CLIENTS).filter(|client| state.waiting[*client].is_none() && !poisoned) {
            // It doesn't matter who writes.
            if left.writes > 0 && client == 0 {
                actions.push(Action::Write(client));
            }
            if left.flushes > 0 {
                actions.push(Action::Flush(client));
            }
        }
        if left.rewinds > 0 && !poisoned {
            actions.extend((0..appended).map(Action::Rewind));
        }
        let ends: &[bool] = if left.failures > 0 {
            &[false, true]
        } else {
            &[false]
        };
        match state.writing {
            Some(_) => actions.extend(ends.iter().map(|&failed| Action::EndWrite { failed })),
            None if state.written < appended && !poisoned => actions.push(Action::BeginWrite),
            None => {}
        }
        match state.syncing {
            Some(_) => actions.extend(ends.iter().map(|&failed| Action::EndSync { failed })),
            None if state.wanted && state.written > state.durable => {
                actions.push(Action::BeginSync);
            }
            None => {}
        }
        if left.crashes > 0 {
            let kills = 1 << state.uncertain(&[Residence::Unsure]);
            actions.extend((0..kills).map(Action::Kill));
            let cuts = 1 << state.uncertain(&[Residence::Cached, Residence::Unsure]);
            actions.extend((0..cuts).map(Action::PowerCut));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let makes = |mistake| self.mistake == Some(mistake);
        let appended = state.log.len() as u8;
        match action {
            Action::Write(_) => {
                state.left.writes -= 1;
                state.log.push(Record::Write(state.left.writes));
            }
            Action::Rewind(to) => {
                state.left.rewinds -= 1;
                state.log.push(Record::Rewind(to));
            }
            Action::Flush(client) => {
                state.left.flushes -= 1;
                let is_stable = if makes(Mistake::AckBeforeSync) {
                    state.written >= appended
                } else {
                    state.durable >= appended
                };
                if is_stable {
                    state.acknowledge(appended);
                } else {
                    state.waiting[client] = Some(appended);
                    state.wanted |= state.syncing.is_none() || !makes(Mistake::LateFlushForgotten);
                }
            }
            Action::BeginWrite => {
                let slot = state.end;
                let previous = slot.checked_sub(1).and_then(|slot| {
                    let batch = state.medium[slot].as_ref();
                    batch.map(|batch| batch.id)
                });
                let durable = if makes(Mistake::DurableTooEarly) {
                    state.written
                } else {
                    state.durable
                };
                state.medium.resize(state.medium.len().max(slot + 1), None);
                let over = state.medium[slot].take();
                let batch = Batch {
                    id: (state.life, state.batches),
                    previous,
                    first: state.written + 1,
                    records: state.log[usize::from(state.written)..].to_vec(),
                    durable,
                    residence: Residence::Cached,
                    over: over.map(Box::new),
                };
                state.medium[slot] = Some(batch);
                (state.end, state.batches) = (slot + 1, state.batches + 1);
                state.writing = Some(appended);
            }
            Action::EndWrite { failed: false } => {
                state.written = state.writing.take()?;
                if makes(Mistake::AckBeforeSync) {
                    state.answer_until(state.written);
                }
            }
            Action::EndWrite { failed: true } => {
                state.left.failures -= 1;
                state.poison();
            }
            Action::BeginSync => (state.syncing, state.wanted) = (Some(state.written), false),
            Action::EndSync { failed } => {
                let covered = state.syncing.take()?;
                let safe = if failed {
                    Residence::Unsure
                } else {
                    Residence::Durable
                };
                for batch in state.medium.iter_mut().flatten() {
                    if batch.last() <= covered && batch.residence == Residence::Cached {
                        batch.residence = safe;
                        batch.over.take_if(|_| !failed);
                    }
                }
                if failed {
                    state.left.failures -= 1;
                }
                if failed && !makes(Mistake::FailedSyncRetried) {
                    state.poison();
                } else if failed {
                    state.wanted = true;
                } else {
                    state.durable = if makes(Mistake::SyncCoversLater) {
                        state.written
                    } else {
                        covered
                    };
                    state.answer_until(state.durable);
                    let waits = state.waiting.iter().any(Option::is_some);
                    state.wanted |= waits && !makes(Mistake::LateFlushForgotten);
                }
            }
            Action::Kill(bits) => {
                state.left.crashes -= 1;
                if !makes(Mistake::RecoveryTrustsCache) {
                    state.keep(bits, &[Residence::Unsure], Residence::Cached);
                }
                state.recover(self.mistake);
            }
            Action::PowerCut(bits) => {
                state.left.crashes -= 1;
                let uncertain = [Residence::Cached, Residence::Unsure];
                state.keep(bits, &uncertain, Residence::Durable);
                state.recover(self.mistake);
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no crash breaks a promise", |_, state: &State| {
                state.broken.is_none()
            }),
            Property::always("each FLUSH is answered", |model: &Self, state: &State| {
                let mut actions = Vec::new();
                model.actions(state, &mut actions);
                !actions.is_empty() || state.broken.is_some() || state.waiting == [None; CLIENTS]
            }),
            // What makes the rest worth something.
            Property::sometimes("one sync answers two FLUSHes", |_, state: &State| {
                let covered = state.syncing.unwrap_or(0);
                let mut waiting = state.waiting.iter().flatten();
                waiting.all(|lsn| *lsn <= covered) && state.waiting.iter().all(Option::is_some)
            }),
            Property::sometimes("a stale batch lies behind the end", |_, state: &State| {
                state.life > 0 && state.medium.len() > state.end && state.end > 0
            }),
            Property::sometimes("a rewind survives a crash", |_, state: &State| {
                let mut log = state.log.iter();
                state.life > 0 && log.any(|record| matches!(record, Record::Rewind(_)))
            }),
        ]
    }
}

const BUDGET: Budget = Budget {
    writes: 3,
    rewinds: 1,
    flushes: 2,
    failures: 1,
    crashes: 2,
};

/// The names of the promises that are broken somewhere, and how many states were visited.
fn broken(mistake: Option<Mistake>) -> (Vec<&'static str>, usize) {
    let model = Protocol {
        budget: BUDGET,
        mistake,
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let checker = model.checker().threads(threads);
    let checker = match mistake {
        Some(_) => checker.finish_when(HasDiscoveries::AnyFailures),
        None => checker,
    };
    let checker = checker.spawn_bfs().join();
    let mut broken: Vec<_> = checker
        .discoveries()
        .into_keys()
        .filter(|name| *name == "no crash breaks a promise" || *name == "each FLUSH is answered")
        .collect();
    broken.sort_unstable();
    if mistake.is_none() {
        checker.assert_properties();
    }
    (broken, checker.unique_state_count())
}

#[test]
fn no_path_breaks_a_promise() {
    let (broken, states) = broken(None);
    println!("{states} states");
    assert_eq!(broken, [""; 0]);
}

#[test]
fn each_planted_mistake_is_found() {
    for mistake in [
        Mistake::AckBeforeSync,
        Mistake::SyncCoversLater,
        Mistake::FailedSyncRetried,
        Mistake::LateFlushForgotten,
        Mistake::DurableTooEarly,
        Mistake::StaleBatchAccepted,
        Mistake::RecoveryUnsynced,
        Mistake::RecoveryTrustsCache,
        Mistake::RewindForgotten,
    ] {
        let (broken, states) = broken(Some(mistake));
        println!("{mistake:?}: {broken:?}, after {states} states");
        assert!(!broken.is_empty(), "{mistake:?} is not found");
    }
}
