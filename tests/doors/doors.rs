//! One `walvisor serve` with a disk behind each door: vhost-user, NBD and the kernel's SCSI target,
//! on one log. What each has acknowledged outlives kills of the daemon, and the doors share the
//! log's syncs. The kernel is user-mode Linux.

use std::fs;

use walvisor_tests::{have_all, run_in_user_mode, sum_counter};

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
    let script = format!(
        "DOORS='{}'\n{}",
        env!("CARGO_BIN_EXE_doors"),
        include_str!("../scripts/doors-guest.sh")
    );
    let told = run_in_user_mode(dir.path(), &[], &script);
    let expected = [
        "kill 1: nothing lost",
        "kill 2: nothing lost",
        "kill 3: nothing lost",
        "round-3: status 0",
        "three: status 0",
        "a: checked",
        "b: checked",
        "c: checked",
        "one: status 0",
    ];
    assert_eq!(told, expected);
    let place = dir.path().join("files");

    for round in 1..=3 {
        let load = fs::read_to_string(place.join(format!("load.{round}"))).unwrap();
        let flushed = load.lines().last().unwrap();
        println!("until kill {round}: {flushed}");
        let each = flushed.split_whitespace().skip(1);
        let each: Vec<u64> = each.map(|number| number.parse().unwrap()).collect();
        assert!(
            each.len() == 3 && each.iter().all(|count| *count > 0),
            "{flushed}"
        );
    }
    let syncs_per_flush = |daemon| {
        let flushes = sum_counter(&place, daemon, "walvisor_block_flushes_total");
        let syncs = sum_counter(&place, daemon, "walvisor_log_syncs_total");
        println!("{daemon}: {syncs} syncs of the log for {flushes} FLUSHes of three disks");
        assert!(flushes >= 900.0, "{flushes}");
        syncs / flushes
    };
    let (three, one) = (syncs_per_flush("three"), syncs_per_flush("one"));
    assert!(three < 0.5 && three < 1.25 * one, "{three} beside {one}");
}
