//! The crates that other programs embed are packed alone: what is in a package needs nothing beside
//! it. Its pages' links lead to files in it, its README quotes its examples, and these build and
//! run with nothing but the packages. That takes minutes for all of them, so of the last two crates
//! `make soak` makes sure: `WALVISOR_PACKED_CRATES=3`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use walvisor_guest_images::without_cargo;

/// The crates, and their examples with the arguments of a run and the end of what that prints.
const CRATES: [(&str, &[Example]); 3] = [
    ("walvisor-block", &[("own_disk", &["image"], "")]),
    (
        "walvisor-storage",
        &[
            ("disk", &["disk.img"], "run 1"),
            ("past", &["disk.img", "newest"], "1"),
            ("backup", &["disk.img", "copy.img"], "the rest are holes"),
        ],
    ),
    (
        "walvisor-devices",
        &[("embed", &[], "status 1, buffer \"\"")],
    ),
];
type Example = (&'static str, &'static [&'static str], &'static str);

/// Most lines of an example.
const LINES: usize = 30;

/// A cargo that is ended after ten minutes.
fn cargo(dir: &Path, arguments: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new("timeout");
    without_cargo(&mut command)
        .arg("600")
        .arg(cargo)
        .args(arguments)
        .current_dir(dir);
    command
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    assert!(!errors.contains("manifest has no"), "{errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Packs the crates, and unpacks them to `place`.
fn unpacked(place: &Path) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let packages = CRATES.iter().flat_map(|(name, _)| ["--package", name]);
    let mut package = cargo(&root, &["package", "--locked", "--offline"]);
    package
        .args(packages)
        .args(["--no-verify", "--allow-dirty"]);
    run(package.arg("--target-dir").arg(place.join("packed")));
    let unpack = |name: &str| {
        let version = env!("CARGO_PKG_VERSION");
        let packed = format!("packed/package/{name}-{version}.crate");
        let mut tar = Command::new("tar");
        run(tar.args(["-xzf", &packed]).current_dir(place));
        place.join(format!("{name}-{version}"))
    };
    CRATES.iter().map(|(name, _)| unpack(name)).collect()
}

/// The files below `folder`.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let found = entries.map(|entry| entry.unwrap().path());
    let found = found.map(|path| {
        if path.is_dir() {
            files(&path)
        } else {
            vec![path]
        }
    });
    found.flatten().collect()
}

/// The targets of links in a page, or in the comments of a source file, that are paths.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let links = text.split("](").skip(1);
    let targets = links.filter_map(|rest| rest.split_once(')'));
    let targets = targets.map(|(target, _)| target.split('#').next().unwrap());
    targets.filter(|target| {
        !target.contains("://") && (target.ends_with(".md") || target.contains('/'))
    })
}

#[test]
fn what_is_in_a_package_needs_nothing_beside_it() {
    let place = tempfile::tempdir().unwrap();
    for (package, (name, examples)) in unpacked(place.path()).iter().zip(CRATES) {
        let read = |file: &str| {
            let read = fs::read_to_string(package.join(file));
            read.unwrap_or_else(|error| panic!("{name}: {file}: {error}"))
        };
        for file in files(package) {
            let page = file.extension().is_some_and(|end| end == "md");
            let source = file.extension().is_some_and(|end| end == "rs");
            if page || source {
                let text = fs::read_to_string(&file).unwrap();
                for path in paths(&text) {
                    let target = file.parent().unwrap().join(path);
                    assert!(target.exists(), "{}: link to {path}", file.display());
                }
                let example = file.starts_with(package.join("examples"));
                let own = name.replace('-', "_");
                for used in text.lines().filter_map(|line| line.strip_prefix("use ")) {
                    let known = ["std", &*own].iter().any(|own| used.starts_with(own));
                    let whole = known && !used.contains('*');
                    assert!(!example || whole, "{}: use {used}", file.display());
                }
                let elsewhere = "../docs/";
                assert!(!text.contains(elsewhere), "{}", file.display());
            }
        }
        assert!(read("LICENSE").contains("Apache License"));
        let manifest = read("Cargo.toml");
        for key in "description license rust-version readme keywords categories".split(' ') {
            assert!(manifest.contains(&format!("\n{key} = ")), "{name}: {key}");
        }
        assert!(!manifest.contains("publish = false"), "{name}");
        let readme = read("README.md");
        assert!(read("src/lib.rs").starts_with("#![doc = include_str!(\"../README.md\")]"));
        for (example, ..) in examples {
            let file = [
                format!("examples/{example}.rs"),
                format!("examples/{example}/main.rs"),
            ];
            let file = file.iter().find(|file| package.join(file).exists());
            let text = read(file.unwrap_or_else(|| panic!("{name}: no example {example}")));
            let lines = text.lines().count();
            assert!(lines <= LINES, "{name}: {example} has {lines} lines");
            let quoted = format!("\n{text}```\n");
            assert!(readme.contains(&quoted), "{name}: README has not {example}");
        }
    }
}

/// The packages take each other's place of a registry's.
#[test]
fn examples_run_from_the_packages_alone() {
    let place = tempfile::tempdir().unwrap();
    let packages = unpacked(place.path());
    let image = fs::File::create(place.path().join("image")).unwrap();
    image.set_len(1 << 20).unwrap();
    let wanted = std::env::var("WALVISOR_PACKED_CRATES").ok();
    let wanted = wanted.map_or(1, |count| count.parse().unwrap());
    for (package, (name, examples)) in packages.iter().zip(CRATES).take(wanted) {
        for (example, arguments, end) in examples {
            let manifest = package.join("Cargo.toml");
            let words = ["run", "--quiet", "--offline", "--example", example];
            let mut command = cargo(place.path(), &words);
            command.arg("--manifest-path").arg(&manifest);
            for (other, (crate_name, _)) in packages.iter().zip(CRATES) {
                if crate_name != name {
                    let path = other.display();
                    let patch = format!("patch.crates-io.{crate_name}.path='{path}'");
                    command.arg("--config").arg(patch);
                }
            }
            // Smaller, and sooner built.
            command
                .env("CARGO_TARGET_DIR", place.path().join("built"))
                .env("CARGO_PROFILE_DEV_DEBUG", "0");
            let out = run(command.arg("--").args(*arguments));
            assert!(out.trim_end().ends_with(end), "{name}: {example}: {out}");
        }
    }
}
