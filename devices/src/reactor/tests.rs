use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};

use rustix::event::{EventfdFlags, eventfd};
use walvisor_testkit::wait_until;

use super::*;
use crate::throttle::Limits;

/// The calls of all sources, in order.
#[derive(Clone, Default)]
struct CallLog(Arc<Mutex<Vec<(&'static str, char)>>>);

impl CallLog {
    fn wait_for(&self, note: (&'static str, char)) {
        wait_until("a call", || self.0.lock().unwrap().contains(&note));
    }
}

/// A source that logs its calls, and waits or panics in them if a test asks for it.
struct LoggedSource {
    name: char,
    throttle: Arc<Throttle>,
    bell: OwnedFd,
    log: CallLog,
    gate: Arc<Mutex<Option<mpsc::Receiver<()>>>>,
    panic_when_ready: Arc<AtomicBool>,
}

impl LoggedSource {
    fn note(&self, what: &'static str) {
        self.log.0.lock().unwrap().push((what, self.name));
    }
}

impl Source for LoggedSource {
    fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        turn.watch(self.bell.as_fd(), FIRST_OWN_EVENT, EventSet::IN)
    }

    fn ready(&mut self, event: usize, what: EventSet, _: bool) {
        assert!(!self.panic_when_ready.load(Ordering::SeqCst));
        assert_eq!((event, what), (FIRST_OWN_EVENT, EventSet::IN));
        rustix::io::read(&self.bell, &mut [0; 8]).unwrap();
        self.note("ready");
    }

    fn take(&mut self, _: &mut Turn<'_>) {
        self.note("take");
        let gate = self.gate.lock().unwrap().take();
        // Panics if the test has dropped the other end.
        gate.iter().for_each(|gate| gate.recv().unwrap());
    }

    fn kick(&mut self, _alone: bool) {
        self.note("kick");
    }

    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep {
        self.note("answer");
        if turn.is_stopping() {
            NextStep::End
        } else {
            NextStep::Wait
        }
    }

    fn has_in_flight(&self) -> bool {
        false
    }

    fn bytes_in_flight(&self) -> usize {
        0
    }

    fn give_up(&mut self, _reason: &str) {
        self.note("give up");
    }
}

/// A running source, and its client's side.
struct TestSource {
    handle: SourceHandle,
    bell: OwnedFd,
    gate: Arc<Mutex<Option<mpsc::Receiver<()>>>>,
    panic_when_ready: Arc<AtomicBool>,
}

impl TestSource {
    fn start(
        pool: &ReactorPool,
        dedicated: Option<DedicatedThread>,
        name: char,
        log: &CallLog,
    ) -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags).unwrap();
        let (gate, panic_when_ready) = (Arc::default(), Arc::default());
        let source = LoggedSource {
            name,
            throttle: Arc::default(),
            bell: bell.try_clone().unwrap(),
            log: log.clone(),
            gate: Arc::clone(&gate),
            panic_when_ready: Arc::clone(&panic_when_ready),
        };
        let handle = pool.reserve(dedicated).unwrap().serve(Box::new(source));
        // Its first turn.
        log.wait_for(("answer", name));
        log.0.lock().unwrap().clear();
        Self {
            handle,
            bell,
            gate,
            panic_when_ready,
        }
    }

    fn ring(&self) {
        rustix::io::write(&self.bell, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Makes the source's thread wait in its next turn for a message of the sender; a dropped
    /// sender makes it panic.
    fn hold_up(&self) -> mpsc::Sender<()> {
        let (opens, gate) = mpsc::channel();
        *self.gate.lock().unwrap() = Some(gate);
        self.ring();
        opens
    }

    fn stop(&self) {
        self.handle.request_stop();
        self.handle.wait_until_gone();
    }
}

/// Three sources of one thread, whatever the number of processors.
fn three() -> (CallLog, [TestSource; 3]) {
    let pool = ReactorPool::with_threads("test", 1);
    let log = CallLog::default();
    let sources = ['a', 'b', 'c'].map(|name| TestSource::start(&pool, None, name, &log));
    (log, sources)
}

#[test]
fn every_source_that_is_ready_is_taken_from_before_any_is_answered() {
    let (log, [first, second, third]) = three();
    let opens = first.hold_up();
    log.wait_for(("take", 'a'));
    second.ring();
    third.ring();
    opens.send(()).unwrap();
    log.wait_for(("answer", 'c'));
    let notes = log.0.lock().unwrap().clone();
    let [a, b, c] = ['a', 'b', 'c'];
    let alone = [("ready", a), ("take", a), ("kick", a), ("answer", a)];
    let take = [("ready", b), ("ready", c), ("take", b), ("take", c)];
    let answer = [("kick", b), ("kick", c), ("answer", b), ("answer", c)];
    assert_eq!(notes, [alone, take, answer].concat());
    [first, second, third].iter().for_each(TestSource::stop);
}

#[test]
fn a_source_that_panics_takes_no_other_source_with_it() {
    let (log, [first, second, third]) = three();
    drop(second.hold_up());
    log.wait_for(("give up", 'b'));
    second.handle.wait_until_gone();
    log.0.lock().unwrap().clear();
    for (source, name) in [(&first, 'a'), (&third, 'c')] {
        source.ring();
        log.wait_for(("answer", name));
        assert!(!source.handle.is_gone());
    }
}

#[test]
fn a_thread_ends_with_its_last_source_and_another_takes_its_place() {
    let (pool, log) = (ReactorPool::with_threads("test", 1), CallLog::default());
    let first = TestSource::start(&pool, None, 'a', &log);
    first.stop();
    let second = TestSource::start(&pool, None, 'b', &log);
    second.ring();
    log.wait_for(("answer", 'b'));
    assert!(first.handle.is_gone() && !second.handle.is_gone());
}

#[test]
fn a_source_of_its_own_thread_may_panic() {
    let (pool, log) = (ReactorPool::with_threads("test", 1), CallLog::default());
    let alone = DedicatedThread {
        name: "alone".into(),
        cpu: None,
    };
    let source = TestSource::start(&pool, Some(alone), 'a', &log);
    drop(source.hold_up());
    log.wait_for(("give up", 'a'));
    source.stop();
}

/// What happens in a turn in which one source panics still reaches the others.
#[test]
fn a_source_is_stopped_although_another_panics_in_the_same_turn() {
    let (log, [first, second, third]) = three();
    let opens = first.hold_up();
    log.wait_for(("take", 'a'));
    second.panic_when_ready.store(true, Ordering::SeqCst);
    second.ring();
    third.handle.request_stop();
    opens.send(()).unwrap();
    third.handle.wait_until_gone();
    second.handle.wait_until_gone();
    first.ring();
    log.wait_for(("answer", 'a'));
}

/// Bytes that sources have moved, in order.
type Moves = Arc<Mutex<Vec<(char, i64)>>>;

/// A source of requests that a test's functions take and answer.
struct Flow<T, A> {
    throttle: Arc<Throttle>,
    take: T,
    answer: A,
    in_flight: Arc<Mutex<usize>>,
}

impl<T, A> Source for Flow<T, A>
where
    T: FnMut(&mut Turn<'_>) + Send,
    A: FnMut(&mut Turn<'_>) -> NextStep + Send,
{
    fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    fn begin(&mut self, _: &mut Turn<'_>) -> io::Result<()> {
        Ok(())
    }

    fn ready(&mut self, _: usize, _: EventSet, _: bool) {}

    fn take(&mut self, turn: &mut Turn<'_>) {
        (self.take)(turn);
    }

    fn kick(&mut self, _: bool) {}

    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep {
        (self.answer)(turn)
    }

    fn has_in_flight(&self) -> bool {
        true
    }

    fn bytes_in_flight(&self) -> usize {
        *self.in_flight.lock().unwrap()
    }

    fn give_up(&mut self, _: &str) {}
}

/// A reactor in this thread that asks disks with these weights. Each has so many sources of
/// requests of so many bytes.
fn flooded(disks: &[(char, u16, usize, i64, usize)]) -> (Reactor, Moves) {
    let (inbox, events) = pool::inbox_for_test();
    let mut reactor = Reactor::new(events, Arc::clone(&inbox));
    // Bytes alone count, so that the test does not depend on the machine.
    reactor.us_cost = 0;
    let moves = Moves::default();
    for &(name, weight, sources, request, most) in disks {
        let throttle = Arc::<Throttle>::default();
        throttle.set(Limits {
            weight,
            ..Limits::default()
        });
        for _ in 0..sources {
            let moves = Arc::clone(&moves);
            // It always has requests, at most `most` in a turn, and answers as much.
            let step = move |turn: &mut Turn<'_>| {
                for _ in 0..most {
                    if turn.is_over() {
                        return;
                    }
                    turn.charge_request(request as usize);
                    moves.lock().unwrap().push((name, request));
                }
            };
            let take = step.clone();
            let flood = Flow {
                throttle: Arc::clone(&throttle),
                take,
                answer: move |turn: &mut Turn<'_>| {
                    step(turn);
                    NextStep::Work
                },
                in_flight: Arc::default(),
            };
            inbox.reserve().unwrap().serve(Box::new(flood));
        }
    }
    reactor.look().unwrap();
    (reactor, moves)
}

/// Bytes moved by each disk in so many rounds.
fn moved(reactor: &mut Reactor, moves: &Moves, rounds: usize) -> HashMap<char, i64> {
    (0..rounds).for_each(|_| reactor.serve_round());
    let mut sums = HashMap::new();
    for (name, bytes) in moves.lock().unwrap().drain(..) {
        *sums.entry(name).or_default() += bytes;
    }
    sums
}

#[test]
fn between_two_turns_of_a_disk_others_move_little() {
    // A victim of small requests, beside one disk with four queues full of long ones, and one with
    // many small ones.
    let (mut reactor, moves) = flooded(&[
        ('v', 0, 1, 4096, 1),
        ('a', 0, 4, 1 << 20, 32),
        ('b', 0, 1, 4096, 1 << 20),
    ]);
    (0..1000).for_each(|_| reactor.serve_round());
    let moves = moves.lock().unwrap();
    let turns: Vec<_> = moves.split(|(name, _)| *name == 'v').collect();
    assert!(turns.len() > 300, "{} turns", turns.len());
    for others in turns {
        for disk in ['a', 'b'] {
            let bytes = others.iter().filter(|(name, _)| *name == disk);
            let bytes: i64 = bytes.map(|(_, bytes)| bytes).sum();
            // Requests taken and requests answered, each a quantum and one request.
            assert!(bytes <= 4 * QUANTUM, "{disk}: {bytes} bytes");
        }
    }
}

#[test]
fn disks_share_by_weight_however_many_sources_they_have() {
    let request = 64 << 10;
    let (mut reactor, moves) = flooded(&[('a', 100, 4, request, 99), ('b', 0, 1, request, 99)]);
    let sums = moved(&mut reactor, &moves, 1000);
    let ratio = sums[&'a'] as f64 / sums[&'b'] as f64;
    assert!((0.9..1.1).contains(&ratio), "{sums:?}");
    for (weight, least, most) in [(300, 2.7, 3.3), (1000, 9.0, 11.0), (1, 0.009, 0.011)] {
        let disks = [('a', weight, 2, request, 99), ('b', 0, 1, request, 99)];
        let (mut reactor, moves) = flooded(&disks);
        let sums = moved(&mut reactor, &moves, 20_000);
        let ratio = sums[&'a'] as f64 / sums[&'b'] as f64;
        assert!((least..most).contains(&ratio), "{weight}: {sums:?}");
    }
}

#[test]
fn beside_another_disk_little_is_in_flight_and_room_lets_blocked_sources_go_on() {
    let (mut reactor, _) = flooded(&[('v', 0, 1, 4096, 1)]);
    // However slow the machine is, the other disk had work a moment ago.
    reactor.lately = Duration::MAX;
    let in_flight = Arc::new(Mutex::new(0));
    let reservation = reactor.inbox.reserve().unwrap();
    // It takes requests of 64 KiB and never ends one.
    let held = Arc::clone(&in_flight);
    let take = move |turn: &mut Turn<'_>| {
        while !turn.is_over() {
            turn.charge_request(64 << 10);
            turn.take_room(64 << 10);
            *held.lock().unwrap() += 64 << 10;
        }
    };
    reservation.serve(Box::new(Flow {
        throttle: Arc::default(),
        take,
        answer: |_: &mut Turn<'_>| NextStep::Take,
        in_flight: Arc::clone(&in_flight),
    }));
    reactor.look().unwrap();
    (0..20).for_each(|_| reactor.serve_round());
    let most = WINDOW as usize + (64 << 10);
    assert!((WINDOW as usize..=most).contains(&in_flight.lock().unwrap()));
    let key = reactor
        .disks
        .iter()
        .find(|(_, disk)| !disk.blocked.is_empty());
    let (key, _) = key.expect("the source is blocked");
    // A request ends: its completion gives a source of the disk a turn.
    *in_flight.lock().unwrap() -= 128 << 10;
    reactor.unblock(key);
    (0..20).for_each(|_| reactor.serve_round());
    assert!(*in_flight.lock().unwrap() >= WINDOW as usize);
}

#[test]
fn sources_of_a_disk_share_the_room_that_it_has_beside_another() {
    let (mut reactor, _) = flooded(&[('v', 0, 1, 4096, 1)]);
    reactor.lately = Duration::MAX;
    let throttle = Arc::<Throttle>::default();
    let ended = [(); 4].map(|()| Arc::<Mutex<usize>>::default());
    for ended in &ended {
        let reservation = reactor.inbox.reserve().unwrap();
        // It has a request of WINDOW bytes after the other, each of which ends in the round that
        // begins it.
        let in_flight = Arc::<Mutex<usize>>::default();
        let (taken, ended) = (Arc::clone(&in_flight), Arc::clone(ended));
        let take = {
            let taken = Arc::clone(&taken);
            move |turn: &mut Turn<'_>| {
                if !turn.is_over() {
                    assert_eq!(turn.part(), WINDOW as usize);
                    turn.charge_request(WINDOW as usize);
                    turn.take_room(WINDOW as usize);
                    *taken.lock().unwrap() = WINDOW as usize;
                }
            }
        };
        let answer = move |_: &mut Turn<'_>| {
            let bytes = std::mem::take(&mut *taken.lock().unwrap());
            *ended.lock().unwrap() += bytes / WINDOW as usize;
            NextStep::Take
        };
        reservation.serve(Box::new(Flow {
            throttle: Arc::clone(&throttle),
            take,
            answer,
            in_flight,
        }));
    }
    reactor.look().unwrap();
    // In the first of these rounds the reactor does not know of the other disk.
    (0..400).for_each(|_| reactor.serve_round());
    let ended = ended.map(|ended| *ended.lock().unwrap());
    let (least, most) = (ended.iter().min().unwrap(), ended.iter().max().unwrap());
    assert!(*least > 20 && most - least <= 2, "{ended:?}");
}
