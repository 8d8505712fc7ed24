//! One of two disks on a log can't be copied to its image, because that image's file system is
//! full, or does not answer. The other disk goes on for as long as it likes, and nothing is lost.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use walvisor_storage::{StoreOptions, create_disk, move_to_log};
use walvisor_testkit::nbd::{FLUSH, READ, SimpleClient, WRITE};
use walvisor_testkit::{MemoryFs, wait_until};
use walvisor_tests::{have_python, second_reader};

use super::slow_holes::{mount, mount_filtered};
use super::{Daemon, MIB, noise, text, walvisor};

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
fn expect_written(client: &mut SimpleClient, places: impl Iterator<Item = u64>) {
    for place in places {
        let mut found = vec![0; LENGTH as usize];
        let read = client.end(READ, place * LENGTH, found.len(), &mut found, false);
        assert!(read.is_ok(), "place {place}: {read:?}");
        let differs = found
            .iter()
            .zip(noise(LENGTH as usize))
            .position(|(a, b)| *a != b);
        assert_eq!(differs, None, "place {place}");
    }
}

fn stats(dir: &Path) -> Value {
    let output = walvisor(dir, "ctl ctl stats --json");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn condition(dir: &Path, name: &str) -> Value {
    let stats = stats(dir);
    let mut disks = stats["disks"].as_array().unwrap().iter();
    let disk = disks.find(|disk| disk["name"] == name).unwrap();
    disk["condition"].clone()
}

/// The reader that was written from the format's page finds the spill file, too.
fn both_readers_agree(dir: &Path, image: &Path, disk_id: u32) {
    if !have_python() {
        return;
    }
    let image = image.display();
    let restored = format!("disk restore {image} --log log --at snapshot:kept -o first");
    let restored = walvisor(dir, &restored);
    assert!(restored.status.success(), "{}", text(&restored.stderr));
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
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let options = StoreOptions {
        segment_size: 4 * MIB,
        max_segments: 16,
        ..StoreOptions::default()
    };
    let image = small.path().join("sick.img");
    for image in [&image, &dir.join("well.img")] {
        create_disk(image, 32 * MIB, &dir.join("log"), &options).unwrap();
    }
    let arguments = format!(
        "--control ctl --disk path={},log=log,socket=s,serial=sick --disk \
         path=well.img,log=log,socket=s,serial=well",
        image.display()
    );
    let connect = |export: &str| SimpleClient::connect(&dir.join("s"), export).unwrap();
    let mut daemon = Daemon::start(dir, &arguments);
    // Killed and stopped in between, with the file system still full.
    for (round, places) in [0..24, 24..48, 48..72].into_iter().enumerate() {
        let (mut sick, mut well) = (connect("sick"), connect("well"));
        let all = places.end;
        places.for_each(|place| write(&mut sick, place));
        flush(&mut sick);
        // Twice the log's room.
        for number in 0..2048 {
            write(&mut well, number % 256);
            flush(&mut well);
        }
        let told = condition(dir, "sick");
        assert_eq!(told["name"], "copy_failing", "{told}");
        assert_eq!(told["refuses_writes"], false, "{told}");
        assert_eq!(condition(dir, "well")["name"], "ok");
        assert!(stats(dir)["logs"][0]["checkpoints"].as_u64().unwrap() > 2);
        expect_written(&mut sick, 0..all);
        expect_written(&mut well, 0..256);
        let failed = text(&walvisor(dir, "ctl ctl checkpoint --disk sick").stderr);
        assert!(failed.contains("No space left"), "{failed}");
        let removed = text(&walvisor(dir, "ctl ctl remove-disk sick").stderr);
        assert!(removed.contains("No space left"), "{removed}");
        if round == 1 {
            let kept = walvisor(dir, "ctl ctl snapshot kept");
            assert!(kept.status.success(), "{}", text(&kept.stderr));
        }
        drop((sick, well));
        match round {
            0 => daemon.kill(),
            1 => {
                let errors = daemon.stop();
                assert!(
                    errors.contains("copied back once the image can be written"),
                    "{errors}"
                );
                assert!(
                    errors.contains("closed while its image lacks bytes"),
                    "{errors}"
                );
                let command = format!("disk info {} --log log", image.display());
                let info = text(&walvisor(dir, &command).stdout);
                assert!(info.contains("a spill file beside the log has"), "{info}");
                let well = text(&walvisor(dir, "disk check well.img --log log").stdout);
                assert!(well.contains("clean"), "{well}");
                both_readers_agree(dir, &image, 1);
            }
            _ => break,
        }
        daemon = Daemon::start(dir, &arguments);
    }
    small.remount("size=64m");
    let output = walvisor(dir, "ctl ctl checkpoint --disk sick");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(condition(dir, "sick")["name"], "ok");
    let mut sick = connect("sick");
    write(&mut sick, 500);
    flush(&mut sick);
    drop(sick);
    let errors = daemon.stop();
    assert!(errors.contains("has everything"), "{errors}");
    let names = fs::read_dir(dir.join("log")).unwrap();
    let mut names = names.map(|name| name.unwrap().file_name());
    assert!(!names.any(|name| name.to_string_lossy().starts_with("spill")));
    let bytes = fs::read(&image).unwrap();
    for place in (0..72).chain([500]) {
        let at = (place * LENGTH) as usize;
        assert!(
            bytes[at..][..LENGTH as usize] == noise(LENGTH as usize),
            "place {place}"
        );
    }
}

#[test]
fn an_image_that_does_not_answer_does_not_stop_the_other_disk() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(slow) = mount(dir) else {
        return;
    };
    let image = dir.join("slow/disk.img");
    let options = StoreOptions {
        segment_size: 4 * MIB,
        max_segments: 16,
        ..StoreOptions::default()
    };
    create_disk(&dir.join("well.img"), 32 * MIB, &dir.join("log"), &options).unwrap();
    move_to_log(&image, &dir.join("none"), &dir.join("log"), &options, &[]).unwrap();
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk-dir . --disk path=slow/disk.img,log=log,socket=s,serial=sick \
         --disk path=well.img,log=log,socket=s,serial=well",
    );
    let connect = |export: &str| SimpleClient::connect(&dir.join("s"), export).unwrap();
    let (mut sick, mut well) = (connect("sick"), connect("well"));
    (0..8).for_each(|place| write(&mut sick, place));
    flush(&mut sick);
    // Copied before the image stops to answer.
    assert!(walvisor(dir, "ctl ctl checkpoint").status.success());
    slow.halt();
    (8..24).for_each(|place| write(&mut sick, place));
    flush(&mut sick);
    // Many times the log's room.
    for number in 0..4096 {
        write(&mut well, number % 256);
        flush(&mut well);
    }
    let told = condition(dir, "sick");
    assert_eq!(told["name"], "copy_failing", "{told}");
    assert_eq!(condition(dir, "well")["name"], "ok");
    expect_written(&mut sick, 8..24);
    expect_written(&mut well, 0..256);
    for command in ["checkpoint --disk sick", "remove-disk sick"] {
        let refused = text(&walvisor(dir, &format!("ctl ctl {command}")).stderr);
        assert!(refused.contains("answer"), "{command}: {refused}");
    }
    let snapshot = walvisor(dir, "ctl ctl snapshot monday");
    assert!(snapshot.status.success(), "{}", text(&snapshot.stderr));
    let deleted = walvisor(dir, "ctl ctl snapshot-delete monday");
    assert!(deleted.status.success(), "{}", text(&deleted.stderr));
    // The disk goes, the image still does not answer, and the disk comes back.
    let removed = walvisor(dir, "ctl ctl remove-disk sick --keep-records");
    let told = text(&removed.stdout);
    assert!(
        told.contains("beside the log"),
        "{told}{}",
        text(&removed.stderr)
    );
    write(&mut well, 300);
    flush(&mut well);
    slow.go_on();
    let add = "ctl ctl add-disk path=slow/disk.img,log=log,socket=s,serial=sick";
    // Its last write has to end first.
    wait_until("the image to be added", || {
        walvisor(dir, add).status.success()
    });
    wait_until("the image to have everything", || {
        condition(dir, "sick")["name"] == "ok"
    });
    // The removals have ended the connection.
    let mut sick = connect("sick");
    expect_written(&mut sick, 0..24);
    drop((sick, well));
    let errors = daemon.stop();
    assert!(errors.contains("has everything"), "{errors}");
    let bytes = fs::read(image).unwrap();
    for place in 0..24 {
        let at = (place * LENGTH) as usize;
        assert!(
            bytes[at..][..LENGTH as usize] == noise(LENGTH as usize),
            "place {place}"
        );
    }
}

/// How a neighbour commits while another disk writes as fast as it can, in turns: to an image that
/// works, and to one that takes 300 ms for each write, or returns EIO. Prints both;
/// `WALVISOR_SICK_SECONDS=1200` goes on for ten minutes with each kind.
#[test]
fn a_neighbour_commits_beside_an_image_that_is_slow_or_fails() {
    let seconds = std::env::var("WALVISOR_SICK_SECONDS");
    let seconds: u64 = seconds.map_or(24, |seconds| seconds.parse().unwrap());
    let time = Duration::from_secs(seconds / 2);
    commit_beside(
        time,
        "300 ms a write",
        &["--filter=delay"],
        &["wdelay=300ms"],
    );
    let dir = tempfile::tempdir().unwrap();
    let failing = dir.path().join("failing");
    let when = format!("error-pwrite-file={}", failing.display());
    let parameters = ["error-pwrite=EIO", "error-pwrite-rate=100%", &when];
    fs::write(&failing, "").unwrap();
    commit_beside(time, "EIO", &["--filter=error"], &parameters);
}

fn commit_beside(time: Duration, kind: &str, filters: &[&str], parameters: &[&str]) {
    const TURN: Duration = Duration::from_secs(3);
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(_sick) = mount_filtered(dir, (filters, parameters)) else {
        return;
    };
    let options = StoreOptions {
        segment_size: 4 * MIB,
        max_segments: 16,
        ..StoreOptions::default()
    };
    for image in ["well.img", "other.img"] {
        create_disk(&dir.join(image), 16 * MIB, &dir.join("log"), &options).unwrap();
    }
    let sick = dir.join("slow/disk.img");
    move_to_log(&sick, &dir.join("none"), &dir.join("log"), &options, &[]).unwrap();
    let disk =
        |path: &str, name: &str| format!(" --disk path={path},log=log,socket=s,serial={name}");
    let disks = [
        ("well.img", "well"),
        ("other.img", "other"),
        ("slow/disk.img", "sick"),
    ];
    let disks = disks.map(|(path, name)| disk(path, name)).concat();
    let daemon = Daemon::start(dir, &format!("--control ctl{disks}"));
    let connect = |export: &str| SimpleClient::connect(&dir.join("s"), export).unwrap();
    let (stop, beside) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut found = [(0, Duration::ZERO); 2];
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut writers = [connect("other"), connect("sick")];
            for number in 0_u64.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let writer = &mut writers[usize::from(beside.load(Ordering::Relaxed))];
                write(writer, number * 7 % (16 * MIB / LENGTH));
                flush(writer);
            }
        });
        let mut well = connect("well");
        let (end, mut number) = (Instant::now() + time, 0);
        while Instant::now() < end || beside.load(Ordering::Relaxed) {
            let turn = Instant::now() + TURN;
            let (commits, longest) = &mut found[usize::from(beside.load(Ordering::Relaxed))];
            while Instant::now() < turn {
                let began = Instant::now();
                let mut data = noise(4096);
                number += 1;
                let place = number * 13 % 4096 * 4096;
                well.end(WRITE, place, 4096, &mut data, false).unwrap();
                flush(&mut well);
                *commits += 1;
                *longest = began.elapsed().max(*longest);
            }
            beside.fetch_not(Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let [(with_other, longest_other), (with_sick, longest_sick)] = found;
    println!(
        "beside a writer whose image works: {with_other} commits, longest {longest_other:?}; \
         {kind}: {with_sick}, longest {longest_sick:?}; kept {:.2}; it is told as {}",
        f64::from(with_sick) / f64::from(with_other.max(1)),
        condition(dir, "sick")["name"]
    );
    assert!(with_sick > 0);
    daemon.kill();
}
