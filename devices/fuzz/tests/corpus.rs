//! Every input of the corpora passes its target's harness, within the bounds on allocations, on an
//! ordinary build.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use walvisor_devices_fuzz::bounded::DeviceBounds;
use walvisor_devices_fuzz::{cdb, corpus, mmio, net, pci, requests, tcmu_ring, virtio_scsi};

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// A test of each target's corpus.
macro_rules! replay {
    ($($name:ident: $target:ident,)*) => {
        $(#[test]
        fn $name() {
            corpus::replay(&corpora().join(stringify!($target)), $target::run);
        })*

        #[test]
        fn every_corpus_is_replayed() {
            let directories = fs::read_dir(corpora()).unwrap();
            let names = directories.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let targets = [$(stringify!($target)),*].map(str::to_owned);
            assert_eq!(names.collect::<BTreeSet<_>>(), BTreeSet::from(targets));
        }
    };
}

replay! {
    inputs_of_cdb_pass: cdb,
    inputs_of_mmio_pass: mmio,
    inputs_of_net_pass: net,
    inputs_of_pci_pass: pci,
    inputs_of_requests_pass: requests,
    inputs_of_tcmu_ring_pass: tcmu_ring,
    inputs_of_virtio_scsi_pass: virtio_scsi,
}
