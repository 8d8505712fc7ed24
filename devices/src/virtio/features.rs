//! A set of feature bits, and which choices of a driver are acceptable (virtio 1.2, 2.2 and 6).

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// A set of feature bits, 0 to 63.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub(crate) u64);

impl Features {
    /// What every device offers.
    ///
    /// Never offered: ACCESS_PLATFORM and ORDER_PLATFORM, because a device accesses memory as the
    /// guest's processor does; RING_PACKED, because no maintained crate implements it;
    /// NOTIFICATION_DATA, because the worker reads the ring's index anyway.
    pub(crate) fn of_every_device() -> Self {
        let mut set = Self(0);
        for bit in [
            VIRTIO_F_VERSION_1,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_RING_F_INDIRECT_DESC,
        ] {
            set.insert(bit);
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

    #[test]
    fn a_choice_must_be_a_subset_with_version_1() {
        let offered = Features::of_every_device();
        assert!(offered.is_acceptable(offered));
        assert!(Features(1 << VIRTIO_F_VERSION_1).is_acceptable(offered));
        assert!(!Features(offered.0 & !(1 << VIRTIO_F_VERSION_1)).is_acceptable(offered));
        assert!(!Features(offered.0 | 1 << 0).is_acceptable(offered));
    }
}
