//! Requests to a backend without a front-end: submitted, and served until they have completed.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use walvisor_block::{BackendQueue, Buffer, Completion, Failure, Operation};

use crate::{PATIENCE, Random};

/// Kicks the queue, and serves it until `count` requests have completed.
#[track_caller]
pub fn wait(queue: &mut (impl BackendQueue + ?Sized), count: usize) -> Vec<Completion> {
    queue.kick();
    wait_all(&mut [queue], count)
}

/// Serves the queues, as their threads would, until `count` requests have completed.
#[track_caller]
pub fn wait_all(queues: &mut [&mut (impl BackendQueue + ?Sized)], count: usize) -> Vec<Completion> {
    let mut done = Vec::new();
    loop {
        for queue in &mut *queues {
            queue.completions(&mut done);
        }
        if done.len() >= count {
            return done;
        }
        let events: Vec<_> = queues.iter().map(|queue| queue.event()).collect();
        let mut fds: Vec<_> = events
            .iter()
            .map(|event| PollFd::new(event, PollFlags::IN))
            .collect();
        let limit = Timespec::try_from(PATIENCE).expect("a time");
        let ready = poll(&mut fds, Some(&limit)).expect("poll");
        assert!(ready > 0, "no completion; {} of {count} came", done.len());
    }
}

/// Carries out one request.
///
/// # Errors
/// If it fails.
#[track_caller]
pub fn run(
    queue: &mut (impl BackendQueue + ?Sized),
    operation: Operation,
) -> Result<Option<Buffer>, Failure> {
    queue.submit(1, operation);
    wait(queue, 1).remove(0).result
}

/// Sectors of equal bytes.
#[must_use]
pub fn fill(byte: u8, sectors: usize) -> Buffer {
    Buffer::from(&vec![byte; sectors * 512][..])
}

/// Writes sectors of equal bytes.
#[track_caller]
pub fn write(queue: &mut (impl BackendQueue + ?Sized), sector: u64, byte: u8, sectors: usize) {
    let data = fill(byte, sectors);
    run(queue, Operation::Write { sector, data }).expect("a write");
}

/// Reads sectors.
#[track_caller]
pub fn read(queue: &mut (impl BackendQueue + ?Sized), sector: u64, sectors: u32) -> Buffer {
    let read = run(queue, Operation::Read { sector, sectors });
    read.expect("a read").expect("its data")
}

/// Makes the completed writes durable.
#[track_caller]
pub fn flush(queue: &mut (impl BackendQueue + ?Sized)) {
    run(queue, Operation::Flush).expect("a flush");
}

/// Writes, zeroes or reads up to eight sectors somewhere on a disk that has these bytes, and will
/// have them. `history` names the run if a read returns others.
///
/// # Panics
/// If a read returns other bytes, or a request fails.
#[track_caller]
pub fn random_request(
    queue: &mut (impl BackendQueue + ?Sized),
    random: &mut Random,
    bytes: &mut [u8],
    history: &str,
) {
    let sector = random.below(bytes.len() as u64 / 512 - 8);
    let sectors = 1 + random.below(8);
    let bytes = &mut bytes[sector as usize * 512..(sector + sectors) as usize * 512];
    match random.below(13) {
        0 => {
            let operation = Operation::WriteZeroes {
                sector,
                sectors: sectors as u32,
                unmap: random.one_in(2),
            };
            run(queue, operation).expect("zeroes");
            bytes.fill(0);
        }
        1..6 => {
            let byte = random.below(256) as u8;
            write(queue, sector, byte, sectors as usize);
            bytes.fill(byte);
        }
        _ => {
            let found = read(queue, sector, sectors as u32);
            assert!(found[..] == *bytes, "{history}, sector {sector}");
        }
    }
}
