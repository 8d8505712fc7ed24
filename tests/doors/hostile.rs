//! Attacks on a daemon, and the client beside the attackers, which works all the time. And a daemon
//! of which one thread is stopped.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use walvisor_testkit::hostile::{
    Attack, AttackTarget, Attackers, Commits, Victim, nbd, vhost_user,
};
use walvisor_testkit::process::assert_says;
use walvisor_testkit::vhost_user_client::VhostUserClient;
use walvisor_testkit::{Daemon, test_dir, wait_until};
use walvisor_tests::{binary, serve, succeed};

/// What the daemon may use.
const LIMIT: u64 = 256 << 20;

/// Two disks on one log.
fn create(dir: &Path) {
    for disk in ["a", "b"] {
        let made = format!("disk create {disk} --size 64M --log log");
        let _ = succeed(dir, &made);
    }
}

/// Makes each attack for a second, and the victim's commits beside it.
fn attack(attacks: &'static [Attack], target: &AttackTarget, victim: &mut dyn Victim) {
    for attack in attacks {
        let attackers = Attackers::start(attack, target);
        let commits = Commits::count(victim, Duration::from_secs(1));
        let (count, ended) = (attackers.count(), attackers.end());
        let name = attack.name;
        let commits = commits.unwrap_or_else(|error| panic!("{name}: no server: {error}"));
        println!("{name}: {commits:?}, {ended} disconnected of {count} attackers");
        assert!(count > 0, "{name}");
    }
}

#[test]
fn a_disk_works_beside_hostile_front_ends_of_another() {
    let dir = &test_dir();
    create(dir);
    let daemon = serve(
        dir,
        &format!(
            "--memory-limit {LIMIT} --disk path=a,log=log,socket=s,queues=4 --disk \
             path=b,log=log,socket=t"
        ),
    );
    let mut victim = VhostUserClient::connect(&dir.join("t"), 1);
    let target = AttackTarget::new(&dir.join("s"), "");
    attack(&vhost_user::ATTACKS, &target, &mut victim);
    assert!(daemon.peak_memory() <= LIMIT + LIMIT / 10);
    // It tells of the attackers that it has disconnected, and it has not failed.
    assert_says(&daemon.stop(), &["disk 'a': a front-end was disconnected"]);
}

#[test]
fn a_disk_works_beside_hostile_clients_of_another() {
    let dir = &test_dir();
    create(dir);
    let _ = binary();
    let daemon = Daemon::start(
        dir,
        &format!(
            "--memory-limit {LIMIT} --disk path=a,log=log,socket=s --disk \
             path=b,log=log,socket=s"
        ),
    );
    let socket = dir.join("s");
    let mut victim = nbd::victim(&socket, "b").unwrap();
    attack(&nbd::ATTACKS, &AttackTarget::new(&socket, "a"), &mut victim);
    assert!(daemon.peak_memory() <= LIMIT + LIMIT / 10);
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
    let dir = &test_dir();
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
