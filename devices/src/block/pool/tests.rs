use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::block::seat::QueueControl;

/// The calls that each queue has got, in order.
#[derive(Clone, Default)]
struct Diary(Arc<Mutex<Vec<(&'static str, char)>>>);

impl Diary {
    fn wait_for(&self, note: (&'static str, char)) {
        while !self.0.lock().unwrap().contains(&note) {
            thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// A queue that records its calls, and waits or panics in them if a test wants it.
struct Noted {
    name: char,
    control: Arc<QueueControl>,
    fds: [OwnedFd; 3],
    diary: Diary,
    gate: Arc<Mutex<Option<mpsc::Receiver<()>>>>,
    panic_at_the_bell: Arc<AtomicBool>,
}

impl Noted {
    fn note(&self, what: &'static str) {
        self.diary.0.lock().unwrap().push((what, self.name));
    }
}

impl Served for Noted {
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

    fn rung(&mut self) {
        assert!(!self.panic_at_the_bell.load(Ordering::SeqCst));
        rustix::io::read(&self.fds[0], &mut [0; 8]).unwrap();
        self.note("rung");
    }

    fn release(&mut self) {
        self.note("release");
    }

    fn take(&mut self) {
        self.note("take");
        let gate = self.gate.lock().unwrap().take();
        // A test that drops the other end wants a panic.
        gate.iter().for_each(|gate| gate.recv().unwrap());
    }

    fn start(&mut self, _alone: bool) {
        self.note("start");
    }

    fn answer(&mut self) -> bool {
        self.note("answer");
        false
    }

    fn waits(&self) -> bool {
        false
    }

    fn taken(&self) -> u16 {
        7
    }

    fn give_up(&mut self, _reason: &str) {
        self.note("give up");
    }
}

/// A queue that is served, and its driver's side.
struct Queue {
    worker: Worker,
    doorbell: OwnedFd,
    gate: Arc<Mutex<Option<mpsc::Receiver<()>>>>,
    panic_at_the_bell: Arc<AtomicBool>,
}

impl Queue {
    fn new(pool: &Arc<WorkerPool>, name: char, diary: &Diary) -> Self {
        Self::start(pool, None, name, diary)
    }

    fn start(pool: &Arc<WorkerPool>, alone: Option<Alone>, name: char, diary: &Diary) -> Self {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fds = [(); 3].map(|()| eventfd(0, flags).unwrap());
        let doorbell = fds[0].try_clone().unwrap();
        let (gate, panic_at_the_bell) = (Arc::default(), Arc::default());
        let noted = Noted {
            name,
            control: Arc::default(),
            fds,
            diary: diary.clone(),
            gate: Arc::clone(&gate),
            panic_at_the_bell: Arc::clone(&panic_at_the_bell),
        };
        let worker = pool.serve(alone, move || Ok(Box::new(noted))).unwrap();
        // The worker's first look at the ring.
        diary.wait_for(("answer", name));
        diary.0.lock().unwrap().clear();
        Self {
            worker,
            doorbell,
            gate,
            panic_at_the_bell,
        }
    }

    fn inbox(&self) -> &Arc<Inbox> {
        &self.worker.queue.as_ref().unwrap().1
    }

    fn ring(&self) {
        rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Makes its thread wait in the next turn until the sender sends; a dropped sender makes it panic.
    fn hold_up(&self) -> mpsc::Sender<()> {
        let (opens, gate) = mpsc::channel();
        *self.gate.lock().unwrap() = Some(gate);
        self.ring();
        opens
    }
}

/// Three queues at one thread, whatever the number of processors.
fn three() -> (Arc<WorkerPool>, Diary, [Queue; 3]) {
    let pool = Arc::new(WorkerPool {
        most: 1,
        ..WorkerPool::default()
    });
    let diary = Diary::default();
    let queues = ['a', 'b', 'c'].map(|name| Queue::new(&pool, name, &diary));
    for queue in &queues[1..] {
        assert!(Arc::ptr_eq(queues[0].inbox(), queue.inbox()));
    }
    (pool, diary, queues)
}

#[test]
fn all_queues_that_rang_are_taken_from_before_any_is_answered() {
    let (_pool, diary, [first, second, third]) = three();
    let opens = first.hold_up();
    diary.wait_for(("take", 'a'));
    second.ring();
    third.ring();
    opens.send(()).unwrap();
    diary.wait_for(("answer", 'c'));
    let notes = diary.0.lock().unwrap().clone();
    let [a, b, c] = ['a', 'b', 'c'];
    let alone = [("rung", a), ("take", a), ("start", a), ("answer", a)];
    let rung = [("rung", b), ("rung", c), ("take", b), ("take", c)];
    let then = [("start", b), ("start", c), ("answer", b), ("answer", c)];
    assert_eq!(notes, [alone, rung, then].concat());
    assert_eq!(
        [first, second, third].map(|queue| queue.worker.drain()),
        [Some(7); 3]
    );
}

#[test]
fn a_queue_that_panics_is_lost_alone() {
    let (_pool, diary, [first, second, third]) = three();
    drop(second.hold_up());
    diary.wait_for(("give up", 'b'));
    assert_eq!(second.worker.drain(), Some(7));
    diary.0.lock().unwrap().clear();
    for (queue, name) in [(&first, 'a'), (&third, 'c')] {
        queue.ring();
        diary.wait_for(("answer", name));
        assert!(!queue.worker.finished());
    }
}

#[test]
fn a_thread_ends_with_its_last_queue_and_another_takes_its_place() {
    let (pool, diary) = (Arc::new(WorkerPool::default()), Diary::default());
    let first = Queue::new(&pool, 'a', &diary);
    first.worker.drain();
    while !first.inbox().closed() {
        thread::yield_now();
    }
    let second = Queue::new(&pool, 'b', &diary);
    assert!(!Arc::ptr_eq(first.inbox(), second.inbox()));
    assert_eq!(pool.shared.lock().unwrap().len(), 1);
    second.ring();
    diary.wait_for(("answer", 'b'));
}

#[test]
fn a_thread_ends_when_its_only_queue_panics() {
    let (pool, diary) = (Arc::new(WorkerPool::default()), Diary::default());
    let alone = Alone {
        name: "alone".into(),
        cpu: None,
    };
    let queue = Queue::start(&pool, Some(alone), 'a', &diary);
    drop(queue.hold_up());
    diary.wait_for(("give up", 'a'));
    while !queue.inbox().closed() {
        thread::yield_now();
    }
    assert_eq!(queue.worker.drain(), Some(7));
}

/// The messages that a thread gets in the turn in which one of its queues panics still reach the other queues.
#[test]
fn a_queue_is_stopped_although_another_panics_in_the_same_turn() {
    let (_pool, diary, [first, second, third]) = three();
    let opens = first.hold_up();
    diary.wait_for(("take", 'a'));
    second.panic_at_the_bell.store(true, Ordering::SeqCst);
    second.ring();
    third.worker.request_stop();
    opens.send(()).unwrap();
    assert_eq!(third.worker.drain(), Some(7));
    assert_eq!(second.worker.drain(), Some(7));
    first.ring();
    diary.wait_for(("answer", 'a'));
}
