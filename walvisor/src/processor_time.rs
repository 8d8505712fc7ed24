//! Processor time of this process, of another process, and of the machine.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Processor time that this process has used, all of its threads together.
pub fn of_this_process() -> Duration {
    of_clock(ClockId::ProcessCPUTime)
}

/// Processor time that the calling thread has used.
pub fn of_this_thread() -> Duration {
    of_clock(ClockId::ThreadCPUTime)
}

fn of_clock(clock: ClockId) -> Duration {
    // The time of a system clock is never negative.
    clock_gettime(clock).try_into().unwrap_or_default()
}

/// Processor time that the process `pid` has used, all of its threads together. `None` if it cannot
/// be read.
pub fn of_process(pid: u32) -> Option<Duration> {
    let mut clock = 0;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `clock` and `time` are valid for writes during the calls; for a process that does not
    // exist the call fails.
    let read = unsafe {
        libc::clock_getcpuclockid(pid.try_into().ok()?, &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    // The time of a system clock is never negative, and its nanoseconds are below a second.
    read.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Processor time that all processes on this machine have used, in steps of a clock tick (10 ms).
/// `None` if it cannot be read.
pub fn of_host() -> Option<Duration> {
    let ticks = busy_ticks(&fs::read_to_string("/proc/stat").ok()?)?;
    Some(Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second()).ok()?)
}

/// Busy ticks in the first line of /proc/stat: idle and iowait are left out, and guest time is
/// included in user and nice.
fn busy_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line
        .split_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal (proc(5)); stolen time is used by other
    // machines on the host.
    let [user, nice, system, _, _, irq, softirq, ..] = fields[..] else {
        return None;
    };
    Some(user + nice + system + irq + softirq)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_of_processes_and_of_the_machine_is_read() {
        let me = || of_process(std::process::id()).unwrap();
        let (before, host) = (me(), of_host().unwrap());
        let mut sum = 0_u64;
        while me() <= before {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(of_host().unwrap() >= host);
        assert_eq!(of_process(u32::MAX), None);
        let stat = "cpu  10 2 3 400 50 6 7 8 1 1\ncpu0 1\n";
        assert_eq!((busy_ticks(stat), busy_ticks("cpu 1 2")), (Some(28), None));
    }
}
