//! The write-ahead-logged disk as a backend: the store already has requests and completions of this form.

use std::io;
use std::os::fd::BorrowedFd;

use walvisor_storage::{Completion, Extent, LogCounters, Operation};
use walvisor_storage::{Disk, Port};

use super::disk::{Backend, BackendQueue, Capabilities};

impl Backend for Disk {
    fn sectors(&self) -> u64 {
        Disk::sectors(self)
    }

    fn capabilities(&self) -> Capabilities {
        let writable = !self.read_only();
        Capabilities {
            read_only: !writable,
            flush: true,
            write_cache_toggle: writable,
            discard: writable,
            write_zeroes: writable,
            // Zeroes are a record like any other. The data that they replace stays in older segments of the log until
            // those are reused, and in blocks that the file system frees.
            secure_erase: false,
        }
    }

    fn write_cache(&self) -> bool {
        Disk::write_cache(self)
    }

    fn set_write_cache(&self, on: bool) {
        Disk::set_write_cache(self, on);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        match self.open_port() {
            Ok(port) => Ok(Box::new(port)),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn blocks(&self) -> bool {
        Disk::reads_block(self)
    }

    fn max_request_bytes(&self) -> usize {
        Disk::max_request_bytes(self)
    }

    fn extents(&self, sector: u64, sectors: u64, most: usize) -> io::Result<Vec<Extent>> {
        Disk::extents(self, sector, sectors, most).map_err(io::Error::other)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        Disk::grow(self, bytes).map_err(io::Error::other)?;
        Ok(())
    }

    fn checkpoint(&self) -> io::Result<()> {
        Disk::checkpoint(self).map_err(io::Error::other)?;
        Ok(())
    }

    fn log_counters(&self) -> Option<LogCounters> {
        Some(Disk::log_counters(self))
    }
}

impl BackendQueue for Port {
    fn set_clients(&mut self, clients: usize) {
        Port::set_clients(self, clients);
    }

    fn submit(&mut self, token: u64, operation: Operation) {
        Port::submit(self, token, operation);
    }

    fn when_written(&mut self, token: u64) -> bool {
        Port::when_written(self, token)
    }

    fn kick(&mut self) {
        Port::kick(self);
    }

    fn event(&self) -> BorrowedFd<'_> {
        Port::event(self)
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        Port::completions(self, done);
    }
}
