//! Faults planted in the store, to check that its tests notice them.
//!
//! [`planted`] is constant `false` outside this crate's own tests, so the compiler removes the code
//! that it guards.

/// Declares the faults, and for the tests a list of all of them.
macro_rules! faults {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$about:meta])* $fault:ident,)* }) => {
        $(#[$meta])*
        $vis enum $name {
            $($(#[$about])* $fault,)*
        }

        #[cfg(test)]
        impl $name {
            pub(crate) const ALL: &[Self] = &[$(Self::$fault),*];
        }
    };
}

faults! {
    /// The faults. What a medium can do wrong is planted in the simulated medium (the second half). The
    /// others are planted in the store's own code, because the medium can't express them; each one says
    /// why.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Mutant {
        /// A checkpoint frees log segments whose copies in the base image were not synced. The medium
        /// cannot tell the checkpoint's sync of an image from the syncs of opening, resizing and
        /// closing.
        SkipBaseSync,
        /// Base images are synced while the last writes to them are still in flight. The medium does
        /// not know which write of a checkpoint is the last.
        BaseSyncTooEarly,
        /// A checkpoint copies records that are not durable in the log yet. The medium does not know
        /// which records a write to a base image copies.
        CopyBeforeDurable,
        /// A checkpoint writes a stripe without having read what lies between its extents. The medium
        /// does not know why a base image is read.
        StripeUnread,
        /// A checkpoint overwrites parts of a base image that an export has not copied, and saves
        /// nothing. The medium does not know of exports.
        ExportUnsaved,
        /// A checkpoint ends although the map of a spill file does not have what it wrote there. The
        /// medium does not know what the file means.
        SpillUncommitted,
        /// Removes a spill file before syncing the image that received its bytes. The medium
        /// cannot tell that sync of an image from others.
        CopyBackUnsynced,
        /// A control file that could not be written may name the spill file all the same, and nobody
        /// makes sure.
        SpillUnsure,
        /// An image's samples are of the page cache, which may not be what the image has.
        CopyBackTrustsCache,
        /// Segments are reused before the control file says that they are free. The ring of segments is
        /// in memory.
        RecycleEarly,
        /// Recovery ignores how far the control file says that the log was durable. The medium does not
        /// know what the file means.
        DurableLsnIgnored,
        /// Only one slot of the control file says how far the log was durable when the segments that
        /// prove it are wiped. The medium does not know what the file means.
        ProofInOneSlot,
        /// LSNs of a torn tail are reused. Recovery chooses the next LSN in memory.
        LsnRestart,
        /// The payload changes after its checksum was computed. That is before the medium gets either.
        ChecksumBeforeCopy,
        /// A batch's header omits its last record. The medium does not know the format of a batch.
        DropLastDescriptor,
        /// A DISCARD reaches the log but not the index. The index is in memory.
        IndexSkipsDiscard,
        /// A write is reported as written as soon as it has an LSN. The report is not an operation of
        /// the medium.
        AnsweredUnwritten,
        /// A mark is reported as durable as soon as it has an LSN. The report is not an operation of
        /// the medium.
        MarkAnsweredEarly,
        /// Recovery omits the last batch. The medium does not know where a batch ends.
        RecoveryStopsEarly,
        /// Recovery takes recycled segments for part of the log. The bytes are read correctly; it is
        /// the check that is missing.
        RecoveryAcceptsStale,
        /// Recovery does not check payload checksums. The bytes are read; it is the check that is
        /// missing.
        RecoverySkipsChecksum,
        /// Recovery trusts the summary of a segment although its batches may not be durable. The medium
        /// does not know of summaries.
        SummaryTrustedUnsynced,
        /// Recovery trusts any summary with a right checksum, even from an earlier use of its segment.
        /// The bytes are read correctly; it is the check that is missing.
        SummaryTrustedStale,
        /// Recovery omits the last batch of a summary. The medium does not know where a batch ends.
        SummaryStopsEarly,
        /// The disks as of a record include the next one too. The index is in memory.
        PointReadsNewer,
        /// A disk that floods the log's room is not held back. Who has used it is in memory.
        RoomUnshared,
        /// A fold passes what must stay in the log.
        FoldPassesHold,
        /// A copy to the base images does not save what a snapshot needs. The medium does not know of
        /// snapshots.
        SnapshotUnsaved,
        /// What was saved for a snapshot is not made durable. The medium does not know which files are
        /// saved ones.
        SavedUnsynced,
        /// What was saved for a snapshot is saved again when it is overwritten again. The medium does
        /// not know of snapshots.
        SavedAgain,
        /// A fold ends between the two points of a rewind. The medium does not know of rewinds.
        FoldSplitsRewind,
        /// The newest rewind is forgotten when the log is read. It is in memory then.
        RewindForgotten,
        /// A look at a disk in use does not hold the base images. Its hold is in memory.
        LookUnheld,
        /// A fold omits DISCARD and WRITE_ZEROES. The medium does not know of records.
        FoldSkipsZeroes,
        /// After a fold the index forgets newer bytes too. The index is in memory.
        FoldForgetsNewer,
        /// A fold takes a newer record out of the index because it is in the same segment. The index is
        /// in memory.
        FoldForgetsSegment,
        /// The changes since a snapshot leave out DISCARDs. The index is in memory.
        ChangesMissDiscard,
        /// A segment's batches leave no room for its summary. The ring of segments is in memory.
        SummaryUnreserved,
        /// Readers of the log and checkpoints do not check payload checksums. The bytes are read; it is
        /// the check that is missing.
        ReadSkipsChecksum,
        /// Every control write goes to the same slot. Moving the bytes within the medium would not
        /// change the slot that the store takes for the newest.
        ControlInPlace,
        /// A control slot is used even if its checksum is wrong. The bytes are read; it is the check
        /// that is missing.
        ControlChecksumIgnored,
        /// Recovery uses a control slot that may be in the cache only. The medium cannot tell the write
        /// that confirms a slot from the others.
        RecoveryTrustsControl,
        /// Requests that wait for room are not failed when the full ring can't be emptied. Waiters are
        /// in memory.
        StuckWaitersForgotten,
        /// Requests that wait when the log fails are never completed. Waiters are in memory.
        WaiterLostOnError,
        /// The writer does not write the records that ports wait for and that came while it wrote a
        /// batch. The medium does not know of waiters.
        WrittenForgotten,
        /// A port keeps a batch that it has written until it is polled next. The medium does not know
        /// who ends a batch, and when.
        #[cfg(test)]
        BatchKept,
        /// A leader that leaves does not call another to take its place. Wake-ups are not operations of
        /// the medium.
        LeaderLeavesSilently,
        /// A port clears its wake-up signal after it looked for work, not before. Wake-ups are not
        /// operations of the medium.
        SignalClearedLate,
        /// A port that waits for a free segment is never woken. Wake-ups are not operations of the
        /// medium.
        SegmentFreedSilently,
        /// A base image is marked as closed before everything is copied to it. The medium does not know
        /// what is still to be copied.
        ClosedEarly,
        /// A close that cuts a checkpoint short carries on as if everything were copied. The medium
        /// does not know what is still to be copied.
        CutTakenForWhole,
        /// A close that cuts a checkpoint short marks the base images as closed. The medium does not
        /// know what is still to be copied.
        CutMarkedClosed,
        /// A close that cuts a checkpoint short leaves records that are not durable. The medium does
        /// not know of records.
        CutUndrained,
        /// A base image's length changes before the log knows of it. The medium cannot tell the control
        /// write that announces a length from the others.
        ResizeUnannounced,
        /// The cached bytes of a base image are trusted when its disk is attached. The medium cannot
        /// tell the sync of attaching from the others.
        AttachTrustsCache,
        /// A log is opened without making the names in its directory durable. The medium cannot tell
        /// this sync of a directory from the one that follows a new name.
        OpenTrustsNames,
        /// A control file gets its name before anything is written to it. The medium can't write what
        /// it does not have yet.
        ControlNamedUnwritten,
        /// Discarding a disk's records keeps the newest. The medium does not know of records.
        DiscardKeepsRecord,
        /// A log that shrinks removes segment files that hold a part of it. The medium does not know
        /// what segments hold.
        ShrinkDropsLive,
        /// A disk leaves its log before its image has all bytes. The medium does not know what the log
        /// holds.
        LeaveUncopied,
        /// A disk leaves a log in use before its image has all bytes. The medium does not know what the
        /// log holds.
        RemoveUncopied,
        /// A disk in use is restored in place in memory only. The medium does not know of restores.
        RewindUnwritten,
        /// Deleting a snapshot also deletes saved files that older ones need. The medium does not know
        /// of snapshots.
        DeletedForOlder,
        // The faults below are those of the medium: they are planted in the simulated medium.
        /// The names of a new log, of its directory and its control file, never become durable.
        #[cfg(test)]
        LogNamesUnsynced,
        /// A base image gets its name before its bytes are durable.
        #[cfg(test)]
        ImageNamedUnsynced,
        /// The final name of a base image never becomes durable.
        #[cfg(test)]
        ImageNameUnsynced,
        /// The name of a segment file never becomes durable.
        #[cfg(test)]
        SegmentNameUnsynced,
        /// A base image's new length is not made durable.
        #[cfg(test)]
        LengthUnsynced,
        /// A durable write is not durable.
        #[cfg(test)]
        AckBeforeSync,
        /// Recovery does not sync what it found in the cache.
        #[cfg(test)]
        RecoverySkipsSync,
        /// Recovery trusts the cached bytes of segments after a sync that failed.
        #[cfg(test)]
        RecoveryTrustsCache,
        /// Recovery reads segments to which a killed process still writes.
        #[cfg(test)]
        SegmentsNotLocked,
        /// A segment file gets its name before its bytes and its length are durable.
        #[cfg(test)]
        SegmentNamedUnsynced,
        /// A base image's mark is not made durable.
        #[cfg(test)]
        MarkUnsynced,
        /// A sync of segments does nothing.
        #[cfg(test)]
        SyncLost,
        /// An operation that writes and syncs its segments begins with the sync.
        #[cfg(test)]
        SyncTooEarly,
        /// Write-back goes through the descriptor that syncs, so the sync is not told about failures.
        #[cfg(test)]
        WriteBackTakesError,
        /// A reused segment keeps its old salt.
        #[cfg(test)]
        ReuseSalt,
        /// Of the segments to sync, only the newest is synced.
        #[cfg(test)]
        SyncLastSegmentOnly,
        /// Of the segments to sync, only the bytes written last are.
        #[cfg(test)]
        SyncOwnWrite,
        /// A failed sync is taken for a successful one, as a second fsync would report.
        #[cfg(test)]
        FailedSyncRetried,
    }
}

/// Whether this fault is planted in this thread.
#[inline]
pub(crate) fn planted(mutant: Mutant) -> bool {
    #[cfg(test)]
    return PLANTED.get() == Some(mutant);
    #[cfg(not(test))]
    {
        let _ = mutant;
        false
    }
}

/// Whether any fault is planted in this thread. Then the tests' oracle should notice it, not an
/// assertion.
#[inline]
pub(crate) fn any_planted() -> bool {
    #[cfg(test)]
    return PLANTED.get().is_some();
    #[cfg(not(test))]
    false
}

#[cfg(test)]
thread_local! {
    /// The fault planted in this thread.
    pub(crate) static PLANTED: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
}

/// Returns the payload; if the fault is planted, changed, as a guest could change it if it were not
/// copied first.
pub(crate) fn changed_after_checksum(mut data: crate::Buffer) -> crate::Buffer {
    if planted(Mutant::ChecksumBeforeCopy) {
        data[0] ^= 0xff;
    }
    data
}

/// The records to describe in a batch's header: all, or, if the fault is planted, all but the last.
pub(crate) fn described<T>(records: &[T]) -> &[T] {
    match records.split_last() {
        Some((_, others)) if !others.is_empty() && planted(Mutant::DropLastDescriptor) => others,
        _ => records,
    }
}

/// Whether, because of a planted fault, a failing waiter is left without its completion. `failed`:
/// the whole log has failed. The keeper's own waiter, token 0, is spared, or the keeper would wait
/// for ever.
pub(crate) fn is_forgotten(token: u64, failed: bool) -> bool {
    let fault = if failed {
        Mutant::WaiterLostOnError
    } else {
        Mutant::StuckWaitersForgotten
    };
    token > 0 && planted(fault)
}
