//! Concurrent commands, in every order in which a backend may end their operations.

use walvisor_devices::backend::{Failure, Operation};
use walvisor_devices::scsi::{Status, Task, TaskStep};

use crate::driver::*;

/// A task whose operations end when the test says so.
struct SlowTask<'a> {
    task: Task,
    data: &'a Data,
    held: Vec<Operation>,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    InFlight,
    Blocked,
    Done,
}

impl<'a> SlowTask<'a> {
    fn new(bench: &Bench, cdb: &[u8], data: &'a Data) -> Self {
        Self {
            task: Task::new(&bench.unit, cdb, data),
            data,
            held: Vec::new(),
        }
    }

    fn go(&mut self, bench: &Bench) -> State {
        loop {
            match self.task.next(&bench.unit, self.data) {
                TaskStep::Submit(operation) => self.held.push(operation),
                TaskStep::InFlight => return State::InFlight,
                TaskStep::Blocked => return State::Blocked,
                TaskStep::LookUp { .. } => panic!("it asks for no extents"),
                TaskStep::Done => return State::Done,
            }
        }
    }

    /// Lets one operation end.
    fn end(&mut self, bench: &mut Bench) -> State {
        let result = bench.operate(self.held.remove(0));
        self.task.complete(&bench.unit, self.data, result);
        self.go(bench)
    }
}

/// Of two COMPARE AND WRITE of one block with the same expectation, one fails. A plain write waits
/// while one of them is between its read and its write.
#[test]
fn compare_and_write_is_one_action() {
    let mut bench = Bench::ram(1 << 20, 512);
    let swap = |seed: u64| Data::new([vec![0; 1024], pattern(seed, 1024)].concat());
    let (first, second) = (swap(1), swap(2));
    let cdb = compare_and_write(0, 4, 2);
    let mut one = SlowTask::new(&bench, &cdb, &first);
    assert_eq!(one.go(&bench), State::InFlight);
    let mut two = SlowTask::new(&bench, &cdb, &second);
    let write = Data::new(pattern(3, 512));
    let mut three = SlowTask::new(&bench, &cdb10(0x2a, 0, 5, 1), &write);
    let beside = Data::new(pattern(4, 512));
    let mut four = SlowTask::new(&bench, &cdb10(0x2a, 0, 6, 1), &beside);
    let room = Data::room(512);
    let mut read = SlowTask::new(&bench, &cdb10(0x28, 0, 4, 1), &room);
    assert_eq!(two.go(&bench), State::Blocked);
    assert_eq!(three.go(&bench), State::Blocked);
    assert_eq!(four.go(&bench), State::InFlight);
    assert_eq!(read.go(&bench), State::InFlight);
    // Read, then write.
    assert_eq!(one.end(&mut bench), State::InFlight);
    assert_eq!(two.go(&bench), State::Blocked);
    assert_eq!(one.end(&mut bench), State::Done);
    // The command is still not answered.
    assert_eq!(two.go(&bench), State::Blocked);
    assert_eq!(one.task.outcome().status, Status::Good);
    assert_eq!(
        three.go(&bench),
        State::Blocked,
        "it came behind the second"
    );
    assert_eq!(two.go(&bench), State::InFlight);
    assert_eq!(two.end(&mut bench), State::Done);
    assert_eq!(fixed(&two.task.outcome()).code, MISCOMPARE);
    assert_eq!(three.go(&bench), State::InFlight);
    assert_eq!(three.end(&mut bench), State::Done);
    assert_eq!(four.end(&mut bench), State::Done);
    assert_eq!(read.end(&mut bench), State::Done);
    assert_eq!(
        bench.read(4, 2),
        [&pattern(1, 512), &pattern(3, 512)[..]].concat()
    );
}

#[test]
fn a_write_in_flight_holds_up_a_compare_and_write() {
    let mut bench = Bench::ram(1 << 20, 512);
    let (write, swap) = (
        Data::new([1; 512]),
        Data::new([[1; 512], [2; 512]].concat()),
    );
    let list = Data::new(unmap_list(&[(100, 1), (9, 1)]));
    let mut writing = SlowTask::new(&bench, &cdb10(0x2a, 0, 7, 1), &write);
    let mut unmapping = SlowTask::new(&bench, &cdb10(0x42, 0, 0, 40), &list);
    let mut swapping = SlowTask::new(&bench, &compare_and_write(0, 7, 1), &swap);
    let mut other = SlowTask::new(&bench, &compare_and_write(0, 9, 1), &swap);
    assert_eq!(writing.go(&bench), State::InFlight);
    assert_eq!(
        (unmapping.go(&bench), unmapping.held.len()),
        (State::InFlight, 2)
    );
    assert_eq!(swapping.go(&bench), State::Blocked);
    assert_eq!(writing.end(&mut bench), State::Done);
    drop(writing);
    assert_eq!(swapping.go(&bench), State::InFlight);
    assert_eq!(other.go(&bench), State::Blocked);
    assert_eq!(unmapping.end(&mut bench), State::InFlight);
    assert_eq!(unmapping.end(&mut bench), State::Done);
    drop(unmapping);
    assert_eq!(other.go(&bench), State::InFlight);
    assert_eq!(swapping.end(&mut bench), State::InFlight);
    assert_eq!(swapping.end(&mut bench), State::Done);
    assert_eq!(other.end(&mut bench), State::Done);
    assert_eq!(fixed(&other.task.outcome()).code, MISCOMPARE);
    assert_eq!(bench.read(7, 1), [2; 512]);
}

/// A read sees all of an atomic write or nothing of it: neither starts while the other is in
/// flight.
#[test]
fn reads_and_atomic_writes_take_turns() {
    let mut bench = Bench::wal(1 << 20, 512);
    let new = pattern(1, 1024);
    let (data, early, late, beside) = (
        Data::new(new.clone()),
        Data::room(1024),
        Data::room(1024),
        Data::room(512),
    );
    let mut before = SlowTask::new(&bench, &cdb10(0x28, 0, 4, 2), &early);
    let mut write = SlowTask::new(&bench, &write_atomic(0, 4, 2), &data);
    let mut behind = SlowTask::new(&bench, &cdb10(0x28, 0, 4, 2), &late);
    let mut other = SlowTask::new(&bench, &cdb10(0x28, 0, 6, 1), &beside);
    assert_eq!(before.go(&bench), State::InFlight);
    assert_eq!(write.go(&bench), State::Blocked);
    assert_eq!(behind.go(&bench), State::Blocked);
    assert_eq!(other.go(&bench), State::InFlight);
    assert_eq!(before.end(&mut bench), State::Done);
    drop(before);
    assert_eq!((write.go(&bench), write.held.len()), (State::InFlight, 1));
    assert_eq!(behind.go(&bench), State::Blocked);
    assert_eq!(write.end(&mut bench), State::Done);
    assert_eq!(write.task.outcome().status, Status::Good);
    assert_eq!(behind.go(&bench), State::InFlight);
    assert_eq!(behind.end(&mut bench), State::Done);
    assert_eq!((early.bytes(), late.bytes()), (vec![0; 1024], new));
}

/// A failure of any operation ends the command with sense, and nothing more is submitted.
#[test]
fn failures_of_the_backend() {
    let bench = Bench::ram(1 << 20, 512);
    const IO: Failure = Failure::Io;
    for (cdb, good, failure, code) in [
        (&cdb10(0x28, 0, 0, 1)[..], 0, IO, READ_ERROR),
        (&cdb10(0x28, 8, 0, 1), 0, IO, WRITE_ERROR),
        (&cdb10(0x28, 8, 0, 1), 1, IO, READ_ERROR),
        (&cdb10(0x2a, 0, 0, 1), 0, IO, WRITE_ERROR),
        (&cdb10(0x2a, 8, 0, 1), 1, IO, WRITE_ERROR),
        (&cdb10(0x2a, 0, 0, 1), 0, Failure::ReadOnly, WRITE_PROTECTED),
        (&cdb10(0x28, 0, 0, 1), 0, Failure::OutOfRange, OUT_OF_RANGE),
        (&cdb10(0x2a, 0, 0, 1), 0, Failure::TooLarge, INVALID_CDB),
        (&cdb10(0x35, 0, 0, 0), 0, IO, WRITE_ERROR),
        (&cdb10(0x2f, 0, 0, 8), 0, IO, READ_ERROR),
        (&cdb10(0x2e, 0, 0, 8), 1, IO, WRITE_ERROR),
        (&cdb10(0x2e, 0, 0, 8), 2, IO, READ_ERROR),
        (&cdb10(0x41, 0, 0, 8000), 0, IO, WRITE_ERROR),
        (&cdb10(0x41, 0, 0, 8000), 2, IO, WRITE_ERROR),
        (&compare_and_write(0, 0, 1), 0, IO, READ_ERROR),
        (&[0x1b, 0, 0, 0, 0, 0], 0, IO, WRITE_ERROR),
    ] {
        let mut bench = match cdb[0] {
            0x1b | 0x41 => Bench::ram(8 << 20, 512),
            _ => Bench::ram(1 << 20, 512),
        };
        let data = Data::new(match cdb[0] {
            0x41 => vec![7; 512],
            0x89 => vec![7; 1024],
            _ => vec![7; 4096],
        });
        let mut slow = SlowTask::new(&bench, cdb, &data);
        for _ in 0..good {
            assert_eq!(slow.go(&bench), State::InFlight);
            slow.end(&mut bench);
        }
        assert_eq!(slow.go(&bench), State::InFlight);
        slow.held.clear();
        slow.task.complete(&bench.unit, &data, Err(failure));
        assert_eq!(slow.go(&bench), State::Done, "{cdb:02x?}");
        assert!(slow.held.is_empty());
        assert_eq!(fixed(&slow.task.outcome()).code, code, "{cdb:02x?}");
    }
    // Several operations in flight: the first to fail counts.
    let list = Data::new(unmap_list(&[(0, 1), (2, 1), (4, 1)]));
    let mut slow = SlowTask::new(&bench, &cdb10(0x42, 0, 0, 56), &list);
    assert_eq!((slow.go(&bench), slow.held.len()), (State::InFlight, 3));
    for failure in [Failure::ReadOnly, IO, IO] {
        assert_eq!(slow.go(&bench), State::InFlight);
        slow.task.complete(&bench.unit, &list, Err(failure));
    }
    assert_eq!(slow.go(&bench), State::Done);
    assert_eq!(fixed(&slow.task.outcome()).code, WRITE_PROTECTED);
}

#[test]
fn an_aborted_command_ends_with_what_is_in_flight() {
    let mut bench = Bench::ram(8 << 20, 512);
    let data = Data::new([7; 512]);
    let mut slow = SlowTask::new(&bench, &cdb10(0x41, 0, 0, 16000), &data);
    assert!(slow.task.bytes(&bench.unit) <= 1 << 20);
    assert_eq!(slow.go(&bench), State::InFlight);
    slow.task.abort();
    assert_eq!(slow.go(&bench), State::InFlight);
    assert_eq!(slow.end(&mut bench), State::Done);
    let outcome = slow.task.outcome();
    assert_eq!((outcome.status, outcome.sense), (Status::TaskAborted, None));
    assert!(bench.read(8000, 1).iter().all(|&byte| byte == 0));
    // The aborted command does not hold up others any more.
    bench.send(&compare_and_write(0, 0, 1), &[[7; 512], [8; 512]].concat());
}
