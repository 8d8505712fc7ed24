//! Clap's view of `--disk`, and `--disk help`.

use std::ffi::OsStr;
use std::fmt::Write as _;

use clap::builder::{StringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Command};

use super::key::{Value, listed};
use super::parse::keys_of;
use super::spec::{BackendKind, DiskCommand, DiskSpec};
use super::table::keys;

/// Parses the value of a command's `--disk`: a SPEC, or `help`, which prints the keys that the
/// command accepts.
#[derive(Clone, Copy, Debug)]
pub struct DiskArgument(pub DiskCommand);

impl TypedValueParser for DiskArgument {
    type Value = DiskSpec;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<DiskSpec, clap::Error> {
        if value == "help" {
            // As with --help, clap prints the text of this error as help, and the command succeeds.
            return Err(clap::Error::raw(ErrorKind::DisplayHelp, disk_help(self.0)));
        }
        let disk = self.0;
        StringValueParser::new()
            .try_map(move |text| DiskSpec::parse(&text, disk))
            .parse_ref(command, argument, value)
    }
}

/// The groups of keys in help, by their first keys in the table.
const GROUPS: [(&str, &str); 5] = [
    ("path", "The disk"),
    ("transport", "Its device"),
    ("ops-per-second", "Its limits"),
    ("commit-wait-usec", "Its log"),
    ("door", "Its door"),
];

/// The keys of `command`, as `--disk help` and `--help` print them.
pub fn disk_help(command: DiskCommand) -> String {
    let words = command.words();
    let mut text = format!(
        "A disk of 'walvisor {words}': path=FILE[,key=value ...] or \
         backend=ram,size=SIZE[,key=value ...]\nA comma in a value is written ',,'.\n"
    );
    let mut heading = None;
    for key in keys() {
        let group = GROUPS.iter().find(|(first, _)| *first == key.name);
        heading = group.map(|(_, group)| group).or(heading);
        if keys_of(command).all(|other| other.name != key.name) {
            continue;
        }
        if let Some(group) = heading.take() {
            let _ = writeln!(text, "\n{group}:");
        }
        let backends = key.backends.iter().map(|backend| backend.name());
        let backends: Vec<_> = backends.collect();
        let backends = if backends.len() == BackendKind::ALL.len() {
            String::new()
        } else {
            format!("; only backend={}", listed(&backends, "or"))
        };
        let (name, help, default) = (key.name, key.help, key.default);
        let expected = key.value.expected();
        let _ = writeln!(
            text,
            "  {name}=\n      {help}.\n      {expected} [default: {default}{backends}]"
        );
    }
    text
}

/// The names of the keys of `command`, each with its values if these are words: for completion.
pub fn key_words(command: DiskCommand) -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    keys_of(command).map(|key| {
        let words = match &key.value {
            Value::Choice(choices) => choices.iter().map(|(name, _)| *name).collect(),
            Value::Switch(_) => vec!["on", "off"],
            _ => Vec::new(),
        };
        (key.name, words)
    })
}
