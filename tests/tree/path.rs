//! docs/design.md names every file that a WRITE or a FLUSH passes. Callgrind tells which files a
//! daemon passes: it counts the instructions of each source file, inlined ones included.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::process::Command;

use walvisor_testkit::Daemon;
use walvisor_testkit::vhost_user_client::VhostUserClient;
use walvisor_tests::{binary, have, succeed};

/// Requests of each kind.
const REQUESTS: u64 = 100;
/// A file with fewer instructions need not be named: a few may be a look at a field.
const NOTABLE: u64 = 5 * REQUESTS;

const DESIGN: &str = include_str!("../../docs/design.md");

/// The part of the page under a heading.
fn section(heading: &str) -> &'static str {
    let heading = format!("## {heading}\n");
    let (_, text) = DESIGN.split_once(&heading).expect("the heading");
    text.split_once("\n## ").expect("another heading").0
}

/// The paths between backquotes; braces hold alternatives, as in a shell.
fn named(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let paths = quoted.filter(|path| path.contains('/'));
    let each = |path: &str| match path.split_once('{') {
        None => vec![path.to_owned()],
        Some((before, rest)) => {
            let (names, after) = rest.split_once('}').expect("a closing brace");
            let names = names.split(',');
            names.map(|name| format!("{before}{name}{after}")).collect()
        }
    };
    paths.flat_map(each).collect()
}

/// The instructions in each source file of the product, from a file that Callgrind has written.
fn instructions(profile: &str) -> BTreeMap<String, u64> {
    let mut names = HashMap::new();
    // `(1) name` gives a name a number; later there is only the number.
    let mut name = |text: &str| {
        let (number, name) = text.split_once(')').expect("a number");
        if let Some(name) = name.strip_prefix(' ') {
            names.insert(number.to_owned(), name.to_owned());
        }
        names[number].clone()
    };
    let mut found = BTreeMap::new();
    let (mut file, mut is_call) = (String::new(), false);
    for line in profile.lines() {
        match line.split_once('=') {
            Some(("fl" | "fi" | "fe", text)) => file = name(text),
            // A file of a callee may get its number here.
            Some(("cfi" | "cfl", text)) => drop(name(text)),
            // The next line has the cost of the callee, which has lines of its own.
            Some(("calls", _)) => is_call = true,
            Some(_) => {}
            None if !line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) => {}
            None if is_call => is_call = false,
            None => {
                let count = line.split(' ').nth(1).and_then(|count| count.parse().ok());
                *found.entry(file.clone()).or_default() += count.unwrap_or(0_u64);
            }
        }
    }
    let crates = ["block", "devices", "storage", "vmm", "walvisor"];
    let of_product = |(path, count): (String, u64)| {
        let inside = crates.iter().find_map(|name| {
            let source = format!("{name}/src/");
            let at = path.find(&source)?;
            (at == 0 || path[..at].ends_with('/')).then(|| path[at..].to_owned())
        });
        Some((inside?, count))
    };
    found.into_iter().filter_map(of_product).collect()
}

#[test]
fn counts_are_read_by_file() {
    let profile = "fl=(1) /x/storage/src/a.rs\nfn=(1) f\n3 10\nfi=(2) devices/src/b.rs\n+1 5\ncfi=(3) block/src/c.rs\n\
                   cfn=(2) g\ncalls=7 9\n* 1000\nfe=(1)\n-2 30\nfl=(3)\n5 1\nfl=(4) core/src/d.rs\n1 99\n";
    let counts = [
        ("block/src/c.rs", 1),
        ("devices/src/b.rs", 5),
        ("storage/src/a.rs", 40),
    ];
    assert_eq!(
        instructions(profile),
        BTreeMap::from(counts.map(|(path, count)| (path.to_owned(), count)))
    );
}

/// Tells Callgrind in the process to do something.
fn control(pid: u32, what: &str) {
    let output = Command::new("callgrind_control")
        .args([what, &pid.to_string()])
        .output()
        .expect("callgrind_control starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && !text.contains("Error"),
        "{text}{errors}"
    );
}

/// Whether a file has as many instructions. The compiler attributes code of its own to a crate's
/// root.
fn has(passed: &BTreeMap<String, u64>, path: &str, least: u64) -> bool {
    let count = passed.get(path).filter(|_| !path.ends_with("/lib.rs"));
    count.is_some_and(|count| *count >= least)
}

/// The files that requests pass and the page does not name.
fn unnamed(passed: &BTreeMap<String, u64>, is_named: impl Fn(&str) -> bool) -> Vec<&String> {
    let notable = passed.keys().filter(|path| has(passed, path, NOTABLE));
    notable.filter(|path| !is_named(path)).collect()
}

#[test]
fn the_page_names_every_file_that_a_write_or_a_flush_passes() {
    if !have("valgrind", "valgrind") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    succeed(dir, "disk create disk.img --size 64M");
    let mut command = Command::new("valgrind");
    command
        .args(["-q", "--tool=callgrind", "--callgrind-out-file=profile"])
        .arg(binary());
    // Neither allows what Callgrind does in the process.
    let unconfined = "--seccomp off --landlock off";
    let arguments = format!("--disk path=disk.img,socket=s {unconfined}");
    let daemon = Daemon::start_with(&mut command, dir, "vhost-user", &arguments);
    let mut client = VhostUserClient::connect(&dir.join("s"), 1);
    let mut requests = || {
        for number in 0..REQUESTS {
            let offset = number * 7919 % 1000 * 4096;
            client.write(0, 0, offset, &[7; 4096]);
            client.finish(0, 1);
            client.flush(0, 0);
            client.finish(0, 1);
        }
    };
    let (write, flush) = (
        section("A WRITE, file by file"),
        section("A FLUSH, file by file"),
    );
    let page = [named(write), named(flush)].concat();
    let is_named = |path: &str| {
        let is_one = |name: &String| {
            if name.ends_with('/') {
                path.starts_with(name)
            } else {
                path == name || path.ends_with(&format!("/{name}"))
            }
        };
        page.iter().any(is_one)
    };
    // The first requests start what later ones find.
    requests();
    // The log makes segments meanwhile, which no request does, and a slow machine still does it
    // when the next requests come. So one of several turns may show that they pass no other file.
    let mut passed = BTreeMap::new();
    for turn in 1..=8 {
        control(daemon.pid(), "--zero");
        requests();
        control(daemon.pid(), "--dump");
        let profile = dir.join(format!("profile.{turn}"));
        passed = instructions(&fs::read_to_string(profile).unwrap());
        if unnamed(&passed, is_named).is_empty() {
            break;
        }
    }
    drop(client);
    daemon.stop();
    assert_eq!(unnamed(&passed, is_named), [""; 0], "passed, and not named");

    let rows = write
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains("src/"));
    let rows: Vec<Vec<String>> = rows.map(named).collect();
    assert!(!rows.is_empty(), "{write}");
    // Of a row's files one may be inlined until nothing is left of it.
    let is_passed = |row: &[String]| row.iter().any(|path| has(&passed, path, REQUESTS));
    let idle = rows.iter().filter(|row| !is_passed(row));
    assert_eq!(
        idle.collect::<Vec<_>>(),
        Vec::<&Vec<String>>::new(),
        "named, and not passed"
    );
}
