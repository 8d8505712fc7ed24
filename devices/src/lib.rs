//! Frontends: virtio-blk and its transports. Knows no KVM. Generic over the [`backend::Backend`] trait.

pub mod backend;
