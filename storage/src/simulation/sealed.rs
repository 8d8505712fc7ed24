//! How much opening a log reads from sealed segments.

use super::fixture::{Fixture, RunningStore, Shape, carry_out, filled};
use super::medium::World;
use crate::format::BLOCK;
use crate::medium::directory::Medium;
use crate::{CommitWait, Operation};

const SEGMENT: u64 = 1 << 20;
/// Sectors of a write. With the header of its batch, 14 fill a segment and leave room for the
/// summary.
const WRITE: u64 = 128;
const SECTORS: u64 = 64 * WRITE;

/// A killed process leaves a log of about this many segments.
fn killed(segments: u64) -> Fixture {
    let shape = Shape {
        disks: 1,
        sectors: SECTORS,
        segment_size: SEGMENT,
        max_segments: 64,
    };
    let fixture = Fixture::new(World::new(1), shape);
    let mut running = fixture.open(false, CommitWait::NONE).unwrap();
    let mut port = running.disks[0].open_port().unwrap();
    for number in 1..=segments * 14 {
        let sector = number * WRITE % SECTORS;
        let data = filled(number as u32, WRITE);
        carry_out(&mut running, &mut port, Operation::Write { sector, data }).unwrap();
        carry_out(&mut running, &mut port, Operation::Flush).unwrap();
    }
    let has_pending_summary =
        |running: &RunningStore| running.disks[0].log.lock().ring.has_pending_summary();
    while has_pending_summary(&running) {
        running.step_writer();
    }
    running.finish_writer();
    assert_eq!(running.disks[0].log.counters.snapshot().checkpoints, 0);
    drop(port);
    drop(running);
    fixture.medium.lock().restart();
    fixture
}

/// The bytes that opening the log reads.
fn opened(fixture: &Fixture) -> u64 {
    let before = fixture.medium.lock().bytes_read;
    let running = fixture.open(false, CommitWait::NONE).unwrap();
    let bytes = fixture.medium.lock().bytes_read - before;
    // Every byte is there: each sector has the number of the newest write to it.
    let found = &running.read().unwrap()[0];
    let newest = (found.iter().max().copied().unwrap_or(0)) as usize;
    let writes = (SECTORS / WRITE) as usize;
    assert!(newest >= writes);
    for (at, sectors) in found.chunks(WRITE as usize).enumerate() {
        let number = newest - (newest - at) % writes;
        assert!(sectors.iter().all(|&value| value == number as u32));
    }
    drop(running);
    fixture.medium.lock().restart();
    bytes
}

/// The bytes that opening reads depend on the number of records, and not on their payloads: of each
/// sealed segment it reads the header and the summary, a block each. The last segment, which is not
/// sealed, is read and searched.
#[test]
fn opening_reads_headers_and_summaries_of_sealed_segments() {
    const SEGMENTS: u64 = 24;
    let fixture = killed(SEGMENTS);
    let sealed = opened(&fixture);
    // The control file, samples of the image, and twice the last segment.
    let rest = 3 * SEGMENT;
    let most = (SEGMENTS + 2) * 2 * BLOCK as u64 + rest;
    assert!(sealed <= most, "{sealed} bytes");
    // Without the summaries it reads everything.
    for (_, segment) in fixture.medium.segments().unwrap() {
        let last = SEGMENT - BLOCK as u64;
        segment.file.write_all_at(&[0; BLOCK], last).unwrap();
    }
    let all = opened(&fixture);
    assert!(all >= SEGMENTS * 14 * WRITE * 512, "{all} bytes");
    println!(
        "{SEGMENTS} segments of {SEGMENT} bytes: {sealed} bytes read, {all} without summaries"
    );
}
