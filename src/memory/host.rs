//! Pageable host memory. Needs no driver.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;

use crate::base::{Device, Error, ErrorKind, Result};

use super::{ALIGNMENT, Backend, Block, Contents, StreamSet};

/// Blocks from this size on are mapped, page by page as they are touched, instead of allocated from the heap.
const MAP_THRESHOLD: usize = if cfg!(miri) { usize::MAX } else { 1 << 20 };

/// Pageable host memory.
///
/// Large blocks are mapped without reservation: a block of 100 GiB is available at once and costs what is
/// touched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

pub(super) fn out_of_memory_error(bytes: usize) -> Error {
    let cause = std::io::Error::last_os_error();
    Error::new(ErrorKind::OutOfMemory, format!("the host cannot give {bytes} bytes: {cause}"))
        .with_asked(bytes)
}

/// Returns the heap layout of `bytes`; at least one byte, so that every block has an address.
fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
}

// SAFETY: a block is a mapping of its own or from the heap, zeroed and aligned by its layout, until
// `deallocate`.
unsafe impl Backend for Host {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn allocate(&self, bytes: usize, _contents: Contents) -> Result<Block> {
        let address = if bytes >= MAP_THRESHOLD {
            map(bytes)
        } else {
            // SAFETY: the layout has a size of at least one byte.
            layout(bytes).and_then(|layout| NonNull::new(unsafe { alloc_zeroed(layout) }))
        };
        address.map(|address| Block::new(address, bytes)).ok_or_else(|| out_of_memory_error(bytes))
    }

    unsafe fn deallocate(&self, block: Block, _users: &StreamSet) {
        if block.bytes() >= MAP_THRESHOLD {
            // SAFETY: `allocate` mapped this range, and the caller no longer uses it.
            unsafe { unmap(block.address(), block.bytes()) };
        } else if let Some(layout) = layout(block.bytes()) {
            // SAFETY: `allocate` took it from the heap with this layout, and the caller no longer uses it.
            unsafe { dealloc(block.address().as_ptr(), layout) };
        }
    }
}

/// Returns `bytes` zeros in fresh pages, or `None` with the cause in `errno`.
pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory in use.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return None;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the range was mapped just now. This is a hint: without huge pages it does nothing.
    unsafe {
        libc::madvise(address, bytes, libc::MADV_HUGEPAGE);
    }
    NonNull::new(address.cast())
}

/// Ends the mapping of `bytes` at `address`. Where the system refuses, which it does when a process has too
/// many mappings, the pages are given back and their addresses stay taken: a line on the standard error
/// output says so.
///
/// # Safety
/// [`map`] or the like made the mapping, and nothing uses it any more.
pub(super) unsafe fn unmap(address: NonNull<u8>, bytes: usize) {
    let start = address.as_ptr().cast();
    // SAFETY: the caller says that the range is unused.
    if unsafe { libc::munmap(start, bytes) } == 0 {
        return;
    }
    let cause = std::io::Error::last_os_error();
    // SAFETY: as above. No mapping is divided, so this does not fail for the same reason.
    let given_back = unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) } == 0;
    let kept = if given_back { "addresses" } else { "memory" };
    eprintln!("kvpool: the {kept} of {bytes} bytes at {start:p} cannot be given back: {cause}");
}

/// Asks for huge pages at addresses of this process, where whole ones fit. A large table that is read at
/// random then costs a miss of the processor's cache for each line, and not another one for its address.
///
/// ```
/// # #[cfg(target_os = "linux")] {
/// use kvpool::memory::prefer_huge_pages;
/// let table: Vec<u64> = Vec::with_capacity(1 << 20);
/// let begin = table.as_ptr().addr();
/// prefer_huge_pages(begin..begin + (8 << 20)); // before anything is written
/// # }
/// ```
#[cfg(target_os = "linux")]
pub fn prefer_huge_pages(addresses: Range<usize>) {
    let page = super::system_pages::transparent_huge_page_size();
    let (begin, end) = (addresses.start.next_multiple_of(page), addresses.end / page * page);
    if begin < end {
        // SAFETY: a hint, which changes no byte whatever is there. Where nothing is mapped, it fails.
        unsafe { libc::madvise(std::ptr::without_provenance_mut(begin), end - begin, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
pub fn prefer_huge_pages(_addresses: Range<usize>) {}

#[cfg(test)]
mod tests {
    use super::{map, prefer_huge_pages, unmap};
    use crate::memory::system_pages::{system_page_size, transparent_huge_page_size};

    #[test]
    fn asking_for_huge_pages_changes_nothing() {
        let page = transparent_huge_page_size();
        let bytes = vec![7_u8; 3 * page];
        let begin = bytes.as_ptr().addr();
        for addresses in [begin..begin + bytes.len(), begin..begin + 1, begin..begin, 1..page] {
            prefer_huge_pages(addresses);
        }
        assert!(bytes.iter().all(|&byte| byte == 7));
    }

    #[test]
    fn a_refused_unmap_leaves_the_mapping_intact() {
        let bytes = 2 * system_page_size();
        let start = map(bytes).expect("two pages");
        let within = start.map_addr(|address| address.saturating_add(1));
        // SAFETY: the first byte is mapped, and nothing else uses it.
        unsafe { start.write(7) };
        // SAFETY: no mapping begins there, and `munmap` refuses an unaligned address.
        unsafe { unmap(within, bytes - 1) };
        // SAFETY: so it is mapped still.
        assert_eq!(unsafe { start.read() }, 7);
        // SAFETY: the mapping, which nothing uses from now on.
        unsafe { unmap(start, bytes) };
    }
}
