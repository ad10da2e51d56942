//! Parsed arguments of `alloc_extend`: requests that continue their pages, as in SGLang's paged allocator.

use crate::base::{Error, PADDING, Page, Result, try_with_capacity, widen};

/// The slot of the last token of each request of a batch.
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
    fn of(self, request: usize) -> i64 {
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

/// One request of a batch that grows from `prefix` to `seq` tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExtendedRequest {
    pub(super) prefix: usize,
    pub(super) seq: usize,
    /// The slot of the last token. It is unchecked, because it matters only if the prefix ends inside a page.
    pub(super) last_loc: i64,
}

impl ExtendedRequest {
    /// Returns whether the next token goes into an existing page.
    pub(super) const fn continues(&self, page_size: usize) -> bool {
        !self.prefix.is_multiple_of(page_size) && self.seq > self.prefix
    }

    /// Returns the slot after `last_loc`. If there is no such slot, returns the padding slot, which has no
    /// owner.
    pub(super) fn next_slot(&self) -> u32 {
        let next = self.last_loc.checked_add(1).and_then(|next| i32::try_from(next).ok());
        next.and_then(|next| u32::try_from(next).ok()).unwrap_or(PADDING)
    }

    /// Returns the number of free slots in the last page.
    pub(super) const fn open_slots(&self, page_size: usize) -> usize {
        self.prefix.next_multiple_of(page_size) - self.prefix
    }

    pub(super) const fn new_pages(&self, page_size: usize) -> usize {
        self.seq.div_ceil(page_size) - self.prefix.div_ceil(page_size)
    }
}

/// Parses the requests of a batch, and checks each by itself.
pub(super) fn parse_requests(
    prefix_lens: &[i64],
    seq_lens: &[i64],
    last_loc: LastLoc<'_>,
) -> Result<Vec<ExtendedRequest>> {
    if prefix_lens.len() != seq_lens.len() || seq_lens.len() != last_loc.len() {
        return Err(Error::config(format!(
            "a batch of {} prefix_lens, {} seq_lens and {} last_loc; the lengths must be equal",
            prefix_lens.len(),
            seq_lens.len(),
            last_loc.len()
        )));
    }
    let mut requests = try_with_capacity(prefix_lens.len())?;
    for (position, (&prefix, &seq)) in prefix_lens.iter().zip(seq_lens).enumerate() {
        // A pool can never serve lengths beyond int32, and sums of such lengths would overflow.
        let length = |value: i64| u32::try_from(value).ok().filter(|&value| i32::try_from(value).is_ok());
        requests.push(match (length(prefix), length(seq)) {
            (Some(prefix), Some(seq)) if prefix <= seq => ExtendedRequest {
                prefix: widen(prefix),
                seq: widen(seq),
                last_loc: last_loc.of(position),
            },
            _ => {
                return Err(Error::config(format!(
                    "request {position} grows from {prefix} to {seq} tokens; needed is 0 <= prefix <= seq <= {}",
                    i32::MAX
                )));
            }
        });
    }
    Ok(requests)
}
