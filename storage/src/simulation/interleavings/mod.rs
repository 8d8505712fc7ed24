//! The commit protocol under a scheduler that decides every switch between threads.
//!
//! Each *run* follows from one seed: a plan (who submits what on which disk, whether and where
//! power is lost, a sync or write-back fails, a port leaves or a thread ends with requests in
//! flight, the store closes early) and a schedule. Threads, locks and events are those of `shuttle`
//! ([`crate::sync`]), which reports a run in which every thread waits. It assumes sequential
//! consistency. The judge sees only requests and their ends, so it can judge any protocol:
//!
//! - every request of a port that stays ends exactly once;
//! - data that a successful FLUSH covers survives a power cut at the very moment the FLUSH
//!   completes;
//! - where writes complete once they are written, they survive a kill at the very moment they
//!   complete;
//! - the data that survives is a prefix: no request survives that was submitted after the end of a
//!   lost one;
//! - a request fails only if the medium failed or the store was closed. Once the log itself has
//!   failed, every later FLUSH and WRITE fails (if only room can't be made, requests that need none
//!   succeed);
//! - a clean close, with or without ports still at work, leaves everything in the base images;
//! - a port that is not polled holds up no other: the others' requests end while it stands still.

mod judge;
mod looks;
mod plan;

use std::panic::{AssertUnwindSafe, catch_unwind};

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use walvisor_testkit::Seeds;

use self::judge::Judge;
use self::plan::{OWN, Plan, Step};
use super::fixture::{Fixture, Shape};
use super::oracle::Violation;
use super::{Total, killers, run_all};
use crate::log::state::Log;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Condvar, Mutex, thread};
use crate::{BackendQueue, CommitWait, Port, Store};

/// Counters of runs, which show whether they tried what they should.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    runs: u64,
    requests: u64,
    flushes: u64,
    failures: u64,
    left_unanswered: u64,
    power_cuts: u64,
    kills: u64,
    failed_syncs: u64,
    groups_shared: u64,
    led_alone: u64,
    stalled: u64,
    died: u64,
}

impl Total for Totals {
    fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.requests += other.requests;
        self.flushes += other.flushes;
        self.failures += other.failures;
        self.left_unanswered += other.left_unanswered;
        self.power_cuts += other.power_cuts;
        self.kills += other.kills;
        self.failed_syncs += other.failed_syncs;
        self.groups_shared += other.groups_shared;
        self.led_alone += other.led_alone;
        self.stalled += other.stalled;
        self.died += other.died;
    }
}

type SharedJudge = Arc<std::sync::Mutex<Judge>>;

fn with_judge<T>(judge: &SharedJudge, call: impl FnOnce(&mut Judge) -> T) -> T {
    call(&mut judge.lock().expect("no switch happens under this lock"))
}

/// Starts what was submitted. `alone`: the thread runs quick syncs itself.
fn start(port: &mut Port, judge: &SharedJudge, alone: bool) {
    let led = port.start(alone);
    with_judge(judge, |judge| judge.led_alone += u64::from(led));
}

/// Takes the requests that have ended; returns whether nothing is left to wait for.
fn serve(
    port: &mut Port,
    judge: &SharedJudge,
    fixture: &Fixture,
    log: &Log,
    mine: &mut Vec<u64>,
    alone: bool,
) -> bool {
    let mut done = Vec::new();
    let mut asked = true;
    while std::mem::take(&mut asked) {
        start(port, judge, alone);
        port.completions(&mut done);
        done.retain(|end| {
            let asks = end.result.is_ok() && with_judge(judge, |judge| judge.asks(end.token));
            let waits = asks && !port.notify_written(end.token);
            asked |= waits;
            !waits
        });
    }
    for completion in done {
        let good = {
            let world = fixture.medium.lock();
            !world.crashed && !world.failed
        };
        mine.retain(|&token| token != completion.token);
        let failed = log.poisoned.load(Ordering::Relaxed);
        if with_judge(judge, |judge| judge.end(completion, good, failed)) {
            fixture.medium.lock().cut_power();
        }
    }
    mine.is_empty() || fixture.medium.lock().crashed
}

/// How many clients that never stall are still active.
#[derive(Default)]
struct ActiveClients {
    count: Mutex<usize>,
    ended: Condvar,
}

impl ActiveClients {
    fn end_one(&self) {
        *self.count.lock().expect("at work") -= 1;
        self.ended.notify_all();
    }

    fn wait(&self) {
        let count = self.count.lock().expect("at work");
        drop(self.ended.wait_while(count, |count| *count > 0));
    }
}

fn work(
    mut port: Port,
    which: usize,
    judge: &SharedJudge,
    fixture: &Fixture,
    log: &Log,
    others: &ActiveClients,
) {
    let plan = with_judge(judge, |judge| judge.plan.clients[which].clone());
    let mut mine = Vec::new();
    let wait = |port: &mut Port, mine: &mut Vec<u64>| {
        while !serve(port, judge, fixture, log, mine, plan.alone) {
            port.sleep_for_test();
        }
    };
    let mut died = false;
    for (at, &step) in plan.steps.iter().enumerate() {
        died = plan.dies.is_some_and(|from| at >= from) && !mine.is_empty();
        if died {
            start(&mut port, judge, plan.alone);
            with_judge(judge, |judge| judge.died += 1);
            break;
        }
        match with_judge(judge, |judge| judge.submit(which, step)) {
            Some((token, operation)) => {
                mine.push(token);
                port.submit(token, operation);
            }
            None if plan.stalls => start(&mut port, judge, plan.alone),
            None if matches!(step, Step::Wait) => wait(&mut port, &mut mine),
            None => {
                serve(&mut port, judge, fixture, log, &mut mine, plan.alone);
            }
        }
    }
    if plan.stalls && !died {
        start(&mut port, judge, plan.alone);
        others.wait();
        with_judge(judge, |judge| judge.stalled += u64::from(!mine.is_empty()));
    }
    if !plan.leaves && !died {
        wait(&mut port, &mut mine);
    }
    drop(port);
    if !plan.stalls {
        others.end_one();
    }
}

/// One run: everything from opening the log to judging what is left.
fn run(seed: u64) -> Result<Totals, Violation> {
    let plan = Plan::new(seed);
    let shape = Shape {
        disks: plan.disks,
        sectors: OWN * plan.clients.len() as u64,
        segment_size: 64 << 10,
        max_segments: 4,
    };
    let mut world = plan.world.clone();
    // Opening a new log fails in other tests.
    let (ticks, fail_sync) = (world.ticks.take(), world.fail_sync.take());
    let fail_write_back = world.fail_write_back.take();
    let fixture = Arc::new(Fixture::new(world, shape));
    let running = fixture
        .open(plan.through, plan.commit_wait)
        .expect("opening a new log");
    {
        let mut world = fixture.medium.lock();
        (world.ticks, world.fail_sync) = (ticks, fail_sync);
        world.fail_write_back = fail_write_back;
    }
    let log = running.disks[0].log.clone();
    let store = Store::start(log.clone(), running.disks, running.keeper).expect("a thread");
    let judge: SharedJudge = Arc::new(std::sync::Mutex::new(Judge::new(plan.clone())));
    let others = Arc::new(ActiveClients::default());
    *others.count.lock().expect("at work") =
        plan.clients.iter().filter(|client| !client.stalls).count();
    let clients: Vec<_> = (0..plan.clients.len())
        .map(|which| {
            let port = store.disks()[plan.clients[which].disk]
                .open_port()
                .expect("a port");
            let (judge, fixture, log) = (judge.clone(), fixture.clone(), log.clone());
            let others = others.clone();
            thread::spawn(move || work(port, which, &judge, &fixture, &log, &others))
        })
        .collect();
    let join = |clients: Vec<thread::JoinHandle<()>>| {
        clients
            .into_iter()
            .for_each(|client| client.join().expect("a client"));
    };
    let closed = if plan.closes_early {
        with_judge(&judge, |judge| judge.closing = true);
        let closed = store.close();
        join(clients);
        closed
    } else {
        join(clients);
        store.close()
    };
    let (cut, failed) = {
        let world = fixture.medium.lock();
        (world.crashed, world.failed)
    };
    if let Err(error) = &closed
        && !cut
        && !failed
    {
        return Err(format!("closing a good log failed: {error}"));
    }
    if closed.is_ok() {
        with_judge(&judge, |judge| judge.judge(&fixture.bases(), true))?;
    }
    // A failed sync may drop the bytes it should have written from the cache.
    let killed = with_judge(&judge, |judge| {
        judge.killed &= !failed;
        judge.killed
    });
    if killed {
        fixture.medium.lock().restart()
    } else {
        fixture.lose_power()
    }
    let running = fixture
        .open(false, CommitWait::NONE)
        .map_err(|error| format!("recovery refused: {error}"))?;
    let found = running
        .read()
        .map_err(|failure| format!("reading: {failure}"))?;
    with_judge(&judge, |judge| match judge.broken.take() {
        Some(broken) => Err(broken),
        None => judge.judge(&found, false),
    })?;
    Ok(with_judge(&judge, |judge| Totals {
        runs: 1,
        requests: judge.next_token,
        flushes: judge.flushes,
        failures: judge.failures,
        left_unanswered: judge.unanswered(),
        power_cuts: (cut && !judge.killed).into(),
        kills: judge.killed.into(),
        failed_syncs: failed.into(),
        led_alone: judge.led_alone,
        stalled: judge.stalled,
        died: judge.died,
        groups_shared: log.counters.snapshot().group_sizes[1..].iter().sum(),
    }))
}

/// How the schedule of a run is chosen.
#[derive(Clone, Copy, Debug)]
enum ScheduleChoice {
    /// At random at each switch.
    Random,
    /// Few switches, at random places (probabilistic concurrency testing).
    FewSwitches,
}

/// The prefix of an error that is a panic.
const PANICKED: &str = "panicked: ";

/// The messages of shuttle's panics when all threads wait, or some run forever.
const ENDLESS: [&str; 2] = ["deadlock!", "exceeded max_steps bound"];

/// The stack of each thread. One that is too small ends the process without a word, and what is
/// never touched costs no memory: four times of what `schedules_take_a_quarter_of_the_stack` has.
const STACK: usize = 1 << 20;

/// Runs one seed.
fn explore<T: Total + Clone + 'static>(
    choice: ScheduleChoice,
    seed: u64,
    run: fn(u64) -> Result<T, Violation>,
) -> Result<T, Violation> {
    explore_on(STACK, choice, seed, run)
}

fn explore_on<T: Total + Clone + 'static>(
    stack: usize,
    choice: ScheduleChoice,
    seed: u64,
    run: fn(u64) -> Result<T, Violation>,
) -> Result<T, Violation> {
    let mut config = Config::new();
    config.stack_size = stack;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(500_000);
    config.silence_warnings = true;
    config
        .ungraceful_shutdown_config
        .immediately_return_on_panic = true;
    let outcome = std::sync::Arc::new(std::sync::Mutex::new(Ok(T::default())));
    let into = outcome.clone();
    let once = move || {
        let ran = run(seed);
        let mut outcome = into.lock().expect("one thread");
        match (&mut *outcome, ran) {
            (Ok(totals), Ok(more)) => totals.add(&more),
            (Ok(_), broken) => *outcome = broken,
            (Err(_), _) => {}
        }
    };
    fn drive<S: Scheduler + 'static>(
        scheduler: S,
        config: Config,
        f: impl Fn() + Send + Sync + 'static,
    ) {
        Runner::new(scheduler, config).run(f);
    }
    let ran = catch_unwind(AssertUnwindSafe(|| match choice {
        ScheduleChoice::Random => drive(RandomScheduler::new_from_seed(seed, 1), config, once),
        // The first run only measures the length.
        ScheduleChoice::FewSwitches => drive(PctScheduler::new_from_seed(seed, 3, 3), config, once),
    }));
    let outcome = outcome.lock().expect("one thread").clone();
    match ran {
        Ok(()) => outcome,
        // A broken promise is reported first: the panic may follow from it.
        Err(panic) => outcome.and_then(|_| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            Err(format!("{PANICKED}{}", text.unwrap_or_default()))
        }),
    }
}

fn explore_all(name: &'static str, choice: ScheduleChoice) {
    let seeds = Seeds::of(name, "WALVISOR_INTERLEAVINGS", 400, 400);
    let all: Totals = run_all(&seeds, |seed| {
        explore(choice, seed, run).map_err(|broken| format!("{broken}\n{:?}", Plan::new(seed)))
    });
    if all.runs >= 400 {
        let tried = [
            all.flushes,
            all.failures,
            all.left_unanswered,
            all.power_cuts,
            all.kills,
            all.failed_syncs,
            all.groups_shared,
            all.led_alone,
            all.stalled,
            all.died,
        ];
        assert!(
            tried.iter().all(|&count| count > all.runs / 40),
            "too little tried"
        );
    }
}

/// `WALVISOR_SEED=N` replays one run; `WALVISOR_INTERLEAVINGS=N` runs more or fewer; with both, N
/// runs from that seed on.
#[test]
fn random_schedules_keep_the_promises() {
    explore_all("random_schedules_keep_the_promises", ScheduleChoice::Random);
}

/// The same plans with few switches.
#[test]
fn schedules_of_few_switches_keep_the_promises() {
    let name = "schedules_of_few_switches_keep_the_promises";
    explore_all(name, ScheduleChoice::FewSwitches);
}

#[test]
fn schedules_take_a_quarter_of_the_stack() {
    for seed in 0..50 {
        for choice in [ScheduleChoice::Random, ScheduleChoice::FewSwitches] {
            explore_on(STACK / 4, choice, seed, run).unwrap();
        }
    }
}

/// Each planted fault makes some run wait forever or break a promise.
#[test]
fn every_planted_fault_of_the_protocol_is_noticed_in_interleavings() {
    killers::INTERLEAVINGS.assert_all(|seed| {
        let choices = [ScheduleChoice::Random, ScheduleChoice::FewSwitches];
        choices.into_iter().find_map(|choice| {
            let broken = explore(choice, seed, run).err()?;
            // Shuttle notices a thread that waits forever, and panics. No other panic counts.
            let counts =
                !broken.starts_with(PANICKED) || ENDLESS.iter().any(|panic| broken.contains(panic));
            counts.then(|| format!("{choice:?}: {broken}"))
        })
    });
}
