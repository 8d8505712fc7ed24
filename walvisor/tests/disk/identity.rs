//! Messages about an image that is not the one that a log's records belong to, and the commands
//! that resolve it.

use std::process::Command;

use walvisor_storage::default_log_dir;
use walvisor_testkit::MemoryFs;
use walvisor_tests::have;

use crate::{copy_image, crash, done, json, refused, unclosed, unclosed_bytes, walvisor};

#[test]
fn an_old_copy_of_an_image_is_refused_and_its_records_can_be_discarded() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let (disk, newest) = (crashed.join("disk.img"), crashed.join("newest.img"));
    std::fs::rename(&disk, &newest).unwrap();
    // Copies as `cp` does, without the mark: the copy cannot be recognized as the disk's image.
    std::fs::copy(&newest, &disk).unwrap();
    let parts = &[
        "disk.img: ",
        "5 records",
        "back",
        "walvisor disk discard disk.img",
    ];
    for command in ["check", "info", "checkpoint"] {
        refused(&crashed, &format!("disk {command} disk.img"), 1, parts);
    }
    refused(&crashed, "disk export disk.img out", 1, parts);
    refused(&crashed, "disk resize disk.img --size 16M", 1, parts);
    // One remedy, tried on a copy: the right image is put in place.
    let kept = crashed.join("kept");
    crash(&default_log_dir(&disk), &[&disk], &kept);
    std::fs::remove_file(kept.join("disk.img")).unwrap();
    copy_image(&newest, &kept.join("disk.img"));
    assert!(done(&kept, "disk check disk.img").contains("5 records"));
    // The other remedy: the log's records are discarded.
    let text = done(&crashed, "disk discard --yes disk.img");
    assert!(text.starts_with("disk.img: disk "), "{text}");
    assert!(text.contains("discarded 5 records (12 KiB)"), "{text}");
    assert!(done(&crashed, "disk check disk.img").contains("0 records"));
    let report = json(&done(&crashed, "disk discard --yes disk.img --json"));
    assert_eq!(report["discarded_records"], 0);
    assert_eq!(report["image_fits"], true);
    let parts = &["unknown.img", "has no disk at this path"];
    let command = "disk discard --yes unknown.img --log disk.img.wal";
    refused(&crashed, command, 1, parts);
}

#[test]
fn create_refuses_an_existing_disk_or_file() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    done(dir, "disk create disk.img --size 1M");
    let parts = &[
        "disk.img",
        "exists already",
        "a disk of the log in disk.img.wal",
    ];
    refused(dir, "disk create disk.img --size 1M", 1, parts);
    std::fs::write(dir.join("plain.img"), [0; 512]).unwrap();
    let parts = &[
        "plain.img",
        "exists already",
        "without a log",
        "move it away",
    ];
    refused(dir, "disk create plain.img --size 1M", 1, parts);
}

/// After a kill the newest bytes are in the log. What a copy of the image alone lacks is refused or
/// told, and the commands of the manual's page copy everything.
#[test]
fn a_copy_of_an_image_alone_is_not_called_clean() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let at = |name: &str| crashed.join(name);
    // `cp -a`, without the log: the mark tells.
    copy_image(&at("disk.img"), &at("marked.img"));
    for command in [
        "disk info marked.img",
        "disk check marked.img",
        "serve nbd --disk path=marked.img,socket=s",
        "serve nbd --disk path=marked.img,backend=raw,socket=s",
        "disk import new.img marked.img",
        "disk export marked.img out",
    ] {
        refused(&crashed, command, 1, &["marked.img: ", "was not closed"]);
    }
    // `cp`: nothing in the file tells, so nothing is claimed.
    std::fs::copy(at("disk.img"), at("copy.img")).unwrap();
    let lacks = "without a log or a mark; if it is a copy of a disk that was not closed, its \
        newest bytes are missing";
    assert!(done(&crashed, "disk info copy.img").contains(lacks));
    let text = done(&crashed, "disk check copy.img");
    assert!(
        text.contains("nothing to verify") && text.contains(lacks),
        "{text}"
    );
    assert!(!text.contains("clean"), "{text}");
    let report = json(&done(&crashed, "disk info copy.img --json"));
    assert_eq!(report["marked"], false);
    // With an export the copy has everything; a checkpoint makes the image complete.
    done(&crashed, "disk export disk.img export.img");
    done(&crashed, "disk checkpoint disk.img");
    copy_image(&at("disk.img"), &at("closed.img"));
    for name in ["export.img", "closed.img"] {
        assert!(
            std::fs::read(at(name)).unwrap() == unclosed_bytes(),
            "{name}"
        );
    }
    for command in ["info", "check"] {
        let text = done(&crashed, &format!("disk {command} closed.img"));
        assert!(
            text.contains("closed, with all bytes in the image"),
            "{text}"
        );
    }
    let report = json(&done(&crashed, "disk info closed.img --json"));
    assert_eq!(report["marked"], true);
}

/// Without extended attributes an image has no mark: whoever makes a disk there learns what that
/// means.
#[test]
fn a_file_system_without_marks_is_reported() {
    let Some(ramfs) = MemoryFs::ramfs() else {
        return;
    };
    let dir = ramfs.path();
    std::fs::write(dir.join("raw"), [7; 1024]).unwrap();
    for (name, arguments) in [
        ("new.img", "disk create new.img --size 1M"),
        ("imported.img", "disk import imported.img raw"),
    ] {
        let output = walvisor(dir, arguments);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
        assert_eq!(told.lines().count(), 1, "{told}");
        for part in [
            &format!("{name}: this file system has no extended attributes"),
            "identifies the image by its inode",
            "does not recognize a copy",
            "walvisor disk export",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
        // Using it is as usual.
        done(dir, &format!("disk check {name}"));
    }
}

/// What docs/operations says to type, on a disk that was killed: the copy has every byte.
#[test]
fn the_commands_of_the_manual_copy_everything() {
    let rsync = have("rsync", "rsync");
    let ways: [&[&str]; 7] = [
        &["walvisor disk export disk.img new/disk.img"],
        &[
            "walvisor disk export disk.img copy.img",
            "walvisor disk import new/disk.img copy.img",
        ],
        &["mv disk.img disk.img.wal new/"],
        &["walvisor disk checkpoint disk.img", "cp -a disk.img new/"],
        &["cp -a disk.img disk.img.wal new/"],
        &[
            "walvisor disk checkpoint disk.img",
            "rsync -aXS disk.img new/",
        ],
        &["rsync -aXS disk.img disk.img.wal new/"],
    ];
    for way in ways {
        if way.iter().any(|line| line.starts_with("rsync")) && !rsync {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let crashed = unclosed(dir.path());
        std::fs::create_dir(crashed.join("new")).unwrap();
        for line in way {
            let (program, arguments) = line.split_once(' ').unwrap();
            if program == "walvisor" {
                done(&crashed, arguments);
                continue;
            }
            let mut command = Command::new(program);
            command.args(arguments.split(' ')).current_dir(&crashed);
            assert!(command.status().unwrap().success(), "{line}");
        }
        done(&crashed.join("new"), "disk export disk.img out");
        let bytes = std::fs::read(crashed.join("new/out")).unwrap();
        assert!(bytes == unclosed_bytes(), "{way:?}");
    }
}

/// cp(1) takes the source first. Its order never leads to advice that would cost the source.
#[test]
fn an_import_with_cps_order_of_arguments_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("raw"), [7; 1024]).unwrap();
    done(dir, "disk create disk.img --size 1M");
    for (arguments, right) in [
        ("raw new.img", "'walvisor disk import new.img raw'"),
        (
            "disk.img new.img",
            "'walvisor disk import new.img disk.img'",
        ),
        (
            "raw new.img --log disk.img.wal",
            "'walvisor disk import new.img raw --log disk.img.wal'",
        ),
    ] {
        let command = format!("disk import {arguments}");
        let parts = ["exists already, and new.img does not", "swapped?", right];
        refused(dir, &command, 1, &parts);
    }
    // Both are there.
    std::fs::write(dir.join("other"), [7; 512]).unwrap();
    for arguments in ["raw other", "raw other --log disk.img.wal"] {
        let output = walvisor(dir, &format!("disk import {arguments}"));
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("raw: exists already"), "{error}");
        assert!(error.contains("move it away"), "{error}");
        assert!(!error.contains("remove"), "{error}");
    }
    assert_eq!(std::fs::read(dir.join("raw")).unwrap(), [7; 1024]);
    done(dir, "disk import new.img raw");
}

/// A shell's file size limit causes a clear error instead of a kill by SIGXFSZ.
#[test]
fn a_disk_beyond_the_shells_file_size_limit_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("sh")
        .args([
            "-c",
            "ulimit -f 1000; exec \"$0\" disk create disk.img --size 64M",
            crate::WALVISOR,
        ])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("ulimit -f"), "{error}");
    assert!(!dir.path().join("disk.img").exists());
}
