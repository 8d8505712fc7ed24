//! A network cable between two guests of user-mode Linux. It needs neither a network on this
//! machine nor privileges.

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};

use crate::error::{FileContext, Result};
use crate::process::inherit;

/// Bytes that a cable buffers in each direction, if the system allows that many.
const CAPACITY: usize = 4 << 20;

/// One end of a network cable. In the guest that it is plugged into, the network card is `vec0`. A
/// frame that the other guest does not receive in time is lost, as on any network.
#[derive(Clone, Debug)]
pub struct CableEnd {
    socket: Arc<OwnedFd>,
    /// The last byte of the card's MAC address.
    station: u8,
}

impl CableEnd {
    /// The two ends of a new cable.
    ///
    /// # Errors
    /// The system refuses a pair of sockets.
    pub fn pair() -> Result<[Self; 2]> {
        let cable = || -> rustix::io::Result<_> {
            let (one, other) = socketpair(
                AddressFamily::UNIX,
                SocketType::DGRAM,
                SocketFlags::CLOEXEC,
                None,
            )?;
            for socket in [&one, &other] {
                sockopt::set_socket_send_buffer_size(socket, CAPACITY)?;
                sockopt::set_socket_recv_buffer_size(socket, CAPACITY)?;
            }
            Ok([one, other])
        };
        let [one, other] = cable()
            .map_err(std::io::Error::from)
            .at("create", "a pair of sockets")?;
        let end = |socket, station| Self {
            socket: Arc::new(socket),
            station,
        };
        Ok([end(one, 1), end(other, 2)])
    }

    /// Plugs the end into the guest that `command` starts.
    pub(super) fn plug(&self, command: &mut Command) {
        // vec=0: a system call per frame. With higher values the driver delays frames.
        command.arg(format!(
            "vec0:transport=fd,fd={},vec=0,mac=02:00:00:00:00:{:02x}",
            self.socket.as_raw_fd(),
            self.station
        ));
        inherit(command, &self.socket);
    }
}
