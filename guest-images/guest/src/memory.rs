//! Memory that the device reads and writes: regions, and the arena they come from.

use core::ptr::NonNull;

use crate::error::Error;

/// An integer type for accesses to a region.
pub trait Word: Copy + sealed::Sealed {}
impl Word for u8 {}
impl Word for u16 {}
impl Word for u32 {}
impl Word for u64 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u16 {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// A piece of memory that the device and one owner use. The guest's memory is mapped one to one, so
/// the address is the same for both.
#[derive(Debug)]
pub struct Region {
    start: NonNull<u8>,
    length: usize,
}

impl Region {
    /// The address to hand to the device.
    pub fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether its length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Reads the word at `offset`.
    ///
    /// # Panics
    /// If the word does not lie in the region or is not aligned.
    pub fn read<T: Word>(&self, offset: usize) -> T {
        // SAFETY: `word` checked bounds and alignment, and every bit pattern is a `Word`. The read
        // is volatile because the device may write the word.
        unsafe { self.word::<T>(offset).read_volatile() }
    }

    /// Writes the word at `offset`.
    ///
    /// # Panics
    /// If the word does not lie in the region or is not aligned.
    pub fn write<T: Word>(&self, offset: usize, value: T) {
        // SAFETY: `word` checked bounds and alignment. The write is volatile because the device may
        // read the word.
        unsafe { self.word::<T>(offset).write_volatile(value) }
    }

    /// The bytes, for reading. No request that writes them may be in flight.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the region is valid memory with no other owner, and the device has returned it.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// The bytes, for writing. No request that uses them may be in flight.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }

    fn word<T: Word>(&self, offset: usize) -> *mut T {
        let end = offset.checked_add(size_of::<T>());
        assert!(
            end.is_some_and(|end| end <= self.length),
            "outside the region"
        );
        // SAFETY: the offset lies in the region, hence in one allocation.
        let word = unsafe { self.start.as_ptr().add(offset) }.cast::<T>();
        assert!(word.is_aligned(), "not aligned");
        word
    }
}

/// Hands out regions one after the other. Regions are never given back.
#[derive(Debug)]
pub struct Arena {
    next: *mut u8,
    left: usize,
}

impl Arena {
    /// An arena over `length` bytes from `start`.
    ///
    /// # Safety
    /// The bytes are valid for reads and writes for the rest of the program, and nothing else uses
    /// them.
    pub unsafe fn new(start: *mut u8, length: usize) -> Self {
        Self {
            next: start,
            left: length,
        }
    }

    /// Takes `length` zeroed bytes at a multiple of `alignment` (a power of two).
    ///
    /// # Errors
    /// [`Error::Memory`] if less memory is left.
    pub fn take(&mut self, length: usize, alignment: usize) -> Result<Region, Error> {
        let padding = self.next.align_offset(alignment);
        let used = padding.checked_add(length).ok_or(Error::Memory)?;
        self.left = self.left.checked_sub(used).ok_or(Error::Memory)?;
        // SAFETY: `padding + length` bytes were left, so both additions stay in the arena, whose
        // bytes are valid for writes.
        let start = unsafe {
            let start = self.next.add(padding);
            start.write_bytes(0, length);
            self.next = start.add(length);
            start
        };
        Ok(Region {
            start: NonNull::new(start).ok_or(Error::Memory)?,
            length,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An arena on the host's heap, whose memory is leaked.
    pub(crate) fn arena(length: usize) -> Arena {
        let memory = vec![0xa5u8; length].leak();
        // SAFETY: leaked, and handed to this arena alone.
        unsafe { Arena::new(memory.as_mut_ptr(), memory.len()) }
    }

    #[test]
    fn regions_are_aligned_zeroed_disjoint_and_bounded() {
        let mut arena = arena(64 << 10);
        let first = arena.take(100, 4096).unwrap();
        let second = arena.take(100, 4096).unwrap();
        assert!(first.address().is_multiple_of(4096) && second.address().is_multiple_of(4096));
        assert!(first.bytes().iter().all(|&byte| byte == 0));
        first.write(96, u32::MAX);
        assert_eq!(first.read::<u16>(98), u16::MAX);
        assert!(second.bytes().iter().all(|&byte| byte == 0));
        assert_eq!(arena.take(64 << 10, 1).unwrap_err(), Error::Memory);
        assert_eq!(arena.take(usize::MAX, 4096).unwrap_err(), Error::Memory);
    }

    #[test]
    #[should_panic = "outside the region"]
    fn a_word_across_the_end_is_refused() {
        arena(4096).take(6, 8).unwrap().read::<u32>(4);
    }
}
