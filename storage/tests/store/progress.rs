//! The progress that opening a log reports during recovery.

use crate::support::{SIZE, TestDisk, flush, small, write};
use walvisor_storage::{DiskOptions, EngineKind, Store, StoreOptions, create_disk};

#[test]
fn recovery_tells_of_every_segment_and_of_none_after_a_close() {
    let place = TestDisk::empty();
    // More than a segment, and less than half of the ring, which would start a checkpoint.
    let options = StoreOptions {
        max_segments: 16,
        ..small(EngineKind::Auto)
    };
    create_disk(&place.disk, SIZE, &place.log(), &options).unwrap();
    let store = place.open();
    let mut port = store.disks()[0].open_port().unwrap();
    for i in 0..6 {
        write(&mut port, i * 512, 1, 512);
    }
    flush(&mut port);
    let crashed = place.crash();
    let open = |place: &TestDisk| {
        let mut told = Vec::new();
        let options = [DiskOptions::new(&place.disk)];
        let store = Store::open_with_progress(
            &place.log(),
            &options,
            &small(EngineKind::Auto),
            &mut |passed, total| told.push((passed, total)),
        );
        store.unwrap().close().unwrap();
        told
    };
    let told = open(&crashed);
    let segment = 1 << 20;
    assert!(told.len() >= 2, "{told:?}");
    for (index, step) in (1..).zip(&told) {
        assert_eq!(*step, (index * segment, told.len() as u64 * segment));
    }
    assert_eq!(open(&crashed), []);
}
