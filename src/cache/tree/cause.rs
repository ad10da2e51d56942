//! Causes of evictions.

use std::time::Instant;

/// The reason for an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pressure {
    /// An allocation was short.
    Alloc,
    /// A caller asked for an eviction.
    Evict,
    /// A namespace, or all of them, were cleared.
    Clear,
}

impl Pressure {
    /// Returns the name of this pressure.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::Evict => "evict",
            Self::Clear => "clear",
        }
    }
}

/// The cause of an eviction, and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    /// What made the cache evict the pages.
    pub pressure: Pressure,
    /// The time of the call.
    pub at: Instant,
}
