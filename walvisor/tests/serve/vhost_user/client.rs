//! A client for tests: it panics on any error.

use std::path::Path;
use std::time::Duration;

pub use walvisor_testkit::vhost_user_client::BUFFER;
use walvisor_testkit::vhost_user_client::VhostUserClient;

/// Nothing takes this long on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// See [`VhostUserClient`].
pub struct Client(VhostUserClient);

impl Client {
    pub fn connect(socket: &Path, queues: usize) -> Self {
        Self(VhostUserClient::connect(socket, queues).unwrap())
    }

    pub fn capacity(&self) -> u64 {
        self.0.capacity().unwrap()
    }

    pub fn num_queues(&self) -> u16 {
        self.0.num_queues().unwrap()
    }

    pub fn write(&mut self, queue: usize, slot: usize, offset: u64, data: &[u8]) {
        self.0.write(queue, slot, offset, data).unwrap();
    }

    pub fn read(&mut self, queue: usize, slot: usize, offset: u64, len: usize) {
        self.0.read(queue, slot, offset, len).unwrap();
    }

    pub fn flush(&mut self, queue: usize, slot: usize) {
        self.0.flush(queue, slot).unwrap();
    }

    pub fn discard(&mut self, queue: usize, slot: usize, offset: u64, len: u64) {
        self.0.discard(queue, slot, offset, len).unwrap();
    }

    pub fn write_zeroes(&mut self, queue: usize, slot: usize, offset: u64, len: u64) {
        self.0.write_zeroes(queue, slot, offset, len).unwrap();
    }

    pub fn data(&self, slot: usize, len: usize) -> Vec<u8> {
        self.0.data(slot, len)
    }

    pub fn kick(&mut self, queue: usize) {
        self.0.kick(queue).unwrap();
    }

    /// Waits for a completion of `queue`, and returns all slots that have ended, with their status.
    pub fn completions(&mut self, queue: usize) -> Vec<(usize, i32)> {
        loop {
            let done = self.0.ended(queue);
            if !done.is_empty() {
                return done;
            }
            self.0.wait(PATIENCE).expect("an interrupt");
        }
    }

    /// Kicks `queue`, and waits for `count` of its requests, all of which must succeed.
    pub fn finish(&mut self, queue: usize, mut count: usize) {
        self.kick(queue);
        while count > 0 {
            for (slot, status) in self.completions(queue) {
                assert_eq!(status, 0, "queue {queue}, slot {slot}");
                count -= 1;
            }
        }
    }
}
