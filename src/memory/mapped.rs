//! Large host memory with a choice of NUMA node and page size, page-locked step by step.

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};

use crate::base::sync::lock;
use crate::base::{Device, Error, Result};

use super::host::{map, out_of_memory_error, unmap};
use super::system_pages::{huge_pages_for, system_page_size};
use super::{Backend, Block, Contents, Gpu, Host, PageLock, RegionRange, StreamSet};

/// The kind of pages that memory is allocated in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageKind {
    /// The ordinary pages of the system, which may join them to huge pages by itself.
    #[default]
    Ordinary,
    /// Huge pages that the system has reserved.
    Huge,
}

/// Host memory for large regions: on a NUMA node, in huge pages, and page-locked in steps, where the system
/// supports it.
///
/// If the system does not provide one of these, the memory is allocated without it, and
/// [`MappedHost::take_notes`] reports it. Use [`Host`](super::Host) for small or pageable memory,
/// [`PageLockedHost`](super::PageLockedHost) for memory page-locked at once.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{MappedHost, PageKind, Region, system_page_size};
/// let backend = Arc::new(MappedHost::new(None, PageKind::Ordinary).unwrap());
/// let region = Region::new(backend.clone(), 1 << 20).unwrap();
/// assert!(region.address().as_ptr().addr().is_multiple_of(system_page_size()));
/// assert!(!backend.has_huge_pages() && backend.take_notes().is_empty());
/// ```
#[derive(Debug, Default)]
pub struct MappedHost {
    numa_node: Option<usize>,
    pages: PageKind,
    blocks: Mutex<Vec<Mapping>>,
    notes: Mutex<Vec<String>>,
}

/// A block in use.
#[derive(Debug)]
struct Mapping {
    pages: Arc<Pages>,
    /// The page-locks of its parts; each keeps the pages until they are unlocked.
    page_locks: Vec<PageLock>,
}

/// Mapped pages, unmapped on drop.
#[derive(Debug)]
struct Pages {
    range: Range<usize>,
    are_huge: bool,
}

impl Drop for Pages {
    fn drop(&mut self) {
        let address = ptr::with_exposed_provenance_mut(self.range.start);
        let address = NonNull::new(address).expect("a mapping has an address");
        // SAFETY: this range was mapped, and neither its owner nor a lock of its pages is left.
        unsafe { unmap(address, self.range.len()) };
    }
}

impl MappedHost {
    /// Creates memory that comes from `numa_node` first, in pages of that kind.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a node that this machine does not have.
    pub fn new(numa_node: Option<usize>, pages: PageKind) -> Result<Self> {
        let last = last_numa_node();
        match numa_node {
            Some(node) if node > last => {
                Err(Error::config(format!("numa_node is {node}; this machine has nodes 0 to {last}")))
            }
            _ => Ok(Self { numa_node, pages, ..Self::default() }),
        }
    }

    /// Returns whether any memory in use is in explicit huge pages.
    pub fn has_huge_pages(&self) -> bool {
        lock(&self.blocks).iter().any(|block| block.pages.are_huge)
    }

    /// Takes the messages since the last call, about requests that the system did not fulfil.
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.notes))
    }

    /// Allocates explicit huge pages of the largest size of which the system has reserved enough. The error
    /// says why there are none.
    fn allocate_huge(&self, bytes: usize) -> std::result::Result<Block, String> {
        let mut tried = Vec::new();
        for page in huge_pages_for(bytes) {
            let mapped = bytes.next_multiple_of(page);
            match map_huge(mapped, page) {
                Ok(address) => return Ok(self.record_block(address, mapped, true, bytes)),
                Err(cause) => tried.push(format!("{page} bytes each: {cause}")),
            }
        }
        Err(if tried.is_empty() { "the system has no size that suits".to_owned() } else { tried.join("; ") })
    }

    /// Records the pages that were mapped for a block of `bytes`.
    fn record_block(&self, address: NonNull<u8>, mapped: usize, are_huge: bool, bytes: usize) -> Block {
        let start = address.as_ptr().expose_provenance();
        let pages = Arc::new(Pages { range: start..start + mapped, are_huge });
        lock(&self.blocks).push(Mapping { pages, page_locks: Vec::new() });
        Block::new(address, bytes)
    }

    fn add_note(&self, note: String) {
        lock(&self.notes).push(note);
    }
}

// SAFETY: a block is a mapping of its own, of whole pages that the system zeroed, until `deallocate` unmaps
// it.
unsafe impl Backend for MappedHost {
    fn device(&self) -> Device {
        Device::Cpu
    }

    /// Returns true: a part of it becomes accessible once it is page-locked.
    fn is_device_accessible(&self) -> bool {
        true
    }

    /// Touches the bytes, then page-locks them.
    fn page_lock(&self, gpu: &Arc<Gpu>, bytes: RegionRange<'_>) -> Result<()> {
        touch(bytes);
        let start = bytes.address().as_ptr().addr();
        let is_here = |block: &Mapping| block.pages.range.contains(&start);
        let found =
            lock(&self.blocks).iter().find(|block| is_here(block)).map(|block| Arc::clone(&block.pages));
        let (Some(pages), Some(users)) = (found, bytes.users()) else {
            return Err(Error::argument("memory of another backend cannot be page-locked through this one"));
        };
        let locked = PageLock::new(gpu, &bytes.tensor()?, users, pages)?;
        if let Some(block) = lock(&self.blocks).iter_mut().find(|block| is_here(block)) {
            block.page_locks.extend(locked);
        }
        Ok(())
    }

    fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block> {
        if bytes == 0 {
            return Host.allocate(0, contents);
        }
        let huge = (self.pages == PageKind::Huge).then(|| self.allocate_huge(bytes));
        if let Some(Err(cause)) = &huge {
            self.add_note(format!(
                "no {bytes} bytes of explicit huge pages ({cause}); transparent ones are used where the system gives them"
            ));
        }
        let block = if let Some(Ok(block)) = huge {
            block
        } else {
            let mapped = bytes.next_multiple_of(system_page_size());
            let address = map(mapped).ok_or_else(|| out_of_memory_error(bytes))?;
            self.record_block(address, mapped, false, bytes)
        };
        if let Some(node) = self.numa_node
            && let Err(cause) = prefer_node(&block, node)
        {
            self.add_note(format!(
                "memory could not be bound to NUMA node {node} ({cause}); it comes from any"
            ));
        }
        Ok(block)
    }

    unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
        if block.bytes() == 0 {
            // SAFETY: it came from the host's backend, and the caller no longer uses it.
            unsafe { Host.deallocate(block, users) };
            return;
        }
        let start = block.address().as_ptr().addr();
        let mut blocks = lock(&self.blocks);
        let at = blocks.iter().position(|block| block.pages.range.start == start);
        let mapping = at.map(|at| blocks.swap_remove(at));
        drop(blocks);
        // The locks are dropped first, after the work of their users, and the pages with the last of them.
        drop(mapping);
    }
}

/// Populates bytes, which are zeros that no other code accesses meanwhile.
fn touch(bytes: RegionRange<'_>) {
    let (address, count) = (bytes.address().as_ptr(), bytes.bytes());
    #[cfg(target_os = "linux")]
    {
        // SAFETY: the bytes lie in a live region, and nothing in them changes.
        let populated = unsafe { libc::madvise(address.cast(), count, libc::MADV_POPULATE_WRITE) };
        if populated == 0 {
            return;
        }
    }
    for offset in (0..count).step_by(system_page_size()) {
        // SAFETY: the byte lies in a live region, and is 0 already.
        unsafe { address.wrapping_add(offset).write_volatile(0) };
    }
}

/// Maps whole huge pages of `page` bytes.
#[cfg(target_os = "linux")]
fn map_huge(bytes: usize, page: usize) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let size = page.trailing_zeros().cast_signed() << libc::MAP_HUGE_SHIFT;
    // Without MAP_NORESERVE: a missing huge page must fail here, since later it would kill the process.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | size;
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no memory in use.
    let address = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(address.cast()).expect("the system maps nothing at 0 by itself"))
}

#[cfg(not(target_os = "linux"))]
fn map_huge(_bytes: usize, _page: usize) -> io::Result<NonNull<u8>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns the highest number of a NUMA node, or 0 where the system reports none.
fn last_numa_node() -> usize {
    let online = std::fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
    online.trim().rsplit([',', '-']).next().and_then(|last| last.parse().ok()).unwrap_or(0)
}

/// Makes `block`, whose pages are untouched, come from `node` while that has memory.
#[cfg(target_os = "linux")]
fn prefer_node(block: &Block, node: usize) -> io::Result<()> {
    const MPOL_PREFERRED: libc::c_int = 1;
    let mut nodes = [0u64; 16];
    *nodes.get_mut(node / 64).ok_or(io::ErrorKind::InvalidInput)? = 1 << (node % 64);
    // SAFETY: the range was mapped just now and is ours; the mask has as many bits as are passed, and the
    // system counts one more.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            block.address().as_ptr(),
            block.bytes(),
            MPOL_PREFERRED,
            nodes.as_ptr(),
            64 * nodes.len() + 1,
            0,
        )
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
fn prefer_node(_block: &Block, _node: usize) -> io::Result<()> {
    Ok(())
}
