//! The public items of the crates that other programs embed are those in their `api.txt`: a change
//! is seen, and is meant. `make api-update` writes the files.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use walvisor_guest_images::without_cargo;

/// The crates, each with its directory and the features that are not on by default.
const CRATES: [(&str, &str, &str); 3] = [
    ("walvisor-block", "block", ""),
    ("walvisor-storage", "storage", ""),
    ("walvisor-devices", "devices", "ublk"),
];

/// The format of rustdoc's JSON that the library `public-api` reads.
const FORMAT: u64 = 57;

/// The public items of a crate, a line each; `None` if this compiler's rustdoc writes another
/// format.
fn items(name: &str, features: &str) -> Option<String> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    without_cargo(&mut command)
        .args(["rustdoc", "--quiet", "--locked", "--lib", "--package", name])
        .args(["--features", features])
        .args(["--", "-Zunstable-options", "--output-format", "json"])
        .env("RUSTDOC", tests.join("scripts/rustdoc-json"))
        .current_dir(tests);
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {errors}");
    // This test is TARGET/debug/deps/api-*.
    let this = std::env::current_exe().unwrap();
    let target = this.ancestors().nth(3).unwrap();
    let json = target.join(format!("doc/{}.json", name.replace('-', "_")));
    let text = fs::read_to_string(&json).unwrap();
    let described: serde_json::Value = serde_json::from_str(&text).unwrap();
    let format = described["format_version"].as_u64();
    if format != Some(FORMAT) {
        println!("skipped: rustdoc's JSON has format {format:?}, and the library reads {FORMAT}");
        return None;
    }
    let api = public_api::Builder::from_rustdoc_json(&json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build();
    Some(api.unwrap().to_string())
}

/// The lines that only one of the texts has, with a sign before each.
fn difference(known: &str, now: &str) -> String {
    let [known, now] = [known, now].map(|text| text.lines().collect::<BTreeSet<_>>());
    let gone = known.difference(&now).map(|line| format!("- {line}\n"));
    let new = now.difference(&known).map(|line| format!("+ {line}\n"));
    gone.chain(new).collect()
}

#[test]
fn the_public_items_are_the_known_ones() {
    let update = std::env::var_os("WALVISOR_API").is_some_and(|wish| wish == "update");
    let mut changed = String::new();
    for (name, directory, features) in CRATES {
        let Some(now) = items(name, features) else {
            return;
        };
        let list = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(directory)
            .join("api.txt");
        if update {
            fs::write(&list, &now).unwrap();
            continue;
        }
        let known = fs::read_to_string(&list).unwrap_or_default();
        if known != now {
            changed += &format!("{directory}/api.txt\n{}", difference(&known, &now));
        }
    }
    assert!(
        changed.is_empty(),
        "the public items differ: run `make api-update` and mention the break in CHANGELOG.md\n{changed}"
    );
}

#[test]
fn a_difference_names_each_item_that_has_gone_or_come() {
    assert_eq!(difference("a\nb\nc\n", "a\nc\nd\n"), "- b\n+ d\n");
}
