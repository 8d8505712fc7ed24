//! The size of a log: the advised size, and changing it while the log is not in use.
//!
//! The size is the number of segment files that the log may have. A log that grows makes them when
//! it needs them. A log that shrinks removes files that hold no part of it, from the highest number
//! down; a file that is needed replaces a free one with a lower number. So the log is whole
//! wherever a crash cuts this, and the control file gets the new size last.

use std::path::Path;

use zerocopy::little_endian::U32;

use crate::catalog::control::{ControlFile, existing_log};
use crate::catalog::options::{Resize, SEGMENTS};
use crate::catalog::retention::Retention;
use crate::error::{Error, Result, invalid};
use crate::medium::directory::directory;
use crate::medium::engine::EngineKind;
use crate::medium::file::Segment;
use crate::medium::filesystem::{self, files};
use crate::medium::lock::Access;
use crate::mutant::{Mutant, planted};
use crate::recovery::replay::read_for_recovery;
use crate::recovery::scan::Scan;

/// A log smaller than this share of its image is small. A checkpoint copies about half of the log;
/// at 1/32, scattered 4 KiB writes then hit about one block in each stripe of 256 KiB.
const SHARE: u64 = 32;
/// The largest advised log.
const MOST_ADVISED: u64 = 64 << 30;

/// The advised size in bytes for an image of `image` bytes, if a log of `bytes` is small for it.
pub(crate) fn advise_log_size(bytes: u64, segment_size: u64, image: u64) -> Option<u64> {
    let advised = (image / SHARE).min(MOST_ADVISED);
    (bytes < advised).then(|| advised.next_multiple_of(segment_size))
}

/// Changes the size of the log in `log_dir`, which must not be in use, to `size` bytes, rounded up
/// to whole segments.
///
/// # Errors
/// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if a log can't have this size, or
/// the log's contents or its retention need more; [`ErrorKind::Damaged`](crate::ErrorKind::Damaged)
/// if files would be removed while something of the log is damaged; or the log is in use or can't
/// be read. The log is unchanged then.
pub fn resize_log(log_dir: &Path, size: u64) -> Result<Resize> {
    let mut control = existing_log(log_dir, Access::Log)?;
    let header = &control.control.header;
    let segment = header.segment_size.get();
    let old = header.max_segments.get();
    let most = u64::from(*SEGMENTS.end());
    let (least, count) = (u64::from(*SEGMENTS.start()), size.div_ceil(segment));
    if !(least..=most).contains(&count) {
        return Err(invalid(format!(
            "{}: a log of {size} bytes is not valid; with its segments of {segment} bytes use {} \
             to {}",
            log_dir.display(),
            least * segment,
            most * segment,
        )));
    }
    let count = count as u32;
    refuse_less_than_kept(log_dir, &control, count)?;
    if count < old {
        let medium = directory(log_dir, EngineKind::Blocking);
        // As at open: what is removed may have been the proof that the log's end was durable.
        let read = read_for_recovery(&medium, log_dir, &mut control, &mut |_, _| {});
        let (mut scan, _) = read?;
        scan.refuse_damaged(log_dir)?;
        refuse_more(log_dir, &control, &scan, count)?;
        scan.release(&mut control)?;
        remove_files(log_dir, &scan, count)?;
    }
    // In both slots: the older one must not say that there are fewer files than there are.
    control.change_both(|control| control.header.max_segments = U32::new(count))?;
    Ok(Resize {
        old_size: u64::from(old) * segment,
        size: u64::from(count) * segment,
    })
}

/// Refuses a log of `count` segments if its retention needs more: the next open would raise it
/// again.
fn refuse_less_than_kept(log_dir: &Path, control: &ControlFile, count: u32) -> Result<()> {
    let segment = control.control.header.segment_size.get();
    let retain = Retention::of(&control.control.history);
    let least = retain.least_segments(segment);
    match retain {
        Retention::Bytes(kept) if u64::from(count) < least => Err(invalid(format!(
            "{}: keeping {kept} bytes of history takes a log of {} bytes, more than the {} asked \
             for; first lower its retention: 'walvisor disk retain DISK'",
            log_dir.display(),
            least * segment,
            u64::from(count) * segment,
        ))),
        _ => Ok(()),
    }
}

/// Refuses a log of `count` segments if those would not hold its contents plus one free segment.
fn refuse_more(log_dir: &Path, control: &ControlFile, scan: &Scan, count: u32) -> Result<()> {
    let segment = control.control.header.segment_size.get();
    let needed = scan.live.len() as u64 + 1;
    if u64::from(count) >= needed {
        return Ok(());
    }
    let disks = control.image_paths();
    let disk = disks.first().map(|disk| disk.display().to_string());
    Err(invalid(format!(
        "{}: its contents need a log of {} bytes, and {} were asked for; first copy them to the \
         images: walvisor disk checkpoint {} --log {0}",
        log_dir.display(),
        needed * segment,
        u64::from(count) * segment,
        disk.unwrap_or_else(|| "DISK".to_owned()),
    )))
}

/// Removes the segment files from number `count` on, moving live ones to lower numbers.
fn remove_files(log_dir: &Path, scan: &Scan, count: u32) -> Result<()> {
    let is_live = |slot: u32| {
        let path = Segment::path(log_dir, slot);
        !planted(Mutant::ShrinkDropsLive) && scan.live.iter().any(|live| live.segment.path == path)
    };
    let mut free = (0..count).filter(|&slot| !is_live(slot));
    for slot in (count..scan.files).rev() {
        let path = Segment::path(log_dir, slot);
        let done = match is_live(slot).then(|| free.next()).flatten() {
            Some(to) => files().rename(&path, &Segment::path(log_dir, to)),
            None => files().remove(&path),
        };
        match done {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("remove the log segment", &path, error));
            }
            _ => filesystem::sync_dir(log_dir)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_advised_to_be_a_share_of_its_image() {
        const GIB: u64 = 1 << 30;
        for (log, image, better) in [
            (2 * GIB, 64 * GIB, None),
            (
                2 * GIB,
                65 * GIB,
                Some((65 * GIB / 32).next_multiple_of(64 << 20)),
            ),
            (2 * GIB, 1024 * GIB, Some(32 * GIB)),
            (2 * GIB, u64::MAX, Some(64 * GIB)),
            (64 * GIB, u64::MAX, None),
        ] {
            assert_eq!(advise_log_size(log, 64 << 20, image), better, "{image}");
        }
    }
}
