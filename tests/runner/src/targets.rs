//! What cargo builds, and the tests therein.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// What has tests, of all packages at once: so each dependency has one set of features, and cargo
/// builds nothing twice.
const TESTS: &[&str] = &[
    "test",
    "--workspace",
    "--locked",
    "--no-run",
    "--message-format=json-render-diagnostics",
    "--lib",
    "--bins",
    "--tests",
    "--example=embed",
    "--example=event_loop",
];

/// The programs that tests run. With the example, they get the same features of dependencies.
const PROGRAMS: &[&str] = &[
    "build",
    "--workspace",
    "--locked",
    "--quiet",
    "--bins",
    "--example=embed",
];

/// One test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    /// `PACKAGE/TARGET/PATH`: the package is its folder in the tree, the target `lib` or a name.
    pub(crate) id: String,
    /// Its path in the program.
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    /// The package's folder, where cargo starts its tests.
    pub(crate) directory: PathBuf,
}

/// A program with tests.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    /// `PACKAGE/TARGET`.
    name: String,
    program: PathBuf,
    directory: PathBuf,
}

/// All programs with tests.
pub(crate) struct Built {
    pub(crate) target_directory: PathBuf,
    targets: Vec<Target>,
}

/// Builds all tests, and the programs that they run; cargo shows its progress and complaints.
pub(crate) fn build() -> Result<Built, String> {
    let messages = cargo(TESTS)?;
    cargo(PROGRAMS)?;
    let top = std::env::current_dir().map_err(|error| format!("working directory: {error}"))?;
    let targets: Vec<_> = messages
        .lines()
        .filter_map(|line| target(&top, &serde_json::from_str(line).ok()?))
        .collect();
    // A program lies in TARGET/debug/deps.
    let first = targets.first().ok_or("cargo has built no test")?;
    let target_directory = first.program.ancestors().nth(3);
    Ok(Built {
        target_directory: target_directory.ok_or("no target directory")?.to_owned(),
        targets,
    })
}

/// What a run of cargo prints.
fn cargo(arguments: &[&str]) -> Result<String, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(&cargo)
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{}: {error}", cargo.display()))?;
    if !output.status.success() {
        return Err("the tests cannot be built: see above".to_owned());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The program with tests that a message of cargo tells of, in the workspace at `top`.
/// <https://doc.rust-lang.org/cargo/reference/external-tools.html#artifact-messages>
fn target(top: &Path, message: &Value) -> Option<Target> {
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let program = PathBuf::from(message["executable"].as_str()?);
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let directory = manifest.parent()?.to_owned();
    let package = directory.strip_prefix(top).ok()?.display().to_string();
    let target = &message["target"];
    let name = match target["kind"][0].as_str()? {
        "lib" => "lib",
        _ => target["name"].as_str()?,
    };
    Some(Target {
        name: format!("{package}/{name}"),
        program,
        directory,
    })
}

impl Built {
    /// Asks each program for its tests.
    pub(crate) fn tests(&self) -> Result<Vec<Test>, String> {
        let mut tests = Vec::new();
        for target in &self.targets {
            let fails = |why: String| format!("{}: {why}", target.program.display());
            let output = Command::new(&target.program)
                .args(["--list", "--format", "terse"])
                .current_dir(&target.directory)
                .output()
                .map_err(|error| fails(error.to_string()))?;
            if !output.status.success() {
                return Err(fails(format!("--list: {}", output.status)));
            }
            let names = String::from_utf8_lossy(&output.stdout);
            let names = names.lines().filter_map(|line| line.strip_suffix(": test"));
            tests.extend(names.map(|name| Test {
                id: format!("{}/{name}", target.name),
                name: name.to_owned(),
                program: target.program.clone(),
                directory: target.directory.clone(),
            }));
        }
        Ok(tests)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_program_is_named_after_its_folder_and_target() {
        let message = |kind: &str, test: bool| {
            json!({
                "reason": "compiler-artifact",
                "manifest_path": "/src/tests/testkit/Cargo.toml",
                "target": {"kind": [kind], "name": "walvisor_testkit"},
                "profile": {"test": test},
                "executable": "/target/debug/deps/walvisor_testkit-1",
            })
        };
        let name = |message: &Value| target(Path::new("/src"), message).map(|target| target.name);
        let library = name(&message("lib", true));
        assert_eq!(library.as_deref(), Some("tests/testkit/lib"));
        let test = name(&message("test", true));
        assert_eq!(test.as_deref(), Some("tests/testkit/walvisor_testkit"));
        assert_eq!(name(&message("bin", false)), None);
        assert_eq!(name(&json!({"reason": "build-finished"})), None);
    }
}
