//! Copies of a disk, and file systems that can't hold what identifies one.

use std::process::Command;

use walvisor_testkit::MemoryFs;
use walvisor_tests::have;

use crate::{assert_says, done, unclosed, unclosed_bytes, walvisor};

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
        let parts = [
            &format!("{name}: this file system has no extended attributes"),
            "identifies the image by its inode",
            "does not recognize a copy",
            "walvisor disk export",
        ];
        assert_says(&told, &parts);
        // Using it is as usual.
        done(dir, &format!("disk check {name}"));
    }
}

/// What docs/operations says to type, on a disk that was killed: the copy has every byte.
#[test]
fn the_commands_of_the_manual_copy_everything() {
    let rsync = have("rsync", "rsync");
    let ways: [&[&str]; 5] = [
        &[
            "walvisor disk export disk.img copy.img",
            "walvisor disk import new/disk.img copy.img",
        ],
        &["mv disk.img disk.img.wal new/"],
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
