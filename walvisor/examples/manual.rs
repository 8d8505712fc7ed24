//! Writes the manual pages and the shells' completions of `walvisor` below a directory, as
//! `make install` places them:
//!
//! ```text
//! cargo run -p walvisor --example manual -- DIR
//!   DIR/man/man1/walvisor.1, walvisor-run.1, ...     a page for each command
//!   DIR/bash-completion/completions/walvisor, DIR/zsh/site-functions/_walvisor, DIR/fish/vendor_completions.d/walvisor.fish
//! ```
//!
//! This generator is an example, so that the program itself does not contain it.

use std::fs;
use std::io::Error;
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

fn main() -> ExitCode {
    let Some(directory) = std::env::args_os().nth(1) else {
        eprintln!("manual: give the directory to write to");
        return ExitCode::from(2);
    };
    match write(Path::new(&directory)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let directory = Path::new(&directory).display();
            eprintln!("manual: {directory}: {error}: give a directory that can be written");
            ExitCode::FAILURE
        }
    }
}

fn write(directory: &Path) -> Result<(), Error> {
    let pages = directory.join("man/man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(walvisor::cli::Cli::command(), &pages)?;
    for (shell, place) in [
        (Shell::Bash, "bash-completion/completions/walvisor"),
        (Shell::Zsh, "zsh/site-functions/_walvisor"),
        (Shell::Fish, "fish/vendor_completions.d/walvisor.fish"),
    ] {
        let mut text = Vec::new();
        let mut command = walvisor::cli::Cli::command();
        clap_complete::generate(shell, &mut command, "walvisor", &mut text);
        let path = directory.join(place);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(path, text)?;
    }
    Ok(())
}
