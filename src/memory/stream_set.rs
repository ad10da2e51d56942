//! The streams that use memory, so that it is freed after their work.
//!
//! A launch records its stream after it has enqueued its work, and holds the memory until then. So whoever takes a
//! stream out of a set and then records an event on it has all the work of the launches that did not record it again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, RwLock};

use crate::base::Result;
use crate::base::sync::{AtomicU64, Mutex, MutexGuard};

use super::Stream;
use super::forked::is_forked;

/// The streams on which work with some memory was enqueued, of any device that reaches it. The memory is freed
/// after that work.
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
    /// The mark of the last recorded stream, which is in `users`; 0 for none. It changes under the lock of `users`.
    /// See [`mark`].
    last: AtomicU64,
    users: Mutex<Vec<StreamUser>>,
}

/// A stream that uses memory.
///
/// ```
/// use kvpool::memory::{Stream, StreamSet, StreamUser, TakenStreams};
/// let users = StreamSet::default();
/// users.record(Stream::DEFAULT);
/// let taken: TakenStreams<'_> = users.take(|user: &StreamUser| !user.is_kept);
/// assert_eq!(taken.before(), [Stream::DEFAULT]);
/// taken.forget(); // the memory was given to work that comes behind theirs
/// assert!(users.streams().is_empty());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamUser {
    /// The stream.
    pub stream: Stream,
    /// Whether it may use the memory without being recorded again: see [`StreamSet::keep`].
    pub is_kept: bool,
}

impl StreamSet {
    /// Records that work on `stream` uses the memory. Called after the work is enqueued, also if that failed, and
    /// before the caller gives up the memory; or before any work, by the owner of the memory, who knows for how
    /// long there may be some.
    #[inline]
    pub fn record(&self, stream: Stream) {
        let mark = mark(stream);
        if self.last.load(Relaxed) != mark {
            self.add(StreamUser { stream, is_kept: false }, mark);
        }
    }

    /// Records a stream that the caller names, after `check`, unless it is recorded as such already.
    ///
    /// # Errors
    /// The error of `check`. Nothing is recorded.
    pub(super) fn keep_checked(&self, stream: Stream, check: impl FnOnce() -> Result<()>) -> Result<()> {
        let user = StreamUser { stream, is_kept: true };
        if !self.lock().contains(&user) {
            check()?;
            self.add(user, mark(stream));
        }
        Ok(())
    }

    #[cold]
    fn add(&self, user: StreamUser, mark: u64) {
        let mut users = self.lock();
        match users.iter_mut().find(|other| other.stream == user.stream) {
            Some(other) => other.is_kept |= user.is_kept,
            None => users.push(user),
        }
        if mark != UNMARKED {
            self.last.store(mark, Relaxed);
        }
    }

    /// Returns every recorded stream.
    #[must_use]
    pub fn streams(&self) -> Vec<Stream> {
        self.lock().iter().map(|user| user.stream).collect()
    }

    /// Takes the streams out that `may_leave`: once the caller has ordered a stream of the set after the work that
    /// they have then, only work that is recorded later need be waited for on them.
    pub fn take(&self, may_leave: impl Fn(&StreamUser) -> bool) -> TakenStreams<'_> {
        let mut users = self.lock();
        let before = users.iter().map(|user| user.stream).collect();
        let taken: Vec<_> = users.extract_if(.., |user| may_leave(user)).collect();
        if !taken.is_empty() {
            // A launch that still finds its stream here has enqueued its work, which the caller will wait for; any
            // other records it again.
            self.last.store(0, Relaxed);
        }
        TakenStreams { set: self, before, taken }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<StreamUser>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Streams taken out of a set, which are recorded in it again on drop.
#[derive(Debug)]
pub struct TakenStreams<'a> {
    set: &'a StreamSet,
    before: Vec<Stream>,
    taken: Vec<StreamUser>,
}

impl TakenStreams<'_> {
    /// Returns the streams to wait for: all that were in the set, the taken ones among them.
    #[must_use]
    pub fn before(&self) -> &[Stream] {
        &self.before
    }

    /// Leaves them out of the set: a stream that is in it comes after their work.
    pub fn forget(mut self) {
        self.taken.clear();
    }
}

impl Drop for TakenStreams<'_> {
    fn drop(&mut self) {
        for user in self.taken.drain(..) {
            self.set.add(user, mark(user.stream));
        }
    }
}

/// The mark of every stream whose device and handle do not fit one number. No set has it as its last.
const UNMARKED: u64 = u64::MAX;

/// Returns a number that no other stream has, above 0. Handles are addresses of 48 bits, and 0 is one on each device.
const fn mark(stream: Stream) -> u64 {
    const HANDLE_BITS: u32 = 48;
    let (handle, ordinal) = (stream.handle() as u64, stream.ordinal() as u64);
    if handle >> HANDLE_BITS != 0 || ordinal >= 0xffff {
        return UNMARKED;
    }
    (ordinal + 1) << HANDLE_BITS | handle
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns streams that differ in one thing each, or are marked as no other is.
    fn different() -> Vec<Stream> {
        let handles = [0, 1, 0x7fff_dead_bee0, (1 << 48) - 1, 1 << 48, usize::MAX];
        let ordinals = [0, 1, 0xfffe, 0xffff, u32::MAX];
        // SAFETY: no work is enqueued on it.
        let stream = |handle, ordinal| unsafe { Stream::from_handle(handle, ordinal) }.expect("a handle");
        let of = |handle| ordinals.map(|ordinal| stream(handle, ordinal));
        handles.into_iter().flat_map(of).collect()
    }

    #[test]
    fn each_stream_is_recorded_once_whatever_its_device_and_handle() {
        let (users, streams) = (StreamSet::default(), different());
        for &stream in &streams {
            users.record(stream);
            users.record(stream);
        }
        assert_eq!(users.streams(), streams);
    }

    #[test]
    fn the_last_stream_is_taken_for_no_other() {
        for &last in &different() {
            for &stream in &different() {
                let users = StreamSet::default();
                users.record(last);
                users.record(stream);
                assert_eq!(users.streams().len(), if last == stream { 1 } else { 2 });
            }
        }
    }
}
