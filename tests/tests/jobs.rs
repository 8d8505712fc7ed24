//! The runner itself: what a job leaves comes back, a boot that hangs is tried once more and then reported, a job that
//! takes too long is ended, and nothing is left running.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use walvisor_guest_images::{Cache, Error, Job, Machine, Outcome, Reporter, Result, obstacle};

/// Runs `script` with no guest in it: any program may stand where `walvisor` does.
fn run(script: &str, seconds: u64) -> Option<Result<Outcome>> {
    if let Some(why) = obstacle() {
        println!("skipped: {why}");
        return None;
    }
    let mut job = Job::new(script, "/bin/true").file("input", "from outside");
    job.limit = Duration::from_secs(seconds);
    Some(job.run(
        &Cache::open(None).expect("the image cache"),
        &Reporter::quiet(None),
    ))
}

/// The processes of this test that a machine runs in.
fn children() -> Vec<PathBuf> {
    let me = std::process::id().to_string();
    let is_child = |process: &Path| {
        std::fs::read_to_string(process.join("stat")).is_ok_and(|stat| {
            // Behind the name, which is in parentheses: state, parent.
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

// One after the other in one test: the children are those of the whole process.
#[test]
fn jobs_end_as_they_should() {
    let script = "cat \"$JOB/input\"; echo; walvisor; echo \"walvisor: $?\"; ls \"$IMAGES\"; \
                  echo result >\"$RESULTS/file\"; test -c /dev/kvm && exit 7";
    let Some(outcome) = run(script, 300) else {
        return;
    };
    let outcome = outcome.expect("a job that works");
    assert_eq!(outcome.status, 7, "{}", outcome.console);
    assert_eq!(outcome.hung_boots, 0);
    assert_eq!(outcome.result("file").expect("a result"), "result\n");
    for line in ["from outside", "walvisor: 0"] {
        assert!(
            outcome.console.lines().any(|have| have == line),
            "{line}: {}",
            outcome.console
        );
    }
    assert!(outcome.result("nothing").is_err());

    // 75 is what a job says when a guest of its hung at boot.
    let hung = run("exit 75", 300)
        .expect("no obstacle")
        .expect_err("a job that hangs");
    assert!(matches!(hung, Error::Hung { attempts: 4, .. }), "{hung}");

    // In emulation a kernel that says that a processor is stuck has hung; on this machine it would be a bug to be seen.
    let words = "rcu: INFO: rcu_preempt self-detected stall on CPU";
    let stuck = run(&format!("echo '{words}'; sleep 60"), 300).expect("no obstacle");
    match Machine::choose().0 {
        Machine::Nested => {
            let hung = stuck.expect_err("a machine that hangs");
            assert!(matches!(hung, Error::Hung { attempts: 4, .. }), "{hung}");
        }
        Machine::Direct => assert_eq!(stuck.expect("a job that works").status, 0),
    }

    let start = Instant::now();
    let late = run("sleep 500", 20)
        .expect("no obstacle")
        .expect_err("a job that takes too long");
    assert!(matches!(late, Error::TimedOut { seconds: 20 }), "{late}");
    assert!(start.elapsed() < Duration::from_secs(300));
    assert_eq!(children(), Vec::<PathBuf>::new());
}
