//! The capability list of a virtio PCI function (virtio 1.2, 4.1.4; PCI 3.0, 6.7).

use crate::error::Error;

/// The first 256 bytes of a function's configuration space.
pub trait ConfigSpace {
    /// Reads a byte.
    fn read8(&self, offset: u8) -> u8;
    /// Reads four bytes; `offset` is a multiple of 4.
    fn read32(&self, offset: u8) -> u32;
}

/// A place in a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The BAR's number, 0 to 5.
    pub bar: u8,
    /// Bytes from its start.
    pub offset: u32,
}

/// The structures of the list that a driver needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The common configuration structure.
    pub common: Location,
    /// The doorbells.
    pub notify: Location,
    /// Bytes from one doorbell offset to the next.
    pub notify_multiplier: u32,
    /// The device's own configuration.
    pub device: Location,
    /// Offset of the MSI-X capability in the configuration space.
    pub msix: u8,
    /// The MSI-X table.
    pub msix_table: Location,
    /// The pending bits of its vectors.
    pub msix_pending: Location,
    /// Number of entries in the MSI-X table.
    pub msix_vectors: u16,
}

const STATUS: u8 = 0x06;
const STATUS_LIST: u8 = 1 << 4;
const POINTER: u8 = 0x34;
/// Most capabilities: the list lies after the header, and a capability takes at least four bytes. A
/// longer list is a loop.
const MOST: usize = (256 - 64) / 4;

const ID_VENDOR: u8 = 0x09;
const ID_MSIX: u8 = 0x11;

const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
const DEVICE: u8 = 4;
const LAST_BAR: u8 = 5;
const VIRTIO_LENGTH: u8 = 16;
const NOTIFY_LENGTH: u8 = 20;
const MSIX_LENGTH: u8 = 12;

impl Capabilities {
    /// Walks the list. If several structures have the same type, the first one counts: the device
    /// lists them in the order of its preference (4.1.4.1).
    ///
    /// # Errors
    /// [`Error::Pci`] if a structure is absent or the list is broken.
    pub fn read(space: &impl ConfigSpace) -> Result<Self, Error> {
        if space.read8(STATUS) & STATUS_LIST == 0 {
            return Err(Error::Pci("no capability list"));
        }
        let (mut common, mut notify, mut device, mut msix) = (None, None, None, None);
        let mut at = space.read8(POINTER) & !3;
        let mut visited = 0;
        while at != 0 {
            visited += 1;
            if at < 0x40 || visited > MOST {
                return Err(Error::Pci("the capability list is broken"));
            }
            match space.read8(at) {
                ID_VENDOR => {
                    let kind = space.read8(at + 3);
                    match kind {
                        COMMON if common.is_none() => common = location(space, at, VIRTIO_LENGTH),
                        DEVICE if device.is_none() => device = location(space, at, VIRTIO_LENGTH),
                        NOTIFY if notify.is_none() => {
                            notify = location(space, at, NOTIFY_LENGTH)
                                .map(|location| (location, space.read32(at + 16)));
                        }
                        _ => {}
                    }
                }
                ID_MSIX if msix.is_none() && fits(at, MSIX_LENGTH) => {
                    let control = (space.read32(at) >> 16) as u16;
                    let [table, pending] = [4, 8].map(|place| {
                        let word = space.read32(at + place);
                        Location {
                            bar: (word & 7) as u8,
                            offset: word & !7,
                        }
                    });
                    if table.bar > LAST_BAR || pending.bar > LAST_BAR {
                        return Err(Error::Pci("the MSI-X table lies in no BAR"));
                    }
                    msix = Some((at, table, pending, (control & 0x7ff) + 1));
                }
                _ => {}
            }
            at = space.read8(at + 1) & !3;
        }
        let missing = |what| Error::Pci(what);
        let (notify, notify_multiplier) = notify.ok_or(missing("no notification structure"))?;
        let (msix, msix_table, msix_pending, msix_vectors) = msix.ok_or(missing("no MSI-X"))?;
        Ok(Self {
            common: common.ok_or(missing("no common configuration structure"))?,
            notify,
            notify_multiplier,
            device: device.ok_or(missing("no device configuration structure"))?,
            msix,
            msix_table,
            msix_pending,
            msix_vectors,
        })
    }
}

fn fits(at: u8, length: u8) -> bool {
    usize::from(at) + usize::from(length) <= 256
}

/// The location of the structure of the capability at `at`; `None` if the driver must ignore it
/// (4.1.4.1: BAR numbers above 5 are reserved).
fn location(space: &impl ConfigSpace, at: u8, length: u8) -> Option<Location> {
    if !fits(at, length) || space.read8(at + 2) < length {
        return None;
    }
    let bar = space.read8(at + 4);
    (bar <= LAST_BAR).then(|| Location {
        bar,
        offset: space.read32(at + 8),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Space([u8; 256]);

    impl ConfigSpace for Space {
        fn read8(&self, offset: u8) -> u8 {
            self.0[usize::from(offset)]
        }

        fn read32(&self, offset: u8) -> u32 {
            assert!(offset.is_multiple_of(4));
            let at = usize::from(offset);
            u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
        }
    }

    impl Space {
        /// A list of `capabilities` at the places given; each is linked to the next.
        fn new(capabilities: &[(u8, &[u8])]) -> Self {
            let mut space = [0; 256];
            space[usize::from(STATUS)] = STATUS_LIST;
            let mut link = usize::from(POINTER);
            for &(at, bytes) in capabilities {
                space[link] = at;
                let at = usize::from(at);
                space[at..at + bytes.len()].copy_from_slice(bytes);
                link = at + 1;
            }
            Self(space)
        }
    }

    fn virtio(kind: u8, bar: u8, offset: u32) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..5].copy_from_slice(&[ID_VENDOR, 0, 16, kind, bar]);
        bytes[8..12].copy_from_slice(&offset.to_le_bytes());
        bytes
    }

    fn notify(bar: u8, offset: u32, multiplier: u32) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..16].copy_from_slice(&virtio(NOTIFY, bar, offset));
        bytes[2] = 20;
        bytes[16..].copy_from_slice(&multiplier.to_le_bytes());
        bytes
    }

    fn msix(vectors: u16, table: u32) -> [u8; 12] {
        let mut bytes = [ID_MSIX, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes[2..4].copy_from_slice(&(vectors - 1).to_le_bytes());
        bytes[4..8].copy_from_slice(&table.to_le_bytes());
        bytes
    }

    fn complete() -> Space {
        Space::new(&[
            (0xc0, &virtio(COMMON, 7, 1)), // a reserved BAR: ignored
            (0x40, &virtio(COMMON, 0, 0)),
            (0x50, &virtio(COMMON, 2, 0x9000)), // the second choice
            (0x60, &virtio(3, 0, 0x1000)),      // ISR: not needed with MSI-X
            (0x70, &virtio(DEVICE, 0, 0x2000)),
            (0x80, &notify(4, 0x40, 4)),
            (0xa0, &[0x01, 0, 0, 0]), // power management
            (0xb0, &msix(5, 0x800 | 1)),
        ])
    }

    #[test]
    fn structures_and_table_are_found() {
        let found = Capabilities::read(&complete()).unwrap();
        let expected = Capabilities {
            common: Location { bar: 0, offset: 0 },
            notify: Location {
                bar: 4,
                offset: 0x40,
            },
            notify_multiplier: 4,
            device: Location {
                bar: 0,
                offset: 0x2000,
            },
            msix: 0xb0,
            msix_table: Location {
                bar: 1,
                offset: 0x800,
            },
            msix_pending: Location { bar: 0, offset: 0 },
            msix_vectors: 5,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn a_loop_a_link_into_the_header_and_missing_structures_are_errors() {
        for (at, byte, why) in [
            (0xb1, 0x40, "the capability list is broken"),
            (0xb1, 0x10, "the capability list is broken"),
            // Leaves the device configuration out.
            (0x41, 0x80, "no device configuration structure"),
            (usize::from(STATUS), 0, "no capability list"),
        ] {
            let mut space = complete();
            space.0[at] = byte;
            assert_eq!(Capabilities::read(&space), Err(Error::Pci(why)));
        }
    }

    #[test]
    fn no_bytes_of_the_space_make_the_walk_panic_or_hang() {
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut space = complete();
            for _ in 0..6 {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                space.0[(state >> 40) as usize % 256] = (state >> 56) as u8;
            }
            space.0[usize::from(STATUS)] |= STATUS_LIST;
            let _ = Capabilities::read(&space);
        }
    }
}
