//! A SIGKILL in the middle of writes loses nothing that was acknowledged, and tears nothing. This
//! test is in a file, and so a process, of its own: between fork and exec, a child holds the locks
//! of every other test in its parent.

use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::support::{TestDisk, flush, read, run, small};
use walvisor_storage::{Buffer, DiskOptions, EngineKind, Operation, Store, default_log_dir};

/// Writes until killed, as the child process of the test below. Four threads write to sectors of
/// their own, and each sends the parent the number of a write only after its FLUSH completed.
fn write_until_killed(disk: &Path, first: u64) {
    use std::io::Write;
    let store = Store::open(
        &default_log_dir(disk),
        &[DiskOptions::new(disk)],
        &small(EngineKind::Auto),
    )
    .unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let mut port = store.disks()[0].open_port().unwrap();
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
    if let Some(disk) = std::env::var_os("WALVISOR_TEST_DISK") {
        let first = std::env::var("WALVISOR_TEST_FIRST").unwrap();
        return write_until_killed(Path::new(&disk), first.parse().unwrap());
    }
    let place = TestDisk::new();
    for round in 0..5u64 {
        // Numbers only grow, so that an earlier round's write is never taken for this round's.
        let first = round * 1_000_000_000 + 1;
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "killed::killed_processes_lose_nothing_acknowledged_and_tear_nothing",
                "--nocapture",
            ])
            .env("WALVISOR_TEST_DISK", &place.disk)
            .env("WALVISOR_TEST_FIRST", first.to_string())
            .stdout(std::process::Stdio::piped())
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
            let enough =
                lines >= 100 + round * 333 && acknowledged.iter().all(|&number| number > 0);
            if enough && !killed {
                child.kill().unwrap();
                killed = true;
            }
        }
        child.wait().unwrap();
        assert!(killed, "the child ended by itself");
        let store = place.open();
        let mut port = store.disks()[0].open_port().unwrap();
        for (thread, &number) in acknowledged.iter().enumerate() {
            let data = read(&mut port, thread as u64 * 32, 32);
            let found = u64::from_le_bytes(data[..8].try_into().unwrap());
            assert!(
                data.chunks(8).all(|word| word == found.to_le_bytes()),
                "torn at {found}"
            );
            assert!(
                found >= number,
                "thread {thread}: {number} acknowledged, {found} found"
            );
        }
    }
}
