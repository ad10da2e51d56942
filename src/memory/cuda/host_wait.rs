//! How a thread waits for a device.

/// What a thread does while it waits for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostWait {
    /// It spins, and goes on at once. Such events are the fastest for streams that wait for them, and to query.
    Spins,
    /// It sleeps, and leaves its core to others: for work that takes longer than waking up.
    Sleeps,
}

impl HostWait {
    /// Returns what is best while so many bytes cross the bus.
    #[must_use]
    pub const fn for_copy_of(bytes: usize) -> Self {
        /// Takes about 20 us at 55 GB/s.
        const LONG: usize = 1 << 20;
        if bytes < LONG { Self::Spins } else { Self::Sleeps }
    }
}
