//! The exports under way: clients see how far they are, and can end them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::command::{ControlError, NEWEST};

/// The exports under way.
#[derive(Default)]
pub(super) struct Exports {
    running: Mutex<Vec<Arc<Export>>>,
}

/// An export under way.
struct Export {
    disk: String,
    at: String,
    passed: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
}

/// An export, listed until this is dropped.
pub(super) struct ListedExport<'a> {
    all: &'a Exports,
    export: Arc<Export>,
}

impl ListedExport<'_> {
    /// Notes how far it is, in bytes. Returns whether it should go on.
    pub(super) fn note(&self, passed: u64, total: u64) -> bool {
        self.export.passed.store(passed, Ordering::Relaxed);
        self.export.total.store(total, Ordering::Relaxed);
        !self.export.cancelled.load(Ordering::Relaxed)
    }
}

impl Drop for ListedExport<'_> {
    fn drop(&mut self) {
        let mut running = self.all.lock();
        running.retain(|export| !Arc::ptr_eq(export, &self.export));
    }
}

impl Exports {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Export>>> {
        // No panic leaves the list half changed.
        let running = self.running.lock();
        running.unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists an export that begins. `at`: its point, as the client gave it.
    pub(super) fn begin(&self, disk: &str, at: Option<&str>) -> ListedExport<'_> {
        let export = Arc::new(Export {
            disk: disk.to_owned(),
            at: at.unwrap_or(NEWEST).to_owned(),
            passed: AtomicU64::new(0),
            total: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
        });
        self.lock().push(Arc::clone(&export));
        ListedExport { all: self, export }
    }

    /// All exports, described for clients. Before the first part is copied, the bytes are 0.
    pub(super) fn list(&self) -> Value {
        let exports: Vec<_> = self.lock().iter().map(|export| export.describe()).collect();
        json!({ "exports": exports })
    }

    /// Ends the exports of a disk. Their clients get an error.
    pub(super) fn cancel(&self, disk: &str) -> Result<Value, ControlError> {
        let running = self.lock();
        let of_disk = running.iter().filter(|export| export.disk == disk);
        let ended: Vec<_> = of_disk
            .map(|export| {
                export.cancelled.store(true, Ordering::Relaxed);
                export.describe()
            })
            .collect();
        if ended.is_empty() {
            return Err(ControlError::new(format_args!(
                "no export of disk '{disk}' is under way ('exports' lists them)"
            )));
        }
        Ok(json!({ "cancelled": ended }))
    }
}

impl Export {
    fn describe(&self) -> Value {
        json!({
            "disk": self.disk,
            "at": self.at,
            "passed_bytes": self.passed.load(Ordering::Relaxed),
            "total_bytes": self.total.load(Ordering::Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_listed_and_end_when_they_are_cancelled() {
        let exports = Exports::default();
        let (one, other) = (exports.begin("a", None), exports.begin("b", Some("cid:7")));
        assert!(one.note(1, 4) && other.note(2, 8));
        let described = |disk: &str, at: &str, passed: u64, total: u64| json!({ "disk": disk, "at": at, "passed_bytes": passed, "total_bytes": total });
        let (a, b) = (
            described("a", "newest", 1, 4),
            described("b", "cid:7", 2, 8),
        );
        assert_eq!(exports.list(), json!({ "exports": [a, b] }));
        assert_eq!(exports.cancel("a").unwrap(), json!({ "cancelled": [a] }));
        assert!(!one.note(2, 4) && other.note(3, 8));
        drop((one, other));
        assert_eq!(exports.list(), json!({ "exports": [] }));
        assert!(exports.cancel("a").is_err());
    }
}
