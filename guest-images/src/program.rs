//! The `walvisor` binary that jobs run.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::process::run;

/// The `walvisor` binary: `$WALVISOR` if that is set, else built by cargo from this source tree with `profile`
/// (`dev` or `release`).
///
/// # Errors
/// It does not build.
pub fn walvisor_binary(profile: &str) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("WALVISOR").filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    let output = run(Command::new(cargo)
        // The whole workspace, as `cargo test` has it: with the same features nothing is built twice.
        .args(["build", "--quiet", "--workspace", "--bin", "walvisor"])
        .args([
            "--message-format=json-render-diagnostics",
            "--profile",
            profile,
            "--manifest-path",
        ])
        .arg(manifest))?;
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| Error::Unusable("cargo built no walvisor binary".to_owned()))
}
