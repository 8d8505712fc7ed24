//! Kills in the middle of writes by several connections: no acknowledged write is lost, no write is
//! torn, and the surviving writes are a prefix.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use walvisor_tests::have;

use super::{Daemon, create, foreign};

const WRITERS: u64 = 4;
const SLOTS: u64 = 16;

/// Each writer fills its slots in turn with its count, 20 KiB at a time, and prints each count that
/// a FLUSH covers.
const WRITE: &str = r"
import nbd, os, threading
def write(writer):
    c = nbd.NBD()
    c.connect_unix('s')
    n = FIRST
    try:
        while True:
            slot = writer * 16 + n % 16
            c.pwrite(n.to_bytes(8, 'little') * 2560, slot * 32768)
            if n % 3 == 0:
                c.flush()
                os.write(1, b'%d %d\n' % (writer, n))
            n += 1
    except nbd.Error:
        pass
threads = [threading.Thread(target=write, args=(w,)) for w in range(4)]
for t in threads: t.start()
for t in threads: t.join()
";

/// Prints the count in each slot, and fails if a slot holds parts of two writes.
const READ: &str = "
for slot in range(64):
    data = h.pread(20480, slot * 32768)
    assert data == data[:8] * 2560, slot
    print(slot // 16, int.from_bytes(data[:8], 'little'))
";

#[test]
fn kills_lose_nothing_that_a_flush_covered() {
    if !have("nbdsh", "python3-libnbd") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "4M");
    let mut first = 1;
    for kill_after in [40, 300, 150] {
        let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
        // The program ends when its daemon is killed.
        let mut writers = foreign(dir, "nbdsh")
            .args(["-c", &WRITE.replace("FIRST", &first.to_string())])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(writers.stdout.take().unwrap()).lines();
        let mut acknowledged: HashMap<u64, u64> = HashMap::new();
        let mut note = |line: String| {
            let (writer, count) = line.split_once(' ').unwrap();
            acknowledged.insert(writer.parse().unwrap(), count.parse().unwrap());
        };
        for _ in 0..kill_after {
            note(lines.next().expect("the writers live").unwrap());
        }
        daemon.kill();
        lines.for_each(|line| note(line.unwrap()));
        writers.wait().unwrap();

        let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
        let mut held: HashMap<u64, Vec<u64>> = HashMap::new();
        for line in daemon.nbdsh(READ).lines() {
            let (writer, count) = line.split_once(' ').unwrap();
            let counts = held.entry(writer.parse().unwrap()).or_default();
            counts.push(count.parse().unwrap());
        }
        for writer in 0..WRITERS {
            let counts = &held[&writer];
            let newest = *counts.iter().max().unwrap();
            let told = acknowledged.get(&writer).copied().unwrap_or(0);
            assert!(
                newest >= told,
                "writer {writer}: {newest}, but {told} was acknowledged"
            );
            for (slot, &count) in counts.iter().enumerate() {
                // The newest count of this slot in a history that ends with `newest`.
                let back = (newest + SLOTS - slot as u64) % SLOTS;
                let expected = newest.checked_sub(back).filter(|&count| count >= first);
                match expected {
                    Some(expected) => assert_eq!(count, expected, "writer {writer}, slot {slot}"),
                    None => assert!(count < first, "writer {writer}, slot {slot}: {count}"),
                }
            }
        }
        first = held.values().flatten().max().unwrap() + 1;
        first = first.next_multiple_of(SLOTS);
        assert_eq!(daemon.stop(), "");
    }
}
