//! Faults planted in the store, to check that its tests notice them.
//!
//! [`planted`] is constant `false` outside this crate's own tests, so the compiler removes the code that it guards.

/// The faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A checkpoint frees log segments whose copies in the base image were not synced.
    SkipBaseSync,
    /// Base images are synced while the last writes to them are still in flight.
    BaseSyncTooEarly,
    /// A checkpoint copies records that are not durable in the log yet.
    CopyBeforeDurable,
    /// Segments are reused before the control file says that they are free.
    RecycleEarly,
    /// LSNs of a torn tail are given out again.
    LsnRestart,
    /// The payload changes after its checksum was computed.
    ChecksumBeforeCopy,
    /// A batch's header omits its last record.
    DropLastDescriptor,
    /// A DISCARD reaches the log but not the index.
    IndexSkipsDiscard,
    /// A write is reported as written as soon as it has an LSN.
    AnsweredUnwritten,
    /// Recovery omits the last batch.
    RecoveryStopsEarly,
    /// Recovery takes recycled segments for part of the log.
    RecoveryAcceptsStale,
    /// Recovery does not check payload checksums.
    RecoverySkipsChecksum,
    /// Readers of the log and checkpoints do not check payload checksums.
    ReadSkipsChecksum,
    /// Every control write goes to the same slot.
    ControlInPlace,
    /// A control slot is used even if its checksum is wrong.
    ControlChecksumIgnored,
    /// Recovery uses a control slot that may be in the cache only.
    RecoveryTrustsControl,
    /// Requests that wait for room are not failed when the full ring can't be emptied.
    StuckWaitersForgotten,
    /// Requests that wait when the log fails are never completed.
    WaiterLostOnError,
    /// The writer does not write the records that ports wait for and that came while it wrote a batch.
    WrittenForgotten,
    /// A leader that leaves does not wake a waiter to take its place.
    LeaderLeavesSilently,
    /// A port clears its wake-up signal after it looked for work, not before.
    SignalClearedLate,
    /// A port that waits for a free segment is never woken.
    SegmentFreedSilently,
    /// A base image is marked as closed before everything is copied to it.
    ClosedEarly,
    /// A base image's length changes before the log knows of it.
    ResizeUnannounced,
    /// A base image's new length is not made durable.
    LengthUnsynced,
    /// The cached bytes of a base image are trusted when its disk is attached.
    AttachTrustsCache,
    /// A log is opened without making the names in its directory durable.
    OpenTrustsNames,
    /// A control file gets its name before anything is written to it.
    ControlNamedUnwritten,
    /// A new log is used before its names are durable.
    LogNamesUnsynced,
    /// A base image gets its name before its bytes are durable.
    ImageNamedUnsynced,
    /// A base image is used before its name is durable.
    ImageNameUnsynced,
    /// A segment file is used before its name is durable.
    SegmentNameUnsynced,
    // The faults below are those of the medium: they are planted in the simulated medium.
    /// A write that is to be durable is not made durable.
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
    /// A reused segment keeps its old salt.
    #[cfg(test)]
    ReuseSalt,
    /// Of the segments that are to be synced, only the newest is.
    #[cfg(test)]
    SyncLastSegmentOnly,
    /// Of the segments that are to be synced, only the bytes written last are.
    #[cfg(test)]
    SyncOwnWrite,
    /// A failed sync is taken for a successful one, as a second fsync would report.
    #[cfg(test)]
    FailedSyncRetried,
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

/// Whether any fault is planted in this thread: the tests' oracle is to notice it then, not an assertion.
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

/// Returns the payload, changed if the fault is planted, as a guest could change it if it were not copied first.
pub(crate) fn changed_after_checksum(mut data: crate::Buffer) -> crate::Buffer {
    if planted(Mutant::ChecksumBeforeCopy) {
        data[0] ^= 0xff;
    }
    data
}

/// Returns the records that a batch's header describes: all, or if the fault is planted all but the last.
pub(crate) fn described<T>(records: &[T]) -> &[T] {
    match records.split_last() {
        Some((_, others)) if !others.is_empty() && planted(Mutant::DropLastDescriptor) => others,
        _ => records,
    }
}

/// Whether a waiter that is to fail is left without its completion, because of a planted fault. `failed`: the whole
/// log has failed. The keeper's own waiter, with token 0, is spared: it would wait for ever.
pub(crate) fn is_forgotten(token: u64, failed: bool) -> bool {
    let fault = match failed {
        true => Mutant::WaiterLostOnError,
        false => Mutant::StuckWaitersForgotten,
    };
    token > 0 && planted(fault)
}
