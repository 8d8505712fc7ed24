//! The VMM's side of MSI-X, which panics on messages that the device must not send.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use walvisor_devices::interrupt::{MsiMessage, MsiRouter};

use super::function::VECTORS;

/// An address that messages can be sent to. Others are refused, as by a hypervisor that has no
/// route to them.
pub const VALID_ADDRESS: u32 = 0xfee0_0000;

/// The message routes of the vectors.
#[derive(Default)]
pub struct Router {
    routes: Mutex<[Option<MsiMessage>; VECTORS]>,
    /// A bit for each vector that is enabled and not masked.
    open: AtomicUsize,
    sent: [AtomicUsize; VECTORS],
}

impl Router {
    /// Sets the vectors that may send from now on, a bit each.
    pub fn allow(&self, open: usize) {
        self.open.store(open, Ordering::SeqCst);
    }

    /// The number of messages that a vector has sent.
    pub fn sent(&self, vector: usize) -> usize {
        self.sent[vector].load(Ordering::SeqCst)
    }

    fn routes(&self, vector: u16) -> MutexGuard<'_, [Option<MsiMessage>; VECTORS]> {
        let open = self.open.load(Ordering::SeqCst) >> vector & 1 == 1;
        assert!(open, "vector {vector} is off or masked");
        self.routes.lock().expect("nobody panics")
    }
}

impl MsiRouter for Router {
    fn set_route(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        let good = message.address & !0xf_ffff == u64::from(VALID_ADDRESS);
        self.routes(vector)[usize::from(vector)] = good.then_some(message);
        if good {
            Ok(())
        } else {
            Err(io::ErrorKind::InvalidInput.into())
        }
    }

    fn trigger(&self, vector: u16) -> io::Result<()> {
        let route = self.routes(vector)[usize::from(vector)];
        assert!(route.is_some(), "vector {vector} has no route");
        self.sent[usize::from(vector)].fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}
