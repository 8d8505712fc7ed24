//! Uploading a log, in use or not.
//!
//! Each tick reads what is new in the log, puts it into one part, and creates that under the next
//! number. The state here changes only once the part is certainly there; so a tick that fails is
//! simply repeated, and a process that is killed leaves nothing half-done: the next one reads the
//! archive's end and goes on from there.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use walvisor_storage::{Commit, FollowStep, LogFollower, LogPiece, LogPlace, LogRoot};

use crate::base::{BaseCopy, BaseProgress, KnownChunks, NoticeWatch, lost_chunks, refuse_spilled};
use crate::epoch::{self, Claim, LogCopy, random};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{self, ObjectId};
use crate::lineage::{Catalog, Lineage, read_base, read_root, whole_part};
use crate::object::{self, BaseHeader, Moment, PartHeader, PartPiece, note_clock};
use crate::remote::{Archive, CreateOutcome};

/// Most bytes of log in a part, or one batch more.
const PART_BYTES: usize = if cfg!(test) { 256 << 10 } else { 8 << 20 };
/// How often a writer that has nothing to send checks that nobody else has the archive.
pub const IDLE_CHECK: Duration = Duration::from_secs(60);
/// How often one checks that sends parts, at most.
pub const BUSY_CHECK: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 1 });

/// The images are copied again after so many segments: a restored log may have 65,536.
const MOST_SEGMENTS: u64 = if cfg!(test) { 64 } else { 32_768 };
/// How often to look whether somebody still removes what is too old.
const EXPIRING_CHECK: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 10 });
/// How long to wait after a copy of the images has failed.
const COPY_PAUSE: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 10 });
/// How often durable records may not be found before they count as damaged.
const MOST_MISSING: u32 = 10;

/// How to upload a log.
#[derive(Clone, Debug)]
pub struct UploadOptions {
    /// The base images are copied again after this time, so that a restore needs less of the log.
    /// `None`: only where the log needs it.
    pub base_every: Option<Duration>,
    /// Copy them once at most, if the log needs no more.
    pub copy_once: bool,
    /// Begin anew although another machine has written the archive since, with records that this
    /// log does not have.
    pub take_over: bool,
    /// Somebody waits for each part. After each, make certain that nobody else has claimed the
    /// archive: whoever claims it later finds what was reported as kept. Copy images in small
    /// steps.
    pub check_each: bool,
}

impl Default for UploadOptions {
    fn default() -> Self {
        Self {
            base_every: Some(Duration::from_secs(24 * 3600)),
            copy_once: false,
            take_over: false,
            check_each: false,
        }
    }
}

/// What an uploader has done, and what is left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tick {
    /// The newest record in the archive.
    pub last: Commit,
    /// Records that were sent with this tick.
    pub records: u64,
    /// Bytes of log that were sent with this tick, before compression.
    pub log_bytes: u64,
    /// Whether everything that the log had is in the archive.
    pub caught_up: bool,
    /// The copy of the base images, if one is under way.
    pub base: Option<BaseProgress>,
    /// Whether the disks can be restored from the archive as of `last`.
    pub restorable: bool,
}

/// Uploads one log to one archive.
pub struct Uploader<'a> {
    archive: &'a Archive,
    log_dir: PathBuf,
    /// The log's UUID.
    log: String,
    options: UploadOptions,
    claim: Claim,
    /// When it was last certain that nobody else has claimed the archive.
    checked: Instant,
    /// Whether a part was sent since.
    unchecked: bool,
    follower: LogFollower,
    /// The newest root.
    root: LogRoot,
    /// No images on the line can lack records up to here.
    line_from: u64,
    /// The log is durable up to here, as its owner has told.
    expected: u64,
    /// How often durable records were not found.
    missing: u32,
    /// Pieces that were read and are not in the archive yet.
    pending: Vec<LogPiece>,
    pending_bytes: usize,
    /// The part that may or may not be there already.
    attempt: Option<Attempt>,
    state: UploadState,
    base: Base,
    /// Whether the line has images that are complete.
    restorable: bool,
    /// The last records of the batches that were read, while images are copied.
    batches: Vec<Commit>,
    /// The chunks of the newest manifest.
    chunks: KnownChunks,
    next_base: u64,
    /// No other copy begins before: copies take half of the time at most.
    pub(crate) rest: Option<Instant>,
    /// The images are not copied before, because that has failed.
    copy_after: Option<Instant>,
    copy_error: Option<Error>,
    /// Why the base images are copied again.
    why_base: Option<String>,
    pub(crate) watch: NoticeWatch,
    /// For whom the images wait.
    wait: Option<String>,
    told_wait: bool,
}

/// A part that was made.
struct Attempt {
    object: Bytes,
    /// Pending pieces that it has.
    pieces: usize,
    /// What the archive has then.
    after: UploadState,
}

/// What the archive has, as far as the next part needs it.
#[derive(Clone)]
struct UploadState {
    /// The next part.
    next: ObjectId,
    last: Commit,
    end: Option<LogPlace>,
    segments: Vec<(u64, ObjectId)>,
    set_back: Vec<Moment>,
    /// The newest root in this epoch; empty: none.
    root: Vec<u8>,
    root_at: ObjectId,
}

/// The base images that the parts now make exact.
enum Base {
    /// None yet.
    None,
    Copying(Box<BaseCopy>),
    /// Its manifest is there; whether all its chunks are is not known yet.
    Sent {
        at: ObjectId,
        made_us: u64,
        first_sequence: u64,
        /// When the copy began, if this uploader has made it.
        began: Option<Instant>,
        /// When somebody was found to remove what is too old.
        expiring: Option<Instant>,
    },
    Done {
        made_us: u64,
        /// The first segment that is needed with them.
        first_sequence: u64,
    },
}

/// What an archive is of.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ArchivedLog {
    pub format: u32,
    /// The log's UUID.
    pub log: String,
}

impl<'a> Uploader<'a> {
    /// Claims an archive for a log. Goes on where an earlier uploader has ended, if the log still
    /// has what follows; otherwise the archive gets another beginning, with base images of its own,
    /// and what it had stays as it is.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if it is the archive of another log, or the store can't keep a
    /// second writer out; [`ErrorKind::Fenced`] if another uploader came first; if the log or the
    /// archive can't be read.
    pub fn new(archive: &'a Archive, log_dir: &Path, options: UploadOptions) -> Result<Self> {
        let root = LogRoot::read(log_dir)?;
        let writer = random()?;
        archive.block_on(epoch::probe(archive, &writer))?;
        archive.block_on(claim_log(archive, &root))?;
        let catalog = match archive.block_on(Catalog::read(archive)) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            catalog => Some(catalog?),
        };
        let newest = catalog.as_ref().and_then(Catalog::newest);
        let epoch = newest.map_or(1, |newest| newest.epoch + 1);
        let copy = LogCopy::at(log_dir)?;
        let promoted = catalog
            .as_ref()
            .and_then(|catalog| catalog.promoted_since(&copy));
        if let Some(promoted) = promoted.filter(|_| !options.take_over) {
            return Err(not_ours(archive, promoted, &copy));
        }
        let stranger = newest.filter(|newest| !copy.has_claimed_here(newest));
        let mut claim = Claim {
            epoch,
            writer,
            owner: format!("process {} on {}", std::process::id(), copy.host),
            host: copy.host.clone(),
            copy: copy.copy.clone(),
            directory: copy.directory.clone(),
            after: None,
            promoted: false,
            made_us: now_us(),
        };
        let mut chunks = KnownChunks::new();
        let end = match &catalog {
            Some(catalog) => archive.block_on(LineEnd::find(archive, catalog, &mut chunks))?,
            None => None,
        };
        let next = ObjectId { epoch, number: 1 };
        // What is lost at the end may be what another machine's log has, and this one has not.
        let lost = end.as_ref().is_some_and(|end| end.lost) && stranger.is_some();
        let begun = match end.filter(|_| !lost || options.take_over) {
            Some(end) => end.resume(log_dir, &root, next)?,
            None => Err(None),
        };
        let (mut known_root, mut line_from) = (root.clone(), root.checkpoint_lsn());
        let (follower, pending, state, base, why_base) = match begun {
            Ok(resumed) => {
                let ResumePoint {
                    after,
                    follower,
                    first,
                    state,
                    base,
                    root,
                } = resumed;
                claim.after = Some(after);
                // Whatever images there are, also those that this list of the archive lacks.
                (known_root, line_from) = (root, 0);
                // Whoever has sent them may have been killed before they counted.
                let done = base.map_or(Base::None, |base| Base::Sent {
                    at: base.at,
                    made_us: base.made_us,
                    first_sequence: base.first_sequence,
                    began: None,
                    expiring: None,
                });
                (follower, first, state, done, None)
            }
            Err(why) => {
                if let Some(stranger) = stranger.filter(|_| !options.take_over) {
                    return Err(not_ours(archive, stranger, &copy));
                }
                let follower = LogFollower::new(log_dir, &root);
                (
                    follower,
                    None,
                    UploadState::new(next, &root),
                    Base::None,
                    why,
                )
            }
        };
        archive.block_on(epoch::claim(archive, &claim))?;
        Ok(Self {
            archive,
            log_dir: log_dir.to_path_buf(),
            log: root.log(),
            options,
            claim,
            checked: Instant::now(),
            unchecked: false,
            follower,
            root: known_root,
            line_from,
            expected: 0,
            missing: 0,
            pending_bytes: pending.as_ref().map_or(0, |piece| piece.bytes.len()),
            pending: pending.into_iter().collect(),
            attempt: None,
            state,
            restorable: matches!(base, Base::Sent { .. }),
            base,
            batches: Vec::new(),
            chunks,
            next_base: 1,
            rest: None,
            copy_after: None,
            copy_error: None,
            why_base,
            watch: NoticeWatch::new(),
            wait: None,
            told_wait: false,
        })
    }

    #[cfg(test)]
    pub(crate) fn archive(&self) -> &'a Archive {
        self.archive
    }

    /// The number of the epoch that this uploader has claimed.
    pub fn epoch(&self) -> u64 {
        self.claim.epoch
    }

    /// Why the base images are copied now, if not because they never were. `None` the next time.
    pub fn take_reason(&mut self) -> Option<String> {
        self.why_base.take()
    }

    /// For whom images wait that could count now. `None` the next time: it is told once.
    pub fn take_wait(&mut self) -> Option<String> {
        self.wait.take()
    }

    /// The log's owner knows that it is durable up to this LSN, perhaps before its root tells.
    pub fn expect(&mut self, durable_lsn: u64) {
        self.expected = self.expected.max(durable_lsn);
    }

    /// Sends what is new in the log, in one part, or a few chunks of the base images. Everything
    /// that was durable in the log before the call is in the archive once a tick has caught up.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: call it again later, nothing is lost. [`ErrorKind::Fenced`]:
    /// another uploader has the archive. Other errors: something has to be put right first; it may
    /// be called again after that.
    pub fn tick(&mut self) -> Result<Tick> {
        self.tick_and_tell(&mut |_| ())
    }

    /// As [`tick`](Self::tick). Calls `kept` with an LSN up to which the archive has everything, as
    /// soon as that is known and the disks can be restored as of it.
    ///
    /// # Errors
    /// As [`tick`](Self::tick).
    pub fn tick_and_tell(&mut self, kept: &mut dyn FnMut(u64)) -> Result<Tick> {
        let (caught_up, root) = match self.read_both()? {
            Ok(read) => read,
            Err(why) => return self.begin_anew(why),
        };
        self.refuse_other_log(&root)?;
        if let Some(why) = root.why_other_images(&self.root) {
            return self.begin_anew(why);
        }
        self.root = root.clone();
        let before = self.state.last;
        let log_bytes = self.pending_bytes as u64;
        self.send(&root)?;
        self.keep_claim()?;
        let caught_up = caught_up && self.pending.is_empty();
        if let Some(why) = self.why_missing(&root, caught_up)? {
            return self.begin_anew(why);
        }
        let caught_up = caught_up && self.missing == 0;
        let mut kept = |uploader: &Self| {
            if uploader.restorable {
                kept(uploader.kept(&root, caught_up));
            }
        };
        kept(self);
        self.try_copying(|uploader| {
            // Whatever the log had when the copy ended was read above.
            if caught_up {
                uploader.publish_base()?;
            }
            uploader.confirm_base()
        })?;
        kept(self);
        self.try_copying(|uploader| uploader.copy_base(root))?;
        Ok(Tick {
            last: self.state.last,
            records: self.state.last.lsn.saturating_sub(before.lsn),
            log_bytes,
            caught_up,
            base: match &self.base {
                Base::Copying(copy) => Some(copy.progress),
                _ => None,
            },
            restorable: self.restorable,
        })
    }

    /// The LSN up to which the archive has everything.
    fn kept(&self, root: &LogRoot, caught_up: bool) -> u64 {
        let last = self.state.last.lsn;
        if caught_up {
            last.max(root.checkpoint_lsn())
        } else {
            last
        }
    }

    fn refuse_other_log(&self, root: &LogRoot) -> Result<()> {
        if root.log() == self.log {
            return Ok(());
        }
        let dir = self.log_dir.display();
        Err(Error::new(
            ErrorKind::Local,
            format!("{dir}: another log is there now; give it an archive of its own"),
        ))
    }

    /// Reads the log, and then its root. Returns whether the log had no more, or why it does not go
    /// on.
    fn read_both(&mut self) -> Result<std::result::Result<(bool, LogRoot), String>> {
        let mut before = 0;
        loop {
            let caught_up = match self.read()? {
                Ok(caught_up) => caught_up,
                Err(why) => return Ok(Err(why)),
            };
            let newest = self
                .pending
                .last()
                .map_or(self.state.last, |last| last.last);
            let newest = newest.lsn.max(self.line_from);
            if caught_up && before > newest {
                let why = "records of the log can't be read, and the images have passed them since";
                return Ok(Err(why.to_owned()));
            }
            let root = LogRoot::read(&self.log_dir)?;
            if !caught_up || root.checkpoint_lsn() <= newest {
                return Ok(Ok((caught_up, root)));
            }
            // Records that were written since.
            before = root.checkpoint_lsn();
        }
    }

    /// Reads the log until it has no more, or a part is full. Returns whether it had no more, or
    /// why it does not go on.
    fn read(&mut self) -> Result<std::result::Result<bool, String>> {
        while self.pending_bytes < PART_BYTES {
            let step = match self.follower.step(PART_BYTES - self.pending_bytes) {
                // What was read before goes first.
                Err(_) if !self.pending.is_empty() => return Ok(Ok(false)),
                Err(error) => return self.pass_over(error.into()).map(Err),
                Ok(step) => step,
            };
            match step {
                FollowStep::Piece(piece) => {
                    self.pending_bytes += piece.bytes.len();
                    if !matches!(self.base, Base::Done { .. } | Base::Sent { .. }) {
                        self.batches.extend(&piece.batches);
                    }
                    self.pending.push(piece);
                }
                FollowStep::CaughtUp => return Ok(Ok(true)),
                FollowStep::Waits => return Ok(Ok(false)),
                // Not even the beginning of this line was there.
                FollowStep::Lost(why) if self.state.end.is_none() && self.pending.is_empty() => {
                    return self.pass_over(Error::new(ErrorKind::Local, why)).map(Err);
                }
                FollowStep::Lost(why) => return Ok(Err(why)),
            }
        }
        Ok(Ok(false))
    }

    /// Returns why the archive begins anew behind what can't be read, if the images have passed
    /// that.
    ///
    /// # Errors
    /// As long as the log needs it.
    fn pass_over(&self, error: Error) -> Result<String> {
        let first = LogRoot::read(&self.log_dir)?.first_sequence();
        if first > self.follower.sequence() {
            return Ok(error.to_string());
        }
        Err(Error::new(
            ErrorKind::Local,
            format!(
                "{error}; once the images have what follows ('walvisor disk checkpoint'), the \
                 archive begins anew with a copy of them"
            ),
        ))
    }

    /// Sends a part with the pending pieces, and the root if it has changed.
    fn send(&mut self, root: &LogRoot) -> Result<()> {
        if self.attempt.is_none() {
            self.attempt = self.next_part(root)?;
        }
        let Some(attempt) = &self.attempt else {
            return Ok(());
        };
        let at = self.state.next;
        let name = layout::part(at);
        // Whatever came of an attempt before, the bytes are the same.
        let created = self.archive.create(&name, &attempt.object);
        if let CreateOutcome::Taken(_) = self.archive.block_on(created)? {
            let archive = self.archive.shown();
            return Err(Error::new(
                ErrorKind::Fenced,
                format!(
                    "{archive}: another writer has created {name} in this one's epoch: the store \
                     does not keep to conditions; make sure that only one log has this archive"
                ),
            ));
        }
        self.pending.drain(..attempt.pieces);
        self.pending_bytes = self.pending.iter().map(|piece| piece.bytes.len()).sum();
        self.state = attempt.after.clone();
        self.attempt = None;
        self.unchecked = true;
        Ok(())
    }

    /// The next part; `None` if there is nothing to send.
    fn next_part(&self, root: &LogRoot) -> Result<Option<Attempt>> {
        let encoded = root.encode();
        let changed = encoded != self.state.root;
        if self.pending.is_empty() && !changed {
            return Ok(None);
        }
        let at = self.state.next;
        let mut after = self.state.clone();
        let mut body = if changed { encoded.clone() } else { Vec::new() };
        let root_len = body.len() as u64;
        let mut pieces = Vec::new();
        for piece in &self.pending {
            pieces.push(PartPiece {
                sequence: piece.sequence,
                offset: piece.offset,
                len: piece.bytes.len() as u64,
            });
            body.extend_from_slice(&piece.bytes);
            if piece.offset == 0 {
                after.segments.push((piece.sequence, at));
            }
            for batch in &piece.batches {
                note_clock(&mut after.set_back, after.last.into(), (*batch).into());
                after.last = *batch;
            }
            after.last = piece.last;
            after.end = Some(piece.end);
        }
        after.settle(root);
        if changed {
            (after.root, after.root_at) = (encoded, at);
        }
        let first = self.pending.first().map(|piece| piece.first.into());
        let header = PartHeader {
            at,
            writer: self.claim.writer.clone(),
            first,
            last: after.last.into(),
            pieces,
            end: after.end.map(Into::into),
            root_len,
            root_at: after.root_at,
            segments: after.segments.clone(),
            set_back: after.set_back.clone(),
            made_us: now_us(),
        };
        after.next = at.next();
        Ok(Some(Attempt {
            object: Bytes::from(object::seal(&header, &body)?),
            pieces: self.pending.len(),
            after,
        }))
    }

    /// Returns why the archive begins anew if durable records can't be read.
    ///
    /// # Errors
    /// As [`pass_over`](Self::pass_over).
    fn why_missing(&mut self, root: &LogRoot, caught_up: bool) -> Result<Option<String>> {
        let durable = root.durable_lsn().max(self.expected);
        let last = self.kept(root, true);
        if !caught_up || durable <= last {
            self.missing = 0;
            return Ok(None);
        }
        // That was told a little later than the log was read.
        self.missing += 1;
        if self.missing < MOST_MISSING {
            return Ok(None);
        }
        let dir = self.log_dir.display();
        let message = format!(
            "{dir}: damaged: the records from LSN {} to {durable} can't be read, so the archive \
             ends before them; 'walvisor disk check' tells more",
            last + 1
        );
        let passed = self.pass_over(Error::new(ErrorKind::Local, message));
        passed.map(Some)
    }

    /// Stops if somebody else has claimed the archive.
    fn keep_claim(&mut self) -> Result<()> {
        let since = self.checked.elapsed();
        let interval = if self.options.check_each {
            Duration::ZERO
        } else {
            BUSY_CHECK
        };
        if self.unchecked && since >= interval || since >= IDLE_CHECK {
            self.archive
                .block_on(epoch::refuse_later(self.archive, self.claim.epoch))?;
            (self.checked, self.unchecked) = (Instant::now(), false);
        }
        Ok(())
    }

    /// Does something for the copy of the images. What fails there holds up no part of the log: it
    /// is [told](Self::take_copy_error), and tried again, after a while if there are other images.
    fn try_copying(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        if self.copy_after.is_some_and(|after| Instant::now() < after) {
            return Ok(());
        }
        self.copy_after = None;
        match work(self) {
            Err(error) if error.kind() == ErrorKind::Fenced => Err(error),
            Err(error) => {
                let pause = self.restorable.then_some(COPY_PAUSE);
                self.copy_after = pause.map(|pause| Instant::now() + pause);
                self.copy_error = Some(error);
                Ok(())
            }
            copied => copied,
        }
    }

    /// Why the images could not be copied. `None` the next time.
    pub fn take_copy_error(&mut self) -> Option<Error> {
        self.copy_error.take()
    }

    /// Copies a few chunks, or begins a copy if one is due.
    fn copy_base(&mut self, root: LogRoot) -> Result<()> {
        let due = match &self.base {
            Base::None => true,
            Base::Copying(_) | Base::Sent { .. } => false,
            Base::Done {
                made_us,
                first_sequence,
            } => {
                // Those of a time to come were made while the clock was ahead.
                let age = now_us().checked_sub(*made_us).map(Duration::from_micros);
                let every = self.options.base_every;
                let newest = self.state.end.map_or(0, |end| end.sequence);
                let many = newest.saturating_sub(*first_sequence) >= MOST_SEGMENTS;
                let rested = self.rest.is_none_or(|until| Instant::now() >= until);
                many || rested && every.is_some_and(|every| age.is_none_or(|age| age >= every))
            }
        };
        if due {
            // The images are exact with the log from the segment that has the first record which
            // they lack. That must be in the archive.
            let first = self.first_needed(&root);
            let Some((sequence, part)) = first else {
                return self
                    .begin_anew("the archive lacks the beginning of the log".to_owned())
                    .map(drop);
            };
            self.forget_lost_chunks()?;
            self.base = Base::Copying(Box::new(BaseCopy::new(root, part, sequence)?));
        }
        if let Base::Copying(copy) = &mut self.base
            && copy.ended.is_none()
            && copy.step(self.archive, &self.chunks, self.options.check_each)?
        {
            let ended = LogRoot::read(&self.log_dir)?;
            refuse_spilled(&ended)?;
            copy.ended = Some(ended);
        }
        Ok(())
    }

    /// The first segment that this root needs, and the part in which it begins.
    fn first_needed(&self, root: &LogRoot) -> Option<(u64, ObjectId)> {
        let mut segments = self.state.segments.iter();
        let first = segments.find(|(sequence, _)| *sequence >= root.first_sequence());
        match first {
            Some(first) => Some(*first),
            // The log has no segment that counts: the next one to come.
            None if self.state.last.lsn <= root.checkpoint_lsn() => {
                Some((root.first_sequence(), self.newest_part()))
            }
            None => None,
        }
    }

    /// The newest part. Each epoch has one, with a root, before there is a base.
    fn newest_part(&self) -> ObjectId {
        let next = self.state.next;
        ObjectId {
            number: next.number.saturating_sub(1).max(1),
            ..next
        }
    }

    /// The oldest state to which images lead that have no record after this LSN.
    fn exact(&self, images_lsn: u64) -> Commit {
        let mut batches = self.batches.iter();
        let batch = batches.find(|batch| batch.lsn >= images_lsn);
        Commit {
            lsn: images_lsn,
            ..*batch.unwrap_or(&self.state.last)
        }
    }

    /// Publishes the copy of the base images, if it has ended.
    fn publish_base(&mut self) -> Result<()> {
        let Base::Copying(copy) = &self.base else {
            return Ok(());
        };
        let Some(ended) = &copy.ended else {
            return Ok(());
        };
        let at = ObjectId {
            epoch: self.claim.epoch,
            number: self.next_base,
        };
        let exact = self.exact(ended.horizon_lsn());
        let mut header = BaseHeader {
            at,
            writer: self.claim.writer.clone(),
            first_part: copy.first_part,
            first_sequence: copy.first_sequence,
            images_lsn: ended.horizon_lsn(),
            exact_part: self.newest_part(),
            exact: exact.into(),
            chunk_bytes: crate::base::CHUNK_BYTES,
            images: copy.images(),
            stored: Vec::new(),
            made_us: now_us(),
        };
        let stored = header.chunks().map(|hash| copy.stored(hash, &self.chunks));
        header.stored = stored.collect();
        let name = layout::base(at);
        let object = Bytes::from(object::seal(&header, &copy.root.encode())?);
        // Whoever has the archive now may let chunks expire that only this copy names.
        self.archive
            .block_on(epoch::refuse_later(self.archive, self.claim.epoch))?;
        match self.archive.block_on(self.archive.create(&name, &object))? {
            CreateOutcome::Done => {}
            // Our own of an attempt before: as good.
            CreateOutcome::Taken(found) => {
                let (found, _) = object::open::<BaseHeader>(&name, &found)?;
                if found.writer != header.writer {
                    return Err(Error::damaged(&name, "another writer has created it"));
                }
            }
        }
        self.next_base += 1;
        self.base = Base::Sent {
            at,
            made_us: header.made_us,
            first_sequence: header.first_sequence,
            began: Some(copy.began),
            expiring: None,
        };
        self.chunks = known(&header);
        self.batches = Vec::new();
        Ok(())
    }

    /// Makes the images count that were sent last, if the store has all their chunks: some may have
    /// expired that were there before. See [`expire`](crate::expire()).
    fn confirm_base(&mut self) -> Result<()> {
        let Base::Sent {
            at,
            made_us,
            first_sequence,
            began,
            expiring,
        } = &mut self.base
        else {
            return Ok(());
        };
        if expiring.is_some_and(|seen| seen.elapsed() < EXPIRING_CHECK) {
            return Ok(());
        }
        let notices = self.archive.list(layout::EXPIRING);
        let notices = self.archive.block_on(notices)?;
        let (live, ended) = self.watch.look(notices, Instant::now());
        for notice in ended {
            // So that nobody else waits for it; whoever may not remove it need not.
            let _ = self.archive.block_on(self.archive.remove(&notice));
        }
        if let [notice, ..] = &live[..] {
            *expiring = Some(Instant::now());
            if !self.restorable && !std::mem::replace(&mut self.told_wait, true) {
                self.wait = Some(format!(
                    "{}: an 'archive expire' removes what is too old ({notice}), so the images \
                     count once it has ended; if it was killed, in about a minute",
                    self.archive.shown()
                ));
            }
            return Ok(());
        }
        let (at, made_us, first_sequence, began) = (*at, *made_us, *first_sequence, *began);
        match self.forget_lost_chunks()? {
            0 => {
                self.base = Base::Done {
                    made_us,
                    first_sequence,
                };
                self.restorable = true;
                if let Some(began) = began {
                    self.rest = Some(Instant::now() + began.elapsed());
                    self.options.base_every =
                        self.options.base_every.filter(|_| !self.options.copy_once);
                }
            }
            lost => {
                self.archive
                    .block_on(self.archive.remove(&layout::base(at)))?;
                (self.base, self.restorable) = (Base::None, false);
                self.why_base = Some(format!(
                    "the store has lost {lost} chunks of the newest images"
                ));
            }
        }
        Ok(())
    }

    /// Takes only those chunks for sent that the store has. Returns how many it lacks.
    fn forget_lost_chunks(&mut self) -> Result<usize> {
        if self.chunks.is_empty() {
            return Ok(0);
        }
        let named = self.chunks.iter();
        let named = named.map(|(hash, bytes)| (hash.as_str(), *bytes));
        let lost = self.archive.block_on(lost_chunks(self.archive, named))?;
        self.chunks.retain(|chunk, _| !lost.contains(chunk));
        Ok(lost.len())
    }

    /// Goes on with a new epoch that follows nothing.
    fn begin_anew(&mut self, why: String) -> Result<Tick> {
        let root = LogRoot::read(&self.log_dir)?;
        self.refuse_other_log(&root)?;
        let claim = Claim {
            epoch: self.claim.epoch + 1,
            after: None,
            promoted: false,
            made_us: now_us(),
            ..self.claim.clone()
        };
        self.archive.block_on(epoch::claim(self.archive, &claim))?;
        let next = ObjectId {
            epoch: claim.epoch,
            number: 1,
        };
        self.claim = claim;
        self.follower = LogFollower::new(&self.log_dir, &root);
        self.pending.clear();
        self.pending_bytes = 0;
        self.attempt = None;
        self.state = UploadState::new(next, &root);
        self.line_from = root.checkpoint_lsn();
        self.missing = 0;
        self.root = root;
        self.base = Base::None;
        self.restorable = false;
        self.batches = Vec::new();
        self.next_base = 1;
        self.why_base = Some(why);
        Ok(Tick {
            last: self.state.last,
            records: 0,
            log_bytes: 0,
            caught_up: false,
            base: None,
            restorable: false,
        })
    }
}

impl UploadState {
    fn new(next: ObjectId, root: &LogRoot) -> Self {
        Self {
            next,
            last: root.checkpoint(),
            end: None,
            segments: Vec::new(),
            set_back: Vec::new(),
            root: Vec::new(),
            root_at: next,
        }
    }

    /// Forgets what the log needs no more.
    fn settle(&mut self, root: &LogRoot) {
        let first = root.first_sequence();
        self.segments.retain(|(sequence, _)| *sequence >= first);
    }
}

/// The chunks that a manifest names.
fn known(base: &BaseHeader) -> KnownChunks {
    let chunks = base.stored_chunks();
    chunks
        .map(|(hash, bytes)| (hash.to_owned(), bytes))
        .collect()
}

/// The end of the archive's newest line.
struct LineEnd {
    line: Lineage,
    header: PartHeader,
    /// Whether the archive has lost parts behind it.
    lost: bool,
    /// The newest root on the line.
    root: LogRoot,
    /// The newest base images on the line, without their chunks.
    base: Option<BaseHeader>,
}

/// An uploader goes on behind this part.
struct ResumePoint {
    after: ObjectId,
    follower: LogFollower,
    first: Option<LogPiece>,
    state: UploadState,
    /// The newest root on the line.
    root: LogRoot,
    base: Option<BaseHeader>,
}

impl LineEnd {
    /// Finds the end, and the chunks of the newest base images.
    async fn find(
        archive: &Archive,
        catalog: &Catalog,
        chunks: &mut KnownChunks,
    ) -> Result<Option<Self>> {
        let (bases, _) = catalog.read_bases(archive).await?;
        let lines = catalog.newest_lines();
        let newest = lines.first().and_then(Lineage::end);
        // Behind parts that the store has lost there are no images.
        let mut found = None;
        for mut line in lines {
            let Some(header) = line.cut_damaged_end(archive).await? else {
                continue;
            };
            let base = bases.iter().rev().find(|base| line.leads(base)).cloned();
            let restorable = base.is_some();
            found = Some((line, header, base));
            if restorable {
                break;
            }
        }
        let base = found.as_ref().and_then(|(.., base)| base.as_ref());
        // Without images on the line, those of another one have chunks too.
        if let Some(newest) = base.or(bases.last()) {
            let (newest, _) = read_base(archive, newest.at).await?;
            chunks.extend(known(&newest));
        }
        let Some((line, header, base)) = found else {
            return Ok(None);
        };
        // All points of the line begin with it.
        if let Some(base) = &base
            && whole_part(archive, base.first_part).await?.is_none()
        {
            return Ok(None);
        }
        let root = match read_root(archive, header.root_at).await {
            Err(error) if error.kind() == ErrorKind::Damaged => {
                let archive = archive.shown();
                tracing::warn!("{archive}: {error}; the archive begins anew behind it");
                return Ok(None);
            }
            root => root?,
        };
        // All before them were there for certain when they were sent.
        archive.sync(&layout::part(header.at)).await?;
        if let Some(base) = &base {
            archive.sync(&layout::base(base.at)).await?;
        }
        Ok(Some(Self {
            lost: newest != Some(header.at),
            line,
            header,
            root,
            base,
        }))
    }

    /// Goes on behind the end, or says why not.
    fn resume(
        self,
        log_dir: &Path,
        root: &LogRoot,
        next: ObjectId,
    ) -> Result<std::result::Result<ResumePoint, Option<String>>> {
        let header = self.header;
        if let Some(why) = root.why_other_images(&self.root) {
            return Ok(Err(Some(why)));
        }
        let needed = |segment: &&(u64, ObjectId)| segment.0 >= root.first_sequence();
        let mut needed = header.segments.iter().filter(needed);
        if let Some((_, lost)) = needed.find(|(_, at)| !self.line.has(*at)) {
            let lost = layout::part(*lost);
            return Ok(Err(Some(format!("the archive has lost {lost}"))));
        }
        let place: Option<LogPlace> = header.end.map(Into::into);
        let Some(place) = place else {
            return Ok(Err(None));
        };
        let mut follower = LogFollower::resume(log_dir, root, place);
        let first = match follower.step(PART_BYTES)? {
            FollowStep::Piece(piece) => Some(piece),
            FollowStep::CaughtUp | FollowStep::Waits => None,
            FollowStep::Lost(why) => return Ok(Err(Some(why))),
        };
        Ok(Ok(ResumePoint {
            after: header.at,
            follower,
            first,
            state: UploadState {
                next,
                last: header.last.into(),
                end: Some(place),
                segments: header.segments,
                set_back: header.set_back,
                // Each epoch has a root of its own.
                root: Vec::new(),
                root_at: next,
            },
            root: self.root,
            base: self.base,
        }))
    }
}

/// Makes sure that the archive is this log's.
async fn claim_log(archive: &Archive, root: &LogRoot) -> Result<()> {
    let own = ArchivedLog {
        format: object::VERSION,
        log: root.log(),
    };
    let text = serde_json::to_vec_pretty(&own).map_err(object::not_json)?;
    let CreateOutcome::Taken(found) = archive.create(layout::LOG, &Bytes::from(text)).await? else {
        return Ok(());
    };
    let found: ArchivedLog = serde_json::from_slice(&found).map_err(|error| {
        let archive = archive.shown();
        let why = format!(
            "{error}; if {archive} is the archive of this log, remove that object from the store, \
             and push again"
        );
        Error::damaged(layout::LOG, why)
    })?;
    if found == own {
        return Ok(());
    }
    let shown = archive.shown();
    let (theirs, log) = (found.log, own.log);
    let message = if found.format == own.format {
        format!(
            "{shown}: the archive of log {theirs}, and this is log {log}; give each log an archive \
             of its own"
        )
    } else {
        format!(
            "{shown}: archive format version {}; this program knows version {}",
            found.format, own.format
        )
    };
    Err(Error::new(ErrorKind::InvalidInput, message))
}

/// The error for an archive that another machine, or copy of the log, has gone on with: this one may
/// be a host that has come back.
fn not_ours(archive: &Archive, stranger: &Claim, copy: &LogCopy) -> Error {
    let owner = &stranger.owner;
    let place = if copy.has_claimed(stranger) && !copy.has_claimed_here(stranger) {
        ", from another directory, or before this one was brought back from a backup"
    } else {
        ""
    };
    Error::new(
        ErrorKind::Fenced,
        format!(
            "{}: {owner} has since written to this archive{place}, and this log does not continue from its \
             end; if this log is the one to archive, add --take-over",
            archive.shown()
        ),
    )
}

/// Now, in microseconds since 1970.
pub(crate) fn now_us() -> u64 {
    let passed = SystemTime::now().duration_since(UNIX_EPOCH);
    passed.map_or(0, |passed| passed.as_micros() as u64)
}
