//! What can be tested without the kernel's target.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::target::*;
use super::*;

fn target(directory: &Path) -> LioTarget {
    LioTarget {
        configfs: directory.join("config"),
        uio: directory.join("uio"),
        opener: None,
    }
}

#[test]
fn a_missing_kernel_part_is_named_with_the_command_that_loads_it() {
    let directory = tempfile::tempdir().unwrap();
    let target = target(directory.path());
    let error = target.check().unwrap_err().to_string();
    assert!(
        error.contains("no configfs") && error.contains("'modprobe configfs"),
        "{error}"
    );
    fs::create_dir(&target.configfs).unwrap();
    let error = target.check().unwrap_err().to_string();
    assert!(
        error.contains("not mounted") && error.contains("mount -t configfs"),
        "{error}"
    );
    assert!(error.contains("Debian") && !error.contains('\n'), "{error}");
    fs::create_dir(target.root()).unwrap();
    target.check().unwrap();
}

#[test]
fn back_stores_and_their_exports_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let target = target(directory.path());
    let make = |path: &str| fs::create_dir_all(target.root().join(path)).unwrap();
    let put = |path: &str, text: &str| fs::write(target.root().join(path), text).unwrap();
    for (store, config) in [
        ("core/user_0/a", "walvisor/a.img\n"),
        ("core/user_12/b", "qcow/b.qcow2\n"),
        ("core/iblock_0/c", "walvisor/no\n"),
    ] {
        make(&format!("{store}/attrib"));
        put(&format!("{store}/attrib/dev_config"), config);
        put(&format!("{store}/attrib/dev_size"), "4096\n");
        put(&format!("{store}/enable"), "1\n");
    }
    let all: Vec<_> = Backstore::all(&target)
        .into_iter()
        .map(|store| (store.hba, store.name))
        .collect();
    assert_eq!(all, [(0, "a".to_owned()), (12, "b".to_owned())]);
    let ours = Backstore::ours(&target);
    assert_eq!(ours.len(), 1);
    let store = &ours[0];
    assert_eq!(
        (store.image().as_deref(), store.size(), store.enabled()),
        (Some("a.img"), Some(4096), true)
    );

    for (lun, name) in [
        ("loopback/naa.5001405000000001/tpgt_1/lun/lun_0", "a"),
        ("iscsi/iqn.2026-11.x:y/tpgt_1/lun/lun_3", "mapped"),
        ("loopback/naa.5001405000000002/tpgt_1/lun/lun_0", "a"),
    ] {
        make(lun);
        let of = if lun.contains("0002") {
            "core/user_12/a"
        } else {
            "core/user_0/a"
        };
        symlink(target.root().join(of), target.root().join(lun).join(name)).unwrap();
    }
    let exports = TargetExport::of(store);
    let places: Vec<_> = exports.iter().map(TargetExport::place).collect();
    assert_eq!(
        places,
        ["iscsi iqn.2026-11.x:y", "loopback naa.5001405000000001"]
    );
    let simple: Vec<_> = exports.iter().map(TargetExport::is_simple).collect();
    assert_eq!(simple, [false, true]);
    // A LUN that walvisor does not make must not be removed.
    let error = LioDisk::clear(store).unwrap_err().to_string();
    assert!(
        error.contains("iscsi iqn.2026-11.x:y: remove that LUN first"),
        "{error}"
    );
}

#[test]
fn an_existing_back_store_keeps_its_block_size() {
    let directory = tempfile::tempdir().unwrap();
    let target = target(directory.path());
    let store = target.root().join("core/user_0/a");
    fs::create_dir_all(store.join("attrib")).unwrap();
    for (file, text) in [
        ("attrib/dev_config", "walvisor/a.img\n"),
        ("attrib/hw_block_size", "512\n"),
        ("enable", "1\n"),
    ] {
        fs::write(store.join(file), text).unwrap();
    }
    let raise = |block_size| {
        let wanted = BackstoreSpec {
            name: "a".to_owned(),
            image: "/a.img".to_owned(),
            serial: String::new(),
            block_size,
            max_blocks: 8,
            timeout: None,
        };
        Backstore::raise(&target, &wanted)
    };
    assert!(raise(512).unwrap().1, "it stands");
    let error = raise(4096).unwrap_err().to_string();
    assert!(error.contains("give block-size=512"), "{error}");
}
