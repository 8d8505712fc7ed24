//! SIGKILL in the middle: nothing acknowledged is lost, nothing torn. In a file, and so a process, of its own:
//! a child between fork and exec holds on to the locks of every other test in its parent.

mod support;

use std::path::Path;

use support::{Place, flush, read, run, small};
use walvisor_storage::{Buffer, DiskOptions, EngineKind, Operation, Store, default_log_dir};

/// Writes until killed, as the child process of the test below: four threads, each on sectors of its own, each
/// telling the parent the number of a write only after its FLUSH completed.
fn write_until_killed(disk: &Path) {
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
                for number in 1..u64::MAX {
                    // Every sector of a 16 KiB write carries its number: a torn one shows.
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
        return write_until_killed(Path::new(&disk));
    }
    let place = Place::new();
    for round in 0..5u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "killed_processes_lose_nothing_acknowledged_and_tear_nothing",
                "--nocapture",
            ])
            .env("WALVISOR_TEST_DISK", &place.disk)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(200 + round * 37));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        let mut acknowledged = [0u64; 4];
        for line in String::from_utf8(output.stdout).unwrap().lines() {
            let mut words = line.split(' ').map(str::parse::<u64>);
            if let (Some(Ok(thread)), Some(Ok(number))) = (words.next(), words.next()) {
                acknowledged[thread as usize] = number;
            }
        }
        assert!(
            acknowledged.iter().all(|&number| number > 0),
            "round {round} was too short: {acknowledged:?}"
        );
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
