//! One `walvisor serve` with a disk behind each door: vhost-user, NBD and the kernel's SCSI target, on one log. What each has
//! acknowledged outlives kills of the daemon, and the doors share the log's syncs. The kernel is user-mode Linux.

use std::fs;

use walvisor_guest_images::{UserMode, walvisor_binary};
use walvisor_tests::{guest_lines, have_all, sum_counter};

#[test]
fn one_daemon_keeps_the_promises_at_each_of_its_doors() {
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("modprobe", "kmod"),
        ("nbd-client", "nbd-client"),
    ];
    if !have_all(&needs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("files");
    fs::create_dir(&place).unwrap();
    let script = format!(
        "WALVISOR='{}' DOORS='{}' PLACE='{}'\n{}",
        walvisor_binary("dev").expect("building walvisor").display(),
        env!("CARGO_BIN_EXE_doors"),
        dir.path().display(),
        include_str!("../scripts/doors-guest.sh")
    );
    let mut guest = UserMode::default().boot_here(dir.path(), &script).unwrap();
    let told = guest_lines(&mut guest);
    let expected = [
        "guest: kill 1: nothing lost",
        "guest: kill 2: nothing lost",
        "guest: kill 3: nothing lost",
        "guest: round-3: status 0",
        "guest: a: checked",
        "guest: b: checked",
        "guest: c: checked",
        "guest: one: status 0",
        "guest: end",
    ];
    assert_eq!(told, expected, "{}", guest.console());
    guest.end().unwrap();

    for round in 1..=3 {
        let flushed = fs::read_to_string(place.join(format!("load.{round}"))).unwrap();
        println!("until kill {round}: {}", flushed.trim());
        let each = flushed.split_whitespace().skip(1);
        let each: Vec<u64> = each.map(|number| number.parse().unwrap()).collect();
        assert!(
            each.len() == 3 && each.iter().all(|count| *count > 0),
            "{flushed}"
        );
    }
    for (daemon, doors) in [("round-3", "three doors"), ("one", "one door")] {
        let flushes = sum_counter(&place, daemon, "walvisor_block_flushes_total");
        let syncs = sum_counter(&place, daemon, "walvisor_log_syncs_total");
        println!("{doors}: {syncs} syncs of the log for {flushes} FLUSHes of three disks");
        assert!(flushes >= 900.0 && syncs <= flushes, "{syncs} of {flushes}");
    }
}
