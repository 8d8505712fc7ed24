use super::*;
use crate::log::pipeline::tests::{panics, segment};

const SIZE: u64 = 64 << 10;

fn at(lsn: u64, unix_us: u64) -> Commit {
    let cid = lsn;
    Commit { lsn, cid, unix_us }
}

/// A batch of one record.
fn batch(whole: u64) -> BatchSize {
    let header = format::header_len(1, 0);
    BatchSize { header, whole }
}

/// A ring of four files of at most five: one that a reader holds, two that are live, and a free
/// one. The newest record in a batch is 9.
fn ring() -> (SegmentRing, Arc<Segment>) {
    let free = (0..4).map(|_| segment()).collect();
    let mut ring = SegmentRing::new(SIZE, (4, 5), 1, VecDeque::new(), free);
    let mut batched = 0;
    for lsn in [3, 6, 9] {
        let Room::Next(segment) = ring.make_room(batch(SIZE), false) else {
            panic!("a segment is free");
        };
        ring.begin_tail(segment, [7; 16], 1, batched);
        ring.check(batched);
        ring.extend_tail(8192, (&[0; 116], 1), at(lsn, 0));
        batched = lsn;
        ring.check(batched);
    }
    assert_eq!(
        (ring.find_freeable(5), ring.find_freeable(9)),
        ((1, 2), (2, 3))
    );
    let reader = ring.live[0].segment.clone();
    ring.retire(1);
    assert!(!ring.reclaim() && ring.has_readers());
    ring.check(batched);
    (ring, reader)
}

#[test]
fn a_segment_is_recycled_once_no_reader_holds_it() {
    let (mut ring, reader) = ring();
    assert_eq!(ring.counts(), (4, 1));
    drop(reader);
    assert!(ring.reclaim() && !ring.has_readers());
    ring.check(9);
    assert_eq!(ring.counts(), (4, 2));
    assert!(matches!(ring.make_room(batch(8192), false), Room::Tail));
    // With no file to come the last segment is the keeper's.
    assert!(ring.note_cannot_grow() && !ring.note_cannot_grow());
    assert!(matches!(ring.make_room(batch(SIZE), false), Room::Next(_)));
    let none = ring.make_room(batch(SIZE), false);
    assert!(matches!(
        none,
        Room::None {
            left: 1,
            reserved: true
        }
    ));
    assert!(ring.is_starved());
    assert!(matches!(ring.make_room(batch(SIZE), true), Room::Next(_)));
    assert!(!ring.is_starved());
}

#[test]
fn a_batch_waits_until_the_log_may_grow() {
    let (mut ring, _reader) = ring();
    assert!(!ring.allow(Some(ring.end() + 8192)));
    assert!(matches!(ring.make_room(batch(8192), false), Room::Tail));
    assert!(matches!(ring.make_room(batch(8704), false), Room::Later));
    assert!(!ring.is_starved());
    // The keeper's batch does not wait.
    assert!(matches!(ring.make_room(batch(8704), true), Room::Tail));
    assert!(ring.allow(Some(ring.end() + 8704)));
    assert!(matches!(ring.make_room(batch(8704), false), Room::Tail));
    assert!(!ring.allow(None));
    // While a segment file is made, the log has what is ready little by little.
    assert!(!ring.make_progress(Some(ring.end() + 8192)));
    assert!(matches!(ring.make_room(batch(8704), false), Room::Later));
    assert!(ring.outruns_files() && !ring.holds_back());
    assert!(matches!(ring.make_room(batch(8704), true), Room::Tail));
    assert!(ring.make_progress(None));
    assert!(!ring.outruns_files());
    assert!(matches!(ring.make_room(batch(SIZE), false), Room::Next(_)));
    ring.check(9);
}

/// A log that keeps history frees its oldest segments in steps: those that it need not keep, or if
/// it runs out of room as many as make a step. Nothing that is held is freed.
#[test]
fn the_oldest_segments_expire() {
    let most = 12;
    let free = (0..most).map(|_| segment()).collect();
    let mut ring = SegmentRing::new(SIZE, (most, most), 1, VecDeque::new(), free);
    for lsn in 1..=10 {
        let Room::Next(segment) = ring.make_room(batch(SIZE), false) else {
            panic!("a segment is free");
        };
        ring.begin_tail(segment, [7; 16], 1, lsn - 1);
        ring.note_time(Timestamp {
            unix_us: 7,
            passed: 1000 * lsn,
        });
        ring.extend_tail(8192, (&[0; 116], 1), at(lsn, 7));
    }
    let kept = |segments: u64| Retention::Bytes(segments * SIZE);
    let time = |us: u64| Retention::Time(std::time::Duration::from_micros(us));
    let expired = |retain, pressed, held| ring.expired(retain, 11_000, pressed, held);
    let all = u64::MAX;
    // A step is half of the room beside what is kept: 5 segments, and 6 if no bytes are counted.
    assert_eq!(expired(kept(2), false, all), (8, 0));
    assert_eq!(expired(kept(5), false, all), (5, 0));
    assert_eq!(expired(kept(8), false, all), (2, 0));
    assert_eq!(expired(kept(9), false, all), (1, 0));
    assert_eq!(expired(time(4000), false, all), (6, 0));
    assert_eq!(expired(time(5000), false, all), (0, 0), "less than a step");
    assert_eq!(expired(Retention::All, false, all), (0, 0));
    // Under pressure some go early.
    assert_eq!(expired(time(5000), true, all), (6, 1));
    assert_eq!(expired(Retention::All, true, all), (6, 6));
    assert_eq!(expired(kept(20), true, all), (1, 1));
    // The tail stays.
    assert_eq!(expired(kept(0), false, all), (9, 0));
    for (held, count) in [(0, 0), (1, 1), (4, 4), (9, 9), (10, 9)] {
        assert_eq!(expired(kept(0), true, held).0, count);
    }
    assert!(ring.is_running_out(Retention::All) && !ring.is_running_out(kept(9)));
}

/// A batch leaves room for its segment's summary, unless it is the keeper's or the segment gets no
/// summary.
#[test]
fn batches_leave_room_for_the_summary() {
    let header = format::header_len(8, 64);
    let whole = (format::batch_header_len(8, 64) + 64 * format::BLOCK) as u64;
    let batch = BatchSize { header, whole };
    let size = 2 * format::BLOCK as u64 + 16 * whole;
    let ring = || {
        let free = (0..4).map(|_| segment()).collect();
        SegmentRing::new(size, (4, 4), 1, VecDeque::new(), free)
    };
    let begin = |ring: &mut SegmentRing, draining, batched| {
        let Room::Next(segment) = ring.make_room(batch, draining) else {
            panic!("a segment is free");
        };
        ring.begin_tail(segment, [7; 16], 1, batched);
    };
    // The offset of the summary, and where the last batch ends.
    let fill = |draining| {
        let (mut ring, mut lsn) = (ring(), 0);
        begin(&mut ring, draining, 0);
        let block = format::BLOCK as u64;
        ring.extend_tail(block + whole, (&vec![7; header], 1), at(1, 0));
        while let Room::Tail = ring.make_room(batch, draining) {
            lsn += 1;
            ring.extend_tail(whole, (&vec![7; header], 1), at(lsn + 1, 0));
        }
        let end = ring.tail().expect("a tail").offset;
        ring.begin_tail(segment(), [7; 16], 1, lsn + 1);
        (ring.take_pending_summary(), end, lsn + 1)
    };
    let (sealed, end, batches) = fill(false);
    let sealed = sealed.expect("a summary");
    let len = format::summary_len(batches as usize * header, size);
    assert_eq!(Some(sealed.summary.len()), len);
    assert_eq!(sealed.offset + len.unwrap() as u64, size);
    assert!(end <= sealed.offset && sealed.offset < end + whole);
    // All that the keeper needs fits one segment, and nothing else has to.
    let (sealed, end, _) = fill(true);
    assert!(sealed.is_none() && end + whole > size && end <= size);
}

/// Summaries that nothing writes take no memory without end, and those of retired segments are
/// given up.
#[test]
fn few_summaries_are_pending() {
    let (mut ring, _reader) = ring();
    assert_eq!(
        ring.pending_summaries.len(),
        MOST_PENDING_SUMMARIES - 1,
        "that of a retired one is gone"
    );
    for lsn in 10..20 {
        ring.begin_tail(segment(), [7; 16], 1, lsn - 1);
        ring.extend_tail(8192, (&[0; 116], 1), at(lsn, 0));
        assert!(ring.pending_summaries.len() <= MOST_PENDING_SUMMARIES);
    }
    assert!(ring.has_pending_summary());
    let newest = ring.live.len() - 2;
    ring.take_pending_summary();
    let sealed = ring.take_pending_summary().expect("two wait");
    assert!(Arc::ptr_eq(&sealed.segment, &ring.live[newest].segment));
    assert!(!ring.has_pending_summary());
}

#[test]
fn every_broken_invariant_is_noticed() {
    type Fault = fn(&mut SegmentRing);
    let broken: [(&str, Fault); 11] = [
        ("out of order", |ring| ring.live.swap(0, 1)),
        ("out of order", |ring| ring.live[0].last.lsn = 10),
        ("from the future", |ring| ring.live[1].last.lsn = 10),
        ("from the future", |ring| ring.next_sequence = 3),
        ("the tail is live", |ring| ring.live.clear()),
        ("not the last live", |ring| {
            ring.live.pop_back();
        }),
        ("not the last live", |ring| ring.live[1].last.lsn = 8),
        ("the tail's offset", |ring| ring.end += 512),
        ("in two places", |ring| {
            ring.free.push_back(ring.live[0].segment.clone())
        }),
        ("more segments than files", |ring| ring.files = 3),
        ("starved", |ring| ring.starved = true),
    ];
    for (message, change) in broken {
        let (mut ring, _reader) = ring();
        change(&mut ring);
        panics(message, || ring.check(9));
    }
    let (ring, _reader) = ring();
    panics("from the future", || ring.check(8));
}
