//! Who uses memory of a device.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::base::sync::lock;

use super::Stream;
use super::cuda::is_forked;

/// The streams on which work with some memory was enqueued, so that it goes back after them.
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
        lock(&self.streams)
    }
}

/// By its first address, the memory of this process that devices reach: where it ends, and who uses it.
static REGIONS: RwLock<BTreeMap<usize, (usize, Arc<Users>)>> = RwLock::new(BTreeMap::new());

/// Makes the users of memory known to whoever has only an address of it, until [`forget`].
pub(super) fn announce(addresses: &Range<usize>, users: &Arc<Users>) {
    let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
    regions.insert(addresses.start, (addresses.end, Arc::clone(users)));
}

/// Ends what [`announce`] began. The child of a fork keeps it: another thread may have had the lock then.
pub(super) fn forget(start: usize) {
    if is_forked() {
        return;
    }
    REGIONS.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
}

/// Does `work` with the users of the memory at `address`, if that was announced.
pub(super) fn with_users_at<R>(address: usize, work: impl FnOnce(&Arc<Users>) -> R) -> Option<R> {
    let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
    let found = regions.range(..=address).next_back().filter(|(_, (end, _))| address < *end);
    found.map(|(_, (_, users))| work(users))
}
