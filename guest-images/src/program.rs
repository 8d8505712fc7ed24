//! The programs of this source tree that jobs and tests run.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::process::run;

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

/// The program `name` of this workspace, built by cargo with `profile` (`dev` or `release`).
///
/// # Errors
/// The program does not build.
pub fn program(name: &str, profile: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    let mut command = Command::new(cargo);
    command
        .args(["build", "--quiet", "--workspace", "--bin", name])
        .args(["--message-format=json-render-diagnostics"])
        .args(["--profile", profile, "--manifest-path"])
        .arg(manifest);
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
