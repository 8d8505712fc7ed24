//! Tests of the index against an array that holds one entry a sector, and of the memory that the
//! index takes.

use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;
use crate::{Buffer, SECTOR_SIZE, SharedBuffer, heap};

fn segment() -> Arc<Segment> {
    let file = std::fs::File::open("/dev/null").unwrap();
    Arc::new(Segment::new(PathBuf::new(), Box::new(file)))
}

/// A payload in which each sector holds its record's LSN and its own number in the record.
fn payload(lsn: u64, sectors: u64) -> SharedBuffer {
    let mut payload = Buffer::zeroed((sectors * SECTOR_SIZE) as usize);
    for (number, sector) in payload.chunks_exact_mut(512).enumerate() {
        sector[..8].copy_from_slice(&lsn.to_le_bytes());
        sector[8..16].copy_from_slice(&(number as u64).to_le_bytes());
    }
    payload.share()
}

/// Bytes in the log, at the place of a sector.
fn in_log(segment: &Arc<Segment>, sector: u64) -> Location {
    Location::Log {
        segment: segment.clone(),
        offset: sector * SECTOR_SIZE,
    }
}

fn zero(unmap: bool, lsn: u64) -> Location {
    Location::Zero { unmap, lsn }
}

/// Where a sector's newest bytes come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SectorOrigin {
    Base,
    Zero { unmap: bool, lsn: u64 },
    Record { lsn: u64, sector: u64, logged: bool },
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        sector: u64,
        sectors: u64,
    },
    Zero {
        sector: u64,
        sectors: u64,
        unmap: bool,
    },
    /// A waiting record reaches the log, directly after the previous one there or after a gap.
    Log {
        which: prop::sample::Index,
        gap: bool,
    },
    NextSegment,
    /// A fold has copied what was in the log before the newest segment but one began.
    Forget,
    Freeze,
    Checkpointed,
}

/// Sectors of the model, on both sides of the point where the high half of a sector's number
/// changes.
const SECTORS: u64 = 1600;
const FIRST: u64 = (1 << 32) - SECTORS / 2;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lengths = prop_oneof![6 => Just(1u64), 6 => 1..4u64, 1 => 1..400u64];
    let range = (0..SECTORS, lengths).prop_map(|(at, len)| (FIRST + at, len.min(SECTORS - at)));
    let step = prop_oneof![
        60 => range.clone().prop_map(|(sector, sectors)| Step::Write { sector, sectors }),
        6 => (range, any::<bool>())
            .prop_map(|((sector, sectors), unmap)| Step::Zero { sector, sectors, unmap }),
        50 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
            .prop_map(|(which, gap)| Step::Log { which, gap }),
        2 => Just(Step::NextSegment),
        2 => Just(Step::Forget),
        1 => Just(Step::Freeze),
        1 => Just(Step::Checkpointed),
    ];
    // Ascending runs make long leaves; the rest cuts and joins them.
    let run = (0..SECTORS / 2, 1..3u64).prop_map(|(at, stride)| {
        let write = move |i| Step::Write {
            sector: FIRST + at + i * stride,
            sectors: 1,
        };
        (0..400)
            .map(write)
            .filter(|step| matches!(step, Step::Write { sector, .. } if *sector < FIRST + SECTORS))
            .collect()
    });
    let part = prop_oneof![1 => run, 40 => step.prop_map(|step| vec![step])];
    prop::collection::vec(part, 1..400).prop_map(|parts: Vec<Vec<Step>>| parts.concat())
}

struct UnwrittenRecord {
    lsn: u64,
    sector: u64,
    sectors: u64,
}

/// A segment, and for each of its sectors the record, and the sector of the record, that it holds.
type HeldSegment = (Arc<Segment>, Vec<(u64, u64)>);

/// The index, and what it should return.
struct Model {
    index: Index,
    memory: IndexMemory,
    /// Active layer and frozen layer.
    layers: [Vec<SectorOrigin>; 2],
    waiting: Vec<UnwrittenRecord>,
    log: Vec<HeldSegment>,
    /// What the active layer had in the log when the newest segment began, and how many segments
    /// there were.
    remembered: (usize, Vec<Piece>),
    next_lsn: u64,
}

impl Model {
    fn new() -> Self {
        let (mut index, memory) = (Index::default(), IndexMemory::default());
        index.count_in(&memory);
        Self {
            index,
            memory,
            layers: [(), ()].map(|()| vec![SectorOrigin::Base; SECTORS as usize]),
            waiting: Vec::new(),
            log: vec![(segment(), Vec::new())],
            remembered: (0, Vec::new()),
            next_lsn: 1,
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Write { sector, sectors } => {
                let lsn = self.next_lsn;
                let payload = payload(lsn, sectors);
                let place = Location::Memory { payload, offset: 0 };
                let logged = false;
                let origin = |sector| SectorOrigin::Record {
                    lsn,
                    sector,
                    logged,
                };
                self.insert(sector, sectors, place, origin);
                self.waiting.push(UnwrittenRecord {
                    lsn,
                    sector,
                    sectors,
                });
            }
            Step::Zero {
                sector,
                sectors,
                unmap,
            } => {
                let lsn = self.next_lsn;
                let origin = |_| SectorOrigin::Zero { unmap, lsn };
                self.insert(sector, sectors, zero(unmap, lsn), origin);
            }
            Step::Log { which, gap } => {
                if !self.waiting.is_empty() {
                    let which = which.index(self.waiting.len());
                    self.log(which, gap);
                }
            }
            Step::NextSegment => {
                let in_log = |piece: &Piece| !matches!(piece.place, Some(Location::Memory { .. }));
                let pieces = self.index.active.iter().filter(in_log).collect();
                self.remembered = (self.log.len(), pieces);
                self.log.push((segment(), Vec::new()));
            }
            Step::Forget => {
                let (segments, pieces) = std::mem::take(&mut self.remembered);
                for piece in &pieces {
                    for at in 0..piece.sectors {
                        let copied = self.origin(piece, at);
                        let origin = &mut self.layers[0][(piece.sector - FIRST + at) as usize];
                        if *origin == copied {
                            *origin = SectorOrigin::Base;
                        }
                    }
                }
                self.index.active.forget(&pieces);
                let segments: Vec<_> = self.log[..segments]
                    .iter()
                    .map(|(s, _)| s.clone())
                    .collect();
                self.index.active.release(&segments);
            }
            Step::Freeze => {
                if self.index.freeze() {
                    self.remembered = (0, Vec::new());
                    self.layers[1] = std::mem::replace(
                        &mut self.layers[0],
                        vec![SectorOrigin::Base; SECTORS as usize],
                    );
                }
            }
            Step::Checkpointed => {
                self.index.frozen = None;
                self.layers[1].fill(SectorOrigin::Base);
            }
        }
    }

    fn insert(
        &mut self,
        sector: u64,
        sectors: u64,
        place: Location,
        origin: impl Fn(u64) -> SectorOrigin,
    ) {
        self.index
            .active
            .insert(sector, sectors, self.next_lsn, place);
        self.next_lsn += 1;
        for at in 0..sectors {
            self.layers[0][(sector - FIRST + at) as usize] = origin(at);
        }
    }

    fn log(&mut self, which: usize, gap: bool) {
        let UnwrittenRecord {
            lsn,
            sector,
            sectors,
        } = self.waiting.remove(which);
        let (segment, held) = self.log.last_mut().unwrap();
        held.extend(gap.then_some((0, 0)));
        let offset = held.len() as u64 * SECTOR_SIZE;
        held.extend((0..sectors).map(|at| (lsn, at)));
        self.index.relocate(sector, sectors, lsn, segment, offset);
        let range = (sector - FIRST) as usize..(sector - FIRST + sectors) as usize;
        for origin in self
            .layers
            .iter_mut()
            .flat_map(|layer| &mut layer[range.clone()])
        {
            if let SectorOrigin::Record {
                lsn: of, logged, ..
            } = origin
                && *of == lsn
            {
                *logged = true;
            }
        }
    }

    fn expected(&self, sector: u64) -> SectorOrigin {
        let [active, frozen] = self
            .layers
            .each_ref()
            .map(|layer| layer[(sector - FIRST) as usize]);
        if active == SectorOrigin::Base {
            frozen
        } else {
            active
        }
    }

    fn origin(&self, piece: &Piece, at: u64) -> SectorOrigin {
        match &piece.place {
            None => SectorOrigin::Base,
            Some(Location::Zero { unmap, lsn }) => SectorOrigin::Zero {
                unmap: *unmap,
                lsn: *lsn,
            },
            Some(Location::Memory { payload, offset }) => {
                let bytes = &payload[offset + (at * SECTOR_SIZE) as usize..];
                let number =
                    |from: usize| u64::from_le_bytes(bytes[from..from + 8].try_into().unwrap());
                SectorOrigin::Record {
                    lsn: number(0),
                    sector: number(8),
                    logged: false,
                }
            }
            Some(Location::Log { segment, offset }) => {
                let held = self
                    .log
                    .iter()
                    .find(|(other, _)| Arc::ptr_eq(other, segment));
                let (lsn, sector) = held.unwrap().1[(offset / SECTOR_SIZE + at) as usize];
                SectorOrigin::Record {
                    lsn,
                    sector,
                    logged: true,
                }
            }
        }
    }

    fn check_memory(&self) {
        let Index { active, frozen } = &self.index;
        let frozen = frozen.as_ref().map_or(0, |frozen| frozen.check());
        assert_eq!(self.memory.bytes(), active.check() + frozen);
    }

    fn check(&self, sector: u64, sectors: u64) {
        let mut pieces = Vec::new();
        self.index.pieces(sector, sectors, &mut pieces);
        let mut at = sector;
        for piece in &pieces {
            assert!(piece.sector == at && piece.sectors > 0);
            for i in 0..piece.sectors {
                assert_eq!(
                    self.origin(piece, i),
                    self.expected(at + i),
                    "sector {}",
                    at + i - FIRST
                );
            }
            at += piece.sectors;
        }
        assert_eq!(at, sector + sectors);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]
    #[test]
    fn agrees_with_an_array(steps in steps(), looks in prop::collection::vec((0..SECTORS, 1..40u64), 20)) {
        let mut model = Model::new();
        for (number, step) in steps.into_iter().enumerate() {
            model.run(step);
            if number % 16 == 0 {
                model.check_memory();
            }
        }
        model.check_memory();
        model.check(FIRST, SECTORS);
        // Beyond both ends, too.
        model.index.pieces(0, 1 << 40, &mut Vec::new());
        for (at, len) in looks {
            model.check(FIRST + at, len.min(SECTORS - at));
        }
        while !model.waiting.is_empty() {
            model.log(0, false);
        }
        model.check(FIRST, SECTORS);
        prop_assert_eq!(model.index.active.waiting(), 0);
    }

    /// An index that was built is the one that has got the records one by one.
    #[test]
    fn what_is_built_is_what_was_inserted(records in prop::collection::vec((0..SECTORS, 1..60_u32), 0..200)) {
        let (mut built, mut inserted) = (IndexBuilder::default(), ExtentMap::default());
        let segment = segment();
        for (lsn, &(at, sectors)) in (0..).zip(&records) {
            let place = in_log(&segment, lsn * 100);
            built.add(FIRST + at, sectors, place.clone());
            inserted.insert(FIRST + at, u64::from(sectors), lsn, place);
        }
        let built = built.finish().unwrap();
        built.check();
        let all = |map: &ExtentMap| map.iter().map(|piece| format!("{piece:?}")).collect::<Vec<_>>();
        prop_assert_eq!(all(&built), all(&inserted));
    }
}

/// The same with enough records to split leaves, on both sides of the point where the high half of
/// a sector's number changes.
#[test]
fn a_large_index_is_built_as_it_is_inserted() {
    const SECTORS: u64 = 60_000;
    let first = (1 << 32) - SECTORS / 2;
    let (mut built, mut inserted) = (IndexBuilder::default(), ExtentMap::default());
    let segment = segment();
    for lsn in 0..20_000_u64 {
        let (at, sectors) = (lsn * 7919 % SECTORS, 1 + lsn % 5);
        let place = match lsn % 11 {
            0 => zero(false, 1),
            _ => in_log(&segment, lsn * 8),
        };
        built.add(first + at, sectors as u32, place.clone());
        inserted.insert(first + at, sectors, lsn, place);
    }
    let built = built.finish().unwrap();
    built.check();
    // Where each sector's bytes are. The extents themselves may be divided at other places.
    let places = |map: &ExtentMap| {
        let mut places = Vec::new();
        map.visit(first, SECTORS + 4, &mut |piece| {
            let place = |sector| piece.place.as_ref().map(|place| place.skip(sector));
            places.extend((0..piece.sectors).map(|sector| format!("{:?}", place(sector))));
        });
        places
    };
    assert!(built.leaves() > 16 && places(&built) == places(&inserted));
}

/// What does not fit is given up while it is built, and takes no memory from then on.
#[test]
fn a_limited_index_never_takes_more() {
    let memory = IndexMemory::default();
    let limit = ExtentLimit::beside(&memory, 0, Path::new("log"));
    let build = |extents: u64| {
        let (mut builder, mut peak) = (IndexBuilder::within(Some(limit.clone())), 0);
        for number in 0..extents {
            builder.add(2 * (number * 7919 % extents), 1, zero(false, 1));
            peak = peak.max(memory.bytes());
        }
        (builder.finish(), peak)
    };
    let (built, _) = build(20_000);
    let built = built.unwrap();
    assert_eq!(memory.bytes(), built.check());
    drop(built);
    let (refused, peak) = build(200_000);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("index-memory"), "{error}");
    assert!((limit.most / 2..=limit.most).contains(&peak), "{peak}");
    assert_eq!(memory.bytes(), 0);
    // Checksums count too.
    let mut builder = IndexBuilder::within(Some(limit.clone()));
    builder.add_checksums(limit.most);
    assert!(!builder.is_full());
    builder.add_checksums(1);
    assert!(builder.is_full() && memory.bytes() == 0);
    builder.finish().unwrap_err();
}

#[test]
fn what_is_adjacent_on_the_disk_and_in_the_log_is_one_extent() {
    let (mut map, segment) = (ExtentMap::default(), segment());
    for lsn in 0..1000 {
        let payload = payload(lsn, 8);
        map.insert(lsn * 8, 8, lsn, Location::Memory { payload, offset: 0 });
    }
    assert_eq!(map.iter().count(), 1000);
    for lsn in 0..1000 {
        // A batch header every hundred records.
        let offset = (lsn + lsn / 100) * 4096;
        map.relocate(lsn * 8, 8, lsn, &segment, offset);
    }
    map.check();
    // One extent for each batch, and one more where a batch lies in two leaves.
    assert!(
        (10..=14).contains(&map.iter().count()),
        "{}",
        map.iter().count()
    );
    // Extents that are in the log from the start, as in recovery, are joined too.
    let mut map = ExtentMap::default();
    for sector in 0..100_000 {
        map.insert(sector, 1, sector, in_log(&segment, sector));
    }
    assert_eq!(map.iter().count(), 1);
    for sector in (0..100_000).rev() {
        map.insert(sector, 1, sector, zero(sector % 2 == 0, 1));
    }
    assert_eq!(map.iter().count(), 100_000);
    map.insert(0, 100_000, 0, zero(true, 1));
    assert_eq!(map.iter().count(), 1);
    map.check();
}

/// The goal is 24 bytes of memory for each logged 4 KiB block, tree and allocator included, however
/// the blocks lie.
#[test]
fn a_logged_block_takes_less_than_24_bytes() {
    const BLOCKS: u64 = 1 << 20;
    // With an odd multiplier each number below a power of two comes once, in an order without
    // neighbours.
    fn scattered(i: u64) -> u64 {
        i.wrapping_mul(0x9e37_79b1) % BLOCKS
    }
    type KeyOrder = fn(u64) -> u64;
    let orders: [(&str, KeyOrder); 4] = [
        ("scattered, all of the disk", |i| scattered(i) * 8),
        ("scattered, one block in eight", |i| scattered(i) * 64),
        ("ascending with gaps", |i| i * 16),
        ("descending", |i| (BLOCKS - 1 - i) * 8),
    ];
    for (name, sector) in orders {
        let segments: Vec<_> = (0..64).map(|_| segment()).collect();
        let mut map = ExtentMap::default();
        let payload = payload(0, 8);
        let before = heap::bytes();
        let mut worst: f64 = 0.0;
        for first in (0..BLOCKS).step_by(64) {
            for i in first..first + 64 {
                let payload = payload.clone();
                map.insert(sector(i), 8, i, Location::Memory { payload, offset: 0 });
            }
            for i in first..first + 64 {
                let segment = &segments[(i >> 14) as usize];
                map.relocate(
                    sector(i),
                    8,
                    i,
                    segment,
                    (i % (1 << 14) + 1 + i / 64) * 4096,
                );
            }
            let blocks = first + 64;
            if blocks >= 1024 {
                worst = worst.max((heap::bytes() - before) as f64 / blocks as f64);
            }
        }
        let heap = heap::bytes() - before;
        let counted = map.check() as f64 / heap as f64;
        assert!(
            (0.9..=1.0).contains(&counted),
            "{name}: {counted} of the memory is counted"
        );
        let bytes = heap as f64 / BLOCKS as f64;
        println!("{name}: {bytes:.2} bytes a block, {worst:.2} at most on the way");
        assert_eq!(map.iter().count() as u64, BLOCKS, "nothing is adjacent");
        assert!(
            (16.0..=24.0).contains(&bytes) && worst <= 24.0,
            "{name}: {bytes} {worst}"
        );
    }
}
