//! Parses a SPEC, and refuses keys that its command or backend does not accept.

use std::collections::BTreeSet;

use walvisor_devices::backend::Answer;
use walvisor_vmm::disk::DeviceKind;

use super::key::{Key, listed};
use super::spec::{BackendKind, DiskCache, DiskCommand, DiskSpec, Fabric};
use super::table::{is_log_key, key, keys};

/// Why a SPEC was refused. Its text is one line and names the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskSpecError {
    /// A part has no `=`.
    #[error(
        "'{0}' has no '=': write path=FILE[,key=value ...], with a comma in FILE doubled \
         ('--disk help' lists the keys)"
    )]
    NoValue(String),
    /// A key that does not exist.
    #[error(
        "unknown key '{key}': {} ('--disk help' explains them)", known(key, *command)
    )]
    UnknownKey {
        /// The key.
        key: String,
        /// The command that was given the key.
        command: DiskCommand,
    },
    /// A key given twice.
    #[error("key '{0}' is given twice: give it once")]
    Twice(&'static str),
    /// A key of other commands.
    #[error("{key}= is for {commands}, and this is 'walvisor {}': leave {key}= out", command.words())]
    Command {
        /// The key.
        key: &'static str,
        /// The commands that accept it.
        commands: String,
        /// The command that was given the key.
        command: DiskCommand,
    },
    /// A key of other backends.
    #[error("{key}= is for {backends}, and this disk has backend={}: leave {key}= out", backend.name())]
    Backend {
        /// The key.
        key: &'static str,
        /// The backends that accept it.
        backends: String,
        /// The disk's own backend.
        backend: BackendKind,
    },
    /// A value that its key does not accept.
    #[error("{key}={value}: give {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value as given.
        value: String,
        /// Describes the values that the key accepts.
        expected: String,
    },
    /// A disk with no `path`.
    #[error("a disk needs path=FILE (or backend=ram,size=N)")]
    NoPath,
    /// Keys that contradict each other, or that need another.
    #[error("{0}")]
    Conflict(&'static str),
}

/// The keys that `command` accepts. For `serve`, whose disks name their doors, these are the keys
/// of all doors.
pub(super) fn keys_of(command: DiskCommand) -> impl Iterator<Item = &'static Key> {
    keys().filter(move |key| match command {
        DiskCommand::Serve => DiskCommand::DOORS
            .iter()
            .any(|door| key.commands.contains(door)),
        command => key.commands.contains(&command),
    })
}

/// The door that these keys name.
fn door_of(keys: &[(String, String)]) -> Option<DiskCommand> {
    let (_, named) = keys.iter().find(|(name, _)| name == "door")?;
    DiskCommand::DOORS
        .into_iter()
        .find(|door| door.name() == named)
}

/// Asks whether a similar key was meant, or lists all keys if there is none. The measure and
/// threshold are those that clap uses for arguments.
fn known(mistyped: &str, command: DiskCommand) -> String {
    let likeness = |key: &Key| strsim::jaro(mistyped, key.name);
    let alike = keys_of(command).filter(|key| likeness(key) > 0.7);
    match alike.max_by(|a, b| likeness(a).total_cmp(&likeness(b))) {
        Some(key) => format!("did you mean '{}'?", key.name),
        None => {
            let names: Vec<_> = keys_of(command).map(|key| key.name).collect();
            format!("'walvisor {}' takes {}", command.words(), names.join(", "))
        }
    }
}

/// The `key=value` parts of a SPEC. Commas separate them; `,,` is a literal comma.
pub fn split_parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(character) = rest.next() {
        if character == ',' && rest.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(character);
        }
    }
    parts
}

/// The keys and values of a SPEC.
///
/// # Errors
/// If a part has no `=`.
pub fn split_keys(text: &str) -> Result<Vec<(String, String)>, DiskSpecError> {
    let key = |part: String| match part.split_once('=') {
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        None => Err(DiskSpecError::NoValue(part)),
    };
    split_parts(text).into_iter().map(key).collect()
}

/// A disk, and the words that describe it. Words are compared and saved, not the parsed disk,
/// because a point such as `-15m` parses differently each time.
#[derive(Clone, Debug)]
pub struct WrittenDisk {
    /// Keys and values. Those of a configuration file include its defaults.
    pub keys: Vec<(String, String)>,
    /// What they describe.
    pub spec: DiskSpec,
}

impl WrittenDisk {
    /// The disk of `command` that these keys and values describe.
    ///
    /// # Errors
    /// As [`DiskSpec::from_keys`].
    pub fn new(keys: Vec<(String, String)>, command: DiskCommand) -> Result<Self, DiskSpecError> {
        let spec = DiskSpec::from_keys(&keys, command)?;
        Ok(Self { keys, spec })
    }

    /// Parses a SPEC of `command`.
    ///
    /// # Errors
    /// As [`DiskSpec::parse`].
    pub fn parse(text: &str, command: DiskCommand) -> Result<Self, DiskSpecError> {
        Self::new(split_keys(text)?, command)
    }

    /// Whether this, from a file with defaults, is what `other` says. What belongs to a log is said
    /// by one of its disks, so `other` may lack it; which images are detached changes with the disks
    /// that are removed.
    pub fn describes(&self, other: &Self) -> bool {
        let log_options = other.spec.log_options.clone();
        let covered = self.spec.log_options.covers(&log_options).is_ok();
        let like_other = DiskSpec {
            log_options,
            detached: other.spec.detached.clone(),
            ..self.spec.clone()
        };
        self.says(other) || covered && like_other == other.spec
    }

    /// Whether both say the same in the same words, except for detached images.
    pub fn says(&self, other: &Self) -> bool {
        let said = |disk: &Self| {
            let keys = disk.keys.iter().filter(|(key, _)| key != "detached");
            keys.cloned().collect::<BTreeSet<_>>()
        };
        said(self) == said(other)
    }

    /// The SPEC.
    pub fn text(&self) -> String {
        let part = |(key, value): &(String, String)| format!("{key}={value}").replace(',', ",,");
        let parts: Vec<_> = self.keys.iter().map(part).collect();
        parts.join(",")
    }
}

/// Takes `size` out of the keys of a disk with an image. Returns the size in bytes.
///
/// # Errors
/// If it is no size of a disk, or is there twice.
pub fn take_size(keys: &mut Vec<(String, String)>) -> Result<Option<u64>, DiskSpecError> {
    let in_memory = ("backend".to_owned(), BackendKind::Ram.name().to_owned());
    let place = keys.iter().position(|(name, _)| name == "size");
    let Some(place) = place.filter(|_| !keys.contains(&in_memory)) else {
        return Ok(None);
    };
    let (name, value) = keys.remove(place);
    if keys.iter().any(|(other, _)| *other == name) {
        return Err(DiskSpecError::Twice("size"));
    }
    let mut spec = DiskSpec::default();
    let size = key(&name).filter(|size| size.value.set(&mut spec, &value).is_none());
    match size {
        None => Ok(spec.size),
        Some(size) => Err(DiskSpecError::Value {
            key: size.name,
            value,
            expected: size.value.expected(),
        }),
    }
}

impl DiskSpec {
    /// Parses a SPEC of `command`.
    ///
    /// # Errors
    /// If a part has no `=`, and as [`from_keys`](Self::from_keys).
    pub fn parse(text: &str, command: DiskCommand) -> Result<Self, DiskSpecError> {
        Self::from_keys(&split_keys(text)?, command)
    }

    /// The disk of `command` that these keys and values describe.
    ///
    /// # Errors
    /// If a key is unknown or missing, if the disk's door or backend does not accept it, if a value
    /// is wrong, or if keys contradict each other.
    pub fn from_keys(
        keys: &[(String, String)],
        command: DiskCommand,
    ) -> Result<Self, DiskSpecError> {
        let command = match door_of(keys) {
            Some(door) if command != DiskCommand::Run => door,
            _ => command,
        };
        let mut spec = Self {
            door: command,
            ..Self::default()
        };
        let mut given: Vec<&'static Key> = Vec::new();
        for (name, value) in keys {
            let Some(key) = key(name) else {
                let key = name.to_owned();
                return Err(DiskSpecError::UnknownKey { key, command });
            };
            if given.iter().any(|other| other.name == name) {
                return Err(DiskSpecError::Twice(key.name));
            }
            if !keys_of(command).any(|taken| taken.name == name) {
                let commands = key.commands.iter().map(|command| command.words());
                let commands: Vec<_> = commands
                    .map(|words| format!("'walvisor {words}'"))
                    .collect();
                let commands: Vec<_> = commands.iter().map(String::as_str).collect();
                return Err(DiskSpecError::Command {
                    key: key.name,
                    commands: listed(&commands, "and"),
                    command,
                });
            }
            if key.value.set(&mut spec, value).is_none() {
                return Err(DiskSpecError::Value {
                    key: key.name,
                    value: value.to_owned(),
                    expected: key.value.expected(),
                });
            }
            given.push(key);
        }
        debug_assert_eq!(given.len(), keys.len(), "every key is checked");
        if spec.door == DiskCommand::Serve {
            return Err(DiskSpecError::Conflict(
                "a disk needs a door for its clients: give door=vhost-user, door=nbd, door=tcmu or \
                 door=ublk",
            ));
        }
        check(&spec, &given)?;
        Ok(spec)
    }

    /// The keys of a disk of `command`: its own, and the `defaults` that it lacks, if its door and
    /// backend accept them.
    pub(crate) fn with_defaults(
        own: &[(String, String)],
        defaults: &[(String, String)],
        command: DiskCommand,
    ) -> Vec<(String, String)> {
        let has = |name: &str| own.iter().any(|(key, _)| key == name);
        let door = door_of(own).or(door_of(defaults)).unwrap_or(command);
        let of_backend = |keys: &[(String, String)]| {
            let (_, named) = keys.iter().find(|(name, _)| name == "backend")?;
            BackendKind::ALL
                .into_iter()
                .find(|kind| kind.name() == named)
        };
        let backend = of_backend(own).or(of_backend(defaults)).unwrap_or_default();
        let fits = |key: &Key| key.commands.contains(&door) && key.backends.contains(&backend);
        let taken = |(name, _): &&(String, String)| {
            // An unknown key is refused later.
            let fits = door == DiskCommand::Serve || key(name).is_none_or(fits);
            let instead = match name.as_str() {
                "socket" => has("port"),
                "port" | "address" => has("socket"),
                name => has("at") && is_of_writes(name),
            };
            fits && !instead && !has(name)
        };
        own.iter()
            .chain(defaults.iter().filter(taken))
            .cloned()
            .collect()
    }
}

/// Whether a key matters only to a log that is written.
fn is_of_writes(name: &str) -> bool {
    ["cache", "answer"].contains(&name) || is_log_key(name) && name != "index-memory"
}

/// Refuses keys of another backend, keys that contradict each other, and missing keys.
fn check(spec: &DiskSpec, given: &[&'static Key]) -> Result<(), DiskSpecError> {
    let foreign = given
        .iter()
        .find(|key| !key.backends.contains(&spec.backend));
    if let Some(key) = foreign {
        let backends: Vec<_> = key.backends.iter().map(|backend| backend.name()).collect();
        return Err(DiskSpecError::Backend {
            key: key.name,
            backends: format!("backend={}", listed(&backends, "or")),
            backend: spec.backend,
        });
    }
    match spec.backend {
        BackendKind::Wal | BackendKind::Raw if spec.path.is_none() => {
            return Err(DiskSpecError::NoPath);
        }
        BackendKind::Ram if spec.size.is_none() => {
            return Err(DiskSpecError::Conflict(
                "backend=ram needs size=N, such as size=64M",
            ));
        }
        _ => {}
    }
    let has = |name: &str| given.iter().any(|key| key.name == name);
    let conflicts = [
        (
            has("socket") && has("port"),
            "socket= and port= exclude each other: give one of them",
        ),
        (
            has("address") && !has("port"),
            "address= needs a port: give port=N too",
        ),
        (
            (has("ops-burst") && !has("ops-per-second"))
                || (has("bytes-burst") && !has("bytes-per-second")),
            "a burst needs a limit: give ops-per-second=N or bytes-per-second=SIZE too",
        ),
        (
            spec.answer == Answer::Memory && spec.cache == DiskCache::Writethrough,
            "answer=memory contradicts cache=writethrough, which answers writes once they are \
             durable: give one of them",
        ),
        (
            spec.at.is_some() && has("readonly") && spec.read_only == spec.scratch,
            "at= means read-only without scratch=on, and writable with it: leave readonly= out",
        ),
        (
            spec.scratch && spec.at.is_none(),
            "scratch=on is for a disk as of an earlier point: give at=AT too",
        ),
        (
            spec.at.is_some() && given.iter().any(|key| is_of_writes(key.name)),
            "at= reads a log without writing it: leave cache=, answer= and the keys of the log out, \
             except index-memory=",
        ),
        (
            spec.in_order && spec.device == DeviceKind::Scsi,
            "in-order=on is for device=blk, and this disk has device=scsi: leave in-order= out",
        ),
        (
            has("wwn") && spec.fabric == Fabric::None,
            "wwn= names a target of a fabric, and fabric=none has none: leave one of them out",
        ),
    ];
    match conflicts.into_iter().find(|(found, _)| *found) {
        Some((_, text)) => Err(DiskSpecError::Conflict(text)),
        None => Ok(()),
    }
}
