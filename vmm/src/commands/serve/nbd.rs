//! `walvisor serve nbd`: disks as NBD exports.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use walvisor_devices::backend::SECTOR_SIZE;
use walvisor_devices::nbd::{Export, Listener, Server, Service, Tls, TlsConfig};

use super::daemon::{DaemonArguments, Ending, announce, conclude};
use super::members::{Exposure, Membership, SharedLogs};
use crate::commands::CommandError;
use crate::commands::socket::Sockets;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{Added, NotRemoved};
use crate::disk::{DiskInUse, OpenDisk};
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::disks;
use crate::metrics::DiskMetrics;
use crate::seccomp::Duty;

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
    let scratch = arguments.restrict(&mut names, |_| ())?;
    let (open, logs) = disks::open(specs, 1, scratch).map_err(CommandError::failed)?;
    let logs = SharedLogs::new(logs);
    let served = arguments
        .filter(Duty::Nbd)
        .and_then(|()| serve(arguments, open, &groups, bound, tls, &logs, ending));
    drop(names);
    conclude(served, metrics, &logs)
}

/// Serves open disks until a signal comes. Returns the metrics of the disks.
fn serve(
    arguments: &DaemonArguments,
    disks: Vec<OpenDisk>,
    groups: &[Group],
    bound: Vec<Bound>,
    tls: Tls,
    logs: &SharedLogs,
    ending: Ending,
) -> Result<Vec<DiskMetrics>, CommandError> {
    let (mut services, mut lines) = (Vec::new(), String::new());
    let (mut controlled, mut places) = (Vec::new(), Vec::new());
    for (group, Bound { listener, uri }) in groups.iter().zip(bound) {
        let mut exports = Vec::new();
        for &member in &group.members {
            let (export, disk) = export(&arguments.disks[member], &disks[member]);
            let bytes = disk.backend.sectors() * SECTOR_SIZE;
            let uri = uri.of(export.name(), &tls);
            lines.push_str(&format!("serving {}: {bytes} bytes at {uri}\n", disk.name));
            controlled.push((member, disk));
            exports.push(export);
        }
        services.push(Service {
            listener,
            exports,
            tls: tls.clone(),
        });
        places.push((group.place.clone(), uri));
    }
    drop(disks);
    let server = Server::start(services).map_err(CommandError::failed)?;
    announce(&lines);
    controlled.sort_by_key(|(member, _)| *member);
    let controlled = controlled.into_iter().map(|(_, disk)| disk).collect();
    let exposure = Exports {
        server,
        places,
        tls,
    };
    let (specs, dirs) = (&arguments.disks, &arguments.disk_dirs);
    let members = Membership::new(exposure, specs, dirs, logs, 1);
    ending.wait(controlled, Some(Box::new(members)))
}

/// The export of a disk, and its handle.
fn export(spec: &DiskSpec, disk: &OpenDisk) -> (Export, DiskInUse) {
    let described = format!("{}, write-ahead logged by walvisor", disk.name);
    let export = Export::new(&export_name(spec), &described, Arc::clone(&disk.backend))
        .answering(disk.device.answer);
    export.throttle().set(disk.limits);
    let in_use = DiskInUse {
        name: disk.name.clone(),
        transport: DiskCommand::Nbd.name(),
        backend: Arc::clone(&disk.backend),
        metrics: export.metrics(),
        throttle: export.throttle(),
        device: export.control(),
    };
    (export, in_use)
}

/// The server, and the places where its clients find its services.
struct Exports {
    server: Server,
    places: Vec<(ListenAddress, Uri)>,
    tls: Tls,
}

impl Exports {
    /// The service at a disk's place.
    fn service(&self, spec: &DiskSpec) -> Result<usize, String> {
        let wanted = place(spec)?;
        let mut places = self.places.iter();
        places
            .position(|(place, uri)| *place == wanted || uri.is_at(&wanted))
            .ok_or_else(|| {
                let places: Vec<_> = self.places.iter().map(|(_, uri)| uri.key()).collect();
                format!(
                    "disk '{}': a disk can be added where this daemon listens already: give {}",
                    spec.name(),
                    places.join(" or ")
                )
            })
    }
}

impl Exposure for Exports {
    fn check(&self, spec: &DiskSpec, others: &[DiskSpec]) -> Result<Option<PathBuf>, String> {
        let (service, name) = (self.service(spec)?, export_name(spec));
        let mut others = others.iter().filter(|other| export_name(other) == name);
        match others.any(|other| self.service(other) == Ok(service)) {
            true => Err(same_name(&name)),
            false => Ok(None),
        }
    }

    fn add(&mut self, spec: &DiskSpec, disk: &OpenDisk) -> Result<Added, String> {
        let service = self.service(spec)?;
        let (export, disk) = export(spec, disk);
        let name = export.name().to_owned();
        if !self.server.add(service, export) {
            return Err(same_name(&name));
        }
        let place = self.places[service].1.of(&name, &self.tls);
        Ok(Added { disk, place })
    }

    fn remove(&mut self, spec: &DiskSpec) -> Result<(), NotRemoved> {
        if let Ok(service) = self.service(spec) {
            self.server.remove(service, &export_name(spec));
        }
        Ok(())
    }

    /// The listener stays for the other disks.
    fn forget(&mut self, _spec: &DiskSpec) {}
}

/// The error for two disks that clients could not tell apart.
fn same_name(name: &str) -> String {
    format!("two disks at one address have the name '{name}': give one of them a serial=")
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
            return Err(same_name(&pair[0]));
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
    /// Whether it is this address, whose port the system may have chosen.
    fn is_at(&self, place: &ListenAddress) -> bool {
        match (self, place) {
            (Self::Tcp(address), ListenAddress::Tcp(wanted)) => address == wanted,
            _ => false,
        }
    }

    /// The keys of a disk that is served there.
    fn key(&self) -> String {
        match self {
            Self::Unix(path) => format!("socket={}", path.display()),
            Self::Tcp(address) => format!("port={},address={}", address.port(), address.ip()),
        }
    }

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

/// The URI of an export on a Unix socket.
pub(in crate::commands) fn unix_uri(socket: &Path, export: &str) -> String {
    Uri::Unix(socket.to_owned()).of(export, &Tls::Off)
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
