//! Removes everything that no kept point needs.
//!
//! ```text
//!   images   a ······· b ········· c        d          kept: b leads to the oldest point,
//!   log      ├────────┼┬─────────┬┴────────┴──▶ now          c and d are newer
//!            └ removed ┘└ oldest point
//! ```
//! A copy of the images that is under way needs chunks although its own manifest is not there yet.
//! Those that it reuses are in the newest manifest, which stays until then; those that it sends are
//! younger than `grace`. But one that it sends again may look old in a list that was made before:
//!
//! ```text
//!   expire   notice ── lists ── manifests ── removals ── no notice
//!   push            manifest ── no notice? ── has the store all its chunks? ── the copy counts
//! ```
//! Either the manifest is there before expire reads manifests, or push sees the notice, or push
//! sees what was removed.

use std::cell::Cell;
use std::collections::{BTreeSet, HashSet};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{Either, select};
use serde::{Deserialize, Serialize};
use walvisor_storage::Commit;

use crate::base::NOTICE_LAPSE;
use crate::epoch::random;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{self, ObjectId};
use crate::lineage::{Catalog, Lineage, whole_base, whole_part};
use crate::object::{self, BaseHeader, Moment};
use crate::remote::{Archive, ListEntry};
use crate::uploader::now_us;

/// Microseconds of a day.
pub(crate) const DAY_US: u64 = 24 * 3600 * 1_000_000;
/// If a lease was not renewed for this long, its process was killed.
const LEASE_US: u64 = DAY_US;
/// What a notice says.
const NOTICE: &[u8] = b"{}";
/// How often a notice is renewed.
const NOTICE_RENEWAL: Duration = Duration::from_secs(10);
/// Nothing is removed any more if the notice could not be renewed for this long: whoever waits for
/// it may soon take it for ended, and what the store was asked to remove may still be under way.
const NOTICE_LOST: Duration = Duration::from_secs(30);
/// How often a restore renews its lease.
const RENEWAL: Duration = Duration::from_secs(3600);
/// How long a restore that has ended waits for its lease to be removed.
const RELEASE: Duration = Duration::from_secs(5);

/// Which points to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpireOptions {
    /// All points of this time up to now.
    pub keep: Duration,
    /// Of each of so many days (UTC) up to now, one older point: that of the day's last copy of the
    /// images.
    pub keep_daily: u32,
    /// Chunks stay for this time after they were sent, even if nothing needs them: longer than a
    /// copy of the images takes.
    pub grace: Duration,
    /// Only say what would be removed.
    pub dry_run: bool,
}

/// What was removed, or would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpireReport {
    /// The oldest point that is left; `None`: no copy of the images is complete.
    pub oldest: Option<Commit>,
    /// Copies of the images.
    pub bases: u64,
    /// Parts of the log.
    pub parts: u64,
    /// Chunks of images.
    pub chunks: u64,
    /// Bytes of all of them, as they are stored.
    pub bytes: u64,
}

/// What a restore that is under way needs.
#[derive(Debug, Serialize, Deserialize)]
struct LeaseNote {
    /// The base that it has chosen.
    base: ObjectId,
}

/// Keeps what a restore needs, until it is dropped.
pub(crate) struct Lease<'a> {
    archive: &'a Archive,
    name: String,
    bytes: Bytes,
    /// It stays in the archive when this is dropped.
    kept: AtomicBool,
}

impl<'a> Lease<'a> {
    /// Notes in the archive that these images and the log since are needed. `None`: the archive
    /// can't be written, so they may expire meanwhile.
    pub(crate) async fn take(archive: &'a Archive, base: ObjectId) -> Result<Option<Self>> {
        let text = serde_json::to_vec(&LeaseNote { base }).map_err(object::not_json)?;
        let (name, bytes) = (layout::lease(&random()?), text.into());
        // Drop only leases that were taken: dropping one blocks on the store, which panics here.
        let put = archive.put(&name, &bytes).await;
        Ok(put.is_ok().then(|| Self {
            archive,
            name,
            bytes,
            kept: AtomicBool::new(false),
        }))
    }

    /// Keeps it in the archive when this is dropped, for another call: it ends after a day.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Does some work, and renews the lease meanwhile.
    pub(crate) async fn during<T>(lease: Option<&Self>, work: impl Future<Output = T>) -> T {
        let Some(lease) = lease else {
            return work.await;
        };
        let renew = async {
            loop {
                tokio::time::sleep(RENEWAL).await;
                // Another attempt follows, and the lease lasts longer than many.
                let _ = lease.archive.put(&lease.name, &lease.bytes).await;
            }
        };
        match select(pin!(work), pin!(renew)).await {
            Either::Left((done, _)) => done,
            Either::Right((never, _)) => never,
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if self.kept.load(Ordering::Relaxed) {
            return;
        }
        let removal = self.archive.remove(&self.name);
        // A store that does not answer keeps nobody; the lease ends by itself.
        let removal = async { tokio::time::timeout(RELEASE, removal).await };
        let _ = self.archive.block_on(removal);
    }
}

/// Tells others that something is removed.
pub(crate) struct ExpireNotice<'a> {
    archive: &'a Archive,
    name: String,
    /// When it was last put.
    pub renewed: Cell<Instant>,
    /// How often it is.
    pub every: Duration,
}

impl<'a> ExpireNotice<'a> {
    pub(crate) async fn put(archive: &'a Archive) -> Result<Self> {
        let notice = Self {
            archive,
            name: layout::expiring(&random()?),
            renewed: Cell::new(Instant::now()),
            every: NOTICE_RENEWAL,
        };
        notice.renew().await?;
        Ok(notice)
    }

    async fn renew(&self) -> Result<()> {
        let begun = Instant::now();
        let text = Bytes::from_static(NOTICE);
        self.archive.put(&self.name, &text).await?;
        self.renewed.set(begun);
        Ok(())
    }

    /// Refuses to remove anything if others may take this one for killed.
    fn check(&self) -> Result<()> {
        if self.renewed.get().elapsed() < NOTICE_LOST {
            return Ok(());
        }
        let message = format!(
            "{}: this expire could not renew its notice {}, so pushes may no longer wait for it; \
             run it again, and it goes on",
            self.archive.shown(),
            self.name
        );
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    /// The names of other notices that nobody renews, by the store's clock.
    async fn ended_others(&self) -> Result<Vec<String>> {
        let notices = self.archive.list(layout::EXPIRING).await?;
        let own = notices.iter().find(|notice| notice.name == self.name);
        let Some(now_us) = own.map(|own| own.modified_us) else {
            return Ok(Vec::new());
        };
        let lapse = NOTICE_LAPSE.as_micros() as u64;
        let ended = |notice: &ListEntry| now_us.abs_diff(notice.modified_us) > lapse;
        let ended = notices.into_iter().filter(ended);
        Ok(ended.map(|notice| notice.name).collect())
    }

    /// Does some work, and renews the notice meanwhile. Drops the work if that fails for long.
    pub(crate) async fn during<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut work = pin!(work);
        loop {
            let wait = pin!(tokio::time::sleep(self.every));
            if let Either::Right((done, _)) = select(wait, &mut work).await {
                return done;
            }
            self.check()?;
            // If it fails, another attempt follows.
            let renewed = pin!(tokio::time::timeout(NOTICE_LOST / 3, self.renew()));
            if let Either::Right((done, renewed)) = select(renewed, &mut work).await {
                // It must not be put after it was removed.
                let _ = renewed.await;
                return done;
            }
        }
    }
}

/// Removes everything that no kept point needs, whether or not a log is being pushed. The newest
/// copy of the images and the log since stay in any case, and what a running restore needs. Ended
/// too early, it is continued by another call.
///
/// # Errors
/// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no archive;
/// [`ErrorKind::Damaged`](crate::ErrorKind::Damaged) if a claim is; if it can't be read, or the
/// store removes nothing, perhaps because the bucket locks its objects.
pub fn expire(archive: &Archive, options: &ExpireOptions) -> Result<ExpireReport> {
    archive.block_on(expire_at(archive, options, now_us()))
}

/// As [`expire`], at this time.
pub(crate) async fn expire_at(
    archive: &Archive,
    options: &ExpireOptions,
    now_us: u64,
) -> Result<ExpireReport> {
    if options.dry_run {
        return remove_old(archive, options, now_us, None).await;
    }
    let notice = ExpireNotice::put(archive).await?;
    let removed = remove_old(archive, options, now_us, Some(&notice));
    let removed = notice.during(removed).await;
    // If it stays, copies of the images wait for a minute.
    let ended = archive.remove(&notice.name).await;
    removed.and_then(|report| ended.map(|()| report))
}

/// Removes what is too old; without a `notice`, only says what.
pub(crate) async fn remove_old(
    archive: &Archive,
    options: &ExpireOptions,
    now_us: u64,
    notice: Option<&ExpireNotice<'_>>,
) -> Result<ExpireReport> {
    // The chunks first: what comes later belongs to a copy that is newer than this list.
    let mut chunks = Vec::new();
    let each = |chunk: ListEntry| {
        let hash = chunk.name.rsplit('/').next().and_then(object::digest);
        chunks.extend(hash.map(|hash| (hash, chunk.bytes, chunk.modified_us)));
    };
    archive.visit(layout::CHUNKS, None, each).await?;
    // Leases and notices that have ended, parts and chunks.
    let (leased, mut gone) = leased(archive, now_us).await?;
    if let Some(notice) = notice {
        gone.extend(notice.ended_others().await?);
    }
    let mut catalog = Catalog::read(archive).await?;
    if let Some(error) = catalog.damaged_claim.take() {
        // What it continues would count as a log that has ended.
        let message = format!(
            "{}: {error}; which log that epoch continues is not known, so nothing is removed; if \
             it stays so, remove that object from the store: that epoch then follows no other",
            archive.shown()
        );
        return Err(Error::new(ErrorKind::Damaged, message));
    }
    let (bases, mut damaged) = catalog.read_bases(archive).await?;
    let leased = leased.as_deref();
    let needs = NeededObjects::find(archive, &catalog, &bases, leased, options, now_us).await?;
    let (kept, expired): (Vec<_>, Vec<_>) = bases
        .iter()
        .partition(|base| needs.bases.contains(&base.at));
    let manifests: Vec<_> = expired.iter().map(|base| layout::base(base.at)).collect();
    let mut report = ExpireReport {
        oldest: needs.oldest,
        bases: manifests.len() as u64,
        ..ExpireReport::default()
    };
    let mut named = HashSet::new();
    for base in kept {
        match whole_base(archive, base.at).await? {
            Some((base, _)) => named.extend(base.chunks().filter_map(object::digest)),
            None => damaged = true,
        }
    }
    // A manifest that can't be read may need any part and name any chunk, and be whole again
    // tomorrow.
    for (at, bytes) in catalog.listed_parts.iter().filter(|_| !damaged) {
        // Of an epoch that was claimed meanwhile, nothing is known.
        if !needs.parts.contains(at) && catalog.claims.contains_key(&at.epoch) {
            report.parts += 1;
            report.bytes += bytes;
            gone.push(layout::part(*at));
        }
    }
    let sent_before = now_us.saturating_sub(options.grace.as_micros() as u64);
    for (hash, bytes, modified_us) in chunks.into_iter().filter(|_| !damaged) {
        if !named.contains(&hash) && modified_us <= sent_before {
            report.chunks += 1;
            report.bytes += bytes;
            gone.push(layout::chunk(&object::hex(&hash)));
        }
    }
    if let Some(notice) = notice {
        // Manifests first: one that is left has all that it names.
        for names in [manifests, gone] {
            let removals = names.iter().map(|name| async {
                notice.check()?;
                archive.remove(name).await
            });
            archive.in_order(removals, |()| Ok(true)).await?;
        }
        archive.remove_unfinished(sent_before)?;
    }
    Ok(report)
}

/// The bases that running restores need, and the names of leases that have ended. `None`: any base,
/// since a lease is damaged, which a warning names.
async fn leased(archive: &Archive, now_us: u64) -> Result<(Option<Vec<ObjectId>>, Vec<String>)> {
    // A clock may be ahead, but not by a day.
    let lives = |entry: &ListEntry| now_us.abs_diff(entry.modified_us) <= LEASE_US;
    let leases = archive.list(layout::LEASES).await?.into_iter();
    let (renewed, ended): (Vec<_>, Vec<_>) = leases.partition(lives);
    let mut bases = Some(Vec::new());
    for ListEntry { name, .. } in renewed {
        let Some(bytes) = archive.get(&name).await? else {
            continue;
        };
        match serde_json::from_slice::<LeaseNote>(&bytes) {
            Ok(note) => bases.iter_mut().for_each(|bases| bases.push(note.base)),
            Err(error) => {
                let error = Error::damaged(&name, error);
                tracing::warn!(
                    "{}: {error}; a restore may need any images, so all stay until that object is \
                     a day old",
                    archive.shown()
                );
                bases = None;
            }
        }
    }
    let ended = ended.into_iter().map(|lease| lease.name);
    Ok((bases, ended.collect()))
}

/// What is needed for the points that are kept.
#[derive(Default)]
struct NeededObjects {
    bases: BTreeSet<ObjectId>,
    parts: BTreeSet<ObjectId>,
    oldest: Option<Commit>,
}

impl NeededObjects {
    async fn find(
        archive: &Archive,
        catalog: &Catalog,
        bases: &[BaseHeader],
        leased: Option<&[ObjectId]>,
        options: &ExpireOptions,
        now_us: u64,
    ) -> Result<Self> {
        let mut needs = Self::default();
        let cutoff = now_us.saturating_sub(options.keep.as_micros() as u64);
        let days = daily(bases, options.keep_daily, now_us);
        // A copy that is under way takes chunks over from the newest manifest.
        needs.bases.extend(bases.last().map(|base| base.at));
        let mut newest = true;
        for line in &catalog.lines() {
            let mut own: Vec<_> = bases.iter().filter(|base| line.leads(base)).collect();
            own.sort_by_key(|base| base.exact.lsn);
            let Some(last_base) = own.last() else {
                // Perhaps the first copy of its images is on the way.
                needs.parts.extend(line.parts().filter(|_| newest));
                continue;
            };
            let last_base = last_base.at;
            // The images that lead to all points since the cutoff.
            let old = |base: &&BaseHeader| time_of(base.exact, base.made_us) <= cutoff;
            let first = own.iter().rposition(old).unwrap_or(0);
            // If its end is damaged, it is not known when it ended.
            let end = match line.end() {
                Some(end) => whole_part(archive, end).await?,
                None => None,
            };
            let ended = end.is_some_and(|end| time_of(end.last, end.made_us) < cutoff);
            for (i, base) in own.into_iter().enumerate() {
                let since = i >= first && !ended || newest && base.at == last_base;
                if since || leased.is_none_or(|leased| leased.contains(&base.at)) {
                    needs.keep_from(archive, line, base, false).await?;
                } else if days.contains(&base.at) {
                    needs.keep_from(archive, line, base, true).await?;
                }
            }
            newest = false;
        }
        Ok(needs)
    }

    /// Keeps a base, and the log from it on: all of it, or as much as its own point `alone` needs.
    async fn keep_from(
        &mut self,
        archive: &Archive,
        line: &Lineage,
        base: &BaseHeader,
        alone: bool,
    ) -> Result<()> {
        self.bases.insert(base.at);
        let exact = Commit::from(base.exact);
        if self.oldest.is_none_or(|oldest| exact.lsn < oldest.lsn) {
            self.oldest = Some(exact);
        }
        let known = |at: ObjectId| self.parts.contains(&at);
        if known(base.first_part) && line.end().is_some_and(known) {
            return Ok(());
        }
        // The root of the first part may be in one before: if that is not known, in any.
        let from = match whole_part(archive, base.first_part).await? {
            Some(first) if line.has(first.root_at) => first.root_at.min(base.first_part),
            Some(_) => base.first_part,
            None => line.parts().next().unwrap_or(base.first_part),
        };
        for at in line.from(from) {
            self.parts.insert(at);
            if alone && at >= base.exact_part {
                break;
            }
        }
        Ok(())
    }
}

/// The time of a moment, or, if that is not known, when its object was made: a log does not say
/// when what it had in its images was written.
pub(crate) fn time_of(moment: Moment, made_us: u64) -> u64 {
    if moment.unix_us == 0 {
        made_us
    } else {
        moment.unix_us
    }
}

/// The last base of each of so many days up to now.
fn daily(bases: &[BaseHeader], count: u32, now_us: u64) -> BTreeSet<ObjectId> {
    let today = now_us / DAY_US;
    let days = (0..u64::from(count)).filter_map(|back| today.checked_sub(back));
    let last_of = |day| {
        let of_day = bases.iter().filter(|base| base.made_us / DAY_US == day);
        of_day.max_by_key(|base| base.made_us).map(|base| base.at)
    };
    days.filter_map(last_of).collect()
}
