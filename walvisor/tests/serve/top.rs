//! What FLUSHes cost, and who shares them: `walvisor top`, and `ctl stats`.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use rustix::termios::{LocalModes, tcgetattr};
use serde_json::{Value, json};
use walvisor_testkit::nbd::{FLUSH, RawClient};
use walvisor_testkit::process::Limited;
use walvisor_testkit::{Process, wait_until};
use walvisor_tests::terminal;

use super::{Daemon, WALVISOR, create, ctl, succeed, test_dir, told};

/// A daemon with disks `a` and `b` on one log, whose commits wait for two FLUSHes, and a client of
/// each.
fn two_disks(dir: &Path) -> (Daemon, [RawClient; 2]) {
    for disk in ["a", "b"] {
        create(dir, disk, "1M --log log");
    }
    let wait = "log=log,commit-wait-usec=1000000,commit-wait-count=2";
    let daemon = Daemon::start(
        dir,
        &format!("--control ctl --disk path=a,{wait},socket=s --disk path=b,{wait},socket=t"),
    );
    let clients = ["s", "t"].map(|socket| RawClient::extended(&dir.join(socket)));
    (daemon, clients)
}

/// Both clients write, and flush at the same time.
fn commit(clients: &mut [RawClient; 2]) {
    for client in clients.iter_mut() {
        client.write(1, 0, &[7; 4096]);
        client.request(0, FLUSH, 2, 0, 0);
    }
    for client in clients {
        assert_eq!(client.reply().cookie, 2);
    }
}

/// How the FLUSHes of the first disk have shared syncs.
fn sharing(dir: &Path) -> Value {
    ctl(dir, "stats")["disks"][0]["sync_sharing"].clone()
}

#[test]
fn the_owner_of_a_disk_sees_what_its_flushes_cost_and_who_shares_them() {
    let dir = &test_dir();
    let (daemon, mut clients) = two_disks(dir);
    let none = json!({ "flushes": 0, "syncs": 0.0, "groups": 0, "with": [] });
    assert_eq!(sharing(dir), none);
    // The FLUSHes share a sync, unless one comes more than a second after the other.
    wait_until("a shared sync", || {
        commit(&mut clients);
        sharing(dir)["with"] != json!([])
    });
    let found = sharing(dir);
    assert_eq!(found["with"][0]["disk"], "b");
    let number = |key: &str| found[key].as_f64().unwrap();
    assert!(number("syncs") < number("flushes"), "{found}");
    let stats = told(dir, "stats");
    let lines: Vec<_> = stats
        .lines()
        .filter(|line| line.contains("FLUSH: p50 within "))
        .collect();
    assert_eq!(lines.len(), 2, "{stats}");
    for (line, other) in lines.iter().zip(["b", "a"]) {
        assert!(line.contains(" syncs for each; shared with "), "{line}");
        assert!(line.contains(&format!("; shared with {other} ")), "{line}");
    }
    // An interval without FLUSHes.
    let idle = succeed(dir, "top ctl --once --json --interval 0.1");
    let idle: Value = serde_json::from_str(&idle).unwrap();
    let disk = &idle["disks"][0];
    assert_eq!((&disk["name"], &disk["flushes"]), (&json!("a"), &json!(0)));
    assert_eq!(
        (&disk["flush_p99_us"], &disk["shared_with"]),
        (&Value::Null, &json!([]))
    );
    // One with some.
    let mut top = Process::spawn(
        Command::new(WALVISOR)
            .args(["top", "ctl", "--json", "--interval", "0.1"])
            .current_dir(dir)
            .stdout(Stdio::piped()),
    );
    let mut lines = String::new();
    let mut stdout = Limited(top.stdout.take().unwrap());
    wait_until("an interval with a shared sync", || {
        commit(&mut clients);
        let mut bytes = [0; 4096];
        let count = stdout.read(&mut bytes).unwrap();
        lines += std::str::from_utf8(&bytes[..count]).unwrap();
        lines.contains("\"shared_with\":[{\"disk\":\"b\"")
    });
    top.signal(Signal::TERM);
    assert!(top.wait().unwrap().success());
    let page = succeed(dir, "top ctl --once --interval 0.1");
    let starts = ["nbd ", "log log: ", "DISK ", "a ", "b "];
    assert_eq!(page.lines().count(), starts.len(), "{page}");
    for (line, start) in page.lines().zip(starts) {
        assert!(line.starts_with(start) && line.len() <= 120, "{page}");
    }
    drop(clients);
    assert_eq!(daemon.stop(), "");
}

/// `walvisor top` on a terminal.
struct Watcher {
    person: File,
    program: File,
    before: LocalModes,
    child: Process,
}

impl Watcher {
    /// Starts it, and waits for its first page.
    fn start(dir: &Path) -> Self {
        let (person, program) = terminal();
        let before = tcgetattr(&program).unwrap().local_modes;
        let child = Process::spawn(
            Command::new(WALVISOR)
                .args(["top", "ctl", "--interval", "0.1"])
                .current_dir(dir)
                .stdin(program.try_clone().unwrap())
                .stdout(program.try_clone().unwrap())
                .stderr(Stdio::piped()),
        );
        let mut watcher = Self {
            person,
            program,
            before,
            child,
        };
        watcher.expect("SHARED WITH");
        watcher
    }

    /// Reads from the terminal until it has shown `text`.
    fn expect(&mut self, text: &str) {
        let (mut shown, mut bytes) = (Vec::new(), [0; 1024]);
        while !String::from_utf8_lossy(&shown).contains(text) {
            let count = Limited(&self.person).read(&mut bytes).unwrap();
            shown.extend_from_slice(&bytes[..count]);
        }
    }

    /// Waits for its end with this status, and asserts that the terminal is as it was. Returns its
    /// stderr.
    fn end(mut self, status: i32) -> String {
        // The other screen goes, after the cursor has come back.
        self.expect("\u{1b}[?25h\u{1b}[?1049l");
        assert_eq!(self.child.wait().unwrap().code(), Some(status));
        assert_eq!(tcgetattr(&self.program).unwrap().local_modes, self.before);
        self.child.errors()
    }
}

#[test]
fn top_ends_by_key_signal_or_with_the_daemon_and_restores_the_terminal() {
    let dir = &test_dir();
    let (daemon, clients) = two_disks(dir);
    for key in [b"q", b"\x03"] {
        let mut watcher = Watcher::start(dir);
        let modes = tcgetattr(&watcher.program).unwrap().local_modes;
        assert!(!modes.intersects(LocalModes::ICANON | LocalModes::ECHO));
        // Other keys do nothing.
        watcher.person.write_all(b"x ").unwrap();
        watcher.expect("SHARED WITH");
        watcher.person.write_all(key).unwrap();
        assert_eq!(watcher.end(0), "");
    }
    let watcher = Watcher::start(dir);
    watcher.child.signal(Signal::TERM);
    assert_eq!(watcher.end(0), "");
    let watcher = Watcher::start(dir);
    drop(clients);
    assert_eq!(daemon.stop(), "");
    let told = watcher.end(1);
    assert!(
        told.starts_with("walvisor: control socket 'ctl': "),
        "{told}"
    );
    assert_eq!(told.lines().count(), 1, "{told}");
}
