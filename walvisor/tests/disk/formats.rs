//! Images of other formats than raw, made by qemu-img: none is taken for a raw image.

use std::path::Path;

use walvisor_testkit::process::client;
use walvisor_tests::{have, run_sessions};

use crate::{MIB, done, names, refused, test_dir};

/// Runs a third-party program in `dir`, and asserts that it succeeds.
#[track_caller]
fn run(dir: &Path, program: &str, arguments: &str) {
    client(
        dir,
        program,
        &arguments.split_whitespace().collect::<Vec<_>>(),
    );
}

/// Makes an image of 4 MiB of each format; returns its name, how errors call it, and the command
/// that makes it raw.
fn images(dir: &Path) -> Vec<(String, &'static str, String)> {
    let made = [
        ("qcow", "qcow2", ""),
        ("qcow2", "qcow2", ""),
        ("vmdk", "VMDK", ""),
        ("vmdk", "VMDK", "-o subformat=monolithicFlat"),
        ("vmdk", "VMDK", "-o subformat=streamOptimized"),
        ("vdi", "VDI", ""),
        ("vhdx", "VHDX", ""),
        ("vpc", "VHD", "-o force_size=on"),
    ];
    let made = made.into_iter().enumerate().map(|(number, made)| {
        let (format, called, options) = made;
        let name = format!("{number}.{format}");
        let create = format!("create -q -f {format} {options} {name} 4M");
        run(dir, "qemu-img", &create);
        let convert = format!("qemu-img convert -O raw {name} NEW");
        (name, called, convert)
    });
    let mut made: Vec<_> = made.collect();
    // qemu-img measures the processor before it makes a LUKS image, and sometimes fails to.
    if have("cryptsetup", "cryptsetup-bin") {
        std::fs::write(dir.join("key"), "secret").unwrap();
        let file = std::fs::File::create(dir.join("luks")).unwrap();
        file.set_len(6 * MIB).unwrap();
        let format = "luksFormat --type luks1 --pbkdf-force-iterations 1000 -q --key-file key luks";
        run(dir, "cryptsetup", format);
        let convert = "qemu-img convert -O raw --object secret,id=key,file=KEYFILE --image-opts \
                       driver=luks,key-secret=key,file.filename=luks NEW";
        made.push(("luks".to_owned(), "LUKS", convert.to_owned()));
    }
    made
}

/// Each format is known by each command that opens an image: the first one is tried with all.
#[test]
fn images_of_other_formats_are_refused_with_what_converts_them() {
    if !have("qemu-img", "qemu-utils") {
        return;
    }
    let dir = &test_dir();
    for (number, (name, called, convert)) in images(dir).into_iter().enumerate() {
        let before = names(dir);
        let parts = [
            &format!("{name}: "),
            &format!("starts like a {called} image"),
            &format!("'{convert}'"),
            "format=raw",
            "--format raw",
        ];
        let commands = [
            "disk import new.img NAME",
            "serve nbd --disk path=NAME,socket=s",
            "serve vhost-user --disk path=NAME,socket=s",
            "serve nbd --disk path=NAME,backend=raw,socket=s",
            "serve nbd --disk path=NAME,backend=raw,readonly=on,socket=s",
            "disk info NAME",
            "disk check NAME",
            "disk checkpoint NAME",
            "disk export NAME out",
            "disk resize NAME --size 8M",
        ];
        let tried = if number == 0 { commands.len() } else { 1 };
        for command in &commands[..tried] {
            refused(dir, &command.replace("NAME", &name), 1, &parts);
        }
        assert_eq!(names(dir), before, "nothing is made");
        // The command that the message names.
        let convert = convert.replace("KEYFILE", "key");
        run(dir, "qemu-img", convert.strip_prefix("qemu-img ").unwrap());
        assert_eq!(std::fs::metadata(dir.join("NEW")).unwrap().len(), 4 * MIB);
        done(dir, "disk info NEW");
        std::fs::remove_file(dir.join("NEW")).unwrap();
    }
}

/// A disk's own first bytes may be those of another format: then the person says that it is raw,
/// once.
#[test]
fn format_raw_accepts_an_image_that_begins_as_another_format() {
    let dir = &test_dir();
    let mut bytes = vec![0; MIB as usize];
    bytes[..6].copy_from_slice(b"LUKS\xba\xbe");
    std::fs::write(dir.join("raw"), &bytes).unwrap();
    refused(
        dir,
        "disk import disk.img raw",
        1,
        &["LUKS", "--format raw"],
    );
    done(dir, "disk import disk.img raw --format raw");
    assert!(std::fs::read(dir.join("disk.img")).unwrap() == bytes);
    // Its mark says from now on that it is a disk.
    done(dir, "disk info disk.img");
    done(dir, "disk import again.img disk.img");
    done(dir, "disk export disk.img out");
    refused(dir, "disk info out", 1, &["LUKS"]);
}

/// An image of another size than its log expects, which another program has given it.
#[test]
fn an_image_of_another_size_is_refused_with_the_way_back() {
    let dir = &test_dir();
    std::fs::write(dir.join("odd"), [7; 1000]).unwrap();
    for (name, len) in [("longer.img", 1536), ("shorter.img", 512)] {
        done(dir, &format!("disk create {name} --size 1024"));
        let file = std::fs::File::options().write(true).open(dir.join(name));
        file.unwrap().set_len(len).unwrap();
    }
    run_sessions("sizes", dir, []);
}

/// A reader that has seen enough (`walvisor disk info disk.img | head -n 1`) is no error.
#[test]
fn a_reader_that_closes_the_pipe_is_no_error() {
    let dir = &test_dir();
    done(dir, "disk create disk.img --size 1M");
    let pool = "[[disk]]\npath = 'disk.img'\ndoor = 'nbd'\nsocket = 's'\n";
    std::fs::write(dir.join("pool.toml"), pool).unwrap();
    for arguments in [
        "disk info disk.img",
        "disk check disk.img",
        "log dump disk.img.wal",
        "config check pool.toml",
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = std::process::Command::new(super::WALVISOR)
            .args(arguments.split(' '))
            .current_dir(dir)
            .stdout(writer)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && error.is_empty(),
            "{arguments}: {error}"
        );
    }
}
