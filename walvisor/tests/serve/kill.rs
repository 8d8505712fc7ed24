//! What a kill of the daemon leaves of writes that were answered and not flushed. Clients that
//! reconnect by themselves do not repeat such a write, and take a later FLUSH as proof that it is
//! durable.
//!
//! The writes here are too few to be written to the log unless a client waits for them: where
//! answers do not wait, they are only in the daemon's memory.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use walvisor_tests::have;

use super::{Daemon, create, foreign, test_dir, text};

/// A third-party program that does a step for each line it reads, and reports when it is done.
pub(super) struct StepProgram {
    child: Child,
    commands: ChildStdin,
    said: ChildStdout,
}

impl StepProgram {
    pub(super) fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("timeout(1) starts");
        Self {
            commands: child.stdin.take().unwrap(),
            said: child.stdout.take().unwrap(),
            child,
        }
    }

    pub(super) fn say(&mut self, line: &str) {
        writeln!(self.commands, "{line}").expect("it reads");
    }

    /// Waits until the program's output ends with `end`, and returns the output up to there.
    #[track_caller]
    pub(super) fn wait_for(&mut self, end: &str) -> String {
        let mut all = Vec::new();
        while !all.ends_with(end.as_bytes()) {
            let mut byte = [0];
            let read = self.said.read_exact(&mut byte);
            read.unwrap_or_else(|_| panic!("it ended before '{end}': {}", text(&all)));
            all.extend(byte);
        }
        text(&all)
    }
}

impl Drop for StepProgram {
    fn drop(&mut self) {
        // timeout(1) passes the signal on.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// Kills the daemon and starts another.
fn restart(daemon: Daemon, dir: &Path, arguments: &str) -> Daemon {
    daemon.kill();
    Daemon::start(dir, arguments)
}

/// Writes pages 0 and 41, and makes them durable. Then it writes pages 1 to 40, trims page 0 and
/// zeroes page 41, without a FLUSH. Once the daemon is back, the next connection flushes, and prints
/// how many pages are as they were left, and whether page 41 is what was durable.
const CLIENT: &str = r"
import nbd, sys
def connect():
    c = nbd.NBD()
    c.connect_unix('s')
    return c
c = connect()
page = lambda n: bytes([n]) * 4096
c.pwrite(page(99), 0)
DURABLE
for n in range(1, 41):
    c.pwrite(page(n), n * 4096)
c.trim(4096, 0)
c.zero(4096, 41 * 4096)
print('answered', flush=True)
sys.stdin.readline()
c = connect()
c.flush()
kept = [n for n in range(42) if c.pread(4096, n * 4096) == page(n % 41)]
print('kept', len(kept), c.pread(4096, 41 * 4096) == page(98), flush=True)
";

#[test]
fn answered_writes_survive_a_kill_unless_answer_is_memory() {
    if !have("nbdsh", "python3-libnbd") {
        return;
    }
    // A FLUSH of one connection covers what another wrote.
    let flush = "c.pwrite(page(98), 41 * 4096); connect().flush()";
    let fua = "c.pwrite(page(98), 41 * 4096, nbd.CMD_FLAG_FUA)";
    // A trim with FUA covers what came before it.
    let trim = "c.pwrite(page(98), 41 * 4096); c.trim(4096, 42 * 4096, nbd.CMD_FLAG_FUA)";
    for (answer, durable, kept) in [
        ("", flush, "kept 42 False\n"),
        (",answer=written", flush, "kept 42 False\n"),
        (",cache=writethrough", flush, "kept 42 False\n"),
        (",answer=memory", flush, "kept 0 True\n"),
        (",answer=memory", fua, "kept 0 True\n"),
        (",answer=memory", trim, "kept 0 True\n"),
    ] {
        let dir = &test_dir();
        create(dir, "disk.img", "4M");
        let arguments = format!("--disk path=disk.img,socket=s{answer}");
        let daemon = Daemon::start(dir, &arguments);
        let mut client = StepProgram::start(
            foreign(dir, "nbdsh").args(["-c", &CLIENT.replace("DURABLE", durable)]),
        );
        client.wait_for("answered\n");
        let daemon = restart(daemon, dir, &arguments);
        client.say("");
        assert_eq!(client.wait_for("\n"), kept, "{answer}");
        assert_eq!(daemon.stop(), "");
    }
}
