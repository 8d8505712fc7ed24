//! Links the image as a static freestanding ELF at the addresses of `linker.ld`.

fn main() {
    let manifest = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    println!("cargo::rerun-if-changed=linker.ld");
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        &format!("-Wl,-T,{manifest}/linker.ld"),
    ] {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
}
