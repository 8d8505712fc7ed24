//! The machine that runs Linux guests: this one, if its KVM runs a kernel's ring 0 on the
//! processor, or else one with AMD's SVM that QEMU emulates.

use walvisor_vmm::probe::{self, Ring0};

/// The machine a job runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// This machine.
    Direct,
    /// A machine emulated by QEMU, with an unmodified kvm_amd.
    Nested,
}

impl Machine {
    /// Chooses the machine, and returns the reason as one line for the user.
    /// `WALVISOR_MACHINE=direct` or `nested` overrides the probe.
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
                    // After the first colon comes a remedy, which a nested machine does not need.
                    let reason = text.split(": ").next().unwrap_or(&text);
                    (Self::Nested, nested(reason))
                }
            },
        }
    }
}

fn nested(reason: &str) -> String {
    format!(
        "machine: kvm_amd inside QEMU's emulation ({reason}); counts are real there, seconds are \
         not"
    )
}
