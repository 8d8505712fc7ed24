//! Waits for a test, and ends one that takes too long: first everything that explains it is written
//! to its output.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::processes::{command_line, family};

/// How a test ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exited(ExitStatus),
    /// It was killed.
    OverLimit,
    /// It was killed, and waited for requests of an `io_uring` that the kernel has lost.
    ///
    /// Linux 6.18 was seen to do so: two of three WRITEVs to one file have no completion, no thread
    /// `iou-wrk` works on them, and nothing is in flight at the medium. No program can get them
    /// back.
    LostByKernel,
}

/// Waits until `child` ends, for at most `limit`.
pub(crate) fn wait(child: &mut Child, limit: Duration, mut output: File) -> io::Result<End> {
    let pid = Pid::from_child(child);
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    if poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&limit))? > 0 {
        return child.wait().map(End::Exited);
    }
    let members = family(pid);
    writeln!(output, "over its limit of {} s:", limit.tv_sec)?;
    let mut is_lost = false;
    for &member in &members {
        let number = member.as_raw_nonzero();
        writeln!(output, "process {number}: {}", command_line(member))?;
        write_backtraces(member, &mut output)?;
        for ring in lost_requests(member) {
            writeln!(
                output,
                "  ring {ring}: no thread works on its open requests"
            )?;
            is_lost = true;
        }
    }
    write_unread(pid, &mut output)?;
    for member in members {
        let _ = kill_process(member, Signal::KILL);
    }
    // One that waits in the kernel does not end by a signal.
    let minute = Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    if poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&minute))? > 0 {
        child.wait()?;
    } else {
        writeln!(
            output,
            "process {}: SIGKILL does not end it",
            pid.as_raw_nonzero()
        )?;
    }
    Ok(if is_lost {
        End::LostByKernel
    } else {
        End::OverLimit
    })
}

/// Writes what each thread does: its stack by `eu-stack`, else where it waits in the kernel.
fn write_backtraces(pid: Pid, output: &mut File) -> io::Result<()> {
    let number = pid.as_raw_nonzero().to_string();
    let stacks = Command::new("timeout")
        .args(["60", "eu-stack", "-p", number.as_str()])
        .stdin(Stdio::null())
        .output()?;
    if !stacks.stdout.is_empty() {
        output.write_all(&stacks.stdout)?;
    }
    let tasks = fs::read_dir(format!("/proc/{number}/task"));
    for task in tasks.into_iter().flatten().flatten() {
        let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (name, waits) = (read("comm"), read("wchan"));
        writeln!(
            output,
            "  thread {} ({}) waits in {waits:?}",
            task.file_name().display(),
            name.trim_end()
        )?;
    }
    Ok(())
}

/// Writes what the test's children have written to it and it has not read: its daemons' messages.
fn write_unread(pid: Pid, output: &mut File) -> io::Result<()> {
    let place = format!("/proc/{}/fd", pid.as_raw_nonzero());
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_pipe = fs::read_link(&path).is_ok_and(|target| {
            // "pipe:[NUMBER]"
            target.to_string_lossy().starts_with("pipe:")
        });
        if !is_pipe {
            continue;
        }
        let mut options = OpenOptions::new();
        options.read(true);
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let Ok(mut pipe) = options.custom_flags(nonblocking).open(&path) else {
            continue;
        };
        let (mut text, mut part) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = pipe.read(&mut part) {
            text.extend_from_slice(&part[..count]);
        }
        if !text.is_empty() {
            let tail = &text[text.len().saturating_sub(8192)..];
            writeln!(output, "unread messages, at their end:")?;
            output.write_all(tail)?;
            writeln!(output)?;
        }
    }
    Ok(())
}

/// The rings of a process that wait for requests on which no thread of the kernel works. A server of
/// ublk always has such requests: the kernel completes them when the disk has work.
fn lost_requests(pid: Pid) -> Vec<String> {
    let process = format!("/proc/{}", pid.as_raw_nonzero());
    let entries = |name: &str| {
        let entries = fs::read_dir(Path::new(&process).join(name));
        entries.into_iter().flatten().flatten()
    };
    let works = entries("task").any(|task| {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        name.starts_with("iou-wrk")
    });
    if works {
        return Vec::new();
    }
    let serves = entries("fd").any(|file| {
        let target = fs::read_link(file.path()).unwrap_or_default();
        target.to_string_lossy().starts_with("/dev/ublkc")
    });
    if serves {
        return Vec::new();
    }
    let rings = entries("fdinfo").filter(|entry| {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        open_requests(&text).is_some_and(|open| open > 0)
    });
    rings
        .map(|entry| entry.file_name().display().to_string())
        .collect()
}

/// How many requests of a ring have no completion, by its file in `/proc/PID/fdinfo`.
fn open_requests(fdinfo: &str) -> Option<u32> {
    let number = |key: &str| {
        let value = fdinfo.lines().find_map(|line| line.strip_prefix(key))?;
        value.trim().parse::<u32>().ok()
    };
    Some(number("CachedSqHead:")?.wrapping_sub(number("CachedCqTail:")?))
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_test_over_its_limit_is_explained_and_killed() {
        let place = std::env::temp_dir().join(format!("walvisor-limit-{}", std::process::id()));
        let file = File::create(&place).unwrap();
        // A child that has written to a pipe which nobody reads.
        let script = "(echo served >&3; exec sleep 1003) 3>&1 | sleep 1004";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let end = wait(&mut child, Duration::from_secs(1), file);
        let text = fs::read_to_string(&place).unwrap();
        fs::remove_file(&place).unwrap();
        assert_eq!(end.unwrap(), End::OverLimit, "{text}");
        assert!(text.starts_with("over its limit of 1 s:\n"), "{text}");
        for part in [": sleep 1003\n", ": sleep 1004\n", "(sleep) waits in "] {
            assert!(text.contains(part), "{part:?}: {text}");
        }
    }

    #[test]
    fn unread_messages_of_a_daemon_are_shown() {
        let place = std::env::temp_dir().join(format!("walvisor-unread-{}", std::process::id()));
        let mut daemon = Command::new("sh")
            .args(["-c", "echo cannot sync >&2; exec sleep 1005 2>/dev/null"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pipe = daemon.stderr.as_ref().unwrap();
        let mut ready = [PollFd::new(pipe, PollFlags::IN)];
        poll(&mut ready, None).unwrap();
        write_unread(
            rustix::process::getpid(),
            &mut File::create(&place).unwrap(),
        )
        .unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        let text = fs::read_to_string(&place).unwrap();
        fs::remove_file(&place).unwrap();
        assert!(text.contains("\ncannot sync\n"), "{text}");
    }

    #[test]
    fn open_requests_are_those_without_a_completion() {
        let text = "SqMask:\t0x7\nCachedSqHead:\t12\nCqTail:\t9\nCachedCqTail:\t10\n";
        assert_eq!(open_requests(text), Some(2));
        assert_eq!(open_requests("pos:\t0\n"), None);
    }
}
