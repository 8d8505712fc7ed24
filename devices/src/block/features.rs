//! Feature bits: which a disk offers (virtio 1.2, 5.2.3).

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SECURE_ERASE, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};

use crate::backend::Capabilities;
use crate::virtio::Features;

impl Features {
    /// The features that a device with this number of queues offers over a backend with these
    /// capabilities: only what the backend really implements.
    ///
    /// Never offered: LIFETIME, because no backend knows the wear of flash (5.2.6.2: then it MUST
    /// NOT be offered); GEOMETRY, because there are no cylinders.
    pub(crate) fn for_backend(backend: Capabilities, queues: u16) -> Self {
        let mut set = Self::of_every_device();
        for bit in [
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
        type Loss = fn(&mut Capabilities);
        let losses: [(u32, Loss); 11] = [
            (VIRTIO_BLK_F_FLUSH, |it| it.flush = false),
            (VIRTIO_BLK_F_CONFIG_WCE, |it| it.write_cache_toggle = false),
            (VIRTIO_BLK_F_CONFIG_WCE, |it| it.flush = false),
            (VIRTIO_BLK_F_DISCARD, |it| it.discard = false),
            (VIRTIO_BLK_F_DISCARD, |it| it.read_only = true),
            (VIRTIO_BLK_F_WRITE_ZEROES, |it| it.write_zeroes = false),
            (VIRTIO_BLK_F_WRITE_ZEROES, |it| it.read_only = true),
            (VIRTIO_BLK_F_SECURE_ERASE, |it| it.secure_erase = false),
            (VIRTIO_BLK_F_SECURE_ERASE, |it| it.write_zeroes = false),
            (VIRTIO_BLK_F_SECURE_ERASE, |it| it.flush = false),
            (VIRTIO_BLK_F_SECURE_ERASE, |it| it.read_only = true),
        ];
        for (bit, loss) in losses {
            assert!(Features::for_backend(ALL, 1).has(bit));
            let mut without = ALL;
            loss(&mut without);
            assert!(
                !Features::for_backend(without, 1).has(bit),
                "bit {bit} with {without:?}"
            );
        }
        assert!(!Features::for_backend(ALL, 1).has(VIRTIO_BLK_F_RO));
        let read_only = Capabilities {
            read_only: true,
            ..ALL
        };
        assert!(Features::for_backend(read_only, 1).has(VIRTIO_BLK_F_RO));
        assert!(!Features::for_backend(ALL, 1).has(VIRTIO_BLK_F_MQ));
        assert!(Features::for_backend(ALL, 2).has(VIRTIO_BLK_F_MQ));
    }
}
