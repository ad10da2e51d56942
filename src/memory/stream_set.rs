//! The streams that use memory, so that it is freed after their work.
//!
//! A stream is recorded when work that uses the memory is enqueued, by the kernels or by the caller.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::base::sync::lock;

use super::Stream;
use super::cuda::is_forked;

/// The streams on which work with some memory was enqueued. The memory is freed after that work.
///
/// Recording the same stream again costs one comparison.
///
/// ```
/// use kvpool::memory::{Stream, StreamSet};
/// let users = StreamSet::default();
/// users.record(Stream::DEFAULT);
/// users.record(Stream::DEFAULT);
/// assert_eq!(users.streams(), [Stream::DEFAULT]);
/// ```
#[derive(Debug, Default)]
pub struct StreamSet {
    /// The handle of the last recorded stream, plus one; that stream is in `streams`. 0 for none.
    last: AtomicUsize,
    streams: Mutex<Vec<Stream>>,
}

impl StreamSet {
    /// Records that work on `stream` uses the memory.
    #[inline]
    pub fn record(&self, stream: Stream) {
        let mark = stream.handle().wrapping_add(1);
        if self.last.load(Relaxed) != mark {
            self.add(stream);
            self.last.store(mark, Relaxed);
        }
    }

    fn add(&self, stream: Stream) {
        let mut streams = self.lock();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// Returns every recorded stream.
    #[must_use]
    pub fn streams(&self) -> Vec<Stream> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stream>> {
        lock(&self.streams)
    }
}

/// The memory of this process that devices can access, by its first address: its end, and its users.
static REGIONS: RwLock<BTreeMap<usize, (usize, Arc<StreamSet>)>> = RwLock::new(BTreeMap::new());

/// Registers the users of memory, so that they are found by address, until [`unregister`].
pub(super) fn register(addresses: &Range<usize>, users: &Arc<StreamSet>) {
    let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
    regions.insert(addresses.start, (addresses.end, Arc::clone(users)));
}

/// Removes a registration of [`register`]. The child of a fork keeps it: another thread may have held the
/// lock then.
pub(super) fn unregister(start: usize) {
    if is_forked() {
        return;
    }
    REGIONS.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
}

/// Calls `work` with the users of the memory at `address`, if they are registered.
pub(super) fn with_streams_at<R>(address: usize, work: impl FnOnce(&Arc<StreamSet>) -> R) -> Option<R> {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    let found = regions.range(..=address).next_back().filter(|(_, (end, _))| address < *end);
    found.map(|(_, (_, users))| work(users))
}
