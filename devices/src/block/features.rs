//! Feature bits: which are offered, and which choices are acceptable (virtio 1.2, 5.2.3 and 6).

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SECURE_ERASE, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::backend::Capabilities;

/// A set of feature bits, 0 to 63.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features(pub(crate) u64);

impl Features {
    /// The features that a device with this number of queues offers over a backend with these capabilities: only what the
    /// backend really implements.
    ///
    /// Never offered: LIFETIME, because no backend knows the wear of flash (5.2.6.2: then it MUST NOT be offered);
    /// GEOMETRY, because there are no cylinders; ACCESS_PLATFORM and ORDER_PLATFORM, because the device accesses memory
    /// as the guest's processor does; RING_PACKED, because no maintained crate implements it; NOTIFICATION_DATA, because
    /// the worker reads the ring's index anyway.
    pub(crate) fn for_backend(backend: Capabilities, queues: u16) -> Self {
        let mut set = Self(0);
        for bit in [
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_SIZE_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_TOPOLOGY,
        ] {
            set.insert(bit);
        }
        if queues > 1 {
            set.insert(VIRTIO_BLK_F_MQ);
        }
        if backend.flush {
            set.insert(VIRTIO_BLK_F_FLUSH);
            // 5.2.5.2: a device that offers CONFIG_WCE MUST offer FLUSH.
            if backend.write_cache_toggle {
                set.insert(VIRTIO_BLK_F_CONFIG_WCE);
            }
        }
        if backend.read_only {
            set.insert(VIRTIO_BLK_F_RO);
        } else {
            if backend.discard {
                set.insert(VIRTIO_BLK_F_DISCARD);
            }
            if backend.write_zeroes {
                set.insert(VIRTIO_BLK_F_WRITE_ZEROES);
            }
            if backend.secure_erase && backend.write_zeroes && backend.flush {
                set.insert(VIRTIO_BLK_F_SECURE_ERASE);
            }
        }
        set
    }

    /// Adds `bit`.
    pub(crate) fn insert(&mut self, bit: u32) {
        self.0 |= 1 << bit;
    }

    /// Whether `bit` is in the set.
    pub(crate) fn has(self, bit: u32) -> bool {
        self.0 & (1 << bit) != 0
    }

    /// Whether a driver may choose `self` from `offered`: a subset (2.2.1) with VERSION_1 (6.2).
    pub(crate) fn is_acceptable(self, offered: Self) -> bool {
        self.0 & !offered.0 == 0 && self.has(VIRTIO_F_VERSION_1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Capabilities = Capabilities {
        read_only: false,
        flush: true,
        write_cache_toggle: true,
        discard: true,
        write_zeroes: true,
        secure_erase: true,
    };

    #[test]
    fn a_bit_is_offered_only_if_the_backend_implements_it() {
        let bits = [
            (
                VIRTIO_BLK_F_FLUSH,
                Capabilities {
                    flush: false,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_CONFIG_WCE,
                Capabilities {
                    write_cache_toggle: false,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_CONFIG_WCE,
                Capabilities {
                    flush: false,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_DISCARD,
                Capabilities {
                    discard: false,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_DISCARD,
                Capabilities {
                    read_only: true,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_WRITE_ZEROES,
                Capabilities {
                    write_zeroes: false,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_WRITE_ZEROES,
                Capabilities {
                    read_only: true,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_SECURE_ERASE,
                Capabilities {
                    secure_erase: false,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_SECURE_ERASE,
                Capabilities {
                    write_zeroes: false,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_SECURE_ERASE,
                Capabilities {
                    flush: false,
                    ..ALL
                },
            ),
            (
                VIRTIO_BLK_F_SECURE_ERASE,
                Capabilities {
                    read_only: true,
                    ..ALL
                },
            ),
        ];
        for (bit, without) in bits {
            assert!(Features::for_backend(ALL, 1).has(bit));
            assert!(
                !Features::for_backend(without, 1).has(bit),
                "bit {bit} with {without:?}"
            );
        }
        assert!(!Features::for_backend(ALL, 1).has(VIRTIO_BLK_F_RO));
        assert!(
            Features::for_backend(
                Capabilities {
                    read_only: true,
                    ..ALL
                },
                1
            )
            .has(VIRTIO_BLK_F_RO)
        );
        assert!(!Features::for_backend(ALL, 1).has(VIRTIO_BLK_F_MQ));
        assert!(Features::for_backend(ALL, 2).has(VIRTIO_BLK_F_MQ));
    }

    #[test]
    fn a_choice_must_be_a_subset_with_version_1() {
        let offered = Features::for_backend(ALL, 1);
        assert!(offered.is_acceptable(offered));
        assert!(Features(1 << VIRTIO_F_VERSION_1).is_acceptable(offered));
        assert!(!Features(offered.0 & !(1 << VIRTIO_F_VERSION_1)).is_acceptable(offered));
        assert!(!Features(offered.0 | 1 << VIRTIO_BLK_F_MQ).is_acceptable(offered));
    }
}
