//! Sockets opened by systemd.

use std::process::{Command, Stdio};

use walvisor_testkit::wait_until;
use walvisor_tests::have;

use super::Client;
use crate::{Daemon, WALVISOR, create, noise};

#[test]
fn systemd_starts_the_daemon_when_a_front_end_comes() {
    if !have("systemd-socket-activate", "systemd") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "a.img", "1M");
    create(dir, "b.img", "2M");
    let places = ["a.sock", "b.sock"].map(|name| dir.join(name));
    let mut command = Command::new("systemd-socket-activate");
    for place in &places {
        command.arg("-l").arg(place);
    }
    command
        .args([WALVISOR, "serve", "vhost-user"])
        .args(["--disk", "path=a.img,socket=a.sock"])
        .args(["--disk", "path=b.img,socket=b.sock"])
        .stdin(Stdio::null());
    // The daemon prints nothing before a front-end connects.
    let daemon = Daemon::start_as(dir, &mut command, 0);
    wait_until("the sockets", || places[1].exists());
    let data = noise(4096);
    for (place, sectors) in places.iter().zip([2048, 4096]) {
        let mut client = Client::connect(place, 1);
        assert_eq!(client.capacity(), sectors);
        client.write(0, 0, 4096, &data);
        client.finish(0, 1);
        client.read(0, 1, 4096, data.len());
        client.finish(0, 1);
        assert_eq!(client.data(1, data.len()), data);
    }
    let errors = daemon.stop();
    assert!(!errors.contains("walvisor:"), "{errors}");
    // systemd removes the sockets, not the daemon.
    assert!(places.iter().all(|place| place.exists()));
}
