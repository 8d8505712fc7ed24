//! Promise 1 under SIGKILL: the files that the guest fsynced before `walvisor run` was killed are
//! there in the next boot, and in the images.

use walvisor_guest_images::{GuestJob, JobOutcome};
use walvisor_tests::{GuestCase, guest_job};

pub const CASE: GuestCase = GuestCase {
    name: "kill",
    kernel: None,
    emulated: false,
    job,
    check: every_fsynced_file_survives_sigkill_in_the_middle_of_fio,
};

fn job() -> Option<GuestJob> {
    let files = [("guest.sh", include_str!("../../scripts/kill-guest.sh"))];
    Some(guest_job(include_str!("../../scripts/kill-job.sh"), &files))
}

fn every_fsynced_file_survives_sigkill_in_the_middle_of_fio(outcome: &JobOutcome) {
    let lines = |prefix: &str| {
        let all = outcome.console.lines();
        all.filter(|line| line.starts_with(prefix))
            .collect::<Vec<_>>()
    };

    // 137 is the shell's status for an end by SIGKILL.
    let killed = lines("job: round ");
    assert_eq!(killed.len(), 2);
    assert!(
        killed.iter().all(|line| line.ends_with("status 137")),
        "{killed:?}"
    );
    let checks = lines("job: check of ");
    assert_eq!(checks.len(), 4);
    assert!(
        checks.iter().all(|line| line.ends_with("status 0")),
        "{checks:?}"
    );

    assert_eq!(lines("guest: lost "), Vec::<&str>::new());
    assert_eq!(lines("guest: e2fsck of vda: status 0").len(), 1);
    assert_eq!(lines("guest: e2fsck of vdb: status 0").len(), 1);
    // Two boots: the first finds no files, the second all files reported before it.
    let intact = lines("guest: intact ");
    assert_eq!(intact.len(), 2);
    assert_eq!(intact[0], "guest: intact 0, lost 0");
    // The files that were reported before `end`, a line of the console.
    let fsynced = |end: &str| {
        let before = outcome.console.lines().take_while(|line| *line != end);
        before
            .filter(|line| line.starts_with("guest: kept ") && line.ends_with(" end"))
            .count()
    };
    let (first, all) = (
        fsynced("job: round 1 ended with status 137"),
        fsynced("job: round 2 ended with status 137"),
    );
    // The kill may cut the last line.
    assert!(first >= 6 && all >= first + 14, "{first} of {all}");
    assert_eq!(intact[1], format!("guest: intact {first}, lost 0"));
    for image in ["mmio.img", "pci.img"] {
        assert_eq!(
            lines(&format!("job: checkpoint of {image}: status 0")).len(),
            1
        );
        assert_eq!(lines(&format!("job: {image} is a file system")).len(), 1);
    }
    assert_eq!(
        lines("job: intact "),
        [format!("job: intact {all}, lost 0")]
    );
    assert_eq!(outcome.status, 0);
}
