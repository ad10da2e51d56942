//! Periods in the life of something that can be cleared.

/// A period between two clears: what was taken in one is worth nothing in the next.
///
/// Whoever keeps indices of an allocator keeps the epoch in which they were taken. The allocator's contents are
/// reached with it, and not at all when it is over.
///
/// ```
/// use kvpool::base::Epoch;
/// let first = Epoch::default();
/// assert_eq!((first.number(), first.next().number()), (0, 1));
/// assert_ne!(first, first.next());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch(u64);

impl Epoch {
    /// Returns the number of clears before the epoch.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    /// Returns the epoch that a clear begins.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}
