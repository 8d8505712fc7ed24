//! Histories of damaged logs.

use std::path::Path;

use super::fixture::control_of;
use super::history::History;
use super::medium::LOG;
use super::oracle::Violation;
use crate::CommitWait;
use crate::catalog::snapshot::Snapshot;
use crate::error::ErrorKind;
use crate::format::{BLOCK, BatchHeader};
use crate::recovery::contents::VerifyScope;
use crate::recovery::replay::read_log;

impl History {
    /// Works, is killed, and finds some bytes of its log changed. The damage is reported, by an
    /// error at opening or by errors of reads. Otherwise it hit records that can't be known to have
    /// been acknowledged, or unused bytes. Neither reads nor a checkpoint ever show data that is no
    /// prefix of what was written. Returns whether the damage was reported.
    pub(super) fn run_damaged(mut self) -> Result<bool, Violation> {
        self.lively = false;
        let mut running = self
            .fixture
            .open(false, CommitWait::NONE)
            .map_err(|error| error.to_string())?;
        self.work(&mut running)?;
        drop(running);
        {
            let mut world = self.fixture.medium.lock();
            world.restart();
            let damages = 1 + self.random.below(3);
            (0..damages).for_each(|_| world.damage());
        }
        // A check, which reads every payload, and an open must find the same log.
        if self.scanned(VerifyScope::All) != self.scanned(VerifyScope::Tail) {
            return Err("a check and an opening find different logs".into());
        }
        match self.fixture.open(false, CommitWait::NONE) {
            Ok(mut running) => {
                let durable = self.known_durable()?;
                self.oracle.damaged(durable);
                let found = running.read_sectors();
                self.oracle.judge_readable(&found)?;
                // Damaged extents stay in the log, and everything else goes to the base images.
                let damaged = found.iter().flatten().any(Option::is_none);
                let mut copied = running.keeper.step(true);
                // A step may leave a part of the checkpoint to the next one, which it then
                // requests.
                if copied.is_ok() && running.keeper.log.lock().keeper.checkpoint {
                    copied = running.keeper.step(true);
                }
                let pins = Snapshot::all(&running.keeper.control.control);
                let saved = copied.as_ref().err().map(|error| error.kind());
                if !damaged && saved == Some(ErrorKind::Damaged) && !pins.is_empty() {
                    // A damaged saved file stops the base images at its snapshot until that is
                    // deleted.
                    for pin in pins {
                        let removed = running
                            .keeper
                            .change_history(|control| Snapshot::remove(pin.name, control));
                        removed.map_err(|error| error.to_string())?;
                    }
                    copied = running.keeper.step(true);
                }
                let told = copied.as_ref().err().map(|error| error.kind());
                if told != damaged.then_some(ErrorKind::Damaged) {
                    return Err(format!(
                        "damaged: {damaged}, and the checkpoint: {copied:?}"
                    ));
                }
                for _ in 0..2 {
                    if running.read_sectors() != found {
                        return Err("a checkpoint changes what is read".into());
                    }
                    drop(running);
                    self.fixture.lose_power();
                    let opened = self.fixture.open(false, CommitWait::NONE);
                    running = opened.map_err(|error| format!("a second opening: {error}"))?;
                }
                Ok(damaged)
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Damaged | ErrorKind::UnsupportedVersion
                ) =>
            {
                Ok(true)
            }
            Err(error) => Err(format!("damage was reported as something else: {error}")),
        }
    }

    /// The last LSN, the records and the batches that a scan of the log finds; `None` if the log is
    /// damaged.
    fn scanned(&self, verify: VerifyScope) -> Option<(u64, u64, u64)> {
        let medium = &self.fixture.medium;
        let mut control = control_of(medium).ok()?.control;
        let (scope, progress) = ((u64::MAX, verify), &mut |_, _| {});
        let read = read_log(medium, Path::new(LOG), &mut control, scope, progress);
        read.map(|(scan, _)| (scan.last.lsn, scan.records, scan.batches))
            .ok()
    }

    /// The last LSN that the medium shows to have been durable.
    fn known_durable(&self) -> Result<u64, Violation> {
        let control = control_of(&self.fixture.medium).map_err(|error| error.to_string())?;
        let root = control.control.header;
        let mut durable = root.checkpoint_lsn.get().max(root.copying_lsn.get());
        durable = durable.max(control.control.header.durable_lsn.get());
        let segments = self.fixture.medium.lock().segments();
        for (_, bytes) in segments {
            let mut at = BLOCK;
            while at < bytes.len() {
                let found = BatchHeader::peek(&bytes[at..]).filter(|(header, len)| {
                    let whole = bytes.get(at..at + len);
                    header.sequence >= root.first_sequence
                        && whole.is_some_and(|whole| header.records(whole).is_some())
                });
                let mut len = BLOCK;
                if let Some((header, header_len)) = found {
                    durable = durable.max(header.durable_lsn.get());
                    // A payload proves nothing: a guest may write a header.
                    let payload = header.payload_bytes.get() as usize;
                    len = header_len.next_multiple_of(BLOCK) + payload.next_multiple_of(BLOCK);
                }
                at += len;
            }
        }
        Ok(durable)
    }
}
