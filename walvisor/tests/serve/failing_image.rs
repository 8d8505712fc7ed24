//! One of two disks on a log can't be copied to its image, because that image's file system is
//! full, or does not answer. The other disk goes on for as long as it likes, and nothing is lost.

use std::fs;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;
use walvisor_storage::{StoreOptions, create_disk, move_to_log};
use walvisor_testkit::nbd::{FLUSH, READ, SimpleClient, WRITE};
use walvisor_testkit::{MemoryFs, wait_until};
use walvisor_tests::{have_python, second_reader};

use super::slow_holes::mount;
use super::{
    Daemon, MIB, assert_says, ctl_refused, disk_stats, noise, succeed, test_dir, text, told,
    walvisor,
};

const LENGTH: u64 = MIB / 16;

fn write(client: &mut SimpleClient, place: u64) {
    let mut data = noise(LENGTH as usize);
    let written = client.end(WRITE, place * LENGTH, LENGTH as usize, &mut data, false);
    written.unwrap();
}

fn flush(client: &mut SimpleClient) {
    client.end(FLUSH, 0, 0, &mut [], false).unwrap();
}

#[track_caller]
fn expect_written(client: &mut SimpleClient, places: Range<u64>) {
    let expected = noise(LENGTH as usize);
    for place in places {
        let mut found = vec![0; LENGTH as usize];
        let read = client.end(READ, place * LENGTH, found.len(), &mut found, false);
        assert!(read.is_ok(), "place {place}: {read:?}");
        assert!(found == expected, "place {place}");
    }
}

/// The same in an image.
#[track_caller]
fn expect_copied(image: &Path, places: Range<u64>) {
    let (bytes, expected) = (fs::read(image).unwrap(), noise(LENGTH as usize));
    for place in places {
        let at = (place * LENGTH) as usize;
        assert!(bytes[at..][..expected.len()] == expected, "place {place}");
    }
}

fn condition(dir: &Path, name: &str) -> Value {
    disk_stats(dir, name)["condition"].clone()
}

/// The disk whose image fails works from its log, and the other one for twice the log's room.
#[track_caller]
fn expect_both_to_work(dir: &Path, clients: &mut [SimpleClient; 2], places: Range<u64>) {
    for number in 0..2048 {
        write(&mut clients[1], number % 256);
        if number % 8 == 7 {
            flush(&mut clients[1]);
        }
    }
    let told = condition(dir, "sick");
    assert_eq!(told["name"], "copy_failing", "{told}");
    assert_eq!(told["refuses_writes"], false, "{told}");
    // On a busy machine its image may have been slow for a while.
    wait_until("the other image", || condition(dir, "well")["name"] == "ok");
    expect_written(&mut clients[0], places);
    expect_written(&mut clients[1], 0..256);
}

fn connect(dir: &Path) -> [SimpleClient; 2] {
    ["sick", "well"].map(|name| SimpleClient::connect(&dir.join("s"), name).unwrap())
}

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 4 * MIB,
        max_segments: 16,
        ..StoreOptions::default()
    }
}

/// The reader that was written from the format's page finds the spill file, too.
fn both_readers_agree(dir: &Path, image: &Path, disk_id: u32) {
    if !have_python() {
        return;
    }
    let image = image.display();
    let restore = format!("disk restore {image} --log log --at snapshot:kept -o first");
    succeed(dir, &restore);
    let read = second_reader()
        .args(["log", "kept", &disk_id.to_string()])
        .args([&image.to_string(), "second"])
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(read.status.success(), "{}", text(&read.stderr));
    let [first, second] = ["first", "second"].map(|file| fs::read(dir.join(file)).unwrap());
    assert!(first == second, "the readers differ");
}

#[test]
fn a_full_file_system_under_one_image_does_not_stop_the_other_disk() {
    let Some(small) = MemoryFs::tmpfs("size=1m") else {
        return;
    };
    let dir = &test_dir();
    let image = small.path().join("sick.img");
    for image in [&image, &dir.join("well.img")] {
        create_disk(image, 32 * MIB, &dir.join("log"), &options()).unwrap();
    }
    let arguments = format!(
        "--control ctl --disk path={},log=log,socket=s,serial=sick --disk \
         path=well.img,log=log,socket=s,serial=well",
        image.display()
    );
    let daemon = Daemon::start(dir, &arguments);
    let mut clients = connect(dir);
    (0..24).for_each(|place| write(&mut clients[0], place));
    flush(&mut clients[0]);
    expect_both_to_work(dir, &mut clients, 0..24);
    for request in ["checkpoint --disk sick", "remove-disk sick"] {
        ctl_refused(dir, request, &["No space left"]);
    }
    let stats = told(dir, "stats");
    assert!(stats.contains(" s, writes go on: "), "{stats}");
    told(dir, "snapshot kept");
    drop(clients);
    let errors = daemon.stop();
    assert_says(&errors, &["closed while its image lacks bytes"]);
    let info = succeed(dir, &format!("disk info {} --log log", image.display()));
    assert!(info.contains("a spill file beside the log has"), "{info}");
    let well = succeed(dir, "disk check well.img --log log");
    assert!(well.contains("clean"), "{well}");
    both_readers_agree(dir, &image, 1);

    // The file system is still full.
    let daemon = Daemon::start(dir, &arguments);
    let mut clients = connect(dir);
    expect_written(&mut clients[0], 0..24);
    small.remount("size=64m");
    told(dir, "checkpoint --disk sick");
    assert_eq!(condition(dir, "sick")["name"], "ok");
    drop(clients);
    let errors = daemon.stop();
    let back = "copied back once the image can be written";
    assert_says(&errors, &[back, "has everything"]);
    let names = fs::read_dir(dir.join("log")).unwrap();
    let mut names = names.map(|name| name.unwrap().file_name());
    assert!(!names.any(|name| name.to_string_lossy().starts_with("spill")));
    expect_copied(&image, 0..24);
}

#[test]
fn an_image_that_does_not_answer_does_not_stop_the_other_disk() {
    let dir = &test_dir();
    let Some(slow) = mount(dir) else {
        return;
    };
    let (image, log) = (dir.join("slow/disk.img"), dir.join("log"));
    create_disk(&dir.join("well.img"), 32 * MIB, &log, &options()).unwrap();
    move_to_log(&image, &dir.join("none"), &log, &options(), &[]).unwrap();
    let sick = "path=slow/disk.img,log=log,socket=s,serial=sick";
    let daemon = Daemon::start(
        dir,
        &format!(
            "--control ctl --disk-dir . --disk {sick} --disk \
             path=well.img,log=log,socket=s,serial=well"
        ),
    );
    let mut clients = connect(dir);
    (0..8).for_each(|place| write(&mut clients[0], place));
    flush(&mut clients[0]);
    // Copied before the image stops to answer.
    told(dir, "checkpoint");
    slow.halt();
    (8..24).for_each(|place| write(&mut clients[0], place));
    flush(&mut clients[0]);
    expect_both_to_work(dir, &mut clients, 8..24);
    for request in ["checkpoint --disk sick", "remove-disk sick"] {
        ctl_refused(dir, request, &["answer"]);
    }
    told(dir, "snapshot monday");
    told(dir, "snapshot-delete monday");
    // The disk goes, the image still does not answer, and the disk comes back.
    let removed = told(dir, "remove-disk sick --keep-records");
    assert!(removed.contains("beside the log"), "{removed}");
    write(&mut clients[1], 300);
    flush(&mut clients[1]);
    slow.resume();
    let add = format!("ctl ctl add-disk {sick}");
    // Its last write has to end first.
    wait_until("the image to be added", || {
        walvisor(dir, &add).status.success()
    });
    wait_until("the image to have everything", || {
        condition(dir, "sick")["name"] == "ok"
    });
    // The removals have ended the connection.
    drop(clients);
    expect_written(&mut connect(dir)[0], 0..24);
    let errors = daemon.stop();
    assert!(errors.contains("has everything"), "{errors}");
    expect_copied(&image, 0..24);
}
