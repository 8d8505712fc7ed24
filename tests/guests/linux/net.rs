//! A Linux guest with networks: it takes an address from passt by DHCP, fetches a file over passt
//! and over a tap device, before and after a reboot, and outlives passt.

use walvisor_guest_images::{GuestJob, JobOutcome, Metrics};
use walvisor_tests::{GuestCase, guest_job, have, told};

pub const CASE: GuestCase = GuestCase {
    name: "net",
    kernel: None,
    emulated: true,
    job,
    check: a_guest_fetches_over_passt_and_a_tap_device_reboots_and_outlives_passt,
};

fn job() -> Option<GuestJob> {
    if !have("passt", "passt") {
        return None;
    }
    let passt = std::fs::read("/usr/bin/passt").expect("passt");
    let files = [
        (
            "net.sh",
            include_bytes!("../../scripts/net-guest.sh").to_vec(),
        ),
        ("passt", passt),
    ];
    Some(guest_job(include_str!("../../scripts/net-job.sh"), &files))
}

fn a_guest_fetches_over_passt_and_a_tap_device_reboots_and_outlives_passt(outcome: &JobOutcome) {
    // A reset that crashes most guests would be a fault of walvisor.
    assert!(outcome.hung_boots <= 2, "{} hung", outcome.hung_boots);
    let console = outcome.console.as_str();
    let [sent] = told(outcome, "job: sent ")[..] else {
        panic!("no file was served");
    };
    // Twice, because it resets once.
    assert!(console.contains("guest: resets"));
    let carriers = ["mtu 1500, carrier 1"; 2];
    assert_eq!(told(outcome, "guest: mmio, "), carriers);
    assert_eq!(told(outcome, "guest: pci, "), carriers);
    for (way, sums) in [
        ("passt", &[sent; 2][..]),
        ("tap", &[sent]),
        ("again", &[sent]),
    ] {
        assert_eq!(told(outcome, &format!("guest: {way} ")), sums, "{way}");
    }
    assert_eq!(told(outcome, "guest: back "), [sent; 4]);
    assert_eq!(
        told(outcome, "guest: the first carrier is "),
        ["0, the second 1"]
    );
    let warning = "passt: it has ended, or closed the connection: the guest's network link is down";
    assert!(console.contains(warning));
    assert_eq!(told(outcome, "guest: wrote: "), ["status 0"]);
    assert_eq!(told(outcome, "job: guest: "), ["status 0"]);
    assert_eq!(told(outcome, "job: check: "), ["status 0"]);
    assert_eq!(told(outcome, "job: on the disk: "), ["hello"]);

    let metrics = Metrics::parse(&outcome.result("net.prom").expect("the metrics"));
    for transport in ["mmio", "pci"] {
        for name in ["received_bytes", "sent_bytes"] {
            let name = format!("walvisor_net_{name}_total");
            let bytes = metrics.sum(&name, "transport", transport);
            assert!(bytes >= Some(1_048_576.0), "{name}: {bytes:?}");
        }
    }
}
