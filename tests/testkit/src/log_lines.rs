//! What a thread logs.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Keeps the text of each event: a subscriber for `tracing::subscriber::with_default`. Clones share
/// the lines.
#[derive(Clone, Debug, Default)]
pub struct LogLines(Arc<Mutex<Vec<String>>>);

impl LogLines {
    /// The lines so far, oldest first.
    pub fn all(&self) -> Vec<String> {
        self.0.lock().expect("lines lock").clone()
    }
}

impl Visit for LogLines {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        let mut lines = self.0.lock().expect("lines lock");
        lines.push(format!("{value:?}"));
    }
}

impl Subscriber for LogLines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
