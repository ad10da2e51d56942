//! Device memory that the host cannot touch, and page-locked memory.

use std::collections::BTreeMap;

use crate::state::{Code, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};

/// What fresh device memory holds.
const FRESH: u8 = 0xA5;
const PAGE: usize = 4096;

/// What there is and what is out.
pub struct Memory {
    /// Device allocations: address and length.
    device: BTreeMap<usize, usize>,
    /// Page-locked allocations.
    host: BTreeMap<usize, usize>,
    pub capacity: usize,
    pub used: usize,
}

impl Default for Memory {
    fn default() -> Self {
        Self { device: BTreeMap::new(), host: BTreeMap::new(), capacity: 64 << 30, used: 0 }
    }
}

/// Whether `start..start + len` lies in one block of `blocks`.
fn holds(blocks: &BTreeMap<usize, usize>, start: usize, len: usize) -> bool {
    let Some((at, block)) = blocks.range(..=start).next_back() else { return false };
    start.checked_add(len).is_some_and(|end| end <= at + block)
}

fn pages(len: usize) -> usize {
    len.max(1).next_multiple_of(PAGE)
}

fn map(len: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), pages(len), libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    (address != libc::MAP_FAILED).then_some(address as usize)
}

fn protect(start: usize, len: usize, protection: libc::c_int) {
    // SAFETY: the range is one that `map` made. Who touches it while it is protected is meant to die.
    unsafe { libc::mprotect(start as *mut libc::c_void, pages(len), protection) };
}

impl Memory {
    pub fn allocate(&mut self, len: usize) -> Result<usize, Code> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if len > self.capacity.saturating_sub(self.used) {
            return Err(OUT_OF_MEMORY);
        }
        let start = map(len).ok_or(OUT_OF_MEMORY)?;
        // Large blocks are reserved, not taken: only their beginning and their end are spoilt.
        let spoilt = len.min(64 << 20);
        // SAFETY: the range was mapped just now.
        unsafe { std::ptr::write_bytes(start as *mut u8, FRESH, spoilt) };
        protect(start, len, libc::PROT_NONE);
        self.device.insert(start, len);
        self.used += len;
        Ok(start)
    }

    /// The addresses stay reserved, so that whoever uses them afterwards dies.
    pub fn free(&mut self, start: usize) -> Code {
        let Some(len) = self.device.remove(&start) else { return INVALID_VALUE };
        self.used -= len;
        // SAFETY: the range is a block of ours that nobody may use any more.
        unsafe { libc::madvise(start as *mut libc::c_void, pages(len), libc::MADV_DONTNEED) };
        SUCCESS
    }

    pub fn allocate_host(&mut self, len: usize) -> Result<usize, Code> {
        let start = map(len).ok_or(OUT_OF_MEMORY)?;
        self.host.insert(start, len);
        Ok(start)
    }

    pub fn free_host(&mut self, start: usize) -> Code {
        let Some(len) = self.host.remove(&start) else { return INVALID_VALUE };
        protect(start, len, libc::PROT_NONE);
        SUCCESS
    }

    pub fn is_device(&self, start: usize, len: usize) -> bool {
        holds(&self.device, start, len)
    }

    pub fn is_locked(&self, start: usize, len: usize) -> bool {
        holds(&self.host, start, len)
    }

    pub fn locked_bytes(&self) -> usize {
        self.host.values().sum()
    }

    /// Lets work touch device memory, or nobody.
    pub fn open(&self, is_open: bool) {
        let protection = if is_open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        for (&start, &len) in &self.device {
            protect(start, len, protection);
        }
    }
}
