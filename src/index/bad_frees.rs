//! Reports of invalid frees.

use std::fmt::Write as _;

use crate::base::{Error, ErrorKind, Result};

/// The number of invalid indices that a report lists.
const NAMED: usize = 8;

/// Why an index could not be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadFree {
    /// The index is outside of the index space.
    OutOfRange,
    /// The index is the padding index, which has no owner.
    Padding,
    /// The index was never handed out.
    NotAllocated,
    /// An earlier call freed the index.
    AlreadyFree,
    /// One call lists the index twice.
    NamedTwice,
    /// Another owner still refers to the index.
    StillReferenced,
    /// The index belongs to another pool.
    Foreign,
    /// The index belongs to the prefix cache, which frees it when it evicts the page.
    Cached,
    /// The caller's hold of the index ended with an earlier free. It was handed out again since.
    Stale,
    /// Another owner than the one that the call names holds the index.
    OtherOwner,
}

impl BadFree {
    pub(crate) const fn description(self) -> &'static str {
        match self {
            Self::OutOfRange => "out of range",
            Self::Padding => "padding",
            Self::NotAllocated => "not allocated",
            Self::AlreadyFree => "already free",
            Self::NamedTwice => "named twice",
            Self::StillReferenced => "still referenced",
            Self::Foreign => "of another pool",
            Self::Cached => "owned by the prefix cache",
            Self::Stale => "freed earlier, and handed out again since",
            Self::OtherOwner => "held by another owner",
        }
    }
}

/// The invalid indices of one call: their number, and the first few with their reasons.
///
/// ```
/// use kvpool::index::{BadFree, BadFrees};
/// let mut bad = BadFrees::default();
/// bad.add(7, BadFree::AlreadyFree, 1);
/// assert_eq!(bad.describe("slot", 3), "1 of 3 freed slots: 7 (already free)");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct BadFrees(
    /// `None` of a valid free, which nearly all are: their results are small.
    Option<Box<Invalid>>,
);

/// The invalid indices of a free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Invalid {
    dropped: usize,
    first: Vec<(i64, BadFree)>,
    /// The histories of the indices in `first`, if there is a ledger. Indices with the same history share an
    /// entry.
    histories: Vec<(Vec<i64>, String)>,
}

impl BadFrees {
    /// Creates a report of one invalid index.
    pub fn of(index: i64, reason: BadFree) -> Self {
        let mut bad = Self::default();
        bad.add(index, reason, 1);
        bad
    }

    /// Returns the number of indices that were not freed.
    #[must_use]
    pub fn dropped(&self) -> usize {
        self.0.as_ref().map_or(0, |invalid| invalid.dropped)
    }

    /// Returns the first invalid indices, at most eight.
    #[must_use]
    pub fn first(&self) -> &[(i64, BadFree)] {
        self.0.as_ref().map_or(&[], |invalid| &invalid.first)
    }

    /// Returns whether another invalid index would be listed. Otherwise its reason need not be determined.
    #[must_use]
    pub(super) fn has_room(&self) -> bool {
        self.first().len() < NAMED
    }

    /// Adds `count` invalid indices from `index` on, all with the same reason.
    #[inline]
    pub fn add(&mut self, index: i64, reason: BadFree, count: usize) {
        if count > 0 {
            self.add_some(index, reason, count);
        }
    }

    #[cold]
    fn add_some(&mut self, index: i64, reason: BadFree, count: usize) {
        let has_room = self.has_room();
        let invalid = self.0.get_or_insert_default();
        invalid.dropped += count;
        if has_room {
            invalid.first.push((index, reason));
        }
    }

    /// Adds the invalid indices of another report.
    pub fn append(&mut self, other: Self) {
        let Some(other) = other.0 else { return };
        let invalid = self.0.get_or_insert_default();
        invalid.dropped += other.dropped;
        invalid.first.extend(other.first);
        invalid.first.truncate(NAMED);
        invalid.histories.extend(other.histories);
        invalid.histories.truncate(NAMED);
    }

    /// Adds the histories of the first invalid indices.
    pub(super) fn explain(&mut self, known: impl Fn(i64) -> Option<String>) {
        let Some(invalid) = &mut self.0 else { return };
        for (index, _) in &invalid.first {
            let Some(words) = known(*index) else { continue };
            // Neighbours usually share a history.
            match invalid.histories.iter_mut().find(|(_, history)| *history == words) {
                Some((indices, _)) => indices.push(*index),
                None => invalid.histories.push((vec![*index], words)),
            }
        }
    }

    /// Describes the report: how many of `total` indices were invalid, and the first ones with their reasons.
    #[must_use]
    pub fn describe(&self, noun: &str, total: usize) -> String {
        let (dropped, first) = (self.dropped(), self.first());
        let mut text = format!("{dropped} of {total} freed {noun}s: ");
        for (position, (index, reason)) in first.iter().enumerate() {
            let comma = if position == 0 { "" } else { ", " };
            let _ = write!(text, "{comma}{index} ({})", reason.description());
        }
        if dropped > first.len() {
            text.push_str(", ...");
        }
        for (indices, history) in self.0.iter().flat_map(|invalid| &invalid.histories) {
            for (position, index) in indices.iter().enumerate() {
                let comma = if position == 0 { "; " } else { ", " };
                let _ = write!(text, "{comma}{index}");
            }
            let _ = write!(text, ": {history}");
        }
        text
    }
}

/// The treatment of invalid indices in a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBadFree {
    /// The call frees all others, and reports the invalid ones.
    Report,
    /// The call fails, and changes nothing.
    Fail,
}

impl OnBadFree {
    /// Returns [`OnBadFree::Fail`] if `strict`, and [`OnBadFree::Report`] otherwise.
    #[must_use]
    pub const fn of(strict: bool) -> Self {
        if strict { Self::Fail } else { Self::Report }
    }
}

/// Turns a report into the result of a free: an error or the report for the log.
///
/// # Errors
/// [`ErrorKind::IndexOwnership`] when an index was dropped, for [`OnBadFree::Fail`].
pub(crate) fn on_bad_frees(
    bad: BadFrees,
    on_bad: OnBadFree,
    noun: &str,
    total: usize,
    capacity: usize,
) -> Result<BadFrees> {
    if on_bad == OnBadFree::Fail && bad.dropped() > 0 {
        let report = bad.describe(noun, total);
        let text = format!("cannot free {report}; nothing was changed (capacity {capacity})");
        let error = Error::new(ErrorKind::IndexOwnership, text);
        return Err(match bad.first().first() {
            Some((index, _)) => error.with_index(*index),
            None => error,
        });
    }
    Ok(bad)
}
