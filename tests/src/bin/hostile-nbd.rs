//! Clients of an NBD server that harm whom they can, beside one that writes 4 KiB and flushes,
//! again and again.
//!
//! ```text
//!   hostile-nbd SOCKET EXPORT VICTIM [SECONDS]
//! ```
//! SOCKET is a Unix socket of any NBD server. EXPORT is a disk of 64 MiB or more, of which the
//! second MiB is overwritten, as is the first of VICTIM, another disk or the same. Each attack
//! takes SECONDS, 5 without. A line for each tells how many commits the victim made, how long the
//! longest took, and how many of the attackers the server has disconnected.

use std::path::Path;
use std::process::ExitCode;

use walvisor_testkit::hostile::{self, AttackTarget, nbd};

fn main() -> ExitCode {
    hostile::main("hostile-nbd SOCKET EXPORT VICTIM", |names, time| {
        let [socket, export, victim] = names;
        let target = AttackTarget::new(Path::new(socket), export);
        let mut victim = nbd::victim(&target.socket, victim)?;
        hostile::tell(&nbd::ATTACKS, &target, &mut victim, time)
    })
}
