//! Promise 1 under SIGKILL: the files that the guest fsynced before `walvisor run` was killed are there in the next
//! boot.

use walvisor_tests::run_linux_job;

#[test]
fn every_fsynced_file_survives_sigkill_in_the_middle_of_fio() {
    let files = [("guest.sh", include_str!("../scripts/kill-guest.sh"))];
    let Some(outcome) = run_linux_job(include_str!("../scripts/kill-job.sh"), &files) else {
        return;
    };
    let lines = |prefix| {
        outcome
            .console
            .lines()
            .filter(move |line: &&str| line.starts_with(prefix))
    };

    // 137 is the shell's status for an end by SIGKILL.
    let killed: Vec<_> = lines("job: round ").collect();
    assert_eq!(killed.len(), 2);
    assert!(
        killed.iter().all(|line| line.ends_with("status 137")),
        "{killed:?}"
    );
    let checks: Vec<_> = lines("job: check of ").collect();
    assert_eq!(checks.len(), 4);
    assert!(
        checks.iter().all(|line| line.ends_with("status 0")),
        "{checks:?}"
    );
    assert_eq!(lines("job: last boot ended with status 0").count(), 1);

    assert_eq!(
        lines("guest: lost ").collect::<Vec<_>>(),
        Vec::<&str>::new()
    );
    assert_eq!(lines("guest: e2fsck of vda: status 0").count(), 1);
    assert_eq!(lines("guest: e2fsck of vdb: status 0").count(), 1);
    // Three boots: the first finds no files, each later one all files reported before it.
    let intact: Vec<_> = lines("guest: intact ").collect();
    assert_eq!(intact.len(), 3);
    assert_eq!(intact[0], "guest: intact 0, lost 0");
    let fsynced = lines("guest: kept ")
        .filter(|line| line.ends_with(" end"))
        .count();
    assert!(
        fsynced >= 2 * (10 + 21),
        "only {fsynced} files were fsynced"
    );
    assert_eq!(intact[2], format!("guest: intact {fsynced}, lost 0"));
    assert_eq!(outcome.status, 0);
}
