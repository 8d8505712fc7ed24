//! Opens the links of network devices: starts passt, opens tap devices, connects to sockets. All of
//! it comes before the process gives up its rights; afterwards a link is an open descriptor.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};
use walvisor_devices::net::{Link, MacAddress, NetConfig};

use crate::net_spec::{NetLink, NetSpec, PasstOptions};

/// The program of Debian's package `passt`.
const PASST: &str = "passt";

/// A link that is open, and the device that it is for.
pub struct OpenNetwork {
    /// What carries the frames.
    pub link: Link,
    /// The device's address and sizes.
    pub device: NetConfig,
    /// The passt behind the link.
    passt: Option<Child>,
}

impl OpenNetwork {
    /// Opens the link of `spec`, the `index`th of the guest. `place` is the path of what the guest
    /// is known by: its first disk.
    ///
    /// # Errors
    /// If the link cannot be opened. The text is one line.
    pub fn open(spec: &NetSpec, index: usize, place: &Path) -> Result<Self, String> {
        let mac = address(spec, index, place);
        let (link, passt) = match &spec.link {
            NetLink::Passt(options) => {
                let started = start_passt(spec.mtu, options);
                let (socket, passt) = started.map_err(cannot_start_passt)?;
                let link = Link::stream(socket).map_err(cannot_start_passt)?;
                (link.named(PASST), Some(passt))
            }
            NetLink::Tap(name) => (open_tap(name)?, None),
            NetLink::Stream(path) => (connect(path)?, None),
        };
        let device = NetConfig {
            mtu: spec.mtu,
            ..NetConfig::new(mac)
        };
        Ok(Self {
            link,
            device,
            passt,
        })
    }

    /// Whether passt runs. One that ends later takes the guest's link down; one that has ended
    /// already did not like its arguments or this machine.
    ///
    /// # Errors
    /// If it has ended. The text is one line.
    pub fn check(&mut self) -> Result<(), String> {
        match self.passt.as_mut().map(Child::try_wait) {
            Some(Ok(Some(status))) => Err(format!(
                "--net passt: passt has ended at once ({status}) and has said why above: correct \
                 what it names, or give another network"
            )),
            _ => Ok(()),
        }
    }
}

/// The address of a guest's `index`th network device; see [`OpenNetwork::open`].
pub fn address(spec: &NetSpec, index: usize, place: &Path) -> MacAddress {
    spec.mac.unwrap_or_else(|| default_mac(place, index))
}

/// Starts a passt, and returns the socket that it is connected to. It ends when that is closed,
/// however this process ends.
///
/// # Errors
/// If the system refuses, or there is no program passt.
pub fn start_passt(mtu: u16, options: &PasstOptions) -> io::Result<(UnixStream, Child)> {
    let (ours, theirs) = UnixStream::pair()?;
    // Only passt inherits this end: it is closed here before the process starts another one.
    fcntl_setfd(&theirs, FdFlags::empty())?;
    let mut command = Command::new(PASST);
    command
        .args(["--foreground", "--quiet"])
        .args(["--mtu", &mtu.to_string()])
        .args(["--fd", &theirs.as_raw_fd().to_string()]);
    if rustix::process::geteuid().is_root() {
        // What it does anyway, with a warning.
        command.args(["--runas", "nobody"]);
    }
    if !options.host {
        command.arg("--no-map-gw");
    }
    for (option, list) in [("-t", &options.tcp), ("-u", &options.udp)] {
        if let Some(list) = list {
            command.args([option, list]);
        }
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // Ctrl-C in the terminal asks the guest to power down, and that takes its network.
        .process_group(0);
    Ok((ours, command.spawn()?))
}

fn cannot_start_passt(error: io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "--net passt: there is no program passt: install it (Debian: apt-get install passt), \
             or give tap=NAME"
                .to_owned()
        }
        _ => format!("--net passt: cannot start passt: {error}"),
    }
}

fn open_tap(name: &str) -> Result<Link, String> {
    Link::tap(name).map_err(|error| {
        let cure = match error.kind() {
            io::ErrorKind::NotFound => "load the module tun",
            io::ErrorKind::PermissionDenied => {
                "make it for this user ('ip tuntap add NAME mode tap user USER', as root)"
            }
            io::ErrorKind::ResourceBusy => "end the process that has it, or give another one",
            _ => "give the name of a tap device",
        };
        format!("--net tap={name}: {error}: {cure}")
    })
}

fn connect(path: &Path) -> Result<Link, String> {
    let link = UnixStream::connect(path).and_then(Link::stream);
    let link = link.map_err(|error| {
        let path = path.display();
        format!("--net stream={path}: {error}: give a Unix socket on which a program listens")
    })?;
    Ok(link.named(&format!("stream {}", path.display())))
}

/// An address that this guest has on this machine at each start: 02 and a hash of the machine's
/// identity, `place` and `index`.
fn default_mac(place: &Path, index: usize) -> MacAddress {
    let machine = fs::read("/etc/machine-id").unwrap_or_default();
    let place = fs::canonicalize(place).unwrap_or_else(|_| place.to_owned());
    let place = place.as_os_str().as_encoded_bytes();
    // FNV-1a: the standard library's hashes change between versions.
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let index = (index as u64).to_le_bytes();
    let parts = [&machine[..], &[0], place, &[0], &index];
    let bytes = parts.into_iter().flatten().copied();
    let [a, b, c, d, e, ..] = bytes.fold(0xcbf2_9ce4_8422_2325, step).to_le_bytes();
    MacAddress::new([2, a, b, c, d, e])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_stable_and_of_its_own() {
        let mac = |place: &str, index| default_mac(Path::new(place), index);
        let first = mac("/no/such/disk.img", 0);
        assert_eq!(first, mac("/no/such/disk.img", 0));
        assert_ne!(first, mac("/no/such/disk.img", 1));
        assert_ne!(first, mac("/no/such/other.img", 0));
        assert_eq!(first.bytes()[0], 2);
    }
}
