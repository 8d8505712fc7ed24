//! The terminal: it is raw while the guest runs, and restored when the guest has ended for whatever
//! reason.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use rustix::termios::{LocalModes, Termios, tcgetattr};
use walvisor_testkit::Process;
use walvisor_tests::terminal;

use crate::has_kvm;
use crate::kernel::{self, KernelAction};

/// The modes of a terminal that a program may change.
fn modes(terminal: &File) -> (u32, u32, u32, u32) {
    let Termios {
        input_modes,
        output_modes,
        control_modes,
        local_modes,
        ..
    } = tcgetattr(terminal).unwrap();
    (
        input_modes.bits(),
        output_modes.bits(),
        control_modes.bits(),
        local_modes.bits(),
    )
}

/// A running guest that echoes, on a terminal of its own. Messages of others go to a pipe.
struct EchoingGuest {
    _directory: tempfile::TempDir,
    person: File,
    program: File,
    before: (u32, u32, u32, u32),
    child: Process,
}

impl EchoingGuest {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let kernel = kernel::save(
            directory.path(),
            "vmlinux",
            &kernel::vmlinux(KernelAction::Echo, true),
        );
        let (person, program) = terminal();
        let before = modes(&program);
        let mut command = Command::new(env!("CARGO_BIN_EXE_walvisor"));
        command
            .args(["run", "--memory", "4M", "--cmdline", "up!", "--kernel"])
            .arg(kernel)
            .stdin(program.try_clone().unwrap())
            .stdout(program.try_clone().unwrap())
            .stderr(Stdio::piped());
        let child = Process::spawn(&mut command);
        let mut guest = Self {
            _directory: directory,
            person,
            program,
            before,
            child,
        };
        guest.expect(b"up!");
        assert!(
            !tcgetattr(&guest.program)
                .unwrap()
                .local_modes
                .contains(LocalModes::ICANON),
            "not raw"
        );
        guest
    }

    /// Reads `text` from the terminal.
    fn expect(&mut self, text: &[u8]) {
        let mut read = vec![0; text.len()];
        self.person.read_exact(&mut read).unwrap();
        assert_eq!(read, text, "{}", String::from_utf8_lossy(&read));
    }

    /// Waits for the program's end, and asserts exit status 0 and a restored terminal.
    fn ends_well(mut self) {
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        assert_eq!(modes(&self.program), self.before);
        assert!(self.program.as_raw_fd() >= 0);
    }
}

#[test]
fn keys_reach_the_guest_and_ctrl_a_x_quits() {
    if !has_kvm() {
        return;
    }
    let mut guest = EchoingGuest::start();
    guest.person.write_all(b"hello").unwrap();
    guest.expect(b"hello");
    // Ctrl-C goes to the guest, and two Ctrl-A send one.
    guest.person.write_all(b"\x03\x01\x01").unwrap();
    guest.expect(b"\x03\x01");
    // This is more than the receive buffer holds.
    let long = [b'z'; 300];
    guest.person.write_all(&long).unwrap();
    guest.expect(&long);
    // The keys are listed, and the guest does not get the h.
    let mut errors = guest.child.stderr.take().unwrap();
    guest.person.write_all(b"a\x01hb").unwrap();
    guest.expect(b"ab");
    guest.person.write_all(b"\x01x").unwrap();
    guest.ends_well();
    let mut told = String::new();
    errors.read_to_string(&mut told).unwrap();
    let keys = |line: &&str| line.contains("Ctrl-A");
    let lines: Vec<&str> = told.lines().filter(keys).collect();
    let wanted = [
        "walvisor: Ctrl-A x ends the guest, Ctrl-A h lists the keys",
        "Ctrl-A x ",
        "Ctrl-A Ctrl-A ",
        "Ctrl-A h ",
    ];
    assert_eq!(lines.len(), wanted.len(), "{told}");
    for (line, wanted) in lines.iter().zip(wanted) {
        assert!(line.trim_start().starts_with(wanted), "{told}");
    }
}

#[test]
fn a_signal_restores_the_terminal() {
    if !has_kvm() {
        return;
    }
    for signal in [Signal::TERM, Signal::INT, Signal::QUIT] {
        let guest = EchoingGuest::start();
        guest.child.signal(signal);
        guest.ends_well();
    }
}
