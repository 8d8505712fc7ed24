//! The NBD path: a daemon, and a small client in this process with a thread and a connection for each queue. The
//! client uses only the parts of the protocol that every server supports: fixed newstyle, OPT_GO, simple replies (its
//! `doc/proto.md`).

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use walvisor::commands::CommandError;
use walvisor::processor_time::of_host;

use super::place::Directories;
use crate::daemon::{Daemon, spec};
use crate::load::loops::{Loops, Next, Tally};
use crate::load::measured::Measured;
use crate::load::point::{BLOCK, BackendKind, DISK_BYTES, Point};

/// No request takes this long on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(30);

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
const SEND_FLUSH: u16 = 1 << 2;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
/// Longest option reply that this client accepts.
const LONGEST_OPTION_REPLY: u32 = 64 << 10;

/// A daemon, and the path of its socket.
pub struct NbdDoor {
    daemon: Daemon,
    socket: PathBuf,
}

impl NbdDoor {
    /// Serves the disks of `backends` under their names.
    ///
    /// # Errors
    /// If the disks cannot be made or served.
    pub fn open(place: &Directories, backends: &[BackendKind]) -> Result<Self, CommandError> {
        let image = place.image("nbd", backends)?;
        let socket = place.sockets().join("nbd.sock");
        let specs: Vec<String> = backends
            .iter()
            .map(|&backend| spec(backend, &image, &socket))
            .collect();
        let daemon = Daemon::start("nbd", &specs, place.images(), place.sockets())?;
        Ok(Self { daemon, socket })
    }

    /// Measures `point` once.
    ///
    /// # Errors
    /// If a request fails or the daemon has ended.
    pub fn measure(&mut self, point: &Point, turn: Duration) -> Result<Measured, CommandError> {
        if point.counts_syncs() {
            self.daemon.checkpoint()?;
        }
        let failed = |error: io::Error| CommandError::Failed(format!("nbd: {error}"));
        let mut clients = Vec::new();
        let mut sends_flush = true;
        for _ in 0..point.queues {
            let (client, flags) =
                Client::connect(&self.socket, point.backend.name()).map_err(failed)?;
            sends_flush &= flags & SEND_FLUSH != 0;
            clients.push(client);
        }
        let (before, cpu, host) = (
            self.daemon.disk(point.backend)?,
            self.daemon.cpu(),
            of_host(),
        );
        let began = Instant::now();
        let tallies: Vec<io::Result<Tally>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (1..)
                .zip(clients)
                .map(|(seed, client)| scope.spawn(move || client.drive(point, turn, seed)))
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|done| done.expect("a client's thread"))
                .collect()
        });
        let time = began.elapsed();
        let (cpu_after, host_after) = (self.daemon.cpu(), of_host());
        let after = self.daemon.disk(point.backend)?;
        let mut all = Tally::default();
        for tally in tallies {
            all.histogram.add(&tally.map_err(failed)?.histogram);
        }
        all.time = time;
        Ok(Measured {
            cpu: cpu_after.zip(cpu).map(|(after, before)| after - before),
            host_cpu: host_after.zip(host).map(|(after, before)| after - before),
            syncs: after.syncs - before.syncs,
            // The protocol shows whether there is a cache to flush. Only the daemon shows whether that cache is on.
            write_cache: sends_flush && after.writeback,
            ..all.measured()
        })
    }
}

/// A connection in the transmission phase.
struct Client {
    reader: BufReader<UnixStream>,
    writer: BufWriter<UnixStream>,
}

impl Client {
    /// Connects, and chooses `export`. Also returns the export's transmission flags.
    fn connect(socket: &Path, export: &str) -> io::Result<(Self, u16)> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        // The buffer holds a full depth of requests, so that they are sent in one call.
        let writer = BufWriter::with_capacity(256 << 10, stream.try_clone()?);
        let reader = BufReader::with_capacity(256 << 10, stream);
        let mut client = Self { reader, writer };
        let flags = client.choose(export)?;
        Ok((client, flags))
    }

    fn choose(&mut self, export: &str) -> io::Result<u16> {
        if &self.take::<16>()? != GREETING {
            return Err(io::Error::other("what answers there is no NBD server"));
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
                return Err(io::Error::other("the server's handshake makes no sense"));
            }
            let mut data = vec![0; length as usize];
            self.reader.read_exact(&mut data)?;
            match (kind, data.as_slice()) {
                (ACK, _) => {
                    return flags.ok_or_else(|| io::Error::other("the server tells no flags"));
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

    /// Runs closed loops, as many as the point's depth.
    fn drive(mut self, point: &Point, turn: Duration, seed: u64) -> io::Result<Tally> {
        let mut running = usize::from(point.iodepth);
        let mut loops = Loops::new(point.job, running, DISK_BYTES, turn, seed);
        let mut reads = vec![false; running];
        let mut data = [0; BLOCK];
        for (slot, reads) in reads.iter_mut().enumerate() {
            let next = loops.begin(slot);
            *reads = matches!(next, Next::Read(_));
            self.request(slot, next)?;
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
                return Err(io::Error::other("the server's reply makes no sense"));
            }
            if error != 0 {
                // The protocol's error numbers are those of Linux.
                return Err(io::Error::from_raw_os_error(error as i32));
            }
            if reads[slot] {
                self.reader.read_exact(&mut data)?;
            }
            match loops.ended(slot) {
                Some(next) => {
                    reads[slot] = matches!(next, Next::Read(_));
                    self.request(slot, next)?;
                }
                None => running -= 1,
            }
        }
        Ok(loops.tally())
    }

    fn request(&mut self, slot: usize, next: Next) -> io::Result<()> {
        let (command, offset, length): (u16, u64, u32) = match next {
            Next::Read(offset) => (0, offset, BLOCK as u32),
            Next::Write(offset) => (1, offset, BLOCK as u32),
            Next::Flush => (3, 0, 0),
        };
        self.writer.write_all(&REQUEST.to_be_bytes())?;
        self.writer.write_all(&[0, 0])?;
        self.writer.write_all(&command.to_be_bytes())?;
        self.writer.write_all(&(slot as u64).to_be_bytes())?;
        self.writer.write_all(&offset.to_be_bytes())?;
        self.writer.write_all(&length.to_be_bytes())?;
        if let Next::Write(_) = next {
            self.writer.write_all(&[0x5a; BLOCK])?;
        }
        Ok(())
    }
}
