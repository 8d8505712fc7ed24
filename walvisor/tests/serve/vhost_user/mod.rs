//! `walvisor serve vhost-user`, as front-ends see it.

mod activation;
mod client;
mod cloud_hypervisor;
mod front_end;
mod hostile;
mod largest;
mod libblkio;
mod members;
mod requests;

pub use client::{BUFFER, Client};
pub use front_end::FrontEnd;

use std::path::Path;

use super::Daemon;

/// Starts the daemon.
#[track_caller]
fn daemon(dir: &Path, arguments: &str) -> Daemon {
    Daemon::start_door(dir, "vhost-user", arguments)
}
