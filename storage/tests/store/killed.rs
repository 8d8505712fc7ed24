//! A SIGKILL in the middle of writes loses nothing that was acknowledged, and tears nothing.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use walvisor_storage::{Buffer, DiskOptions, EngineKind, Operation, Store, default_log_dir};

use crate::support::{TestDisk, flush, only, port, read, run, small};

const DISK: &str = "WALVISOR_TEST_DISK";
const FIRST: &str = "WALVISOR_TEST_FIRST";

/// Writes until killed, as the child process of the test below. Four threads write to sectors of
/// their own, and each sends the parent the number of a write only after its FLUSH completed.
fn write_until_killed(disk: &Path, first: u64) {
    let disks = [DiskOptions::new(disk)];
    let store = Store::open(&default_log_dir(disk), &disks, &small(EngineKind::Auto)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let mut port = port(&store, 0);
            scope.spawn(move || {
                for number in first..u64::MAX {
                    // Every sector of a 16 KiB write has the write's number, so that a torn write
                    // shows.
                    let data = Buffer::from(&number.to_le_bytes().repeat(2048)[..]);
                    let sector = thread * 32;
                    run(&mut port, Operation::Write { sector, data }).unwrap();
                    flush(&mut port);
                    let line = format!("{thread} {number}\n");
                    std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
                }
            });
        }
    });
}

#[test]
fn killed_processes_lose_nothing_acknowledged_and_tear_nothing() {
    if let Some(disk) = std::env::var_os(DISK) {
        let first = std::env::var(FIRST).unwrap().parse().unwrap();
        return write_until_killed(&PathBuf::from(disk), first);
    }
    let place = TestDisk::new();
    for round in 0..5u64 {
        // Numbers only grow, so that an earlier round's write is never taken for this round's.
        let first = round * 1_000_000_000 + 1;
        let mut child = only("killed::killed_processes_lose_nothing_acknowledged_and_tear_nothing")
            .env(DISK, &place.disk)
            .env(FIRST, first.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut acknowledged = [0u64; 4];
        let (mut lines, mut killed) = (0, false);
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            let mut words = line.split(' ').map(str::parse::<u64>);
            if let (Some(Ok(thread)), Some(Ok(number))) = (words.next(), words.next()) {
                acknowledged[thread as usize] = number;
                lines += 1;
            }
            // The number of lines differs in each round, so that the kill meets the log in another
            // state.
            let enough = lines >= 100 + round * 150 && acknowledged.iter().all(|&last| last > 0);
            if enough && !std::mem::replace(&mut killed, enough) {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(killed, "the child ended by itself");
        let store = place.open();
        for (thread, &number) in acknowledged.iter().enumerate() {
            let data = read(&mut port(&store, 0), thread as u64 * 32, 32);
            let found = u64::from_le_bytes(data[..8].try_into().unwrap());
            let whole = data.chunks(8).all(|word| word == found.to_le_bytes());
            assert!(whole, "torn at {found}");
            let told = format!("thread {thread}: {number} acknowledged, {found} found");
            assert!(found >= number, "{told}");
        }
    }
}
