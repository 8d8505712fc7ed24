//! The memory that a front-end shares: mapped regions of files.

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::{Arc, PoisonError};

use rustix::fs::{AtFlags, FileType, StatxFlags, fcntl_get_seals, fstatfs, statx};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryAtomic, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
};

use super::message::Message;
use super::outcome::{Outcome, refuse};
use super::sigbus::{GuardedMapping, SessionGuard};

/// The most regions that a front-end may share.
pub(super) const MAX_REGIONS: usize = 64;

/// The file system of huge pages (linux/magic.h).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Length of a region's description in a message, in bytes.
pub(super) const REGION_BYTES: usize = 32;

/// A region as a front-end describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryRegion {
    /// Guest physical address.
    guest: u64,
    /// Length in bytes.
    size: u64,
    /// Address in the front-end's address space.
    user: u64,
    /// Offset in the file.
    offset: u64,
}

impl MemoryRegion {
    /// Decodes the region at byte `at` of a payload.
    pub(super) fn read(message: &Message, at: usize) -> Outcome<Self> {
        Ok(Self {
            guest: message.u64(at)?,
            size: message.u64(at + 8)?,
            user: message.u64(at + 16)?,
            offset: message.u64(at + 24)?,
        })
    }

    /// Whether both describe the same memory. The offsets in the files do not matter.
    fn is_same(&self, other: &Self) -> bool {
        (self.guest, self.size, self.user) == (other.guest, other.size, other.user)
    }
}

impl fmt::Display for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "memory region of {:#x} bytes at {:#x}",
            self.size, self.guest
        )
    }
}

/// The regions. Queue workers see a change with their next batch; until then the regions that they
/// use stay mapped.
pub(super) struct SharedMemory {
    map: GuestMemoryAtomic<GuestMemoryMmap>,
    regions: Vec<MemoryRegion>,
    /// The mapped regions, including removed ones that a worker still uses.
    guarded: Vec<GuardedMapping<GuestRegionMmap>>,
    session: Arc<SessionGuard>,
}

impl SharedMemory {
    pub(super) fn new(session: &Arc<SessionGuard>) -> Self {
        Self {
            session: Arc::clone(session),
            map: GuestMemoryAtomic::new(GuestMemoryMmap::new()),
            regions: Vec::new(),
            guarded: Vec::new(),
        }
    }

    /// The memory by guest physical address, for queue workers.
    pub(super) fn guest(&self) -> GuestMemoryAtomic<GuestMemoryMmap> {
        self.map.clone()
    }

    /// SET_MEM_TABLE: replaces all regions.
    pub(super) fn replace(&mut self, regions: &[MemoryRegion], files: Vec<File>) -> Outcome<()> {
        if regions.len() > MAX_REGIONS {
            return Err(refuse(format!("more than {MAX_REGIONS} memory regions")));
        }
        let mut mapped = Vec::new();
        for (region, file) in regions.iter().zip(files) {
            mapped.push(self.map(region, file)?);
        }
        mapped.sort_by_key(|region| region.start_addr());
        let table = GuestMemoryMmap::from_arc_regions(mapped)
            .map_err(|error| refuse(format!("memory regions: {error}")))?;
        self.publish(table);
        self.regions = regions.to_vec();
        Ok(())
    }

    /// ADD_MEM_REG.
    pub(super) fn add(&mut self, region: &MemoryRegion, file: File) -> Outcome<()> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(refuse(format!("more than {MAX_REGIONS} memory regions")));
        }
        let mapped = self.map(region, file)?;
        let table = self
            .current()
            .insert_region(mapped)
            .map_err(|error| refuse(format!("{region}: {error}")))?;
        self.publish(table);
        self.regions.push(*region);
        Ok(())
    }

    /// REM_MEM_REG.
    pub(super) fn remove(&mut self, region: &MemoryRegion) -> Outcome<()> {
        let known = self.regions.iter().position(|known| known.is_same(region));
        let known = known.ok_or_else(|| refuse(format!("there is no {region}")))?;
        let (table, _) = self
            .current()
            .remove_region(GuestAddress(region.guest), region.size)
            .map_err(|error| refuse(format!("{region}: {error}")))?;
        self.publish(table);
        self.regions.swap_remove(known);
        Ok(())
    }

    /// The guest physical address of an address in the front-end.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.user)?;
            // The sum does not overflow: regions that would wrap were refused.
            (offset < region.size).then(|| region.guest + offset)
        })
    }

    /// Whether a region's file was truncated, and an access has met that.
    pub(super) fn is_lost(&self) -> bool {
        self.guarded.iter().any(GuardedMapping::is_lost)
    }

    fn current(&self) -> Arc<GuestMemoryMmap> {
        use vm_memory::GuestAddressSpace;
        self.map.memory().into_inner()
    }

    fn publish(&mut self, table: GuestMemoryMmap) {
        // No code panics while it holds the lock.
        self.map
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .replace(table);
        self.guarded.retain(GuardedMapping::in_use);
    }

    fn map(&mut self, region: &MemoryRegion, file: File) -> Outcome<Arc<GuestRegionMmap>> {
        let mapped = Arc::new(map_region(region, file)?);
        let guarded = GuardedMapping::new(Arc::clone(&mapped), &self.session)?;
        self.guarded.push(guarded);
        Ok(mapped)
    }
}

/// Checks that `size` bytes of a file from `offset` on may be mapped, and returns the file's
/// length. The file must be in memory (a memfd, tmpfs, hugetlbfs) or on a block device's file
/// system: the front-end may control a file system in user space or on a network, and could then
/// block any thread that touches a page. In hugetlbfs the range must be whole huge pages, because
/// the SIGBUS handler cannot replace a part of one, should the file be truncated.
pub(super) fn check_mappable(file: &File, offset: u64, size: u64) -> io::Result<u64> {
    if fcntl_get_seals(file).is_ok() {
        let stat = fstatfs(file)?;
        let page = stat.f_bsize as u64;
        let whole = |bytes: u64| bytes.is_multiple_of(page);
        if stat.f_type as u64 == HUGETLBFS_MAGIC && !(whole(offset) && whole(size)) {
            let reason =
                format!("it is not a whole number of the file's huge pages of {page} bytes");
            return Err(io::Error::other(reason));
        }
        return Ok(file.metadata()?.len());
    }
    // With STATX_DONT_SYNC the kernel answers from its own cache, whatever the file system.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(file, c"", flags, StatxFlags::TYPE | StatxFlags::SIZE)?;
    let regular = FileType::from_raw_mode(stat.stx_mode.into()).is_file();
    if !regular || stat.stx_dev_major == 0 {
        return Err(io::Error::other(
            "its file is neither in memory (memfd, tmpfs, hugetlbfs) nor on a block device's file \
             system",
        ));
    }
    Ok(stat.stx_size)
}

/// Maps a region. Its file must reach to the region's end, because an access beyond the end of a
/// file is a SIGBUS.
fn map_region(region: &MemoryRegion, file: File) -> Outcome<GuestRegionMmap> {
    let failed = |what: &dyn fmt::Display| refuse(format!("{region}: {what}"));
    let (offset, size) = (region.offset, region.size);
    let length = check_mappable(&file, offset, size).map_err(|error| failed(&error))?;
    let ends = |start: u64| start.checked_add(size);
    if ends(offset).is_none_or(|end| end > length) {
        return Err(failed(&"its file ends before it"));
    }
    if ends(region.guest).is_none() || ends(region.user).is_none() {
        return Err(failed(&"its addresses wrap"));
    }
    let size = usize::try_from(size).map_err(|error| failed(&error))?;
    let mapping = MmapRegion::from_file(FileOffset::new(file, offset), size)
        .map_err(|error| failed(&error))?;
    GuestRegionMmap::new(mapping, GuestAddress(region.guest))
        .ok_or_else(|| failed(&"its addresses wrap"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::outcome::SessionEnd;
    use std::io::Read;
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::net::UnixStream;
    use vm_memory::{Bytes, GuestAddressSpace};

    fn file(bytes: u64) -> File {
        let fd: OwnedFd =
            rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(bytes).unwrap();
        file
    }

    /// The memory of a session, and its front-end's end of the socket.
    fn shared() -> (SharedMemory, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let session = SessionGuard::new(ours.as_fd()).unwrap();
        (SharedMemory::new(&session), theirs)
    }

    fn region(guest: u64, size: u64, user: u64, offset: u64) -> MemoryRegion {
        MemoryRegion {
            guest,
            size,
            user,
            offset,
        }
    }

    #[test]
    fn regions_are_added_removed_and_found_by_the_front_ends_addresses() {
        let (mut memory, _front_end) = shared();
        let low = region(0, 0x2000, 0x7000_0000, 0);
        let high = region(0x10_0000, 0x1000, 0x6000_0000, 0x1000);
        memory
            .replace(&[high, low], vec![file(0x2000), file(0x2000)])
            .unwrap();
        assert_eq!(memory.guest_address(0x7000_1fff), Some(0x1fff));
        assert_eq!(memory.guest_address(0x7000_2000), None);
        assert_eq!(memory.guest_address(0x6000_0010), Some(0x10_0010));
        let third = region(0x2000, 0x1000, 0x5000_0000, 0);
        memory.add(&third, file(0x1000)).unwrap();
        let guest = memory.guest();
        guest
            .memory()
            .write_obj(7_u64, GuestAddress(0x1ffc))
            .unwrap();
        assert!(memory.add(&third, file(0x1000)).is_err(), "it overlaps");
        memory.remove(&third).unwrap();
        assert!(memory.remove(&third).is_err());
        assert!(
            guest
                .memory()
                .write_obj(7_u64, GuestAddress(0x1ffc))
                .is_err()
        );
    }

    /// The bytes of this process in anonymous memory.
    fn own_memory() -> usize {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find(|line| line.starts_with("RssAnon:"));
        let number = line.unwrap().split_whitespace().nth(1).unwrap();
        number.parse::<usize>().unwrap() << 10
    }

    #[test]
    fn a_truncated_file_ends_the_session_and_takes_little_memory() {
        super::super::survive_truncated_memory().unwrap();
        const LEN: u64 = 256 << 20;
        let _others = [shared(), shared()];
        let (mut memory, mut front_end) = shared();
        let (cut, whole) = (file(LEN), file(0x1000));
        for (region, file) in [
            (region(0x1000, LEN, 0x1000, 0), &cut),
            (region(0, 0x1000, 0, 0), &whole),
        ] {
            memory.add(&region, file.try_clone().unwrap()).unwrap();
        }
        let guest = memory.guest().memory().into_inner();
        guest.write_obj(7_u64, GuestAddress(0)).unwrap();
        cut.set_len(0x1000).unwrap();
        assert!(!memory.is_lost());
        let before = own_memory();
        for page in 1..LEN / 0x1000 {
            let at = GuestAddress(0x1000 + page * 0x1000);
            guest.write_obj(8_u64, at).unwrap();
            assert_eq!(guest.read_obj::<u64>(at).unwrap(), 8);
        }
        let grown = own_memory().saturating_sub(before);
        assert!(grown < LEN as usize / 4, "{grown} bytes");
        assert_eq!(guest.read_obj::<u64>(GuestAddress(0)).unwrap(), 7);
        assert!(memory.is_lost());
        assert_eq!(front_end.read(&mut [0]).unwrap(), 0);
        drop(guest);
        memory.remove(&region(0x1000, LEN, 0x1000, 0)).unwrap();
        assert_eq!(memory.guarded.len(), 1);
    }

    #[test]
    fn a_part_of_a_huge_page_is_refused() {
        use rustix::fs::{MemfdFlags, memfd_create};
        let fd = match memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) {
            Ok(fd) => fd,
            Err(error) => return println!("skipped: no huge pages: {error}"),
        };
        let page = fstatfs(&fd).unwrap().f_bsize as u64;
        let file = File::from(fd);
        file.set_len(2 * page).unwrap();
        let (mut memory, _front_end) = shared();
        for (size, offset) in [(page - 4096, 0), (page, 4096), (4096, page)] {
            let part = region(0, size, 0, offset);
            let Err(SessionEnd::Refused(error)) = memory.add(&part, file.try_clone().unwrap())
            else {
                panic!("{part} was taken");
            };
            assert!(
                error.contains("not a whole number of the file's huge pages"),
                "{error}"
            );
        }
        assert_eq!(check_mappable(&file, page, page).unwrap(), 2 * page);
    }

    #[test]
    fn a_region_beyond_its_file_is_refused() {
        let (mut memory, _front_end) = shared();
        for (size, offset) in [(0x2000, 0), (0x1000, 0x1000), (0x1000, u64::MAX - 0xfff)] {
            let beyond = region(0, size, 0, offset);
            let Err(SessionEnd::Refused(error)) = memory.add(&beyond, file(0x1000)) else {
                panic!("{beyond} was taken");
            };
            assert!(error.contains("its file ends before it"), "{error}");
        }
        let wraps = region(u64::MAX - 0xfff, 0x2000, 0, 0);
        assert!(memory.add(&wraps, file(0x2000)).is_err());
        for _ in 0..MAX_REGIONS {
            let guest = memory.regions.len() as u64 * 0x1000;
            let next = region(guest, 0x1000, guest, 0);
            memory.add(&next, file(0x1000)).unwrap();
        }
        let one_more = region(1 << 40, 0x1000, 0, 0);
        assert!(memory.add(&one_more, file(0x1000)).is_err());
    }
}
