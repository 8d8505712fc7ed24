//! A stock Linux kernel boots in both formats, finds its disks over both transports, and ends in
//! both ways. Under the second guest two disks grow: it sees the new sizes at once, and writes to
//! the new ranges.

use walvisor_guest_images::{GuestJob, JobOutcome, Metrics};
use walvisor_tests::{GuestCase, guest_job, job_lines, told};

pub const CASE: GuestCase = GuestCase {
    name: "boot",
    kernel: None,
    emulated: false,
    job,
    check: bzimage_and_vmlinux_boot_with_disks_that_grow_over_mmio_and_pci_and_end_with_status_0,
};

fn job() -> Option<GuestJob> {
    let files = [
        ("write.sh", include_str!("../../scripts/boot-write.sh")),
        ("read.sh", include_str!("../../scripts/boot-read.sh")),
    ];
    Some(guest_job(include_str!("../../scripts/boot-job.sh"), &files))
}

fn bzimage_and_vmlinux_boot_with_disks_that_grow_over_mmio_and_pci_and_end_with_status_0(
    outcome: &JobOutcome,
) {
    assert_eq!(told(outcome, "guest: processors "), ["2"]);
    let mut disks = told(outcome, "guest: disk ");
    disks.sort_unstable();
    assert_eq!(
        disks,
        [
            "first is on mmio, 2 queues, 65536 sectors",
            "second is on pci, 2 queues, 65536 sectors"
        ]
    );
    // Linux's driver sees each disk's configuration.
    for (serial, block, segments, descriptors) in
        [("first", 512, 254, 256), ("second", 4096, 254, 1024)]
    {
        let read = |file: &str| {
            let lines = told(outcome, &format!("guest: {serial} {file} "));
            assert_eq!(lines.len(), 1, "{serial} {file}");
            lines[0].to_owned()
        };
        let number = |file: &str| read(file).parse::<u64>().expect("a number");
        assert_eq!(number("logical_block_size"), block);
        assert_eq!(number("physical_block_size"), 4096);
        assert_eq!(number("minimum_io_size"), 4096);
        assert_eq!(number("max_segments"), segments);
        let largest = number("max_segments") * number("max_segment_size");
        assert!((4096..=16 << 20).contains(&largest), "{largest}");
        assert_eq!(number("discard_granularity"), 4096);
        assert_eq!(number("discard_max_bytes"), 2 << 30);
        assert_eq!(number("write_zeroes_max_bytes"), 2 << 30);
        assert_eq!(read("write_cache"), "write back");
        assert_eq!(number("nr_requests"), descriptors);
        // Each queue serves processors of its own.
        assert_eq!(read("processors of its queues:").trim(), "0 1");
    }
    assert_eq!(
        told(outcome, "guest: root file system: "),
        ["/dev/vda on / type ext4"]
    );
    assert_eq!(told(outcome, "guest: job exit "), ["0", "0"]);

    // Each disk returns in the second boot the data that was written in the first.
    let mut written = told(outcome, "guest: wrote ");
    written.retain(|line| !line.starts_with("the end of "));
    written.sort_unstable();
    assert_eq!(written.len(), 2);
    assert_ne!(written[0], written[1]);
    let mut read = told(outcome, "guest: read ");
    read.sort_unstable();
    assert_eq!(written, read);

    // The second guest sees its disks grow.
    assert_eq!(
        told(outcome, "guest: sizes "),
        ["65536 65536", "98304 131072"]
    );
    assert_eq!(
        told(outcome, "guest: wrote the end of "),
        ["vdb: status 0", "vdc: status 0"]
    );

    assert_eq!(
        job_lines(outcome),
        [
            "embedded guest: status 0",
            "bzImage, power off: status 0",
            "growth of mmio.img: status 0",
            "growth of pci.img: status 0",
            "vmlinux, reboot: status 0",
            "check of mmio.img: status 0",
            "check of pci.img: status 0",
            "check of root.img: status 0",
            "end of mmio.img: 0 bytes are wrong",
            "end of pci.img: 0 bytes are wrong",
        ]
    );
    assert_eq!(outcome.status, 0);

    let embedded = outcome
        .result("embedded.json")
        .expect("the embedded guest's report");
    let embedded: serde_json::Value = serde_json::from_str(&embedded).expect("JSON");
    for (index, transport) in ["mmio", "pci"].into_iter().enumerate() {
        let report = &embedded["transports"][index];
        assert_eq!(report["transport"], transport);
        assert_eq!(report["verified"], true, "{report}");
        assert!(report["syncs"].as_u64() > Some(0), "{report}");
    }

    // The devices' counters: 2 MiB were written to each disk, and it was flushed.
    let metrics = Metrics::parse(&outcome.result("bzimage.prom").expect("the metrics"));
    for log in ["mmio.img.wal", "pci.img.wal"] {
        assert!(metrics.sum("walvisor_log_syncs_total", "log", log) >= Some(1.0));
    }
    for transport in ["mmio", "pci"] {
        let of = |name| {
            metrics
                .sum(name, "transport", transport)
                .unwrap_or_default()
        };
        assert!(of("walvisor_block_written_bytes_total") >= 2_097_152.0);
        assert!(of("walvisor_block_flushes_total") >= 1.0);
        assert_eq!(of("walvisor_block_errors_total"), 0.0);
    }
}
