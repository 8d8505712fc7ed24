//! Where Linux guests run: here, if this machine's KVM runs a kernel's ring 0 on the processor, else inside QEMU's
//! emulation of a machine that has AMD's SVM.

use walvisor::probe::{self, Ring0};

/// The machine a job runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// This machine.
    Direct,
    /// A machine emulated by QEMU, with an unmodified kvm_amd.
    Nested,
}

impl Machine {
    /// Chooses the machine, and gives the reason as one line to be said aloud. `WALVISOR_MACHINE=direct` or `nested`
    /// overrules the probe.
    #[must_use]
    pub fn choose() -> (Self, String) {
        let forced = std::env::var("WALVISOR_MACHINE").ok();
        match forced.as_deref() {
            Some("direct") => (
                Self::Direct,
                "machine: this one (WALVISOR_MACHINE=direct)".to_owned(),
            ),
            Some("nested") => (Self::Nested, nested("WALVISOR_MACHINE=nested")),
            _ => match probe::ring0() {
                Ok(Ring0::Native) => (
                    Self::Direct,
                    "machine: this one (its KVM runs a kernel on the processor)".to_owned(),
                ),
                Ok(Ring0::Interpreted) => (
                    Self::Nested,
                    nested("this KVM interprets ring 0: no VMX or SVM"),
                ),
                Err(error) => {
                    let text = error.to_string();
                    // The remedy that follows the first colon is of no use here: nesting needs none.
                    let reason = text.split(": ").next().unwrap_or(&text);
                    (Self::Nested, nested(reason))
                }
            },
        }
    }
}

fn nested(reason: &str) -> String {
    format!(
        "machine: kvm_amd inside QEMU's emulation ({reason}); counts are real there, seconds are not"
    )
}
