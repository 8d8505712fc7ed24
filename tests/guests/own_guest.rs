//! `walvisor-guest-images boot`: a guest of one's own from its root image, on any machine. It is
//! talked to on its console, what it writes is in the image, and SIGTERM ends all that the program
//! has started.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::tcgetattr;
use walvisor_guest_images::{Machine, obstacle, program};
use walvisor_testkit::process::{client, run};
use walvisor_testkit::{Process, TestDir, test_dir};
use walvisor_tests::{binary, have, have_all, have_passt, have_python, succeed, terminal};

const INIT: &str = "#!/bin/sh
/bin/busybox --install -s /bin
echo disks: $(ls /dev/vd*)
printf 'name? '
read name
echo \"hello, $name\" >/greeting
mount -o remount,ro /
poweroff -f
";

/// A directory with `disk.img`, a root file system of busybox and [`INIT`]. `None`: this machine
/// boots no guest from one, or not in such a machine, which was printed.
fn root_image(wanted: Option<Machine>) -> Option<TestDir> {
    if let Some(why) = obstacle() {
        println!("skipped: {why}");
        return None;
    }
    if wanted.is_some_and(|machine| Machine::choose().0 != machine) {
        println!("skipped: only a nested guest has a daemon, and a machine around it");
        return None;
    }
    if !have("busybox", "busybox-static") || !have("debugfs", "e2fsprogs") {
        return None;
    }
    let dir = test_dir();
    for name in ["bin", "dev", "proc", "root", "run", "sbin", "sys"] {
        fs::create_dir_all(dir.join("root").join(name)).unwrap();
    }
    // Debian has a busybox that needs libraries, too: they are copied with it.
    let script = "busybox=$(command -v busybox) && cp \"$busybox\" root/bin/busybox && \
        { ldd \"$busybox\" | grep -o '/[^ ]*' | xargs -r cp -L --parents -t root; }";
    client(&dir, "sh", &["-c", script]);
    symlink("busybox", dir.join("root/bin/sh")).unwrap();
    fs::write(dir.join("root/sbin/init"), INIT).unwrap();
    client(&dir, "chmod", &["755", "root/sbin/init"]);
    let made = ["-q", "-t", "ext4", "-d", "root", "disk.img", "64M"];
    client(&dir, "mke2fs", &made);
    Some(dir)
}

/// Starts the program with these words after `boot`, and this input.
fn boot(dir: &Path, words: &[&str], input: impl Into<Stdio>) -> (Process, ChildStdout) {
    // It takes the walvisor that is beside it.
    let _ = binary();
    let mut command = Command::new(program("walvisor-guest-images", "dev").unwrap());
    command
        .arg("boot")
        .args(words)
        .env_remove("WALVISOR")
        .current_dir(dir)
        .stdin(input)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = Process::spawn(&mut command);
    let output = child.stdout.take().unwrap();
    (child, output)
}

/// A guest that says nothing for longer has hung.
const SILENCE_LIMIT: Timespec = Timespec {
    tv_sec: 180,
    tv_nsec: 0,
};

/// Boots a guest until it says `words`. An emulated machine may crash or hang while it starts (about
/// one in thirty does); then it is started again, which is shown.
fn boot_until(
    dir: &Path,
    words: &[&str],
    input: impl Fn() -> Stdio,
    said: &str,
) -> (Process, ChildStdout, String) {
    for _ in 0..3 {
        let (child, mut output) = boot(dir, words, input());
        match try_read_until(&mut output, said, false) {
            Ok(seen) => return (child, output, seen),
            Err(seen) => println!("started again; the guest ended or hung before {said:?}: {seen}"),
        }
    }
    panic!("{said:?} never came in three boots");
}

/// Reads until `words` come, which may be a part of a line, and returns all that has come; `Err`:
/// it was all, and they have not come. `ready`: whether the guest has said its first line. Before it
/// nothing is said for as long as images are built, and other machines run.
fn try_read_until(
    output: &mut ChildStdout,
    words: &str,
    mut ready: bool,
) -> Result<String, String> {
    let (mut seen, mut bytes) = (String::new(), [0; 4096]);
    while !seen.contains(words) {
        ready |= seen.contains("guest: ready");
        let limit = ready.then_some(&SILENCE_LIMIT);
        if poll(&mut [PollFd::new(output, PollFlags::IN)], limit).unwrap() == 0 {
            return Err(seen + "\nsilence");
        }
        let count = output.read(&mut bytes).unwrap();
        if count == 0 {
            return Err(seen);
        }
        seen += &String::from_utf8_lossy(&bytes[..count]);
    }
    Ok(seen)
}

/// As [`try_read_until`], where the words must come.
#[track_caller]
fn read_until(output: &mut ChildStdout, words: &str) -> String {
    let read = try_read_until(output, words, true);
    read.unwrap_or_else(|seen| panic!("{words:?} never came: {seen}"))
}

#[test]
fn a_root_image_boots_and_keeps_what_is_written() {
    let Some(dir) = &root_image(None) else {
        return;
    };
    client(dir, "truncate", &["-s", "8M", "second.img"]);
    let words = "disk.img --disk path=second.img --metrics run.prom";
    let words: Vec<_> = words.split(' ').collect();
    let (mut child, mut output, said) = boot_until(dir, &words, Stdio::piped, "name? ");
    assert!(said.contains("disks: /dev/vda /dev/vdb"), "{said}");
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"Ada\n").unwrap();
    std::io::copy(&mut output, &mut std::io::stdout()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let metrics = fs::read_to_string(dir.join("run.prom")).unwrap();
    for disk in ["disk.img", "second.img"] {
        assert!(metrics.contains(disk), "{metrics}");
        assert!(succeed(dir, &format!("disk check {disk}")).contains("clean"));
    }
    let greeting = client(dir, "debugfs", &["-R", "cat /greeting", "disk.img"]);
    assert_eq!(greeting, "hello, Ada\n");

    // Without an init there is a shell. SIGTERM to the program ends the guest, and leaves no
    // process and no lock.
    let words = ["disk.img", "--append", "init=/none"];
    let shell = "has no /none: a shell in its place";
    let (mut child, mut output, _) = boot_until(dir, &words, Stdio::piped, shell);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    // The pipe ends with the last process that has it.
    std::io::copy(&mut output, &mut std::io::stdout()).unwrap();
    let status = child.wait().unwrap().code();
    assert_eq!(status, Some(143));
    assert!(succeed(dir, "disk check disk.img").contains("clean"));
}

#[test]
fn a_guest_ends_with_a_line_when_its_disks_daemon_is_killed() {
    let Some(dir) = &root_image(Some(Machine::Nested)) else {
        return;
    };
    let (mut child, mut output, _) = boot_until(dir, &["disk.img"], Stdio::piped, "name? ");
    let daemon = child_of(&child, "walvisor");
    kill_process(daemon, Signal::KILL).unwrap();
    std::io::copy(&mut output, &mut std::io::stdout()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let said = child.errors();
    assert!(said.contains("has ended: the guest is stopped"), "{said}");
}

/// The child of a process with this name, as far as the kernel keeps it.
fn child_of(process: &Process, name: &str) -> Pid {
    let children = format!("/proc/{0}/task/{0}/children", process.id());
    let children = fs::read_to_string(children).unwrap();
    let found = children.split_whitespace().find(|pid| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|found| found.trim() == name)
    });
    Pid::from_raw(
        found
            .unwrap_or_else(|| panic!("no {name}"))
            .parse()
            .unwrap(),
    )
    .unwrap()
}

/// Neither the emulated machine nor the daemon of the disks may keep a user at a dead terminal.
#[test]
fn ctrl_a_x_ends_a_guest_whatever_has_stopped_or_died() {
    const QEMU: &str = "qemu-system-x86";
    let Some(dir) = &root_image(Some(Machine::Nested)) else {
        return;
    };
    for stopped in ["nothing", "machine", "daemon", "both"] {
        let (mut person, program) = terminal();
        let before = tcgetattr(&program).unwrap().local_modes;
        let terminal = || program.try_clone().unwrap().into();
        let (mut child, mut output, _) = boot_until(dir, &["disk.img"], terminal, "name? ");
        assert_ne!(tcgetattr(&program).unwrap().local_modes, before);
        if stopped == "machine" {
            // One that is killed comes back.
            kill_process(child_of(&child, QEMU), Signal::KILL).unwrap();
            read_until(&mut output, "name? ");
        }
        if ["machine", "both"].contains(&stopped) {
            kill_process(child_of(&child, QEMU), Signal::STOP).unwrap();
        }
        if ["daemon", "both"].contains(&stopped) {
            kill_process(child_of(&child, "walvisor"), Signal::STOP).unwrap();
        }
        person.write_all(b"\x01x").unwrap();
        // The pipe ends with the last process that has it.
        std::io::copy(&mut output, &mut std::io::stdout()).unwrap();
        let status = child.wait().unwrap().code();
        let said = child.errors();
        let killed = said.contains("Ctrl-A x: the machine");
        match stopped {
            "nothing" => assert_eq!((status, killed), (Some(0), false), "{said}"),
            "daemon" => assert!(killed == (status == Some(1)), "{status:?}: {said}"),
            _ => assert_eq!((status, killed), (Some(1), true), "{said}"),
        }
        assert_eq!(tcgetattr(&program).unwrap().local_modes, before);
        assert!(succeed(dir, "disk check disk.img").contains("clean"));
    }
}

/// A guest as the README makes it, with a network: what it types there, in a Debian with systemd.
#[test]
fn a_first_guest_installs_a_package_over_its_network() {
    if let Some(why) = obstacle() {
        return println!("skipped: {why}");
    }
    let needs = [
        ("mmdebstrap", "mmdebstrap"),
        ("mke2fs", "e2fsprogs"),
        ("dpkg-deb", "dpkg"),
        ("ip", "iproute2"),
    ];
    if !have_all(&needs) || !have_python() || !have_passt() {
        return;
    }
    let dir = &test_dir();
    let readme = include_str!("../../README.md");
    for command in ["mmdebstrap ", "mke2fs "] {
        let line = readme.lines().find(|line| line.starts_with(command));
        let line = format!("cd '{}' && {}", dir.display(), line.unwrap());
        // Mounts of its own: a busy machine was seen to keep mmdebstrap's /proc mounted.
        run("timeout", &["900", "unshare", "--mount", "sh", "-c", &line]).unwrap();
    }
    // A repository with one package, which this machine serves.
    let build = "mkdir -p www pkg/DEBIAN pkg/usr/bin
        printf 'Package: greeting\nVersion: 1\nArchitecture: all\nMaintainer: A <a@example.com>\nDescription: greets\n' >pkg/DEBIAN/control
        printf '#!/bin/sh\necho the package greets\n' >pkg/usr/bin/greeting
        chmod 755 pkg/usr/bin/greeting
        dpkg-deb --build --root-owner-group pkg www/greeting.deb
        { cat pkg/DEBIAN/control
          printf 'Filename: ./greeting.deb\nSize: %s\nSHA256: %s\n' $(stat -c %s www/greeting.deb) $(sha256sum www/greeting.deb | cut -d' ' -f1)
        } >www/Packages";
    client(dir, "sh", &["-euc", build]);
    let mut served = Command::new("python3");
    served
        .args("-u -m http.server 0 --bind 127.0.0.1 --directory www".split(' '))
        .current_dir(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut server = Process::spawn(&mut served);
    let told = server.first_lines(1).remove(0);
    let port = told
        .split_whitespace()
        .skip_while(|word| *word != "port")
        .nth(1);
    let port: u16 = port.unwrap().parse().unwrap();

    let words = ["disk.img", "--net", "passt,host=on"];
    let (mut child, mut output, _) = boot_until(dir, &words, Stdio::piped, "login: ");
    let mut input = child.stdin.take().unwrap();
    let mut type_it = |words: &str| writeln!(input, "{words}").unwrap();
    type_it("root");
    read_until(&mut output, "# ");
    let typed = "dhclient ";
    assert!(readme.contains(typed));
    type_it(typed.trim_end());
    read_until(&mut output, "# ");
    // The gateway's address is this machine.
    type_it(&format!(
        "echo \"deb [trusted=yes] http://$(ip -4 route show default | cut -d' ' -f3):{port} ./\" \
         >/etc/apt/sources.list"
    ));
    read_until(&mut output, "# ");
    let typed = "apt-get update && apt-get install -y ";
    assert!(readme.contains(typed));
    type_it(&format!("{typed}greeting; greeting"));
    read_until(&mut output, "the package greets");
    type_it("poweroff");
    std::io::copy(&mut output, &mut std::io::stdout()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(succeed(dir, "disk check disk.img").contains("clean"));
    let greeting = client(
        dir,
        "debugfs",
        &["-R", "stat /usr/bin/greeting", "disk.img"],
    );
    assert!(greeting.contains("Type: regular"), "{greeting}");
    server.signal(Signal::TERM);
    let _ = server.wait();
}

/// Before an image is fetched or built for it.
#[test]
fn more_memory_than_there_is_is_refused_at_once() {
    let dir = &test_dir();
    fs::write(dir.join("disk.img"), []).unwrap();
    for (machine, memory, part) in [
        ("nested", "8G", "give at most 3G"),
        ("direct", "2T", "give a multiple of 4K from 1M to 1T"),
    ] {
        let output = Command::new(program("walvisor-guest-images", "dev").unwrap())
            .args(["--cache", "cache", "boot", "disk.img", "--memory", memory])
            .arg("--walvisor")
            .arg(binary())
            .env("WALVISOR_MACHINE", machine)
            .current_dir(dir)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let what = format!("--memory {memory}: ");
        assert!(said.contains(&what) && said.contains(part), "{said}");
        assert_eq!(fs::read_dir(dir.join("cache")).unwrap().count(), 0);
    }
}
