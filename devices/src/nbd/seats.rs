//! How many clients a listener has room for.
//!
//! A client in the handshake may be a stranger, so it takes none of the seats of clients that have
//! chosen an export, which with TLS have shown who they are. Of the seats in the handshake an
//! address has a few.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

/// The seats of a listener.
#[derive(Clone, Default)]
pub(super) struct Seats {
    taken: Arc<Mutex<Taken>>,
    tls: bool,
}

#[derive(Default)]
struct Taken {
    connections: usize,
    handshakes: usize,
    /// Clients in the handshake by their address; none is 0.
    by_address: HashMap<IpAddr, usize>,
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

impl Seats {
    /// The seats of a listener whose clients may use TLS, or not.
    pub(super) fn new(tls: bool) -> Self {
        let taken = Arc::default();
        Self { taken, tls }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A seat for the handshake of a client, which is at `address` unless it came by a Unix socket.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn handshake(&self, address: Option<IpAddr>) -> Result<HandshakeSeat, String> {
        let address = address.map(network);
        let tls = if self.tls { TLS_BYTES } else { 0 };
        let memory = MemoryBudget::of_process().reserve(CLIENT_BYTES + tls);
        let memory = memory.ok_or("the process has no memory left for a client")?;
        let mut taken = self.lock();
        if taken.handshakes >= MAX_HANDSHAKES {
            return Err(format!(
                "{MAX_HANDSHAKES} clients have not chosen an export yet"
            ));
        }
        if let Some(address) = address {
            let count = taken.by_address.entry(address).or_default();
            if *count >= MAX_FROM_ADDRESS {
                return Err(format!(
                    "{MAX_FROM_ADDRESS} clients from {address} have not chosen an export yet"
                ));
            }
            *count += 1;
        }
        taken.handshakes += 1;
        Ok(HandshakeSeat {
            seats: self.clone(),
            address,
            memory: Some(memory),
        })
    }
}

/// The seat of a client in the handshake.
pub(super) struct HandshakeSeat {
    seats: Seats,
    address: Option<IpAddr>,
    memory: Option<MemoryReservation>,
}

impl HandshakeSeat {
    /// Changes it for the seat of a client that has chosen an export; `None`: all are taken.
    pub(super) fn connection(mut self) -> Option<ConnectionSeat> {
        let mut taken = self.seats.lock();
        if taken.connections >= MAX_CONNECTIONS {
            return None;
        }
        taken.connections += 1;
        Some(ConnectionSeat {
            seats: self.seats.clone(),
            _memory: self.memory.take(),
        })
    }
}

impl Drop for HandshakeSeat {
    fn drop(&mut self) {
        let mut taken = self.seats.lock();
        taken.handshakes -= 1;
        if let Some(address) = self.address
            && let Some(count) = taken.by_address.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                taken.by_address.remove(&address);
            }
        }
    }
}

/// The seat of a client that has chosen an export.
pub(super) struct ConnectionSeat {
    seats: Seats,
    _memory: Option<MemoryReservation>,
}

impl Drop for ConnectionSeat {
    fn drop(&mut self) {
        self.seats.lock().connections -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_take_no_seat_of_those_who_have_chosen_nor_all_of_other_addresses() {
        let seats = Seats::default();
        let served: Vec<_> = (0..MAX_CONNECTIONS)
            .map(|_| seats.handshake(None).unwrap().connection().unwrap())
            .collect();
        let stranger = |last: u16| Some(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, last]));
        let held: Vec<_> = (0..16)
            .map(|last| seats.handshake(stranger(last)).ok())
            .collect();
        assert!(held.iter().all(Option::is_some));
        let told = seats.handshake(stranger(99)).err().unwrap();
        assert!(
            told.starts_with("16 clients from 2001:db8:: have"),
            "{told}"
        );
        let known = || Some(IpAddr::from([192, 0, 2, 7]));
        let other = seats.handshake(known()).unwrap();
        assert!(other.connection().is_none(), "all are taken");
        drop(served);
        assert!(seats.handshake(known()).unwrap().connection().is_some());
        drop(held);
        assert!(seats.lock().by_address.is_empty());
        let all: Vec<_> = (0..MAX_HANDSHAKES)
            .map(|_| seats.handshake(None).unwrap())
            .collect();
        assert!(seats.handshake(known()).is_err());
        drop(all);
        assert!(seats.handshake(known()).is_ok());
    }
}
