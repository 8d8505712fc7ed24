//! TLS 1.2 and 1.3, by rustls. Certificates are laid out as QEMU, libvirt and nbdkit expect (the
//! NBD protocol, "TLS support").

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use super::tls_session::{Socket, TlsSession};

/// The server's key and certificates.
#[derive(Clone)]
pub struct TlsConfig {
    server: Arc<ServerConfig>,
}

/// Why TLS cannot be set up, with the file that is to blame.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct TlsError {
    path: PathBuf,
    reason: PemError,
}

/// What is wrong with a file of keys or certificates.
#[derive(Debug, thiserror::Error)]
enum PemError {
    #[error(
        "{0}: the directory needs server-cert.pem and server-key.pem, and ca-cert.pem to verify \
         clients"
    )]
    Io(#[from] io::Error),
    #[error("{0}: `openssl pkcs8 -topk8 -nocrypt` converts a key to a supported format")]
    Key(rustls::Error),
    #[error("it is not a PEM file: {0}")]
    Pem(pem::Error),
    #[error("it lacks the required PEM section: {0}")]
    Missing(&'static str),
    #[error("{0}")]
    Tls(#[from] rustls::Error),
    #[error("{0}")]
    Verifier(#[from] VerifierBuilderError),
}

impl TlsConfig {
    /// Reads `server-cert.pem` and `server-key.pem` in `directory`. With `verify_peer` a client
    /// must present a certificate that is signed by one in `ca-cert.pem` and not revoked by
    /// `ca-crl.pem`, if that file exists.
    ///
    /// # Errors
    /// If a file cannot be read or used.
    pub fn from_directory(directory: &Path, verify_peer: bool) -> Result<Self, TlsError> {
        let at = |name: &str| directory.join(name);
        let (cert, key) = (at("server-cert.pem"), at("server-key.pem"));
        let chain: Vec<CertificateDer<'static>> = sections(&cert, "CERTIFICATE")?;
        let private = PrivateKeyDer::from_pem_file(&key);
        let private = private.map_err(|error| failed(&key, error, "PRIVATE KEY"))?;
        let provider = Arc::new(ring::default_provider());
        // Checks the key here, because `with_single_cert` would blame the certificate for a bad
        // key.
        let loaded = provider.key_provider.load_private_key(private.clone_key());
        loaded.map_err(|error| TlsError {
            path: key,
            reason: PemError::Key(error),
        })?;
        let refused = |path: &Path| {
            let path = path.to_owned();
            move |error: rustls::Error| TlsError {
                path,
                reason: error.into(),
            }
        };
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(refused(directory))?;
        let builder = if verify_peer {
            let ca = at("ca-cert.pem");
            let mut roots = RootCertStore::empty();
            for root in sections(&ca, "CERTIFICATE")? {
                roots.add(root).map_err(refused(&ca))?;
            }
            let mut verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let crl = at("ca-crl.pem");
            if crl.exists() {
                let lists: Vec<CertificateRevocationListDer<'static>> = sections(&crl, "X509 CRL")?;
                verifier = verifier.with_crls(lists);
            }
            let verifier = verifier.build().map_err(|error| TlsError {
                path: match error {
                    VerifierBuilderError::InvalidCrl(_) => crl,
                    _ => ca,
                },
                reason: error.into(),
            })?;
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let server = builder
            .with_single_cert(chain, private)
            .map_err(refused(&cert))?;
        Ok(Self {
            server: Arc::new(server),
        })
    }

    /// A connection's TLS state, before the handshake.
    ///
    /// # Errors
    /// If rustls refuses its configuration.
    pub(super) fn session(&self) -> io::Result<Box<dyn TlsSession>> {
        let connection = ServerConnection::new(Arc::clone(&self.server));
        Ok(Box::new(connection.map_err(invalid)?))
    }
}

impl TlsSession for ServerConnection {
    fn is_shaking_hands(&self) -> bool {
        self.is_handshaking()
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.reader().read(bytes)
    }

    fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.writer().write_vectored(slices)
    }

    fn has_unsent(&self) -> bool {
        self.wants_write()
    }

    fn send(&mut self, socket: &mut Socket) -> io::Result<usize> {
        self.write_tls(socket)
    }

    fn receive(&mut self, socket: &mut Socket) -> io::Result<usize> {
        self.read_tls(socket)
    }

    fn decrypt(&mut self) -> io::Result<bool> {
        let state = self.process_new_packets().map_err(invalid)?;
        Ok(state.plaintext_bytes_to_read() > 0)
    }

    fn close(&mut self) {
        self.send_close_notify();
    }
}

fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The private key must not be printed.
        f.write_str("TlsConfig")
    }
}

/// All sections of one kind in a file; at least one.
fn sections<T: PemObject>(path: &Path, kind: &'static str) -> Result<Vec<T>, TlsError> {
    let all = T::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match all {
        Ok(all) if all.is_empty() => Err(failed(path, pem::Error::NoItemsFound, kind)),
        Ok(all) => Ok(all),
        Err(error) => Err(failed(path, error, kind)),
    }
}

fn failed(path: &Path, error: pem::Error, kind: &'static str) -> TlsError {
    let reason = match error {
        pem::Error::Io(error) => PemError::Io(error),
        pem::Error::NoItemsFound => PemError::Missing(kind),
        error => PemError::Pem(error),
    };
    TlsError {
        path: path.to_owned(),
        reason,
    }
}
