//! What a connection needs from TLS, so that its code is the same in a program without rustls.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::OwnedFd;

/// The bare socket, non-blocking.
pub(super) struct Socket(pub(super) OwnedFd);

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.0, bytes)?)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(&self.0, bytes)?)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(&self.0, slices)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The TLS state of a connection. No call blocks.
pub(super) trait TlsSession: Send {
    /// Whether the handshake is still going on.
    fn is_shaking_hands(&self) -> bool;

    /// Reads decrypted bytes; [`WouldBlock`](io::ErrorKind::WouldBlock) if there are none.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize>;

    /// Encrypts as much of `slices` as the send buffer holds, and returns how many bytes that is.
    fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Whether there are encrypted bytes to send.
    fn has_unsent(&self) -> bool;

    /// Sends encrypted bytes once.
    fn send(&mut self, socket: &mut Socket) -> io::Result<usize>;

    /// Receives encrypted bytes once; returns how many.
    fn receive(&mut self, socket: &mut Socket) -> io::Result<usize>;

    /// Decrypts the complete records; returns whether there are decrypted bytes. On
    /// [`InvalidData`](io::ErrorKind::InvalidData) the caller has to send the alert that tells the
    /// client why.
    fn decrypt(&mut self) -> io::Result<bool>;

    /// Queues the closure alert for sending.
    fn close(&mut self);
}
