use std::time::Duration;

use super::{WRITE_BACK, Writer, written_back};
use crate::{
    BackendQueue, Buffer, CommitWait, DiskOptions, Failure, Operation, Port, Store, StoreOptions,
    create_disk, default_log_dir,
};

fn write(port: &mut Port, byte: u8) -> Result<Option<Buffer>, Failure> {
    port.end_for_test(Operation::Write {
        sector: 0,
        data: Buffer::from(&[byte; 4096][..]),
    })
}

fn read(port: &mut Port) -> Buffer {
    let read = Operation::Read {
        sector: 0,
        sectors: 8,
    };
    port.end_for_test(read).unwrap().unwrap()
}

/// A thread that has nothing else to do makes the sync of its lone FLUSH itself.
#[test]
fn a_lone_flush_wakes_no_other_thread() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    let log = default_log_dir(&disk);
    let options = StoreOptions {
        segment_size: 1 << 20,
        ..StoreOptions::default()
    };
    create_disk(&disk, 1 << 20, &log, &options).unwrap();
    let mut store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
    // The writer thread takes its first look at the log when the system lets it run. If that is
    // after the FLUSH has begun to wait, the writer leads the group.
    store.writer = None;
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 1).unwrap();
    port.submit(7, Operation::Flush);
    assert!(port.start(true), "this thread made the sync");
    let mut done = Vec::new();
    port.completions(&mut done);
    assert_eq!(
        (done[0].token, port.committer.log.counters.snapshot().syncs),
        (7, 1)
    );
    // A thread with other work leaves the sync to the writer thread.
    write(&mut port, 2).unwrap();
    port.submit(8, Operation::Flush);
    assert!(!port.start(false));
    store.writer = Some(Writer::start(&port.committer.log).unwrap());
    while done.len() < 2 {
        port.sleep_for_test();
        port.completions(&mut done);
    }
    assert!(done[1].result.is_ok());
}

/// Promise 5: after the log fails, every waiter and all later writes and flushes get an error,
/// reads go on, and closing reports the failure. Only reopening clears it, and then the
/// acknowledged data is there.
#[test]
fn an_error_is_final_until_reopened() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    let log = default_log_dir(&disk);
    let options = StoreOptions {
        segment_size: 1 << 20,
        // Of two clients only one waits, so its group is held.
        commit_wait: CommitWait {
            longest: Some(Duration::from_secs(3600)),
            count: Some(2),
        },
        ..StoreOptions::default()
    };
    create_disk(&disk, 1 << 20, &log, &options).unwrap();
    let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
    let mut first = store.disks()[0].open_port().unwrap();
    write(&mut first, 1).unwrap();
    first.end_for_test(Operation::Flush).unwrap();
    let mut ports = [first, store.disks()[0].open_port().unwrap()];
    // A FLUSH waits, its group not started yet, when the log fails.
    write(&mut ports[0], 2).unwrap();
    ports[0].submit(7, Operation::Flush);
    store.disks()[0]
        .log
        .poison(&std::io::Error::other("planted"));
    let mut done = Vec::new();
    ports[0].completions(&mut done);
    assert_eq!(
        (done[0].token, done[0].result.as_ref().unwrap_err()),
        (7, &Failure::Io)
    );
    for port in &mut ports {
        assert_eq!(
            port.end_for_test(Operation::Flush).unwrap_err(),
            Failure::Io
        );
        assert_eq!(write(port, 3).unwrap_err(), Failure::Io);
        assert!(read(port).iter().all(|&byte| byte == 2));
    }
    drop(ports);
    assert!(store.close().unwrap_err().to_string().contains("reopen"));
    let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    assert!(read(&mut port).iter().all(|&byte| byte == 1));
    write(&mut port, 4).unwrap();
    port.end_for_test(Operation::Flush).unwrap();
}

#[test]
fn write_back_covers_a_step_and_the_one_before() {
    const STEP: u64 = WRITE_BACK;
    for (written, expected) in [
        (0..STEP - 1, None),
        (4096..STEP, Some(0..STEP)),
        (STEP..STEP + 4096, None),
        (2 * STEP - 4096..2 * STEP + 4096, Some(0..2 * STEP)),
        (3 * STEP..5 * STEP + 1, Some(2 * STEP..5 * STEP)),
    ] {
        assert_eq!(written_back(written, STEP), expected);
    }
}
