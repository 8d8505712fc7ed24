//! The ring against a model of the kernel's side.

use std::collections::VecDeque;

use super::kernel::{BLOCK, EndedCommand, Kernel, Request};
use super::layout::{header, mailbox, request, response};
use super::*;
use crate::scsi::DataBuffer;

fn read_of(len: usize) -> Request {
    Request {
        cdb: vec![0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        read: len,
        ..Request::default()
    }
}

fn write_of(out: Vec<u8>) -> Request {
    Request {
        cdb: vec![0x8a, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        out,
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

/// Bytes that differ by place and by `seed`.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at * 7 + at / 251 + seed * 13) as u8)
        .collect()
}

#[test]
fn commands_are_copied_and_answered_in_any_order() {
    let mut kernel = Kernel::new(8192, 16);
    let mut ring = CommandRing::open(kernel.memory()).unwrap();
    assert!(ring.take().unwrap().is_none());
    let out = pattern(1, 2 * BLOCK + 100);
    let first = kernel.queue(write_of(out.clone())).unwrap();
    let second = kernel.queue(read_of(BLOCK + 8)).unwrap();
    let third = kernel.queue(read_of(512)).unwrap();
    let (a, b, c) = (command(&mut ring), command(&mut ring), command(&mut ring));
    assert!(ring.take().unwrap().is_none());
    assert_eq!(
        (a.ticket.id(), b.ticket.id(), c.ticket.id()),
        (first, second, third)
    );
    assert_eq!(
        (a.data.len(), b.data.len(), c.data.len()),
        (out.len(), BLOCK + 8, 512)
    );

    // The last command is answered first: its response overwrites the request of the first.
    c.data.write(0, &pattern(3, 512));
    ring.complete(c.ticket, &Response::default());
    assert_eq!(ring.publish(), 1);
    let ended = kernel.take_ended();
    assert_eq!(ended.len(), 1);
    assert_eq!((ended[0].id, &ended[0].data), (third, &pattern(3, 512)));

    assert_eq!(a.cdb.as_slice(), write_of(vec![]).cdb);
    let mut have = vec![0; out.len()];
    a.data.read(0, &mut have);
    assert_eq!(have, out);
    let mut part = [0; 300];
    a.data.read(BLOCK - 100, &mut part);
    assert_eq!(part, out[BLOCK - 100..BLOCK + 200]);

    let sense = pattern(5, 18);
    ring.complete(
        a.ticket,
        &Response {
            status: 2,
            sense: &sense,
            read: None,
        },
    );
    b.data.write(3, &pattern(9, BLOCK));
    ring.complete(
        b.ticket,
        &Response {
            read: Some(BLOCK as u32 + 3),
            ..Response::default()
        },
    );
    assert!(
        kernel.take_ended().is_empty(),
        "not before they are published"
    );
    assert_eq!((ring.publish(), ring.publish()), (2, 0));
    let ended = kernel.take_ended();
    assert_eq!((ended[0].id, ended[0].status), (first, 2));
    assert_eq!(ended[0].sense[..18], sense);
    assert_eq!((ended[1].id, ended[1].data.len()), (second, BLOCK + 3));
    assert_eq!(ended[1].data[3..], pattern(9, BLOCK));
    assert_eq!(kernel.in_flight(), 0);
}

#[test]
fn a_response_contains_nothing_of_an_older_one() {
    let mut kernel = Kernel::new(1024, 2);
    let mut ring = CommandRing::open(kernel.memory()).unwrap();
    kernel.queue(read_of(BLOCK)).unwrap();
    kernel.queue(read_of(BLOCK)).unwrap();
    let (a, b) = (command(&mut ring), command(&mut ring));
    let short = Response {
        status: 2,
        sense: &[1; 96],
        read: Some(4),
    };
    ring.complete(b.ticket, &short);
    ring.complete(
        a.ticket,
        &Response {
            status: 2,
            sense: &[7],
            read: None,
        },
    );
    ring.publish();
    let ended = kernel.take_ended();
    assert_eq!(ended[0].sense, [1; 96]);
    assert_eq!(
        (ended[1].sense[0], ended[1].sense[1..].iter().max()),
        (7, Some(&0))
    );
}

#[test]
fn the_ring_wraps_with_pads_at_every_position() {
    // Tries every position where an entry can begin.
    for start in (0..1024).step_by(8) {
        let mut kernel = Kernel::new(1024, 8);
        kernel.start_at(start);
        let mut ring = CommandRing::open(kernel.memory()).unwrap();
        let mut waiting = VecDeque::new();
        let (mut queued, mut answered) = (Vec::new(), Vec::new());
        for round in 0..40_usize {
            while let Some(id) = kernel.queue(read_of(round % 3 * BLOCK / 2)) {
                queued.push(id);
            }
            while let Some(entry) = ring.take().unwrap() {
                let Entry::Command(command) = entry else {
                    panic!("{entry:?}")
                };
                waiting.push_back(command);
            }
            for turn in 0..waiting.len().div_ceil(2) {
                let command = match (round + turn) % 2 {
                    0 => waiting.pop_front(),
                    _ => waiting.pop_back(),
                };
                let command = command.unwrap();
                let id = command.ticket.id();
                command
                    .data
                    .write(0, &pattern(id.into(), command.data.len()));
                ring.complete(command.ticket, &Response::default());
            }
            ring.publish();
            answered.extend(kernel.take_ended());
        }
        for command in waiting {
            let data = pattern(command.ticket.id().into(), command.data.len());
            command.data.write(0, &data);
            ring.complete(command.ticket, &Response::default());
        }
        ring.publish();
        answered.extend(kernel.take_ended());
        answered.sort_by_key(|ended| ended.id);
        let ids: Vec<_> = answered.iter().map(|ended| ended.id).collect();
        assert_eq!(ids, queued, "from {start}");
        assert!(queued.len() > 40);
        let right = |ended: &EndedCommand| ended.data == pattern(ended.id.into(), ended.data.len());
        assert!(answered.iter().all(right), "from {start}");
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
fn bidirectional_data_is_kept_apart() {
    let mut kernel = Kernel::new(1024, 8);
    let mut ring = CommandRing::open(kernel.memory()).unwrap();
    let out = pattern(1, BLOCK + 1);
    let both = Request {
        cdb: vec![0x53; 10],
        out: out.clone(),
        read: 2 * BLOCK,
    };
    kernel.queue(both).unwrap();
    let command = command(&mut ring);
    assert_eq!(
        (command.data.len(), command.bidi.len()),
        (out.len(), 2 * BLOCK)
    );
    command.bidi.write(0, &pattern(2, 2 * BLOCK));
    ring.complete(command.ticket, &Response::default());
    ring.publish();
    assert_eq!(kernel.take_ended()[0].data, pattern(2, 2 * BLOCK));
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
    for (at, bytes, part) in [
        // A length of 0, as in an entry not written yet.
        (
            header::LEN_OP,
            0_u32.to_ne_bytes().to_vec(),
            "a length of 0",
        ),
        (
            header::LEN_OP,
            (4096_u32 | 1).to_ne_bytes().to_vec(),
            "a length of 4096, with 128 bytes left",
        ),
        (
            header::LEN_OP,
            (104_u32 | 1).to_ne_bytes().to_vec(),
            "shorter",
        ),
        (
            header::LEN_OP,
            (24_u32 | 2).to_ne_bytes().to_vec(),
            "shorter",
        ),
        (request::IOVECS, u32::MAX.to_ne_bytes().to_vec(), "shorter"),
        (
            request::BIDI_IOVECS,
            5_u32.to_ne_bytes().to_vec(),
            "shorter",
        ),
        (request::CDB, u64::MAX.to_ne_bytes().to_vec(), "CDB outside"),
        (request::CDB, 0_u64.to_ne_bytes().to_vec(), "CDB outside"),
        (
            request::CDB,
            (mailbox::LEN as u64 + 124).to_ne_bytes().to_vec(),
            "CDB outside",
        ),
        (
            request::FIRST_IOVEC,
            iovec(0, 8),
            "outside of the data area",
        ),
        (
            request::FIRST_IOVEC,
            iovec(data - 1, 8),
            "outside of the data area",
        ),
        (
            request::FIRST_IOVEC,
            iovec(data, 2 * BLOCK as u64 + 1),
            "outside of the data area",
        ),
        (
            request::FIRST_IOVEC,
            iovec(u64::MAX, 1),
            "outside of the data area",
        ),
        (
            request::FIRST_IOVEC,
            iovec(data, u64::MAX),
            "outside of the data area",
        ),
    ] {
        let error = take(at, &bytes);
        assert!(error.contains(part), "{at}: {error}");
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
