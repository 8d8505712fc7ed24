//! COM1: a 16550 whose output goes to a writer and whose interrupt is an irqfd.

use std::io::{self, Write};
use std::sync::Arc;

use vm_superio::serial::SerialEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::BusDevice;

/// Ports of a 16550.
pub const SIZE: u64 = 8;

/// Raises the serial line's interrupt.
struct LineTrigger(EventFd);

impl Trigger for LineTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Signals the input thread when the guest has read all its input.
struct RoomEvents(Arc<EventFd>);

impl SerialEvents for RoomEvents {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // The write fails only if the counter is full, and then the event is readable already.
        let _ = self.0.write(1);
    }
}

/// The serial line.
pub struct SerialPort(Serial<LineTrigger, RoomEvents, Box<dyn Write + Send>>);

impl SerialPort {
    /// A serial line that writes to `output`, interrupts through `interrupt`, and signals `room`
    /// when the guest has read its input.
    pub fn new(output: Box<dyn Write + Send>, interrupt: EventFd, room: Arc<EventFd>) -> Self {
        Self(Serial::with_events(
            LineTrigger(interrupt),
            RoomEvents(room),
            output,
        ))
    }

    /// Puts as much of `input` as fits into the receive buffer and returns that number of bytes.
    pub fn receive(&mut self, input: &[u8]) -> usize {
        let room = self.0.fifo_capacity();
        let part = &input[..input.len().min(room)];
        if part.is_empty() {
            return 0;
        }
        // In loopback mode the line receives nothing: the input is lost, as on a real line.
        self.0.enqueue_raw_bytes(part).unwrap_or(part.len())
    }
}

impl BusDevice for SerialPort {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let [byte] = data {
            *byte = self.0.read(offset as u8);
        } else {
            data.fill(0xff);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let [byte] = *data
            && let Err(error) = self.0.write(offset as u8, byte)
        {
            // The reader of the console may be gone; the guest runs on.
            tracing::debug!(%error, "serial output lost");
        }
    }
}
