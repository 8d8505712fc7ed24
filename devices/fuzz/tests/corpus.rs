//! Every input of the corpora passes its target's harness, within the bounds on allocations, on an
//! ordinary build; and so does every input that is made of them by chance, as libFuzzer makes them.

use std::collections::BTreeSet;
use std::fs;
use std::panic::{catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use walvisor_devices_fuzz::bounded::DeviceBounds;
use walvisor_devices_fuzz::{cdb, corpus, mmio, net, pci, requests, tcmu_ring, virtio_scsi};
use walvisor_testkit::{Random, Seeds};

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// Random bytes, or an input of the corpus of which some bytes are changed, added or removed, or in
/// which another one begins.
fn changed(corpus: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    if random.one_in(4) {
        let len = 1 + random.below(200);
        return (0..len).map(|_| random.next() as u8).collect();
    }
    let any = |random: &mut Random| &corpus[random.below(corpus.len() as u64) as usize];
    let mut input = any(random).clone();
    for _ in 0..1 + random.below(6) {
        let at = random.below(input.len() as u64 + 1) as usize;
        let byte = random.next() as u8;
        match random.below(5) {
            0 | 1 if at < input.len() => input[at] = byte,
            2 if at < input.len() => drop(input.remove(at)),
            3 => {
                input.truncate(at);
                input.extend(any(random).iter().skip(1));
            }
            _ => input.insert(at, byte),
        }
    }
    input
}

fn run_changed(test: &'static str, target: &str, run: fn(&[u8])) {
    let inputs = corpus::inputs(&corpora().join(target));
    let seeds = Seeds::of(test, "WALVISOR_INPUTS", 150, 100);
    println!("{seeds}");
    let target = "-p walvisor-devices-fuzz --test corpus";
    corpus::alone(|| {
        for seed in seeds.iter() {
            // The last seed is that of an input that ends the process: see it with `--nocapture`.
            println!("seed {seed}");
            let input = changed(&inputs, &mut Random(seed));
            if let Err(panic) = catch_unwind(|| run(&input)) {
                println!("{input:02x?}\n{}", seeds.failed(seed, target));
                resume_unwind(panic);
            }
        }
    });
}

/// Two tests of each target's corpus. `devices/CONFORMANCE.md` names some.
macro_rules! replay {
    ($($target:ident { fn $name:ident; fn $changed:ident; })*) => {
        $(#[test]
        fn $name() {
            corpus::replay(&corpora().join(stringify!($target)), $target::run);
        }

        #[test]
        fn $changed() {
            run_changed(stringify!($changed), stringify!($target), $target::run);
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
    cdb {
        fn inputs_of_cdb_pass;
        fn changed_inputs_of_cdb_pass;
    }
    mmio {
        fn inputs_of_mmio_pass;
        fn changed_inputs_of_mmio_pass;
    }
    net {
        fn inputs_of_net_pass;
        fn changed_inputs_of_net_pass;
    }
    pci {
        fn inputs_of_pci_pass;
        fn changed_inputs_of_pci_pass;
    }
    requests {
        fn inputs_of_requests_pass;
        fn changed_inputs_of_requests_pass;
    }
    tcmu_ring {
        fn inputs_of_tcmu_ring_pass;
        fn changed_inputs_of_tcmu_ring_pass;
    }
    virtio_scsi {
        fn inputs_of_virtio_scsi_pass;
        fn changed_inputs_of_virtio_scsi_pass;
    }
}
