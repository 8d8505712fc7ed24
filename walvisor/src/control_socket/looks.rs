//! Looks at disks in use: each is served read-only, or with a scratch file, over NBD on a socket of
//! its own.
//!
//! ```text
//!   walvisor ctl look ── binds SOCKET ── descriptors ──▶ Looks::serve ──▶ a thread: NBD server of one export
//!          │                                                                  │ until its last client is gone, 'unlook', or
//!          └─ child that removes the name ◀────────── closes the pipe ────────┘ the end of the process
//! ```
//! The client makes the socket, because this process may lack the right to.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde_json::{Value, json};
use walvisor_devices::backend::{Backend, SECTOR_SIZE};
use walvisor_devices::listen::{Stop, join};
use walvisor_devices::nbd::{Export, Listener, Server, Service, Tls};
use walvisor_storage::Look;

use super::command::{ControlError, LookRequest};

/// Limit on open looks: each has its own threads and index.
pub const MAX_LOOKS: usize = 64;

/// The open looks. Dropping it ends them.
#[derive(Default)]
pub struct Looks {
    open: Arc<Mutex<Vec<ServedLook>>>,
}

/// A look that is served.
struct ServedLook {
    /// What clients are description of it.
    description: Value,
    end: Stop,
    thread: JoinHandle<()>,
}

impl ServedLook {
    fn is(&self, key: &str, value: &str) -> bool {
        self.description[key].as_str() == Some(value)
    }

    /// Ends the look, and returns once its socket is closed.
    fn end(self) -> Value {
        self.end.tell();
        join(self.thread, "a look");
        self.description
    }
}

fn lock(open: &Mutex<Vec<ServedLook>>) -> MutexGuard<'_, Vec<ServedLook>> {
    // No panic leaves the list half changed.
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Looks {
    /// Serves a look at a disk. `kept`: descriptors to close when the look has ended.
    ///
    /// # Errors
    /// If too many looks are open, or the system refuses a descriptor or a thread.
    pub fn serve(
        &self,
        disk: &str,
        look: Look,
        request: &LookRequest,
        listener: UnixListener,
        kept: Vec<OwnedFd>,
    ) -> io::Result<Value> {
        let mut open = lock(&self.open);
        if open.len() >= MAX_LOOKS {
            let full = format!("{MAX_LOOKS} looks are open: end one ('unlook')");
            return Err(io::Error::other(full));
        }
        let file = Path::new(disk).file_name();
        let name = file.map_or_else(|| disk.into(), |name| name.to_string_lossy());
        let description = json!({
            "socket": request.socket,
            "export": name,
            "disk": disk,
            "at": request.at,
            "size_bytes": look.sectors() * SECTOR_SIZE,
            "scratch": request.scratch,
            "keep": request.keep,
        });
        let end = Stop::new()?;
        let mut export = Export::new(
            &name,
            &format!("{disk} as of {}", request.at),
            Arc::new(look),
        );
        if !request.keep {
            let deserted = end.clone();
            export = export.when_deserted(move || deserted.tell());
        }
        let server = Server::start(vec![Service {
            listener: Listener::Unix(listener),
            exports: vec![export],
            tls: Tls::Off,
        }])?;
        let (all, ended) = (Arc::clone(&self.open), end.clone());
        let thread = thread::Builder::new().name("look".into());
        let thread = thread.spawn(move || {
            let mut wanted = [PollFd::new(&ended, PollFlags::IN)];
            while let Err(Errno::INTR) = poll(&mut wanted, None) {}
            server.stop();
            // Only now may the socket's name be removed: nobody listens there any more.
            drop(kept);
            let me = thread::current().id();
            lock(&all).retain(|served| served.thread.thread().id() != me);
        })?;
        assert!(open.len() < MAX_LOOKS, "checked with the list locked");
        open.push(ServedLook {
            description: description.clone(),
            end,
            thread,
        });
        Ok(description)
    }

    /// Returns when none is open any more.
    pub(crate) fn wait(&self) {
        let all = std::mem::take(&mut *lock(&self.open));
        all.into_iter()
            .for_each(|served| join(served.thread, "a look"));
    }

    /// Ends the look on this socket, or the only one at this disk.
    pub(super) fn end(&self, look: &str) -> Result<Value, ControlError> {
        let mut open = lock(&self.open);
        let mut found = open.iter().position(|served| served.is("socket", look));
        if found.is_none() {
            let of_disk = |served: &ServedLook| served.is("disk", look);
            found = open.iter().position(of_disk);
            if open.iter().filter(|served| of_disk(served)).count() > 1 {
                return Err(ControlError::new(format_args!(
                    "several looks at '{look}' are open: give the socket of one ('looks' lists \
                     them)"
                )));
            }
        }
        let Some(found) = found else {
            return Err(ControlError::new(format_args!(
                "no look '{look}' is open: give its socket or its disk ('looks' lists them)"
            )));
        };
        let served = open.remove(found);
        // Unlock the list, because the look's thread locks it at its end.
        drop(open);
        Ok(served.end())
    }

    /// All looks, described for clients.
    pub(super) fn list(&self) -> Value {
        let open = lock(&self.open);
        let looks: Vec<_> = open
            .iter()
            .map(|served| served.description.clone())
            .collect();
        json!({ "looks": looks })
    }
}

impl Drop for Looks {
    fn drop(&mut self) {
        let all = std::mem::take(&mut *lock(&self.open));
        all.iter().for_each(|served| served.end.tell());
        all.into_iter().for_each(|served| drop(served.end()));
    }
}
