//! KVM's own statistics of a vCPU (KVM_GET_STATS_FD, Linux 5.14). They include exits that KVM
//! handles itself, such as the doorbell of an ioeventfd.
//!
//! ```text
//!   header │ name of the file │ descriptors: flags, unit, size, offset, name │ data: a u64 or more each
//! ```

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use kvm_ioctls::VcpuFd;

/// `_IO(KVMIO, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;
/// struct kvm_stats_header: flags, name_size, num_desc, id_offset, desc_offset, data_offset, a u32
/// each.
const HEADER: usize = 24;
/// struct kvm_stats_desc without its name: flags u32, exponent i16, size u16, offset u32,
/// bucket_size u32.
const DESCRIPTOR: usize = 16;
/// More descriptors than any kernel has.
const MOST_DESCRIPTORS: u32 = 4096;
/// Longest accepted name in bytes (KVM_STATS_NAME_SIZE is 48).
const LONGEST_NAME: u32 = 256;

/// One counter of a vCPU. It stays readable after the vCPU is gone.
#[derive(Debug)]
pub struct KvmCounter {
    file: File,
    offset: u64,
}

impl KvmCounter {
    /// The counter `name` of `vcpu`, such as `exits`. `None` if this kernel has none.
    pub fn of(vcpu: &VcpuFd, name: &str) -> Option<Self> {
        // SAFETY: the call takes no argument and gives a new descriptor.
        let fd = unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_GET_STATS_FD, 0) };
        if fd < 0 {
            return None;
        }
        // SAFETY: KVM has just made the descriptor, and nothing else owns it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let offset = find(&file, name).ok()??;
        Some(Self { file, offset })
    }

    /// The current value. `None` if it cannot be read.
    pub fn get(&self) -> Option<u64> {
        let mut value = [0; 8];
        self.file.read_exact_at(&mut value, self.offset).ok()?;
        Some(u64::from_ne_bytes(value))
    }
}

/// Offset of the value of the counter `name` in the file.
fn find(file: &impl FileExt, name: &str) -> io::Result<Option<u64>> {
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)?;
    let [_, name_size, count, _, descriptors, data] = words(&header);
    if count > MOST_DESCRIPTORS || name_size > LONGEST_NAME {
        return Ok(None);
    }
    let mut descriptor = vec![0; DESCRIPTOR + name_size as usize];
    for index in 0..u64::from(count) {
        let at = u64::from(descriptors) + index * descriptor.len() as u64;
        file.read_exact_at(&mut descriptor, at)?;
        let (fixed, text) = descriptor.split_at(DESCRIPTOR);
        let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
        if text == name.as_bytes() {
            let [_, _, offset, _] = words(fixed);
            return Ok(Some(u64::from(data) + u64::from(offset)));
        }
    }
    Ok(None)
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let (words, _) = bytes.as_chunks::<4>();
    std::array::from_fn(|index| u32::from_ne_bytes(words[index]))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A file with two counters, in KVM's layout.
    fn stats() -> File {
        let mut file = tempfile::tempfile().unwrap();
        let mut bytes = Vec::new();
        for word in [0u32, 8, 2, 24, 24, 72] {
            bytes.extend(word.to_ne_bytes());
        }
        for (offset, name) in [(0u32, b"halts\0\0\0"), (8, b"exits\0\0\0")] {
            for word in [0, 1 << 16, offset, 0] {
                bytes.extend(u32::to_ne_bytes(word));
            }
            bytes.extend(name);
        }
        bytes.extend(7u64.to_ne_bytes());
        bytes.extend(9u64.to_ne_bytes());
        file.write_all(&bytes).unwrap();
        file
    }

    #[test]
    fn a_counter_is_found_by_its_name() {
        let file = stats();
        for (name, value) in [("halts", 7), ("exits", 9)] {
            let offset = find(&file, name).unwrap().unwrap();
            let file = file.try_clone().unwrap();
            assert_eq!(KvmCounter { file, offset }.get(), Some(value), "{name}");
        }
        assert_eq!(find(&file, "exit").unwrap(), None);
        file.write_all_at(&u32::MAX.to_ne_bytes(), 8).unwrap();
        assert_eq!(
            find(&file, "exits").unwrap(),
            None,
            "a count that makes no sense"
        );
    }

    #[test]
    fn a_vcpu_that_never_ran_has_not_exited() {
        let kvm = match crate::probe::open() {
            Ok(kvm) => kvm,
            Err(error) => return println!("skipped: {error}"),
        };
        let vcpu = kvm.create_vm().unwrap().create_vcpu(0).unwrap();
        match KvmCounter::of(&vcpu, "exits") {
            Some(exits) => assert_eq!(exits.get(), Some(0)),
            None => println!("skipped: this kernel has no statistics of vCPUs"),
        }
        assert!(KvmCounter::of(&vcpu, "no such counter").is_none());
    }
}
