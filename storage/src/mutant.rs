//! Faults planted in the store to see that its tests would notice them.
//!
//! [`planted`] is constant `false` outside this crate's own tests, and the compiler drops what it guards.

/// One fault each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A FLUSH is satisfied by what is written, synced or not.
    AckOwnWrite,
    /// A checkpoint frees log whose copy in the base image was not synced.
    SkipBaseSync,
    /// Base images are synced while the last writes to them are still in flight.
    BaseSyncTooEarly,
    /// A checkpoint copies records that are not durable in the log yet.
    CopyBeforeDurable,
    /// Segments are reused before the control file says that they are free.
    RecycleEarly,
    /// A segment's next life has the salt of its last.
    ReuseSalt,
    /// LSNs of a torn tail are given out again.
    LsnRestart,
    /// The checksum is taken, then the payload changes.
    ChecksumBeforeCopy,
    /// A batch's header forgets its last record.
    DropLastDescriptor,
    /// A DISCARD reaches the log, not the index.
    IndexSkipsDiscard,
    /// A write is said to be written as soon as it has an LSN.
    AnsweredUnwritten,
    /// A sync is taken to cover what was still being written when it began.
    SyncCoversWriting,
    /// Recovery leaves out the last batch.
    RecoveryStopsEarly,
    /// Recovery takes freed segments for part of the log.
    RecoveryAcceptsStale,
    /// Recovery does not look at payload checksums.
    RecoverySkipsChecksum,
    /// Who reads the log, or copies it to a base image, does not look at them either.
    ReadSkipsChecksum,
    /// Recovery does not make durable what it found in the cache.
    RecoverySkipsSync,
    /// Recovery believes what the cache holds of segments after a sync that failed.
    RecoveryTrustsCache,
    /// Every control write goes to the same slot.
    ControlInPlace,
    /// A control slot counts whatever its checksum says.
    ControlChecksumIgnored,
    /// Recovery builds on a control slot that may be in the cache only.
    RecoveryTrustsControl,
    /// Those who wait for a full ring that can't be emptied are forgotten.
    StuckWaitersForgotten,
    /// Requests that wait when the log fails are never answered.
    WaiterLostOnError,
    /// The writer leaves it to others to write what ports wait for that came while it wrote a batch.
    WrittenForgotten,
    /// A leader that goes away wakes nobody to take its place.
    LeaderLeavesSilently,
    /// A port takes its wake-up for dealt with after it looked, not before.
    SignalClearedLate,
    /// A port that waits for a free segment is never woken.
    SegmentFreedSilently,
    /// A thread panics before it has ended its group.
    PanicEndingGroup,
    /// Recovery reads segments to which a killed process still writes.
    SegmentsNotLocked,
    /// A base image's mark is not made durable.
    MarkUnsynced,
    /// A base image is marked as closed before all is in it.
    ClosedEarly,
    /// A base image gets another length before the log knows of it.
    ResizeUnannounced,
    /// A base image's new length is not made durable.
    LengthUnsynced,
    /// A base image is taken for what the cache holds of it.
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
    /// A segment file gets its name before its bytes and its length are durable.
    SegmentNamedUnsynced,
    /// A segment file is used before its name is durable.
    SegmentNameUnsynced,
    // What follows is the medium's: planted in the simulated one.
    /// A write that is to be durable is not.
    #[cfg(test)]
    AckBeforeSync,
    /// Only the newest of the segments that are to be synced is.
    #[cfg(test)]
    SyncLastSegmentOnly,
    /// Of the segments that are to be synced only what was written last is.
    #[cfg(test)]
    SyncOwnWrite,
    /// A failed sync is taken for a good one, as a second fsync would say.
    #[cfg(test)]
    FailedSyncRetried,
}

/// Whether this thread runs with this fault.
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

/// Whether this thread runs with any fault: the tests' oracle is to notice it then, not an assertion.
#[inline]
pub(crate) fn any_planted() -> bool {
    #[cfg(test)]
    return PLANTED.get().is_some();
    #[cfg(not(test))]
    false
}

#[cfg(test)]
thread_local! {
    /// The fault of this thread.
    pub(crate) static PLANTED: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
}

/// The payload as a guest may have changed it meanwhile, were it not copied first.
pub(crate) fn changed_after_checksum(mut data: crate::Buffer) -> crate::Buffer {
    if planted(Mutant::ChecksumBeforeCopy) {
        data[0] ^= 0xff;
    }
    data
}
