//! `walvisor config`: the file of `walvisor serve --config`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::json;

use super::CommandError;
use super::disk::print;
use super::serve::config;

/// The arguments of `walvisor config`.
#[derive(Args, Debug)]
pub struct ConfigArguments {
    /// What to do with the file.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// What to do with the file.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a file without opening the disks that it describes
    Check {
        /// The TOML file
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Carries out the command.
///
/// # Errors
/// If the file is wrong.
pub fn run(arguments: &ConfigArguments) -> Result<(), CommandError> {
    let ConfigCommand::Check { file, json } = &arguments.command;
    let disks = config::check(file)?;
    if *json {
        print(format_args!(
            "{}\n",
            json!({ "file": file, "disks": disks })
        ));
    } else {
        print(format_args!("{}: {disks} disks\n", file.display()));
    }
    Ok(())
}
