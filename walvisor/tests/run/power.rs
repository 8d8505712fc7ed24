//! The orderly end: SIGTERM and `walvisor ctl shutdown` press the guest's power button.

use std::time::Duration;

use rustix::process::Signal;

use crate::control::Guest;
use crate::kernel::KernelAction;
use crate::{has_kvm, wait_for};

#[test]
fn sigterm_lets_a_guest_that_listens_power_off() {
    if !has_kvm() {
        return;
    }
    for signal in [Signal::TERM, Signal::INT] {
        let guest = Guest::start(KernelAction::AwaitButton, "upL", &[]);
        guest.signal(signal);
        let (code, errors) = guest.end();
        assert_eq!((code, errors.as_str()), (Some(0), ""));
    }
}

#[test]
fn the_control_socket_presses_the_button_too() {
    if !has_kvm() {
        return;
    }
    let guest = Guest::start(KernelAction::AwaitButton, "upL", &[]);
    // A shutdown works while the guest is paused, too.
    guest.ctl("pause").unwrap();
    guest.ctl("shutdown").unwrap();
    assert_eq!(guest.end(), (Some(0), String::new()));
    let guest = Guest::start(KernelAction::AwaitButton, "upL", &[]);
    guest.ctl("pause").unwrap();
    guest.ctl("shutdown --now").unwrap();
    assert_eq!(guest.end(), (Some(0), String::new()));
}

#[test]
fn a_guest_that_does_not_power_off_is_stopped_in_the_end() {
    if !has_kvm() {
        return;
    }
    let guest = Guest::start(
        KernelAction::IgnoreButton,
        "upL",
        &["--power-down-seconds", "1"],
    );
    guest.signal(Signal::TERM);
    let (code, errors) = guest.end();
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("not powered off within 1 s"), "{errors}");
    // A second signal ends the wait for the guest, and so does `--power-down-seconds 0`.
    let mut guest = Guest::start(
        KernelAction::IgnoreButton,
        "upL",
        &["--power-down-seconds", "1000"],
    );
    guest.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(200));
    assert!(guest.is_running());
    // A signal is lost while the previous one is still pending, so the test repeats it.
    wait_for("the end without the guest", || {
        guest.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(200));
        !guest.is_running()
    });
    assert_eq!(guest.end(), (Some(0), String::new()));
    let guest = Guest::start(
        KernelAction::IgnoreButton,
        "upL",
        &["--power-down-seconds", "0"],
    );
    guest.signal(Signal::TERM);
    assert_eq!(guest.end(), (Some(0), String::new()));
}

#[test]
fn a_guest_that_ignores_the_button_is_stopped_with_a_warning() {
    if !has_kvm() {
        return;
    }
    let guest = Guest::start(KernelAction::Echo, "up", &[]);
    guest.signal(Signal::TERM);
    let (code, errors) = guest.end();
    assert_eq!(code, Some(0), "{errors}");
    assert!(
        errors
            .contains("ignores the power button (no ACPI, or not booted far enough): stopping it"),
        "{errors}"
    );
    assert_eq!(errors.lines().count(), 1, "{errors}");
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
