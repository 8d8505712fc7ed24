//! A disk grows under a running Linux guest, which sees the new size at once and writes to the new range.

use walvisor_tests::run_linux_job;

#[test]
fn a_guest_sees_its_disks_grow_and_uses_what_is_new() {
    let files = [("guest.sh", include_str!("../scripts/resize-guest.sh"))];
    let Some(outcome) = run_linux_job(include_str!("../scripts/resize-job.sh"), &files) else {
        return;
    };
    let lines = |prefix: &str| -> Vec<String> {
        let found = outcome.console.lines();
        let found = found.filter_map(|line| line.strip_prefix(prefix));
        found.map(|line| line.trim().to_owned()).collect()
    };
    assert_eq!(lines("guest: sizes "), ["65536 65536", "98304 131072"]);
    assert_eq!(
        lines("guest: wrote the end of "),
        ["vda: status 0", "vdb: status 0"]
    );
    assert_eq!(
        lines("job: "),
        [
            "mmio: status 0",
            "pci: status 0",
            "guest ended with status 0",
            "check of mmio.img: status 0",
            "end of mmio.img: 0 bytes are wrong",
            "check of pci.img: status 0",
            "end of pci.img: 0 bytes are wrong",
        ]
    );
    assert_eq!(outcome.status, 0);
}
