//! Cases of what a device must do, and must withstand (virtio 1.2; `devices/CONFORMANCE.md` lists
//! the rules).
//!
//! ```text
//!   CASES ─▶ Bench ─▶ Transport            a driver without manners: it writes any ring and any register
//!              └────▶ Ring, one a queue
//! ```
//!
//! Each case begins with a reset. A case of a hostile driver ends with the check that the device
//! works again.

mod bench;
mod hostile;
mod negotiation;
mod queues;
mod registers;
mod requests;
mod ring;

use core::fmt::{self, Display, Write};

use crate::contract::GuestMessage;
use crate::error::Error;
use crate::memory::Arena;
use crate::transport::{Interrupts, Transport};
use bench::Bench;

/// The reason why a case failed: a description, and the number that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Problem(&'static str, u64);

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:#x})", self.0, self.1)
    }
}

type Verdict = Result<(), Problem>;

/// A case: its name and its function.
type Case = (&'static str, fn(&mut Bench<'_>) -> Verdict);

/// Fails with the problem `what` and the number `number`, unless `right`.
fn check(right: bool, what: &'static str, number: u64) -> Verdict {
    if right {
        Ok(())
    } else {
        Err(Problem(what, number))
    }
}

/// Runs every case on the device behind `transport`, and reports each to the VMM. `memory_end` is
/// where RAM ends.
///
/// # Errors
/// If there is not enough memory, or the device is too small for the cases.
pub fn run(
    transport: &mut dyn Transport,
    interrupts: &dyn Interrupts,
    arena: &mut Arena,
    memory_end: u64,
    console: &mut dyn Write,
) -> Result<u32, Error> {
    let name = transport.name();
    let mut bench = Bench::new(transport, interrupts, arena, memory_end)?;
    let of_transport = match name {
        "mmio" => registers::MMIO,
        _ => registers::PCI,
    };
    let groups = [
        negotiation::CASES,
        requests::CASES,
        queues::CASES,
        of_transport,
        hostile::CASES,
    ];
    let mut count = 0;
    for (case, run) in groups.into_iter().flatten() {
        let problem = run(&mut bench).err();
        bench.transport.set_status(0);
        let problem = problem.as_ref().map(|problem| problem as &dyn Display);
        let line = GuestMessage::Case(&name as &dyn Display, case as &dyn Display, problem);
        // If the console fails, there is no other way to report the case.
        let _ = writeln!(console, "{line}");
        count += 1;
    }
    Ok(count)
}
