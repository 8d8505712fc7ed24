//! The host's end of the serial line: a writer for the output, and optionally stdin for the input,
//! which has its own thread.
//!
//! On a terminal, Ctrl-A x ends the run and Ctrl-A h lists the keys. All other input, Ctrl-C
//! included, goes to the guest.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use vmm_sys_util::eventfd::EventFd;
use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Waiter, WakeReason};

use super::serial::SerialPort;
use super::terminal::RawTerminal;
use crate::control::{RunControl, RunEnd};
use crate::readiness;

/// Ctrl-A.
const ESCAPE: u8 = 1;

/// What Ctrl-A h prints.
const KEYS: &str =
    "  Ctrl-A x       stop the guest at once, without a shutdown; its disks are closed
  Ctrl-A Ctrl-A  send Ctrl-A to the guest
  Ctrl-A h       list these keys; all other keys, even Ctrl-C, go to the guest";

/// The host's end of the serial line.
pub struct Console {
    /// The destination of the guest's output.
    pub output: Box<dyn Write + Send>,
    /// Whether stdin is the guest's input.
    pub stdin: bool,
}

impl Console {
    /// Stdin and stdout.
    pub fn stdio() -> Self {
        Self {
            output: Box::new(io::stdout()),
            stdin: true,
        }
    }

    /// No output and no input.
    pub fn off() -> Self {
        Self {
            output: Box::new(io::sink()),
            stdin: false,
        }
    }

    /// Output is appended to the file at `path`; there is no input.
    ///
    /// # Errors
    /// If the file cannot be opened for writing.
    pub fn file(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self {
            output: Box::new(file),
            stdin: false,
        })
    }

    /// Output goes to `writer`; there is no input.
    pub fn writer(writer: impl Write + Send + 'static) -> Self {
        Self {
            output: Box::new(writer),
            stdin: false,
        }
    }
}

/// The thread that feeds stdin to the serial line. Dropping it stops the thread and restores the
/// terminal.
pub struct ConsoleInput {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
    _terminal: Option<RawTerminal>,
}

impl ConsoleInput {
    /// Starts feeding stdin to `serial`. `room` is the event that the serial line signals when the
    /// guest has read its input.
    ///
    /// # Errors
    /// If the system refuses a descriptor, a thread or raw mode.
    pub fn start(
        serial: Arc<Mutex<SerialPort>>,
        room: Arc<EventFd>,
        control: Arc<RunControl>,
    ) -> io::Result<Self> {
        let terminal = RawTerminal::enter()?;
        if terminal.is_some() {
            eprintln!("walvisor: Ctrl-A x ends the guest, Ctrl-A h lists the keys");
        }
        let stop = Stop::new()?;
        let mut feeder = Feeder {
            serial,
            keys: Waiter::new(rustix::stdio::stdin(), &stop)?,
            space: Waiter::new(readiness::descriptor(&room), &stop)?,
            room,
            control,
            on_terminal: terminal.is_some(),
        };
        let thread = std::thread::Builder::new()
            .name("console".to_owned())
            .spawn(move || feeder.run())?;
        Ok(Self {
            stop,
            thread: Some(thread),
            _terminal: terminal,
        })
    }
}

impl Drop for ConsoleInput {
    fn drop(&mut self) {
        self.stop.tell();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has been printed already.
            let _ = thread.join();
        }
    }
}

/// The state of the input thread.
struct Feeder {
    serial: Arc<Mutex<SerialPort>>,
    room: Arc<EventFd>,
    control: Arc<RunControl>,
    /// Waits for input.
    keys: Waiter,
    /// Waits for `room`.
    space: Waiter,
    on_terminal: bool,
}

impl Feeder {
    /// Reads stdin until it ends or the run does.
    fn run(&mut self) {
        let stdin = rustix::stdio::stdin();
        let mut keys = EscapedKeys::default();
        let mut buffer = [0; 256];
        while ready(&mut self.keys, stdin) {
            let length = match rustix::io::read(stdin, &mut buffer) {
                Ok(0) => return,
                Ok(length) => length,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
                Err(_) => return,
            };
            let mut input = buffer[..length].to_vec();
            let typed = if self.on_terminal {
                keys.filter(&mut input)
            } else {
                Vec::new()
            };
            if typed.contains(&b'h') {
                eprintln!("{KEYS}");
            }
            if typed.contains(&b'x') {
                self.control.end(RunEnd::Quit);
                return;
            }
            if !self.feed(&input) {
                return;
            }
        }
    }

    /// Feeds `input` to the guest as its buffer empties. Returns `false` if the run ended before
    /// that was done.
    fn feed(&mut self, mut input: &[u8]) -> bool {
        loop {
            // Clear the event before checking the buffer: room that appears after the check sets it
            // again.
            let _ = self.room.read();
            let taken = self
                .serial
                .lock()
                .expect("a device panicked")
                .receive(input);
            input = &input[taken..];
            if input.is_empty() {
                return true;
            }
            if taken == 0 && !ready(&mut self.space, readiness::descriptor(&self.room)) {
                return false;
            }
        }
    }
}

/// Waits until `source` is readable. Returns `false` if the run ended first.
fn ready(waiter: &mut Waiter, source: impl AsFd) -> bool {
    matches!(
        waiter.wait(source, EventSet::IN, None),
        Ok(WakeReason::Ready)
    )
}

/// Finds Ctrl-A x and Ctrl-A h in the input. Ctrl-A Ctrl-A stands for one Ctrl-A.
#[derive(Default)]
struct EscapedKeys {
    escaped: bool,
}

impl EscapedKeys {
    /// Removes the escapes from `input`. Returns which of the two keys were typed after one.
    fn filter(&mut self, input: &mut Vec<u8>) -> Vec<u8> {
        let mut typed = Vec::new();
        input.retain(|byte| {
            let escaped = std::mem::take(&mut self.escaped);
            match byte {
                &ESCAPE if !escaped => {
                    self.escaped = true;
                    false
                }
                b'x' | b'h' if escaped => {
                    typed.push(*byte);
                    false
                }
                _ => true,
            }
        });
        typed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_keys_are_found_across_reads() {
        let mut keys = EscapedKeys::default();
        let mut input = b"ab\x01".to_vec();
        assert_eq!(keys.filter(&mut input), b"");
        assert_eq!(input, b"ab");
        let mut input = b"xc\x01hd".to_vec();
        assert_eq!(keys.filter(&mut input), b"xh");
        assert_eq!(input, b"cd");
        let mut input = b"\x01\x01x\x03h".to_vec();
        assert_eq!(keys.filter(&mut input), b"");
        assert_eq!(input, b"\x01x\x03h");
    }
}
