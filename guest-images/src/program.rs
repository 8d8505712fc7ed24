//! The programs of this source tree that jobs and tests run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::process::run;
use crate::reporter::Reporter;

/// The `walvisor` binary: `$WALVISOR` if that is set, or else one that [`program`] builds.
///
/// # Errors
/// The program does not build.
pub fn walvisor_binary(profile: &str) -> Result<PathBuf> {
    match std::env::var_os("WALVISOR").filter(|path| !path.is_empty()) {
        Some(path) => Ok(path.into()),
        None => program("walvisor", profile),
    }
}

/// The `walvisor` binary for a user: `$WALVISOR` if that is set, or else the one beside this
/// program, or else a release build by cargo. That takes minutes, so a note says so, and cargo
/// shows its progress.
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

/// Removes the variables about a test's package, which `cargo test` sets, from the environment of
/// `command`.
///
/// Build scripts declare which variables they read, and cargo runs them again when one changes.
/// `ring` reads `CARGO_PKG_NAME`, so a cargo started by a test would rebuild everything that
/// depends on it, and so would the next `cargo test`.
pub fn without_cargo(command: &mut Command) -> &mut Command {
    const PREFIXES: [&str; 4] = [
        "CARGO_PKG_",
        "CARGO_MANIFEST_",
        "CARGO_CRATE_",
        "CARGO_BIN_",
    ];
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if PREFIXES.iter().any(|start| name.starts_with(start)) {
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
        // A user is waiting for it.
        command.stderr(Stdio::inherit());
    }
    if profile == "dev" {
        // With an example, cargo selects the same dependency features as `cargo test --workspace`.
        // With other features it would rebuild nearly everything.
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
    fn a_cargo_that_a_test_starts_does_not_see_the_tests_package() {
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
