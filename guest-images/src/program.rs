//! The programs of this source tree that jobs and tests run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::process::run;
use crate::reporter::Reporter;

/// The `walvisor` binary: `$WALVISOR` if that is set, else one that [`program`] builds.
///
/// # Errors
/// The program does not build.
pub fn walvisor_binary(profile: &str) -> Result<PathBuf> {
    match std::env::var_os("WALVISOR").filter(|path| !path.is_empty()) {
        Some(path) => Ok(path.into()),
        None => program("walvisor", profile),
    }
}

/// The `walvisor` binary for a person: `$WALVISOR` if that is set, else the one beside this program, else one that cargo
/// builds for release. That takes minutes, so a note says so, and cargo tells of its progress.
///
/// # Errors
/// The program does not build.
pub fn sibling_or_built(reporter: &Reporter) -> Result<PathBuf> {
    if std::env::var_os("WALVISOR").is_none_or(|path| path.is_empty()) {
        let beside = std::env::current_exe().map(|this| this.with_file_name("walvisor"));
        if let Some(beside) = beside.ok().filter(|path| path.is_file()) {
            return Ok(beside);
        }
        reporter
            .note("building walvisor for release with cargo, which takes minutes the first time");
    }
    walvisor_binary("release")
}

/// Removes from the environment of `command` what `cargo test` tells a test of its package.
///
/// Build scripts say which variables they read, and cargo runs them again when one has changed. `ring` reads
/// `CARGO_PKG_NAME`, so a cargo that a test starts would build all that depends on it, and the next `cargo test` too.
pub fn without_cargo(command: &mut Command) -> &mut Command {
    const TOLD: [&str; 4] = [
        "CARGO_PKG_",
        "CARGO_MANIFEST_",
        "CARGO_CRATE_",
        "CARGO_BIN_",
    ];
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if TOLD.iter().any(|start| name.starts_with(start)) {
            command.env_remove(&*name);
        }
    }
    command
}

/// The program `name` of this workspace, built by cargo with `profile` (`dev` or `release`).
///
/// # Errors
/// The program does not build.
pub fn program(name: &str, profile: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    let mut command = Command::new(cargo);
    without_cargo(&mut command)
        .args(["build", "--workspace", "--bin", name])
        .args(["--message-format=json-render-diagnostics"])
        .args(["--profile", profile, "--manifest-path"])
        .arg(manifest);
    if profile == "release" {
        // A person waits.
        command.stderr(Stdio::inherit());
    }
    if profile == "dev" {
        // With an example, cargo selects the same dependency features as `cargo test --workspace`. Other features
        // would make it build nearly everything once more.
        command.args(["--example", "embed"]);
    }
    let output = run(&mut command)?;
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| Error::Unusable(format!("cargo built no program {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cargo_that_a_test_starts_is_not_told_of_the_tests_package() {
        let mut command = Command::new("cargo");
        let changed: Vec<_> = without_cargo(&mut command).get_envs().collect();
        for name in [
            "CARGO_PKG_NAME",
            "CARGO_PKG_VERSION_PRE",
            "CARGO_MANIFEST_DIR",
        ] {
            assert!(
                changed.contains(&(name.as_ref(), None)),
                "{name}: {changed:?}"
            );
        }
        for name in ["CARGO", "CARGO_HOME", "CARGO_TARGET_DIR"] {
            assert!(!changed.iter().any(|(other, _)| *other == name), "{name}");
        }
    }
}
