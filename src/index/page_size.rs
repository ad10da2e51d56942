//! Divisions by the number of slots in a page.

/// The number of slots in a page. A power of two divides positions by a shift, which pays several times per
/// request.
///
/// ```
/// use kvpool::index::{Order, PageSize, Requests, SlotAllocator};
/// let slots = SlotAllocator::new(64, 16, Order::Sorted).unwrap();
/// let page_size: PageSize = Requests::new(4, &slots).unwrap().page_size();
/// assert_eq!((page_size.page(35), page_size.offset(35)), (2, 3));
/// assert_eq!((page_size.pages(35), page_size.last_page_len(35)), (3, 3));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSize {
    /// The number of slots, at least 1.
    size: u32,
    /// The logarithm of `size`, when it is a power of two.
    shift: Option<u32>,
}

impl PageSize {
    pub(super) fn new(size: u32) -> Self {
        Self { size, shift: size.is_power_of_two().then(|| size.trailing_zeros()) }
    }

    /// Returns the number of slots in a page.
    #[must_use]
    pub const fn slots(self) -> u32 {
        self.size
    }

    /// Returns the page of a request that contains position `at`, which is the number of full pages in `at`
    /// tokens.
    #[must_use]
    #[inline]
    pub const fn page(self, at: u32) -> u32 {
        match self.shift {
            Some(shift) => at >> shift,
            None => at / self.size,
        }
    }

    /// Returns the offset of position `at` within its page.
    #[must_use]
    #[inline]
    pub const fn offset(self, at: u32) -> u32 {
        if self.shift.is_some() { at & (self.size - 1) } else { at % self.size }
    }

    /// Returns the number of tokens in the last page of `tokens` tokens; 0 for 0 tokens.
    #[inline]
    #[must_use]
    pub const fn last_page_len(self, tokens: u32) -> u32 {
        if tokens == 0 { 0 } else { self.offset(tokens - 1) + 1 }
    }

    /// Returns the number of pages that `tokens` tokens need.
    #[must_use]
    #[inline]
    pub const fn pages(self, tokens: u32) -> u32 {
        self.page(tokens) + (self.offset(tokens) > 0) as u32
    }
}
