//! Sends any bytes, in any pieces, to the control socket of a process with two disks in use. The
//! server must answer each line once and in order, the disks and the process must do what the
//! answers say, and afterwards the socket and the disks must still work.
//!
//! ```text
//!   input ──▶ words.rs: text ──▶ client.rs ──socket──▶ walvisor's Server ──▶ ControlledProcess ──▶ RAM disk, raw image
//!                                    └─ lines and answers ──▶ judge.rs            guest.rs: its requests meanwhile ─┘
//! ```
//!
//! An *input* starts with a byte of options (mask 1: a VM instead of a daemon, mask 6: the length
//! of the pieces); the rest is text, see `words.rs`.
//!
//! `make fuzz` builds the target in `bin` with libFuzzer, see `devices/fuzz`. An ordinary test
//! (`tests/corpus.rs`) runs the inputs of `corpus/control`.

mod client;
mod guest;
mod judge;
mod words;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use walvisor::control_socket::{ControlledProcess, Power, Server};
use walvisor::disk_spec::DiskCommand;
use walvisor_devices_fuzz::bounded::BoundedAllocator;
use walvisor_vmm::control::RunControl;

use guest::Guest;
use judge::Judge;
pub use words::{Piece, pieces};

/// A line has at most 64 KiB, and its decoded form is at most three times as long (`\u0000`); a
/// client's stack is not counted. The two disks, their queues and the harness's own data take less
/// than 4 MiB.
pub type Bounds = BoundedAllocator<{ 512 << 10 }, { 8 << 20 }>;

/// Runs one input.
///
/// # Panics
/// If an answer is not what it must be, or the disks or the process do not what the answers say.
pub fn run(input: &[u8]) {
    let Some((&options, input)) = input.split_first() else {
        return;
    };
    let mut guest = Guest::start();
    let ended = Arc::new(AtomicBool::new(false));
    let control = Arc::new(RunControl::new().expect("descriptors"));
    let (kind, power) = if options & 1 == 0 {
        let end = Arc::clone(&ended);
        let end = move || end.store(true, Ordering::SeqCst);
        (
            DiskCommand::Nbd,
            Power::Daemon {
                end: Box::new(end),
                hotplug: None,
            },
        )
    } else {
        let power = Power::Guest {
            control: Arc::clone(&control),
            exits: vec![Arc::default()],
            networks: Vec::new(),
            first_run: Arc::default(),
        };
        (DiskCommand::Run, power)
    };
    let controlled = ControlledProcess::new(kind, Instant::now(), guest.controlled(), power);
    let address = SocketAddr::from_abstract_name(format!("walvisor-fuzz-{}", std::process::id()));
    let address = address.expect("a short name");
    let listener = UnixListener::bind_addr(&address).expect("a socket");
    let server = Server::start(listener, Arc::new(controlled)).expect("a thread");
    let connect = || UnixStream::connect_addr(&address).expect("somebody listens");

    let pieces = words::pieces(input, 1 << (options & 6));
    let mut judge = Judge::new(guest.sizes(), kind == DiskCommand::Run);
    let answers = client::converse(&connect(), &pieces, &mut guest);
    judge.check(&pieces, answers);
    // The server asks the process to end only after it has sent the answer.
    let mut after = words::AFTERWARDS.concat();
    after.push(b'\n');
    let after = [words::Piece::Text(after)];
    let answers = client::converse(&connect(), &after, &mut guest);
    judge.check(&after, answers);
    let is_ended = ended.load(Ordering::SeqCst) || control.end_reason().is_some();
    judge.check_end(is_ended);
    guest.finish(judge.sizes());
    drop(server);
}
