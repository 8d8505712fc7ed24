//! `walvisor ctl` and a running guest.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use walvisor_testkit::process::{assert_says, create};
use walvisor_testkit::{Process, http};
use walvisor_tests::run_sessions;

use crate::kernel::{self, KernelAction};
use crate::{command, has_kvm, stderr, wait_for};

/// The arguments of a second disk, `r`.
const SECOND_DISK: [&str; 2] = ["--disk", "backend=ram,size=1M,serial=r,transport=pci"];

/// A guest that runs on two vCPUs and a WAL disk `disk.img` of 1 MiB, with a control socket.
/// Dropping it kills it.
pub struct Guest {
    child: Process,
    dir: tempfile::TempDir,
}

impl Guest {
    /// Boots a kernel that does `then`, and waits until it has printed `said`.
    pub fn start(then: KernelAction, said: &str, arguments: &[&str]) -> Self {
        let guest = Self::boot(then, arguments);
        guest.wait_until_it_says(said);
        guest
    }

    fn boot(then: KernelAction, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        kernel::save(dir.path(), "bzImage", &kernel::bzimage(then));
        create(dir.path(), "disk.img", "1M");
        let child = run(dir.path(), arguments);
        Self { child, dir }
    }

    /// Kills the VMM twice at any point, and each time starts another on the files that are
    /// left, without unlocking, repairing or removing any; waits until the guest has printed `said`
    /// once more.
    pub fn kill_and_start_again(&mut self, said: &str) {
        for round in 2..4 {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
            self.child = run(self.dir.path(), &[]);
            self.wait_until_it_says(&said.repeat(round));
        }
    }

    fn wait_until_it_says(&self, said: &str) {
        wait_for(&format!("that the guest says {said}"), || {
            std::fs::read_to_string(self.path("console")).unwrap_or_default() == said
        });
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `walvisor ctl` with `words`. Returns its stdout or its error.
    pub fn ctl(&self, words: &str) -> Result<String, String> {
        let socket = self.path("ctl");
        let words = ["ctl", socket.to_str().unwrap()]
            .into_iter()
            .chain(words.split_whitespace());
        let output = command(words).output().unwrap();
        match output.status.code() {
            Some(0) => Ok(crate::stdout(&output)),
            _ => Err(stderr(&output)),
        }
    }

    fn stats(&self) -> Value {
        serde_json::from_str(&self.ctl("stats --json").unwrap()).unwrap()
    }

    /// Waits until the guest has run since `before`.
    fn wait_for_more_exits(&self, before: &Value) {
        wait_for("another exit", || exits(&self.stats()) != exits(before));
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.path("ctl")).unwrap();
        let patience = Some(Duration::from_secs(120));
        stream.set_read_timeout(patience).unwrap();
        stream
    }

    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal);
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the VMM's end and returns exit status and stderr. Asserts that the disk is closed
    /// and the socket gone.
    pub fn end(mut self) -> (Option<i32>, String) {
        let errors = self.child.errors();
        let status = self.child.wait().unwrap();
        let disk = self.path("disk.img");
        let info = command(["disk", "info", "--json", disk.to_str().unwrap()])
            .output()
            .unwrap();
        let info: Value = serde_json::from_slice(&info.stdout).unwrap();
        assert_eq!(info["log"]["records"], 0, "{info}");
        assert!(!self.path("ctl").exists() && !self.path("m").exists());
        // Drops the warning that machines without VMX or SVM cause.
        let told = errors
            .lines()
            .filter(|line| !line.contains("this KVM has no"));
        (status.code(), told.collect::<Vec<_>>().join("\n"))
    }
}

/// A guest that asks for a reset boots again and again, whichever way it asks. Its disks stay open,
/// the control socket answers, and a signal or a request ends it.
#[test]
fn a_guest_that_resets_boots_again_on_the_same_disks() {
    if !has_kvm() {
        return;
    }
    for (then, ends) in [
        (KernelAction::ResetRegister, "signal"),
        (KernelAction::ResetKeyboard, "shutdown --now"),
    ] {
        let arguments = ["--on-reboot", "restart", "--metrics-listen", "unix:m"];
        let guest = Guest::boot(then, &[&arguments[..], &SECOND_DISK].concat());
        let boots = || {
            let console = std::fs::read_to_string(guest.path("console")).unwrap_or_default();
            assert!(
                console.replace("up", "").trim_start_matches('u').is_empty(),
                "{console}"
            );
            console.matches("up").count()
        };
        wait_for("five boots", || boots() >= 5);
        // A client that comes while the guest is reset may lose its connection.
        wait_for("an answer", || {
            let grown = guest.ctl("resize --disk disk.img --size 2M");
            grown.is_ok_and(|grown| grown.starts_with("disk.img: 2 MiB, before "))
        });
        let before = boots();
        wait_for("three more boots", || boots() >= before + 3);
        wait_for("the metrics of a boot", || {
            let stream = UnixStream::connect(guest.path("m")).unwrap();
            let text = http::get(stream, "/metrics");
            text.is_ok_and(|text| text.contains("walvisor_exits_total{vcpu=\"1\","))
        });
        if ends == "signal" {
            guest.signal(Signal::TERM);
        } else {
            wait_for("the request", || guest.ctl(ends).is_ok());
        }
        let (status, told) = guest.end();
        assert_eq!(status, Some(0), "{told}");
        assert!(
            told.is_empty() || told.contains("the guest ignores the power button"),
            "{told}"
        );
    }
}

/// Starts `walvisor run` in `dir`.
fn run(dir: &Path, arguments: &[&str]) -> Process {
    let words = "run --memory 4M --kernel bzImage --cmdline up --cpus 2 --disk path=disk.img \
                 --console file:console --control ctl";
    let mut command = Command::new(env!("CARGO_BIN_EXE_walvisor"));
    command
        .args(words.split_whitespace())
        .args(arguments)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    Process::spawn(&mut command)
}

/// Exits of all vCPUs.
fn exits(stats: &Value) -> u64 {
    let by_reason = stats["exits"].as_object().unwrap();
    let counts = by_reason
        .values()
        .flat_map(|counts| counts.as_array().unwrap());
    counts.map(|count| count.as_u64().unwrap()).sum()
}

#[test]
fn a_guest_is_looked_at_paused_and_resumed() {
    if !has_kvm() {
        return;
    }
    let guest = Guest::start(KernelAction::Echo, "up", &[]);
    let mode = std::fs::metadata(guest.path("ctl")).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let stats = guest.stats();
    let disk = &stats["disks"][0];
    let told = [&stats["kind"], &stats["state"], &stats["vcpus"]];
    assert_eq!(told, [&json!("run"), &json!("running"), &json!(2)]);
    let told = [&disk["transport"], &disk["size_bytes"]];
    assert_eq!(told, [&json!("mmio"), &json!(1 << 20)]);
    guest.wait_for_more_exits(&stats);

    for _ in 0..3 {
        assert_eq!(guest.ctl("pause").unwrap(), "paused\n");
        let paused = guest.stats();
        assert_eq!(paused["state"], "paused");
        assert_eq!(exits(&guest.stats()), exits(&paused), "nothing runs");
        assert_eq!(guest.ctl("resume").unwrap(), "running\n");
        guest.wait_for_more_exits(&paused);
    }
    // One disk is paused, and the vCPUs go on.
    assert_eq!(
        guest.ctl("pause --disk disk.img").unwrap(),
        "disk.img: paused\n"
    );
    let paused = guest.stats();
    assert_eq!(
        (&paused["state"], &paused["disks"][0]["paused"]),
        (&json!("running"), &json!(true))
    );
    guest.wait_for_more_exits(&paused);
    guest.ctl("resume --disk disk.img").unwrap();
    let text = guest.ctl("stats --prometheus").unwrap();
    let metrics = [
        "walvisor_exits_total{vcpu=\"1\",",
        "walvisor_block_requests_total{",
        "walvisor_start_to_first_instruction_seconds ",
    ];
    assert_says(&text, &metrics);
    assert!(guest.ctl("stats").unwrap().contains("running"));
    guest.ctl("pause").unwrap();
    guest.signal(Signal::TERM);
    assert_eq!(guest.end(), (Some(0), String::new()));
}

/// What the socket changes of a disk is what the guest's device has from then on.
#[test]
fn a_live_disk_grows_is_checkpointed_and_changes_its_cache() {
    if !has_kvm() {
        return;
    }
    let guest = Guest::start(KernelAction::Echo, "up", &SECOND_DISK);
    let copy = guest.path("copy").display().to_string();
    for (words, answer) in [
        (
            "resize --disk disk.img --size 3M",
            "disk.img: 3 MiB, before 1 MiB\n",
        ),
        (
            "cache writethrough --disk disk.img",
            "disk.img: writethrough\n",
        ),
        ("limits --disk disk.img --ops-per-second 100", "disk.img: "),
        ("checkpoint", "disk.img, r: checkpointed\n"),
        (&format!("export --disk disk.img -o {copy}"), &copy),
    ] {
        let answered = guest.ctl(words).unwrap();
        assert!(answered.starts_with(answer), "{words}: {answered}");
    }
    let disk = &guest.stats()["disks"][0];
    let told = [
        &disk["size_bytes"],
        &disk["cache"],
        &disk["limits"]["ops_per_second"],
    ];
    assert_eq!(told, [&json!(3 << 20), &json!("writethrough"), &json!(100)]);
    for file in [guest.path("disk.img"), copy.into()] {
        assert_eq!(std::fs::metadata(file).unwrap().len(), 3 << 20);
    }
    run_sessions("disks", guest.dir.path(), []);
    assert_eq!(guest.ctl("shutdown --now").unwrap(), "shutting down\n");
    assert_eq!(guest.end(), (Some(0), String::new()));
}

#[test]
fn no_control_client_harms_another_or_the_guest() {
    if !has_kvm() {
        return;
    }
    let mut guest = Guest::start(KernelAction::Echo, "up", &[]);
    // A client that has begun a line, one that never reads, and many that leave in the middle.
    let mut half = guest.connect();
    half.write_all(b"{\"execute\": ").unwrap();
    let mut deaf = guest.connect();
    deaf.set_nonblocking(true).unwrap();
    while deaf
        .write(&b"{\"execute\": \"stats\"}\n".repeat(100))
        .is_ok()
    {}
    for _ in 0..100 {
        // The server may turn this client away before it has written, while earlier ones still take
        // up places.
        let _ = guest.connect().write_all(b"{\"execute\": \"stats\"}\n\xff");
    }
    // The places of clients that have left become free one after the other.
    let deadline = Instant::now() + Duration::from_secs(120);
    let (mut stream, mut lines) = loop {
        let mut stream = guest.connect();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let asked = stream.write_all(b"{\"execute\": \"stats\"}\n").is_ok();
        if asked
            && lines
                .next()
                .unwrap()
                .is_ok_and(|line| line.contains("return"))
        {
            break (stream, lines);
        }
        assert!(Instant::now() < deadline, "nobody else is heard");
    };
    let mut ask = |bytes: &[u8]| -> Value {
        stream.write_all(bytes).unwrap();
        serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap()
    };
    assert_eq!(ask(b"\n\r\n{\"execute\": \"stats\", \"id\": 8}\n")["id"], 8);

    // The client sends the rest of its line.
    half.write_all(b"\"pause\"}\n").unwrap();
    let mut answer = String::new();
    BufReader::new(&half).read_line(&mut answer).unwrap();
    assert_eq!(answer, "{\"return\":{\"state\":\"paused\"}}\n");
    // A line without an end has no effect.
    half.write_all(b"{\"execute\": \"shutdown\"}").unwrap();
    half.shutdown(std::net::Shutdown::Write).unwrap();
    answer.clear();
    half.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("is incomplete"), "{answer}");

    // The most clients that may connect, and one more.
    let mut crowd = Vec::new();
    let turned_away = loop {
        let mut one = guest.connect();
        // The server may turn a client away before the client has sent its request.
        let _ = one.write_all(b"{\"execute\": \"resume\"}\n");
        let mut answer = String::new();
        BufReader::new(&one).read_line(&mut answer).unwrap();
        if answer.contains("error") {
            break answer;
        }
        crowd.push(one);
        assert!(crowd.len() < 100);
    };
    assert_says(&turned_away, &["clients are connected"]);
    assert!(guest.is_running());
    drop(crowd);
    drop(deaf);
    wait_for("the shutdown, the crowd being gone,", || {
        guest.ctl("shutdown --now").is_ok()
    });
    assert_eq!(guest.end(), (Some(0), String::new()));
}
