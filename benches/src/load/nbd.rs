//! Closed loops over NBD: a client in this process with one connection. It uses only what every server supports: fixed
//! newstyle, OPT_GO, simple replies (the protocol's `doc/proto.md`).

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use super::loops::{Loops, NextRequest, Tally, Work};
use crate::session::Session;

/// Even on the slowest machine no request takes this long.
const REPLY_TIMEOUT: Duration = Duration::from_secs(600);

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
/// Client flags: fixed newstyle, no zeroes.
const CLIENT_FLAGS: u32 = 3;
const OPTION: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const GO: u32 = 7;
const ACK: u32 = 1;
const INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// The server supports FLUSH: it has a write cache.
pub const SEND_FLUSH: u16 = 1 << 2;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
/// Longest option reply that this client accepts.
const LONGEST_OPTION_REPLY: u32 = 64 << 10;

/// A connection in the transmission phase.
pub struct NbdClient {
    reader: BufReader<UnixStream>,
    writer: BufWriter<UnixStream>,
}

impl NbdClient {
    /// Connects, and chooses `export`. Also returns the export's transmission flags.
    ///
    /// # Errors
    /// If there is no server, or it has no such export.
    pub fn connect(socket: &Path, export: &str) -> io::Result<(Self, u16)> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        // Large enough for all requests in flight, so that they are sent in one call.
        let writer = BufWriter::with_capacity(256 << 10, stream.try_clone()?);
        let reader = BufReader::with_capacity(256 << 10, stream);
        let mut client = Self { reader, writer };
        let flags = client.choose(export)?;
        Ok((client, flags))
    }

    fn choose(&mut self, export: &str) -> io::Result<u16> {
        if &self.take::<16>()? != GREETING {
            return Err(io::Error::other("no NBD server answers there"));
        }
        self.take::<2>()?;
        let mut option = Vec::from(CLIENT_FLAGS.to_be_bytes());
        option.extend(OPTION.to_be_bytes());
        option.extend(GO.to_be_bytes());
        // Length and name of the export, and no requests for information.
        option.extend((export.len() as u32 + 6).to_be_bytes());
        option.extend((export.len() as u32).to_be_bytes());
        option.extend(export.as_bytes());
        option.extend([0, 0]);
        self.writer.write_all(&option)?;
        self.writer.flush()?;
        let mut flags = None;
        loop {
            let (magic, _option) = (self.take::<8>()?, self.take::<4>()?);
            let kind = u32::from_be_bytes(self.take()?);
            let length = u32::from_be_bytes(self.take()?);
            if u64::from_be_bytes(magic) != OPTION_REPLY || length > LONGEST_OPTION_REPLY {
                return Err(io::Error::other("the server's handshake is invalid"));
            }
            let mut data = vec![0; length as usize];
            self.reader.read_exact(&mut data)?;
            match (kind, data.as_slice()) {
                (ACK, _) => {
                    return flags.ok_or_else(|| io::Error::other("the server sends no flags"));
                }
                // The reply holds the information's number, the size and the flags.
                (INFO, &[a, b, .., c, d]) if u16::from_be_bytes([a, b]) == INFO_EXPORT => {
                    flags = Some(u16::from_be_bytes([c, d]));
                }
                (INFO, _) => {}
                (kind, _) => {
                    return Err(io::Error::other(format!("the server refuses ({kind:#x})")));
                }
            }
        }
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Runs all `loops`, with their requests in flight together.
    fn drive(mut self, mut loops: Loops) -> io::Result<Tally> {
        let mut running = loops.slots();
        let mut reads = vec![false; running];
        let mut data = vec![0x5a; loops.block()];
        for (slot, reads) in reads.iter_mut().enumerate() {
            let next = loops.begin(slot);
            *reads = matches!(next, NextRequest::Read(_));
            self.request(slot, next, &data)?;
        }
        while running > 0 {
            // After a batch of replies has been read, the next requests are sent in one call.
            if self.reader.buffer().is_empty() {
                self.writer.flush()?;
            }
            let magic = u32::from_be_bytes(self.take()?);
            let error = u32::from_be_bytes(self.take()?);
            let slot = u64::from_be_bytes(self.take()?) as usize;
            if magic != REPLY || slot >= reads.len() {
                return Err(io::Error::other("the server's reply is invalid"));
            }
            if error != 0 {
                // The protocol's error numbers are those of Linux.
                return Err(io::Error::from_raw_os_error(error as i32));
            }
            if reads[slot] {
                self.reader.read_exact(&mut data)?;
            }
            match loops.complete(slot) {
                Some(next) => {
                    reads[slot] = matches!(next, NextRequest::Read(_));
                    self.request(slot, next, &data)?;
                }
                None => running -= 1,
            }
        }
        Ok(loops.tally())
    }

    fn request(&mut self, slot: usize, next: NextRequest, data: &[u8]) -> io::Result<()> {
        let (command, offset, length): (u16, u64, u32) = match next {
            NextRequest::Read(offset) => (0, offset, data.len() as u32),
            NextRequest::Write(offset) => (1, offset, data.len() as u32),
            NextRequest::Flush => (3, 0, 0),
        };
        self.writer.write_all(&REQUEST.to_be_bytes())?;
        self.writer.write_all(&[0, 0])?;
        self.writer.write_all(&command.to_be_bytes())?;
        self.writer.write_all(&(slot as u64).to_be_bytes())?;
        self.writer.write_all(&offset.to_be_bytes())?;
        self.writer.write_all(&length.to_be_bytes())?;
        if let NextRequest::Write(_) = next {
            self.writer.write_all(data)?;
        }
        Ok(())
    }
}

/// Runs a thread for each of `clients`, each with `depth` requests of `work` in flight, on disks of `bytes` bytes. If the
/// session is interrupted they end at once, even those that wait for a reply.
///
/// # Errors
/// If a request fails, or no reply comes for ten minutes.
pub fn drive_all(
    clients: Vec<NbdClient>,
    (work, depth, bytes): (Work, usize, u64),
    turn: Duration,
    session: &Session,
) -> io::Result<Tally> {
    let streams = clients
        .iter()
        .map(|client| client.reader.get_ref().try_clone())
        .collect::<io::Result<Vec<_>>>()?;
    let tallies: Vec<io::Result<Tally>> = thread::scope(|scope| {
        let threads: Vec<_> = (1..)
            .zip(clients)
            .map(|(seed, client)| {
                scope.spawn(move || client.drive(Loops::new(work, depth, bytes, turn, seed)))
            })
            .collect();
        while !threads.iter().all(ScopedJoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(5));
            if session.interrupted() {
                for stream in &streams {
                    // Fails if the server has closed it, which is just as good.
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
        }
        let joined = threads.into_iter().map(ScopedJoinHandle::join);
        joined
            .map(|done| done.expect("a client's thread"))
            .collect()
    });
    let mut all = Tally::default();
    for tally in tallies {
        all.add(&tally?);
    }
    Ok(all)
}
