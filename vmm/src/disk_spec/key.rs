//! A row of the table: a key, what it takes, and where it applies.

use super::spec::{BackendKind, DiskCommand, DiskSpec};
use crate::size::parse_size;

/// A key of `--disk`.
pub struct Key {
    /// What stands before the `=`.
    pub name: &'static str,
    /// What may stand behind it.
    pub value: Value,
    /// What holds without the key: a value, or a few words.
    pub default: &'static str,
    /// The commands that take it.
    pub commands: &'static [DiskCommand],
    /// The backends that it is for.
    pub backends: &'static [BackendKind],
    /// What it does, in one sentence without a full stop.
    pub help: &'static str,
}

/// A word, and what it does to a [`DiskSpec`].
pub type Choice = (&'static str, fn(&mut DiskSpec));

/// What a key takes, and how that gets into a [`DiskSpec`].
pub enum Value {
    /// One of some words.
    Choice(&'static [Choice]),
    /// `on` or `off`.
    Switch(fn(&mut DiskSpec, bool)),
    /// A number from `least` to `most`.
    Number {
        /// The smallest.
        least: u64,
        /// The largest; `u64::MAX` is shown as no limit.
        most: u64,
        /// Gets a number in that range.
        set: fn(&mut DiskSpec, u64),
    },
    /// A power of two from `least` to `most`.
    PowerOfTwo {
        /// The smallest.
        least: u64,
        /// The largest.
        most: u64,
        /// Gets a power of two in that range.
        set: fn(&mut DiskSpec, u64),
    },
    /// Bytes, with a unit or without.
    Size {
        /// What it has to be a multiple of, in bytes.
        multiple: u64,
        /// Gets a positive multiple of that.
        set: fn(&mut DiskSpec, u64),
    },
    /// Anything that `set` takes.
    Text {
        /// What that is, for people.
        expected: &'static str,
        /// `None`: it is not that.
        set: fn(&mut DiskSpec, &str) -> Option<()>,
    },
}

impl Value {
    /// What is taken, for people: errors, help and the manual say it alike.
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
            Self::Size { multiple: 1, .. } => {
                "a number of bytes, or one with K, M, G, T, P or E".to_owned()
            }
            Self::Size { multiple, .. } => {
                format!(
                    "a positive multiple of {multiple} bytes, or a number with K, M, G, T, P or E"
                )
            }
            Self::Text { expected, .. } => (*expected).to_owned(),
        }
    }

    /// Puts `text` into `spec`. `None`: it is not what is [expected](Self::expected).
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

/// `a, b or c`.
pub(super) fn listed(words: &[&str], last: &str) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., end] => format!("{} {last} {end}", first.join(", ")),
    }
}
