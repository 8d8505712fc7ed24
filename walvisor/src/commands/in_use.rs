//! Looking at a disk or a log that another process has open: that process can be asked.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::CommandError;

/// The failure of a command that only looks at a disk or a log. If a process with a control socket
/// has it open, the line ends with the command that asks that process.
pub(super) fn cannot_look(error: walvisor_storage::Error) -> CommandError {
    ask_owner(error, "stats")
}

/// The same, of a command that the process carries out as this request of `walvisor ctl`.
pub(super) fn ask_owner(error: walvisor_storage::Error, request: &str) -> CommandError {
    match error.owner().and_then(control_socket) {
        Some(socket) => CommandError::Failed(format!(
            "{error}, or ask it: walvisor ctl {} {request}",
            socket.display()
        )),
        None => CommandError::failed(error),
    }
}

/// The control socket of a process, from its command line.
fn control_socket(pid: u32) -> Option<PathBuf> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let socket = named_socket(&line)?;
    // Another user's working directory can't be read; the path is then shown as that user gave it.
    let place = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
    Some(place.join(socket))
}

/// The value of `--control` in a command line whose words end with zero bytes.
fn named_socket(line: &[u8]) -> Option<&Path> {
    let mut words = line.split(|&byte| byte == 0);
    let socket = words.find_map(|word| match word.strip_prefix(b"--control")? {
        [] => Some(None),
        [b'=', socket @ ..] => Some(Some(socket)),
        _ => None,
    })?;
    let socket = socket.or_else(|| words.next())?;
    (!socket.is_empty()).then(|| Path::new(OsStr::from_bytes(socket)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_socket_is_found_in_a_command_line() {
        for (line, socket) in [
            (
                &b"walvisor\0serve\0nbd\0--control\0ctl.sock\0--disk\0x\0"[..],
                Some("ctl.sock"),
            ),
            (b"walvisor\0run\0--control=/run/ctl\0", Some("/run/ctl")),
            (b"walvisor\0run\0--controls\0ctl\0", None),
            (b"walvisor\0run\0--control\0", None),
            (b"", None),
        ] {
            assert_eq!(named_socket(line), socket.map(Path::new), "{line:?}");
        }
    }
}
