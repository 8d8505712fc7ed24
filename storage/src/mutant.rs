//! Faults planted in the store to see that its tests would notice them.
//!
//! [`planted`] is constant `false` outside this crate's own tests, and the compiler drops what it guards.

/// One fault each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A group is acknowledged without any sync.
    AckBeforeSync,
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
    /// Only the newest of the segments that need it is synced.
    SyncLastSegmentOnly,
    /// A batch is synced alone while something before it is not.
    SyncOwnWrite,
    /// A sync is taken to cover what was still being written when it began.
    SyncCoversWriting,
    /// Recovery leaves out the last batch.
    RecoveryStopsEarly,
    /// Recovery takes freed segments for part of the log.
    RecoveryAcceptsStale,
    /// Recovery does not look at payload checksums.
    RecoverySkipsChecksum,
    /// Recovery does not make durable what it found in the cache.
    RecoverySkipsSync,
    /// A failed sync is taken for a good one, as a second fsync would say.
    FailedSyncRetried,
    /// Those who wait for a full ring that can't be emptied are forgotten.
    StuckWaitersForgotten,
    /// Those who wait when the log fails are forgotten.
    WaiterLostOnError,
    /// A leader that goes away wakes nobody to take its place.
    LeaderLeavesSilently,
    /// A port takes its wake-up for dealt with after it looked, not before.
    SignalClearedLate,
    /// Who waits for a segment is not told that there is one.
    SegmentFreedSilently,
    /// After a failed sync reads give what the medium happens to hold.
    StaleReadAfterError,
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
