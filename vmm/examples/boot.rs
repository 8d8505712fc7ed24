//! Boots a Linux kernel with a disk in memory and its console on the terminal:
//!
//! ```text
//! cargo run -p walvisor-vmm --example boot -- KERNEL [INITRD]
//! ```

use std::{path::PathBuf, sync::Arc};

use walvisor_vmm::arch::x86_64::{linux, start_state};
use walvisor_vmm::backend::ram::RamDisk;
use walvisor_vmm::devices::console::Console;
use walvisor_vmm::disk::OpenDisk;
use walvisor_vmm::vm::{DiskConfig, VmBuilder};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let image = linux::LinuxImage {
        kernel: arguments.next().ok_or("give a kernel")?,
        initrd: arguments.next(),
        command_line: "console=ttyS0 reboot=t panic=-1".to_owned(),
    };
    // Any `Backend` does: one with a log is walvisor_storage::Disk.
    let disk = OpenDisk::new("scratch", Arc::new(RamDisk::new(131_072)));
    let builder = VmBuilder::new().console(Console::stdio());
    let vm = builder.disk(DiskConfig::from(disk)).build()?;
    let entry = linux::load(vm.memory(), &image)?;
    start_state::set(vm.vcpu(0).ok_or("no vCPU")?, vm.memory(), entry)?;
    println!("the guest has ended: {:?}", vm.run()?.ended);
    Ok(())
}
