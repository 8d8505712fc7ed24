//! Static tracepoints (USDT) of a request's path, for `bpftrace`, `perf` and GDB. Each is a single
//! nop until a tracer attaches. `docs/tracing.md` has one-liners.
//!
//! ```text
//!   submit ─▶ append ─▶ sync ─▶ synced ─▶ complete        fold ─▶ folded
//! ```
//! The provider is `walvisor`. Numbers of arguments are those of bpftrace's `arg0`, `arg1` and so
//! on.

use probe::probe;
use walvisor_block::{Completion, Operation};

/// A port takes a request: `arg0` token, `arg1` kind (0 read, 1 write, 2 discard, 3 write zeroes, 4
/// flush), `arg2` first sector, `arg3` sectors. The token is unique among the port's requests in
/// flight.
#[inline]
pub(crate) fn submit(token: u64, operation: &Operation) {
    let (kind, sector, sectors) = match operation {
        Operation::Read { sector, sectors } => (0, *sector, u64::from(*sectors)),
        Operation::Write { sector, data } => (1, *sector, data.len() as u64 / 512),
        Operation::Discard { sector, sectors } => (2, *sector, u64::from(*sectors)),
        Operation::WriteZeroes {
            sector, sectors, ..
        } => (3, *sector, u64::from(*sectors)),
        Operation::Flush => (4, 0, 0),
    };
    probe!(walvisor, submit, token, kind, sector, sectors);
}

/// A record gets its LSN: `arg0` LSN, `arg1` number of the disk in the log, `arg2` first sector,
/// `arg3` sectors.
#[inline]
pub(crate) fn append(lsn: u64, disk: u32, sector: u64, sectors: u32) {
    probe!(walvisor, append, lsn, disk, sector, sectors);
}

/// The sync of a commit group begins: `arg0` cid, `arg1` the LSN up to which it makes records
/// durable.
#[inline]
pub(crate) fn sync(cid: u64, lsn: u64) {
    probe!(walvisor, sync, cid, lsn);
}

/// The sync of a commit group has ended: `arg0` cid, `arg1` durable LSN. A failed sync, which fails
/// the log, has no such end.
#[inline]
pub(crate) fn synced(cid: u64, lsn: u64) {
    probe!(walvisor, synced, cid, lsn);
}

/// A port hands a completion to its owner: `arg0` token, `arg1` 1 for success, else 0.
#[inline]
pub(crate) fn complete(completion: &Completion) {
    let ok = u8::from(completion.result.is_ok());
    probe!(walvisor, complete, completion.token, ok);
}

/// The keeper begins to fold the oldest segments: `arg0` the last LSN that it copies, `arg1`
/// segments.
#[inline]
pub(crate) fn fold(lsn: u64, segments: usize) {
    probe!(walvisor, fold, lsn, segments);
}

/// A fold has ended: `arg0` the last LSN that it was to copy, `arg1` 1 if it copied everything, 0
/// if the log is closing or a part could not be read.
#[inline]
pub(crate) fn folded(lsn: u64, done: bool) {
    probe!(walvisor, folded, lsn, u8::from(done));
}
