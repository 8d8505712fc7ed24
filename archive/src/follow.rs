//! A replica: a directory that has all disks of an archived log, and follows it.
//!
//! It begins as a restore does. Then the segments get each new part, and the control file gets the
//! log's new end. When the archive has newer images, the chunks that differ are fetched, and the
//! segments before them are removed. Between two ticks the replica is a log as a kill leaves it,
//! which anybody may read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use walvisor_storage::{
    AssembledLog, Commit, FetchMap, LockedLog, LogParts, LogRoot, Point, Progress, segment_path,
    write_segment,
};

use crate::epoch::{self, Claim, LogCopy, random};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{self, ObjectId};
use crate::lineage::{Catalog, Lineage, find_part, read_base, read_part};
use crate::object::{self, BaseHeader, BaseImage, PartHeader};
use crate::remote::Archive;
use crate::restore::{
    LogReader, Plan, REPLICA_NOTE, RestoredDisk, clear_log, fetch_chunk, image_paths, log_dir_of,
    refuse_occupied, restored_disks, unfinished, write_note,
};
use crate::uploader::now_us;

/// The archive is searched for newer images after this time.
const SEARCH: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 600 });
/// After this time if another writer has claimed the next epoch.
const LOST_SEARCH: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 10 });
/// Most parts that are taken at once, of 8 MiB or so each.
const TICK_PARTS: usize = 16;
/// Most ticks of a replica before it takes the archive from a host that still writes, and most
/// attempts to take it.
const MOST_STEPS: usize = if cfg!(test) { 4 } else { 64 };
/// Most ticks until it has what that host has sent before it knew.
const MOST_STEPS_BEHIND: usize = 1000;
/// The replica notes how far its images are after so many chunks.
const NOTED_CHUNKS: usize = 64;

/// What a replica has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaReport {
    /// The newest record.
    pub last: Commit,
    /// Records that came with this tick.
    pub records: u64,
    /// Whether the archive has nothing newer.
    pub caught_up: bool,
    /// When the newest part was made, in microseconds since 1970, by the clock of the machine that
    /// has sent it.
    pub made_us: u64,
}

/// What a promoted replica has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// The newest record.
    pub commit: Commit,
    /// Whether the archive has newer records, which can't be restored: it has begun anew, and its
    /// images were not complete.
    pub left_behind: bool,
}

/// A directory that follows an archive.
pub struct Replica<'a> {
    archive: &'a Archive,
    dir: PathBuf,
    /// Locked while this one follows.
    _lock: File,
    note: ReplicaNote,
    base: BaseHeader,
    reader: LogReader,
    images: Vec<PathBuf>,
    log_dir: PathBuf,
    /// The newest part that the replica has, and when it was made.
    at: ObjectId,
    made_us: u64,
    searched: Instant,
    /// An epoch that was claimed by another writer since.
    superseded: Option<u64>,
    /// Whether the archive's newest line is another one, without images.
    left_behind: bool,
    /// Segment files that have changed since the control file was written.
    changed: BTreeSet<u32>,
    /// The log has been as far as this, and must not end before it.
    reached: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct ReplicaNote {
    archive: String,
    /// The images are those of this base, or become them.
    base: Option<ObjectId>,
    /// What they were before.
    before: Option<ObjectId>,
    /// For each image, the chunks that are those of `base`.
    chunks: Vec<usize>,
    /// Whether all are.
    complete: bool,
    /// SHA-256 of what the control file says, or may say already.
    roots: Vec<String>,
    /// Which segment file has which sequence.
    slots: BTreeMap<u64, u32>,
    /// The newest part that the log has.
    at: Option<ObjectId>,
    /// The names of the images and of the log's directory.
    images: Vec<PathBuf>,
    log_dir: PathBuf,
}

impl<'a> Replica<'a> {
    /// Makes a replica in a new directory, or goes on with the one that is there. As of the newest
    /// point that the archive has; see [`tick`](Self::tick).
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no archive, or its first images are not complete;
    /// [`ErrorKind::InvalidInput`] if something else is in the directory, another process follows
    /// there, or the replica was opened for writing; [`ErrorKind::Damaged`] if an object is
    /// missing or wrong.
    pub fn open(archive: &'a Archive, dir: &Path, progress: Progress<'_>) -> Result<Self> {
        let made = fs::create_dir_all(dir);
        made.map_err(|error| Error::local("make the directory", dir, error))?;
        let lock = lock(dir)?;
        let note = match fs::read(dir.join(REPLICA_NOTE)) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| {
                let path = dir.join(REPLICA_NOTE);
                let message = format!("{}: {error}; follow in a new directory", path.display());
                Error::new(ErrorKind::Local, message)
            })?,
            Err(_) => {
                // The first note may not have got its name.
                let _ = fs::remove_file(dir.join(unfinished(REPLICA_NOTE)));
                refuse_occupied(dir)?;
                ReplicaNote {
                    archive: archive.shown().to_owned(),
                    ..ReplicaNote::default()
                }
            }
        };
        if note.archive != archive.shown() {
            let message = format!(
                "{}: the replica there is of {}; name another directory",
                dir.display(),
                note.archive
            );
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        let plan = newest_plan(archive)?;
        let mut replica = Self {
            archive,
            dir: dir.to_owned(),
            _lock: lock,
            note,
            images: Vec::new(),
            log_dir: PathBuf::new(),
            reader: LogReader::new(&plan.base, &plan.root, Point::Newest, 0),
            base: plan.base.clone(),
            at: plan.base.first_part,
            made_us: 0,
            searched: Instant::now(),
            superseded: None,
            left_behind: false,
            changed: BTreeSet::new(),
            reached: 0,
        };
        if replica.note.base.is_some() {
            let names = replica.note.images.iter();
            replica.images = names.map(|name| dir.join(name)).collect();
            replica.log_dir = dir.join(&replica.note.log_dir);
            replica.refuse_opened()?;
        }
        if !replica.resume(&plan)? {
            replica.fill(&plan, progress)?;
        }
        Ok(replica)
    }

    /// Whether a replica is in a directory.
    pub fn is_at(dir: &Path) -> bool {
        dir.join(REPLICA_NOTE).exists()
    }

    /// The log's directory.
    pub fn log_dir(&self) -> &Path {
        &self.log_dir
    }

    /// The disks.
    pub fn disks(&self) -> Vec<RestoredDisk> {
        restored_disks(&self.images, &self.base)
    }

    /// Fetches what the archive has got since, or the first of it. What failed is done by the next
    /// call.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store does not answer; [`ErrorKind::InUse`] if somebody
    /// reads the replica; as [`open`](Self::open).
    pub fn tick(&mut self) -> Result<ReplicaReport> {
        self.step(false)
    }

    /// As [`tick`](Self::tick). `search`: whether to search the archive for newer images and other
    /// writers in any case.
    fn step(&mut self, search: bool) -> Result<ReplicaReport> {
        if !self.note.complete {
            // An earlier call has failed in the middle.
            let plan = newest_plan(self.archive)?;
            self.fill(&plan, &mut |_, _| {})?;
        }
        let before = self.reader.last.lsn;
        let mut all = true;
        if self.superseded != Some(self.at.epoch) {
            let parts = self.parts_behind(self.at);
            // After the parts: who claims the archive later has seen them.
            let claim = layout::epoch(self.at.epoch + 1);
            if self.archive.block_on(self.archive.has(&claim))? {
                self.superseded = Some(self.at.epoch);
            } else {
                // One that is damaged is of no moment once another writer goes on before it.
                let parts = parts?;
                all = parts.len() < TICK_PARTS;
                self.take(parts)?;
            }
        }
        let superseded = self.superseded == Some(self.at.epoch);
        let wait = if superseded { LOST_SEARCH } else { SEARCH };
        let mut caught_up = all && !superseded;
        if search || all && self.searched.elapsed() >= wait {
            let plan = self.newer_plan()?;
            self.turn_to(&plan)?;
            caught_up = plan.line.end() == Some(self.at);
            if caught_up {
                self.searched = Instant::now();
            }
        }
        Ok(ReplicaReport {
            last: self.reader.last,
            records: self.reader.last.lsn.saturating_sub(before),
            caught_up,
            made_us: self.made_us,
        })
    }

    /// The parts that follow one in its epoch, or the first of them.
    fn parts_behind(&self, mut at: ObjectId) -> Result<Vec<(PartHeader, Vec<u8>)>> {
        let mut parts = Vec::new();
        while parts.len() < TICK_PARTS {
            at = at.next();
            let Some(part) = self.archive.block_on(find_part(self.archive, at))? else {
                break;
            };
            parts.push(part);
        }
        Ok(parts)
    }

    /// Makes the replica a log of its own, with all that the archive has. Claims the archive first,
    /// so that the machine that has sent all this stops.
    ///
    /// # Errors
    /// As [`tick`](Self::tick). It stays a replica then; say it again.
    pub fn promote(mut self) -> Result<Promotion> {
        let mut attempts = 1;
        let left_behind = loop {
            // A busy host sends parts for ever. Once it has lost the archive, the rest is taken.
            let mut steps = 1;
            while !self.step(steps == 1)?.caught_up && steps < MOST_STEPS {
                steps += 1;
            }
            match self.claim() {
                // Somebody else came first.
                Err(error) if error.kind() == ErrorKind::Fenced && attempts < MOST_STEPS => {
                    attempts += 1;
                }
                claimed => break claimed?,
            }
        };
        let note = self.dir.join(REPLICA_NOTE);
        let removed = fs::remove_file(&note).and_then(|()| File::open(&self.dir)?.sync_all());
        removed.map_err(|error| Error::local("remove", &note, error))?;
        Ok(Promotion {
            commit: self.reader.last,
            left_behind,
        })
    }

    /// Claims the archive, takes all that the writer before has sent until it knew, and claims the
    /// archive behind that. Whether the newest line has records that the replica can't have.
    pub(crate) fn claim(&mut self) -> Result<bool> {
        let claims = self.archive.block_on(Catalog::claims(self.archive))?;
        let newest = claims.last_key_value().map_or(0, |(epoch, _)| *epoch);
        // This one has no parts and follows none, so it is on no line: it only stops the writer. If
        // the promotion ends before the other claim, what was sent is still where it was.
        self.claim_epoch(newest + 1, None)?;
        let mut steps = 1;
        while !self.step(true)?.caught_up {
            // A writer that has lost the archive sends a few parts more, and stops.
            if steps == MOST_STEPS_BEHIND {
                let archive = self.archive.shown();
                let message = format!(
                    "{archive}: somebody still writes it, although this replica has claimed it; \
                     stop the archive's writer, and promote again"
                );
                return Err(Error::new(ErrorKind::Unavailable, message));
            }
            steps += 1;
        }
        self.claim_epoch(newest + 2, Some(self.at))?;
        Ok(self.left_behind)
    }

    fn claim_epoch(&self, epoch: u64, after: Option<ObjectId>) -> Result<()> {
        let LogCopy {
            host,
            copy,
            directory,
        } = LogCopy::at(&self.log_dir)?;
        let claim = Claim {
            epoch,
            writer: random()?,
            owner: format!(
                "process {} on {host} (a promoted replica)",
                std::process::id()
            ),
            host,
            copy,
            directory,
            after,
            promoted: true,
            made_us: now_us(),
        };
        self.archive.block_on(epoch::claim(self.archive, &claim))
    }

    /// Goes on with a replica whose images are complete, if the archive still leads on from it.
    fn resume(&mut self, plan: &Plan<'a>) -> Result<bool> {
        let Some(base) = self.note.base.filter(|_| self.note.complete) else {
            return Ok(false);
        };
        if let Some(at) = self.note.at {
            self.refuse_lost(plan, at)?;
        }
        let Some(lock) = self.lock_log()? else {
            return Ok(false);
        };
        let (base, root) = match self.archive.block_on(read_base(self.archive, base)) {
            Err(error) if error.kind() == ErrorKind::Damaged => return Ok(false),
            read => read?,
        };
        if !plan.line.leads(&base) || !self.note.at.is_some_and(|at| plan.line.has(at)) {
            return Ok(false);
        }
        let root_now = lock.root();
        self.reached = root_now.durable_lsn();
        self.drop_segments(root_now.first_sequence())?;
        drop(lock);
        self.reader = LogReader::new(&base, &LogRoot::decode(&root)?, Point::Newest, 0);
        self.base = base;
        self.read_line(plan)?;
        Ok(true)
    }

    /// Makes the images those of the plan's base, and the log anew.
    fn fill(&mut self, plan: &Plan<'a>, progress: Progress<'_>) -> Result<()> {
        let images = image_paths(&self.dir, &plan.base.images);
        let log_dir = log_dir_of(&self.dir, &images);
        if self.note.base.is_some() {
            // The note names what the control file says until that is gone: a log that it does not
            // name is somebody's.
            let lock = self.lock_log()?;
            self.remove_control()?;
            drop(lock);
            let removed = fs::remove_dir_all(&self.log_dir).or_else(missing_is_fine);
            removed.map_err(|error| Error::local("remove", &self.log_dir, error))?;
            for old in self.images.iter().filter(|old| !images.contains(old)) {
                remove_file(old)?;
                FetchMap::remove(old)?;
            }
        }
        if self.note.base != Some(plan.base.at) {
            // What is half of one base and half of another is not known well enough.
            self.note.before = self.note.base.filter(|_| self.note.complete);
            self.note.base = Some(plan.base.at);
            self.note.chunks = vec![0; images.len()];
        }
        self.note.complete = false;
        self.note.roots.clear();
        self.note.slots.clear();
        let name = |path: &PathBuf| PathBuf::from(path.file_name().expect("made of a name"));
        self.note.images = images.iter().map(name).collect();
        self.note.log_dir = name(&log_dir);
        self.write_note()?;
        (self.images, self.log_dir) = (images, log_dir);
        for (image, path) in plan.base.images.iter().zip(&self.images) {
            let chunk_bytes = plan.base.chunk_bytes;
            FetchMap::create(path, image.bytes, chunk_bytes, |_| false, true)?;
        }
        clear_log(&self.log_dir)?;
        LogCopy::begin(&self.log_dir)?;
        self.fetch_images(plan, progress)?;
        self.note.complete = true;
        self.write_note()?;
        self.changed.clear();
        self.reached = 0;
        self.reader = LogReader::new(&plan.base, &plan.root, Point::Newest, 0);
        self.base = plan.base.clone();
        let read = self.read_line(plan);
        read.inspect_err(|_| self.note.complete = false)
    }

    /// Takes all parts of the plan's line since the base.
    fn read_line(&mut self, plan: &Plan<'a>) -> Result<()> {
        let mut parts = plan.line.from(self.base.first_part).peekable();
        while parts.peek().is_some() {
            self.take_some(plan, &mut parts)?;
        }
        Ok(())
    }

    /// Takes the first of these parts, which follow what the replica has.
    fn take_some(
        &mut self,
        plan: &Plan<'a>,
        places: &mut dyn Iterator<Item = ObjectId>,
    ) -> Result<()> {
        let mut parts = Vec::new();
        let requests = places.take(TICK_PARTS);
        let requests = requests.map(|at| read_part(self.archive, at));
        plan.carry_out(self.archive.in_order(requests, |part| {
            parts.push(part);
            Ok(true)
        }))?;
        self.take(parts)
    }

    /// Takes parts that follow what the replica has.
    fn take(&mut self, parts: Vec<(PartHeader, Vec<u8>)>) -> Result<()> {
        if parts.is_empty() {
            return Ok(());
        }
        let mut lock = self.lock_log()?;
        let taken = self.write_parts(&parts, lock.as_mut());
        // What was read can't be read again.
        taken.inspect_err(|_| self.note.complete = false)
    }

    fn write_parts(
        &mut self,
        parts: &[(PartHeader, Vec<u8>)],
        lock: Option<&mut LockedLog>,
    ) -> Result<()> {
        let segment_size = self.reader.begun.segment_size();
        for (header, body) in parts {
            let (slots, log_dir) = (&mut self.note.slots, &self.log_dir);
            let changed = &mut self.changed;
            self.reader
                .take(header, body, &mut |sequence, offset, bytes| {
                    let slot = slot_of(slots, log_dir, sequence)?;
                    changed.insert(slot);
                    Ok(write_segment(log_dir, slot, segment_size, offset, bytes)?)
                })?;
            (self.at, self.made_us) = (header.at, header.made_us);
        }
        // Before, the images may have what the log lacks.
        if self.reader.last.lsn >= self.base.exact.lsn.max(self.reached) {
            self.note.at = Some(self.at);
            self.install(lock)?;
        }
        Ok(())
    }

    /// Takes the log away. Until it is there again nobody may open the images.
    fn remove_control(&self) -> Result<()> {
        for image in self.images.iter().filter(|image| image.exists()) {
            let len = fs::metadata(image).map(|metadata| metadata.len());
            let len = len.map_err(|error| Error::local("read its length", image, error))?;
            FetchMap::create(image, len, self.base.chunk_bytes, |_| false, true)?;
        }
        let removed = fs::remove_file(self.log_dir.join("control"))
            .and_then(|()| File::open(&self.log_dir)?.sync_all());
        let removed = removed.or_else(missing_is_fine);
        removed.map_err(|error| Error::local("remove the log", &self.log_dir, error))
    }

    /// Lets the log end where the reader is.
    fn install(&mut self, lock: Option<&mut LockedLog>) -> Result<()> {
        let ids = self.base.images.iter().map(|image| image.disk_id);
        let copies: Vec<(u32, PathBuf)> = ids.zip(self.images.iter().cloned()).collect();
        let log = AssembledLog::new(
            &self.log_dir,
            &LogParts {
                begun: &self.reader.begun,
                newest: &self.reader.root,
                images_lsn: self.base.images_lsn,
                first_sequence: self.reader.first_sequence,
                segments: self.note.slots.values().max().map_or(0, |slot| slot + 1),
                last: self.reader.last,
                until: u64::MAX,
                images: &copies,
            },
        )?;
        self.note.roots.push(digest(log.root()));
        self.write_note()?;
        match lock {
            Some(lock) => {
                let changed: Vec<u32> = self.changed.iter().copied().collect();
                log.replace(lock, &changed)?;
            }
            None => log.create()?,
        }
        for image in &self.images {
            FetchMap::remove(image)?;
        }
        self.changed.clear();
        // The next write of the note tells so.
        self.note.roots.drain(..self.note.roots.len() - 1);
        Ok(())
    }

    /// The way to the newest point. Only what may be newer than the replica's images is listed.
    fn newer_plan(&mut self) -> Result<Plan<'a>> {
        let archive = self.archive;
        archive.block_on(async {
            let mut catalog = Catalog::read_from(archive, Some(self.base.first_part)).await?;
            let mut plan = Plan::of(archive, &catalog, Point::Newest).await;
            if plan
                .as_ref()
                .is_err_and(|error| error.kind() == ErrorKind::NotFound)
            {
                // The replica was on a line that is no more.
                catalog = Catalog::read(archive).await?;
                plan = Plan::of(archive, &catalog, Point::Newest).await;
            }
            let plan = plan?;
            let newest = catalog.lines().first().and_then(Lineage::end);
            self.left_behind = newest != plan.line.end();
            Ok(plan)
        })
    }

    /// The archive may have newer images, or another writer.
    fn turn_to(&mut self, plan: &Plan<'a>) -> Result<()> {
        self.refuse_lost(plan, self.at)?;
        if !plan.line.has(self.at) || !plan.line.leads(&self.base) {
            // What the replica has was sent by one that had lost the archive.
            return self.fill(plan, &mut |_, _| {});
        }
        self.take_some(plan, &mut plan.line.from(self.at).skip(1))?;
        let newer = plan.base.at != self.base.at && plan.base.exact.lsn > self.base.exact.lsn;
        if newer && plan.base.exact.lsn <= self.reader.last.lsn {
            self.rebase(plan)?;
        }
        Ok(())
    }

    /// Refuses to throw away what the archive has lost since the replica got it.
    fn refuse_lost(&self, plan: &Plan<'a>, at: ObjectId) -> Result<()> {
        if !plan.has_lost(at) {
            return Ok(());
        }
        let why = format!(
            "it is damaged or missing, and the replica in {} has it: push the log again, or remove \
             {} to keep the replica as a log of its own",
            self.dir.display(),
            self.dir.join(REPLICA_NOTE).display()
        );
        Err(Error::damaged(&layout::part(at), why))
    }

    /// Replaces the images by newer ones, and drops the log before those. Until all chunks are
    /// there, the log makes a mix of both exact.
    fn rebase(&mut self, plan: &Plan<'a>) -> Result<()> {
        let mut lock = self.lock_log()?;
        if image_paths(&self.dir, &plan.base.images) != self.images {
            drop(lock);
            return self.fill(plan, &mut |_, _| {});
        }
        self.base.images_lsn = self.base.images_lsn.max(plan.base.images_lsn);
        self.install(lock.as_mut())?;
        self.note.before = Some(self.base.at);
        self.note.base = Some(plan.base.at);
        self.note.chunks = vec![0; self.images.len()];
        self.note.complete = false;
        self.write_note()?;
        self.fetch_images(plan, &mut |_, _| {})?;
        self.base = plan.base.clone();
        self.reader.first_sequence = plan.base.first_sequence;
        self.reader.begun = plan.root.clone();
        self.note.complete = true;
        let installed = self.install(lock.as_mut());
        installed.inspect_err(|_| self.note.complete = false)?;
        self.drop_segments(plan.base.first_sequence)
    }

    /// Removes segments with lower sequences, which the control file does not need any more.
    fn drop_segments(&mut self, first_sequence: u64) -> Result<()> {
        let kept = self.note.slots.split_off(&first_sequence);
        for slot in std::mem::replace(&mut self.note.slots, kept).into_values() {
            remove_segment(&self.log_dir, slot)?;
        }
        Ok(())
    }

    /// Makes the images those of the plan's base: fetches the chunks that differ.
    fn fetch_images(&mut self, plan: &Plan<'a>, progress: Progress<'_>) -> Result<()> {
        let before = match self.note.before {
            Some(before) => match self.archive.block_on(read_base(self.archive, before)) {
                Err(error) if error.kind() == ErrorKind::Damaged => None,
                read => Some(read?.0.images),
            },
            None => None,
        };
        // Other disks, or other names: nothing is known of what is there.
        let names = |images: &[BaseImage]| -> Vec<(u32, String)> {
            let names = images
                .iter()
                .map(|image| (image.disk_id, image.name.clone()));
            names.collect()
        };
        let before = before.filter(|before| names(before) == names(&plan.base.images));
        if before.is_none() && self.note.before.take().is_some() {
            // So it is not known either what is there already.
            self.note.chunks.fill(0);
            self.write_note()?;
        }
        let total: u64 = plan.base.images.iter().map(|image| image.bytes).sum();
        let mut passed = 0;
        for (i, image) in plan.base.images.iter().enumerate() {
            let path = self.images[i].clone();
            let done = self.note.chunks[i];
            let known = before.as_ref().map(|before| &before[i].chunks);
            let file = File::options().write(true).open(&path);
            let file = file.map_err(|error| Error::local("open the image", &path, error))?;
            let sized = if known.is_none() && done == 0 {
                file.set_len(0)
            } else {
                Ok(())
            };
            let sized = sized.and_then(|()| file.set_len(image.bytes));
            sized.map_err(|error| Error::local("size the image", &path, error))?;
            let same = |number: usize| match known {
                Some(known) => known.get(number) == image.chunks.get(number),
                None => image.chunks[number].is_none(),
            };
            passed += (done as u64 * plan.base.chunk_bytes).min(image.bytes);
            progress(passed, total);
            let wanted = image.chunks.iter().enumerate().skip(done);
            let wanted: Vec<_> = wanted.filter(|(number, _)| !same(*number)).collect();
            let requests = wanted
                .into_iter()
                .map(|(number, hash)| fetch_chunk(self.archive, &plan.base, image, number, hash));
            let (note, dir, mut fetched) = (&mut self.note, &self.dir, 0);
            let each = |(number, bytes): (usize, Option<Vec<u8>>)| {
                let bytes =
                    bytes.unwrap_or_else(|| vec![0; plan.base.chunk_len(image, number) as usize]);
                let written = file.write_all_at(&bytes, number as u64 * plan.base.chunk_bytes);
                written.map_err(|error| Error::local("write", &path, error))?;
                fetched += 1;
                if fetched % NOTED_CHUNKS == 0 {
                    let synced = file.sync_data();
                    synced.map_err(|error| Error::local("sync", &path, error))?;
                    note.chunks[i] = number + 1;
                    write_note(dir, REPLICA_NOTE, note)?;
                }
                progress(passed + number as u64 * plan.base.chunk_bytes, total);
                Ok(true)
            };
            plan.carry_out(self.archive.in_order(requests, each))?;
            let synced = file.sync_data();
            synced.map_err(|error| Error::local("sync", &path, error))?;
            self.note.chunks[i] = image.chunks.len();
            passed += image.bytes - (done as u64 * plan.base.chunk_bytes).min(image.bytes);
            progress(passed, total);
        }
        Ok(())
    }

    /// Locks the log, if it is there already.
    fn lock_log(&self) -> Result<Option<LockedLog>> {
        match LockedLog::lock(&self.log_dir) {
            Ok(lock) => {
                self.refuse_other(&lock.root())?;
                Ok(Some(lock))
            }
            Err(error) if error.kind() == walvisor_storage::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::of_lock(error)),
        }
    }

    /// Refuses a replica that was opened for writing: what it has got since is nowhere else.
    fn refuse_opened(&self) -> Result<()> {
        match LogRoot::read(&self.log_dir) {
            Ok(root) => self.refuse_other(&root),
            Err(error) if error.kind() == walvisor_storage::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn refuse_other(&self, root: &LogRoot) -> Result<()> {
        if self.note.roots.contains(&digest(root)) {
            return Ok(());
        }
        let message = format!(
            "{}: this replica was opened for writing and can no longer follow; follow into \
             another directory, or remove {} to keep it as an ordinary log",
            self.dir.display(),
            self.dir.join(REPLICA_NOTE).display()
        );
        Err(Error::new(ErrorKind::InvalidInput, message))
    }

    fn write_note(&self) -> Result<()> {
        write_note(&self.dir, REPLICA_NOTE, &self.note)
    }
}

/// The way to the newest point.
fn newest_plan(archive: &Archive) -> Result<Plan<'_>> {
    archive.block_on(Plan::find(archive, Point::Newest))
}

/// Locks the directory against another process that follows there.
fn lock(dir: &Path) -> Result<File> {
    let file = File::open(dir).map_err(|error| Error::local("open the directory", dir, error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let message = format!(
                "{}: another process follows there; end that one first",
                dir.display()
            );
            Err(Error::new(ErrorKind::InvalidInput, message))
        }
        Err(TryLockError::Error(error)) => Err(Error::local("lock the directory", dir, error)),
    }
}

/// The segment file for a sequence: the lowest that is free, if it has none yet.
fn slot_of(slots: &mut BTreeMap<u64, u32>, log_dir: &Path, sequence: u64) -> Result<u32> {
    if let Some(slot) = slots.get(&sequence) {
        return Ok(*slot);
    }
    let taken: BTreeSet<u32> = slots.values().copied().collect();
    let free = (0..)
        .find(|slot| !taken.contains(slot))
        .expect("few segments");
    // What an earlier attempt has left there is not part of this one.
    remove_segment(log_dir, free)?;
    slots.insert(sequence, free);
    Ok(free)
}

fn remove_segment(log_dir: &Path, slot: u32) -> Result<()> {
    remove_file(&segment_path(log_dir, slot))
}

/// Removes a file, which need not be there.
fn remove_file(path: &Path) -> Result<()> {
    let removed = fs::remove_file(path).or_else(missing_is_fine);
    removed.map_err(|error| Error::local("remove", path, error))
}

fn missing_is_fine(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

fn digest(root: &LogRoot) -> String {
    object::hash(&root.contents())
}
