//! The keeper carries out orders: snapshots, looks, retention, growth. It does so because it alone
//! writes the control file and the base images.

use zerocopy::little_endian::U64;

use crate::SECTOR_SIZE;
use crate::catalog::identity::written;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::format::Control;
use crate::keeper::Keeper;
use crate::log::disk_state::DiskState;
use crate::log::holds::{HeldLog, HoldOwner, OpenHold};
use crate::log::orders::{KeeperOrder, KeeperTask};
use crate::medium::file::set_size;
use crate::sync::atomic::Ordering;

impl Keeper {
    /// Carries out the orders, first come first served; in the middle of a copy only those that are
    /// quick.
    pub(crate) fn serve_orders(&mut self) {
        let phase = self.phase();
        let mut state = self.log.lock();
        let orders = &mut state.keeper.orders;
        let admitted = orders.extract_if(.., |order| phase.admits(&order.task));
        let admitted: Vec<_> = admitted.collect();
        drop(state);
        admitted.into_iter().for_each(|order| self.serve(order));
    }

    fn serve(&mut self, KeeperOrder { task, answer }: KeeperOrder) {
        let phase = self.phase();
        if task.changes_files() {
            self.end_readings();
        }
        let done = match task {
            KeeperTask::Checkpoint(lsn) => self.checkpoint_to(lsn, false),
            KeeperTask::CopyBack(disk) => self.bring_up_to_date(&disk),
            KeeperTask::Grow(disk, size) => self.grow(&disk, size),
            KeeperTask::Add(options, path, adopt, added) => {
                self.add((&options, &path), adopt).map(|disk| {
                    // The caller may be gone.
                    let _ = added.send(disk);
                })
            }
            KeeperTask::Remove(disk, keeps_records) => self.remove(&disk, keeps_records),
            KeeperTask::Snapshot(name, disk_id) => self.snapshot(name, disk_id),
            KeeperTask::KeepPoint(point) => self.keep_point(&point),
            KeeperTask::DeleteSnapshot(name) => {
                self.change_history(|control| Snapshot::remove(name, control))
            }
            KeeperTask::SetRetention(retain) => self.set_retention(retain),
            KeeperTask::Members(members) => {
                // The caller may be gone.
                let _ = members.send(self.control.members());
                Ok(())
            }
            KeeperTask::Look(disk, owner, held) => self.hold(&disk, owner).map(|looked| {
                // The caller may be gone.
                let _ = held.send(looked);
            }),
            KeeperTask::Rewind(disk, request, rewound) => {
                self.rewind(&disk, request).map(|lsn| {
                    // The caller may be gone.
                    let _ = rewound.send(lsn);
                })
            }
        };
        assert_eq!(
            self.phase(),
            phase,
            "an order leaves the keeper where it was"
        );
        // The caller may be gone.
        let _ = answer.send(done);
    }

    /// Makes everything written so far durable, and names the resulting state of all disks, or of
    /// one.
    pub(crate) fn snapshot(&mut self, name: SnapshotName, disk_id: Option<u32>) -> Result<()> {
        // A log that needs room gets it afterwards, so that a snapshot takes no longer than a sync.
        let mut state = self.log.lock();
        let (lsn, unix_us) = (state.pipeline.appended(), state.clock.now().unix_us);
        drop(state);
        self.drain_for_order(lsn)?;
        let cid = self.log.lock().pipeline.next_cid() - 1;
        let snapshot = Snapshot {
            name,
            lsn,
            cid,
            unix_us,
            disk_id,
            saved_bytes: 0,
        };
        self.change_history(|control| snapshot.add(control))
    }

    /// Keeps a point in the past as a snapshot does.
    fn keep_point(&mut self, point: &Snapshot) -> Result<()> {
        let control = &self.control.control;
        let reached = control.header.checkpoint_lsn.get();
        // A copy that was begun before goes on to its own LSN.
        if let Some(lsn) = self.frozen_at
            && (reached + 1..lsn).contains(&point.lsn)
        {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{}: LSN {} can't be exported: the log is being copied to the images up to LSN \
                     {lsn}; export a point from there on",
                    self.log.dir.display(),
                    point.lsn,
                ),
            ));
        }
        self.change_history(|control| point.add(control))
    }

    /// Holds what a look at the disk reads, once everything written so far is durable; for a reader,
    /// which reads only durable records, at once. The base
    /// images do not change until the hold is dropped. A checkpoint that is due comes first, so
    /// that a series of looks can't keep it off for ever. If it fails, whatever it copied is still
    /// in the log, so a look at the remaining points sees the same.
    pub(crate) fn hold(&mut self, disk: &DiskState, owner: HoldOwner) -> Result<HeldLog> {
        self.refuse_failed()?;
        let state = self.log.lock();
        let due = state.keeper.checkpoint && !state.keeper.holds.has_open();
        drop(state);
        if due {
            // If this fails, the keeper retries and reports it.
            let _ = self.step(false);
        }
        if let Some(lsn) = self.frozen_at.filter(|_| owner == HoldOwner::Rewind) {
            self.checkpoint_to(lsn, true)?;
        }
        let state = self.log.lock();
        if disk.detached.load(Ordering::Relaxed) {
            let path = disk.path.display();
            let message =
                format!("{path}: the disk has left its log; open it again, then look at it");
            return Err(Error::new(ErrorKind::NotFound, message));
        }
        let (appended, durable) = (state.pipeline.appended(), state.pipeline.durable());
        drop(state);
        let hold = OpenHold::new(&self.log, owner);
        let newest = match owner {
            HoldOwner::Reader => durable,
            _ => {
                self.drain_for_order(appended)?;
                appended
            }
        };
        let control = self.control.control.clone();
        let applied = control.header.checkpoint_lsn.get();
        let segments = self.log.lock().ring.oldest(usize::MAX).into_iter();
        let mut segments: Vec<_> = segments
            .map(|(segment, last)| (segment, last.lsn))
            .collect();
        let last = segments
            .iter()
            .position(|&(_, last_lsn)| last_lsn >= newest);
        segments.truncate(last.map_or(segments.len(), |last| last + 1));
        segments.retain(|&(_, last_lsn)| last_lsn > applied);
        Ok(HeldLog {
            segments,
            newest,
            control,
            hold,
        })
    }

    /// Changes what the log keeps of its history.
    pub(crate) fn change_history(
        &mut self,
        change: impl FnOnce(&mut Control) -> Result<()>,
    ) -> Result<()> {
        let mut changed = self.control.control.clone();
        change(&mut changed).map_err(|error| error.of_file(&self.log.dir))?;
        let most = changed.header.max_segments;
        let before = self.control.control.header.max_segments;
        let enlarged = most != before;
        let more = most.get().saturating_sub(before.get());
        self.log.reserve_checksums(more).map_err(|bytes| {
            let dir = self.log.dir.display();
            invalid(format!(
                "{dir}: the checksums of a log with so much history need {bytes} bytes more memory \
                 than is free: retain less, or give the daemon a larger --memory-limit"
            ))
        })?;
        self.control.change(|control| {
            control.header.max_segments = most;
            (control.history, control.snapshots) = (changed.history, changed.snapshots);
        })?;
        if enlarged {
            // In both slots: if one rots, the other must not disown the segment files that are made
            // now.
            self.control.write()?;
        }
        let control = &self.control.control;
        let mut state = self.log.lock();
        state.ring.enlarge(control.header.max_segments.get());
        state.keeper.retain = Retention::of(&control.history);
        // Segments may have become free, or a stuck log may have room.
        state.keeper.checkpoint = true;
        drop(state);
        self.remove_saved();
        Ok(())
    }

    fn set_retention(&mut self, retain: Retention) -> Result<()> {
        let state = self.log.lock();
        if let Some(replica) = &state.replica {
            let checked = replica.check_retention(retain);
            checked.map_err(|error| error.of_file(&self.log.dir))?;
        }
        drop(state);
        self.change_history(|control| retain.set(control))?;
        // The log may have more room for what its replica lacks.
        self.log.wake_ports();
        Ok(())
    }

    /// Takes the steps of [`resize`](crate::store::resize), with the same outcome wherever a
    /// crash cuts them. Requests see the new size last: by then, recovery is certain to find what
    /// they write beyond the old one.
    pub(crate) fn grow(&mut self, disk: &DiskState, size: u64) -> Result<()> {
        let mut set = |size: u64, resizing: u8| {
            self.control.change(|control| {
                if let Some(entry) = control.disk_mut(disk.id) {
                    (entry.size, entry.resizing) = (U64::new(size), resizing);
                }
                // Changing the length counts as a write.
                let written = match resizing {
                    0 if !disk.base.is_spilled() => written(disk.base.file().as_ref()),
                    _ => 0,
                };
                control.set_written(disk.id, written);
            })
        };
        let old_size = disk.sectors() * SECTOR_SIZE;
        if size == old_size {
            return Ok(());
        }
        set(old_size, 1)?;
        let sized = set_size(disk.base.file().as_ref(), &disk.path, size);
        if let (Err(_), Some(spill)) = (&sized, disk.base.spill()) {
            // Its sync may have taken the error of what was being copied back.
            spill.count_all_as_written();
        }
        sized?;
        set(size, 0)?;
        disk.sectors.store(size / SECTOR_SIZE, Ordering::Release);
        Ok(())
    }
}
