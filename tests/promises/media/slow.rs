//! A device with slow writes, and a process that is killed with writes in flight. io_uring
//! completes these writes after the process is gone. The next process that opens the log waits for
//! them, so the log does not change after it was read.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use walvisor_storage::{
    BackendQueue, Buffer, DiskOptions, ErrorKind, LogReport, Operation, Store, create_disk,
    default_log_dir, inspect,
};
use walvisor_testkit::queue::wait;
use walvisor_testkit::{Process, wait_until};
use walvisor_tests::medium_fs::MediumFs;

use crate::options;

/// Duration of each write, once the medium is slow.
const WRITE: Duration = Duration::from_millis(100);
const CHILD: &str = "WALVISOR_TEST_DISK";

/// Writes and flushes until it is killed, and prints a line before each. Each write takes
/// [`WRITE`].
fn write_until_killed(disk: &Path) {
    let log = default_log_dir(disk);
    let store = Store::open(&log, &[DiskOptions::new(disk)], &options()).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    for number in 0u64.. {
        let data = Buffer::from(&number.to_le_bytes().repeat(4096)[..]);
        port.submit(1, Operation::Write { sector: 0, data });
        port.submit(2, Operation::Flush);
        println!("flushing {number}");
        wait(&mut port, 2);
    }
}

/// The content of the log. Retries while the log is locked: a process that waits for the device
/// ends only when the device has answered.
fn look(disk: &Path, log: &Path) -> LogReport {
    for _ in 0..40 {
        match inspect(disk, log) {
            Err(error) if error.kind() == ErrorKind::Locked => {}
            found => return found.unwrap().log.unwrap(),
        }
    }
    panic!("locked for two minutes");
}

#[test]
fn writes_in_flight_of_a_killed_process_are_waited_for() {
    if let Some(disk) = std::env::var_os(CHILD) {
        return write_until_killed(Path::new(&disk));
    }
    let mut fs = match MediumFs::new("ext4") {
        Ok(fs) => fs,
        Err(why) => return println!("skipped: no slow medium: {why}"),
    };
    let disk = fs.top().join("disk.img");
    let log = default_log_dir(&disk);
    create_disk(&disk, 8 << 20, &log, &options()).unwrap();
    fs.sync().unwrap();
    for round in 0..3 {
        fs.medium().set_write_time(WRITE);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "slow::writes_in_flight_of_a_killed_process_are_waited_for",
                "--nocapture",
            ])
            .env(CHILD, &disk)
            .stdout(Stdio::piped());
        let mut child = Process::spawn(&mut command);
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut flushing = lines
            .map_while(Result::ok)
            .filter(|line| line.starts_with("flushing"));
        // The first flush of a log may have to wait for a segment.
        for _ in 0..=round {
            flushing.next().expect("the child writes");
        }
        wait_until("a write", || fs.medium().writing() > 0);
        child.kill().unwrap();
        // The log is opened at once: the child may still be ending.
        let began = Instant::now();
        let found = look(&disk, &log);
        println!("found {found:?} after {:?}", began.elapsed());
        child.wait().unwrap();
        fs.medium().set_write_time(Duration::ZERO);
        // Everything that was in flight has ended then.
        fs.remount();
        let later = look(&disk, &log);
        assert_eq!(found, later, "something landed after the log was read");
    }
    let store = Store::open(&log, &[DiskOptions::new(&disk)], &options()).unwrap();
    store.close().unwrap();
}
