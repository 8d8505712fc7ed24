//! The examples do what they say.

use std::fs;
use std::path::Path;

use walvisor_storage::{DiskOptions, Point, Store, StoreOptions, default_log_dir};

#[allow(dead_code)]
#[path = "../../examples/backup.rs"]
mod backup;
#[allow(dead_code)]
#[path = "../../examples/disk.rs"]
mod disk;
#[allow(dead_code)]
#[path = "../../examples/past.rs"]
mod past;

fn newest(image: &Path) -> u8 {
    past::first_byte(image, Point::Newest).unwrap()
}

#[test]
fn a_disk_counts_and_shows_what_it_was() {
    let place = tempfile::tempdir().unwrap();
    let image = &place.path().join("disk.img");
    for run in 1..=3 {
        assert_eq!(disk::count(image).unwrap(), run);
        assert_eq!(newest(image), run);
    }
    for run in 1..=2 {
        let at = format!("lsn:{run}").parse().unwrap();
        assert_eq!(past::first_byte(image, at).unwrap(), run as u8);
    }
    let error = past::first_byte(image, "cid:99".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("cid:99"), "{error}");
}

#[test]
fn a_backup_has_what_only_the_log_holds_and_a_later_one_replaces_it() {
    let place = tempfile::tempdir().unwrap();
    let [image, copy] = ["disk.img", "copy.img"].map(|name| place.path().join(name));
    for run in 1..=2 {
        disk::count(&image).unwrap();
        let before = fs::read(&image).unwrap();
        // The log keeps an hour of history, so the image lags behind.
        assert_eq!(before[0], 0);
        let done = backup::backup(&image, &copy).unwrap();
        assert_eq!((done.size, done.copied > 0), (64 << 20, true));
        let copied = fs::read(&copy).unwrap();
        assert!(copied[0] == run && copied[1..] == before[1..]);
        assert!(fs::read(&image).unwrap() == before);
    }
    fs::rename(&image, place.path().join("elsewhere")).unwrap();
    let error = backup::backup(&image, &copy).unwrap_err().to_string();
    assert!(error.contains("disk.img"), "{error}");
    assert_eq!(fs::read(&copy).unwrap()[0], 2);
}

#[test]
fn a_disk_that_another_handle_has_open_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let image = &place.path().join("disk.img");
    disk::count(image).unwrap();
    let disks = [DiskOptions::new(image)];
    let options = StoreOptions::default();
    let store = Store::open(&default_log_dir(image), &disks, &options).unwrap();
    let error = disk::count(image).unwrap_err().to_string();
    assert!(error.contains("disk.img"), "{error}");
    store.close().unwrap();
    assert_eq!(disk::count(image).unwrap(), 2);
}
