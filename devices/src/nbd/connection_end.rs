//! Why a connection ended, and how that is logged.

use std::io;

use rustix::io::Errno;

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionEnd {
    /// The client left, or the server is stopping. Not an error.
    #[error("the connection has ended")]
    Gone,
    /// The client broke the protocol.
    #[error("{0}")]
    Broken(&'static str),
    /// Others waited for the memory that the client held.
    #[error("it held {0} bytes of requests and unread replies while others waited for memory")]
    Greedy(u64),
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] io::Error),
}

impl From<Errno> for ConnectionEnd {
    fn from(error: Errno) -> Self {
        Self::Socket(error.into())
    }
}

/// Logs why a connection has ended, unless it was closed as usual.
pub(super) fn report(outcome: Result<(), ConnectionEnd>) {
    match outcome {
        Err(ConnectionEnd::Socket(error)) if error.kind() == io::ErrorKind::InvalidData => {
            tracing::warn!("an NBD client was disconnected: TLS: {error}");
        }
        Err(end @ (ConnectionEnd::Broken(_) | ConnectionEnd::Greedy(_))) => {
            tracing::warn!("an NBD client was disconnected: {end}");
        }
        Err(ConnectionEnd::Socket(error)) => tracing::info!("an NBD client is gone: {error}"),
        Ok(()) | Err(ConnectionEnd::Gone) => {}
    }
}
