//! The command line: its grammar (clap), exit statuses, and errors as one line on stderr.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::commands::{self, CommandError};
use crate::disk_spec::{DiskCommand, disk_help};
use crate::net_spec::net_help;
use crate::repeats::{self, RepeatFilter};

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "walvisor",
    version,
    about = "A small KVM VMM whose disks keep their promise"
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot a Linux guest.
    #[command(after_long_help = format!("{}\n{}", disk_help(DiskCommand::Run), net_help()))]
    Run(commands::run::RunArguments),
    /// Run the embedded guest on new disks, and show what a request costs over MMIO and PCI
    Demo(commands::demo::DemoArguments),
    /// Create, inspect, copy and resize disks.
    Disk(commands::disk::DiskArguments),
    /// Serve disks to other programs.
    Serve(Box<commands::serve::ServeArguments>),
    /// Check the file of 'walvisor serve --config'.
    Config(commands::config::ConfigArguments),
    /// Control a running VM or daemon.
    Ctl(commands::ctl::CtlArguments),
    /// Show what a running VM's or daemon's disks do, and what their FLUSHes cost, each second.
    Top(commands::top::TopArguments),
    /// Inspect logs.
    Log(commands::log::LogArguments),
    /// Copy a log to an object store, and bring its disks back from there.
    Archive(commands::archive::ArchiveArguments),
}

/// Parses and runs the command line. Returns the exit status: 0 done, 1 failed, 2 wrong usage.
/// `started`: when the process began.
pub fn main(started: Instant) -> ExitCode {
    let cli = match Cli::try_parse_from(socket_first(std::env::args_os().collect())) {
        Ok(cli) => cli,
        Err(error) => {
            return match moved(&error) {
                Some(usage) => end("walvisor", Err(CommandError::Usage(usage))),
                None => report_usage::<Cli>(&error),
            };
        }
    };
    // With SIGXFSZ ignored, a write beyond the shell's file size limit ('ulimit -f') fails instead
    // of killing the process. SAFETY: the signal is ignored: no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // The conformance driver breaks every rule on purpose, so a device's warnings about it are
    // expected.
    let provoked = matches!(&cli.command, Command::Demo(demo) if demo.conformance);
    show_warnings(if provoked { "off" } else { WARNINGS });
    let result = match cli.command {
        Command::Run(arguments) => commands::run::run(&arguments, started),
        Command::Ctl(arguments) => commands::ctl::run(&arguments),
        Command::Demo(arguments) => commands::demo::run(&arguments),
        Command::Disk(arguments) => commands::disk::run(&arguments),
        Command::Serve(arguments) => commands::serve::run(&arguments, started),
        Command::Config(arguments) => commands::config::run(&arguments),
        Command::Top(arguments) => commands::top::run(&arguments),
        Command::Log(arguments) => commands::log::run(&arguments),
        Command::Archive(arguments) => commands::archive::run(&arguments),
    };
    end("walvisor", result)
}

/// The arguments with the socket of `ctl VERB SOCKET` before the verb, where the grammar has it.
fn socket_first(mut arguments: Vec<OsString>) -> Vec<OsString> {
    if let [_, ctl, verb, socket, ..] = &arguments[..]
        && ctl == "ctl"
    {
        let command = Cli::command();
        let ctl = command.find_subcommand("ctl").expect("a command");
        let is_verb = |text: &OsString| ctl.find_subcommand(text).is_some();
        let is_option = socket.to_string_lossy().starts_with('-');
        if is_verb(verb) && !is_verb(socket) && !is_option && !Path::new(verb).exists() {
            arguments.swap(2, 3);
        }
    }
    arguments
}

/// Prints the error of a command, if any, on one line of stderr. Returns the exit status of
/// `program`: 0 done, 1 failed, 2 wrong usage.
pub fn end(program: &str, result: Result<(), CommandError>) -> ExitCode {
    repeats::flush(true);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error}");
            ExitCode::from(match error {
                CommandError::Usage(_) => 2,
                CommandError::Failed(_) => 1,
            })
        }
    }
}

/// The warnings that are shown without `RUST_LOG`. `virtio-queue` is silent, because the device
/// reports the same faults of a guest's rings, and limits the rate.
pub const WARNINGS: &str = "warn,virtio_queue=off";

/// Prints warnings on stderr, one line each: failures that do not end the command, such as a failed
/// log, a checkpoint that will be retried, or a device that a guest broke. The same one is shown a
/// few times a minute, and then counted. `RUST_LOG` overrides the filter `otherwise`.
///
/// # Panics
/// If it is called twice.
pub fn show_warnings(otherwise: &str) {
    let asked = std::env::var("RUST_LOG").ok();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .without_time()
        .with_filter(RepeatFilter);
    tracing_subscriber::registry()
        .with(filter(asked.as_deref(), otherwise))
        .with(lines)
        .init();
}

/// The filter in `asked`, or `otherwise` if that is missing or invalid.
fn filter(asked: Option<&str>, otherwise: &str) -> Targets {
    let asked = asked.and_then(|asked| asked.parse().ok());
    asked.unwrap_or_else(|| otherwise.parse().expect("levels of targets"))
}

/// Prints help and version of the program `P` as clap does, and any other error as one line on
/// stderr that names the command with the relevant help. Returns the exit status.
pub fn report_usage<P: CommandFactory>(error: &clap::Error) -> ExitCode {
    let command = P::command();
    let program = command.get_name();
    let asked = asked(&command, std::env::args().skip(1));
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A failed write is fine: the reader closed the pipe. Clap reports '--disk help' as an
            // error, so its prefix is removed.
            let text = error.to_string();
            let _ = match text.strip_prefix("error: ") {
                Some(help) => io::stdout().write_all(help.as_bytes()),
                None => error.print(),
            };
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            eprintln!("{program}: a command is missing: see '{asked} --help'");
            ExitCode::from(2)
        }
        _ => {
            let mut message = one_line(&error.to_string());
            if asked.starts_with("walvisor serve") && message.ends_with("--disk <SPEC>") {
                message.push_str(", or 'walvisor serve --config FILE' for those of a file");
            }
            eprintln!("{program}: {message}; see '{asked} --help'");
            ExitCode::from(2)
        }
    }
}

/// The program and the subcommands that `arguments` begin with.
fn asked(program: &clap::Command, arguments: impl Iterator<Item = String>) -> String {
    let (mut command, mut asked) = (program, program.get_name().to_owned());
    for argument in arguments {
        let Some(subcommand) = command.find_subcommand(&argument) else {
            break;
        };
        command = subcommand;
        asked = format!("{asked} {argument}");
    }
    asked
}

/// The message for a command that has moved to another program.
fn moved(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(command)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let now = match command.as_str() {
        "bench" => "walvisor-bench store",
        "compare" => "walvisor-bench",
        "points" => return Some("'walvisor ctl points' is 'walvisor disk points PATH' now".into()),
        _ => return None,
    };
    Some(format!(
        "'walvisor {command}' is '{now}' now: build it with: cargo build --release -p \
         walvisor-benches"
    ))
}

/// Clap's message without its usage block, joined into one line.
fn one_line(message: &str) -> String {
    let lines: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    let text = lines.join(" ").replace(" tip: ", "; ");
    text.strip_prefix("error: ").unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_accepts_the_grammar() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_socket_of_a_control_command_may_follow_its_verb() {
        for (typed, read) in [
            ("ctl stats vm.sock --json", "ctl vm.sock stats --json"),
            ("ctl vm.sock stats", "ctl vm.sock stats"),
            ("ctl snapshot vm.sock monday", "ctl vm.sock snapshot monday"),
            // A socket that is called as a verb.
            ("ctl stats stats", "ctl stats stats"),
            ("ctl stats", "ctl stats"),
            ("ctl stats --help", "ctl stats --help"),
            ("disk check ctl", "disk check ctl"),
        ] {
            let arguments = |text: &str| -> Vec<OsString> {
                let words = format!("walvisor {text}");
                words.split(' ').map(OsString::from).collect()
            };
            assert_eq!(socket_first(arguments(typed)), arguments(read), "{typed}");
        }
    }

    #[test]
    fn usage_errors_fit_one_line() {
        let error = Cli::try_parse_from(["walvisor", "run"]).unwrap_err();
        let line = one_line(&error.to_string());
        assert!(!line.contains('\n') && line.contains("--kernel"), "{line}");
    }

    #[test]
    fn rust_log_overrides_the_default_filter() {
        use tracing::Level;
        let shown = filter(None, WARNINGS);
        assert!(shown.would_enable("walvisor", &Level::WARN));
        assert!(!shown.would_enable("walvisor", &Level::INFO));
        assert!(!shown.would_enable("virtio_queue::queue", &Level::ERROR));
        assert!(!filter(None, "off").would_enable("walvisor", &Level::ERROR));
        let asked = filter(Some("info,walvisor_storage=debug"), WARNINGS);
        assert!(asked.would_enable("walvisor_storage::log", &Level::DEBUG));
        assert!(!asked.would_enable("walvisor_devices", &Level::DEBUG));
        let nonsense = filter(Some("walvisor=loud"), WARNINGS);
        assert!(!nonsense.would_enable("walvisor", &Level::INFO));
    }

    #[test]
    fn moved_commands_name_the_program_that_has_them_now() {
        let moved_message = |arguments: &[&str]| {
            let error = Cli::try_parse_from([&["walvisor"], arguments].concat()).unwrap_err();
            moved(&error)
        };
        let bench = moved_message(&["bench", "commit", "--clients", "8"]).unwrap();
        assert!(bench.contains("'walvisor-bench store' now"), "{bench}");
        let compare = moved_message(&["compare", "notify", "--quick"]).unwrap();
        assert!(compare.contains("'walvisor-bench' now"), "{compare}");
        let points = moved_message(&["ctl", "ctl.sock", "points"]).unwrap();
        assert!(
            points.contains("'walvisor disk points PATH' now"),
            "{points}"
        );
        assert_eq!(moved_message(&["banana"]), None);
    }
}
