//! A connection's socket, bare or under TLS: reads and writes that never block.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::tls::TlsConfig;
use super::tls_session::{Socket, TlsSession};

/// Whether clients use TLS.
#[derive(Clone, Debug, Default)]
pub enum Tls {
    /// TLS is refused (NOTLS).
    #[default]
    Off,
    /// Clients may use TLS (SELECTIVETLS).
    Offered(TlsConfig),
    /// Clients must start TLS before they learn anything about exports (FORCEDTLS).
    Required(TlsConfig),
}

/// A non-blocking socket, with the TLS state if the connection is encrypted.
pub(super) struct Wire {
    socket: Socket,
    tls: Option<Box<dyn TlsSession>>,
    /// Whether there may be decrypted bytes that were not read yet.
    decrypted: bool,
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.0.as_fd()
    }
}

impl Wire {
    /// A connection without TLS over `socket`, which must be non-blocking.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket: Socket(socket),
            tls: None,
            decrypted: false,
        }
    }

    /// Switches the connection to TLS.
    ///
    /// # Errors
    /// If rustls refuses its configuration.
    pub(super) fn start_tls(&mut self, config: &TlsConfig) -> io::Result<()> {
        self.tls = Some(config.session()?);
        Ok(())
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    pub(super) fn is_shaking_hands(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_shaking_hands())
    }

    /// Reads and handles TLS handshake bytes once.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if the client has sent nothing;
    /// [`InvalidData`](io::ErrorKind::InvalidData) if the handshake fails, after an alert to the
    /// client; others if the client is gone.
    pub(super) fn shake_hands(&mut self) -> io::Result<()> {
        match self.decrypt()? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Reads from the socket once. 0: the client sends no more. Under TLS it need not send a
    /// closure alert first, since NBD messages carry their own lengths.
    ///
    /// # Errors
    /// As [`shake_hands`](Self::shake_hands).
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            return self.socket.read(bytes);
        };
        let mut read = tls.read(bytes);
        if matches!(&read, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            // Only once: a client that keeps sending empty records must not hold this thread.
            if self.decrypt()? == 0 {
                return Ok(0);
            }
            read = self.tls.as_mut().map_or(Ok(0), |tls| tls.read(bytes));
        }
        self.decrypted = matches!(read, Ok(read) if read == bytes.len());
        match read {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            read => read,
        }
    }

    /// Whether a read may return decrypted data although the socket is empty.
    pub(super) fn may_have_data(&self) -> bool {
        self.decrypted
    }

    /// Sends a part of `slices`; returns how many bytes.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if the socket takes none; others if the client is
    /// gone.
    pub(super) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush()?;
        let Some(tls) = &mut self.tls else {
            return self.socket.write_vectored(slices);
        };
        // rustls takes as much as its send buffer holds, which is 64 KiB.
        let written = if tls.has_unsent() {
            0
        } else {
            tls.write(slices)?
        };
        if written == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.flush()?;
        Ok(written)
    }

    /// Whether encrypted bytes wait for the socket to take them.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Sends as many encrypted bytes as the socket takes.
    ///
    /// # Errors
    /// If the client is gone.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return Ok(());
        };
        while tls.has_unsent() {
            match tls.send(&mut self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends the TLS closure alert, if there is TLS and the socket takes it at once.
    pub(super) fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close();
            let _ = self.flush();
        }
    }

    /// Reads encrypted bytes once and decrypts the complete records. 0: the client sends no more.
    fn decrypt(&mut self) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else {
            return Ok(0);
        };
        self.decrypted = false;
        let read = tls.receive(&mut self.socket)?;
        match tls.decrypt() {
            // Application data may arrive together with the end of the handshake.
            Ok(decrypted) => self.decrypted = decrypted,
            Err(error) => {
                // Sends the alert that tells the client why.
                let _ = self.flush();
                return Err(error);
            }
        }
        Ok(read)
    }
}

impl Tls {
    /// Whether the client must start TLS before anything else and has not done so.
    pub(super) fn forbids(&self, wire: &Wire) -> bool {
        matches!(self, Self::Required(_)) && !wire.is_encrypted()
    }
}
