//! Causes of evictions.

use std::time::Instant;

use crate::cache::Worth;

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

/// The cause of an eviction, and why these pages were evicted and no others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reason {
    pub(super) cause: Cause,
    /// What the policy expected of them, if it chose them by that.
    pub(super) worth: Option<Worth>,
}

impl From<Cause> for Reason {
    fn from(cause: Cause) -> Self {
        Self { cause, worth: None }
    }
}
