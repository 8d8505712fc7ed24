//! The ring against a model of the kernel's side.

use super::kernel::{BLOCK, Kernel, Request};
use super::layout::{header, mailbox, request, response};
use super::*;

fn read_of(len: usize) -> Request {
    Request {
        cdb: vec![0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        read: len,
        ..Request::default()
    }
}

#[track_caller]
fn command(ring: &mut CommandRing) -> Command {
    match ring.take().unwrap() {
        Some(Entry::Command(command)) => command,
        other => panic!("{other:?}"),
    }
}

#[test]
fn task_management_is_reported_and_needs_no_answer() {
    let mut kernel = Kernel::new(1024, 2);
    let mut ring = CommandRing::open(kernel.memory()).unwrap();
    let id = kernel.queue(read_of(8)).unwrap();
    assert!(kernel.queue_task_management(5, &[id, 77, 78]));
    let hit = command(&mut ring);
    match ring.take().unwrap() {
        Some(Entry::TaskManagement { kind: 5, ids }) => assert_eq!(ids, [id, 77, 78]),
        other => panic!("{other:?}"),
    }
    assert_eq!(ring.publish(), 0);
    ring.complete(hit.ticket, &Response::default());
    // The kernel gets the room of both entries back with one answer.
    assert_eq!(ring.publish(), 1);
    assert_eq!(kernel.take_ended().len(), 1);
    // A task management entry alone in the ring is given back without any answer.
    assert!(kernel.queue_task_management(1, &[]));
    assert!(matches!(
        ring.take().unwrap(),
        Some(Entry::TaskManagement { kind: 1, .. })
    ));
    assert_eq!(ring.publish(), 0);
    assert!(kernel.take_ended().is_empty());
    let free = (0..)
        .take_while(|_| kernel.queue_task_management(1, &[]))
        .count();
    assert_eq!(free, 1023 / 32);
}

#[test]
fn an_unknown_entry_is_flagged_and_skipped() {
    let mut kernel = Kernel::new(1024, 2);
    let mut ring = CommandRing::open(kernel.memory()).unwrap();
    let id = kernel.queue(read_of(8)).unwrap();
    kernel.finish(16, 6);
    let next = kernel.queue(read_of(8)).unwrap();
    let first = command(&mut ring);
    assert!(matches!(ring.take().unwrap(), Some(Entry::Unknown(6))));
    let second = command(&mut ring);
    // The unknown entry gets no response: the kernel finds both commands' numbers in the other
    // entries.
    ring.complete(second.ticket, &Response::default());
    ring.complete(first.ticket, &Response::default());
    ring.publish();
    let ids: Vec<_> = kernel.take_ended().iter().map(|ended| ended.id).collect();
    assert_eq!(ids, [next, id]);
}

#[test]
fn cdbs_of_every_group_are_read_in_full() {
    let groups = [
        (0x00, 6),
        (0x1f, 6),
        (0x28, 10),
        (0x5f, 10),
        (0x60, 12),
        (0x8f, 16),
        (0xa8, 12),
        (0xc0, 10),
        (0xff, 10),
    ];
    let mut cdbs: Vec<Vec<u8>> = groups.iter().map(|(code, len)| vec![*code; *len]).collect();
    let mut variable = vec![0x7f; 8 + 252];
    variable[7] = 252;
    cdbs.push(variable.clone());
    variable[7] = 24;
    cdbs.push(variable[..32].to_vec());
    for cdb in cdbs {
        let mut kernel = Kernel::new(4096, 1);
        let mut ring = CommandRing::open(kernel.memory()).unwrap();
        kernel
            .queue(Request {
                cdb: cdb.clone(),
                ..Request::default()
            })
            .unwrap();
        assert_eq!(command(&mut ring).cdb.as_slice(), cdb);
    }
}

#[test]
fn invalid_mailboxes_are_refused() {
    let open = |at: usize, bytes: &[u8]| {
        let kernel = Kernel::new(1024, 1);
        kernel.put(at, bytes);
        CommandRing::open(kernel.memory())
            .map(drop)
            .unwrap_err()
            .to_string()
    };
    let word = |value: u32| value.to_ne_bytes();
    for (at, bytes, part) in [
        (mailbox::VERSION, &3_u16.to_ne_bytes()[..], "has version 3"),
        (mailbox::FLAGS, &[0, 0], "in order"),
        (mailbox::RING_OFFSET, &word(64), "does not fit"),
        (mailbox::RING_OFFSET, &word(u32::MAX - 7), "does not fit"),
        (mailbox::RING_SIZE, &word(0), "does not fit"),
        (mailbox::RING_SIZE, &word(1020), "does not fit"),
        (mailbox::RING_SIZE, &word(u32::MAX - 7), "does not fit"),
        (mailbox::HEAD, &word(1024), "head is 1024"),
        (mailbox::TAIL, &word(4), "tail is 4"),
    ] {
        let error = open(at, bytes);
        assert!(error.contains(part), "{at}: {error}");
    }
    let short = Mapping::anonymous(64).unwrap();
    assert!(CommandRing::open(short.into()).is_err());
}

#[test]
fn an_invalid_entry_stops_the_ring() {
    // Changes a valid command at `at` before the ring reads its entry.
    let take = |at: usize, bytes: &[u8]| {
        let mut kernel = Kernel::new(1024, 2);
        let mut ring = CommandRing::open(kernel.memory()).unwrap();
        let at = kernel.head_offset() + at;
        kernel.queue(read_of(BLOCK)).unwrap();
        kernel.put(at, bytes);
        let error = ring.take().unwrap_err();
        assert_eq!(ring.take().unwrap_err(), error, "nothing more is taken");
        error.to_string()
    };
    let data = (mailbox::LEN + 1024) as u64;
    let iovec = |offset: u64, len: u64| [offset.to_ne_bytes(), len.to_ne_bytes()].concat();
    let word = |value: u32| value.to_ne_bytes().to_vec();
    let tables: [(usize, &str, &[Vec<u8>]); 6] = [
        // A length of 0, as in an entry not written yet.
        (header::LEN_OP, "a length of 0", &[word(0)]),
        (
            header::LEN_OP,
            "a length of 4096, with 128 bytes left",
            &[word(4096 | 1)],
        ),
        (header::LEN_OP, "shorter", &[word(104 | 1), word(24 | 2)]),
        (request::IOVECS, "shorter", &[word(u32::MAX)]),
        (request::BIDI_IOVECS, "shorter", &[word(5)]),
        (
            request::CDB,
            "CDB outside",
            &[u64::MAX, 0, mailbox::LEN as u64 + 124].map(|at| at.to_ne_bytes().to_vec()),
        ),
    ];
    for (at, part, wrong) in tables {
        for bytes in wrong {
            let error = take(at, bytes);
            assert!(error.contains(part), "{at}: {error}");
        }
    }
    for (offset, len) in [
        (0, 8),
        (data - 1, 8),
        (data, 2 * BLOCK as u64 + 1),
        (u64::MAX, 1),
        (data, u64::MAX),
    ] {
        let error = take(request::FIRST_IOVEC, &iovec(offset, len));
        assert!(error.contains("outside of the data area"), "{error}");
    }
    // The iovecs name the same blocks twice, so together they exceed the data area.
    let mut kernel = Kernel::new(1024, 2);
    let mut ring = CommandRing::open(kernel.memory()).unwrap();
    let at = kernel.head_offset() + request::FIRST_IOVEC;
    kernel.queue(read_of(2 * BLOCK)).unwrap();
    kernel.put(at, &iovec(data, 2 * BLOCK as u64));
    assert!(ring.take().unwrap_err().to_string().contains("data area"));
    // The head lies outside the ring.
    let mut kernel = Kernel::new(1024, 2);
    let mut ring = CommandRing::open(kernel.memory()).unwrap();
    kernel.queue(read_of(8)).unwrap();
    kernel.put(mailbox::HEAD, &2048_u32.to_ne_bytes());
    assert!(
        ring.take()
            .unwrap_err()
            .to_string()
            .contains("head is 2048")
    );
    assert_eq!(response::LEN, 112, "sizeof(struct tcmu_cmd_entry)");
}
