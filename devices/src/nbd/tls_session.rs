//! What a connection's wire needs of TLS, so that it is the same in a program without rustls.

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

/// The TLS state of a connection. It waits for nothing.
pub(super) trait TlsSession: Send {
    /// Whether the handshake goes on.
    fn is_shaking_hands(&self) -> bool;

    /// Takes decrypted bytes; [`WouldBlock`](io::ErrorKind::WouldBlock) if there are none.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize>;

    /// Encrypts a part of `slices`, as much as the send buffer holds; returns how many bytes.
    fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Whether encrypted bytes are to be sent.
    fn has_unsent(&self) -> bool;

    /// Sends encrypted bytes once.
    fn send(&mut self, socket: &mut Socket) -> io::Result<usize>;

    /// Receives encrypted bytes once; returns how many.
    fn receive(&mut self, socket: &mut Socket) -> io::Result<usize>;

    /// Decrypts the complete records; returns whether there are decrypted bytes.
    /// [`InvalidData`](io::ErrorKind::InvalidData): the alert that gives the reason is to be sent.
    fn decrypt(&mut self) -> io::Result<bool>;

    /// Adds the closure alert to what is to be sent.
    fn close(&mut self);
}
