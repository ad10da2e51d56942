//! Parsed arguments of `alloc_extend`: requests that continue their pages, as in SGLang's paged allocator.

use crate::base::{
    Error, Id, IndexNumber, PADDING, Page, Result, Slot, try_reserve, try_with_capacity, widen,
};

use super::free_list::Run;
use super::page_size::PageSize;
use super::slot_list::SlotList;

/// The slot of the last token of each request of a batch.
///
/// ```
/// use kvpool::index::{Extension, LastLoc, Order, SlotAllocator};
/// let mut slots = SlotAllocator::new(64, 4, Order::Sorted).unwrap();
/// let first: Extension<i32> = slots.extend(&[0], &[6], LastLoc::Known(&[0])).unwrap().expect("64 are free");
/// assert_eq!(first.slots, [4, 5, 6, 7, 8, 9]);
/// // The last page has two more.
/// let next: Extension<i32> = slots.extend(&[6], &[9], LastLoc::Known(&[9])).unwrap().expect("there are more");
/// assert_eq!((next.slots, next.continued.len()), (vec![10, 11, 12], 1));
/// ```
#[derive(Clone, Copy, Debug)]
pub enum LastLoc<'a> {
    /// One slot for each request.
    Known(&'a [i64]),
    /// The given number of slots, whose values only a device has.
    OnDevice(usize),
}

impl LastLoc<'_> {
    const fn len(self) -> usize {
        match self {
            Self::Known(slots) => slots.len(),
            Self::OnDevice(count) => count,
        }
    }

    /// Returns the last slot of a request. If only a device has it, returns a value that has no next slot.
    #[inline]
    pub(super) fn of(self, request: usize) -> i64 {
        match self {
            Self::Known(slots) => slots[request],
            Self::OnDevice(_) => i64::MAX,
        }
    }
}

/// The slots added to a batch of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension<T> {
    /// The new slots, concatenated in the order of the requests. A slot that only a device can compute is the
    /// padding slot here.
    pub slots: Vec<T>,
    /// Pages that requests had before and that hold some of the new slots, as far as the host knows them.
    pub continued: Vec<Page>,
}

/// Where the slots of an extension are put.
pub(super) trait NewSlots {
    /// Makes room for `slots` slots in `runs` runs.
    fn reserve(&mut self, slots: usize, runs: usize) -> Result<()>;

    /// Appends the slots of `run`.
    fn push(&mut self, run: Run<Slot>);

    /// Appends slots that only a device can compute.
    fn push_unknown(&mut self, count: u32);
}

impl<T: IndexNumber> NewSlots for Vec<T> {
    fn reserve(&mut self, slots: usize, _: usize) -> Result<()> {
        try_reserve(self, slots)
    }

    fn push(&mut self, run: Run<Slot>) {
        self.extend(run.range().map(T::of));
    }

    fn push_unknown(&mut self, count: u32) {
        self.resize(self.len() + widen(count), T::of(PADDING));
    }
}

impl NewSlots for SlotList {
    fn reserve(&mut self, _: usize, runs: usize) -> Result<()> {
        self.reserve(runs)
    }

    fn push(&mut self, run: Run<Slot>) {
        self.push(run);
    }

    fn push_unknown(&mut self, count: u32) {
        (0..count).for_each(|_| self.push(Run { start: Slot::new(PADDING), len: 1 }));
    }
}

/// One request of a batch that grows from `prefix` to `seq` tokens, both within int32.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExtendedRequest {
    pub(super) prefix: u32,
    pub(super) seq: u32,
    /// The slot after that of the last token; the padding slot, which has no owner, if there is none. It is
    /// unchecked, because it matters only if the prefix ends inside a page.
    pub(super) next_slot: u32,
}

impl ExtendedRequest {
    /// Returns the number of new slots.
    pub(super) const fn new_slots(&self) -> u32 {
        self.seq - self.prefix
    }

    /// Returns the number of new slots in the page in which the prefix ends.
    pub(super) fn open_slots(&self, page_size: PageSize) -> u32 {
        match page_size.offset(self.prefix) {
            0 => 0,
            offset => self.new_slots().min(page_size.slots() - offset),
        }
    }

    pub(super) const fn new_pages(&self, page_size: PageSize) -> u32 {
        page_size.pages(self.seq) - page_size.pages(self.prefix)
    }
}

/// Parses the requests of a batch, and checks each by itself.
pub(super) fn parse_requests(
    prefix_lens: &[i64],
    seq_lens: &[i64],
    last_loc: LastLoc<'_>,
) -> Result<Vec<ExtendedRequest>> {
    if prefix_lens.len() != seq_lens.len() || seq_lens.len() != last_loc.len() {
        return Err(Error::argument(format!(
            "a batch of {} prefix_lens, {} seq_lens and {} last_loc; the lengths must be equal",
            prefix_lens.len(),
            seq_lens.len(),
            last_loc.len()
        )));
    }
    let mut requests = try_with_capacity(prefix_lens.len())?;
    for (position, (&prefix, &seq)) in prefix_lens.iter().zip(seq_lens).enumerate() {
        // A pool can never serve lengths beyond int32, and sums of such lengths would overflow.
        let (Some(prefix), Some(seq)) = (number(prefix), number(seq).filter(|_| prefix <= seq)) else {
            return Err(shrinking_error(position, prefix, seq));
        };
        let next_slot = last_loc.of(position).checked_add(1).and_then(number).unwrap_or(PADDING);
        requests.push(ExtendedRequest { prefix, seq, next_slot });
    }
    Ok(requests)
}

/// Returns a number that int32 has and that is not negative.
#[inline]
fn number(value: i64) -> Option<u32> {
    u32::try_from(value).ok().filter(|&value| value <= i32::MAX.cast_unsigned())
}

#[cold]
fn shrinking_error(position: usize, prefix: i64, seq: i64) -> Error {
    Error::argument(format!(
        "request {position} grows from {prefix} to {seq} tokens; needed is 0 <= prefix <= seq <= {}",
        i32::MAX
    ))
}
