//! What `walvisor run` keeps of root: no capability, and with `--user` not even the user.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Signal, geteuid};
use walvisor_testkit::process::create;
use walvisor_testkit::{Process, give, wait_until};

use crate::kernel::{self, KernelAction};
use crate::{command, has_kvm, stderr, test_dir};

/// The user that the tests take; it need not have a name.
const USER: u32 = 54321;

const RUN: &str = "run --memory 4M --kernel bzImage --cmdline up --disk path=a.img,queues=2 \
                   --console file:console --control c --metrics-listen unix:m";

/// Makes a kernel that prints "up" and goes on, and a disk.
fn prepare(dir: &Path) {
    kernel::save(dir, "bzImage", &kernel::bzimage(KernelAction::Echo));
    create(dir, "a.img", "1M");
}

/// Boots a guest, and waits until it runs.
fn start(dir: &Path, arguments: &str) -> Process {
    let words = RUN.split_whitespace().chain(arguments.split_whitespace());
    let mut command = Command::new(env!("CARGO_BIN_EXE_walvisor"));
    command.args(words).current_dir(dir);
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut guest = Process::spawn(&mut command);
    wait_until("a guest that is up", || {
        let ended = guest.try_wait().unwrap();
        assert!(ended.is_none(), "{ended:?}: {}", guest.errors());
        fs::read_to_string(dir.join("console")).is_ok_and(|text| text == "up")
    });
    guest
}

/// Ends a guest, and asserts that it closed its disk and left no socket.
fn end(dir: &Path, mut guest: Process) {
    let grown = command(["ctl", "c", "resize", "--disk", "a.img", "--size", "2M"]);
    let grown = { grown }.current_dir(dir).output().unwrap();
    assert!(grown.status.success(), "{}", stderr(&grown));
    guest.signal(Signal::TERM);
    guest.signal(Signal::TERM);
    assert!(guest.wait().unwrap().success(), "{}", guest.errors());
    assert!(!dir.join("c").exists() && !dir.join("m").exists());
    assert_eq!(fs::metadata(dir.join("a.img")).unwrap().len(), 2 << 20);
}

#[test]
fn a_run_keeps_no_capability_and_becomes_the_user_asked_for() {
    if !has_kvm() || !geteuid().is_root() {
        println!("only root becomes another user");
        return;
    }
    let dir = &test_dir();
    prepare(dir);
    let user = format!("--user {USER}");
    let refused = command(RUN.split_whitespace().chain(user.split(' ')));
    let refused = { refused }.current_dir(dir).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let told = stderr(&refused);
    let cure = "have to belong to it: chown -R 54321 them";
    assert!(told.contains(cure), "{told}");
    for (arguments, user) in [("", 0), (user.as_str(), USER)] {
        give(dir, user);
        let _ = fs::remove_file(dir.join("console"));
        let guest = start(dir, arguments);
        guest.assert_capabilities(0);
        let all = [(); 4].map(|()| user.to_string()).join("\t");
        let ids = guest.thread_status("Uid:");
        assert!(ids.iter().all(|ids| *ids == all), "{ids:?}");
        end(dir, guest);
    }
}
