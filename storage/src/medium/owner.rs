//! Which process has a file locked.

use std::fs::{File, read_to_string};
use std::os::unix::fs::MetadataExt;

use rustix::fs::{major, minor};

/// The process that locked the file with `flock`, and its name. `None`: unknown, for instance
/// because the process is in another container, or has ended and only its writes in flight are
/// left.
pub(crate) fn of(file: &File) -> Option<(u32, String)> {
    let pid = find(file, |_| true)?;
    let name = read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some((pid, name.trim_end().to_owned()))
}

/// As [`of`], for the process that has locked the file to write it.
pub(crate) fn writer_of(file: &File) -> Option<u32> {
    find(file, |kind| kind == "WRITE")
}

/// A list of fewer bytes is one of a moment: it fits a page, which the kernel fills with whole lines.
const ONE_READ: usize = 2048;
/// How often to look for a lock in a longer list.
const LOOKS: u32 = 10;

/// The process with a `flock` of this kind, READ or WRITE, on the file. The kernel lists the locks a
/// page at a time, by their numbers: a lock that ends between two pages hides another one.
fn find(file: &File, wanted: impl Fn(&str) -> bool) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let (device, inode) = (metadata.dev(), metadata.ino());
    let place = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    holder(&place, wanted, &mut || read_to_string("/proc/locks").ok())
}

/// As [`find`], of the file at `place`. `list` reads /proc/locks.
fn holder(
    place: &str,
    wanted: impl Fn(&str) -> bool,
    list: &mut dyn FnMut() -> Option<String>,
) -> Option<u32> {
    for _ in 0..LOOKS {
        let locks = list()?;
        let mut found = locks.lines().filter_map(|line| of_line(line, place));
        let found = found.find_map(|(pid, kind)| wanted(kind).then_some(pid));
        if found.is_some() || locks.len() < ONE_READ {
            return found;
        }
    }
    None
}

/// Whether the process that locked the file with `flock` is alive. One that was killed but has not
/// ended does not count.
pub(crate) fn is_alive(file: &File) -> bool {
    let stat = of(file).and_then(|(pid, _)| read_to_string(format!("/proc/{pid}/stat")).ok());
    stat.is_some_and(|stat| !is_exiting(&stat))
}

/// Whether this /proc/PID/stat is of a process that is ending or has ended.
fn is_exiting(stat: &str) -> bool {
    // PF_EXITING of the kernel's sched.h.
    const EXITING: u64 = 4;
    // The name, which may contain anything, ends at the last parenthesis; then come state, parents,
    // session, terminal, flags.
    let words = stat.rsplit(')').next().unwrap_or_default();
    let flags = words.split_whitespace().nth(6);
    flags
        .and_then(|flags| flags.parse::<u64>().ok())
        .is_none_or(|flags| flags & EXITING != 0)
}

/// The process in a line of /proc/locks, and what its lock is for, if the line is a `flock` of the
/// file at `place`.
fn of_line<'a>(line: &'a str, place: &str) -> Option<(u32, &'a str)> {
    let mut words = line.split_whitespace().skip(1);
    // A waiter's line has an arrow in place of the kind.
    let kind = words.next()?;
    let (wanted, pid, file) = (words.nth(1)?, words.next()?, words.next()?);
    let pid = pid.parse().ok().filter(|&pid| pid > 0)?;
    (kind == "FLOCK" && file == place).then_some((pid, wanted))
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::medium::file::DataFile;

    #[test]
    fn only_the_holder_of_a_flock_of_that_file_counts() {
        for (line, pid) in [
            (
                "3: FLOCK  ADVISORY  WRITE 4770 08:01:1234 0 EOF",
                Some((4770, "WRITE")),
            ),
            (
                "3: FLOCK  ADVISORY  READ  4770 08:01:1234 0 EOF",
                Some((4770, "READ")),
            ),
            ("3: -> FLOCK  ADVISORY  WRITE 4770 08:01:1234 0 EOF", None),
            ("3: FLOCK  ADVISORY  WRITE 4770 08:01:12345 0 EOF", None),
            ("3: FLOCK  ADVISORY  WRITE 4770 08:02:1234 0 EOF", None),
            ("3: POSIX  ADVISORY  WRITE 4770 08:01:1234 0 EOF", None),
            ("3: OFDLCK ADVISORY  READ  -1 08:01:1234 100 100", None),
            ("3: FLOCK  ADVISORY  WRITE 0 08:01:1234 0 EOF", None),
            ("3: FLOCK", None),
            ("", None),
        ] {
            assert_eq!(of_line(line, "08:01:1234"), pid, "{line}");
        }
    }

    #[test]
    fn a_process_that_was_killed_does_not_live() {
        for (stat, exiting) in [
            ("7 (a) b) S 1 7 7 0 -1 4194304 183 0", false),
            ("7 (a) b) Z 1 7 7 0 -1 4228108 183 0", true),
            ("7 (a", true),
            ("", true),
        ] {
            assert_eq!(is_exiting(stat), exiting, "{stat}");
        }
    }

    /// A lock that ends while the kernel gives the list hides another one.
    #[test]
    fn a_long_list_is_read_again() {
        let line = "3: FLOCK  ADVISORY  WRITE 4770 08:01:1234 0 EOF\n";
        let other = "4: POSIX  ADVISORY  WRITE 9 08:01:1 0 EOF\n".repeat(100);
        let look = |lists: &[&str]| {
            let mut reads = 0;
            let mut list = || {
                reads += 1;
                Some(lists[(reads - 1).min(lists.len() - 1)].to_owned())
            };
            let found = holder("08:01:1234", |_| true, &mut list);
            (found, reads)
        };
        assert_eq!(look(&[line]), (Some(4770), 1));
        assert_eq!(look(&["", line]), (None, 1));
        assert_eq!(
            look(&[&other, &other, &(other.clone() + line)]),
            (Some(4770), 3)
        );
        assert_eq!(look(&[&other]), (None, LOOKS as usize));
    }

    #[test]
    fn this_process_has_its_locks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (holder, other) = (file.reopen().unwrap(), file.reopen().unwrap());
        assert_eq!(of(&other), None);
        assert!(DataFile::try_lock(&holder, false).unwrap());
        let locks = read_to_string("/proc/locks").unwrap();
        let pid = std::process::id();
        if !locks.contains(&format!(" {pid} ")) {
            return println!("skipped: /proc/locks does not have this process");
        }
        assert_eq!(of(&other).map(|(pid, _)| pid), Some(pid));
        assert_eq!(writer_of(&other), Some(pid));
        assert!(is_alive(&other));
        drop(holder);
        assert_eq!(of(&other), None);
    }
}
