//! The programs that attack a daemon: they end, and the client beside the attackers has worked all
//! the time. And a daemon of which one thread is stopped.

use std::fs;
use std::path::Path;
use std::process::Command;

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use walvisor_testkit::hostile::{Victim, nbd, vhost_user};
use walvisor_testkit::vhost_user_client::VhostUserClient;
use walvisor_testkit::{Daemon, wait_until};
use walvisor_tests::{binary, serve, succeed};

/// What the daemon may use.
const LIMIT_MIB: u64 = 256;

/// Two disks on one log.
fn create(dir: &Path) {
    for disk in ["a", "b"] {
        let made = format!("disk create {disk} --size 64M --log log");
        let _ = succeed(dir, &made);
    }
}

/// Runs a program for a second for each attack, and checks that the victim has made commits beside
/// each of them.
fn attack(dir: &Path, program: &str, arguments: &[&str], attacks: &[&str]) {
    let mut command = Command::new(program);
    let output = command.args(arguments).arg("1").current_dir(dir).output();
    let output = output.unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let told = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = told.lines().collect();
    assert_eq!(lines.len(), 1 + attacks.len(), "{told}");
    for (line, name) in lines.iter().zip(["alone"].iter().chain(attacks)) {
        let rest = line.strip_prefix(&format!("{name}: "));
        let commits = rest.and_then(|rest| rest.split(' ').next());
        let commits: f64 = commits.unwrap_or_else(|| panic!("{line}")).parse().unwrap();
        assert!(commits > 0.0, "{line}");
    }
}

/// The most MiB of memory that a daemon has had.
fn peak_mib(daemon: &Daemon) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<u64>().unwrap() / 1024
}

#[test]
fn a_disk_works_beside_hostile_front_ends_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir);
    let daemon = serve(
        dir,
        &format!(
            "--memory-limit {LIMIT_MIB}M --disk path=a,log=log,socket=s,queues=4 --disk \
             path=b,log=log,socket=t"
        ),
    );
    let program = env!("CARGO_BIN_EXE_hostile-vhost-user");
    let attacks = vhost_user::ATTACKS.each_ref().map(|attack| attack.name);
    attack(dir, program, &["s", "t"], &attacks);
    assert!(peak_mib(&daemon) <= LIMIT_MIB + LIMIT_MIB / 10);
    // It tells of the attackers that it has disconnected, and it has not failed.
    let errors = daemon.stop();
    assert!(
        errors.contains("disk 'a': a front-end was disconnected"),
        "{errors}"
    );
}

#[test]
fn a_disk_works_beside_hostile_clients_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir);
    let _ = binary();
    let daemon = Daemon::start(
        dir,
        &format!(
            "--memory-limit {LIMIT_MIB}M --disk path=a,log=log,socket=s --disk \
             path=b,log=log,socket=s"
        ),
    );
    let program = env!("CARGO_BIN_EXE_hostile-nbd");
    let attacks = nbd::ATTACKS.each_ref().map(|attack| attack.name);
    attack(dir, program, &["s", "a", "b"], &attacks);
    assert!(peak_mib(&daemon) <= LIMIT_MIB + LIMIT_MIB / 10);
    let _ = daemon.stop();
}

/// The thread of a process with this name.
fn thread(process: u32, name: &str) -> Pid {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let mut threads = threads.map(|thread| thread.unwrap().path());
    let named = |path: &std::path::PathBuf| {
        fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == name)
    };
    let found = threads.find(named).expect("a thread with this name");
    let number = found.file_name().and_then(|name| name.to_str()).unwrap();
    Pid::from_raw(number.parse().unwrap())
}

/// Whether a thread sleeps (proc(5), `stat`).
fn is_asleep(process: u32, thread: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/task/{thread}/stat")).unwrap();
    let state = stat.rsplit(')').next().map(str::trim_start);
    state.is_some_and(|state| state.starts_with('S'))
}

/// As a debugger does it: SIGSTOP would stop the whole process.
#[test]
fn a_stopped_thread_delays_only_what_it_serves() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir);
    let _ = binary();
    let disks =
        "--disk path=a,log=log,door=vhost-user,socket=s --disk path=b,log=log,door=nbd,socket=t";
    let daemon = Daemon::start_as(
        dir,
        Command::new(binary()).arg("serve").args(disks.split(' ')),
        2,
    );
    let mut stopped = VhostUserClient::connect(&dir.join("s"), 1);
    let mut other = nbd::victim(&dir.join("t"), "b").unwrap();
    stopped.commit(0).unwrap();
    let worker = thread(daemon.pid(), "virtio-blk");
    for round in 0..20 {
        other.commit(0).unwrap();
        // It has nothing to do, so it has no lock.
        wait_until("the thread's sleep", || is_asleep(daemon.pid(), worker));
        ptrace::seize(worker, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(worker).unwrap();
        waitpid(worker, Some(WaitPidFlag::__WALL)).unwrap();
        stopped.write(0, 0, 0, &[round; 4096]);
        stopped.kick(0);
        (0..50).for_each(|number| other.commit(number).unwrap());
        assert!(stopped.ended(0).is_empty());
        ptrace::detach(worker, None).unwrap();
        wait_until("what the thread serves", || !stopped.ended(0).is_empty());
        stopped.commit(0).unwrap();
    }
    drop((stopped, other));
    assert_eq!(daemon.stop(), "");
}
