//! The store on difficult media: ones that fail, slow ones, ones with sectors of 4 KiB, and file
//! systems without RWF_DSYNC or holes.

mod failing;
mod fuse;
mod sectors;
mod slow;

use std::path::Path;

use walvisor_storage::{
    BackendQueue, Buffer, Completion, DiskOptions, Operation, Port, Store, StoreOptions,
};
use walvisor_testkit::queue::wait;

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 256 << 10,
        max_segments: 4,
        ..StoreOptions::default()
    }
}

fn open(disk: &Path, log: &Path) -> Store {
    Store::open(log, &[DiskOptions::new(disk)], &options()).unwrap()
}

fn write(sector: u64, data: &[u8]) -> Operation {
    let data = Buffer::from(data);
    Operation::Write { sector, data }
}

/// Runs operations one after the other.
fn carry_out(port: &mut Port, operations: Vec<Operation>) -> Vec<Completion> {
    let mut done = Vec::new();
    for (number, operation) in operations.into_iter().enumerate() {
        port.submit(number as u64, operation);
        done.extend(wait(port, 1));
        assert!(done[number].result.is_ok(), "{:?}", done[number]);
    }
    done
}
