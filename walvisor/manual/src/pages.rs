//! The manual pages: what clap knows of a command, its examples, exit statuses, and the pages
//! beside it.

use std::fs;
use std::io::{Error, Write};
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use walvisor::cli::Cli;

use crate::examples;

/// Writes a page for each command to a directory.
pub fn write(directory: &Path) -> Result<(), Error> {
    fs::create_dir_all(directory)?;
    let mut walvisor = Cli::command().disable_help_subcommand(true);
    // Gives each command its full name, and its usage the words before it.
    walvisor.build();
    write_page(directory, &walvisor, None)
}

/// The name of a command's page.
fn name(command: &Command) -> &str {
    command.get_display_name().unwrap_or(command.get_name())
}

/// Writes the page of a command and those of the commands below it.
fn write_page(directory: &Path, command: &Command, above: Option<&str>) -> Result<(), Error> {
    let man = Man::new(command.clone());
    let name = name(command);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    writeln!(page, ".SH SYNOPSIS\n{}", escape(&synopsis(command)))?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    if command.get_after_long_help().is_some() {
        man.render_extra_section(&mut page)?;
    }
    writeln!(
        page,
        ".SH EXIT STATUS\n0: done. 1: it failed; a line on stderr tells why, and what to do. 2: wrong usage."
    )?;
    let examples = examples::of(name);
    if !examples.is_empty() {
        writeln!(
            page,
            ".SH EXAMPLES\n.nf\n{}\n.fi",
            escape(&examples.join("\n"))
        )?;
    }
    let shown = || {
        command
            .get_subcommands()
            .filter(|below| !below.is_hide_set())
    };
    let below = shown().map(self::name);
    let others = above.into_iter().chain(below);
    let others = others.map(|name| format!("\\fB{}\\fR(1)", escape(name)));
    let others: Vec<_> = others.collect();
    writeln!(page, ".SH SEE ALSO\n{}", others.join(", "))?;
    fs::write(directory.join(man.get_filename()), page)?;
    shown().try_for_each(|below| write_page(directory, below, Some(name)))
}

/// How a command is used, with the arguments of those above it.
fn synopsis(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    let lines = usage.trim_start_matches("Usage: ").lines();
    lines.map(str::trim).collect::<Vec<_>>().join("\n.br\n")
}

/// Text as troff reads it.
fn escape(text: &str) -> String {
    text.replace('\\', "\\e")
        .replace('-', "\\-")
        .replace('\'', "\\(aq")
}
