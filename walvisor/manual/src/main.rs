//! Writes the manual pages and the shells' completions of `walvisor` below a directory, as
//! `make install` places them:
//!
//! ```text
//! cargo run -p walvisor-manual -- DIR
//!   DIR/man/man1/walvisor.1, walvisor-run.1, ...   a page for each command: pages.rs, examples.rs
//!   DIR/bash-completion/completions/walvisor, DIR/zsh/site-functions/_walvisor,
//!   DIR/fish/vendor_completions.d/walvisor.fish
//! ```
//!
//! It is a crate of its own, so that the program does not contain it, and `make install` builds
//! neither the program's tests nor what these need.

mod examples;
mod pages;

use std::fs;
use std::io::{Error, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;
use walvisor::cli::Cli;
use walvisor::disk_spec::{DiskCommand, key_words};

/// What bash offers for the value of `--disk`, put around what clap_complete writes.
const BASH_DISKS: &str = include_str!("disks.bash");

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
    pages::write(&directory.join("man/man1"))?;
    for (shell, place) in [
        (Shell::Bash, "bash-completion/completions/walvisor"),
        (Shell::Zsh, "zsh/site-functions/_walvisor"),
        (Shell::Fish, "fish/vendor_completions.d/walvisor.fish"),
    ] {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "walvisor", &mut text);
        if shell == Shell::Bash {
            text.write_all(disks().as_bytes())?;
        }
        let path = directory.join(place);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(path, text)?;
    }
    Ok(())
}

/// bash's words for the value of `--disk`.
fn disks() -> String {
    let keys = |command: DiskCommand| {
        let keys = key_words(command).map(|(key, _)| format!("{key}="));
        let keys: Vec<_> = keys.collect();
        format!("        {}) echo '{}';;\n", command.name(), keys.join(" "))
    };
    let commands = [DiskCommand::Run].into_iter().chain(DiskCommand::DOORS);
    let keys: String = commands.chain([DiskCommand::Serve]).map(keys).collect();
    // A key of several commands has the same values for all.
    let run = key_words(DiskCommand::Run);
    let mut values: Vec<_> = key_words(DiskCommand::Serve).chain(run).collect();
    values.retain(|(_, values)| !values.is_empty());
    values.sort();
    values.dedup();
    let values = values.iter();
    let values: String = values
        .map(|(key, values)| format!("        {key}) echo '{}';;\n", values.join(" ")))
        .collect();
    BASH_DISKS
        .replace("        KEYS\n", &keys)
        .replace("        VALUES\n", &values)
}
