//! What a start after a kill shows: a bar on a terminal, nothing in a pipe unless it is asked for.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use super::raw_client::RawClient;
use super::{Daemon, WALVISOR, create, has, noise};

/// Leaves a log of more than one segment behind, as after a loss of power.
fn killed_with_a_full_log(dir: &Path) {
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    let data = noise(4 << 20);
    for piece in 0..20 {
        client.write(piece, piece * data.len() as u64, &data);
    }
    client.flush(99);
    daemon.kill();
}

#[test]
fn recovery_is_shown_on_a_terminal_alone() {
    if !has("script", "bsdutils") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "128M");
    killed_with_a_full_log(dir);
    let line = format!("echo $$ >pid; exec {WALVISOR} serve nbd --disk path=disk.img,socket=s");
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).current_dir(dir);
    // Of no terminal whose kind is unknown can a line be drawn anew.
    script.env("TERM", "xterm");
    let mut script = script
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut shown = Vec::new();
    let mut out = script.stdout.take().unwrap();
    let holds = |shown: &[u8], text: &str| String::from_utf8_lossy(shown).contains(text);
    while !holds(&shown, "serving disk.img") {
        let mut bytes = [0; 4096];
        let read = out.read(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&shown);
        assert!(read > 0, "it ended: {text}");
        shown.extend(&bytes[..read]);
    }
    let pid = fs::read_to_string(dir.join("pid")).unwrap();
    let killed = Command::new("kill").arg(pid.trim()).status().unwrap();
    assert!(killed.success());
    assert!(script.wait().unwrap().success());
    let text = String::from_utf8_lossy(&shown);
    assert!(
        text.contains("recovering") && text.contains("128.00 MiB"),
        "{text}"
    );
    // Closed: there is nothing to recover.
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    assert_eq!(daemon.stop(), "");

    killed_with_a_full_log(dir);
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    assert_eq!(daemon.stop(), "");
    killed_with_a_full_log(dir);
    let mut command = Command::new(WALVISOR);
    let arguments = ["serve", "nbd", "--disk", "path=disk.img,socket=s"];
    command
        .args(arguments)
        .current_dir(dir)
        .env("RUST_LOG", "info");
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let daemon = Daemon::attach(dir, command.spawn().unwrap(), 1);
    let errors = daemon.stop();
    assert_eq!(errors.matches("recovered from").count(), 1, "{errors}");
    assert!(!errors.contains("recovering"), "{errors}");
}
