//! virtio-net from the driver's side: real rings in real guest memory, and a program at the other
//! end of the link.

mod driver;

mod frames;
mod hostile;
mod link;
