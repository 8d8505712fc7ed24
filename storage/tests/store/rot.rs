//! Bytes of a live log that the medium changes: reads of them fail, and they never reach a base
//! image.

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::support::{flush, read, run, small, write};
use walvisor_storage::{
    DamagedSectors, Disk, DiskOptions, EngineKind, ErrorKind, Failure, Operation, Store,
    create_disk, export_disk, inspect,
};

const SIZE: u64 = 1 << 20;

/// Two disks on one log.
struct Pair {
    dir: tempfile::TempDir,
    engine: EngineKind,
}

impl Pair {
    fn new(engine: EngineKind) -> Self {
        let pair = Self {
            dir: tempfile::tempdir().unwrap(),
            engine,
        };
        for name in ["a", "b"] {
            create_disk(&pair.at(name), SIZE, &pair.at("log"), &small(engine)).unwrap();
        }
        pair
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn open(&self) -> Store {
        let disks = ["a", "b"].map(|name| DiskOptions::new(self.at(name)));
        Store::open(&self.at("log"), &disks, &small(self.engine)).unwrap()
    }

    /// Flips a bit of the only segment in use.
    fn flip(&self, at: u64) {
        let path = self.at("log").join("segment-00000");
        let mut options = std::fs::File::options();
        let file = options.read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 16], at).unwrap();
        file.sync_all().unwrap();
    }

    fn base(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.at(name)).unwrap()
    }

    fn damaged(&self) -> Vec<DamagedSectors> {
        let report = inspect(&self.at("a"), &self.at("log")).unwrap();
        report.log.unwrap().damaged
    }
}

fn commit(disk: &Disk, sector: u64, byte: u8, sectors: usize) {
    let mut port = disk.open_port().unwrap();
    write(&mut port, sector, byte, sectors);
    flush(&mut port);
}

/// The byte that fills the sectors, or the failure of the read.
fn holds(disk: &Disk, sector: u64, sectors: u32) -> Result<u8, Failure> {
    let mut port = disk.open_port().unwrap();
    let data = run(&mut port, Operation::Read { sector, sectors })?.unwrap();
    assert!(data.iter().all(|&byte| byte == data[0]));
    Ok(data[0])
}

fn engines() -> [EngineKind; 2] {
    [EngineKind::Auto, EngineKind::Blocking]
}

#[test]
fn a_changed_byte_is_an_error_until_it_is_overwritten_and_other_disks_go_on() {
    for engine in engines() {
        let pair = Pair::new(engine);
        let store = pair.open();
        let [a, b] = store.disks() else {
            unreachable!()
        };
        // Two blocks of a, with its header at 4096 and its payload at 8192; then one of b.
        commit(a, 8, 1, 16);
        commit(b, 8, 2, 8);
        pair.flip(8192 + 4096 + 100);
        assert_eq!(holds(a, 8, 8), Ok(1));
        assert_eq!(holds(a, 16, 8), Err(Failure::Io));
        // Reading half of a block verifies the whole block.
        assert_eq!(holds(a, 20, 1), Err(Failure::Io));
        assert_eq!(holds(a, 8, 16), Err(Failure::Io));
        assert_eq!(holds(b, 8, 8), Ok(2));
        let error = a.checkpoint().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
        let text = error.to_string();
        assert!(
            text.contains("disk check") && text.contains("segment-00000"),
            "{text}"
        );
        // The other disk is copied and the damaged bytes are not; both disks go on.
        assert_eq!(pair.base("b")[8 * 512], 2);
        assert_eq!(pair.base("a")[16 * 512], 0);
        commit(a, 100, 3, 8);
        commit(b, 100, 4, 8);
        assert_eq!(store.close().unwrap_err().kind(), ErrorKind::Damaged);
        let named = DamagedSectors {
            disk: pair.at("a").canonicalize().unwrap(),
            sector: 16,
            sectors: 8,
            lsn: 1,
            segment: pair.at("log").join("segment-00000"),
            offset: 12288,
        };
        assert_eq!(pair.damaged(), [named]);
        let out = pair.at("out");
        let exported = export_disk(
            &pair.at("a"),
            &pair.at("log"),
            &out,
            false,
            None,
            &mut |_, _| {},
        );
        assert_eq!(exported.unwrap_err().kind(), ErrorKind::Damaged);
        assert!(!out.exists());

        let store = pair.open();
        let [a, b] = store.disks() else {
            unreachable!()
        };
        assert_eq!(holds(a, 16, 8), Err(Failure::Io));
        assert_eq!((holds(a, 8, 8), holds(a, 100, 8)), (Ok(1), Ok(3)));
        assert_eq!((holds(b, 8, 8), holds(b, 100, 8)), (Ok(2), Ok(4)));
        // Only half of the damaged block is overwritten: the other half is still needed.
        commit(a, 16, 5, 4);
        assert_eq!(
            (holds(a, 16, 4), holds(a, 20, 4)),
            (Ok(5), Err(Failure::Io))
        );
        assert_eq!(a.checkpoint().unwrap_err().kind(), ErrorKind::Damaged);
        commit(a, 20, 6, 4);
        assert_eq!((holds(a, 16, 4), holds(a, 20, 4)), (Ok(5), Ok(6)));
        a.checkpoint().unwrap();
        store.close().unwrap();
        assert_eq!(pair.damaged(), []);
        let base = pair.base("a");
        assert_eq!(
            [8, 16, 20, 100].map(|sector| base[sector * 512]),
            [1, 5, 6, 3]
        );
    }
}

/// Damage to bytes that had been overwritten before matters to no reader: the log is clean.
#[test]
fn damage_of_what_was_replaced_is_none() {
    let pair = Pair::new(EngineKind::Auto);
    let store = pair.open();
    let a = &store.disks()[0];
    commit(a, 8, 1, 8);
    commit(a, 8, 2, 8);
    pair.flip(8192);
    assert_eq!(holds(a, 8, 8), Ok(2));
    store.close().unwrap();
    assert_eq!(pair.base("a")[8 * 512], 2);
}

/// Many small parts are read through the page cache, and verified as well.
#[test]
fn a_checkpoint_of_many_parts_verifies_each() {
    let pair = Pair::new(EngineKind::Auto);
    let store = pair.open();
    let a = &store.disks()[0];
    let mut port = a.open_port().unwrap();
    // One batch: a header of a block or two, then the payloads in order.
    for i in 0..100_u8 {
        write(&mut port, u64::from(i) * 16, i + 1, 1);
    }
    flush(&mut port);
    let segment = std::fs::read(pair.at("log").join("segment-00000")).unwrap();
    let place = |byte: u8| {
        segment
            .chunks(512)
            .position(|sector| sector == [byte; 512])
            .unwrap()
    };
    pair.flip(place(50) as u64 * 512 + 7);
    let read_again = |port: &mut _| {
        (0..100_u8)
            .filter(|&i| {
                let operation = Operation::Read {
                    sector: u64::from(i) * 16,
                    sectors: 1,
                };
                run(port, operation).is_err()
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(read_again(&mut port), [49]);
    assert_eq!(a.checkpoint().unwrap_err().kind(), ErrorKind::Damaged);
    assert_eq!(read_again(&mut port), [49]);
    assert!(read(&mut port, 16, 1).iter().all(|&byte| byte == 2));
    drop(port);
    assert!(store.close().is_err());
    let base = pair.base("a");
    let missing = |i: &usize| base[i * 16 * 512] != *i as u8 + 1;
    // Parts next to the damaged one in the same run may stay in the log with it.
    let missing: Vec<usize> = (0..100).filter(missing).collect();
    assert_eq!(missing, [49]);
}

/// A log of the previous version is refused, and the error says what to do.
#[test]
fn a_log_of_version_1_is_refused_with_what_to_do() {
    let pair = Pair::new(EngineKind::Auto);
    let control = pair.at("log").join("control");
    let mut bytes = std::fs::read(&control).unwrap();
    for slot in bytes.chunks_mut(64 << 10) {
        slot[8] = 1;
        slot[12..16].fill(0);
        let crc = crc32c::crc32c(slot);
        slot[12..16].copy_from_slice(&crc.to_le_bytes());
    }
    std::fs::write(&control, bytes).unwrap();
    let disks = [DiskOptions::new(pair.at("a"))];
    let opened = Store::open(&pair.at("log"), &disks, &small(EngineKind::Auto));
    let error = opened.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::UnsupportedVersion);
    let text = error.to_string();
    assert!(
        text.contains("version 1") && text.contains("disk checkpoint"),
        "{text}"
    );
    assert!(Path::new(&pair.at("a")).exists());
}
