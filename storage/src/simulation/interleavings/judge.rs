//! Records the requests of a run and their ends, and judges whether the promises were kept.

use std::collections::{HashMap, HashSet};

use super::super::fixture::filled;
use super::super::oracle::{DiskContents, Violation, value_of};
use super::plan::{Client, OWN, Plan, Step};
use crate::{Completion, Operation};

struct PlannedWrite {
    sector: u64,
    sectors: u64,
    value: u32,
    submitted: u64,
    ended: Option<u64>,
}

/// A request that has not ended, by token.
enum OpenRequest {
    Write {
        client: usize,
        index: usize,
    },
    /// For each client, how many of its writes must survive if the FLUSH succeeds.
    Flush(Vec<usize>),
    /// `since`: how many writes of the client came before the read; `None` if a full log may hold
    /// one of those back.
    Read {
        client: usize,
        since: Option<usize>,
    },
}

/// What all threads report, one after the other. Shuttle runs them on one thread, so the lock never
/// blocks and no switch happens under it.
pub(super) struct Judge {
    pub plan: Plan,
    /// Counts events.
    now: u64,
    /// The writes of each client, in order.
    writes: Vec<Vec<PlannedWrite>>,
    /// For each client, how many of its writes must survive; `kill_floor`: how many if only the
    /// process ends.
    floor: Vec<usize>,
    kill_floor: Vec<usize>,
    open: HashMap<u64, (u64, OpenRequest)>,
    asked: HashSet<u64>,
    pub next_token: u64,
    pub flushes: u64,
    /// Groups that a client's thread led itself.
    pub led_alone: u64,
    answers: u64,
    /// Clients that stood still with requests in flight until all others had ended.
    pub stalled: u64,
    /// Clients whose threads ended with requests in flight.
    pub died: u64,
    /// Whether the process was killed without a power loss before.
    pub killed: bool,
    pub failures: u64,
    first_failure: Option<u64>,
    /// Whether the store is being closed: later requests may be refused.
    pub closing: bool,
    pub broken: Option<Violation>,
}

impl Judge {
    pub(super) fn new(plan: Plan) -> Self {
        let clients = plan.clients.len();
        Self {
            plan,
            now: 0,
            writes: (0..clients).map(|_| Vec::new()).collect(),
            floor: vec![0; clients],
            kill_floor: vec![0; clients],
            open: HashMap::new(),
            asked: HashSet::new(),
            next_token: 0,
            flushes: 0,
            led_alone: 0,
            stalled: 0,
            died: 0,
            answers: 0,
            killed: false,
            failures: 0,
            first_failure: None,
            closing: false,
            broken: None,
        }
    }

    /// How many requests never ended.
    pub(super) fn unanswered(&self) -> u64 {
        self.open.len() as u64
    }

    fn breaks(&mut self, broken: Violation) {
        self.broken.get_or_insert(broken);
    }

    /// Whether to ask the port to complete this request only once it is written: `true` at most
    /// once for each token.
    pub(super) fn asks(&mut self, token: u64) -> bool {
        let write = matches!(self.open.get(&token), Some((_, OpenRequest::Write { .. })));
        write && self.plan.written && self.asked.insert(token)
    }

    /// The contents of a client's sectors after its first `count` writes.
    fn contents(&self, client: usize, count: usize) -> Vec<u32> {
        let mut contents = vec![0; OWN as usize];
        for write in &self.writes[client][..count] {
            contents[write.sector as usize..][..write.sectors as usize].fill(write.value);
        }
        contents
    }

    /// The operation of a step, with its token.
    pub(super) fn submit(&mut self, client: usize, step: Step) -> Option<(u64, Operation)> {
        self.now += 1;
        let (disk, first) = (
            self.plan.clients[client].disk,
            self.plan.clients[client].first,
        );
        let (open, operation) = match step {
            Step::Write { sector, sectors } => {
                let index = self.writes[client].len();
                let value = (client * 1000 + index + 1) as u32;
                self.writes[client].push(PlannedWrite {
                    sector,
                    sectors,
                    value,
                    submitted: self.now,
                    ended: None,
                });
                let operation = Operation::Write {
                    sector: first + sector,
                    data: filled(value, sectors),
                };
                (OpenRequest::Write { client, index }, operation)
            }
            Step::Flush => {
                let on_disk = |other: usize| self.plan.clients[other].disk == disk;
                let ended = |other: usize| {
                    let ended = |write: &PlannedWrite| write.ended.is_some();
                    let last = self.writes[other].iter().rposition(ended);
                    last.filter(|_| on_disk(other)).map_or(0, |last| last + 1)
                };
                let floor = (0..self.writes.len()).map(ended).collect();
                (OpenRequest::Flush(floor), Operation::Flush)
            }
            Step::Read => {
                let writes = &self.writes[client];
                // The client's own writes all came before the read, but those that a full log holds
                // back are not applied yet.
                let certain = writes.iter().all(|write| write.ended.is_some());
                let since = certain.then_some(writes.len());
                let operation = Operation::Read {
                    sector: first,
                    sectors: OWN as u32,
                };
                (OpenRequest::Read { client, since }, operation)
            }
            Step::Serve | Step::Wait => return None,
        };
        self.next_token += 1;
        self.open.insert(self.next_token, (self.now, open));
        Some((self.next_token, operation))
    }

    /// Records the end of a request. Returns whether power is to be lost, or the process killed,
    /// now.
    pub(super) fn end(&mut self, completion: Completion, good: bool, log_failed: bool) -> bool {
        self.now += 1;
        let Completion { token, result } = completion;
        let Some((submitted, open)) = self.open.remove(&token) else {
            self.breaks(format!("request {token} was answered twice"));
            return false;
        };
        let excused = self.closing && !matches!(open, OpenRequest::Read { .. });
        if good && !excused && result.is_err() {
            self.breaks(format!("a good request failed: {result:?}"));
        }
        match (open, result) {
            (OpenRequest::Read { .. }, Err(_)) => {}
            (OpenRequest::Read { client, since }, Ok(data)) => {
                let data = data.expect("data of a read");
                let found: Vec<u32> = data.chunks(512).map(value_of).collect();
                if good && let Some(since) = since {
                    self.check_read(client, since, &found);
                }
            }
            (_, Err(_)) => {
                self.failures += 1;
                if log_failed {
                    self.first_failure.get_or_insert(self.now);
                }
            }
            (open, Ok(_)) => {
                if self.first_failure.is_some_and(|failed| failed < submitted) {
                    self.breaks(format!(
                        "request {token} succeeded after the log had failed"
                    ));
                }
                match open {
                    OpenRequest::Write { client, index } => {
                        self.writes[client][index].ended = Some(self.now);
                        if self.plan.through {
                            self.floor[client] = self.floor[client].max(index + 1);
                        }
                        if self.plan.written {
                            self.kill_floor[client] = self.kill_floor[client].max(index + 1);
                        }
                        self.answers += 1;
                        let now = self.plan.kill_after_writes == Some(self.answers);
                        self.killed |= now && good;
                        return now;
                    }
                    OpenRequest::Flush(floor) => {
                        for (mine, new) in self.floor.iter_mut().zip(floor) {
                            *mine = (*mine).max(new);
                        }
                        self.flushes += 1;
                        return self.plan.cut_after_flushes == Some(self.flushes);
                    }
                    OpenRequest::Read { .. } => unreachable!("handled above"),
                }
            }
        }
        false
    }

    /// Checks that each sector is as it was when the read came, or as a later write made it.
    fn check_read(&mut self, client: usize, since: usize, found: &[u32]) {
        let then = self.contents(client, since);
        let later = &self.writes[client][since..];
        for (sector, (&found, &then)) in (0..).zip(found.iter().zip(&then)) {
            let is_later = |write: &PlannedWrite| {
                (write.sector..write.sector + write.sectors).contains(&sector)
                    && write.value == found
            };
            if found != then && !later.iter().any(is_later) {
                return self.breaks(format!(
                    "a read of sector {sector} gave {found}, not {then}"
                ));
            }
        }
    }

    /// Judges what was found after a crash, or after closing (`whole`: then nothing may be
    /// missing).
    pub(super) fn judge(&self, found: &DiskContents, whole: bool) -> Result<(), Violation> {
        let mut kept = Vec::new();
        for (client, Client { disk, first, .. }) in self.plan.clients.iter().enumerate() {
            let found = &found[*disk][*first as usize..][..OWN as usize];
            let all = self.writes[client].len();
            let kept_here = (0..=all).rev().find(|&n| self.contents(client, n) == found);
            let Some(n) = kept_here else {
                return Err(format!(
                    "client {client}: {found:?} is no prefix of its writes"
                ));
            };
            let answered = self.writes[client]
                .iter()
                .filter(|write| write.ended.is_some());
            let floor = match (whole, self.killed) {
                (true, _) => answered.count(),
                (false, true) => self.floor[client].max(self.kill_floor[client]),
                (false, false) => self.floor[client],
            };
            if n < floor {
                return Err(format!(
                    "client {client}: {n} writes left of {all}, {floor} of them acknowledged"
                ));
            }
            kept.push(n);
        }
        // Every write that ended before a surviving write was submitted must survive as well.
        for (client, &n) in kept.iter().enumerate() {
            let Some(newest) = n.checked_sub(1).map(|last| &self.writes[client][last]) else {
                continue;
            };
            for (other, &n) in kept.iter().enumerate() {
                let lost = self.writes[other][n..].iter();
                if let Some(lost) = lost
                    .filter_map(|write| write.ended)
                    .find(|&ended| ended < newest.submitted)
                {
                    return Err(format!(
                        "client {client}'s write of time {} is there, client {other}'s that ended \
                         at {lost} is not",
                        newest.submitted
                    ));
                }
            }
        }
        Ok(())
    }
}
