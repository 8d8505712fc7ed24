//! The engine for a simulated file system: each operation happens when it is submitted, in the
//! caller's thread.

use crate::medium::file::{Engine, Io, IoCompletion, run};

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct InlineEngine {
    done: Vec<IoCompletion>,
}

impl Engine for InlineEngine {
    fn submit(&mut self, id: u64, io: Io) {
        let (result, _) = run(io);
        self.done.push(IoCompletion { id, result });
    }

    fn enter(&mut self) {}

    fn poll(&mut self, done: &mut Vec<IoCompletion>) {
        done.append(&mut self.done);
    }
}
