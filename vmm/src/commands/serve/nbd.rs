//! `walvisor serve nbd`: disks as NBD exports.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use walvisor_devices::backend::SECTOR_SIZE;
use walvisor_devices::nbd::{Export, Listener, Server, Service, Tls, TlsConfig};

use super::daemon::{DaemonArguments, Ending, announce, conclude};
use crate::commands::CommandError;
use crate::commands::socket::Sockets;
use crate::commands::socket_names::SocketNames;
use crate::disk::{DiskInUse, OpenDisk};
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::disks;
use crate::metrics::DiskMetrics;
use crate::seccomp::{self, Duty};

/// The arguments of `walvisor serve nbd`.
#[derive(Args, Debug)]
pub struct NbdArguments {
    /// What every daemon takes.
    #[command(flatten)]
    pub daemon: DaemonArguments,
    /// Whether clients can or must use TLS [default: require with certificates, else off]
    #[arg(long, value_name = "MODE", value_enum)]
    pub tls: Option<TlsMode>,
    /// Directory with server-cert.pem and server-key.pem, and for --tls-verify-peer ca-cert.pem (and ca-crl.pem)
    #[arg(long, value_name = "DIR")]
    pub tls_certificates: Option<PathBuf>,
    /// Require a client certificate that the CA has signed
    #[arg(long, requires = "tls_certificates")]
    pub tls_verify_peer: bool,
}

/// The modes of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TlsMode {
    /// No client can use TLS
    Off,
    /// Clients may use TLS
    On,
    /// Clients have to use TLS
    Require,
}

impl NbdArguments {
    /// Reads the certificates.
    fn tls(&self) -> Result<Tls, CommandError> {
        let (mode, directory) = match (self.tls, &self.tls_certificates) {
            (None | Some(TlsMode::Off), None) | (Some(TlsMode::Off), Some(_)) => {
                return Ok(Tls::Off);
            }
            (Some(_), None) => {
                return Err(CommandError::Usage(
                    "--tls needs certificates: give --tls-certificates DIR".to_owned(),
                ));
            }
            (mode, Some(directory)) => (mode, directory),
        };
        let config = TlsConfig::from_directory(directory, self.tls_verify_peer)
            .map_err(|error| CommandError::Failed(format!("--tls-certificates: {error}")))?;
        Ok(match mode {
            Some(TlsMode::On) => Tls::Offered(config),
            _ => Tls::Required(config),
        })
    }
}

/// An address where disks are served.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ListenAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// An address and the disks served there, as indices into the command line's disks.
struct Group {
    place: ListenAddress,
    members: Vec<usize>,
}

/// An address that is bound, so that clients can connect to it.
struct Bound {
    listener: Listener,
    /// Its URI without an export.
    uri: Uri,
}

enum Uri {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// Serves until a signal asks to stop.
pub(super) fn run(arguments: &NbdArguments, started: Instant) -> Result<(), CommandError> {
    let mut sockets = Sockets::take(arguments.daemon.mode)?;
    let tls = arguments.tls()?;
    let arguments = &arguments.daemon;
    let specs = &arguments.disks;
    let groups = group(specs).map_err(CommandError::Usage)?;
    disks::check(specs).map_err(CommandError::Usage)?;
    let metrics = arguments.process.metrics()?;
    // The names are declared first, so that they are removed after everything that listens at them is dropped.
    let mut names = SocketNames::default();
    let ending = Ending::prepare(arguments, &mut names, DiskCommand::Nbd, started)?;
    // The sockets are bound before the disks are opened, which may take long after a crash: early clients wait,
    // and are not refused.
    let bound = groups
        .iter()
        .map(|group| bind(&group.place, &mut sockets, &mut names))
        .collect::<Result<Vec<_>, _>>()?;
    sockets.finish()?;
    arguments.restrict(&mut names, |_| ())?;
    let (open, logs) = disks::open(specs, 1).map_err(CommandError::failed)?;
    let served = seccomp::restrict(arguments.process.seccomp, Duty::Nbd)
        .map_err(CommandError::failed)
        .and_then(|()| serve(specs, &open, &groups, bound, &tls, ending));
    drop(names);
    conclude(served, metrics, open, logs)
}

/// Serves open disks until a signal comes. Returns the metrics of the disks.
fn serve(
    specs: &[DiskSpec],
    disks: &[OpenDisk],
    groups: &[Group],
    bound: Vec<Bound>,
    tls: &Tls,
    ending: Ending,
) -> Result<Vec<DiskMetrics>, CommandError> {
    let (mut services, mut lines) = (Vec::new(), String::new());
    let mut controlled = Vec::new();
    for (group, bound) in groups.iter().zip(bound) {
        let mut exports = Vec::new();
        for &member in &group.members {
            let (name, disk) = (export_name(&specs[member]), &disks[member]);
            let described = format!("{}, write-ahead logged by walvisor", disk.name);
            let export = Export::new(&name, &described, Arc::clone(&disk.backend))
                .answering(disk.device.answer);
            export.throttle().set(disk.limits);
            let bytes = disk.backend.sectors() * SECTOR_SIZE;
            let uri = bound.uri.of(&name, tls);
            lines.push_str(&format!("serving {}: {bytes} bytes at {uri}\n", disk.name));
            controlled.push((
                member,
                DiskInUse {
                    name: disk.name.clone(),
                    transport: DiskCommand::Nbd.name(),
                    backend: Arc::clone(&disk.backend),
                    metrics: export.metrics(),
                    throttle: export.throttle(),
                    device: export.control(),
                },
            ));
            exports.push(export);
        }
        let listener = bound.listener;
        services.push(Service {
            listener,
            exports,
            tls: tls.clone(),
        });
    }
    let server = Server::start(services).map_err(CommandError::failed)?;
    announce(&lines);
    controlled.sort_by_key(|(member, _)| *member);
    let controlled: Vec<_> = controlled.into_iter().map(|(_, disk)| disk).collect();
    let ended = ending.wait(controlled.clone());
    server.stop();
    ended.map(|()| controlled.iter().map(DiskMetrics::from).collect())
}

/// Groups the disks by their address, in the order in which the addresses are first named.
fn group(specs: &[DiskSpec]) -> Result<Vec<Group>, String> {
    let mut groups: Vec<Group> = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        let place = place(spec)?;
        match groups.iter_mut().find(|group| group.place == place) {
            Some(group) => group.members.push(index),
            None => groups.push(Group {
                place,
                members: vec![index],
            }),
        }
    }
    for group in &groups {
        let mut names: Vec<_> = group
            .members
            .iter()
            .map(|member| export_name(&specs[*member]))
            .collect();
        names.sort();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!(
                "two disks at one address have the name '{}': give one of them a serial=",
                pair[0]
            ));
        }
    }
    Ok(groups)
}

fn place(spec: &DiskSpec) -> Result<ListenAddress, String> {
    match (&spec.socket, spec.port) {
        (Some(path), _) => Ok(ListenAddress::Unix(disks::real_path(path))),
        (None, Some(port)) => Ok(ListenAddress::Tcp(SocketAddr::new(spec.address, port))),
        (None, None) => Err(format!(
            "disk '{}': give socket=PATH or port=N (NBD's is 10809), where to serve it",
            spec.name()
        )),
    }
}

/// The export name of a disk.
fn export_name(spec: &DiskSpec) -> String {
    let file = spec.path.as_deref().and_then(Path::file_name);
    match (&spec.serial, file) {
        (Some(serial), _) => serial.clone(),
        (None, Some(name)) => name.to_string_lossy().into_owned(),
        (None, None) => "ram".to_owned(),
    }
}

fn bind(
    place: &ListenAddress,
    sockets: &mut Sockets,
    names: &mut SocketNames,
) -> Result<Bound, CommandError> {
    match place {
        ListenAddress::Unix(path) => {
            let listener = sockets.unix(path, names)?;
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            Ok(Bound {
                listener: Listener::Unix(listener),
                uri: Uri::Unix(absolute),
            })
        }
        ListenAddress::Tcp(address) => {
            let listener = sockets.tcp(*address)?;
            // With port 0 the system has chosen the port.
            let address = listener.local_addr().map_err(CommandError::failed)?;
            Ok(Bound {
                listener: Listener::Tcp(listener),
                uri: Uri::Tcp(address),
            })
        }
    }
}

impl Uri {
    /// The URI of an export (the NBD project's `doc/uri.md`).
    fn of(&self, export: &str, tls: &Tls) -> String {
        let export = escape(export.as_bytes());
        let scheme = match tls {
            Tls::Required(_) => "nbds",
            Tls::Off | Tls::Offered(_) => "nbd",
        };
        match self {
            Self::Unix(path) => {
                let path = escape(path.as_os_str().as_encoded_bytes());
                format!("{scheme}+unix:///{export}?socket={path}")
            }
            Self::Tcp(address) => format!("{scheme}://{address}/{export}"),
        }
    }
}

/// Percent-encodes the bytes that a URI's path or query cannot hold (RFC 3986).
fn escape(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' => char::from(*byte).to_string(),
            byte if byte.is_ascii_alphanumeric() => char::from(*byte).to_string(),
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(texts: &[&str]) -> Result<Vec<Group>, String> {
        let specs: Vec<DiskSpec> = texts
            .iter()
            .map(|text| DiskSpec::parse(text, DiskCommand::Nbd).unwrap())
            .collect();
        group(&specs)
    }

    #[test]
    fn disks_at_one_place_are_exports_of_one_listener() {
        let found = groups(&[
            "path=a,port=10809",
            "path=b,socket=s",
            "path=c,port=10809,address=127.0.0.1",
            "path=d,socket=./s",
        ])
        .unwrap();
        let members: Vec<_> = found.iter().map(|group| group.members.clone()).collect();
        assert_eq!(members, [[0, 2], [1, 3]]);
    }

    #[test]
    fn what_cannot_be_served_is_told() {
        for (texts, part) in [
            (&["path=a"][..], "socket=PATH or port=N"),
            (
                &["path=x/a,socket=s", "path=y/a,socket=s"],
                "have the name 'a'",
            ),
        ] {
            let error = groups(texts).err().unwrap();
            assert!(error.contains(part), "{texts:?}: {error}");
        }
    }

    #[test]
    fn uris_hold_any_path() {
        let uri = Uri::Unix(PathBuf::from("/run/a b&c"));
        assert_eq!(
            uri.of("d?.img", &Tls::Off),
            "nbd+unix:///d%3F.img?socket=/run/a%20b%26c"
        );
        let uri = Uri::Tcp("[::1]:9".parse().unwrap());
        assert_eq!(uri.of("", &Tls::Off), "nbd://[::1]:9/");
    }
}
