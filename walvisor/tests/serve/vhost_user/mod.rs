//! `walvisor serve vhost-user`, as front-ends see it.

mod cloud_hypervisor;
mod hostile;
mod libblkio;
mod members;
mod requests;

pub use walvisor_testkit::vhost_user::FrontEnd;
pub use walvisor_testkit::vhost_user_client::VhostUserClient as Client;

use std::path::Path;

use super::{Daemon, test_dir};

/// Starts the daemon.
#[track_caller]
fn daemon(dir: &Path, arguments: &str) -> Daemon {
    Daemon::start_door(dir, "vhost-user", arguments)
}
