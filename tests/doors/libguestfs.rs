//! libguestfs on looks at a disk: files of a guest come out of the past as `docs/restoring.md` types
//! it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use walvisor_testkit::process::{client, text};
use walvisor_testkit::{Daemon, test_dir, wait_until};
use walvisor_tests::{binary, have, have_all, succeed};

const PAGE: &str = include_str!("../../docs/restoring.md");

/// What the page's section types.
fn typed_lines() -> Vec<&'static str> {
    let (_, section) = PAGE.split_once("\n## Files of a guest\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let lines = section.lines();
    lines.filter_map(|line| line.strip_prefix("$ ")).collect()
}

/// Whether libguestfs finds a kernel with its modules. One is installed if there is none, as in a
/// container.
fn have_kernel() -> bool {
    let mut files = fs::read_dir("/boot").into_iter().flatten().flatten();
    let found = files.any(|file| {
        let name = file.file_name().into_string().unwrap_or_default();
        let version = name.strip_prefix("vmlinuz-");
        version.is_some_and(|version| Path::new("/lib/modules").join(version).is_dir())
    });
    found || have("kernel in /boot", "linux-image-cloud-amd64")
}

/// Types a line in a shell. No limit but the test's ends it: how long an emulated machine takes
/// depends on this one.
#[track_caller]
fn typed(dir: &Path, line: &str) {
    let mut paths = binary().parent().unwrap().as_os_str().to_owned();
    paths.push(":");
    paths.push(std::env::var_os("PATH").unwrap_or_default());
    let mut shell = Command::new("sh");
    shell
        .args(["-ec", line])
        .current_dir(dir)
        .env("PATH", paths)
        .env("LIBGUESTFS_BACKEND", "direct")
        .env("LIBGUESTFS_BACKEND_SETTINGS", "force_tcg");
    let output = shell.output().unwrap();
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{line}\n{out}{errors}");
}

#[test]
fn files_of_a_guest_come_back_as_of_each_point() {
    let needs = [("guestfish", "guestfish"), ("mkfs.ext4", "e2fsprogs")];
    if !have_all(&needs) || !have_kernel() {
        return;
    }
    let dir = &test_dir();
    // What libguestfs takes for an installed system.
    for (path, contents) in [
        ("etc/fstab", "/dev/sda / ext4 defaults 0 1\n"),
        ("etc/debian_version", "12.0\n"),
        ("bin/sh", ""),
        ("var/lib/app/rows", "old"),
    ] {
        let path = dir.join("tree").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }
    let make = "-q -F -O fast_commit -d tree raw 32M";
    client(dir, "mkfs.ext4", &make.split(' ').collect::<Vec<_>>());
    succeed(dir, "disk import vm.img raw");
    let disk = "--control ctl.sock --disk path=vm.img,socket=s,retain=all";
    let daemon = Daemon::start(dir, disk);
    succeed(dir, "ctl ctl.sock snapshot monday");
    // A kernel changes the file. Its file system is mounted on Tuesday.
    let place = dir.display();
    typed(
        dir,
        &format!(
            "guestfish --format=raw -a 'nbd:///vm.img?socket={place}/s' -m /dev/sda <<'END'\n\
             write /var/lib/app/rows new\nsync\n!walvisor ctl ctl.sock snapshot tuesday\nEND"
        ),
    );

    let [look, guestfish, unlook] = typed_lines()[..] else {
        panic!("other commands: {:?}", typed_lines());
    };
    let guestfish = guestfish.replace("/srv/", &format!("{place}/"));
    let rows = dir.join("app/rows");
    for line in [look, &guestfish, unlook] {
        typed(dir, line);
    }
    assert_eq!(fs::read_to_string(&rows).unwrap(), "old");
    fs::remove_file(&rows).unwrap();
    daemon.stop();

    succeed(
        dir,
        "disk restore vm.img --at snapshot:tuesday -o tuesday.raw",
    );
    let features = client(dir, "dumpe2fs", &["-h", "tuesday.raw"]);
    assert!(features.contains("needs_recovery"), "{features}");
    // The disk is closed now, so the command itself serves the look, until it is ended.
    let look = look.replace(":monday", ":tuesday");
    let mut command = Command::new(binary());
    command.args(look.strip_prefix("walvisor ").unwrap().split(' '));
    command.current_dir(dir).stdout(Stdio::piped());
    let mut served = command.spawn().unwrap();
    let mut line = String::new();
    let mut lines = BufReader::new(served.stdout.take().unwrap());
    lines.read_line(&mut line).unwrap();
    assert!(
        line.starts_with("serving vm.img as of snapshot:tuesday: "),
        "{line}"
    );
    typed(dir, &guestfish.replace(" -i ", " -m /dev/sda "));
    assert_eq!(fs::read_to_string(&rows).unwrap(), "new");
    served.kill().unwrap();
    served.wait().unwrap();
    wait_until("the end of the look", || !dir.join("look.sock").exists());
}
