use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::block::queue_slot::QueueControl;

/// The calls of all queues, in order.
#[derive(Clone, Default)]
struct CallLog(Arc<Mutex<Vec<(&'static str, char)>>>);

impl CallLog {
    fn wait_for(&self, note: (&'static str, char)) {
        while !self.0.lock().unwrap().contains(&note) {
            thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// A queue that logs its calls, and waits or panics in them if a test asks for it.
struct LoggedQueue {
    name: char,
    control: Arc<QueueControl>,
    fds: [OwnedFd; 3],
    log: CallLog,
    gate: Arc<Mutex<Option<mpsc::Receiver<()>>>>,
    panic_at_doorbell: Arc<AtomicBool>,
}

impl LoggedQueue {
    fn note(&self, what: &'static str) {
        self.log.0.lock().unwrap().push((what, self.name));
    }
}

impl PooledQueue for LoggedQueue {
    fn control(&self) -> Arc<QueueControl> {
        Arc::clone(&self.control)
    }

    fn doorbell(&self) -> BorrowedFd<'_> {
        self.fds[0].as_fd()
    }

    fn backend(&self) -> BorrowedFd<'_> {
        self.fds[1].as_fd()
    }

    fn timer(&self) -> BorrowedFd<'_> {
        self.fds[2].as_fd()
    }

    fn acknowledge_doorbell(&mut self) {
        assert!(!self.panic_at_doorbell.load(Ordering::SeqCst));
        rustix::io::read(&self.fds[0], &mut [0; 8]).unwrap();
        self.note("doorbell");
    }

    fn release(&mut self) {
        self.note("release");
    }

    fn take_chains(&mut self) {
        self.note("take");
        let gate = self.gate.lock().unwrap().take();
        // Panics if the test has dropped the other end.
        gate.iter().for_each(|gate| gate.recv().unwrap());
    }

    fn submit(&mut self, _alone: bool) {
        self.note("submit");
    }

    fn answer(&mut self) -> bool {
        self.note("answer");
        false
    }

    fn has_in_flight(&self) -> bool {
        false
    }

    fn chains_taken(&self) -> u16 {
        7
    }

    fn give_up(&mut self, _reason: &str) {
        self.note("give up");
    }
}

/// A running queue, and its driver's side.
struct TestQueue {
    worker: QueueHandle,
    doorbell: OwnedFd,
    gate: Arc<Mutex<Option<mpsc::Receiver<()>>>>,
    panic_at_doorbell: Arc<AtomicBool>,
}

impl TestQueue {
    fn new(pool: &Arc<WorkerPool>, name: char, log: &CallLog) -> Self {
        Self::start(pool, None, name, log)
    }

    fn start(
        pool: &Arc<WorkerPool>,
        dedicated: Option<DedicatedThread>,
        name: char,
        log: &CallLog,
    ) -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fds = [(); 3].map(|()| eventfd(0, flags).unwrap());
        let doorbell = fds[0].try_clone().unwrap();
        let (gate, panic_at_doorbell) = (Arc::default(), Arc::default());
        let queue = LoggedQueue {
            name,
            control: Arc::default(),
            fds,
            log: log.clone(),
            gate: Arc::clone(&gate),
            panic_at_doorbell: Arc::clone(&panic_at_doorbell),
        };
        let worker = pool.serve(dedicated, move || Ok(Box::new(queue))).unwrap();
        // The worker's first look at the ring.
        log.wait_for(("answer", name));
        log.0.lock().unwrap().clear();
        Self {
            worker,
            doorbell,
            gate,
            panic_at_doorbell,
        }
    }

    fn inbox(&self) -> &Arc<ThreadInbox> {
        &self.worker.queue.as_ref().unwrap().1
    }

    fn ring(&self) {
        rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Makes the queue's thread wait in its next turn for a message of the sender; a dropped sender makes it panic.
    fn hold_up(&self) -> mpsc::Sender<()> {
        let (opens, gate) = mpsc::channel();
        *self.gate.lock().unwrap() = Some(gate);
        self.ring();
        opens
    }
}

/// Three queues of one thread, whatever the number of processors.
fn three() -> (Arc<WorkerPool>, CallLog, [TestQueue; 3]) {
    let pool = Arc::new(WorkerPool {
        max_shared: 1,
        ..WorkerPool::default()
    });
    let log = CallLog::default();
    let queues = ['a', 'b', 'c'].map(|name| TestQueue::new(&pool, name, &log));
    for queue in &queues[1..] {
        assert!(Arc::ptr_eq(queues[0].inbox(), queue.inbox()));
    }
    (pool, log, queues)
}

#[test]
fn every_queue_that_rang_is_taken_from_before_any_is_answered() {
    let (_pool, log, [first, second, third]) = three();
    let opens = first.hold_up();
    log.wait_for(("take", 'a'));
    second.ring();
    third.ring();
    opens.send(()).unwrap();
    log.wait_for(("answer", 'c'));
    let notes = log.0.lock().unwrap().clone();
    let [a, b, c] = ['a', 'b', 'c'];
    let alone = [("doorbell", a), ("take", a), ("submit", a), ("answer", a)];
    let take = [("doorbell", b), ("doorbell", c), ("take", b), ("take", c)];
    let answer = [("submit", b), ("submit", c), ("answer", b), ("answer", c)];
    assert_eq!(notes, [alone, take, answer].concat());
    assert_eq!(
        [first, second, third].map(|queue| queue.worker.drain()),
        [Some(7); 3]
    );
}

#[test]
fn a_queue_that_panics_takes_no_other_queue_with_it() {
    let (_pool, log, [first, second, third]) = three();
    drop(second.hold_up());
    log.wait_for(("give up", 'b'));
    assert_eq!(second.worker.drain(), Some(7));
    log.0.lock().unwrap().clear();
    for (queue, name) in [(&first, 'a'), (&third, 'c')] {
        queue.ring();
        log.wait_for(("answer", name));
        assert!(!queue.worker.is_drained());
    }
}

#[test]
fn a_thread_ends_with_its_last_queue_and_another_takes_its_place() {
    let (pool, log) = (Arc::new(WorkerPool::default()), CallLog::default());
    let first = TestQueue::new(&pool, 'a', &log);
    first.worker.drain();
    while !first.inbox().is_closed() {
        thread::yield_now();
    }
    let second = TestQueue::new(&pool, 'b', &log);
    assert!(!Arc::ptr_eq(first.inbox(), second.inbox()));
    assert_eq!(pool.shared.lock().unwrap().len(), 1);
    second.ring();
    log.wait_for(("answer", 'b'));
}

#[test]
fn a_thread_ends_when_its_only_queue_panics() {
    let (pool, log) = (Arc::new(WorkerPool::default()), CallLog::default());
    let alone = DedicatedThread {
        name: "alone".into(),
        cpu: None,
    };
    let queue = TestQueue::start(&pool, Some(alone), 'a', &log);
    drop(queue.hold_up());
    log.wait_for(("give up", 'a'));
    while !queue.inbox().is_closed() {
        thread::yield_now();
    }
    assert_eq!(queue.worker.drain(), Some(7));
}

/// Messages that arrive in a turn in which one queue panics still reach the other queues.
#[test]
fn a_queue_is_stopped_although_another_panics_in_the_same_turn() {
    let (_pool, log, [first, second, third]) = three();
    let opens = first.hold_up();
    log.wait_for(("take", 'a'));
    second.panic_at_doorbell.store(true, Ordering::SeqCst);
    second.ring();
    third.worker.request_stop();
    opens.send(()).unwrap();
    assert_eq!(third.worker.drain(), Some(7));
    assert_eq!(second.worker.drain(), Some(7));
    first.ring();
    log.wait_for(("answer", 'a'));
}
