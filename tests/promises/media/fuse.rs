//! A FUSE file system that is read and written with O_DIRECT. FUSE passes a write's `RWF_DSYNC` on
//! as a flag at most, which most servers ignore. And a FUSE file system without holes.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use walvisor_storage::{Operation, create_disk, default_log_dir};
use walvisor_testkit::{Process, own_mounts, unmount, wait_until};
use walvisor_tests::have;

use crate::{carry_out, open, options, write};

/// bindfs, which shows a directory at another path, and logs each request to a file.
struct BindMount {
    // Dropped before its directory.
    process: Process,
    dir: tempfile::TempDir,
}

impl BindMount {
    fn new() -> Result<Self, String> {
        if !have("bindfs", "bindfs") {
            return Err("no bindfs".to_owned());
        }
        own_mounts().map_err(|error| error.to_string())?;
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        for name in ["kept", "shown"] {
            std::fs::create_dir(dir.path().join(name)).map_err(|error| error.to_string())?;
        }
        let told = File::create(dir.path().join("told")).map_err(|error| error.to_string())?;
        let mut command = Command::new("bindfs");
        command
            .args(["-d", "-o", "direct_io"])
            .args(["kept", "shown"].map(|name| dir.path().join(name)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(told);
        let process = Process::spawn(&mut command);
        let mut shown = Self { process, dir };
        let place = shown.top().display().to_string();
        let mut ended = None;
        wait_until("bindfs", || {
            ended = shown.process.try_wait().unwrap();
            let mounts = std::fs::read_to_string("/proc/thread-self/mounts").unwrap();
            ended.is_some() || mounts.contains(&place)
        });
        let why = ended.map(|status| format!("bindfs: {status}"));
        why.map_or(Ok(shown), Err)
    }

    fn top(&self) -> PathBuf {
        self.dir.path().join("shown")
    }

    /// Number of requests of a kind that the server has received so far.
    fn count(&self, kind: &str) -> usize {
        let told = std::fs::read_to_string(self.dir.path().join("told")).unwrap();
        let kind = format!("opcode: {kind} (");
        told.lines().filter(|line| line.contains(&kind)).count()
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        unmount(&self.top());
    }
}

fn disk(top: &Path, size: u64) -> (PathBuf, PathBuf) {
    let disk = top.join("disk.img");
    let log = default_log_dir(&disk);
    create_disk(&disk, size, &log, &options()).unwrap();
    (disk, log)
}

#[test]
fn a_server_that_looks_at_no_flag_gets_a_sync_for_each_flush() {
    let shown = match BindMount::new() {
        Ok(shown) => shown,
        Err(why) => return println!("skipped: no FUSE: {why}"),
    };
    let (disk, log) = disk(&shown.top(), 1 << 20);
    let store = open(&disk, &log);
    let mut port = store.disks()[0].open_port().unwrap();
    // The first write of a log takes a segment, which needs a sync of its own.
    carry_out(&mut port, vec![write(0, &[1; 4096]), Operation::Flush]);
    for round in 0..5 {
        let before = shown.count("FSYNC");
        carry_out(&mut port, vec![write(0, &[round; 4096]), Operation::Flush]);
        assert!(shown.count("FSYNC") > before, "round {round}");
    }
    drop(port);
    store.close().unwrap();
}

#[test]
fn a_discard_where_there_are_no_holes_takes_no_space() {
    const SIZE: u64 = 200 << 20;
    let shown = match BindMount::new() {
        Ok(shown) => shown,
        Err(why) => return println!("skipped: no FUSE: {why}"),
    };
    let (disk, log) = disk(&shown.top(), SIZE);
    let data: Vec<u8> = (0..1 << 16).map(|n| n as u8 | 1).collect();
    let store = open(&disk, &log);
    let mut port = store.disks()[0].open_port().unwrap();
    let sectors = SIZE / 512;
    carry_out(
        &mut port,
        vec![
            write(sectors / 2, &data),
            write(sectors - 128, &data),
            Operation::Flush,
        ],
    );
    drop(port);
    store.close().unwrap();
    let taken = || std::fs::metadata(&disk).unwrap().blocks() * 512;
    let before = taken();
    let store = open(&disk, &log);
    let mut port = store.disks()[0].open_port().unwrap();
    let all = Operation::Discard {
        sector: 0,
        sectors: (sectors - 64) as u32,
    };
    carry_out(&mut port, vec![all, Operation::Flush]);
    drop(port);
    store.close().unwrap();
    assert!(taken() <= before, "{} after {before}", taken());
    let bytes = std::fs::read(&disk).unwrap();
    let (zeroes, kept) = bytes.split_at(SIZE as usize - (64 << 9));
    assert!(zeroes.iter().all(|&byte| byte == 0));
    assert_eq!(kept, &data[1 << 15..]);
}
