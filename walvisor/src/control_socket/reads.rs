//! Reads of a disk as of a point, on a socket of their own: a file of a guest is taken out of it
//! without a copy of the disk.
//!
//! ```text
//!   walvisor ctl restore --file ── request, and one end of a socket pair ──▶ this process
//!          ◀── size of the disk u64, length of its name u32, its name ──
//!          ── offset u64, length u32 ──▶
//!          ◀── so many bytes ──          ... until the client closes its end
//! ```
//! Numbers are little-endian. A read that fails closes the socket; the request's answer says why.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Waiter, WakeReason};
use walvisor_storage::PointReader;

/// Bytes of a read at most.
pub const MOST_READ: u32 = 1 << 20;
/// Bytes of the request for a read.
const REQUEST: usize = 12;
/// How often the log gets a chance to make room while the client is silent.
const PERIOD: Duration = Duration::from_millis(5);

/// The end of a socket pair on which a client asks for reads.
pub(super) struct ReadClient {
    /// Read and written as a file: no filter of system calls has to allow more.
    stream: File,
    waiter: Waiter,
}

impl ReadClient {
    pub(super) fn new(socket: OwnedFd, stop: &Stop) -> io::Result<Self> {
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        let waiter = Waiter::new(&stream, stop)?;
        let stream = File::from(OwnedFd::from(stream));
        Ok(Self { stream, waiter })
    }

    /// Answers the client's reads. `note` gets the bytes of each, and 0 now and then, and says
    /// whether to go on.
    pub(super) fn serve(
        &mut self,
        name: &str,
        reader: &mut PointReader<'_>,
        note: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<()> {
        let (size, len) = (reader.bytes(), name.len() as u32);
        let first = [&size.to_le_bytes()[..], &len.to_le_bytes(), name.as_bytes()].concat();
        self.pass(reader, note, &mut StreamBytes::Out(&first))?;
        let mut bytes = Vec::new();
        loop {
            let mut request = [0; REQUEST];
            if !self.pass(reader, note, &mut StreamBytes::In(&mut request))? {
                return Ok(());
            }
            let (at, len) = request.split_at(8);
            let at = u64::from_le_bytes(at.try_into().map_err(io::Error::other)?);
            let len = u32::from_le_bytes(len.try_into().map_err(io::Error::other)?);
            if len > MOST_READ {
                let why = format!("a read of {len} bytes: ask for at most {MOST_READ}");
                return Err(io::Error::new(ErrorKind::InvalidInput, why));
            }
            bytes.resize(len as usize, 0);
            let read = reader.read(&mut bytes, at, &mut || note(0));
            read.map_err(io::Error::other)?;
            self.pass(reader, note, &mut StreamBytes::Out(&bytes))?;
            if !note(len.into()) {
                return Err(io::Error::other("it was given up"));
            }
        }
    }

    /// Passes all of the bytes, and lets the log make room while the client does nothing. `false`:
    /// the client has closed the socket before the first of them.
    fn pass(
        &mut self,
        reader: &mut PointReader<'_>,
        note: &mut dyn FnMut(u64) -> bool,
        passed: &mut StreamBytes<'_>,
    ) -> io::Result<bool> {
        let mut done = 0;
        while done < passed.len() {
            let (count, event) = match passed {
                StreamBytes::In(bytes) => (self.stream.read(&mut bytes[done..]), EventSet::IN),
                StreamBytes::Out(bytes) => (self.stream.write(&bytes[done..]), EventSet::OUT),
            };
            match count {
                Ok(0) if done == 0 => return Ok(false),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    done += count;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let until = Instant::now() + PERIOD;
            match self.waiter.wait(&self.stream, event, Some(until))? {
                WakeReason::Stopped => {
                    return Err(io::Error::other("the process ends"));
                }
                WakeReason::TimedOut => {
                    reader.give_way().map_err(io::Error::other)?;
                    if !note(0) {
                        return Err(io::Error::other("it was given up"));
                    }
                }
                WakeReason::Ready | WakeReason::Message => {}
            }
        }
        Ok(true)
    }
}

/// Bytes to read from a stream, or to write to it.
enum StreamBytes<'a> {
    In(&'a mut [u8]),
    Out(&'a [u8]),
}

impl StreamBytes<'_> {
    fn len(&self) -> usize {
        match self {
            Self::In(bytes) => bytes.len(),
            Self::Out(bytes) => bytes.len(),
        }
    }
}
