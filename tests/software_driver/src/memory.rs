//! Device memory, which the host cannot touch, and page-locked memory, which it can.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::arena::{Arena, PAGE};
use crate::codes::{ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, OUT_OF_MEMORY, Outcome};

/// Bytes that each device has, unless a test says otherwise.
const CAPACITY: usize = 64 << 30;
/// The bytes from which on one call cannot page-lock memory: the driver's list of pages gets too long.
const MOST_PAGE_LOCKED: usize = 512 << 30;
/// The bytes from which on zeroing replaces pages instead of writing them.
const MANY_BYTES: usize = 1 << 20;

/// Device memory that is out.
struct Block {
    len: usize,
    device: usize,
}

/// Page-locked memory that is out. What was registered is locked by whole pages, whatever range was named.
struct PageLockedBlock {
    len: usize,
    /// The range that the caller registered; `None` for memory of ours.
    registered: Option<Range<usize>>,
}

/// The place where a range of addresses lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The range is in one block of this device.
    Device(usize),
    /// The range is in one block of page-locked memory.
    Locked,
    /// The range is in memory that the driver knows nothing of.
    Pageable,
    /// The range is not wholly in one block that is out: beyond its end, or given back already.
    Nowhere,
}

pub struct Memory {
    device: BTreeMap<usize, Block>,
    page_locked: BTreeMap<usize, PageLockedBlock>,
    device_arena: Arena,
    page_locked_arena: Arena,
    /// The memory that was given back, with its length: its addresses do not come again.
    gone: BTreeMap<usize, usize>,
    pub capacity: usize,
    /// The bytes from which on one call page-locks no memory.
    pub most_page_locked: usize,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            device: BTreeMap::new(),
            page_locked: BTreeMap::new(),
            device_arena: Arena::new(),
            page_locked_arena: Arena::new(),
            gone: BTreeMap::new(),
            capacity: CAPACITY,
            most_page_locked: MOST_PAGE_LOCKED,
        }
    }
}

impl Memory {
    pub fn allocate(&mut self, device: usize, len: usize) -> Outcome<usize> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if len > self.free_bytes(device) {
            return Err(OUT_OF_MEMORY);
        }
        let start = self.device_arena.take(len, false).ok_or(OUT_OF_MEMORY)?;
        self.device.insert(start, Block { len, device });
        Ok(start)
    }

    pub fn free(&mut self, start: usize) -> Outcome {
        let block = self.device.remove(&start).ok_or(INVALID_VALUE)?;
        Arena::give_back(start, block.len);
        self.gone.insert(start, block.len);
        Ok(())
    }

    pub fn allocate_locked(&mut self, len: usize) -> Outcome<usize> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if len >= self.most_page_locked {
            return Err(OUT_OF_MEMORY);
        }
        let start = self.page_locked_arena.take(len, true).ok_or(OUT_OF_MEMORY)?;
        self.page_locked.insert(start, PageLockedBlock { len, registered: None });
        Ok(start)
    }

    pub fn free_locked(&mut self, start: usize) -> Outcome {
        let block =
            self.page_locked.get(&start).filter(|block| block.registered.is_none()).ok_or(INVALID_VALUE)?;
        Arena::give_back(start, block.len);
        self.gone.insert(start, block.len);
        self.page_locked.remove(&start);
        Ok(())
    }

    pub fn register(&mut self, start: usize, len: usize) -> Outcome {
        let end = start.checked_add(len).filter(|_| start != 0 && len > 0).ok_or(INVALID_VALUE)?;
        if self.device_arena.has(start) {
            return Err(INVALID_VALUE);
        }
        let (first, last) = (page_of(start), end.checked_next_multiple_of(PAGE).ok_or(INVALID_VALUE)?);
        if touches(&self.page_locked, first, last) {
            return Err(ALREADY_REGISTERED);
        }
        if len >= self.most_page_locked {
            return Err(OUT_OF_MEMORY);
        }
        self.page_locked.insert(first, PageLockedBlock { len: last - first, registered: Some(start..end) });
        Ok(())
    }

    pub fn unregister(&mut self, start: usize) -> Outcome {
        let block = self.page_locked.get(&page_of(start)).and_then(|block| block.registered.as_ref());
        if block.is_none_or(|range| range.start != start) {
            return Err(NOT_REGISTERED);
        }
        self.page_locked.remove(&page_of(start));
        Ok(())
    }

    /// The place where `start..start + len` lies.
    pub fn place(&self, start: usize, len: usize) -> Place {
        let Some(end) = start.checked_add(len) else { return Place::Nowhere };
        if let Some((at, block)) = self.device.range(..=start).next_back()
            && end <= at + block.len
        {
            return Place::Device(block.device);
        }
        if let Some((at, block)) = self.page_locked.range(..=start).next_back()
            && end <= at + block.len
        {
            return Place::Locked;
        }
        let is_ours = self.device_arena.has(start) || self.page_locked_arena.has(start);
        if is_ours || touches(&self.page_locked, start, end) { Place::Nowhere } else { Place::Pageable }
    }

    /// Limits memory as at first.
    pub fn restore_limits(&mut self) {
        self.capacity = CAPACITY;
        self.most_page_locked = MOST_PAGE_LOCKED;
    }

    /// Whether an address lies in a block that was given back.
    pub fn is_gone(&self, address: usize) -> bool {
        self.gone.range(..=address).next_back().is_some_and(|(start, len)| address < start + len)
    }

    /// Lets work touch the device memory around an address, or nobody; whether it is device memory.
    pub fn open_block(&self, address: usize, is_open: bool) -> bool {
        let found = self.device.range(..=address).next_back();
        let block = found.filter(|(start, block)| address < *start + block.len);
        block.inspect(|(start, block)| Arena::protect(**start, block.len, is_open)).is_some()
    }

    /// Lets work touch device memory, or nobody.
    pub fn open(&self, is_open: bool) {
        for (&start, block) in &self.device {
            Arena::protect(start, block.len, is_open);
        }
    }

    /// Fills a range of device or page-locked memory, while device memory is open.
    pub fn fill(&self, start: usize, value: u8, len: usize) {
        let (first, last) = (start.next_multiple_of(PAGE), (start + len) / PAGE * PAGE);
        let is_replaced =
            value == 0 && len >= MANY_BYTES && matches!(self.place(start, len), Place::Device(_));
        if !is_replaced {
            write(start, value, len);
            return;
        }
        write(start, 0, first - start);
        Arena::zero_pages(first, last - first);
        write(last, 0, start + len - last);
    }

    pub fn free_bytes(&self, device: usize) -> usize {
        let blocks = self.device.values().filter(|block| block.device == device);
        self.capacity.saturating_sub(blocks.map(|block| block.len).sum())
    }

    /// Bytes of device memory that are out, of all devices.
    pub fn device_bytes(&self) -> usize {
        self.device.values().map(|block| block.len).sum()
    }

    /// Bytes of page-locked memory that are out, registered ones too, as many as were asked for.
    pub fn page_locked_bytes(&self) -> usize {
        let asked = |block: &PageLockedBlock| block.registered.as_ref().map_or(block.len, Range::len);
        self.page_locked.values().map(asked).sum()
    }
}

/// The beginning of the page of an address.
fn page_of(address: usize) -> usize {
    address / PAGE * PAGE
}

/// Whether `start..end` has bytes in common with a block.
fn touches(blocks: &BTreeMap<usize, PageLockedBlock>, start: usize, end: usize) -> bool {
    blocks.range(..end).next_back().is_some_and(|(at, block)| start < end && at + block.len > start)
}

fn write(start: usize, value: u8, len: usize) {
    // SAFETY: the caller has checked that the range lies in memory that is out, and device memory is open.
    unsafe { std::ptr::write_bytes(start as *mut u8, value, len) };
}
