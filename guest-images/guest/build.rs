//! Compiles the image as a static freestanding ELF at the addresses of `linker.ld`, if the feature
//! `image` is on.
//!
//! This script calls the compiler directly: the host's profiles, flags and wrappers do not fit a
//! freestanding image, and an unpacked package of this crate has no other manifest to build the
//! image with.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=linker.ld");
    if env::var_os("CARGO_FEATURE_IMAGE").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let linker_script = env::current_dir().expect("set by cargo").join("linker.ld");
    let library = out.join("libwalvisor_guest.rlib");
    let compiled = compile("src/lib.rs", &library, |rustc| {
        rustc.args(["--crate-name", "walvisor_guest", "--crate-type", "lib"])
    });
    let linked = compiled.and_then(|()| {
        compile("src/main.rs", &out.join("walvisor-guest"), |rustc| {
            rustc.args([
                "--crate-name",
                "walvisor_guest_image",
                "--crate-type",
                "bin",
            ]);
            rustc
                .arg("--extern")
                .arg(format!("walvisor_guest={}", library.display()));
            rustc.args(["-C", "lto=fat"]);
            for argument in [
                "-nostartfiles",
                "-nostdlib",
                "-static",
                "-no-pie",
                "-Wl,--build-id=none",
            ] {
                rustc.arg("-C").arg(format!("link-arg={argument}"));
            }
            if let Some(linker) = env::var_os("RUSTC_LINKER") {
                rustc
                    .arg("-C")
                    .arg(format!("linker={}", Path::new(&linker).display()));
            }
            rustc
                .arg("-C")
                .arg(format!("link-arg=-Wl,-T,{}", linker_script.display()))
        })
    });
    if let Err(reason) = linked {
        println!("cargo::error=the image of the embedded guest does not build: {reason}");
    }
}

/// Compiles `source` to `output`, with the arguments that `more` adds.
fn compile(
    source: &str,
    output: &Path,
    more: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<(), String> {
    let mut rustc = Command::new(env::var_os("RUSTC").expect("set by cargo"));
    rustc.arg(source).arg("-o").arg(output);
    rustc.args(["--edition", "2024", "--target"]);
    rustc.arg(env::var_os("TARGET").expect("set by cargo"));
    rustc.args([
        "-C",
        "panic=abort",
        "-C",
        "opt-level=2",
        "-C",
        "codegen-units=1",
    ]);
    let ran = more(&mut rustc).output();
    let ran = ran.map_err(|error| format!("the compiler does not start: {error}"))?;
    if ran.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&ran.stderr).replace('\n', " / "))
    }
}
