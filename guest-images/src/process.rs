//! Runs other programs: errors name the command line, and children never outlive this process.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal};
pub use walvisor_testkit::leash;

use crate::error::{Error, Result};
use crate::stop;

/// The command line as text, for messages.
pub(crate) fn command_text(command: &Command) -> String {
    let arguments = command.get_args().map(OsStr::to_string_lossy);
    let mut line = command.get_program().to_string_lossy().into_owned();
    for argument in arguments {
        line.push(' ');
        line.push_str(&argument);
    }
    if line.len() > 160 {
        let end = line.floor_char_boundary(157);
        line.truncate(end);
        line.push_str("...");
    }
    line
}

/// Runs `command`, waits until it ends, and returns its output.
///
/// # Errors
/// The program is missing, or its exit status is not 0.
pub(crate) fn run(command: &mut Command) -> Result<Output> {
    stop::check()?;
    let output = command.output().map_err(|source| Error::Start {
        command: command_text(command),
        source,
    })?;
    stop::check()?;
    if output.status.success() {
        Ok(output)
    } else {
        Err(program_error(command, output.status, &output.stderr))
    }
}

/// The error for a `command` that ended with `status`.
pub(crate) fn program_error(command: &Command, status: ExitStatus, stderr: &[u8]) -> Error {
    let text = String::from_utf8_lossy(stderr);
    let message = text.lines().rev().find(|line| !line.trim().is_empty());
    Error::Program {
        command: command_text(command),
        status: status.to_string(),
        message: message.unwrap_or("it printed no reason").trim().to_owned(),
    }
}

/// Whether `program` is on the search path.
pub(crate) fn is_installed(program: &str) -> bool {
    // mke2fs and debugfs are in /usr/sbin, which may not be on an ordinary user's path.
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|directory| directory.join(program).is_file())
}

/// Lets the child inherit `file` under the same descriptor number.
pub(crate) fn inherit(command: &mut Command, file: &Arc<OwnedFd>) {
    let file = Arc::clone(file);
    // SAFETY: between fork and exec the closure only makes a system call (fcntl), on a descriptor
    // that the closure keeps open.
    unsafe {
        command.pre_exec(move || Ok(fcntl_setfd(&file, FdFlags::empty())?));
    }
}

/// A child that is killed when this value is dropped, or by the kernel when the thread that started
/// it ends otherwise.
pub(crate) struct LeashedChild {
    child: Child,
    whole_group: bool,
    echoed: bool,
}

/// A pipe that may copy everything read from it to standard output.
struct EchoedPipe {
    pipe: ChildStdout,
    echoed: bool,
}

impl Read for EchoedPipe {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.pipe.read(bytes)?;
        if self.echoed {
            // If nobody reads standard output any more, the lines are still needed here.
            let mut output = io::stdout();
            let _ = output
                .write_all(&bytes[..count])
                .and_then(|()| output.flush());
        }
        Ok(count)
    }
}

impl LeashedChild {
    /// Starts `command`. With `whole_group` it leads a new process group, and dropping this kills
    /// the whole group.
    ///
    /// # Errors
    /// The program cannot be started.
    pub(crate) fn spawn(command: &mut Command, whole_group: bool) -> Result<Self> {
        stop::check()?;
        if whole_group {
            command.process_group(0);
        }
        let child = leash(command).spawn().map_err(|source| Error::Start {
            command: command_text(command),
            source,
        })?;
        Ok(Self {
            child,
            whole_group,
            echoed: false,
        })
    }

    /// From now on copies its standard output to this process's, byte by byte, so that a user sees
    /// an unfinished line that asks for input.
    pub(crate) fn echo(&mut self) {
        self.echoed = true;
    }

    /// Takes the writing end of the child's standard input, if that is a pipe. Only the first call
    /// returns it.
    pub(crate) fn take_input(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// The lines of its standard output, which must be a pipe, as they arrive. Call it only once.
    pub(crate) fn read_lines(&mut self) -> Receiver<String> {
        let (sender, lines) = mpsc::channel();
        let (pipe, echoed) = (self.child.stdout.take(), self.echoed);
        std::thread::spawn(move || {
            let mut output = BufReader::new(EchoedPipe {
                pipe: pipe?,
                echoed,
            });
            let mut bytes = Vec::new();
            while output
                .read_until(b'\n', &mut bytes)
                .is_ok_and(|count| count > 0)
            {
                let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
                sender.send(text).ok()?;
                bytes.clear();
            }
            Some(())
        });
        lines
    }

    /// Waits until the child ends.
    ///
    /// # Errors
    /// The child cannot be waited for.
    pub(crate) fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }

    /// Waits until the child ends. Calls `each` with every line of its standard output, which must
    /// be a pipe, and with `None` whenever 0.2 s pass without a line. If `each` returns `Break`, or
    /// a signal has asked this process to end, returns `None` without waiting further.
    ///
    /// # Errors
    /// The child cannot be waited for.
    pub(crate) fn watch(
        &mut self,
        mut each: impl FnMut(Option<&str>) -> ControlFlow<()>,
    ) -> io::Result<Option<ExitStatus>> {
        let lines = self.read_lines();
        loop {
            let flow = match lines.recv_timeout(Duration::from_millis(200)) {
                Ok(line) => each(Some(&line)),
                Err(RecvTimeoutError::Timeout) => each(None),
                Err(RecvTimeoutError::Disconnected) => return self.child.wait().map(Some),
            };
            if flow.is_break() || stop::check().is_err() {
                return Ok(None);
            }
        }
    }

    /// Reads the child's standard error, which must be a pipe, after the child has ended.
    pub(crate) fn read_stderr(&mut self) -> Vec<u8> {
        let mut text = Vec::new();
        if let Some(mut pipe) = self.child.stderr.take() {
            let _ = pipe.read_to_end(&mut text);
        }
        text
    }
}

impl Drop for LeashedChild {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            if self.whole_group {
                let _ =
                    rustix::process::kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::time::Instant;

    #[test]
    fn a_failure_names_the_command_and_its_reason() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo the reason >&2; exit 3"]);
        let message = run(&mut command).unwrap_err().to_string();
        assert!(message.contains("sh -c"), "{message}");
        assert!(message.contains("the reason"), "{message}");
        assert!(message.contains('3'), "{message}");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = run(&mut Command::new("no-such-program-here")).unwrap_err();
        assert!(matches!(error, Error::Start { .. }));
        assert!(error.to_string().contains("no-such-program-here"));
        assert!(!is_installed("no-such-program-here"));
        assert!(is_installed("sh"));
    }

    #[test]
    fn dropping_kills_the_whole_group() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 100 & echo $!; wait"]);
        command.stdout(std::process::Stdio::piped());
        let mut leashed = LeashedChild::spawn(&mut command, true).unwrap();
        let mut grandchild = String::new();
        let given_up = leashed
            .watch(|line| match line {
                Some(line) => {
                    line.clone_into(&mut grandchild);
                    ControlFlow::Break(())
                }
                None => ControlFlow::Continue(()),
            })
            .unwrap();
        assert_eq!(given_up, None);
        drop(leashed);
        let start = Instant::now();
        // The grandchild is reaped by init, or stays a zombie where init does not reap: both are
        // dead.
        while std::fs::read_to_string(format!("/proc/{grandchild}/stat"))
            .is_ok_and(|stat| !stat.contains(") Z "))
        {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "the grandchild survived"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_child_ends_with_the_thread_that_started_it() {
        let (sender, children) = mpsc::channel();
        let ended = std::thread::spawn(move || {
            let child = leash(Command::new("sleep").arg("100")).spawn().unwrap();
            sender.send(child).unwrap();
            panic!("as a test that fails");
        });
        ended.join().unwrap_err();
        let status = children.recv().unwrap().wait().unwrap();
        assert_eq!(status.signal(), Some(9), "{status}");
    }
}
