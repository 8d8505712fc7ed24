//! Logs that are damaged before their archive has them.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::process::{Signal, kill_process};
use walvisor_testkit::nbd::FLUSH;
use walvisor_testkit::process::{create, succeed};
use walvisor_testkit::s3::S3;
use walvisor_testkit::wait_until;

use super::{
    BLOCK, archive_of, assert_says, exported, push_of, run, start_synchronous, try_next, two_hosts,
    write_next,
};

/// Flips a bit of what the log in `dir` has of a block of these bytes.
fn damage(dir: &Path, byte: u8) {
    let segments = fs::read_dir(dir.join("disk.img.wal")).unwrap();
    let paths = segments.map(|entry| entry.unwrap().path());
    let found = paths.into_iter().find_map(|path| {
        let bytes = fs::read(&path).unwrap();
        let at = bytes.chunks(512).position(|sector| sector == [byte; 512])?;
        Some((path, at as u64 * 512))
    });
    let (path, at) = found.expect("the record is in the log");
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&[byte ^ 1], at).unwrap();
}

/// The push has not read it yet. The FLUSH that waits for it fails, and later ones, until the images
/// have passed the record.
#[test]
fn with_archive_sync_flushes_end_although_the_log_is_damaged_before_the_archive_has_it() {
    let store = S3::start("bucket");
    let url = store.url("bucket/one");
    let (_place, home, elsewhere) = two_hosts();
    create(&home, "disk.img", "1M");
    let (daemon, mut client) = start_synchronous(&home, &url);
    let mut written = 0;
    write_next(&mut client, &mut written);
    let push = push_of(&daemon);
    kill_process(push, Signal::STOP).unwrap();
    let offset = 100 * BLOCK as u64;
    client.write(7, offset, &[0xd5; BLOCK]);
    client.request(0, FLUSH, 8, 0, 0);
    wait_until("a FLUSH that waits", || {
        archive_of(&home)["waiting_requests"] == 1
    });
    damage(&home, 0xd5);
    kill_process(push, Signal::CONT).unwrap();
    assert_ne!(client.reply().kind, 0);
    assert!(!try_next(&mut client, &mut written));
    let told = archive_of(&home);
    let error = told["error"].as_str().unwrap();
    assert_says(error, &["can't be read", "'walvisor disk checkpoint'"]);
    assert!(
        told["running"] == true && told["waiting_requests"] == 0,
        "{told}"
    );

    client.write(9, offset, &[0; BLOCK]);
    succeed(&home, "ctl ctl checkpoint");
    wait_until("a FLUSH that succeeds", || {
        try_next(&mut client, &mut written)
    });
    write_next(&mut client, &mut written);
    drop(client);
    let errors = daemon.stop();
    let fail = "FLUSHes fail, because its archive can't get";
    assert_says(&errors, &[fail, "in epoch 2"]);
    run(&elsewhere, &format!("restore {url} back"));
    let found = exported(&elsewhere, "back/disk.img");
    assert_eq!((found[1], found[100]), (1, 0));
    assert!(found.contains(&written));
}
