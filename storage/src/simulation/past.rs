//! The past in a random history: looks at it, restores in place, and marks.

use std::collections::HashMap;
use std::path::Path;

use super::fixture::control_of;
use super::history::History;
use super::medium::LOG;
use super::oracle::{DiskContents, RestoredState, Violation, difference, readable, value_of};
use super::trace;
use crate::error::ErrorKind;
use crate::format::Control;
use crate::index::{ExtentMap, Location};
use crate::medium::segment::LogRead;
use crate::recovery::contents::VerifyScope;
use crate::recovery::replay::read_log_until;
use crate::recovery::scan::{FoundRecord, scan};
use crate::store::dump::text_of;
use crate::view::saved::read_saved;
use crate::{Buffer, MarkText};

const MINUTE: u64 = 60_000_000;

/// Whether a mark was written when the log was opened, for a disk with another image.
fn is_of_open(text: &Option<MarkText>) -> bool {
    let text = text.as_ref().map(MarkText::as_str);
    text == Some("a disk has another image")
}

impl History {
    /// Looks at the disks as they were after a random record since the last checkpoint, or after
    /// each if the log always keeps history, and at all older states that the log still has.
    pub(super) fn look_back(&mut self) -> Result<(), Violation> {
        let broken = |error| format!("looking back at a legal crash: {error}");
        let control = control_of(&self.fixture.medium).map_err(broken)?.control;
        let (horizon, last) = self.span(&control)?;
        // Snapshots that were made while clients were at work.
        let made = self.pins.iter().filter(|pin| pin.lsn >= self.first_lsn);
        let made: Vec<_> = made.map(|pin| (pin.lsn, self.after(pin.lsn))).collect();
        self.past.extend(made);
        let pins = &self.pins;
        let pinned = |lsn: u64| pins.iter().any(|pin| pin.lsn == lsn);
        self.past.retain(|(lsn, _)| *lsn >= horizon || pinned(*lsn));
        self.look_again()?;
        let from = horizon.max(self.first_lsn - 1);
        let Some(records) = last.checked_sub(from) else {
            return Ok(());
        };
        let points = if self.keeps {
            from..=last
        } else {
            let point = from + self.random.below(records + 1);
            point..=point
        };
        let bases = self.fixture.bases();
        for point in points {
            self.totals.looked_back += 1;
            self.totals.pinned += u64::from(!self.pins.is_empty());
            self.expect_as_of((&control, &bases), point, &self.after(point))?;
        }
        Ok(())
    }

    /// Looks at all older states that the log still has.
    pub(super) fn look_again(&mut self) -> Result<(), Violation> {
        let broken = |error| format!("looking back at a legal crash: {error}");
        let control = control_of(&self.fixture.medium).map_err(broken)?.control;
        let header = &control.header;
        let horizon = header.checkpoint_lsn.max(header.copying_lsn).get();
        let pins = &self.pins;
        let pinned = |lsn: u64| pins.iter().any(|pin| pin.lsn == lsn);
        let bases = self.fixture.bases();
        for (lsn, wanted) in &self.past {
            let passed = *lsn < horizon;
            if !passed || pinned(*lsn) {
                self.totals.seen_again += 1;
                self.totals.saved += u64::from(passed);
                self.expect_as_of((&control, &bases), *lsn, wanted)?;
            }
        }
        Ok(())
    }

    /// The oldest and the newest LSN at which the log has the disks.
    fn span(&self, control: &Control) -> Result<(u64, u64), Violation> {
        let mut last = 0;
        let visit = &mut |record: FoundRecord<'_>| {
            // A recovery that was cut gave an LSN to the state of a disk with another image: above
            // those of requests that were lost, and the oracle numbers these.
            if !(record.is_mark() && is_of_open(&text_of(&record).ok().flatten())) {
                last = record.lsn;
            }
        };
        let (medium, dir) = (&self.fixture.medium, Path::new(LOG));
        let scanned = scan(
            medium,
            dir,
            control,
            VerifyScope::Tail,
            visit,
            &mut |_, _| {},
        );
        scanned.map_err(|error| format!("looking back at a legal crash: {error}"))?;
        let header = &control.header;
        let horizon = header.checkpoint_lsn.max(header.copying_lsn);
        Ok((horizon.get(), last))
    }

    /// What the oracle knows the disks to have been as of an LSN, which is not before its first
    /// change.
    pub(super) fn after(&self, lsn: u64) -> DiskContents {
        self.oracle
            .after((lsn + 1).saturating_sub(self.first_lsn) as usize)
    }

    /// Whether the disks as of an LSN are these. The control file and the base images are as given.
    fn expect_as_of(
        &self,
        (control, bases): (&Control, &DiskContents),
        lsn: u64,
        wanted: &DiskContents,
    ) -> Result<(), Violation> {
        let broken = |error| format!("looking back at a legal crash: {error}");
        let mut known = control.clone();
        let read = read_log_until(&self.fixture.medium, Path::new(LOG), &mut known, lsn);
        let (_, indexes) = read.map_err(broken)?;
        let mut found = bases.clone();
        let files = &self.fixture.medium;
        let files_saved = control.saved_files();
        let header = &control.header;
        let horizon = header.checkpoint_lsn.max(header.copying_lsn).get();
        for (place, (sectors, wanted)) in found.iter_mut().zip(wanted).enumerate() {
            let entry = self.fixture.entry(control, place);
            // A disk that has left the log, or whose records up to there were discarded, or copied
            // when it left the log in use.
            let Some(disk) = entry.filter(|disk| disk.void_lsn.get() <= lsn) else {
                sectors.clone_from(wanted);
                continue;
            };
            // Reading the medium directly does not reveal that another image is in its place.
            if self.is_unknown(place, lsn) || self.is_replaced(place, lsn) {
                sectors.clone_from(wanted);
                continue;
            }
            let id = disk.id.get();
            let mut snapshots = control.snapshots.iter();
            let saved = if snapshots.any(|entry| entry.lsn == lsn && entry.has(id)) {
                read_saved(
                    files,
                    Path::new(LOG),
                    &files_saved,
                    (id, disk.size.get()),
                    lsn..u64::MAX,
                    None,
                )
            } else if lsn >= horizon {
                Ok(None)
            } else {
                // The base images have moved past a snapshot of the other disk only.
                sectors.clone_from(wanted);
                continue;
            };
            let saved = saved.map_err(broken)?;
            let in_log = indexes.get(&id).map(|waiting| &waiting.extents);
            let extents = saved.as_ref().or(in_log);
            for piece in extents.into_iter().flat_map(ExtentMap::iter) {
                let range = piece.sector as usize..(piece.sector + piece.sectors) as usize;
                let bytes = match piece.place {
                    Some(Location::Log { segment, offset }) => {
                        let len = piece.sectors as usize * 512;
                        LogRead::new(segment, offset, len).read().map_err(broken)?
                    }
                    _ => Buffer::zeroed(piece.sectors as usize * 512),
                };
                let values = bytes.chunks(512).map(value_of);
                sectors[range]
                    .iter_mut()
                    .zip(values)
                    .for_each(|(sector, value)| *sector = value);
            }
        }
        if found == *wanted {
            Ok(())
        } else {
            Err(format!(
                "as of LSN {lsn} the disks differ: {}",
                difference(&readable(&found), wanted)
            ))
        }
    }

    /// Whether a disk's records up to an LSN were discarded, or copied when it left the log in use.
    fn is_void(&self, control: &Control, disk: usize, lsn: u64) -> bool {
        let entry = self.fixture.entry(control, disk);
        entry.is_some_and(|entry| lsn < entry.void_lsn.get())
    }

    /// Each mark that was durable is in the log, unless the base images have passed it, and no
    /// other.
    pub(super) fn find_marks(&mut self) -> Result<(), Violation> {
        let broken = |error| format!("looking back at a legal crash: {error}");
        let control = control_of(&self.fixture.medium).map_err(broken)?.control;
        let (mut found, mut failed) = (HashMap::new(), None);
        let (mut last, mut wrong) = (0, None);
        let (latest, set_back) = (self.clock.latest(), self.clock.set_back);
        let mut went_back = 0;
        let visit = &mut |record: FoundRecord<'_>| {
            let time = record.batch.unix_us.get();
            // Only a clock that was set back by more than a minute takes times back.
            if time > latest || time < last && !(set_back && last - time > MINUTE) {
                wrong = Some((record.lsn, time, last));
            }
            went_back += u64::from(time < last);
            last = time;
            if !record.is_mark() {
                return;
            }
            match text_of(&record) {
                Ok(text) => drop(found.insert(record.lsn, text)),
                Err(error) => failed = Some(error),
            }
        };
        let (medium, progress) = (&self.fixture.medium, &mut |_, _| {});
        let scanned = scan(
            medium,
            Path::new(LOG),
            &control,
            VerifyScope::Tail,
            visit,
            progress,
        );
        scanned.map_err(broken)?;
        failed.map_or(Ok(()), |error| Err(broken(error)))?;
        self.totals.went_back += went_back;
        if let Some((lsn, time, before)) = wrong {
            return Err(format!(
                "the time of LSN {lsn} is {time}, that of the one before is {before}, and no clock \
                 showed more than {latest}"
            ));
        }
        for (index, text, durable) in self.oracle.marks() {
            let lsn = self.first_lsn + index as u64;
            let kept = durable && lsn > control.header.checkpoint_lsn.get();
            match found.remove(&lsn) {
                Some(there) if there.as_ref() == Some(&text) => self.totals.marks += 1,
                None if !kept => {}
                Some(there) if !kept && is_of_open(&there) => {}
                there => return Err(format!("the mark '{text}' at LSN {lsn} is {there:?}")),
            }
        }
        let mut others = found.iter();
        match others.find(|(lsn, text)| **lsn >= self.first_lsn && !is_of_open(text)) {
            None => Ok(()),
            Some((lsn, _)) => Err(format!(
                "LSN {lsn} is a mark that nobody wrote: {:?}",
                found[lsn]
            )),
        }
    }

    /// Now and then restores a disk in place, perhaps while power is lost, to a record since the
    /// last checkpoint or to an older state that the log still has. `kept`: what a killed process
    /// left must survive, so power is not lost before the log is durable.
    pub(super) fn rewind(&mut self, kept: bool) -> Result<Option<RestoredState>, Violation> {
        if !self.random.one_in(3) {
            return Ok(None);
        }
        let broken = |error| format!("a restore in place after a legal crash: {error}");
        let control = control_of(&self.fixture.medium).map_err(broken)?.control;
        let (horizon, newest) = self.span(&control)?;
        let (from, disk) = (
            horizon.max(self.first_lsn - 1),
            self.random.below(self.fixture.bases().len() as u64),
        );
        if self.fixture.left[disk as usize] {
            return Ok(None);
        }
        let records = newest.checked_sub(from).filter(|_| self.random.one_in(2));
        // The base images have moved past the others.
        let unknown = |lsn| {
            let disk = disk as usize;
            self.is_unknown(disk, lsn) || self.is_replaced(disk, lsn)
        };
        let past = self.past.iter();
        let past = past.filter(|(lsn, _)| *lsn >= horizon && !unknown(*lsn));
        let past: Vec<_> = past.cloned().collect();
        let (to, then) = match (records, past.len() as u64) {
            (Some(records), _) => {
                let to = from + self.random.below(records + 1);
                (to, self.after(to))
            }
            (None, 0) => return Ok(None),
            (None, all) => past[self.random.below(all) as usize].clone(),
        };
        if !kept && self.random.one_in(3) {
            let ticks = self.random.below(6);
            self.fixture.medium.lock().ticks = Some(ticks);
        }
        let done = self.fixture.rewind(disk as usize, to);
        let crashed = self.fixture.medium.lock().crashed;
        trace(|| format!("disk {disk} is restored in place to LSN {to}, cut: {crashed}: {done:?}"));
        let disk = disk as usize;
        let restored = |mut state: DiskContents| {
            state[disk].clone_from(&then[disk]);
            state
        };
        let may_be = match done {
            Ok(done) => {
                // What the restore found is durable from then on. It may have opened the log with
                // another image of a disk: that mark has an LSN above those of lost requests.
                let before = self.after(done.from_lsn.min(newest.max(horizon)));
                self.oracle.judge(&before)?;
                let after = restored(before.clone());
                self.totals.rewound += 1;
                self.past.push((done.from_lsn, before));
                self.past.extend(done.lsn.map(|lsn| (lsn, after.clone())));
                vec![after]
            }
            Err(_) if crashed => {
                let before = (from..=newest).map(|lsn| self.after(lsn));
                let legal = before.filter(|before| self.oracle.judge(before).is_ok());
                legal.map(restored).collect()
            }
            // There is no such record, or none of the disk, so the number is not a point. Or the
            // disk's records were discarded, and saved files have what a snapshot needs. Or the log
            // is full of what must stay.
            Err(error)
                if error.kind() == ErrorKind::NotFound
                    || error.is_no_space()
                    || error.kind() == ErrorKind::InvalidInput
                        && self.is_void(&control, disk, to) =>
            {
                self.fixture.medium.lock().ticks = None;
                return Ok(None);
            }
            Err(error) => return Err(broken(error)),
        };
        self.totals.cut_rewinds += u64::from(crashed);
        self.fixture.medium.lock().ticks = None;
        if crashed || self.random.one_in(2) {
            self.end_process();
        }
        let certain = may_be.len() == 1 && !crashed;
        Ok(Some(RestoredState { may_be, certain }))
    }
}
