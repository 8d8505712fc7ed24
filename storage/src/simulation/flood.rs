//! A disk that floods the log is the one that waits for its room.

use super::fixture::{Fixture, RunningStore, Shape, filled};
use super::medium::World;
use crate::checkpoint::pace::CopyPace;
use crate::log::state::Log;
use crate::mutant::{Mutant, PLANTED};
use crate::sync::Arc;
use crate::{Backend, BackendQueue, CommitWait, Completion, Operation, Port};

const SECTORS: u64 = 504;
const SEGMENTS: u32 = 128;
/// Sectors of a flooding write, and how many are in flight.
const LONG: u64 = 24;
const IN_FLIGHT: usize = 32;
/// The copy's work.
const WORK: u64 = 1000;
/// Steps in which all is done that can be done without more room.
const STEPS: usize = 30;

/// A disk with as many writes in flight as its client has.
struct Flood {
    port: Port,
    in_flight: usize,
    begun: u64,
    ended: u64,
}

impl Flood {
    fn of(running: &RunningStore, disk: usize) -> Self {
        Self {
            port: running.disks[disk].open_port().unwrap(),
            in_flight: 0,
            begun: 0,
            ended: 0,
        }
    }

    fn step(&mut self) {
        while self.in_flight < IN_FLIGHT {
            let sector = self.begun % (SECTORS / LONG) * LONG;
            let data = filled(self.begun as u32, LONG);
            self.begun += 1;
            self.port
                .submit(self.begun, Operation::Write { sector, data });
            self.in_flight += 1;
        }
        self.port.kick();
        let mut done = Vec::new();
        self.port.completions(&mut done);
        assert!(done.iter().all(|end| end.result.is_ok()));
        self.in_flight -= done.len();
        self.ended += done.len() as u64;
    }
}

/// A step of the log's writer, once a segment is ready.
fn step(running: &RunningStore) {
    let log = running.log();
    while log.lock().ring.next_file().is_some() {
        log.preallocate_segment(false, || {}).unwrap();
    }
    running.step_writer();
}

/// A log of two disks.
fn open() -> (Fixture, RunningStore, Arc<Log>) {
    let fixture = Fixture::new(World::new(1), Shape::two_disks(SECTORS, SEGMENTS));
    let running = fixture.open(false, CommitWait::NONE).unwrap();
    let log = running.log().clone();
    (fixture, running, log)
}

/// Calls `beside` for each step of a copy that hands on the log's room.
fn copy(log: &Arc<Log>, mut beside: impl FnMut(u64)) {
    let mut pace = CopyPace::new(log, &mut log.lock(), true);
    pace.plan(WORK);
    for done in 0..WORK {
        pace.max_runs(log, done);
        beside(done);
    }
    log.lock().ring.end_copy();
}

/// How often in a copy a commit of the second disk waits, while the first floods the log.
fn held_up(running: &RunningStore, log: &Arc<Log>) -> (u64, Flood) {
    let mut flood = Flood::of(running, 0);
    let mut port = running.disks[1].open_port().unwrap();
    let (mut held_up, mut waiting) = (0, 0);
    let mut commit = |flood: &mut Flood| {
        if waiting == 0 {
            let (sector, data) = (0, filled(1, 8));
            port.submit(1, Operation::Write { sector, data });
            port.submit(2, Operation::Flush);
            waiting = 2;
        }
        let mut ended: Vec<Completion> = Vec::new();
        for _ in 0..STEPS {
            port.kick();
            step(running);
            port.completions(&mut ended);
            flood.step();
        }
        assert!(ended.iter().all(|end| end.result.is_ok()));
        waiting -= ended.len();
        held_up += u64::from(waiting > 0);
    };
    // The log knows both.
    commit(&mut flood);
    copy(log, |done| {
        for _ in 0..STEPS {
            flood.step();
            step(running);
        }
        // Far less than its part.
        if done % 8 == 0 {
            commit(&mut flood);
        }
    });
    (held_up, flood)
}

#[test]
fn a_disk_that_floods_the_log_waits_and_the_other_one_never_does() {
    let (_fixture, running, log) = open();
    let (held_up, flood) = held_up(&running, &log);
    assert_eq!(held_up, 0);
    assert_eq!(flood.in_flight, IN_FLIGHT, "it waits");
    // Little is reserved for the other disk. Headers and the ends of segments take a half.
    let room = u64::from(SEGMENTS) * (64 << 10);
    let got = flood.ended * LONG * 512;
    assert!(got > room / 3, "{got} of {room} bytes");
}

#[test]
fn without_shares_the_other_disk_waits_for_room() {
    PLANTED.set(Some(Mutant::RoomUnshared));
    let (_fixture, running, log) = open();
    let (held_up, _) = held_up(&running, &log);
    PLANTED.set(None);
    assert!(held_up > 10, "{held_up}");
}

/// A disk that is alone uses the same room as without shares.
#[test]
fn a_disk_alone_leaves_nothing() {
    let got = [None, Some(Mutant::RoomUnshared)].map(|planted| {
        PLANTED.set(planted);
        let (_fixture, running, log) = open();
        let mut flood = Flood::of(&running, 0);
        copy(&log, |_| {
            for _ in 0..STEPS {
                flood.step();
                step(&running);
            }
        });
        PLANTED.set(None);
        flood.ended
    });
    assert_eq!(got[0], got[1]);
}

#[test]
fn disks_that_flood_the_log_share_its_room_by_weight() {
    for weights in [[100, 100], [300, 100], [100, 900]] {
        let (_fixture, running, log) = open();
        let mut floods = [0, 1].map(|disk| {
            running.disks[disk].set_weight(weights[disk]);
            Flood::of(&running, disk)
        });
        // Before the copy, both take what they get; then what they use is counted.
        let mut before = [0, 0];
        copy(&log, |done| {
            if done == WORK / 4 {
                before = [floods[0].ended, floods[1].ended];
            }
            for _ in 0..STEPS {
                floods.iter_mut().for_each(Flood::step);
                step(&running);
            }
        });
        let [one, two] = [0, 1].map(|disk| (floods[disk].ended - before[disk]) as f64);
        let expected = f64::from(weights[0]) / f64::from(weights[1]);
        let ratio = one / two;
        assert!(
            (expected * 0.8..expected * 1.25).contains(&ratio),
            "{weights:?}: {one} and {two} writes"
        );
    }
}
