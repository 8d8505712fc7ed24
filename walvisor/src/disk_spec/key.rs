//! A row of the table: a key, its values, and the commands and backends that it applies to.

use super::spec::{BackendKind, DiskCommand, DiskSpec};
use crate::size::{SIZE, parse_size};

/// A key of `--disk`.
pub struct Key {
    /// The text before the `=`.
    pub name: &'static str,
    /// The values that it accepts.
    pub value: Value,
    /// What holds without the key: a value, or a description.
    pub default: &'static str,
    /// The commands that accept it.
    pub commands: &'static [DiskCommand],
    /// The backends that it applies to.
    pub backends: &'static [BackendKind],
    /// Its effect, in one sentence without a full stop.
    pub help: &'static str,
}

/// A word, and how it changes a [`DiskSpec`].
pub type Choice = (&'static str, fn(&mut DiskSpec));

/// The values that a key accepts, and how to store one in a [`DiskSpec`].
pub enum Value {
    /// One of a list of words.
    Choice(&'static [Choice]),
    /// `on` or `off`.
    Switch(fn(&mut DiskSpec, bool)),
    /// A number from `least` to `most`.
    Number {
        /// The smallest number.
        least: u64,
        /// The largest number. `u64::MAX` means no limit.
        most: u64,
        /// Stores a number of that range.
        set: fn(&mut DiskSpec, u64),
    },
    /// A power of two from `least` to `most`.
    PowerOfTwo {
        /// The smallest number.
        least: u64,
        /// The largest number.
        most: u64,
        /// Stores a power of two of that range.
        set: fn(&mut DiskSpec, u64),
    },
    /// Bytes, with a unit or without.
    Size {
        /// The size must be a positive multiple of this, in bytes.
        multiple: u64,
        /// Stores such a size.
        set: fn(&mut DiskSpec, u64),
    },
    /// Any text that `set` accepts.
    Text {
        /// Describes the accepted texts to the user.
        expected: &'static str,
        /// Stores a text, or returns `None` to refuse it.
        set: fn(&mut DiskSpec, &str) -> Option<()>,
    },
}

impl Value {
    /// Describes the accepted values to the user. Errors, help and the manual use the same words.
    pub fn expected(&self) -> String {
        match self {
            Self::Choice(choices) => {
                let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
                listed(&names, "or")
            }
            Self::Switch(_) => "on or off".to_owned(),
            Self::Number { least, most, .. } if *most == u64::MAX => {
                format!("a number, at least {least}")
            }
            Self::Number { least, most, .. } => format!("a number from {least} to {most}"),
            Self::PowerOfTwo { least, most, .. } => {
                format!("a power of two from {least} to {most}")
            }
            Self::Size { multiple: 1, .. } => SIZE.to_owned(),
            Self::Size { multiple, .. } => format!("a positive multiple of {multiple}: {SIZE}"),
            Self::Text { expected, .. } => (*expected).to_owned(),
        }
    }

    /// Stores `text` in `spec`. Returns `None` if `text` is not an [expected](Self::expected)
    /// value.
    pub fn set(&self, spec: &mut DiskSpec, text: &str) -> Option<()> {
        let number = || text.parse::<u64>().ok();
        match self {
            Self::Choice(choices) => {
                let (_, set) = choices.iter().find(|(name, _)| *name == text)?;
                set(spec);
            }
            Self::Switch(set) => match text {
                "on" => set(spec, true),
                "off" => set(spec, false),
                _ => return None,
            },
            Self::Number { least, most, set } => {
                set(spec, number().filter(|n| (least..=most).contains(&n))?);
            }
            Self::PowerOfTwo { least, most, set } => {
                let fits = |n: &u64| n.is_power_of_two() && (least..=most).contains(&n);
                set(spec, number().filter(fits)?);
            }
            Self::Size { multiple, set } => {
                let bytes = parse_size(text).ok();
                set(
                    spec,
                    bytes.filter(|n| *n > 0 && n.is_multiple_of(*multiple))?,
                );
            }
            Self::Text { set, .. } => return set(spec, text),
        }
        Some(())
    }
}

/// Joins words as `a, b or c`.
pub(super) fn listed(words: &[&str], last: &str) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., end] => format!("{} {last} {end}", first.join(", ")),
    }
}
