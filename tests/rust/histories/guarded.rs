//! Memory between two inaccessible pages: a read past its end ends the process.

use std::ptr::NonNull;

/// The page size of most machines; a multiple of every smaller one.
const PAGE: usize = 64 << 10;

/// Bytes that end, or begin, at an inaccessible page.
pub(super) struct Guarded {
    map: NonNull<u8>,
    mapped: usize,
    start: usize,
    bytes: usize,
}

impl Guarded {
    /// Maps `bytes` zeros that end or begin at a page without access.
    pub(super) fn new(bytes: usize, at_end: bool) -> Self {
        let inner = bytes.max(1).next_multiple_of(PAGE);
        let mapped = inner + 2 * PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory in use.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), mapped, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(map, libc::MAP_FAILED);
        let map = NonNull::new(map.cast::<u8>()).expect("it is no error");
        let middle = map.as_ptr().wrapping_add(PAGE);
        // SAFETY: the range lies within the mapping made just now.
        let opened = unsafe { libc::mprotect(middle.cast(), inner, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(opened, 0);
        let start = PAGE + if at_end { inner - bytes } else { 0 };
        Self { map, mapped, start, bytes }
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) const fn address(&self) -> *mut u8 {
        self.map.as_ptr().wrapping_add(self.start)
    }

    /// The bytes, while no other code has their address.
    pub(super) fn content(&mut self) -> &mut [u8] {
        // SAFETY: that many bytes are mapped there, and `self` is borrowed for as long as they are.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.bytes) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: `new` mapped exactly this range.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.mapped) };
    }
}
