//! Who uses memory of a device.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::Stream;

/// The streams on which work with some memory was enqueued, so that it is given up, or used again, after them.
///
/// Noting the stream of the time before costs one comparison.
///
/// ```
/// use kvpool::memory::{Stream, Users};
/// let users = Users::default();
/// users.note(Stream::DEFAULT);
/// users.note(Stream::DEFAULT);
/// assert_eq!(users.streams(), [Stream::DEFAULT]);
/// ```
#[derive(Debug, Default)]
pub struct Users {
    /// The handle of the stream that was noted last, and one; it is in `streams`. 0 for none.
    last: AtomicUsize,
    streams: Mutex<Vec<Stream>>,
}

impl Users {
    /// Notes that work on `stream` uses the memory.
    #[inline]
    pub fn note(&self, stream: Stream) {
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

    /// All that were noted.
    #[must_use]
    pub fn streams(&self) -> Vec<Stream> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// By its first address, the device memory of this process: where it ends, and who uses it.
static REGIONS: RwLock<BTreeMap<usize, (usize, Arc<Users>)>> = RwLock::new(BTreeMap::new());

/// Makes the users of device memory known to whoever has only an address of it, until [`forget`].
pub(super) fn announce(addresses: &Range<usize>, users: &Arc<Users>) {
    let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
    regions.insert(addresses.start, (addresses.end, Arc::clone(users)));
}

/// Ends what [`announce`] began.
pub(super) fn forget(start: usize) {
    REGIONS.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
}

/// Notes that work on `stream` uses the device memory at `address`, if it is ours.
pub(super) fn note_at(address: usize, stream: Stream) {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, (end, users))) = regions.range(..=address).next_back()
        && address < *end
    {
        users.note(stream);
    }
}
