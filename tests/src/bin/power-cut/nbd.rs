//! A client of `walvisor serve nbd` with one request in flight.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection to one disk.
pub struct Nbd {
    stream: UnixStream,
}

/// The types of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Request {
    Read = 0,
    Write = 1,
    Flush = 3,
    Trim = 4,
    WriteZeroes = 6,
}

impl Nbd {
    /// Connects to the disk `name` (`NBD_OPT_EXPORT_NAME`).
    pub fn connect(socket: &Path, name: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        let mut greeting = [0; 18];
        read(&mut stream, &mut greeting, "the server's greeting")?;
        if !greeting.starts_with(b"NBDMAGICIHAVEOPT") {
            return Err(io::Error::other("this is no NBD server"));
        }
        // The client's flags: fixed newstyle, no zero padding after the answer.
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT\0\0\0\x01");
        hello.extend((name.len() as u32).to_be_bytes());
        hello.extend(name.bytes());
        stream.write_all(&hello)?;
        // The export's size and flags.
        read(&mut stream, &mut [0; 10], "the export's size")?;
        Ok(Self { stream })
    }

    /// Sends a request and waits for its end. `data` holds the data of a WRITE and receives the data of a READ, and
    /// its length is the request's length. For other requests the length is `len`. With `fua` the request is durable
    /// when it ends.
    pub fn end(
        &mut self,
        request: Request,
        offset: u64,
        len: usize,
        data: &mut [u8],
        fua: bool,
    ) -> io::Result<()> {
        let mut message = 0x2560_9513u32.to_be_bytes().to_vec();
        message.extend(u16::from(fua).to_be_bytes());
        message.extend((request as u16).to_be_bytes());
        message.extend(0u64.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend((len as u32).to_be_bytes());
        if request == Request::Write {
            message.extend(&*data);
        }
        self.stream.write_all(&message)?;
        let mut answer = [0; 16];
        read(&mut self.stream, &mut answer, "a reply")?;
        match u32::from_be_bytes(answer[4..8].try_into().expect("four bytes")) {
            0 if request == Request::Read => read(&mut self.stream, data, "the data of a READ"),
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error as i32)),
        }
    }
}

/// Reads all of `bytes`; an error says what they should have been.
fn read(stream: &mut UnixStream, bytes: &mut [u8], what: &str) -> io::Result<()> {
    let told = |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
    stream.read_exact(bytes).map_err(told)
}
