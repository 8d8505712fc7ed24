//! The NBD door: each disk is an export.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use walvisor_devices::nbd::{Export, Listener, Server, Service, Tls, TlsConfig};
use walvisor_vmm::disk::{DiskInUse, OpenDisk};

use super::door::{Door, Removal};
use crate::commands::CommandError;
use crate::commands::socket::Sockets;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{AddedDisk, RemovalError};
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::plan::real_path;

/// TLS of NBD disks.
#[derive(Args, Debug)]
#[command(next_help_heading = "TLS")]
pub struct TlsArguments {
    /// Whether clients can or must use TLS [default: require with certificates, else off]
    #[arg(long, value_name = "MODE", value_enum)]
    pub tls: Option<TlsMode>,
    /// Directory with server-cert.pem and server-key.pem, and for --tls-verify-peer ca-cert.pem
    /// (and ca-crl.pem)
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

impl TlsArguments {
    /// Whether any of the arguments was given.
    pub(super) fn is_given(&self) -> bool {
        self.tls.is_some() || self.tls_certificates.is_some()
    }

    /// Reads the certificates.
    pub(super) fn read(&self) -> Result<Tls, CommandError> {
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

enum Uri {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// The NBD server, and where its clients find it.
pub(super) struct NbdDoor {
    tls: Tls,
    /// The addresses, in the order of the disks that name them first. Each is a service of the
    /// server.
    places: Vec<(ListenAddress, Uri)>,
    /// The services to start the server with.
    services: Vec<Service>,
    server: Option<Arc<Server>>,
}

impl NbdDoor {
    pub(super) fn new(tls: Tls) -> Self {
        Self {
            tls,
            places: Vec::new(),
            services: Vec::new(),
            server: None,
        }
    }

    /// The number of the service at a disk's address.
    fn service(&self, spec: &DiskSpec) -> Result<usize, String> {
        let wanted = place(spec)?;
        let mut places = self.places.iter();
        places
            .position(|(place, uri)| *place == wanted || uri.is_at(&wanted))
            .ok_or_else(|| {
                let places: Vec<_> = self.places.iter().map(|(_, uri)| uri.key()).collect();
                format!(
                    "disk '{}': a disk can be added only where this daemon listens already: give \
                     {}",
                    spec.name(),
                    places.join(" or ")
                )
            })
    }
}

impl Door for NbdDoor {
    fn check(&self, specs: &[DiskSpec]) -> Result<(), String> {
        let mut exports = Vec::new();
        for spec in specs {
            let export = (place(spec)?, export_name(spec));
            if exports.contains(&export) {
                return Err(same_name(&export.1));
            }
            exports.push(export);
        }
        Ok(())
    }

    fn bind(
        &mut self,
        specs: &[DiskSpec],
        sockets: &mut Sockets,
        names: &mut SocketNames,
    ) -> Result<(), CommandError> {
        for spec in specs {
            let place = place(spec).map_err(CommandError::Usage)?;
            if self.places.iter().any(|(known, _)| *known == place) {
                continue;
            }
            let (listener, uri) = bind(&place, sockets, names)?;
            self.places.push((place, uri));
            self.services.push(Service {
                listener,
                exports: Vec::new(),
                tls: self.tls.clone(),
            });
        }
        Ok(())
    }

    fn check_added(&self, spec: &DiskSpec, others: &[DiskSpec]) -> Result<Option<PathBuf>, String> {
        let (service, name) = (self.service(spec)?, export_name(spec));
        let mut others = others.iter().filter(|other| export_name(other) == name);
        if others.any(|other| self.service(other) == Ok(service)) {
            Err(same_name(&name))
        } else {
            Ok(None)
        }
    }

    fn add(&mut self, spec: &DiskSpec, disk: &OpenDisk) -> Result<AddedDisk, String> {
        let service = self.service(spec)?;
        let (export, disk) = export(spec, disk);
        let name = export.name().to_owned();
        match &self.server {
            None => self.services[service].exports.push(export),
            Some(server) if server.add(service, export) => {}
            Some(_) => return Err(same_name(&name)),
        }
        let place = self.places[service].1.of(&name, &self.tls);
        Ok(AddedDisk { disk, place })
    }

    fn start(&mut self) -> Result<(), CommandError> {
        assert!(self.server.is_none(), "a door is opened once");
        assert_eq!(self.services.len(), self.places.len(), "a service a place");
        let server = Server::start(std::mem::take(&mut self.services));
        self.server = Some(Arc::new(server.map_err(CommandError::failed)?));
        Ok(())
    }

    fn remove(&mut self, spec: &DiskSpec) -> Result<Removal, RemovalError> {
        let (server, service) = (self.server.clone(), self.service(spec));
        let name = export_name(spec);
        Ok(Box::new(move || {
            if let (Some(server), Ok(service)) = (server, service) {
                server.remove(service, &name);
            }
            Ok(())
        }))
    }

    fn stop(&mut self) -> Result<(), CommandError> {
        self.services.clear();
        self.server = None;
        Ok(())
    }
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

/// The error for two disks that NBD clients could not tell apart.
fn same_name(name: &str) -> String {
    format!("two disks at one address have the name '{name}': give one of them a serial=")
}

fn place(spec: &DiskSpec) -> Result<ListenAddress, String> {
    match (&spec.socket, spec.port) {
        (Some(path), _) => Ok(ListenAddress::Unix(real_path(path))),
        (None, Some(port)) => Ok(ListenAddress::Tcp(SocketAddr::new(spec.address, port))),
        (None, None) => Err(format!(
            "disk '{}' has no address to be served at: give socket=PATH, or port=N (10809 is \
             usual)",
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
) -> Result<(Listener, Uri), CommandError> {
    match place {
        ListenAddress::Unix(path) => {
            let listener = sockets.unix(path, names)?;
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            Ok((Listener::Unix(listener), Uri::Unix(absolute)))
        }
        ListenAddress::Tcp(address) => {
            let listener = sockets.tcp(*address)?;
            // With port 0 the system has chosen the port.
            let address = listener.local_addr().map_err(CommandError::failed)?;
            Ok((Listener::Tcp(listener), Uri::Tcp(address)))
        }
    }
}

impl Uri {
    /// Whether it is this address, including one whose port the system chose.
    fn is_at(&self, place: &ListenAddress) -> bool {
        match (self, place) {
            (Self::Tcp(address), ListenAddress::Tcp(wanted)) => address == wanted,
            _ => false,
        }
    }

    /// The keys that put a disk there.
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

    fn parse(texts: &[&str]) -> Vec<DiskSpec> {
        let specs = texts.iter();
        let specs = specs.map(|text| DiskSpec::parse(text, DiskCommand::Nbd).unwrap());
        specs.collect()
    }

    #[test]
    fn disks_at_one_address_share_a_listener() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let (socket, other) = (socket.display(), dir.path().display());
        let specs = parse(&[
            "path=a,port=0",
            &format!("path=b,socket={socket}"),
            "path=c,port=0,address=127.0.0.1",
            &format!("path=d,socket={other}/./s"),
        ]);
        let mut door = NbdDoor::new(Tls::Off);
        door.check(&specs).unwrap();
        let mut sockets = Sockets::take(0o600).unwrap();
        let mut names = SocketNames::default();
        door.bind(&specs, &mut sockets, &mut names).unwrap();
        let services: Vec<_> = specs
            .iter()
            .map(|spec| door.service(spec).unwrap())
            .collect();
        assert_eq!(services, [0, 1, 0, 1]);
        assert_eq!(door.services.len(), 2);
    }

    #[test]
    fn a_disk_without_an_address_or_name_of_its_own_is_refused() {
        for (texts, part) in [
            (&["path=a"][..], "give socket=PATH, or port=N"),
            (
                &["path=x/a,socket=s", "path=y/a,socket=s"],
                "have the name 'a'",
            ),
        ] {
            let error = NbdDoor::new(Tls::Off).check(&parse(texts)).unwrap_err();
            assert!(error.contains(part), "{texts:?}: {error}");
        }
    }

    #[test]
    fn uris_escape_paths_and_names() {
        let uri = Uri::Unix(PathBuf::from("/run/a b&c"));
        assert_eq!(
            uri.of("d?.img", &Tls::Off),
            "nbd+unix:///d%3F.img?socket=/run/a%20b%26c"
        );
        let uri = Uri::Tcp("[::1]:9".parse().unwrap());
        assert_eq!(uri.of("", &Tls::Off), "nbd://[::1]:9/");
    }
}
