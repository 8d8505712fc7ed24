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
    for (name, _) in std::env::vars_os() {
        if is_of_a_package(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
}

fn is_of_a_package(variable: &str) -> bool {
    const PREFIXES: [&str; 4] = [
        "CARGO_PKG_",
        "CARGO_MANIFEST_",
        "CARGO_CRATE_",
        "CARGO_BIN_",
    ];
    PREFIXES.iter().any(|start| variable.starts_with(start))
}

/// The program `name` of this workspace, built by cargo with `profile` (`dev` or `release`). If
/// `$WALVISOR_BUILT` is set, it is the directory of all programs with the profile `dev`: nothing is
/// built then.
///
/// # Errors
/// The program does not build.
pub fn program(name: &str, profile: &str) -> Result<PathBuf> {
    if let Some(built) = std::env::var_os("WALVISOR_BUILT").filter(|_| profile == "dev") {
        return Ok(Path::new(&built).join(name));
    }
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
        for (name, expected) in [
            ("CARGO_PKG_NAME", true),
            ("CARGO_PKG_VERSION_PRE", true),
            ("CARGO_MANIFEST_DIR", true),
            ("CARGO", false),
            ("CARGO_HOME", false),
            ("CARGO_TARGET_DIR", false),
        ] {
            assert_eq!(is_of_a_package(name), expected, "{name}");
        }
        let mut command = Command::new("cargo");
        let changed: Vec<_> = without_cargo(&mut command).get_envs().collect();
        // The runner of the tests sets this one, as cargo does.
        assert!(changed.contains(&("CARGO_MANIFEST_DIR".as_ref(), None)));
    }
}
