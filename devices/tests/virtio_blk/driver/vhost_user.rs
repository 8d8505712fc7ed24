//! Registers over vhost-user, with a server in this process.

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use walvisor_devices::control::DeviceControl;
use walvisor_devices::transport::Device;
use walvisor_devices::vhost_user::{Server, Service};
use walvisor_testkit::virtio::{DeviceOwner, VhostUserRegisters};

use super::Memory;

/// The control of a device, and its server.
pub struct Owner {
    control: Arc<dyn DeviceControl>,
    _server: Server,
}

impl DeviceOwner for Owner {
    fn capacity_changed(&self) {
        self.control.capacity_changed();
    }

    fn pause(&self) {
        self.control.pause().expect("a pause");
    }

    fn resume(&self) {
        self.control.resume();
    }

    fn set_write_cache(&self, on: bool) -> bool {
        self.control.set_write_cache(on)
    }
}

/// Serves a device. `seg_max`: the offset of that field. `control`: of the device, once it is
/// served.
pub fn serve<D: Device + 'static>(
    device: D,
    memory: &Memory,
    seg_max: u64,
    control: impl FnOnce(&Service<D>) -> Arc<dyn DeviceControl>,
) -> VhostUserRegisters<Owner> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).expect("a socket");
    let service = Service::new(listener, device, "test").expect("a service");
    let control = control(&service);
    let _server = Server::start(vec![service]).expect("a server");
    VhostUserRegisters::connect(&path, memory, seg_max, Owner { control, _server })
}
