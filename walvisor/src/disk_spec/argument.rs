//! Clap's view of `--disk`, and `--disk help`.

use std::ffi::OsStr;
use std::fmt::Write as _;

use clap::builder::{StringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Command};

use super::key::listed;
use super::parse::keys_of;
use super::spec::{BackendKind, DiskCommand, DiskSpec};

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

/// The keys of `command`, as `--disk help` and `--help` print them.
pub fn disk_help(command: DiskCommand) -> String {
    let words = command.words();
    let mut text = format!(
        "A disk of 'walvisor {words}': path=FILE[,key=value ...] or \
         backend=ram,size=SIZE[,key=value ...]\nA comma in a value is written ',,'.\n\n"
    );
    for key in keys_of(command) {
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
