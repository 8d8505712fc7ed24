//! Random histories of a log and its archive: writes, checkpoints, restores in place, restarts, an
//! uploader that is killed and fenced, a replica that is killed, read and at last promoted, a store
//! that fails. What comes back is judged by what the disks were at each mark.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use walvisor_storage::{
    BackendQueue, Buffer, Commit, DiskOptions, Operation, Point, Retention, Store, export_disk,
    restore_disk,
};
use walvisor_testkit::{Random, Seeds, queue};

use super::faulty::FaultyStore;
use super::{Bench, SECTORS, archive_in, bytes_of, mark, often, options, settle};
use crate::error::{Error, ErrorKind};
use crate::expire::{ExpireOptions, expire_at};
use crate::follow::Replica;
use crate::remote::Archive;
use crate::restore::{RestoredDisk, verify};
use crate::survey::survey;
use crate::uploader::{UploadOptions, Uploader};

const DISKS: [&str; 2] = ["a", "b"];
const STEPS: usize = 80;

type States = BTreeMap<u64, [Vec<u8>; 2]>;

struct History {
    random: Random,
    bench: Bench,
    store: Option<Store>,
    now: [Vec<u8>; 2],
    /// What the disks were, by LSN.
    states: States,
    /// When the marks were made.
    times: BTreeMap<u64, u64>,
}

impl History {
    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn modify(&mut self) {
        let which = self.random.below(2) as usize;
        let sector = self.random.below(SECTORS);
        let sectors = 1 + self.random.below((SECTORS - sector).min(40));
        let range = sector as usize * 512..(sector + sectors) as usize * 512;
        let operation = match self.random.below(6) {
            0 => {
                self.now[which][range].fill(0);
                Operation::Discard {
                    sector,
                    sectors: sectors as u32,
                }
            }
            1 => {
                self.now[which][range].fill(0);
                Operation::WriteZeroes {
                    sector,
                    sectors: sectors as u32,
                    unmap: false,
                }
            }
            _ => {
                let mut data = Buffer::zeroed(range.len());
                self.random.fill(&mut data);
                self.now[which][range].copy_from_slice(&data);
                Operation::Write { sector, data }
            }
        };
        let mut port = self.store().disks()[which].open_port().unwrap();
        queue::run(&mut port, operation).unwrap();
        if self.random.one_in(3) {
            port.submit(2, Operation::Flush);
            port.kick();
            queue::wait(&mut port, 1);
        }
        drop(port);
        if self.random.one_in(2) {
            self.mark();
        }
    }

    fn mark(&mut self) {
        let Commit { lsn, unix_us, .. } = mark(&self.store().disks()[0]);
        self.states.insert(lsn, self.now.clone());
        self.times.insert(lsn, unix_us);
    }

    /// Restores one of the disks in place.
    fn rewind(&mut self) {
        let which = self.random.below(2) as usize;
        let known: Vec<u64> = self.states.keys().copied().collect();
        let Some(&to) = known.get(self.random.below(known.len().max(1) as u64) as usize) else {
            return;
        };
        // It may be too long ago.
        if let Ok(done) = self.store().disks()[which].rewind(Point::Lsn(to)) {
            self.now[which] = self.states[&to][which].clone();
            if let Some(lsn) = done.lsn {
                self.states.insert(lsn, self.now.clone());
            }
        }
    }

    /// Lets the points before one of the marks expire. The others stay, even if the store fails in
    /// the middle.
    fn expire(&mut self, archive: &Archive, store: &FaultyStore, grace: Duration) {
        let known: Vec<(u64, u64)> = self.times.iter().map(|(lsn, us)| (*lsn, *us)).collect();
        let which = self.random.below(known.len().max(1) as u64) as usize;
        let Some(&(lsn, unix_us)) = known.get(which) else {
            return;
        };
        let options = ExpireOptions {
            keep: Duration::ZERO,
            keep_daily: self.random.below(2) as u32,
            grace,
            dry_run: false,
        };
        let oldest = || {
            let rate = store.fail_one_in(0);
            let found = survey(archive).ok();
            store.fail_one_in(rate);
            let newest = found?.spans.into_iter().next()?;
            newest.bases.first().map(|base| base.exact.lsn)
        };
        let before = oldest();
        let _ = archive.block_on(expire_at(archive, &options, unix_us));
        let after = oldest();
        assert_eq!(before.is_some(), after.is_some());
        assert!(after <= before.max(Some(lsn)), "{after:?} {before:?} {lsn}");
    }

    fn reopen(&mut self) {
        self.store.take().unwrap().close().unwrap();
        self.store = Some(self.bench.open(&DISKS));
    }

    /// Lets the replica follow, or go on after a kill, and compares what it is then. Returns it
    /// unless it was killed.
    fn follow<'a>(
        &mut self,
        archive: &'a Archive,
        replica: Option<Replica<'a>>,
    ) -> Option<Replica<'a>> {
        let dir = self.bench.dir.path().join("replica");
        let Some(mut replica) = replica else {
            let opened = Replica::open(archive, &dir, &mut |_, _| {});
            return opened.map_err(expected).ok();
        };
        let state = replica.tick().map_err(expected);
        if let Ok(state) = state
            && let Some(wanted) = self.states.get(&state.last.lsn)
        {
            self.judge_disks(&replica.disks(), replica.log_dir(), wanted);
        }
        let killed = self.random.one_in(if state.is_ok() { 8 } else { 2 });
        (!killed).then_some(replica)
    }

    fn judge_disks(&self, disks: &[RestoredDisk], log_dir: &Path, wanted: &[Vec<u8>; 2]) {
        for (which, disk) in disks.iter().enumerate() {
            let bytes = bytes_of(&disk.path, log_dir);
            assert!(
                bytes == wanted[which],
                "{}: disk {which} is another",
                log_dir.display()
            );
        }
    }

    /// Compares what comes back as of a point.
    fn judge(&self, archive: &Archive, at: Point, wanted: &[Vec<u8>; 2]) {
        let (_dir, restored) = self.bench.restore(archive, at).unwrap();
        self.judge_disks(&restored.disks, &restored.log_dir, wanted);
        // Its past is there, too.
        for (&lsn, wanted) in self
            .states
            .range(..=restored.commit.lsn)
            .rev()
            .step_by(7)
            .take(2)
        {
            let raw = restored.disks[1].path.with_extension("past");
            let (disk, log) = (&restored.disks[1].path, &restored.log_dir);
            let past = restore_disk(disk, log, Point::Lsn(lsn), &raw, None, &mut |_, _| {});
            if past.is_ok() {
                assert!(
                    std::fs::read(&raw).unwrap() == wanted[1],
                    "{at}: the past at {lsn}"
                );
                std::fs::remove_file(&raw).unwrap();
            }
        }
    }
}

/// What a store that fails may do to a replica.
fn expected(error: Error) {
    let kinds = [
        ErrorKind::Unavailable,
        ErrorKind::NotFound,
        ErrorKind::Damaged,
    ];
    assert!(kinds.contains(&error.kind()), "{error}");
}

/// Returns how many faults there were.
fn run(seed: u64) -> u64 {
    let mut random = Random(seed);
    let retain = [
        Retention::Nothing,
        Retention::All,
        Retention::Bytes(256 << 10),
    ];
    let bench = Bench::new(&DISKS, retain[random.below(3) as usize]);
    let rate = if random.one_in(4) {
        0
    } else {
        4 + random.below(12)
    };
    let faulty = Arc::new(FaultyStore::new(bench.store.clone(), seed, rate));
    let archive = archive_in(faulty.clone());
    let rarely = UploadOptions {
        base_every: None,
        ..UploadOptions::default()
    };
    let log = bench.log();
    let mut history = History {
        random,
        store: Some(bench.open(&DISKS)),
        bench,
        now: [(); 2].map(|()| vec![0; SECTORS as usize * 512]),
        states: BTreeMap::new(),
        times: BTreeMap::new(),
    };
    let mut up: Option<Uploader<'_>> = None;
    let mut replica: Option<Replica<'_>> = None;
    for _ in 0..STEPS {
        match history.random.below(26) {
            21.. => replica = history.follow(&archive, replica),
            0 => drop(history.store().disks()[0].checkpoint().unwrap()),
            1 => history.rewind(),
            2 => history.reopen(),
            3 => up = None,
            4..13 => history.modify(),
            13 => {
                // What an uploader has begun may come late, but not an hour late.
                let grace = if rate == 0 && up.is_none() { 0 } else { 3600 };
                history.expire(&archive, &faulty, Duration::from_secs(grace));
            }
            _ => match &mut up {
                None => {
                    let options = if history.random.one_in(2) {
                        rarely.clone()
                    } else {
                        often()
                    };
                    up = Uploader::new(&archive, &log, options).ok();
                }
                Some(working) => match working.tick() {
                    Err(error) if error.kind() != ErrorKind::Unavailable => up = None,
                    _ => {}
                },
            },
        }
    }
    history.mark();
    drop(up);
    faulty.fail_one_in(0);
    // A claim that was late may come in between.
    let again = || Uploader::new(&archive, &log, rarely.clone());
    let mut up = (0..20).find_map(|_| again().ok()).expect("an uploader");
    let tick = settle(&mut up);
    let (&newest, wanted) = history.states.last_key_value().unwrap();
    assert_eq!(tick.last.lsn, newest);
    history.judge(&archive, Point::Newest, wanted);
    let found = survey(&archive).unwrap();
    let oldest = found.spans[0].bases[0].exact.lsn;
    let reachable: Vec<u64> = history
        .states
        .range(oldest..)
        .map(|(lsn, _)| *lsn)
        .collect();
    for _ in 0..4 {
        let lsn = reachable[history.random.below(reachable.len() as u64) as usize];
        history.judge(&archive, Point::Lsn(lsn), &history.states[&lsn]);
        verify(&archive, Point::Lsn(lsn), &mut |_, _| {}).unwrap();
    }
    drop(replica);
    promote(&history, &archive, up);
    let store = history.store.take().unwrap();
    store.close().unwrap();
    // What was archived is what the disks are.
    for (which, name) in DISKS.iter().enumerate() {
        let (disk, raw) = (history.bench.disk(name), history.bench.disk("raw"));
        export_disk(&disk, &log, &raw, true, None, &mut |_, _| {}).unwrap();
        assert!(std::fs::read(raw).unwrap() == history.now[which]);
    }
    faulty.faults.load(std::sync::atomic::Ordering::Relaxed)
}

/// Promotes the replica: it is what the disks are, the uploader stops, and the archive goes on.
fn promote(history: &History, archive: &Archive, mut up: Uploader<'_>) {
    let (&newest, wanted) = history.states.last_key_value().unwrap();
    let dir = history.bench.dir.path().join("replica");
    let replica = Replica::open(archive, &dir, &mut |_, _| {}).unwrap();
    let (disks, log_dir) = (replica.disks(), replica.log_dir().to_owned());
    assert_eq!(replica.promote().unwrap().commit.lsn, newest);
    history.judge_disks(&disks, &log_dir, wanted);
    mark(&history.store().disks()[0]);
    let fenced = (0..20).find_map(|_| up.tick().err());
    assert_eq!(fenced.unwrap().kind(), ErrorKind::Fenced);
    let opened: Vec<_> = disks
        .iter()
        .map(|disk| DiskOptions::new(&disk.path))
        .collect();
    let store = Store::open(&log_dir, &opened, &options(Retention::Nothing)).unwrap();
    queue::write(&mut store.disks()[0].open_port().unwrap(), 3, 77, 1);
    mark(&store.disks()[0]);
    settle(&mut Uploader::new(archive, &log_dir, UploadOptions::default()).unwrap());
    store.close().unwrap();
    let mut wanted = wanted.clone();
    wanted[0][3 * 512..4 * 512].fill(77);
    let (_dir, restored) = history.bench.restore(archive, Point::Newest).unwrap();
    history.judge_disks(&restored.disks, &restored.log_dir, &wanted);
}

/// `WALVISOR_SEED=N` replays one history; `WALVISOR_ARCHIVE_HISTORIES=N` runs more or fewer.
#[test]
fn random_histories() {
    let seeds = Seeds::of("random_histories", "WALVISOR_ARCHIVE_HISTORIES", 8, 8);
    println!("{seeds}");
    let mut faults = 0;
    for seed in seeds.iter() {
        let ran = std::panic::catch_unwind(|| run(seed));
        faults += ran.unwrap_or_else(|_| panic!("{}", seeds.failed(seed, "-p walvisor-archive")));
    }
    println!("{faults} faults");
}
