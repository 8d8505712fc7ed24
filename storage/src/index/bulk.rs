//! Building an index from the records of a whole log.

use super::extents::ExtentMap;
use super::place::Place;

/// Records that are inserted together. In a large index neighbours are found much faster than records in any order.
const TOGETHER: usize = if cfg!(test) { 32 } else { 1 << 17 };

/// A record, in a list in the order of the log.
struct Record {
    sector: u64,
    sectors: u32,
    /// Its position in the list.
    number: u32,
    place: Place,
}

impl Record {
    fn end(&self) -> u64 {
        self.sector + u64::from(self.sectors)
    }
}

/// An index under construction.
#[derive(Default)]
pub(crate) struct Builder {
    map: ExtentMap,
    records: Vec<Record>,
}

impl Builder {
    /// Adds a record that is in the log, or that has no payload. It replaces all that earlier ones put into its range.
    pub(crate) fn add(&mut self, sector: u64, sectors: u32, place: Place) {
        self.records.push(Record {
            sector,
            sectors,
            number: self.records.len() as u32,
            place,
        });
        if self.records.len() == TOGETHER {
            self.insert();
        }
    }

    /// The index of all records.
    pub(crate) fn finish(mut self) -> ExtentMap {
        self.insert();
        self.map
    }

    /// Inserts the records in the order of their sectors, and those that overlap in the order of the log.
    fn insert(&mut self) {
        let records = &mut self.records;
        records.sort_unstable_by_key(|record| (record.sector, record.number));
        let mut rest = &mut records[..];
        while let Some(first) = rest.first() {
            let (mut end, mut count) = (first.end(), 1);
            while let Some(next) = rest.get(count).filter(|next| next.sector < end) {
                (end, count) = (end.max(next.end()), count + 1);
            }
            let (overlapping, others) = rest.split_at_mut(count);
            overlapping.sort_unstable_by_key(|record| record.number);
            for record in overlapping {
                let (sectors, place) = (u64::from(record.sectors), record.place.clone());
                self.map.insert(record.sector, sectors, 0, place);
            }
            rest = others;
        }
        records.clear();
    }
}
