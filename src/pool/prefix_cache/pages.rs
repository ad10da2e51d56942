//! Whole pages from the slots of a caller.

use crate::base::{Error, Id, IndexVec, Page, Result};

/// The treatment of a partial page at the end of what is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartialPage {
    /// The partial page stays the caller's.
    Kept,
    Freed,
}

/// Returns the pages of slots that fill pages in order: the partial one at the end only if it is freed.
///
/// # Errors
/// [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) for the first slot that is
/// elsewhere.
pub(super) fn pages_of(slots: &IndexVec, page_size: usize, partial_page: PartialPage) -> Result<Vec<Page>> {
    let kept = if partial_page == PartialPage::Kept { slots.len() % page_size } else { 0 };
    match slots {
        IndexVec::I32(slots) => pages_of_values(&slots[..slots.len() - kept], page_size),
        IndexVec::I64(slots) => pages_of_values(&slots[..slots.len() - kept], page_size),
    }
}

fn pages_of_values<T: Copy + Into<i64>>(slots: &[T], page_size: usize) -> Result<Vec<Page>> {
    let mut pages = crate::base::try_with_capacity(slots.len().div_ceil(page_size))?;
    let size = i64::try_from(page_size).expect("a page fits int32");
    for (number, slots) in slots.chunks(page_size).enumerate() {
        let first: i64 = slots[0].into();
        // The division costs more than the rest of the loop.
        let (page, offset) = if page_size == 1 { (first, 0) } else { (first / size, first % size) };
        // Without a branch for each slot.
        let is_run =
            slots.iter().zip(first..).fold(true, |is_run, (&slot, next)| is_run & (slot.into() == next));
        match u32::try_from(page) {
            Ok(page) if offset == 0 && is_run => pages.push(Page::new(page)),
            _ => {
                let wrong = slots.iter().zip(first..).position(|(&slot, next)| slot.into() != next);
                let at = if offset == 0 && first >= 0 { wrong.unwrap_or(0) } else { 0 };
                return Err(out_of_page_error(slots[at].into(), number * page_size + at, page_size));
            }
        }
    }
    Ok(pages)
}

#[cold]
fn out_of_page_error(slot: i64, position: usize, page_size: usize) -> Error {
    let offset = position % page_size;
    Error::new(
        crate::base::ErrorKind::IndexOwnership,
        format!("slot {slot} at position {position} is not number {offset} of a page of {page_size}"),
    )
    .with_index(slot)
}
