//! Builds the embedded guest of `walvisor demo` and hands its path to the crate.
//!
//! The guest is freestanding, so a cargo of its own builds it, with its own profile and target directory.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let guest = manifest.join("../guest-images/guest");
    for input in ["Cargo.toml", "Cargo.lock", "build.rs", "linker.ld", "src"] {
        println!("cargo::rerun-if-changed={}", guest.join(input).display());
    }
    let target = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo")).join("guest");
    match build(&guest, &target) {
        Ok(image) => println!("cargo::rustc-env=WALVISOR_GUEST_IMAGE={}", image.display()),
        Err(reason) => {
            println!(
                "cargo::error=the embedded guest in {} does not build: {reason}",
                guest.display()
            );
        }
    }
}

fn build(guest: &Path, target: &Path) -> Result<PathBuf, String> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "build",
            "--release",
            "--locked",
            "--offline",
            "--bin",
            "walvisor-guest",
        ])
        .arg("--target-dir")
        .arg(target)
        // Its directory decides which configuration files count.
        .current_dir(guest)
        // What was meant for the host: flags, and the wrapper with which clippy looks at the workspace.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .output()
        .map_err(|error| format!("cargo does not start: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).replace('\n', " / "));
    }
    Ok(target.join("release/walvisor-guest"))
}
