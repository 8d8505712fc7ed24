//! Tests of the job runner: a job's results come back, an attempt that hangs or crashes is repeated
//! and then reported, but never one that fails by a fault of walvisor, a job that takes too long is
//! killed, the jobs beside all of these are none the worse, and no process is left running.

use std::path::{Path, PathBuf};
use std::time::Duration;

use walvisor_guest_images::{Cache, Error, GuestJob, Machine, Reporter, obstacle};

/// A job that runs `script` without a guest: `walvisor` is replaced by a shell.
fn job(script: &str, seconds: u64, attempts: u32) -> GuestJob {
    // `walvisor run` is `sh run` here, which runs the script `run` in the working directory.
    let mut job = GuestJob::new(script, "/bin/sh").file("input", "from outside");
    job.limit = Duration::from_secs(seconds);
    job.attempts = attempts;
    job
}

/// The ways in which `walvisor run` can end, each as a shell script, with the status that a job
/// makes of it: first nested, then on this machine. Status 75 asks for another attempt.
const ENDS: [(&str, i32, i32); 11] = [
    ("echo guest: job exit 0", 0, 0),
    ("exit 0", 75, 75),
    (
        "echo 'walvisor: vCPU 1: KVM internal error 1'; exit 1",
        75,
        1,
    ),
    (
        "echo 'walvisor: vCPU 0: the processor refused to enter the guest (0x1)'; exit 1",
        75,
        1,
    ),
    ("exec sleep 1000", 75, 124),
    // A fault of walvisor itself does not cause another attempt.
    ("echo 'walvisor: vCPU 0: its thread panicked'; exit 1", 1, 1),
    (
        "echo 'walvisor: vCPU 0: KVM_RUN failed: Bad address'; exit 1",
        1,
        1,
    ),
    (
        "echo 'walvisor: a.img: cannot sync: Input/output error'; exit 1",
        1,
        1,
    ),
    ("kill -SYS $$", 159, 159),
    (
        "echo guest: job exit 0; echo 'walvisor: vCPU 1: KVM internal error 1'; exit 1",
        1,
        1,
    ),
    ("echo guest: job exit 0; exec sleep 1000", 124, 124),
];

/// The child processes of this test, in which a machine runs.
fn children() -> Vec<PathBuf> {
    let me = std::process::id().to_string();
    let is_child = |process: &Path| {
        std::fs::read_to_string(process.join("stat")).is_ok_and(|stat| {
            // The state and the parent follow the name, which is in parentheses.
            stat.rsplit(')')
                .next()
                .and_then(|rest| rest.split_whitespace().nth(1))
                == Some(me.as_str())
        })
    };
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    processes
        .map(|entry| entry.path())
        .filter(|path| is_child(path))
        .collect()
}

// All cases are in one test, one after the other: the check for children covers the whole process.
#[test]
fn jobs_end_as_they_should() {
    if let Some(why) = obstacle() {
        return println!("skipped: {why}");
    }
    let mut script =
        "cat \"$JOB/input\"; echo; walvisor -c 'exit 9'; echo \"walvisor: $?\"; ls \"$IMAGES\"\n"
            .to_owned();
    for (number, (end, ..)) in ENDS.iter().enumerate() {
        script += &format!(
            "cat >run <<'END'\necho guest: ready\n{end}\nEND\n\
             (run_guest end-{number} 5); echo \"end {number}: $?\"\n"
        );
    }
    script += "echo result >\"$RESULTS/file\"; test -c /dev/kvm && exit 7";
    // A job that others share its machine with has its own files, and none of their processes. It is
    // retried if it crashes by itself.
    let other = |script: &str| {
        job(
            &format!("ls; {script}; (sleep 2; echo late) & exit"),
            300,
            4,
        )
    };
    let jobs = [
        other("echo first >\"$RESULTS/file\""),
        job(&script, 300, 4),
        // A job ends with status 75 if its guest hung at boot.
        job("exit 75", 300, 2),
        // In emulation, a kernel that reports a stuck processor has hung, and one that panics has
        // crashed. On this machine either would be a bug to be seen.
        job(
            "echo 'rcu: INFO: rcu_preempt self-detected stall on CPU'; sleep 60; exit 0",
            300,
            1,
        ),
        other("sleep 4; echo after the stall"),
        job(
            "[ $MACHINE = nested ] && echo c >/proc/sysrq-trigger; exit 0",
            300,
            1,
        ),
        job("sleep 500", 20, 4),
        other("echo last >\"$RESULTS/file\""),
    ];
    let (machine, reason) = Machine::choose();
    println!("{reason}");
    let cache = Cache::open(None).expect("the image cache");
    let ends = GuestJob::run_all(&jobs, machine, &cache, &Reporter::quiet(None));
    let ends = ends.expect("machines that boot");
    let [first, all, hung, stalled, beside, crashed, late, last] =
        <[_; 8]>::try_from(ends).expect("an end for each job");

    let outcome = all.expect("a job that works");
    assert_eq!(outcome.status, 7, "{}", outcome.console);
    // The outer machine may have crashed by itself.
    assert!(outcome.hung_boots <= 1, "{}", outcome.hung_boots);
    assert_eq!(outcome.result("file").expect("a result"), "result\n");
    for line in ["from outside", "walvisor: 9"] {
        assert!(
            outcome.console.lines().any(|have| have == line),
            "{line}: {}",
            outcome.console
        );
    }
    assert!(outcome.result("nothing").is_err());
    let nested = Machine::choose().0 == Machine::Nested;
    for (number, (end, in_emulation, here)) in ENDS.into_iter().enumerate() {
        let status = if nested { in_emulation } else { here };
        let line = format!("end {number}: {status}");
        assert!(
            outcome.console.lines().any(|have| have == line),
            "{line} of {end:?}: {}",
            outcome.console
        );
    }

    let hung = hung.expect_err("a job that hangs");
    assert!(matches!(hung, Error::Hung { attempts: 2, .. }), "{hung}");
    for stuck in [stalled, crashed] {
        if nested {
            let hung = stuck.expect_err("a machine that falls over");
            assert!(matches!(hung, Error::Hung { attempts: 1, .. }), "{hung}");
        } else {
            assert_eq!(stuck.expect("a job that works").status, 0);
        }
    }
    let late = late.expect_err("a job that takes too long");
    assert!(matches!(late, Error::TimedOut { seconds: 20 }), "{late}");

    for (outcome, file) in [
        (first, Some("first\n")),
        (beside, None),
        (last, Some("last\n")),
    ] {
        let outcome = outcome.expect("a job that works");
        assert_eq!(outcome.status, 0, "{}", outcome.console);
        assert_eq!(outcome.result("file").ok().as_deref(), file);
        for line in ["late", "from outside", "file"] {
            // On this machine a job ends when nobody has its output.
            assert!(
                !nested || outcome.console.lines().all(|have| have != line),
                "{line}: {}",
                outcome.console
            );
        }
    }
    assert_eq!(children(), Vec::<PathBuf>::new());
}
