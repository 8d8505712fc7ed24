//! The folders of a crate are layers, and so are the files beside them: each imports only its own
//! layer or lower ones, and no two folders import each other, directly or in a circle, re-exports
//! of the crate's root included. Inside a folder files may know each other. The test reads the
//! `use` lines and paths of the sources, without their tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Modules of `block`, a line for each layer from the ground up. A folder is a layer.
const BLOCK: &str = "
    buffer descriptor schedule stall
    condition memory request
    backend
    blocking ram threaded
";

/// Modules of `storage`. The last drives all layers for the fuzz targets.
const STORAGE: &str = "
    error format mutant tracepoints parallel size sync
    medium
    index
    catalog
    log
    recovery
    checkpoint
    view
    keeper
    disk
    store
    copy
    raw
    fuzzing
";

/// Modules of `devices`.
const DEVICES: &str = "
    event_loop memory
    listen
    control latency look_up throttle
    metrics reactor
    interrupt
    status
    virtio
    block net scsi
    virtio_scsi
    nbd tcmu transport ublk vhost_user
";

/// Modules of `archive`.
const ARCHIVE: &str = "
    error layout
    object url
    remote
    base epoch
    lineage
    uploader
    expire
    restore survey
    follow fetch
";

/// Modules of `vmm`.
const VMM: &str = "
    arch bus disk readiness seccomp
    control probe
    devices pci
    vm
";

/// Modules of `walvisor`.
const WALVISOR: &str = "
    child descriptors disk disk_spec machine_memory metrics_server net_spec network \
    point privileges processor_time progress repeats size table
    landlock lio
    archiving
    plan
    demo disks metrics
    memory_limit
    control_socket
    commands
    cli
    main
";

/// Modules of `benches`, which measures the product and is not part of it.
const BENCHES: &str = "
    blocks programs report session tiny_guest
    console daemon load bench_dirs
    guests output volume
    bench
    exits serve
    linux store
    archive commit database fsync neighbours notify peers start sustained tcmu
    drbd
    cli
    main
";

/// The modules by their path, such as `log::group`, with their text but without tests and comments.
fn modules(src: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![src.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(src).unwrap().with_extension("");
            let name = name.to_str().unwrap().replace('/', "::");
            let name = name.trim_end_matches("::mod").to_owned();
            let text = fs::read_to_string(&path).unwrap();
            let product = product(&text);
            let lines = product
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"));
            found.insert(name, lines.collect::<Vec<_>>().join("\n"));
        }
    }
    // A module whose file is elsewhere counts as one without imports.
    let mut elsewhere = Vec::new();
    for (name, text) in &found {
        for child in text.split("#[path = ").skip(1) {
            let child = child.split(';').next().unwrap().rsplit(' ').next();
            elsewhere.push(format!("{name}::{}", child.unwrap()));
        }
    }
    found.extend(elsewhere.into_iter().map(|name| (name, String::new())));
    found
}

/// A file without the items that only tests have.
fn product(text: &str) -> String {
    let is_test =
        |line: &str| line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test");
    let (mut lines, mut kept) = (text.lines(), String::new());
    while let Some(line) = lines.next() {
        if !is_test(line) {
            kept.push_str(line);
            kept.push('\n');
            continue;
        }
        let mut item = lines.by_ref().skip_while(|line| line.starts_with("#["));
        let first = item.next().unwrap_or("}");
        let ends = |line: &str| line == "}" || !line.starts_with(' ') && line.ends_with(';');
        if !ends(first) && !first.ends_with('}') {
            item.by_ref().take_while(|line| !ends(line)).for_each(drop);
        }
    }
    kept
}

/// The paths of a `use` tree, or of a path in an expression, that begins at `text`.
fn tree(text: &mut &str, before: &[String], found: &mut Vec<Vec<String>>) {
    let mut path = before.to_vec();
    loop {
        *text = text.trim_start();
        if let Some(rest) = text.strip_prefix('{') {
            *text = rest;
            loop {
                tree(text, &path, found);
                *text = text.trim_start();
                let Some(rest) = text.strip_prefix(',') else {
                    break;
                };
                *text = rest;
            }
            *text = text.strip_prefix('}').unwrap_or(text);
            return;
        }
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
        let (name, rest) = text.split_at(end.unwrap_or(text.len()));
        path.push(name.to_owned());
        *text = rest;
        let Some(rest) = text.strip_prefix("::") else {
            break;
        };
        *text = rest;
    }
    *text = text.find([',', '}', ';']).map_or(*text, |end| {
        let renamed = text.trim_start().starts_with("as ");
        if renamed { &text[end..] } else { *text }
    });
    found.push(path);
}

/// All paths of a module's text to modules of its own crate, from the crate's root.
fn paths(module: &str, text: &str) -> Vec<Vec<String>> {
    let here: Vec<String> = module.split("::").map(str::to_owned).collect();
    let mut starts = vec![
        ("crate::".to_owned(), Vec::new()),
        ("super::".to_owned(), here[..here.len() - 1].to_vec()),
        ("self::".to_owned(), here.clone()),
    ];
    // A module names its child modules without a prefix.
    for line in text.lines().filter_map(|line| line.strip_suffix(';')) {
        if let Some((_, child)) = line.split_once("mod ") {
            starts.push((
                format!("{child}::"),
                [&here[..], &[child.to_owned()]].concat(),
            ));
        }
    }
    let mut found = Vec::new();
    for (start, base) in starts {
        for (at, _) in text.match_indices(&start) {
            let before = text[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || "_:$".contains(c)) {
                continue;
            }
            tree(&mut &text[at + start.len()..], &base, &mut found);
        }
    }
    found
}

/// Which modules each module imports.
fn imports(modules: &BTreeMap<String, String>) -> BTreeMap<&str, BTreeSet<&str>> {
    let module_of = |path: &[String]| {
        let mut known = (1..=path.len())
            .rev()
            .map(|end| path[..end].join("::"))
            .filter_map(|name| modules.get_key_value(&name));
        known.next().map(|(name, _)| name.as_str())
    };
    // A name that the root re-exports belongs to the module that defines it.
    let root = modules.get("lib").map_or("", String::as_str);
    let mut handed_on = BTreeMap::new();
    for start in ["pub use ", "pub(crate) use "] {
        for (at, _) in root.match_indices(start) {
            let mut found = Vec::new();
            tree(&mut &root[at + start.len()..], &[], &mut found);
            for path in found {
                handed_on.insert(path.last().unwrap().clone(), module_of(&path));
            }
        }
    }
    let mut all = BTreeMap::new();
    for (name, text) in modules.iter().filter(|(name, _)| *name != "lib") {
        let mut imported = BTreeSet::new();
        for path in paths(name, text) {
            let found = handed_on.get(&path[0]).copied().flatten();
            imported.extend(module_of(&path).or(found));
        }
        imported.remove(name.as_str());
        all.insert(name.as_str(), imported);
    }
    all
}

/// Which folders, or files of the root, import which others.
fn between_folders<'a>(
    all: &BTreeMap<&'a str, BTreeSet<&'a str>>,
) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let folder = |module: &'a str| module.split("::").next().unwrap();
    let mut folders: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, imported) in all {
        let others = imported.iter().map(|other| folder(other));
        let others = others.filter(|other| *other != folder(name));
        folders.entry(folder(name)).or_default().extend(others);
    }
    folders
}

/// The nodes that import each other, directly or in a circle.
fn circle<'a>(all: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Option<Vec<&'a str>> {
    // A module that imports none of the remaining modules is in no circle.
    let mut left: BTreeSet<&str> = all.keys().copied().collect();
    loop {
        let done: Vec<&str> = left
            .iter()
            .filter(|name| all[**name].is_disjoint(&left))
            .copied()
            .collect();
        if done.is_empty() {
            break;
        }
        done.iter().for_each(|name| {
            left.remove(name);
        });
    }
    let mut way = vec![*left.first()?];
    loop {
        let next = all[way[way.len() - 1]].intersection(&left).next()?;
        if let Some(begin) = way.iter().position(|name| name == next) {
            return Some(way.split_off(begin));
        }
        way.push(next);
    }
}

fn check(crate_name: &str, layers: &str, left_out: &[&str]) {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../{crate_name}/src"));
    let mut modules = modules(&src);
    let within = |name: &str, out: &&&str| name == **out || name.starts_with(&format!("{out}::"));
    modules.retain(|name, _| {
        let out = left_out.iter().find(|out| within(name, out));
        out.is_none() && !name.ends_with("::tests")
    });
    let all = imports(&modules);
    let imports = all.values().map(BTreeSet::len).sum::<usize>();
    println!("{crate_name}: {} modules, {imports} imports", all.len());
    assert!(imports >= all.len(), "imports are not seen");
    let layer = |module: &str| {
        let first = module.split("::").next().unwrap();
        let is_in = |layer: &str| layer.split_whitespace().any(|name| name == first);
        let found = layers.lines().position(is_in);
        found.unwrap_or_else(|| panic!("{crate_name}: {module} is in no layer"))
    };
    let mut upwards = Vec::new();
    for (name, imported) in &all {
        for other in imported.iter().filter(|other| layer(other) > layer(name)) {
            upwards.push(format!("{name} -> {other}"));
        }
    }
    assert!(upwards.is_empty(), "{crate_name}: upwards: {upwards:?}");
    if let Some(circle) = circle(&between_folders(&all)) {
        panic!("{crate_name}: a circle: {}", circle.join(" -> "));
    }
}

#[test]
fn imports_between_folders_run_down() {
    check("block", BLOCK, &[]);
    // The product must not use the simulation, which only tests use.
    check("storage", STORAGE, &["simulation"]);
    check("devices", DEVICES, &[]);
    check("archive", ARCHIVE, &["tests"]);
    check("vmm", VMM, &[]);
    check("walvisor", WALVISOR, &[]);
    check("benches", BENCHES, &[]);
}

/// The network and its runtime stay in one crate.
#[test]
fn only_the_archive_uses_the_network() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut users = BTreeSet::new();
    let crates = ["benches", "guest-images", "tests", "tests/testkit"];
    let product = ["archive", "block", "devices", "storage", "vmm", "walvisor"];
    for name in crates.iter().chain(&product) {
        let manifest = fs::read_to_string(top.join(name).join("Cargo.toml")).unwrap();
        for line in manifest.lines() {
            let named = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if ["tokio", "reqwest", "object_store", "hyper"].contains(&named) {
                users.insert(*name);
            }
        }
    }
    assert_eq!(users, BTreeSet::from(["archive"]));
}

#[test]
fn what_would_run_upwards_is_seen() {
    let text = "mod k;\nuse crate::{a::{self, B}, c as d};\nfn f() { super::g::h(); crate::e::i(1); x_crate::no(); k::l() }";
    let mut found = paths("m::n", text);
    found.sort();
    let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
    assert_eq!(
        found,
        ["a::B", "a::self", "c", "e::i", "m::g::h", "m::n::k::l"]
    );
    let text = "#[cfg(test)]\nmod a;\nmod b;\n#[cfg(test)]\n#[allow(x)]\nuse crate::{\n    c,\n};\n#[cfg(test)]\nmod t {\n    use crate::d;\n}\npub use e::E;\n";
    assert_eq!(product(text), "mod b;\npub use e::E;\n");
    // What the root hands on is imported from where it is.
    let text = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let some = BTreeMap::from([
        text("lib", "mod low;\nmod high;\npub use high::Disk;\n"),
        text("low", "fn f() { crate::Disk::open() }"),
        text("high", ""),
    ]);
    assert_eq!(imports(&some)["low"], BTreeSet::from(["high"]));
    let edges = |pairs: &[(&'static str, &'static str)]| {
        let mut all: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (from, to) in pairs {
            all.entry(from).or_default().insert(to);
            all.entry(to).or_default();
        }
        all
    };
    assert_eq!(circle(&edges(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    let all = edges(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]);
    assert_eq!(circle(&all), Some(vec!["b", "c"]));
    // Files of one folder may know each other, two folders may not.
    let inside = between_folders(&edges(&[("a::x", "a::y"), ("a::y", "a::x"), ("a::x", "b")]));
    assert_eq!(circle(&inside), None);
    let across = between_folders(&edges(&[("a::x", "b::x"), ("b::y", "a::y")]));
    assert_eq!(circle(&across), Some(vec!["a", "b"]));
}
