//! Network SPECs: a network device on the command line, such as `passt,mac=02:00:00:00:00:01` or
//! `tap=tap0,transport=pci`.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::PathBuf;

use clap::builder::{StringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Command};
use walvisor_devices::net::{LEAST_MTU, MOST_MTU, MacAddress};
use walvisor_vmm::disk::{Notifications, TransportKind};

use crate::disk_spec::split_parts;

/// What a passt lets through, besides the guest's own connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PasstOptions {
    /// Whether the guest reaches services of this machine's loopback at its gateway's address.
    pub host: bool,
    /// Ports of this machine whose TCP connections go to the guest, as passt's `-t` takes them.
    pub tcp: Option<String>,
    /// Ports of this machine whose UDP packets go to the guest, as passt's `-u` takes them.
    pub udp: Option<String>,
}

/// What a guest's network device is connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetLink {
    /// A passt of its own, which carries out the guest's connections as this user.
    Passt(PasstOptions),
    /// A tap device of this name.
    Tap(String),
    /// A program that listens on this Unix socket.
    Stream(PathBuf),
}

/// A parsed SPEC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetSpec {
    /// What it is connected to.
    pub link: NetLink,
    /// The guest's address; `None`: one that follows from the first disk.
    pub mac: Option<MacAddress>,
    /// The largest payload of a frame in bytes.
    pub mtu: u16,
    /// The transport through which the guest reaches the device.
    pub transport: TransportKind,
    /// How doorbells and interrupts travel between the guest and the device.
    pub notifications: Notifications,
}

/// A key of `--net`.
struct Key {
    name: &'static str,
    /// Describes the values that it accepts.
    expected: &'static str,
    default: &'static str,
    help: &'static str,
    /// Stores a value, or returns `None` to refuse it.
    set: fn(&mut NetSpec, &str) -> Option<()>,
    /// Whether it is for passt only.
    passt: bool,
}

const KEYS: &[Key] = &[
    Key {
        name: "mac",
        expected: "six bytes in hexadecimal, such as 02:00:00:00:00:01, the first one even",
        default: "02 and five bytes that follow from this machine, the path of the first disk, and \
                  the device's place on the command line",
        help: "The guest's Ethernet address",
        set: |spec, text| {
            let mac: MacAddress = text.parse().ok()?;
            spec.mac = (!mac.is_group()).then_some(mac);
            spec.mac.map(drop)
        },
        passt: false,
    },
    Key {
        name: "mtu",
        expected: "a number from 1280 to 65520",
        default: "1500",
        help: "The largest payload of a frame in bytes; the guest is told",
        set: |spec, text| {
            spec.mtu = text.parse().ok()?;
            (LEAST_MTU..=MOST_MTU).contains(&spec.mtu).then_some(())
        },
        passt: false,
    },
    Key {
        name: "transport",
        expected: "mmio or pci",
        default: "mmio",
        help: "How the guest reaches the device: virtio-mmio or virtio-pci",
        set: |spec, text| {
            let kinds = [TransportKind::Mmio, TransportKind::Pci];
            spec.transport = kinds.into_iter().find(|kind| kind.name() == text)?;
            Some(())
        },
        passt: false,
    },
    Key {
        name: "ioeventfd",
        expected: "on or off",
        default: "on",
        help: "KVM passes doorbells and interrupts through eventfds; off: a doorbell is an exit to \
               user space, an interrupt an ioctl",
        set: |spec, text| {
            spec.notifications = if switch(text)? {
                Notifications::Eventfds
            } else {
                Notifications::Exits
            };
            Some(())
        },
        passt: false,
    },
    Key {
        name: "host",
        expected: "on or off",
        default: "off",
        help: "The guest reaches services on this machine's loopback at its gateway's address",
        set: |spec, text| match &mut spec.link {
            NetLink::Passt(passt) => {
                passt.host = switch(text)?;
                Some(())
            }
            _ => None,
        },
        passt: true,
    },
    Key {
        name: "tcp",
        expected: "ports as passt's -t takes them, such as 2222:22",
        default: "none",
        help: "TCP connections to these ports of this machine go to the guest",
        set: |spec, text| match &mut spec.link {
            NetLink::Passt(passt) => ports(&mut passt.tcp, text),
            _ => None,
        },
        passt: true,
    },
    Key {
        name: "udp",
        expected: "ports as passt's -u takes them, such as 5353:53",
        default: "none",
        help: "UDP packets to these ports of this machine go to the guest",
        set: |spec, text| match &mut spec.link {
            NetLink::Passt(passt) => ports(&mut passt.udp, text),
            _ => None,
        },
        passt: true,
    },
];

fn switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

/// Stores a list of ports. passt checks it, but it must not pass for another option.
fn ports(list: &mut Option<String>, text: &str) -> Option<()> {
    let starts_well = text.starts_with(|first: char| first.is_ascii_alphanumeric());
    *list = starts_well.then(|| text.to_owned());
    list.as_ref().map(drop)
}

/// Why a SPEC was refused. Its text is one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetSpecError {
    /// It does not begin with a link.
    #[error("'{0}': begin with passt, tap=NAME or stream=SOCKET ('--net help' lists the keys)")]
    Link(String),
    /// A part is no key with a value.
    #[error("'{0}': give KEY=VALUE with one of the keys {names} ('--net help' explains them)", names = names())]
    Key(String),
    /// A key given twice.
    #[error("key '{0}' is given twice: give it once")]
    Twice(&'static str),
    /// A key of passt with another link.
    #[error("{0}= is for passt: leave {0}= out")]
    NotPasst(&'static str),
    /// A value that its key does not accept.
    #[error("{key}={value}: give {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value as given.
        value: String,
        /// Describes the values that the key accepts.
        expected: &'static str,
    },
}

fn names() -> String {
    let names: Vec<_> = KEYS.iter().map(|key| key.name).collect();
    names.join(", ")
}

impl NetSpec {
    /// Parses a SPEC.
    ///
    /// # Errors
    /// If it has no link, or a key that does not exist or does not accept its value.
    pub fn parse(text: &str) -> Result<Self, NetSpecError> {
        let parts = split_parts(text);
        let (first, keys) = parts
            .split_first()
            .map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
        let link = match first.split_once('=') {
            None if first == "passt" => NetLink::Passt(PasstOptions::default()),
            Some(("tap", name)) if !name.is_empty() => NetLink::Tap(name.to_owned()),
            Some(("stream", path)) if !path.is_empty() => NetLink::Stream(PathBuf::from(path)),
            _ => return Err(NetSpecError::Link(first.to_owned())),
        };
        let mut spec = Self {
            link,
            mac: None,
            mtu: 1500,
            transport: TransportKind::default(),
            notifications: Notifications::default(),
        };
        let mut given = Vec::new();
        for part in keys {
            let unknown = || NetSpecError::Key(part.clone());
            let (name, value) = part.split_once('=').ok_or_else(unknown)?;
            let key = KEYS.iter().find(|key| key.name == name);
            let key = key.ok_or_else(unknown)?;
            if given.contains(&name) {
                return Err(NetSpecError::Twice(key.name));
            }
            given.push(name);
            if key.passt && !matches!(spec.link, NetLink::Passt(_)) {
                return Err(NetSpecError::NotPasst(key.name));
            }
            (key.set)(&mut spec, value).ok_or(NetSpecError::Value {
                key: key.name,
                value: value.to_owned(),
                expected: key.expected,
            })?;
        }
        Ok(spec)
    }
}

/// Parses the argument of `--net`.
#[derive(Clone, Debug)]
pub struct NetArgument;

impl TypedValueParser for NetArgument {
    type Value = NetSpec;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<NetSpec, clap::Error> {
        if value == "help" {
            // As with --help, clap prints the text of this error as help, and the command succeeds.
            return Err(clap::Error::raw(ErrorKind::DisplayHelp, net_help()));
        }
        StringValueParser::new()
            .try_map(|text| NetSpec::parse(&text))
            .parse_ref(command, argument, value)
    }
}

/// The links and the keys, as `--net help` and `--help` print them.
pub fn net_help() -> String {
    let mut text = "A network device of 'walvisor run': LINK[,key=value ...]\n\
        A comma in a value is written ',,'.\n\n\
        \x20 passt\n      \
        A passt of its own (Debian package passt): no rights, nothing to set up. The guest has this\n      \
        machine's address, and its connections are made by this user.\n  \
        tap=NAME\n      \
        A tap device, which you put into a bridge or give an address. One of this user, or as root.\n  \
        stream=SOCKET\n      \
        A program that listens on this Unix socket and speaks as passt does: a frame's length as 32\n      \
        bits in network order, then the frame.\n\n"
        .to_owned();
    for key in KEYS {
        let (name, help, expected, default) = (key.name, key.help, key.expected, key.default);
        let only = if key.passt { "; only passt" } else { "" };
        let _ = writeln!(
            text,
            "  {name}=\n      {help}.\n      {expected} [default: {default}{only}]"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_has_a_link_and_keys() {
        let spec = NetSpec::parse("passt").unwrap();
        let defaults = NetLink::Passt(PasstOptions {
            host: false,
            tcp: None,
            udp: None,
        });
        assert_eq!((spec.link, spec.mac, spec.mtu), (defaults, None, 1500));
        let text = "passt,host=on,tcp=2222:22,,80,mac=02:00:00:00:00:0a,mtu=9000,transport=pci";
        let spec = NetSpec::parse(text).unwrap();
        let link = NetLink::Passt(PasstOptions {
            host: true,
            tcp: Some("2222:22,80".to_owned()),
            udp: None,
        });
        assert_eq!((spec.link, spec.mtu), (link, 9000));
        assert_eq!(spec.mac.unwrap().to_string(), "02:00:00:00:00:0a");
        assert_eq!(spec.transport, TransportKind::Pci);
        let tap = NetSpec::parse("tap=tap0").unwrap();
        assert_eq!(tap.link, NetLink::Tap("tap0".to_owned()));
        let stream = NetSpec::parse("stream=/run/a,,b").unwrap();
        assert_eq!(stream.link, NetLink::Stream(PathBuf::from("/run/a,b")));
    }

    #[test]
    fn a_mistake_is_named_with_its_cure() {
        for (text, error) in [
            ("", "'': begin with passt, tap=NAME or stream=SOCKET"),
            ("tap=", "'tap=': begin with"),
            ("user", "'user': begin with"),
            ("mac=02:00:00:00:00:01", "begin with passt"),
            (
                "passt,fast",
                "'fast': give KEY=VALUE with one of the keys mac, mtu",
            ),
            ("passt,speed=1", "'speed=1': give KEY=VALUE"),
            (
                "passt,mtu=1,mtu=2",
                "mtu=1: give a number from 1280 to 65520",
            ),
            ("passt,mtu=1500,mtu=1500", "key 'mtu' is given twice"),
            ("passt,mac=01:00:00:00:00:01", "the first one even"),
            ("tap=t,host=on", "host= is for passt"),
            ("passt,tcp=-v", "tcp=-v: give ports"),
            ("passt,transport=usb", "transport=usb: give mmio or pci"),
        ] {
            let refused = NetSpec::parse(text).unwrap_err().to_string();
            assert!(refused.contains(error), "{text}: {refused}");
        }
    }
}
