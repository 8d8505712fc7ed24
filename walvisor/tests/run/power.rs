//! The orderly end: SIGTERM and `walvisor ctl shutdown` press the guest's power button.

use rustix::process::Signal;

use crate::control::Guest;
use crate::kernel::KernelAction;
use crate::{has_kvm, wait_for};

/// By whichever of these the guest is asked to power off.
#[test]
fn a_guest_that_listens_powers_off() {
    if !has_kvm() {
        return;
    }
    let ask: [fn(&Guest); 4] = [
        |guest| guest.signal(Signal::TERM),
        |guest| guest.signal(Signal::INT),
        // Also while the guest is paused.
        |guest| assert!(guest.ctl("pause").is_ok() && guest.ctl("shutdown").is_ok()),
        |guest| assert!(guest.ctl("pause").is_ok() && guest.ctl("shutdown --now").is_ok()),
    ];
    for ask in ask {
        let guest = Guest::start(KernelAction::AwaitButton, "upL", &[]);
        ask(&guest);
        assert_eq!(guest.end(), (Some(0), String::new()));
    }
}

#[test]
fn a_guest_that_does_not_power_off_is_stopped_in_the_end() {
    if !has_kvm() {
        return;
    }
    let start = |seconds: &str| {
        let wait = ["--power-down-seconds", seconds];
        let guest = Guest::start(KernelAction::IgnoreButton, "upL", &wait);
        guest.signal(Signal::TERM);
        guest
    };
    let (code, errors) = start("1").end();
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("not powered off within 1 s"), "{errors}");
    assert_eq!(start("0").end(), (Some(0), String::new()));
    // A kernel that has not enabled the button.
    let guest = Guest::start(KernelAction::Echo, "up", &[]);
    guest.signal(Signal::TERM);
    let (code, errors) = guest.end();
    let told = "ignores the power button (no ACPI, or not booted far enough): stopping it";
    assert!(code == Some(0) && errors.contains(told), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    // A second signal ends the wait for the guest.
    let mut guest = start("1000");
    assert!(guest.ctl("stats").is_ok());
    // A signal is lost while the previous one is still pending, so the test repeats it.
    wait_for("the end without the guest", || {
        guest.signal(Signal::TERM);
        !guest.is_running()
    });
    assert_eq!(guest.end(), (Some(0), String::new()));
}

#[test]
fn a_killed_vmm_leaves_nothing_to_clean_up() {
    if !has_kvm() {
        return;
    }
    let mut guest = Guest::start(KernelAction::AwaitButton, "upL", &[]);
    guest.kill_and_start_again("upL");
    guest.ctl("resize --size 2M").unwrap();
    guest.ctl("checkpoint").unwrap();
    guest.ctl("shutdown").unwrap();
    assert_eq!(guest.end(), (Some(0), String::new()));
}
