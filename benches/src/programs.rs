//! Programs that run in processes of their own: finds them, and ends them.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use walvisor::commands::CommandError;

/// The program that builds and runs guests.
pub const GUEST_IMAGES: &str = "walvisor-guest-images";

/// `walvisor`: `$WALVISOR` if that is set, or else beside this program or on the path.
///
/// # Errors
/// If it is in none of these places.
pub fn walvisor() -> Result<PathBuf, CommandError> {
    let named = std::env::var_os("WALVISOR").filter(|path| !path.is_empty());
    match named {
        // Makes the path absolute, because children run in other directories.
        Some(named) => std::path::absolute(named).map_err(CommandError::failed),
        None => find_own("walvisor"),
    }
}

/// [`GUEST_IMAGES`], beside this program or on the path.
///
/// # Errors
/// If it is in neither of these places.
pub fn guest_images() -> Result<PathBuf, CommandError> {
    find_own(GUEST_IMAGES)
}

/// A program of this project.
fn find_own(program: &str) -> Result<PathBuf, CommandError> {
    find(program).ok_or_else(|| {
        CommandError::Failed(format!(
            "{program} is missing beside this program and on PATH: build it with: cargo build \
             --release -p {program}"
        ))
    })
}

/// The path of a program: beside this one, on the search path, or in root's directories, which may
/// not be on an ordinary user's path.
pub fn find(program: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|own| own.parent().map(Path::to_owned));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = beside.into_iter().chain(std::env::split_paths(&path));
    directories
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

/// The first of these programs, each with its package, that [`find`] does not find.
pub fn missing<'a>(needs: &[(&'a str, &'a str)]) -> Option<(&'a str, &'a str)> {
    let mut needs = needs.iter();
    needs.find(|(program, _)| find(program).is_none()).copied()
}

/// The note about a program that is missing, and its package.
pub fn not_measured((program, package): (&str, &str)) -> String {
    format!("Not measured: {program} is missing: install the package {package}")
}

/// Checks that these programs are installed. Each comes with its package.
///
/// # Errors
/// If one is missing; the error names its package.
pub fn require(needs: &[(&str, &str)]) -> Result<(), CommandError> {
    missing(needs).map_or(Ok(()), |(program, package)| {
        Err(CommandError::Failed(format!(
            "{program} is missing: apt-get install --no-install-recommends {package}"
        )))
    })
}

/// Sends SIGTERM to a child and waits until it has ended. If it takes longer than `longest`, kills
/// it.
pub fn end(child: &mut Child, longest: Option<Duration>) {
    let began = Instant::now();
    // Repeats the signal, because qemu-nbd ignores it while starting.
    while let Ok(None) = child.try_wait() {
        // Each fails if the child has ended, which is fine.
        let _ = kill_process(Pid::from_child(child), Signal::TERM);
        match longest {
            None => drop(child.wait()),
            Some(longest) => {
                if began.elapsed() > longest {
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}
