//! The 25 commonest mistakes of a newcomer. Each gets one line that says what is wrong, where, and
//! what to do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use walvisor_testkit::Daemon;
use walvisor_testkit::process::{create, succeed};
use walvisor_tests::run_sessions;

use crate::kernel::{self, KernelAction};
use crate::{stderr, test_dir};

/// Mistakes on a machine where `make` makes the directory /dev: the message, and `make`.
const KVM: [(&str, &str); 2] = [
    (
        "/dev/kvm does not exist: load the driver with `modprobe kvm-intel` or `modprobe kvm-amd`; \
         if that fails, switch on VT-x or AMD-V in the firmware or, inside a virtual machine, \
         nested virtualisation on its host",
        ":",
    ),
    (
        "/dev/kvm: permission denied: join its group with `usermod -aG kvm $USER` and log in \
         again, or run as root",
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
    for name in ["disk", "other", "held", "killed"] {
        create(dir, &format!("{name}.img"), "1M");
    }
    kernel::save(dir, "vmlinuz", &kernel::bzimage(KernelAction::PowerOff));
    fs::write(at("raw.img"), vec![7; 1 << 20]).unwrap();
    succeed(dir, "disk import full.img raw.img");
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
    let told = rustix::system::sysinfo();
    let machine = (told.totalram + told.totalswap) * u64::from(told.mem_unit);
    if machine >= 1000 << 30 {
        return println!("skipped: this machine has the memory that no machine is to have here");
    }
    let dir = tempfile::tempdir().unwrap();
    let held = prepare(dir.path());
    let variables = [
        ("[PROCESS]", format!("in process {} (walvisor)", held.pid())),
        ("[MACHINE]", format!("this machine has {machine} bytes")),
    ];
    run_sessions("mistakes", dir.path(), variables);
}

#[test]
fn a_machine_without_kvm_for_this_user_is_told_what_to_do() {
    let dir = &test_dir();
    kernel::save(dir, "vmlinuz", &kernel::bzimage(KernelAction::PowerOff));
    // Another user must reach the program and the kernel, and could make files.
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_walvisor"), dir.join("walvisor")).unwrap();
    let commands = ["run --kernel vmlinuz --console off", "demo --dir ."];
    let cases = KVM
        .iter()
        .flat_map(|case| commands.map(|words| (case, words)));
    for ((line, make), words) in cases {
        let script = format!(
            "mount -t tmpfs none /dev && {make} && exec setpriv --reuid=65534 --regid=65534 \
             --clear-groups ./walvisor {words}"
        );
        let mut typed = Command::new("unshare");
        typed
            .args(["--mount", "sh", "-c", &script])
            .current_dir(dir);
        let output = typed.output().unwrap();
        let error = stderr(&output);
        if error.starts_with("walvisor: ") {
            assert_eq!(error, format!("walvisor: {line}\n"));
            assert_eq!(output.status.code(), Some(1));
        } else {
            println!("skipped: {make}: {}", error.trim());
        }
    }
    assert_eq!(fs::read_dir(dir).unwrap().count(), 2, "nothing is made");
}
