//! Looks at disks in use, which their daemon serves: `walvisor ctl SOCKET look`.

use walvisor_testkit::nbd::{RawClient, WRITE};
use walvisor_testkit::wait_until;
use walvisor_tests::run_sessions;

use super::{Daemon, create, ctl, ctl_refused, read, test_dir, told};

#[test]
fn looks_at_a_disk_in_use_are_served_and_end() {
    let dir = &test_dir();
    create(dir, "disk.img", "8M");
    let disk = "--control ctl --disk path=disk.img,socket=s,retain=all";
    let daemon = Daemon::start(dir, disk);
    let mut client = RawClient::extended(&dir.join("s"));
    let mut commit = |byte: u8| {
        client.write(1, 0, &[byte; 4096]);
        client.flush(2);
    };
    commit(1);
    commit(2);
    let open = || ctl(dir, "looks")["looks"].as_array().unwrap().len();
    let gone = |socket: &str| wait_until(socket, || !dir.join(socket).exists());
    let place = |socket: &str| dir.join(socket).display().to_string();
    let byte = |socket: &str| read(&mut RawClient::extended(&dir.join(socket)), 0, 4096)[0];
    for (lsn, socket) in [(1, "one"), (2, "two")] {
        let told = told(
            dir,
            &format!("look --at lsn:{lsn} --keep --socket {socket}"),
        );
        let place = place(socket);
        assert_eq!(
            told,
            format!(
                "serving disk.img as of lsn:{lsn}: 8 MiB at nbd+unix:///disk.img?socket={place}\n"
            )
        );
    }
    commit(3);
    assert_eq!((open(), byte("one"), byte("two"), byte("s")), (2, 1, 2, 3));
    run_sessions("looks", dir, []);
    gone("t");
    // A look that is ended is gone, with the name of its socket.
    assert_eq!(ctl(dir, "unlook one")["socket"], place("one"));
    gone("one");

    // One without --keep ends with its last client; what is written to it is seen there alone.
    told(dir, "look --scratch --socket newest");
    assert_eq!(open(), 2);
    let mut first = RawClient::extended(&dir.join("newest"));
    first.write(1, 0, &[0x55; 4096]);
    first.flush(2);
    commit(4);
    assert_eq!((byte("newest"), byte("s")), (0x55, 4));
    assert_eq!(read(&mut first, 4096, 512), [0; 512], "it has a client");
    drop(first);
    gone("newest");
    assert_eq!(open(), 1);
    drop(client);
    // The daemon ends, and the looks with it.
    assert_eq!(daemon.stop(), "");
    gone("two");
}

#[test]
fn a_look_is_had_through_nbd_whatever_the_disks_door() {
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    let disk = "--control ctl --disk path=disk.img,socket=v";
    let daemon = Daemon::start_door(dir, "vhost-user", disk);
    told(dir, "look --socket t");
    let mut client = RawClient::extended(&dir.join("t"));
    client.request(1 << 5, WRITE, 1, 0, 512);
    client.send(&[1; 512]);
    assert_eq!(client.reply().kind, 0x8001);
    drop(client);
    assert_eq!(daemon.stop(), "");
    let daemon = Daemon::start(dir, "--control ctl --disk backend=ram,size=1M,socket=s");
    ctl_refused(dir, "look --socket t", &["it has no log"]);
    assert_eq!(daemon.stop(), "");
}
