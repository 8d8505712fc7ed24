//! Every input of the corpus passes the harness, within the bounds on allocations, on an ordinary
//! build.

use std::path::Path;

use walvisor::control_socket::COMMANDS;
use walvisor_devices_fuzz::corpus;
use walvisor_fuzz::{Bounds, WORDS, run};

#[global_allocator]
static ALLOCATOR: Bounds = Bounds {};

#[test]
fn inputs_of_control_pass() {
    let inputs = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/control");
    corpus::replay(&inputs, run);
}

#[test]
fn every_command_has_a_word() {
    for name in COMMANDS {
        assert!(WORDS.contains(&name), "{name}");
    }
}
