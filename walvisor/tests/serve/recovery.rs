//! The progress of a start after a kill: a bar on a terminal, nothing in a pipe unless asked for.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use walvisor_testkit::nbd::RawClient;
use walvisor_tests::terminal;

use super::{Daemon, WALVISOR, assert_says, create, noise, test_dir};

/// Its close copies everything, however slow the machine is.
const DISK: &str = "path=disk.img,socket=s,close-seconds=86400";

/// Leaves a log of more than one segment behind, as after a loss of power.
fn killed_with_a_full_log(dir: &Path) {
    let daemon = Daemon::start(dir, &format!("--disk {DISK}"));
    let mut client = RawClient::extended(&dir.join("s"));
    let data = noise(4 << 20);
    for piece in 0..20 {
        client.write(piece, piece * data.len() as u64, &data);
    }
    client.flush(99);
    daemon.kill();
}

#[test]
fn the_progress_of_recovery_is_shown_on_terminals_only() {
    let dir = &test_dir();
    create(dir, "disk.img", "128M");
    killed_with_a_full_log(dir);
    let (mut person, program) = terminal();
    let shown = thread::spawn(move || {
        let mut shown = Vec::new();
        // The read ends with an error when the other side is closed.
        let _ = person.read_to_end(&mut shown);
        String::from_utf8_lossy(&shown).into_owned()
    });
    let serve = || {
        let mut command = Command::new(WALVISOR);
        command.args(["serve", "nbd", "--disk", DISK]);
        // With an unknown TERM no progress bar is drawn.
        command.env("TERM", "xterm").stdin(Stdio::null());
        command
    };
    let daemon = Daemon::start_telling(dir, &mut serve(), program.into(), 1);
    daemon.stop();
    let text = shown.join().unwrap();
    assert_says(&text, &["recovering", "128.00 MiB"]);
    // The log was closed, so there is nothing to recover.
    let daemon = Daemon::start(dir, &format!("--disk {DISK}"));
    assert_eq!(daemon.stop(), "");

    killed_with_a_full_log(dir);
    let daemon = Daemon::start(dir, &format!("--disk {DISK}"));
    assert_eq!(daemon.stop(), "");
    killed_with_a_full_log(dir);
    let daemon = Daemon::start_as(dir, serve().env("RUST_LOG", "info"), 1);
    let errors = daemon.stop();
    assert_eq!(errors.matches("recovered from").count(), 1, "{errors}");
    assert!(!errors.contains("recovering"), "{errors}");
}
