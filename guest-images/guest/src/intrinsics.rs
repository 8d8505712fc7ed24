//! The memory functions that the compiler calls. Without an operating system there is no C library
//! that has them.

use core::arch::asm;

/// # Safety
/// As C's memcpy.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // SAFETY: the caller keeps memcpy's contract; the direction flag is clear.
    unsafe {
        asm!(
            "rep movsb",
            inout("rdi") to => _, inout("rsi") from => _, inout("rcx") length => _,
            options(nostack, preserves_flags)
        );
    }
    to
}

/// # Safety
/// As C's memmove.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= length {
        // SAFETY: no byte is overwritten before it is copied when copying upwards.
        return unsafe { memcpy(to, from, length) };
    }
    // SAFETY: the caller keeps memmove's contract. The regions overlap with `to` behind `from`, so
    // `length` is not 0, and copying downwards reads each byte before it is overwritten; the flag
    // is cleared again.
    unsafe {
        asm!(
            "std", "rep movsb", "cld",
            inout("rdi") to.add(length - 1) => _,
            inout("rsi") from.add(length - 1) => _,
            inout("rcx") length => _,
            options(nostack)
        );
    }
    to
}

/// # Safety
/// As C's memset.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, length: usize) -> *mut u8 {
    // SAFETY: the caller keeps memset's contract; the direction flag is clear.
    unsafe {
        asm!(
            "rep stosb",
            inout("rdi") to => _, in("al") byte as u8, inout("rcx") length => _,
            options(nostack, preserves_flags)
        );
    }
    to
}

/// # Safety
/// As C's memcmp.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, length: usize) -> i32 {
    for index in 0..length {
        // SAFETY: the caller guarantees that `length` bytes of both are readable. The reads are
        // volatile because the compiler could otherwise turn the loop into a call of memcmp.
        let (left, right) = unsafe {
            (
                one.add(index).read_volatile(),
                other.add(index).read_volatile(),
            )
        };
        if left != right {
            return i32::from(left) - i32::from(right);
        }
    }
    0
}

/// # Safety
/// As C's memcmp.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, length: usize) -> i32 {
    // SAFETY: the caller keeps memcmp's contract, which is bcmp's.
    unsafe { memcmp(one, other, length) }
}
