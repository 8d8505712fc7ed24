//! Front-ends of a vhost-user-blk device that harm whom they can, beside one of another disk that
//! writes 4 KiB and flushes, again and again.
//!
//! ```text
//!   hostile-vhost-user SOCKET VICTIM [SECONDS]
//! ```
//! SOCKET and VICTIM are sockets of two disks of any vhost-user server. The one at SOCKET has four
//! queues and 64 MiB or more, and is only read; the first MiB of the other is overwritten. Each
//! attack takes SECONDS, 5 without. A line for each tells how many commits the victim made, how
//! long the longest took, and how often the server has disconnected the attacker.

use std::path::Path;
use std::process::ExitCode;

use walvisor_testkit::hostile::{self, AttackTarget, vhost_user::ATTACKS};
use walvisor_testkit::vhost_user_client::VhostUserClient;

fn main() -> ExitCode {
    hostile::main("hostile-vhost-user SOCKET VICTIM", |names, time| {
        let [socket, victim] = names;
        let target = AttackTarget::new(Path::new(socket), "");
        let mut victim = VhostUserClient::try_connect(Path::new(victim), 1)?;
        hostile::tell(&ATTACKS, &target, &mut victim, time)
    })
}
