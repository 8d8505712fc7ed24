//! Event descriptors of `vmm-sys-util` in a form that an event loop can watch: they do not
//! implement [`AsFd`](std::os::fd::AsFd).

pub use walvisor_devices::backend::descriptor;
