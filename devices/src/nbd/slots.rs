//! How many clients a listener has room for.
//!
//! A client in the handshake may be a stranger, so it takes none of the slots of clients that have
//! chosen an export, which with TLS have shown who they are. Of the slots in the handshake an
//! address has a few. One more client takes the slot of the oldest from its address; or, if all
//! slots are taken, from the address that has most. So clients that say nothing keep nobody out,
//! from however many addresses they come.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::Shutdown;

use crate::backend::{MemoryBudget, MemoryReservation};

/// Most clients of one listener that have chosen an export.
pub const MAX_CONNECTIONS: usize = 128;
/// Most clients of one listener in the handshake.
const MAX_HANDSHAKES: usize = 128;
/// Most of these from one address of the network.
const MAX_FROM_ADDRESS: usize = 16;

/// Bytes of memory that a client takes beside its requests: its thread in the handshake, then its
/// read buffer and headers.
const CLIENT_BYTES: u64 = 192 << 10;
/// Bytes of memory that TLS takes besides.
const TLS_BYTES: u64 = 128 << 10;

/// The slots of a listener.
#[derive(Clone, Default)]
pub(super) struct ClientSlots {
    taken: Arc<Mutex<OccupiedSlots>>,
    tls: bool,
}

#[derive(Default)]
struct OccupiedSlots {
    connections: usize,
    /// The slots in the handshake by number, so the oldest first.
    handshakes: BTreeMap<u64, Handshake>,
    /// The number of the next one.
    next: u64,
}

/// A client in the handshake.
struct Handshake {
    /// `None`: it came by a Unix socket.
    address: Option<IpAddr>,
    /// Its socket too.
    socket: OwnedFd,
}

impl OccupiedSlots {
    /// Whose slot a client from this address gets, and why that client has to go; `None`: a free
    /// one.
    fn in_the_way(&self, address: Option<IpAddr>) -> Option<(u64, String)> {
        let mut by_address = HashMap::new();
        for client in self.handshakes.values() {
            *by_address.entry(client.address).or_insert(0) += 1;
        }
        let own = by_address.get(&address).copied().unwrap_or(0);
        let (address, why) = if let Some(network) = address
            && own >= MAX_FROM_ADDRESS
        {
            (address, format!("{own} clients from {network}"))
        } else if self.handshakes.len() >= MAX_HANDSHAKES {
            let (address, _) = by_address.into_iter().max_by_key(|(_, count)| *count)?;
            (address, format!("{MAX_HANDSHAKES} clients"))
        } else {
            return None;
        };
        let mut clients = self.handshakes.iter();
        let (oldest, _) = clients.find(|(_, client)| client.address == address)?;
        Some((*oldest, why))
    }
}

/// Of an IPv6 address, its network: who has one address of it has all.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => {
            let network = u128::from(address) & (u128::MAX << 64);
            IpAddr::V6(network.into())
        }
        v4 => v4,
    }
}

impl ClientSlots {
    /// The slots of a listener whose clients may use TLS, or not.
    pub(super) fn new(tls: bool) -> Self {
        let taken = Arc::default();
        Self { taken, tls }
    }

    fn lock(&self) -> MutexGuard<'_, OccupiedSlots> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot for the handshake of a client with this socket, which is at `address` unless it came
    /// by a Unix socket. Another client may lose its slot, and is then disconnected.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn handshake(
        &self,
        address: Option<IpAddr>,
        socket: impl AsFd,
    ) -> Result<HandshakeSlot, String> {
        let address = address.map(network);
        let tls = if self.tls { TLS_BYTES } else { 0 };
        let memory = MemoryBudget::of_process().reserve(CLIENT_BYTES + tls);
        let memory = memory.ok_or("the process has no memory left for a client")?;
        let socket = socket.as_fd().try_clone_to_owned();
        let socket = socket.map_err(|error| error.to_string())?;
        let mut taken = self.lock();
        if let Some((oldest, why)) = taken.in_the_way(address)
            && let Some(client) = taken.handshakes.remove(&oldest)
        {
            tracing::warn!(
                "NBD: {why} have not chosen an export yet: the oldest was disconnected for the next"
            );
            // Its thread ends once it notices. Fails if the client is gone.
            let _ = rustix::net::shutdown(client.socket, Shutdown::Both);
        }
        let number = taken.next;
        taken.next += 1;
        taken
            .handshakes
            .insert(number, Handshake { address, socket });
        Ok(HandshakeSlot {
            slots: self.clone(),
            number,
            memory: Some(memory),
        })
    }
}

/// The slot of a client in the handshake.
pub(super) struct HandshakeSlot {
    slots: ClientSlots,
    number: u64,
    memory: Option<MemoryReservation>,
}

impl HandshakeSlot {
    /// Changes it for the slot of a client that has chosen an export; `None`: all are taken.
    pub(super) fn connection(mut self) -> Option<ConnectionSlot> {
        let mut taken = self.slots.lock();
        if taken.connections >= MAX_CONNECTIONS {
            return None;
        }
        // Nobody may disconnect it any more.
        taken.handshakes.remove(&self.number);
        taken.connections += 1;
        Some(ConnectionSlot {
            slots: self.slots.clone(),
            _memory: self.memory.take(),
        })
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        self.slots.lock().handshakes.remove(&self.number);
    }
}

/// The slot of a client that has chosen an export.
pub(super) struct ConnectionSlot {
    slots: ClientSlots,
    _memory: Option<MemoryReservation>,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.lock().connections -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A client in the handshake: its slot, and its end of the connection.
    struct Client {
        slot: HandshakeSlot,
        socket: UnixStream,
        _ours: UnixStream,
    }

    impl Client {
        fn of(slots: &ClientSlots, address: Option<IpAddr>) -> Self {
            let (socket, ours) = UnixStream::pair().unwrap();
            socket.set_nonblocking(true).unwrap();
            Self {
                slot: slots.handshake(address, &ours).unwrap(),
                socket,
                _ours: ours,
            }
        }

        fn is_connected(&self) -> bool {
            let read = (&self.socket).read(&mut [0]);
            read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        }
    }

    fn stranger(network: u16, last: u16) -> Option<IpAddr> {
        Some(IpAddr::from([0x2001, 0xdb8, network, 0, 0, 0, 0, last]))
    }

    fn connected(clients: &[Client]) -> Vec<bool> {
        clients.iter().map(Client::is_connected).collect()
    }

    #[test]
    fn clients_in_the_handshake_take_no_seat_of_those_who_have_chosen() {
        let slots = ClientSlots::default();
        let served: Vec<_> = (0..MAX_CONNECTIONS)
            .map(|_| Client::of(&slots, None).slot.connection().unwrap())
            .collect();
        assert!(slots.lock().handshakes.is_empty());
        let one_more = Client::of(&slots, stranger(1, 1));
        assert!(one_more.slot.connection().is_none(), "all are taken");
        drop(served);
        assert!(Client::of(&slots, None).slot.connection().is_some());
    }

    #[test]
    fn a_client_gets_the_seat_of_the_oldest_stranger_at_its_address() {
        let slots = ClientSlots::default();
        let strangers: Vec<_> = (0..16)
            .map(|last| Client::of(&slots, stranger(1, last)))
            .collect();
        let other = Client::of(&slots, stranger(2, 0));
        assert_eq!(connected(&strangers), [true; 16]);
        let client = Client::of(&slots, stranger(1, 99));
        let mut expected = [true; 16];
        expected[0] = false;
        assert_eq!(connected(&strangers), expected);
        assert!(client.is_connected() && other.is_connected());
        // Who has lost its slot gives back none.
        drop(strangers);
        assert_eq!(slots.lock().handshakes.len(), 2);
        assert!(client.slot.connection().is_some());
    }

    #[test]
    fn a_client_gets_a_seat_from_whoever_has_most() {
        let slots = ClientSlots::default();
        let client = Client::of(&slots, stranger(99, 0));
        // Eight addresses take all slots.
        let mut strangers: Vec<_> = (0..MAX_HANDSHAKES as u16)
            .map(|number| Client::of(&slots, stranger(number / 16, number)))
            .collect();
        assert_eq!(slots.lock().handshakes.len(), MAX_HANDSHAKES);
        // From thousands of addresses, each with one, the oldest goes.
        let newcomers: Vec<_> = (0..50)
            .map(|number| Client::of(&slots, stranger(100 + number, 0)))
            .collect();
        assert!(client.is_connected() && newcomers.iter().all(Client::is_connected));
        strangers.retain(Client::is_connected);
        assert_eq!(strangers.len(), MAX_HANDSHAKES - 51);
        assert_eq!(slots.lock().handshakes.len(), MAX_HANDSHAKES);
        assert!(client.slot.connection().is_some());
    }
}
