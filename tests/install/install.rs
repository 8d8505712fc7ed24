//! `make install`: the installed files work, and `make uninstall` removes all of them. `make deb`:
//! the package and its units work under a systemd that has booted, and purging the package removes
//! all of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use walvisor_guest_images::{UserMode, without_cargo};
use walvisor_testkit::process::assert_says;
use walvisor_tests::{have_all, have_python};

/// Runs `program` and returns its stdout and stderr.
#[track_caller]
fn run(program: &str, arguments: &[&str], dir: &Path) -> String {
    let mut command = Command::new(program);
    // The commands must not see the environment of an outer make or cargo.
    command.env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
    let output = without_cargo(&mut command)
        .args(arguments)
        .current_dir(dir)
        .output()
        .unwrap();
    let told = [output.stdout, output.stderr].concat();
    let told = String::from_utf8_lossy(&told).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}: {told}",
        output.status
    );
    told
}

/// Runs `make install` or `make uninstall` with the prefix /usr below `place`, or `make deb`, which
/// leaves the package there.
#[track_caller]
fn make(target: &str, place: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let destination = format!("DESTDIR={}", place.display());
    let package = format!("DEB={}", place.display());
    let settings = ["PROFILE=dev", "PREFIX=/usr", &destination, &package];
    run("make", &[&["-s", target], &settings[..]].concat(), &root);
}

/// The files below `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found.sort();
    found
}

#[test]
fn what_is_installed_can_be_used_and_goes_again() {
    let programs = [
        ("make", "make"),
        ("groff", "groff-base"),
        ("systemd-analyze", "systemd"),
    ];
    if !have_all(&programs) {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    make("install", place.path());
    let usr = place.path().join("usr");
    let program = usr.join("bin/walvisor");
    let version = run(program.to_str().unwrap(), &["--version"], &usr);
    assert!(version.starts_with("walvisor "), "{version}");

    // Each command has a manual page, and the formatter reports no error in any of them.
    let pages = files(&usr.join("share/man/man1"));
    let names = pages.iter().map(|page| page.file_name().unwrap());
    let names: Vec<_> = names.map(|name| name.to_str().unwrap()).collect();
    for name in [
        "walvisor.1",
        "walvisor-run.1",
        "walvisor-serve-nbd.1",
        "walvisor-disk-create.1",
    ] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    for page in &pages {
        let page = page.to_str().unwrap();
        let complaints = run("groff", &["-man", "-Tutf8", "-ww", "-z", page], &usr);
        assert_eq!(complaints, "", "{page}");
    }
    let shown = run(
        "groff",
        &["-man", "-Tascii", "-P-c", "share/man/man1/walvisor-run.1"],
        &usr,
    );
    assert_says(&shown, &["disk", "kernel"]);

    let page = fs::read_to_string(usr.join("share/man/man1/walvisor-ctl-stats.1")).unwrap();
    let stats = "walvisor ctl <SOCKET> stats";
    let sections = [".SH EXIT STATUS", ".SH EXAMPLES", ".SH SEE ALSO"];
    assert_says(&page, &[&[stats], &sections[..]].concat());

    // The completions that a shell offers after `walvisor serve n`, and so on. bash makes a word of
    // each `=`.
    let part_of_disk = "a.img,rea";
    for (words, count, word, before, offered) in [
        ("walvisor serve n", 2, "n", "serve", "nbd"),
        ("walvisor serve nbd --sec", 3, "--sec", "nbd", "--seccomp"),
        ("walvisor run --disk pa", 3, "pa", "--disk", "path="),
        (
            "walvisor run --disk path = a.img,rea",
            5,
            part_of_disk,
            "=",
            "a.img,readonly=",
        ),
        (
            "walvisor run --disk path = a,transport = p",
            7,
            "p",
            "=",
            "pci",
        ),
    ] {
        let script = format!(
            "source share/bash-completion/completions/walvisor && complete -p walvisor >/dev/null \
             && compopt() {{ :; }} && COMP_WORDS=({words}) && COMP_CWORD={count} && \
             _walvisor_with_disks walvisor {word} {before}; echo \"${{COMPREPLY[@]}}\""
        );
        let told = run("bash", &["-euc", &script], &usr);
        assert_eq!(told.trim(), offered);
    }
    for place in [
        "share/zsh/site-functions/_walvisor",
        "share/fish/vendor_completions.d/walvisor.fish",
    ] {
        let text = fs::read_to_string(usr.join(place)).unwrap();
        assert!(text.contains("seccomp"), "{place}");
    }

    let units = files(&usr.join("lib/systemd/system"));
    assert_eq!(units.len(), 5, "{units:?}");
    for unit in &units {
        let text = fs::read_to_string(unit).unwrap();
        let service = unit.extension().is_some_and(|kind| kind == "service");
        assert_eq!(text.contains("ExecStart=/usr/bin/walvisor "), service);
        // systemd-analyze checks that the program exists, so the unit must name its path in the
        // staging directory.
        let text = text.replace("/usr/bin/walvisor", program.to_str().unwrap());
        fs::write(unit, text).unwrap();
    }
    let units: Vec<_> = units.iter().map(|unit| unit.to_str().unwrap()).collect();
    for unit in units.iter().filter(|unit| unit.ends_with(".service")) {
        // 2.5 of 10.
        let exposed = [
            "security",
            "--offline=yes",
            "--no-pager",
            "--threshold=25",
            unit,
        ];
        run("systemd-analyze", &exposed, &usr);
    }
    let verify = [&["verify", "--man=no"][..], &units].concat();
    run("systemd-analyze", &verify, &usr);

    make("uninstall", place.path());
    let left = files(place.path());
    assert!(left.is_empty(), "{left:?}");
}

/// What systemd and the units do in a guest: see scripts/systemd-job.sh.
const UNITS_WORK: [&str; 35] = [
    "installed: disabled",
    "enabled: enabled enabled",
    "socket started: active inactive",
    "client: all its blocks are there",
    "a client came: active active",
    "it runs as walvisor",
    "restart 1: 0",
    "restart 2: 0",
    "restart 3: 0",
    "client: all its blocks are there",
    "after a kill: active active",
    "stopped: 0 success 0",
    "within TimeoutStopSec",
    "the disk is clean",
    "vhost-user: active",
    "vhost-user stopped: success",
    "pool: active 755 660 users",
    "metrics: a.img",
    "metrics: a.img b.img",
    "metrics: a.img b.img",
    "metrics: b.img",
    "journal: 5 starts",
    "journal: what walvisor prints",
    "client: all its blocks are there",
    "removed: inactive inactive",
    "kept: a.img",
    "kept: b.img",
    "kept: disk.img",
    "kept: disk.img.wal",
    "kept: later.img",
    "kept: later.img.wal",
    "kept: pool.wal",
    "kept: vm.img",
    "kept: vm.img.wal",
    "purged: nothing is left",
];

#[test]
fn the_package_and_its_units_work_in_a_booted_systemd() {
    let programs = [
        ("make", "make"),
        ("linux.uml", "user-mode-linux"),
        ("modprobe", "kmod"),
        ("systemctl", "systemd"),
        ("nbdsh", "python3-libnbd"),
        ("strip", "binutils"),
        ("dpkg-deb", "dpkg"),
    ];
    if !have_all(&programs) || !have_python() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    make("deb", place.path());
    let package = files(place.path()).into_iter();
    let package = package.filter(|path| path.extension().is_some_and(|end| end == "deb"));
    let [package] = &package.collect::<Vec<_>>()[..] else {
        panic!("make deb makes one package");
    };
    let job = place.path().join("job");
    fs::write(&job, include_str!("../scripts/systemd-job.sh")).unwrap();
    let script = format!(
        "PACKAGE={} JOB={}\n{}",
        package.display(),
        job.display(),
        include_str!("../scripts/systemd-root.sh")
    );
    let boot = place.path().join("boot");
    fs::create_dir(&boot).unwrap();
    let mut guest = UserMode::default().boot_here(&boot, &script).unwrap();
    let mut told = Vec::new();
    while let Some(line) = guest.line().unwrap() {
        println!("{line}");
        if let Some(line) = line.strip_prefix("guest: ") {
            if line == "end" {
                break;
            }
            told.push(line.to_owned());
        }
    }
    // Whether user-mode Linux can be powered off is nothing of these units, and sometimes it can't:
    // the drop kills it.
    assert_eq!(told, UNITS_WORK, "{}", guest.console());
}
