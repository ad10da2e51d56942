//! Ownership of buffers, which are kept in buckets by their size. It manages sizes, not memory.

use std::fmt;

use crate::base::bounded::narrow;
use crate::base::{BufferId, Error, Id, Result, widen};

use super::IndexHandle;

/// How sizes are rounded up to the sizes of buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Sizes are rounded up to the next power of two.
    Pow2,
    /// Sizes are rounded up to one of four sizes per doubling: 1, 1.25, 1.5 and 1.75 times a power of two.
    Fine,
}

/// A bucket of buffers of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    number: usize,
    bytes: usize,
}

impl Bucket {
    /// Returns the size of each buffer in this bucket.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.bytes
    }
}

impl Rounding {
    /// Parses `pow2` or `fine`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for anything else.
    pub fn parse(name: &str) -> Result<Self> {
        [Self::Pow2, Self::Fine]
            .into_iter()
            .find(|rounding| rounding.name() == name)
            .ok_or_else(|| Error::config(format!("unknown rounding '{name}'; use 'pow2' or 'fine'")))
    }

    /// Returns the name that [`Rounding::parse`] accepts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pow2 => "pow2",
            Self::Fine => "fine",
        }
    }

    /// Returns the smallest bucket that holds `bytes`, which is at least one byte.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) when the rounded size overflows.
    ///
    /// ```
    /// use kvpool::index::Rounding;
    /// assert_eq!(Rounding::Pow2.bucket(1025).unwrap().bytes(), 2048);
    /// assert_eq!(Rounding::Fine.bucket(1025).unwrap().bytes(), 1280);
    /// assert_eq!(Rounding::Fine.bucket(0).unwrap().bytes(), 1);
    /// ```
    pub fn bucket(self, bytes: usize) -> Result<Bucket> {
        let bytes = bytes.max(1);
        let too_large =
            || Error::argument(format!("{bytes} bytes, rounded up, are more than an address can name"));
        // The power of two at or below `bytes`, and the number of sizes up to the next one: below four bytes,
        // sizes are whole bytes.
        let below = bytes.ilog2();
        let (sizes, step) = match self {
            Self::Pow2 => (1, 1usize << below),
            Self::Fine => (4, 1 << below.saturating_sub(2)),
        };
        let above = bytes.checked_next_multiple_of(step).ok_or_else(too_large)?;
        let number = widen(below) * sizes + (above - (1 << below)) / step;
        i64::try_from(above).map_err(|_| too_large())?;
        Ok(Bucket { number, bytes: above })
    }
}

/// A buffer, taken or free.
#[derive(Clone, Copy, Debug)]
struct Entry<L> {
    bucket: Bucket,
    /// The lane that took the buffer last.
    lane: L,
    /// The number of times that the buffer was freed.
    generation: u64,
    /// The position of the buffer in `live`, while it is taken.
    live_at: Option<usize>,
}

/// A free buffer that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reuse<L> {
    /// The handle of this take, which is needed to free the buffer.
    pub handle: IndexHandle<BufferId>,
    /// The lane that used the buffer before, if it is another one. The new work must be ordered after the
    /// work of that lane.
    pub after: Option<L>,
}

/// Ownership of buffers. A free buffer stays in its bucket and lane, and the last one freed is taken first.
///
/// A lane is an order of work, such as a stream. A take prefers buffers of its own lane to those of another
/// one. Taking and freeing cost a few steps, independent of the number of buffers.
///
/// ```
/// use kvpool::base::BufferId;
/// use kvpool::index::{Bucket, Buckets, IndexHandle, Reuse, Rounding};
/// let mut buckets: Buckets<char> = Buckets::default();
/// let bucket: Bucket = Rounding::Pow2.bucket(100).unwrap();
/// assert!(buckets.take(bucket, 'a').is_none());
/// let made: IndexHandle<BufferId> = buckets.add(bucket, 'a');
/// assert!(buckets.give_back(made));
/// assert!(!buckets.give_back(made));
/// let Reuse { handle, after } = buckets.take(bucket, 'b').unwrap();
/// assert_eq!((after, handle == made), (Some('a'), false));
/// ```
#[derive(Clone)]
pub struct Buckets<L> {
    entries: Vec<Entry<L>>,
    /// The indices of `entries` that have no buffer.
    vacant: Vec<u32>,
    /// The free buffers of each lane, by bucket number.
    free: Vec<Vec<(L, Vec<u32>)>>,
    /// The taken buffers, in the order in which they were taken, except that the last one fills the gap of a
    /// freed one.
    live: Vec<u32>,
    free_count: usize,
    free_bytes: usize,
    in_use_bytes: usize,
    high_water: usize,
    high_water_bytes: usize,
}

impl<L> fmt::Debug for Buckets<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buckets")
            .field("live", &self.live.len())
            .field("free", &self.free_count)
            .finish_non_exhaustive()
    }
}

impl<L> Default for Buckets<L> {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            vacant: Vec::new(),
            free: Vec::new(),
            live: Vec::new(),
            free_count: 0,
            free_bytes: 0,
            in_use_bytes: 0,
            high_water: 0,
            high_water_bytes: 0,
        }
    }
}

impl<L: Copy + PartialEq> Buckets<L> {
    /// Returns every buffer: its index, whether it is taken, and its size in bytes.
    pub(super) fn buffers(&self) -> impl Iterator<Item = (u32, bool, usize)> + '_ {
        let known = (0..).zip(&self.entries).filter(|(index, _)| !self.vacant.contains(index));
        known.map(|(index, entry)| (index, entry.live_at.is_some(), entry.bucket.bytes))
    }

    /// Returns the number of free buffers.
    #[must_use]
    pub const fn free_count(&self) -> usize {
        self.free_count
    }

    /// Returns the size of all free buffers in bytes.
    #[must_use]
    pub const fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    /// Returns the number of taken buffers.
    #[must_use]
    pub const fn in_use_count(&self) -> usize {
        self.live.len()
    }

    /// Returns the size of all taken buffers in bytes.
    #[must_use]
    pub const fn in_use_bytes(&self) -> usize {
        self.in_use_bytes
    }

    /// Returns the largest number of buffers taken at once.
    #[must_use]
    pub const fn high_water(&self) -> usize {
        self.high_water
    }

    /// Returns the largest number of bytes taken at once.
    #[must_use]
    pub const fn high_water_bytes(&self) -> usize {
        self.high_water_bytes
    }

    /// Returns the largest numbers of buffers and of bytes that were taken at once, for
    /// [`Buckets::set_marks`].
    #[must_use]
    pub const fn marks(&self) -> [usize; 2] {
        [self.high_water, self.high_water_bytes]
    }

    /// Restores earlier marks, after takes that were undone.
    pub const fn set_marks(&mut self, marks: [usize; 2]) {
        [self.high_water, self.high_water_bytes] = marks;
    }

    /// Takes a free buffer of `bucket` for `lane`, or returns `None`.
    pub fn take(&mut self, bucket: Bucket, lane: L) -> Option<Reuse<L>> {
        let lanes = self.free.get_mut(bucket.number)?;
        let own = lanes.iter_mut().find(|(of, free)| *of == lane && !free.is_empty());
        let (of, free) = match own {
            Some(own) => own,
            None => lanes.iter_mut().find(|(_, free)| !free.is_empty())?,
        };
        let (of, index) = (*of, free.pop()?);
        self.free_count -= 1;
        self.free_bytes -= bucket.bytes;
        self.entries[widen(index)].lane = lane;
        let handle = self.hand_out(index);
        Some(Reuse { handle, after: (of != lane).then_some(of) })
    }

    /// Adds a new buffer of `bucket`, taken by `lane`.
    pub fn add(&mut self, bucket: Bucket, lane: L) -> IndexHandle<BufferId> {
        let index = if let Some(index) = self.vacant.pop() {
            let entry = &mut self.entries[widen(index)];
            (entry.bucket, entry.lane) = (bucket, lane);
            index
        } else {
            let index = narrow(self.entries.len());
            self.entries.push(Entry { bucket, lane, generation: 0, live_at: None });
            index
        };
        self.hand_out(index)
    }

    fn hand_out(&mut self, index: u32) -> IndexHandle<BufferId> {
        let entry = &mut self.entries[widen(index)];
        entry.live_at = Some(self.live.len());
        self.live.push(index);
        self.in_use_bytes += entry.bucket.bytes;
        self.high_water = self.high_water.max(self.live.len());
        self.high_water_bytes = self.high_water_bytes.max(self.in_use_bytes);
        IndexHandle::new(BufferId::new(index), entry.generation)
    }

    /// Returns whether the take of `handle` is still live.
    #[must_use]
    pub fn is_live(&self, handle: IndexHandle<BufferId>) -> bool {
        let entry = self.entries.get(widen(handle.index().number()));
        entry.is_some_and(|entry| entry.generation == handle.generation() && entry.live_at.is_some())
    }

    /// Frees a buffer. Returns `false` and changes nothing when it was freed before.
    pub fn give_back(&mut self, handle: IndexHandle<BufferId>) -> bool {
        if !self.is_live(handle) {
            return false;
        }
        if let Some(at) = self.entries[widen(handle.index().number())].live_at {
            self.live.swap_remove(at);
            if let Some(&moved) = self.live.get(at) {
                self.entries[widen(moved)].live_at = Some(at);
            }
        }
        self.mark_free(handle.index().number());
        true
    }

    /// Works like [`Buckets::give_back`], but frees into `lane`: the next owner must be ordered after the
    /// work of that lane.
    pub fn give_back_as(&mut self, handle: IndexHandle<BufferId>, lane: L) {
        if self.is_live(handle) {
            self.entries[widen(handle.index().number())].lane = lane;
            self.give_back(handle);
        }
    }

    /// Frees every taken buffer. Repeating the same takes returns the same buffers.
    pub fn reset(&mut self) {
        while let Some(index) = self.live.pop() {
            self.mark_free(index);
        }
    }

    fn mark_free(&mut self, index: u32) {
        let entry = &mut self.entries[widen(index)];
        entry.generation += 1;
        entry.live_at = None;
        let Entry { bucket, lane, .. } = *entry;
        self.in_use_bytes -= bucket.bytes;
        self.free_count += 1;
        self.free_bytes += bucket.bytes;
        if self.free.len() <= bucket.number {
            self.free.resize_with(bucket.number + 1, Vec::new);
        }
        let lanes = &mut self.free[bucket.number];
        match lanes.iter_mut().find(|(of, _)| *of == lane) {
            Some((_, free)) => free.push(index),
            None => lanes.push((lane, vec![index])),
        }
    }

    /// Removes every free buffer and returns the indices, so that the caller can free the memory.
    pub fn drain_free(&mut self) -> Vec<BufferId> {
        let drained: Vec<u32> =
            self.free.iter_mut().flat_map(std::mem::take).flat_map(|(_, free)| free).collect();
        self.vacant.extend(&drained);
        (self.free_count, self.free_bytes) = (0, 0);
        drained.into_iter().map(BufferId::new).collect()
    }

    /// Describes a broken invariant, if there is one.
    #[must_use]
    pub fn broken_invariant(&self) -> Option<String> {
        let mut states = vec![0u32; self.entries.len()];
        let free = self.free.iter().flatten().flat_map(|(_, free)| free);
        for &index in self.live.iter().chain(&self.vacant).chain(free) {
            states[widen(index)] += 1;
        }
        if let Some(index) = states.iter().position(|&count| count != 1) {
            return Some(format!("buffer {index} has {} states", states[index]));
        }
        let wrong =
            (0..).zip(&self.live).find(|&(at, &index)| self.entries[widen(index)].live_at != Some(at));
        wrong
            .map(|(at, index)| format!("buffer {index} has no record that it is number {at} of those in use"))
    }
}
