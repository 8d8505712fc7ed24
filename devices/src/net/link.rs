//! What carries a device's frames: a stream of frames to another program, or a tap device.
//!
//! ```text
//!   stream:  length u32, big-endian │ frame │ length │ frame …     passt, and QEMU's `-netdev stream`
//!   tap:     a read or a write is a frame
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

/// Length of the number before each frame of a stream, in bytes.
const PREFIX: usize = size_of::<u32>();
/// The longest frame of a stream. A larger number means that the two ends are out of step.
const MOST_FRAME: usize = 0xffff + super::ETHERNET_LEN;
/// Bytes of a stream that are read at once. Any frame fits.
const READ_BUFFER: usize = 128 << 10;
/// Bytes that wait for a stream to take them; one frame may exceed it.
const WRITE_BUFFER: usize = 64 << 10;

/// TUNSETIFF and TUNSETOFFLOAD (linux/if_tun.h).
const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Stream,
    Tap,
}

/// The other end of a device's cable.
#[derive(Debug)]
pub struct Link {
    name: String,
    file: File,
    framing: Framing,
    rest: Arc<Mutex<StreamRemainder>>,
}

/// What a device that is gone had read or wanted to write of a stream. The next one goes on there,
/// or the two ends would be out of step.
#[derive(Debug, Default)]
struct StreamRemainder {
    /// Bytes that were read and not consumed.
    received: Vec<u8>,
    /// Bytes that the link has not taken.
    pending: Vec<u8>,
}

impl Link {
    /// Another descriptor of the same link, for a device that comes after this one: it goes on
    /// within the frame in which this one's ended.
    ///
    /// # Errors
    /// If the system refuses the descriptor.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            name: self.name.clone(),
            file: self.file.try_clone()?,
            framing: self.framing,
            rest: Arc::clone(&self.rest),
        })
    }

    /// A program at the other end of a stream socket, which puts each frame's length before it, as
    /// 32 bits in network order: passt, and QEMU's `-netdev stream`.
    ///
    /// # Errors
    /// If the socket cannot be set not to block.
    pub fn stream(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            name: "stream".to_owned(),
            file: File::from(OwnedFd::from(socket)),
            framing: Framing::Stream,
            rest: Arc::default(),
        })
    }

    /// Opens the tap device `interface`. It is made if it does not exist, which takes
    /// CAP_NET_ADMIN; one that exists has to be a tap device of this user, or takes CAP_NET_ADMIN
    /// too. Nobody gives it an address or puts it into a bridge.
    ///
    /// # Errors
    /// If the name is no name of an interface, or the system refuses.
    pub fn tap(interface: &str) -> io::Result<Self> {
        // SAFETY: zero bytes are a valid value of each field.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // The last byte stays zero.
        let room = request.ifr_name.len() - 1;
        if !(1..=room).contains(&interface.len()) || interface.contains(['/', '\0', '%']) {
            let most = format!("a name of an interface has 1 to {room} bytes, without '/' and '%'");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, most));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")?;
        // SAFETY: the descriptor is open, and `request` is what TUNSETIFF reads and writes.
        if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &mut request) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // A tap device that was used before may still pass segments that a driver without offloads
        // cannot take. SAFETY: the descriptor is open, and TUNSETOFFLOAD takes a number.
        if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            name: format!("tap {interface}"),
            file,
            framing: Framing::Tap,
            rest: Arc::default(),
        })
    }

    /// Names the link in messages.
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The two directions, each with a descriptor of its own.
    pub(super) fn split(self, max_frame: usize) -> io::Result<(FrameReceiver, FrameSender)> {
        let before = std::mem::take(&mut *lock(&self.rest));
        let mut buffer = before.received;
        let end = buffer.len();
        buffer.resize(READ_BUFFER, 0);
        let mut pending = before.pending;
        pending.reserve(WRITE_BUFFER + PREFIX + max_frame);
        let receiver = FrameReceiver {
            file: self.file.try_clone()?,
            framing: self.framing,
            buffer,
            start: 0,
            end,
            max_frame,
            rest: Arc::clone(&self.rest),
        };
        let sender = FrameSender {
            file: self.file,
            framing: self.framing,
            pending,
            rest: self.rest,
        };
        Ok((receiver, sender))
    }
}

fn lock(rest: &Mutex<StreamRemainder>) -> std::sync::MutexGuard<'_, StreamRemainder> {
    // No panic leaves it half changed.
    rest.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a receiver has.
pub(super) enum ReceiveOutcome<'a> {
    Frame(&'a [u8]),
    /// A frame that is longer than any that the driver takes.
    TooLong,
    /// Nothing now.
    Nothing,
}

/// Why a link is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkEnd {
    #[error("it has ended, or closed the connection")]
    Closed,
    #[error("it announces a frame of {0} bytes, so the stream is out of step")]
    OutOfStep(u32),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The frames that come from the link.
pub(super) struct FrameReceiver {
    file: File,
    framing: Framing,
    /// Bytes from `start` to `end` were read and are not consumed.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    max_frame: usize,
    rest: Arc<Mutex<StreamRemainder>>,
}

impl Drop for FrameReceiver {
    fn drop(&mut self) {
        // Each read of a tap device is a frame, and this one is lost.
        if self.framing == Framing::Stream {
            lock(&self.rest).received = self.buffer[self.start..self.end].to_vec();
        }
    }
}

impl FrameReceiver {
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The next frame, which stays until [`consume`](Self::consume). Does not wait.
    pub(super) fn peek(&mut self) -> Result<ReceiveOutcome<'_>, LinkEnd> {
        let Some(len) = self.frame_len()? else {
            return Ok(ReceiveOutcome::Nothing);
        };
        let from = self.start + self.prefix();
        if len > self.max_frame {
            return Ok(ReceiveOutcome::TooLong);
        }
        Ok(ReceiveOutcome::Frame(&self.buffer[from..from + len]))
    }

    /// Removes the frame that [`peek`](Self::peek) has shown.
    pub(super) fn consume(&mut self) {
        let len = match self.framing {
            Framing::Tap => self.end,
            Framing::Stream => PREFIX + self.stream_len().map_or(0, |len| len as usize),
        };
        self.start += len;
        debug_assert!(self.start <= self.end);
    }

    fn prefix(&self) -> usize {
        match self.framing {
            Framing::Stream => PREFIX,
            Framing::Tap => 0,
        }
    }

    /// Length of the frame at `start`, which is read if it is not there yet.
    fn frame_len(&mut self) -> Result<Option<usize>, LinkEnd> {
        loop {
            let held = self.end - self.start;
            match self.framing {
                Framing::Tap if held > 0 => return Ok(Some(held)),
                Framing::Tap => {}
                Framing::Stream => {
                    if let Some(len) = self.stream_len() {
                        if len as usize > MOST_FRAME {
                            return Err(LinkEnd::OutOfStep(len));
                        }
                        if held >= PREFIX + len as usize {
                            return Ok(Some(len as usize));
                        }
                    }
                }
            }
            if !self.read()? {
                return Ok(None);
            }
        }
    }

    /// The number before the frame at `start`, if it was read.
    fn stream_len(&self) -> Option<u32> {
        let held = &self.buffer[self.start..self.end];
        held.first_chunk().map(|prefix| u32::from_be_bytes(*prefix))
    }

    /// Reads what there is; `false`: nothing.
    fn read(&mut self) -> Result<bool, LinkEnd> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        loop {
            match self.file.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Err(LinkEnd::Closed),
                Ok(len) => {
                    self.end += len;
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(LinkEnd::Closed);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The frames that go to the link.
pub(super) struct FrameSender {
    file: File,
    framing: Framing,
    /// Bytes that the link has not taken yet.
    pending: Vec<u8>,
    rest: Arc<Mutex<StreamRemainder>>,
}

impl Drop for FrameSender {
    fn drop(&mut self) {
        if self.framing == Framing::Stream {
            lock(&self.rest).pending = std::mem::take(&mut self.pending);
        }
    }
}

/// What became of the frames of a [`flush`](FrameSender::flush).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FlushOutcome {
    /// The link has taken all of them.
    All,
    /// It has no room now.
    Blocked,
    /// A tap device that is not up has thrown its frame away.
    Lost,
}

impl FrameSender {
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether another frame may be added.
    pub(super) fn has_room(&self) -> bool {
        match self.framing {
            Framing::Stream => self.pending.len() < WRITE_BUFFER,
            Framing::Tap => self.pending.is_empty(),
        }
    }

    /// Adds a frame of `len` bytes that `fill` writes. If that fails, nothing is added.
    pub(super) fn add<E>(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        debug_assert!(self.has_room() && len <= MOST_FRAME);
        let before = self.pending.len();
        if self.framing == Framing::Stream {
            self.pending.extend((len as u32).to_be_bytes());
        }
        let from = self.pending.len();
        self.pending.resize(from + len, 0);
        fill(&mut self.pending[from..]).inspect_err(|_| self.pending.truncate(before))
    }

    /// Gives the link what it takes, without waiting.
    pub(super) fn flush(&mut self) -> Result<FlushOutcome, LinkEnd> {
        while !self.pending.is_empty() {
            // Not `send`, which a thread of a disk may not call. The Rust runtime ignores SIGPIPE.
            match self.file.write(&self.pending) {
                Ok(len) => drop(self.pending.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(FlushOutcome::Blocked);
                }
                Err(error) => {
                    self.pending.clear();
                    return match error.raw_os_error() {
                        Some(libc::EPIPE | libc::ECONNRESET) => Err(LinkEnd::Closed),
                        // EIO: it is not up. EINVAL: the kernel does not take the frame.
                        Some(libc::EIO | libc::EINVAL) if self.framing == Framing::Tap => {
                            Ok(FlushOutcome::Lost)
                        }
                        _ => Err(error.into()),
                    };
                }
            }
        }
        Ok(FlushOutcome::All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 1518;

    fn pair() -> (UnixStream, FrameReceiver, FrameSender) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (receiver, sender) = Link::stream(ours).unwrap().split(MAX).unwrap();
        (theirs, receiver, sender)
    }

    fn next(receiver: &mut FrameReceiver) -> Option<Vec<u8>> {
        let frame = match receiver.peek().unwrap() {
            ReceiveOutcome::Frame(frame) => frame.to_vec(),
            ReceiveOutcome::TooLong => vec![],
            ReceiveOutcome::Nothing => return None,
        };
        receiver.consume();
        Some(frame)
    }

    #[test]
    fn frames_may_come_in_any_pieces() {
        let (mut theirs, mut receiver, _sender) = pair();
        let mut bytes = Vec::new();
        for len in [14_u32, 0, 1518, 1519, 65553, 60] {
            bytes.extend(len.to_be_bytes());
            bytes.extend(vec![len as u8; len as usize]);
        }
        let mut frames = Vec::new();
        for piece in bytes.chunks(997) {
            theirs.write_all(piece).unwrap();
            while let Some(frame) = next(&mut receiver) {
                frames.push(frame);
            }
        }
        let lengths: Vec<_> = frames.iter().map(Vec::len).collect();
        // Those that are too long are skipped as a whole.
        assert_eq!(lengths, [14, 0, 1518, 0, 0, 60]);
        assert_eq!(frames[2], vec![238; 1518]);
        drop(theirs);
        assert!(matches!(receiver.peek(), Err(LinkEnd::Closed)));
    }

    #[test]
    fn a_stream_that_is_out_of_step_ends() {
        let (mut theirs, mut receiver, _sender) = pair();
        theirs.write_all(&65554_u32.to_be_bytes()).unwrap();
        assert!(matches!(receiver.peek(), Err(LinkEnd::OutOfStep(65554))));
    }

    /// A guest that boots again has a new device on the same link, wherever the old one stopped.
    #[test]
    fn the_next_device_goes_on_within_the_frame() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let link = Link::stream(ours).unwrap();
        let frame = |byte: u8| [&1000_u32.to_be_bytes()[..], &[byte; 1000]].concat();
        for round in 0..20 {
            let cut = 1 + 50 * round;
            let (mut receiver, mut sender) = link.try_clone().unwrap().split(MAX).unwrap();
            theirs.write_all(&frame(1)[..cut]).unwrap();
            assert_eq!(next(&mut receiver), None);
            let mut taken = Vec::new();
            let add = |sender: &mut FrameSender, byte: u8| {
                sender.add(1000, |bytes| {
                    bytes.fill(byte);
                    Ok::<_, ()>(())
                })
            };
            // The stream is full, in the middle of a frame.
            let mut added = 0;
            while sender.flush().unwrap() == FlushOutcome::All {
                add(&mut sender, 2).unwrap();
                added += 1;
            }
            drop((receiver, sender));
            let (mut receiver, mut sender) = link.try_clone().unwrap().split(MAX).unwrap();
            theirs.write_all(&frame(1)[cut..]).unwrap();
            assert_eq!(next(&mut receiver), Some(vec![1; 1000]));
            assert_eq!(next(&mut receiver), None);
            theirs.set_nonblocking(true).unwrap();
            loop {
                let all = sender.flush().unwrap() == FlushOutcome::All;
                let read = theirs.read_to_end(&mut taken);
                assert_eq!(read.unwrap_err().kind(), io::ErrorKind::WouldBlock);
                if all {
                    break;
                }
            }
            theirs.set_nonblocking(false).unwrap();
            assert_eq!(taken.len(), added * 1004);
            assert!(taken.chunks(1004).all(|taken| taken == frame(2)));
        }
    }

    #[test]
    fn a_full_stream_gets_every_byte_later() {
        let (mut theirs, _receiver, mut sender) = pair();
        let mut sent = 0;
        let blocked = loop {
            while sender.has_room() {
                sender
                    .add(1500, |bytes| {
                        bytes.fill(sent as u8);
                        Ok::<_, ()>(())
                    })
                    .unwrap();
                sent += 1;
            }
            match sender.flush().unwrap() {
                FlushOutcome::All => {}
                other => break other,
            }
        };
        assert_eq!(blocked, FlushOutcome::Blocked);
        let failed = sender.pending.len();
        if sender.has_room() {
            assert_eq!(sender.add(10, |_| Err(1)), Err(1));
        }
        assert_eq!(sender.pending.len(), failed);
        let reader = std::thread::spawn(move || {
            for number in 0..sent {
                let mut frame = [0; 1504];
                theirs.read_exact(&mut frame).unwrap();
                assert_eq!(frame[..4], 1500_u32.to_be_bytes());
                assert_eq!(frame[4..], [number as u8; 1500]);
            }
            theirs
        });
        while sender.flush().unwrap() != FlushOutcome::All {
            std::thread::yield_now();
        }
        drop(reader.join().unwrap());
        sender.add(14, |_| Ok::<_, ()>(())).unwrap();
        assert!(matches!(sender.flush(), Err(LinkEnd::Closed)));
    }

    #[test]
    fn a_name_that_no_interface_has_is_refused() {
        for name in ["", "a-name-of-sixteen", "a/b", "tap%d"] {
            let refused = Link::tap(name).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{name}");
        }
    }
}
