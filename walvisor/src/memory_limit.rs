//! The memory that a daemon may use: `--memory-limit`, or three quarters of what its cgroup and its
//! machine have.
//!
//! What the process and its disks need is set aside at the start. Requests and clients share the
//! rest, see [`MemoryBudget`].

use std::fs;
use std::path::Path;

use walvisor_devices::backend::{MemoryBudget, MemoryReservation};

use crate::plan::Plan;
use crate::size::show_size;

/// What a daemon takes without disks and clients, in bytes.
const PROCESS_BYTES: u64 = 24 << 20;
/// The least that requests share, in bytes: the longest one, of
/// [`MAX_REQUEST_BYTES`](walvisor_devices::backend::MAX_REQUEST_BYTES).
const REQUEST_BYTES: u64 = 16 << 20;

/// Sets the limit of this process, which serves the disks of `plan`. Returns what is set aside for the process.
///
/// # Errors
/// One line: if `asked` is too small for the disks.
pub fn set(asked: Option<u64>, plan: &Plan) -> Result<Option<MemoryReservation>, String> {
    if let Some(asked) = asked {
        check(asked, plan).map_err(|error| format!("--memory-limit {error}"))?;
    }
    let (limit, least) = (asked.unwrap_or_else(usual), least(plan));
    if least > limit {
        tracing::warn!(
            "the disks need {} of memory, and this machine or cgroup has {}: give it more, or the \
             logs a smaller index-memory=",
            show_size(least),
            show_size(limit / 3 * 4)
        );
    }
    let budget = MemoryBudget::of_process();
    budget.set_limit(limit.max(least));
    Ok(budget.reserve(PROCESS_BYTES))
}

/// Refuses a limit that is too small for a daemon with these disks.
///
/// # Errors
/// One line.
pub fn check(limit: u64, plan: &Plan) -> Result<(), String> {
    let least = least(plan);
    if least <= limit {
        return Ok(());
    }
    Err(format!(
        "{}: too small: this process and its disks need {}; raise it, or lower index-memory=",
        show_size(limit),
        show_size(least),
    ))
}

/// The least limit of a daemon with these disks.
fn least(plan: &Plan) -> u64 {
    // A sixteenth is for buffers that are used again, and an eighth for clients that ask for
    // little.
    let needed = |limit| {
        let fixed = PROCESS_BYTES + REQUEST_BYTES + plan.memory(limit);
        (fixed / 13 * 16).next_multiple_of(1 << 20)
    };
    // A larger limit has larger indexes.
    let mut least = needed(0);
    while least < needed(least) {
        least = needed(least);
    }
    least
}

/// The limit without `--memory-limit`.
fn usual() -> u64 {
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let cgroup = limit_of_cgroups(&cgroups, Path::new("/sys/fs/cgroup"));
    let memory = rustix::system::sysinfo();
    let machine = memory.totalram.saturating_mul(memory.mem_unit.into());
    cgroup.unwrap_or(u64::MAX).min(machine) / 4 * 3
}

/// The least memory limit of the cgroups that `/proc/self/cgroup` names, and of those above them.
/// `root`: where cgroups are mounted. In a container the names are those outside of it, and its own
/// cgroup is the root.
fn limit_of_cgroups(cgroups: &str, root: &Path) -> Option<u64> {
    let places = cgroups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (mount, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            list if list.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        Some((mount.join(path.trim_start_matches('/')), mount, file))
    });
    let limits = places.flat_map(|(place, mount, file)| {
        let above: Vec<_> = place.ancestors().map(Path::to_owned).collect();
        let inside = above
            .into_iter()
            .take_while(move |at| at.starts_with(&mount));
        inside.filter_map(move |at| fs::read_to_string(at.join(file)).ok()?.trim().parse().ok())
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_a_cgroup_and_of_those_above_counts() {
        let dir = tempfile::tempdir().unwrap();
        let limit = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let found = |cgroups| limit_of_cgroups(cgroups, dir.path());
        assert_eq!(found("0::/a/b\n4:memory:/x\n1:cpu:/\nnonsense"), None);
        limit("a/memory.max", "300\n");
        limit("a/b/memory.max", "max\n");
        assert_eq!(found("0::/a/b\n"), Some(300));
        limit("memory/x/memory.limit_in_bytes", "200\n");
        assert_eq!(found("0::/a/b\n4:memory,hugetlb:/x\n"), Some(200));
        assert_eq!(found("4:memory:/not/here\n"), None);
        limit("memory/memory.limit_in_bytes", "100\n");
        assert_eq!(found("4:memory:/not/here\n"), Some(100));
    }
}
