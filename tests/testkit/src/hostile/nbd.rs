//! Clients of any NBD server that harm whom they can.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::{Attack, AttackTarget, COMMIT_BYTES, LONGEST_WAIT, Victim};
use crate::nbd::{FLUSH, READ, SimpleClient, WRITE, request, simple_reply};
use crate::noise;

/// What an NBD client may ask for.
const LONGEST: u32 = 32 << 20;
/// Connections of an attack. A listener of walvisor serves 128, one of which is the victim's.
const ATTACKERS: usize = 127;

/// An attack on a disk of at least 64 MiB.
const fn attack(name: &'static str, act: fn(&mut UnixStream) -> io::Result<()>) -> Attack {
    Attack {
        name,
        attackers: ATTACKERS,
        repeats: false,
        connect,
        act,
    }
}

/// An ordinary client that writes as fast as it can, to the second MiB of the disk.
const FLOOD: Attack = Attack {
    attackers: 1,
    ..attack("writes of 1 MiB, 32 in flight", |stream| {
        let data = noise(1 << 20);
        let write = |stream: &mut UnixStream| {
            stream.write_all(&request(0, WRITE, 0, 1 << 20, data.len() as u32))?;
            stream.write_all(&data)
        };
        (0..32).try_for_each(|_| write(stream))?;
        loop {
            simple_reply(stream)?;
            write(stream)?;
        }
    })
};

/// All of them. What they write is the second MiB of the disk, or does not become part of it.
pub static ATTACKS: [Attack; 6] = [
    FLOOD,
    attack("reads of 32 MiB, whose replies are read", |stream| {
        let mut reply = vec![0; 1 << 20];
        loop {
            stream.write_all(&request(0, READ, 0, 0, LONGEST))?;
            simple_reply(stream)?;
            for _ in 0..LONGEST as usize / reply.len() {
                stream.read_exact(&mut reply)?;
            }
        }
    }),
    attack("reads whose replies nobody reads", |stream| {
        let read = request(0, READ, 0, 0, LONGEST);
        stream.write_all(&read.repeat(64))
    }),
    attack("small reads whose replies nobody reads", |stream| {
        let read = request(0, READ, 0, 0, 512);
        stream.write_all(&read.repeat(1 << 16))
    }),
    attack("writes that are never sent in full", |stream| {
        stream.write_all(&request(0, WRITE, 0, 1 << 20, LONGEST))?;
        stream.write_all(&vec![7; LONGEST as usize - 1])
    }),
    attack("garbage", |stream| stream.write_all(&noise(4096))),
];

fn connect(target: &AttackTarget) -> io::Result<UnixStream> {
    Ok(SimpleClient::connect(&target.socket, &target.export)?.stream)
}

/// The victim's connection.
///
/// # Errors
/// If there is no server, or it has no such disk.
pub fn victim(socket: &Path, export: &str) -> io::Result<SimpleClient> {
    let client = SimpleClient::connect(socket, export)?;
    client.stream.set_read_timeout(Some(LONGEST_WAIT))?;
    Ok(client)
}

impl Victim for SimpleClient {
    fn commit(&mut self, number: u32) -> io::Result<()> {
        let offset = u64::from(number % 256) * COMMIT_BYTES as u64;
        let mut data = [number as u8; COMMIT_BYTES];
        self.end(WRITE, offset, COMMIT_BYTES, &mut data, false)?;
        self.end(FLUSH, 0, 0, &mut [], false)
    }
}
