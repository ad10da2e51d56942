//! A hint to the processor, which affects only speed.

/// Bytes that a processor fetches at once.
const LINE: usize = 64;

/// Prefetches a value that will be read soon, without waiting for it. Does nothing on processors other than
/// x86-64 and 64-bit Arm.
#[inline]
pub(crate) fn prefetch<T>(value: &T) {
    let begin = std::ptr::from_ref(value).cast::<u8>();
    let before = begin.addr() % LINE;
    for at in (0..before + size_of::<T>()).step_by(LINE) {
        prefetch_line(begin.wrapping_sub(before).wrapping_add(at));
    }
}

/// Prefetches the line at an address, which may be any.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn prefetch_line(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch accesses no memory, at any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

/// Prefetches the line at an address, which may be any.
#[cfg(target_arch = "aarch64")]
#[inline]
pub(crate) fn prefetch_line(address: *const u8) {
    // SAFETY: a prefetch accesses no memory, at any address.
    unsafe {
        std::arch::asm!(
            "prfm pldl1keep, [{}]",
            in(reg) address,
            options(nostack, readonly, preserves_flags),
        );
    }
}

/// Does nothing on this processor.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline]
pub(crate) const fn prefetch_line(_address: *const u8) {}
