//! Linux's uses of disks, each one once: a root file system, ext4 and xfs, discards, live switches
//! of the cache mode, fio with verification on `backend=raw`, a reboot, and panics. And atomic
//! writes, which only a newer kernel has, and only on SCSI disks. The disks' counters prove what
//! the guest cannot see.

use std::fs;

use serde_json::Value;
use walvisor_guest_images::{GuestJob, JobOutcome, Metrics, NewerKernel};
use walvisor_tests::{GuestCase, guest_job, job_lines, newer_images, told, with_program};

pub const CASE: GuestCase = GuestCase {
    name: "disks",
    kernel: None,
    emulated: false,
    job,
    check: linux_uses_all_that_its_disks_can_and_they_count_as_they_should,
};

pub const ATOMIC: GuestCase = GuestCase {
    name: "atomic",
    kernel: None,
    emulated: false,
    job: atomic_job,
    check: linux_sees_that_scsi_disks_write_atomically_over_both_transports,
};

/// The counter `pointer` of `disk` at the guest's `step`.
fn counter(outcome: &JobOutcome, step: &str, disk: &str, pointer: &str) -> u64 {
    let text = outcome.result(&format!("{step}.json"));
    let stats: Value = serde_json::from_str(&text.expect("the counters")).expect("JSON");
    let disks = stats["disks"].as_array().expect("disks");
    let disk = disks.iter().find(|known| known["name"] == disk);
    disk.and_then(|disk| disk.pointer(pointer)?.as_u64())
        .unwrap_or_else(|| panic!("{step}: no {pointer}"))
}

/// The increase of a counter of `disk` from one step to another.
fn between(outcome: &JobOutcome, steps: [&str; 2], disk: &str, pointer: &str) -> u64 {
    counter(outcome, steps[1], disk, pointer) - counter(outcome, steps[0], disk, pointer)
}

/// Allocated size of the image of `disk` at `step`, in KiB.
fn image(outcome: &JobOutcome, step: &str, disk: &str) -> u64 {
    let line = told(outcome, &format!("job: at {step} {disk}.img has "));
    let kibibytes = line[0].strip_suffix(" KiB").expect("KiB");
    kibibytes.parse().expect("a number")
}

fn job() -> Option<GuestJob> {
    let files = [
        (
            "functions.sh",
            include_str!("../../scripts/disks-functions.sh"),
        ),
        ("guest.sh", include_str!("../../scripts/disks-guest.sh")),
        ("crash.sh", include_str!("../../scripts/disks-crash.sh")),
    ];
    Some(guest_job(
        include_str!("../../scripts/disks-job.sh"),
        &files,
    ))
}

fn linux_uses_all_that_its_disks_can_and_they_count_as_they_should(outcome: &JobOutcome) {
    configured_values_are_seen(outcome);
    the_mode_of_the_cache_decides_what_is_synced(outcome);
    what_is_discarded_is_zero_and_takes_no_space(outcome);
    raw_images_verify(outcome);
    batches_ring_and_interrupt_rarely(outcome);
    everything_kept_outlives_reboot_and_panics(outcome);
    assert_eq!(outcome.status, 0);
}

fn configured_values_are_seen(outcome: &JobOutcome) {
    const GIB_2: &str = "2147483648";
    let (mib, logical) = (1 << 20, 512);
    // Name, size in bytes, read-only, logical block size, queue size, cache mode. The disk `raw` is
    // configured writethrough.
    let disks = [
        ("root", 192 * mib, 0, logical, 256, "write back"),
        ("step", 8 * mib, 0, logical, 256, "write back"),
        ("mode", 32 * mib, 0, logical, 256, "write back"),
        ("bulk", 64 * mib, 0, logical, 1024, "write back"),
        ("ext4", 64 * mib, 0, logical, 256, "write back"),
        ("xfs", 320 * mib, 0, 4096, 256, "write back"),
        ("raw", 16 * mib, 0, logical, 256, "write through"),
        ("ro", 8 * mib, 1, logical, 256, "write back"),
    ];
    for (disk, size, read_only, block, queue_size, cache) in disks {
        let (granularity, most) = if read_only == 1 {
            ("0", "0")
        } else {
            ("4096", GIB_2)
        };
        assert_eq!(
            told(outcome, &format!("guest: lsblk {disk} ")),
            [format!(
                "{size} {read_only} {block} 4096 4096 {granularity} {most} {queue_size}"
            )]
        );
        assert_eq!(
            told(outcome, &format!("guest: blockdev {disk} ")),
            [format!("{size} {read_only} {block} 4096 4096 0")]
        );
        assert_eq!(
            told(outcome, &format!("guest: queue {disk} ")),
            [format!(
                "{cache}, fua 0, cache_type {cache}, 2 queues, write_zeroes_max_bytes {most}"
            )]
        );
    }
    assert_eq!(told(outcome, "guest: wrote on a read-only disk"), [""; 0]);
    assert_eq!(told(outcome, "guest: ro is read").len(), 1);
}

/// Checks 64 writes, one after the other, in each mode. With write back the log syncs only at a
/// FLUSH. With write through each write is durable before it ends, and Linux sends no FLUSH.
fn the_mode_of_the_cache_decides_what_is_synced(outcome: &JobOutcome) {
    let count = |from: &str, to: &str, pointer: &str| between(outcome, [from, to], "mode", pointer);
    for (from, to) in [
        ("start", "written-back"),
        ("switched-back", "written-back-again"),
    ] {
        assert_eq!(count(from, to, "/writes"), 64);
        assert_eq!(count(from, to, "/flushes"), 0);
        assert_eq!(count(from, to, "/log/syncs"), 0, "{from} to {to}");
    }
    assert_eq!(
        told(outcome, "guest: switched to "),
        ["write through", "write back"]
    );
    assert_eq!(told(outcome, "guest: not switched"), [""; 0]);
    // The switch itself makes earlier writes durable: Linux sends no FLUSH for an fsync after it.
    assert_eq!(count("written-back", "switched", "/log/syncs"), 1);
    let (from, to) = ("switched", "written-through");
    assert_eq!(count(from, to, "/writes"), 64);
    assert_eq!(count(from, to, "/flushes"), 0, "fsync sent a FLUSH");
    assert_eq!(count(from, to, "/log/flushes_grouped"), 64);
    assert_eq!(count(from, to, "/log/syncs"), 64);
    // In write back mode again: one fsync, one FLUSH, one sync.
    let (from, to) = ("written-back-again", "flushed");
    assert_eq!(count(from, to, "/writes"), 64);
    assert_eq!(count(from, to, "/flushes"), 1);
    assert_eq!(count(from, to, "/log/syncs"), 1);
}

fn what_is_discarded_is_zero_and_takes_no_space(outcome: &JobOutcome) {
    assert_eq!(told(outcome, "guest: blkdiscard: "), ["status 0"]);
    assert_eq!(told(outcome, "guest: blkdiscard -z: "), ["status 0"]);
    // The log may still hold old bytes, so the device does not offer secure erase.
    assert_eq!(told(outcome, "guest: blkdiscard -s: "), ["status 1"]);
    assert_eq!(told(outcome, "guest: discarded ranges are zero").len(), 1);
    let behind = "guest: and stay so behind a checkpoint";
    assert_eq!(told(outcome, behind).len(), 1);
    let steps = ["filled", "discarded"];
    assert!(between(outcome, steps, "bulk", "/discards") >= 1);
    assert!(between(outcome, steps, "bulk", "/write_zeroes") >= 1);
    // 6 MiB were written, and 2 MiB of them discarded. The 1 MiB zeroed without unmapping may keep
    // their space.
    let [filled, discarded] = steps.map(|step| image(outcome, step, "bulk"));
    assert!(filled >= 6 << 10, "{filled}");
    assert!(filled - discarded >= 2 << 10, "{filled} {discarded}");

    for name in ["ext4", "xfs"] {
        assert_eq!(
            told(outcome, &format!("guest: mkfs.{name}: ")),
            ["status 0"]
        );
        assert_eq!(
            told(outcome, &format!("guest: fstrim {name}: ")),
            ["status 0"]
        );
        assert_eq!(
            told(outcome, &format!("guest: check of {name}: ")),
            ["status 0"]
        );
        let steps = [format!("{name}-filled"), format!("{name}-trimmed")];
        let steps = steps.each_ref().map(String::as_str);
        assert!(between(outcome, steps, name, "/discards") >= 1);
        // The guest removed a file of 4 MiB.
        let [filled, trimmed] = steps.map(|step| image(outcome, step, name));
        assert!(filled >= 4 << 10, "{name}: {filled}");
        assert!(
            filled.saturating_sub(trimmed) >= 3 << 10,
            "{name}: {filled} {trimmed}"
        );
    }
}

fn raw_images_verify(outcome: &JobOutcome) {
    assert_eq!(told(outcome, "guest: raw is "), ["write through"]);
    assert_eq!(told(outcome, "guest: fio verify on raw: "), ["status 0"; 2]);
    // With write through Linux sends no FLUSH. With write back each fsync of fio sends one: after
    // every 16 of 256 writes, except perhaps the last.
    for (steps, flushes) in [
        (["raw-start", "raw-through"], 0..=0),
        (["raw-through", "raw-back"], 15..=16),
    ] {
        assert_eq!(between(outcome, steps, "raw", "/writes"), 256);
        assert!(between(outcome, steps, "raw", "/reads") >= 256);
        assert!(flushes.contains(&between(outcome, steps, "raw", "/flushes")));
        assert_eq!(between(outcome, steps, "raw", "/errors"), 0);
    }
    assert_eq!(told(outcome, "guest: blkdiscard on raw: "), ["status 0"]);
    let inside = told(outcome, "guest: raw sum ");
    assert_eq!(inside.len(), 1);
    assert_eq!(inside, told(outcome, "job: raw sum "));
}

/// At a depth of 32, programs that submit in batches need at most 0.25 doorbells and 0.25
/// interrupts per request. For a program that submits each request by itself the numbers depend on
/// a race between guest and worker, so they are printed but not checked: in emulation the worker
/// has mostly answered a request before the guest submits the next.
fn batches_ring_and_interrupt_rarely(outcome: &JobOutcome) {
    assert_eq!(told(outcome, "guest: fio failed"), [""; 0]);
    for (disk, transport) in [("mode", "mmio"), ("bulk", "pci")] {
        for (steps, how) in [
            (["counted", "batched-randread"], "in batches"),
            (["batched-randread", "batched-randwrite"], "in batches"),
            (["batched-randwrite", "single-randrw"], "one by one"),
        ] {
            let count = |pointer| between(outcome, steps, disk, pointer);
            let (requests, doorbells) = (count("/requests"), count("/doorbells"));
            let (interrupts, job) = (count("/interrupts"), steps[1]);
            println!(
                "{transport} {job} iodepth 32, {how}: {requests} requests, {:.3} doorbells and \
                 {:.3} interrupts a request",
                doorbells as f64 / requests as f64,
                interrupts as f64 / requests as f64
            );
            assert!(requests >= 1024, "{disk} {job}: {requests}");
            if how == "in batches" {
                assert!(doorbells * 4 <= requests, "{disk} {job}: {doorbells}");
                assert!(interrupts * 4 <= requests, "{disk} {job}: {interrupts}");
            }
        }
    }
}

fn everything_kept_outlives_reboot_and_panics(outcome: &JobOutcome) {
    assert_eq!(told(outcome, "job: reboot: "), ["status 0"]);
    let root = "root /dev/vda on / type ext4";
    assert_eq!(
        told(outcome, "guest: processors "),
        [2, 1, 1].map(|cpus| format!("{cpus}, {root}"))
    );
    assert_eq!(told(outcome, "guest: lost "), [""; 0]);
    // Three files after the first boot, six after the second.
    let intact = told(outcome, "guest: intact ");
    assert_eq!(intact.len(), 3 + 6, "{intact:?}");
    for file in ["/kept", "/mnt/ext4/kept", "/mnt/xfs/kept"] {
        assert_eq!(intact.iter().filter(|kept| **kept == file).count(), 2);
    }
    // With the panic device's driver, the VMM reports a panic and fails. Without it, a panic is a
    // reset like any other.
    assert_eq!(told(outcome, "job: told panic: "), ["status 1"]);
    let panicked = "walvisor: the guest's kernel panicked: ";
    assert_eq!(told(outcome, panicked).len(), 1);
    assert_eq!(told(outcome, "job: silent panic: "), ["status 0"]);
    assert_eq!(
        told(outcome, "job: root.img has what was kept last").len(),
        1
    );
    assert_eq!(
        told(outcome, "job: ext4.img has what was kept last").len(),
        1
    );
    let checks = told(outcome, "job: check of ");
    assert_eq!(checks.len(), 7);
    assert!(
        checks.iter().all(|check| check.ends_with("status 0")),
        "{checks:?}"
    );
}

/// The guest has Debian's newer kernel, 6.12, which knows atomic writes.
fn atomic_job() -> Option<GuestJob> {
    let dir = tempfile::tempdir().unwrap();
    let script = include_str!("../../scripts/atomic-guest.sh");
    let guest = with_program(dir.path(), "atomic", script);
    let script = include_str!("../../scripts/atomic-job.sh");
    let mut job = guest_job(script, &[("guest.sh", guest)]);
    let images = newer_images(NewerKernel::V6_12).directory;
    for name in ["vmlinuz", "initramfs-base.cpio"] {
        job = job.file(name, fs::read(images.join(name)).expect("an image"));
    }
    Some(job)
}

fn linux_sees_that_scsi_disks_write_atomically_over_both_transports(outcome: &JobOutcome) {
    assert_eq!(
        job_lines(outcome),
        [
            "guest: status 0",
            "check of mmio.img: status 0",
            "check of pci.img: status 0",
        ]
    );
    for transport in ["mmio", "pci"] {
        let start = format!("disk on {transport}, atomic_write_unit_max_bytes ");
        let told = told(outcome, "guest: ");
        let at = told.iter().position(|line| line.starts_with(&start));
        let told = &told[at.expect("a disk")..];
        let most: u64 = told[0][start.len()..].parse().expect("bytes");
        assert!(most >= 65536, "{}", told[0]);
        assert_eq!(
            told[1..6],
            [
                format!("statx {most}"),
                "RWF_ATOMIC 4096: read back".to_owned(),
                "RWF_ATOMIC 65536: read back".to_owned(),
                format!("RWF_ATOMIC {most}: read back"),
                format!("RWF_ATOMIC {}: Invalid argument", 2 * most),
            ]
        );
    }
    // Each was one request.
    let metrics = Metrics::parse(&outcome.result("atomic.prom").expect("the metrics"));
    for transport in ["mmio", "pci"] {
        let writes = metrics.sum("walvisor_block_writes_total", "transport", transport);
        assert_eq!(writes, Some(3.0), "{transport}");
    }
}
