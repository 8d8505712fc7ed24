//! Every input of the corpus passes the harness, within the bounds on allocations, on an ordinary
//! build.

use std::path::Path;

use walvisor_devices_fuzz::corpus;
use walvisor_fuzz::{Bounds, run};

#[global_allocator]
static ALLOCATOR: Bounds = Bounds {};

#[test]
fn inputs_of_control_pass() {
    let inputs = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/control");
    corpus::replay(&inputs, run);
}
