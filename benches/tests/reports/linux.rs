//! `walvisor-bench notify --load linux`: the counts on every path of the Linux kernels. The test
//! checks no times.

use walvisor_guest_images::obstacle;

use crate::{compare, number, rows, texts};

/// The paths of user-mode Linux, of a machine with KVM, and of one with a newer kernel, in turn
/// order.
const USER_MODE: [&str; 4] = ["vhost-user", "tcmu in a guest", "tcmu", "nbd"];
const MACHINE: [&str; 7] = [
    "virtio-mmio ioeventfd",
    "virtio-pci ioeventfd",
    "virtio-mmio exits",
    "virtio-pci exits",
    "tcmu in a guest",
    "tcmu",
    "nbd",
];
const NEWER: [&str; 1] = ["ublk"];

#[test]
fn every_path_of_linux_counts_what_it_must() {
    if let Some(why) = obstacle() {
        return println!("skipped: {why}");
    }
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("fio", "fio"),
        ("nbd-client", "nbd-client"),
    ];
    let arguments = "notify --load linux --linux user-mode,machine,newer";
    // Different write caches would be an error.
    let Some(report) = compare(arguments, &needs) else {
        return;
    };
    for (kernel, paths) in [
        ("user-mode-linux", &USER_MODE[..]),
        ("linux", &MACHINE[..]),
        ("newer-linux", &NEWER[..]),
    ] {
        let reads = rows(&report, &format!("{kernel}-ram-randread"));
        let commits = rows(&report, &format!("{kernel}-wal-randwrite-fsync"));
        for rows in [reads, commits] {
            // The notes contain the reason for each missing path.
            assert_eq!(texts(rows, "path"), paths, "{kernel}: {report}");
        }
        for row in reads {
            assert!(row["syncs_per_request"].is_null(), "{row}");
        }
        for row in commits {
            let syncs = number(row, "syncs_per_request");
            assert!(syncs > 0.0 && syncs < 2.5, "{row}");
        }
        for row in reads.iter().filter(|row| row["path"] != "nbd") {
            // Four requests are in flight, and a doorbell may announce only one of them.
            let doorbells = number(row, "doorbells_per_request");
            assert!(doorbells > 0.0 && doorbells < 1.6, "{row}");
        }
    }
    for row in rows(&report, "linux-wal-randwrite-fsync") {
        let path = row["path"].as_str().unwrap();
        let of = |key: &str| number(row, key);
        // Each interrupt of virtio-mmio costs a register write, and so does each doorbell without
        // an ioeventfd.
        let writes = match path {
            "virtio-mmio ioeventfd" => of("interrupts_per_request"),
            "virtio-mmio exits" => of("interrupts_per_request") + of("doorbells_per_request"),
            "virtio-pci exits" => of("doorbells_per_request"),
            "virtio-pci ioeventfd" | "tcmu in a guest" => 0.0,
            _ => continue,
        };
        let told = of("mmio_write_exits_per_request");
        assert!((told - writes).abs() < 0.1, "{writes}: {row}");
    }
}
