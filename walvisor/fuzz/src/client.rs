//! A client that sends the pieces of an input, and reads answers all the time, so that the server
//! never waits for it.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};

use crate::guest::Guest;
use crate::words::Piece;

/// The answers, each with its line end; the last one may lack it.
#[derive(Default)]
pub struct Answers(pub Vec<Vec<u8>>);

impl Answers {
    fn take(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            match self.0.last_mut() {
                Some(line) if line.last() != Some(&b'\n') => line.extend_from_slice(part),
                _ => self.0.push(part.to_vec()),
            }
        }
    }
}

/// Sends all pieces, and returns the answers that came until the server closed the connection.
pub fn converse(stream: &UnixStream, pieces: &[Piece], guest: &mut Guest) -> Answers {
    stream.set_nonblocking(true).expect("a socket");
    let mut answers = Answers::default();
    for piece in pieces {
        match piece {
            Piece::Text(text) => send(stream, text, &mut answers),
            Piece::Request => guest.request(),
        }
    }
    stream.shutdown(Shutdown::Write).expect("a socket");
    while receive(stream, &mut answers) {
        wait(stream, PollFlags::IN);
    }
    answers
}

fn send(mut stream: &UnixStream, mut text: &[u8], answers: &mut Answers) {
    while !text.is_empty() {
        assert!(receive(stream, answers), "the server has left");
        match stream.write(text) {
            Ok(count) => text = &text[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                wait(stream, PollFlags::IN | PollFlags::OUT);
            }
            Err(error) => panic!("the server has left: {error}"),
        }
    }
}

/// Reads the bytes that have arrived. Returns `false` if the server has closed the connection.
fn receive(mut stream: &UnixStream, answers: &mut Answers) -> bool {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return false,
            Ok(count) => answers.take(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
            Err(error) => panic!("the server has left: {error}"),
        }
    }
}

fn wait(stream: &UnixStream, what: PollFlags) {
    // libFuzzer's alarm interrupts the wait at times.
    let _ = poll(&mut [PollFd::new(stream, what)], None);
}
