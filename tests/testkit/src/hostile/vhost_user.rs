//! Front-ends of any vhost-user-blk device that harm whom they can.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use super::{Attack, AttackTarget, COMMIT_BYTES, LONGEST_WAIT, Victim};
use crate::vhost_user::*;
use crate::vhost_user_client::VhostUserClient;
use crate::virtio::{Memory, Piece, Ring};
use crate::{PATIENCE, noise};

/// Bytes of each read.
const READ_BYTES: u32 = 1 << 20;
/// Descriptors of a queue. A read takes three of them.
const QUEUE_SIZE: u16 = 128;

/// One front-end, as a device has one at a time.
const fn attack(
    name: &'static str,
    repeats: bool,
    act: fn(&mut UnixStream) -> io::Result<()>,
) -> Attack {
    Attack {
        name,
        attackers: 1,
        repeats,
        connect: |target: &AttackTarget| UnixStream::connect(&target.socket),
        act,
    }
}

/// All of them, on a disk of 64 MiB or more with four queues. None writes to it.
pub static ATTACKS: [Attack; 7] = [
    attack("four queues full of reads of 1 MiB", false, |stream| {
        read_for_ever(stream, 4, QUEUE_SIZE / 3)
    }),
    attack("one queue with 32 reads of 1 MiB", false, |stream| {
        read_for_ever(stream, 1, 32)
    }),
    attack("memory that is truncated", true, |stream| {
        let (mut front_end, page) = (front_end(stream)?, memory(0x1000));
        let kick = start_ring(&mut front_end, &page)?;
        // The reply shows that the messages before it have been handled.
        front_end.fields(GET_FEATURES, &[]);
        io::Read::read_exact(&mut front_end.socket, &mut [0; 20])?;
        page.set_len(0)?;
        knock(&kick)
    }),
    attack("pipes as call descriptors", true, |stream| {
        let mut front_end = front_end(stream)?;
        let (_end, pipe) = io::pipe()?;
        for queue in 0..4 {
            front_end.message(SET_VRING_CALL, &payload(&[queue]), &[pipe.as_fd()]);
        }
        hang_up(stream)
    }),
    attack("garbage", true, |stream| {
        front_end(stream)?.send(&noise(4096));
        hang_up(stream)
    }),
    attack("a chain that loops", true, |stream| {
        let (mut front_end, page) = (front_end(stream)?, memory(0x1000));
        // It goes on at itself: the address of its 16 bytes, their number, NEXT, and 0.
        page.write_all_at(&0x400_u64.to_le_bytes(), 0)?;
        page.write_all_at(&[16, 0, 0, 0, 1, 0, 0, 0], 8)?;
        page.write_all_at(&1_u16.to_le_bytes(), 0x102)?;
        let kick = start_ring(&mut front_end, &page)?;
        knock(&kick)?;
        front_end.fields(GET_FEATURES, &[]);
        io::Read::read_exact(&mut front_end.socket, &mut [0; 20])?;
        hang_up(stream)
    }),
    attack("half a message, and then silence", false, |stream| {
        front_end(stream)?.send(&header(SET_FEATURES, 8)[..7]);
        Ok(())
    }),
];

fn front_end(stream: &UnixStream) -> io::Result<FrontEnd> {
    let socket = stream.try_clone()?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(FrontEnd { socket })
}

/// Ends the connection, for a server that would keep it.
fn hang_up(stream: &UnixStream) -> io::Result<()> {
    stream.shutdown(std::net::Shutdown::Write)
}

fn event() -> io::Result<OwnedFd> {
    let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
    Ok(eventfd(0, flags)?)
}

fn knock(bell: &OwnedFd) -> io::Result<()> {
    // Its counter may be full.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
    Ok(())
}

/// Starts ring 0 in a page of memory, and returns its doorbell.
fn start_ring(front_end: &mut FrontEnd, page: &File) -> io::Result<OwnedFd> {
    let kick = event()?;
    front_end.share_page(page);
    front_end.start_ring(&kick, &event()?);
    Ok(kick)
}

/// A queue that always has the same number of reads available or in flight.
///
/// ```text
///   0x4000 for each queue: its ring
///   HEADERS: a header for each chain    STATUS    DATA: a MiB, which all reads overwrite
/// ```
struct FullQueue {
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
}

const HEADERS: u64 = 0x1_0000;
const STATUS: u64 = 0x1_1000;
const DATA: u64 = 0x2_0000;
const MEMORY_BYTES: u64 = DATA + READ_BYTES as u64;

impl FullQueue {
    fn start(
        front_end: &mut FrontEnd,
        memory: &Memory,
        index: u32,
        reads: u16,
    ) -> io::Result<Self> {
        let at = GuestAddress(u64::from(index) * 0x4000);
        let mut ring = Ring::new(Arc::clone(memory), QUEUE_SIZE, at, false);
        for read in 0..reads {
            let header = HEADERS + u64::from(read) * 16;
            // VIRTIO_BLK_T_IN is 0, and so is what is reserved. Each reads another MiB.
            let sector = u64::from(read) * u64::from(READ_BYTES) / 512;
            let written = memory.write_obj(sector, GuestAddress(header + 8));
            written.map_err(io::Error::other)?;
            ring.add(&[
                Piece::readable(GuestAddress(header), 16),
                Piece::writable(GuestAddress(DATA), READ_BYTES),
                Piece::writable(GuestAddress(STATUS), 1),
            ]);
        }
        let (kick, call) = (event()?, event()?);
        let number = |value: u32| payload(&[pair(index, value)]);
        front_end.message(SET_VRING_NUM, &number(QUEUE_SIZE.into()), &[]);
        front_end.message(SET_VRING_BASE, &number(0), &[]);
        let [descriptors, available, used] = ring.addresses();
        let addresses = payload(&[u64::from(index), descriptors, used, available, 0]);
        front_end.message(SET_VRING_ADDR, &addresses, &[]);
        let of = payload(&[index.into()]);
        front_end.message(SET_VRING_CALL, &of, &[call.as_fd()]);
        front_end.message(SET_VRING_KICK, &of, &[kick.as_fd()]);
        front_end.message(SET_VRING_ENABLE, &number(1), &[]);
        ring.publish();
        knock(&kick)?;
        Ok(Self { ring, kick, call })
    }

    /// Asks again for what has been answered.
    fn fill(&mut self) -> io::Result<()> {
        // Fails if the server has only rung other queues.
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
        let before = self.ring.available_index();
        while let Some((head, _)) = self.ring.take_used_keep_chain() {
            self.ring.offer(head);
        }
        if self.ring.available_index() == before {
            return Ok(());
        }
        self.ring.publish();
        knock(&self.kick)
    }
}

/// Keeps `queues` queues full of `reads` reads each.
fn read_for_ever(stream: &UnixStream, queues: u32, reads: u16) -> io::Result<()> {
    let shared = memory(MEMORY_BYTES);
    let file = FileOffset::new(shared.try_clone()?, 0);
    let range = (GuestAddress(0), MEMORY_BYTES as usize, Some(file));
    let memory = GuestMemoryMmap::from_ranges_with_files([range]).map_err(io::Error::other)?;
    let memory = Arc::new(memory);
    let mut front_end = front_end(stream)?;
    front_end.fields(SET_FEATURES, &[FEATURES]);
    let region = payload(&[1, 0, MEMORY_BYTES, 0, 0]);
    front_end.message(SET_MEM_TABLE, &region, &[shared.as_fd()]);
    let queues = (0..queues).map(|index| FullQueue::start(&mut front_end, &memory, index, reads));
    let mut queues = queues.collect::<io::Result<Vec<_>>>()?;
    loop {
        let bells = queues
            .iter()
            .map(|queue| PollFd::new(&queue.call, PollFlags::IN));
        let mut fds: Vec<_> = [PollFd::new(stream, PollFlags::RDHUP)]
            .into_iter()
            .chain(bells)
            .collect();
        poll(&mut fds, None)?;
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
        drop(fds);
        queues.iter_mut().try_for_each(FullQueue::fill)?;
    }
}

impl Victim for VhostUserClient {
    fn commit(&mut self, number: u32) -> io::Result<()> {
        let offset = u64::from(number % 256) * COMMIT_BYTES as u64;
        self.write(0, 0, offset, &[number as u8; COMMIT_BYTES]);
        self.end(0, LONGEST_WAIT)?;
        self.flush(0, 0);
        self.end(0, LONGEST_WAIT)
    }
}
