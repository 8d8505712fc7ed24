//! Closed loops over NBD: a client in this process with one connection. It uses only what every
//! server supports: fixed newstyle, OPT_GO, simple replies (the protocol's `doc/proto.md`).

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use walvisor_testkit::nbd::{FLUSH, READ, WRITE, go, greet, request, simple_reply};

use super::loops::{Loops, NextRequest, Tally, Work};
use crate::session::Session;

/// Even on the slowest machine no request takes this long.
const REPLY_TIMEOUT: Duration = Duration::from_secs(600);

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
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        greet(&mut stream)?;
        let flags = go(&mut stream, export)?;
        // Large enough for all requests in flight, so that they are sent in one call.
        let writer = BufWriter::with_capacity(256 << 10, stream.try_clone()?);
        let reader = BufReader::with_capacity(256 << 10, stream);
        Ok((Self { reader, writer }, flags))
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
            let (error, slot) = simple_reply(&mut self.reader)?;
            let slot = slot as usize;
            if slot >= reads.len() {
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
        let length = data.len() as u32;
        let header = match next {
            NextRequest::Read(offset) => request(0, READ, slot as u64, offset, length),
            NextRequest::Write(offset) => request(0, WRITE, slot as u64, offset, length),
            NextRequest::Flush => request(0, FLUSH, slot as u64, 0, 0),
        };
        self.writer.write_all(&header)?;
        if let NextRequest::Write(_) = next {
            self.writer.write_all(data)?;
        }
        Ok(())
    }
}

/// Runs a thread for each of `clients`, each with `depth` requests of `work` in flight, on disks of
/// `bytes` bytes. If the session is interrupted they end at once, even those that wait for a reply.
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
