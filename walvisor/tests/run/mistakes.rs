//! The 25 commonest mistakes of a newcomer. Each gets one line that says what is wrong, where, and
//! what to do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use walvisor_testkit::Daemon;

use crate::kernel::{self, KernelAction};
use crate::{command, stderr, walvisor};

/// A mistake: its name, what is typed after `walvisor`, the exit status, and the line without
/// `walvisor: `. {DIR} stands for the working directory, {PID} for the process that has held.img,
/// {MACHINE} for the machine's memory and swap, {...} for any words.
type Mistake = (&'static str, &'static str, i32, &'static str);

const MISTAKES: [Mistake; 23] = [
    (
        "an image that does not exist",
        "disk info missing.img",
        1,
        "missing.img: can't open the disk: No such file or directory (os error 2); name a raw \
         image that exists, or make a disk: 'walvisor disk create missing.img --size 1G'",
    ),
    (
        "a place that does not exist",
        "disk create no/new.img --size 1M",
        1,
        "no/new.img: can't write: No such file or directory (os error 2); make its directory: \
         mkdir -p no",
    ),
    (
        "a disk that exists",
        "disk create disk.img --size 1M",
        1,
        "disk.img: exists already, as a disk of the log in disk.img.wal; use it, or choose another name",
    ),
    (
        "a size that is none",
        "disk create new.img --size 10X",
        2,
        "invalid value '10X' for '--size <SIZE>': '10X' is not a size: give a number of bytes, or \
         one with K, M, G, T, P or E, such as 512M, 1.5G, 4GiB or 10GB; see 'walvisor disk create \
         --help'",
    ),
    (
        "a size that is no number of sectors",
        "disk import new.img odd.img",
        1,
        "odd.img: the size of 1000 bytes is not a multiple of 512; round it up with 'truncate -s \
         %512 odd.img', which keeps all bytes",
    ),
    (
        "an image of another format",
        "disk import new.img vm.qcow2",
        1,
        "vm.qcow2: starts like a qcow2 image, and disks are raw images; convert it with 'qemu-img \
         convert -O raw vm.qcow2 NEW', or, if these are the first bytes of the disk itself, say \
         so: format=raw with --disk, --format raw with 'disk import'",
    ),
    (
        "source and target swapped",
        "disk import raw.img new.img",
        1,
        "raw.img: exists already, and new.img does not: the new disk comes first, then the image \
         to copy; are they swapped? Then say 'walvisor disk import new.img raw.img'",
    ),
    (
        "an export over a file",
        "disk export disk.img raw.img",
        1,
        "raw.img: exists already; name another file, or replace it with --force",
    ),
    (
        "an export of a disk in use",
        "disk export held.img copy.img",
        1,
        "held.img.wal/control: already open elsewhere, in process {PID} (walvisor); end that \
         process first",
    ),
    (
        "a resize that loses data",
        "disk resize full.img --size 512K",
        1,
        "full.img: holds data after byte 524288, which shrinking from 1048576 bytes would lose; \
         shrink the file system first, or discard the data with --shrink",
    ),
    (
        "the log of another disk",
        "disk info disk.img --log other.img.wal",
        1,
        "disk.img: the disk is on the log in {DIR}/disk.img.wal, not in other.img.wal; name that log \
         ('log={DIR}/disk.img.wal' in a --disk, '--log {DIR}/disk.img.wal' for a command), or take \
         the disk out of it with: walvisor disk leave disk.img --log {DIR}/disk.img.wal",
    ),
    (
        "a log that was left elsewhere",
        "disk info killed.img",
        1,
        "killed.img: disk {...} was not closed, and its log is not at killed.img.wal (it was at \
         {DIR}/killed.img.wal); name the log with log=DIR, or discard what it holds with: walvisor disk discard killed.img",
    ),
    (
        "a log that is an image",
        "log dump disk.img",
        1,
        "disk.img: this is not a log (it has no control file); name a log directory, such as \
         disk.img.wal",
    ),
    (
        "a disk that is served already",
        "serve nbd --disk path=held.img,socket=s",
        1,
        "held.img.wal/control: already open elsewhere; end the process that has it open first \
         ('fuser -v held.img.wal/control' names it)",
    ),
    (
        "a socket of another daemon",
        "serve nbd --disk path=disk.img,socket=held.sock",
        1,
        "socket '{DIR}/held.sock': a server listens there: stop it, or name another path",
    ),
    (
        "no socket",
        "serve nbd --disk path=disk.img",
        2,
        "disk 'disk.img' has no address to be served at: give socket=PATH, or port=N (10809 is \
         usual)",
    ),
    (
        "a path without path=",
        "serve nbd --disk disk.img,socket=s",
        2,
        "invalid value 'disk.img,socket=s' for '--disk <SPEC>': 'disk.img' has no '=': write \
         path=FILE[,key=value ...], with a comma in FILE doubled ('--disk help' lists the keys); \
         see 'walvisor serve nbd --help'",
    ),
    (
        "a mistyped key",
        "serve nbd --disk path=disk.img,sokcet=s",
        2,
        "invalid value 'path=disk.img,sokcet=s' for '--disk <SPEC>': unknown key 'sokcet': did you \
         mean 'socket'? 'walvisor serve nbd' takes {...} ('--disk help' explains them); see \
         'walvisor serve nbd --help'",
    ),
    (
        "no certificates",
        "serve nbd --tls require --tls-certificates . --disk path=disk.img,port=10809",
        1,
        "--tls-certificates: ./server-cert.pem: No such file or directory (os error 2): the \
         directory needs server-cert.pem and server-key.pem, and ca-cert.pem to verify clients",
    ),
    (
        "a kernel that is none",
        "run --kernel raw.img --disk path=disk.img",
        1,
        "kernel 'raw.img' is neither a bzImage nor an ELF vmlinux: give one of the two, \
         uncompressed",
    ),
    (
        "more memory than there is",
        "run --kernel vmlinuz --memory 1000G --disk path=disk.img",
        2,
        "--memory 1073741824000: this machine has {MACHINE} bytes of memory and swap: give less, \
         or give --overcommit if the guest will not use all of it",
    ),
    (
        "a process that does not run",
        "ctl ctl.sock stats",
        1,
        "control socket 'ctl.sock': No such file or directory (os error 2): is 'walvisor run' or \
         'walvisor serve' running with --control ctl.sock?",
    ),
    (
        "a socket that is not for control",
        "ctl held.sock stats",
        1,
        "control socket 'held.sock': what answers there is no control socket ({...}): name the one \
         that was given to walvisor with --control",
    ),
];

/// The same, where the directory /dev has what `make` puts there.
const KVM: [(Mistake, &str); 2] = [
    (
        (
            "a machine without KVM",
            "run --kernel vmlinuz --console off",
            1,
            "/dev/kvm does not exist: load the driver with `modprobe kvm-intel` or `modprobe \
             kvm-amd`; if that fails, switch on VT-x or AMD-V in the firmware or, inside a virtual \
             machine, nested virtualisation on its host",
        ),
        ":",
    ),
    (
        (
            "a user without the right to KVM",
            "run --kernel vmlinuz --console off",
            1,
            "/dev/kvm: permission denied: join its group with `usermod -aG kvm $USER` and log in \
             again, or run as root",
        ),
        "mknod -m 600 /dev/kvm c 10 232",
    ),
];

/// Serves one disk.
fn serve(dir: &Path, name: &str) -> Daemon {
    Daemon::start(dir, &format!("--disk path={name}.img,socket={name}.sock"))
}

/// Makes the files that the mistakes are made with; returns the process that has held.img.
fn prepare(dir: &Path) -> Daemon {
    let at = |name: &str| dir.join(name);
    let path = |name: &str| at(name).into_os_string();
    for name in ["disk", "other", "held", "killed"] {
        let made = walvisor("disk create --size 1M", &[&path(&format!("{name}.img"))]);
        assert!(made.status.success(), "{}", stderr(&made));
    }
    kernel::save(dir, "vmlinuz", &kernel::bzimage(KernelAction::PowerOff));
    fs::write(at("raw.img"), vec![7; 1 << 20]).unwrap();
    let made = walvisor("disk import", &[&path("full.img"), &path("raw.img")]);
    assert!(made.status.success(), "{}", stderr(&made));
    fs::write(at("odd.img"), [7; 1000]).unwrap();
    fs::write(
        at("vm.qcow2"),
        [&b"QFI\xfb\0\0\0\x03"[..], &[0; 65528]].concat(),
    )
    .unwrap();
    drop(serve(dir, "killed"));
    fs::rename(at("killed.img.wal"), at("away.wal")).unwrap();
    serve(dir, "held")
}

#[test]
fn common_mistakes_are_one_line_with_the_cure() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let held = prepare(dir);
    let told = rustix::system::sysinfo();
    let machine = (told.totalram + told.totalswap) * u64::from(told.mem_unit);
    if machine >= 1000 << 30 {
        return println!("skipped: this machine has the memory that no machine is to have here");
    }
    let (mut wrong, mut shown) = (Vec::new(), 0);
    let mut check = |mistake: &Mistake, output: std::process::Output| {
        let (name, typed, status, line) = mistake;
        let line = line
            .replace("{DIR}", &dir.display().to_string())
            .replace("{PID}", &held.pid().to_string())
            .replace("{MACHINE}", &machine.to_string());
        let error = stderr(&output);
        let line = format!("walvisor: {line}\n");
        let (begin, end) = line.split_once("{...}").unwrap_or((&line, ""));
        let fits = error.starts_with(begin) && error.ends_with(end) && error.lines().count() == 1;
        if output.status.code() != Some(*status) || !fits || end.is_empty() && error != line {
            wrong.push(format!(
                "{name}: walvisor {typed}: {:?}\n{error}",
                output.status.code()
            ));
        }
        shown += 1;
    };
    for mistake in &MISTAKES {
        let mut typed = command(mistake.1.split(' '));
        check(mistake, typed.current_dir(dir).output().unwrap());
    }
    // Another user must reach the program and the kernel.
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_walvisor"), dir.join("walvisor")).unwrap();
    for (mistake, make) in &KVM {
        let script = format!(
            "mount -t tmpfs none /dev && {make} && exec setpriv --reuid=65534 --regid=65534 \
             --clear-groups ./walvisor {}",
            mistake.1
        );
        let mut typed = Command::new("unshare");
        typed
            .args(["--mount", "sh", "-c", &script])
            .current_dir(dir);
        let output = typed.output().unwrap();
        if stderr(&output).starts_with("walvisor: ") {
            check(mistake, output);
        } else {
            println!("skipped: {}: {}", mistake.0, stderr(&output).trim());
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {shown}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
