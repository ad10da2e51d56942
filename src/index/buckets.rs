//! Scratch buffers by size: which bucket a size belongs to, and who owns which buffer.

use crate::base::bounded::narrow;
use crate::base::{Error, Result, widen};

use super::Ticket;

/// How sizes are rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To the next power of two.
    Pow2,
    /// To the next of four sizes for each doubling: 1, 1.25, 1.5 and 1.75 times a power of two.
    Fine,
}

/// A size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    number: usize,
    bytes: usize,
}

impl Bucket {
    /// Bytes of each of its buffers.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.bytes
    }
}

impl Rounding {
    /// The rounding of that name: `pow2` or `fine`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for anything else.
    pub fn parse(name: &str) -> Result<Self> {
        [Self::Pow2, Self::Fine]
            .into_iter()
            .find(|rounding| rounding.name() == name)
            .ok_or_else(|| Error::config(format!("unknown rounding '{name}'; use 'pow2' or 'fine'")))
    }

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pow2 => "pow2",
            Self::Fine => "fine",
        }
    }

    /// The smallest bucket that holds `bytes`, at least one.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) when there is none so large.
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
            || Error::config(format!("{bytes} bytes, rounded up, are more than an address can name"));
        // The power of two at or below, and how many sizes stand from there to the next one; below four bytes a size
        // is a whole byte.
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

/// What is known of a buffer.
#[derive(Clone, Copy, Debug)]
struct Entry<L> {
    bucket: Bucket,
    /// The lane in which it was last handed out.
    lane: L,
    /// Counts how often it was given back.
    generation: u64,
    /// Its place in `live`, if it is there.
    live_at: Option<usize>,
}

/// A buffer that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reused<L> {
    /// What its owner shows to give it back.
    pub ticket: Ticket,
    /// The lane that used it before, if it is another one.
    pub after: Option<L>,
}

/// Who owns which buffer. Those that are free wait in their bucket and lane, where the last freed is taken first.
///
/// A lane is an order of work, such as a stream: a buffer is handed out in its own lane before one of another is.
///
/// ```
/// use kvpool::index::{Buckets, Rounding};
/// let mut buckets: Buckets<char> = Buckets::default();
/// let bucket = Rounding::Pow2.bucket(100).unwrap();
/// assert!(buckets.take(bucket, 'a').is_none());
/// let made = buckets.add(bucket, 'a');
/// assert!(buckets.release(made));
/// assert!(!buckets.release(made));
/// assert_eq!(buckets.take(bucket, 'b').unwrap().after, Some('a'));
/// ```
#[derive(Clone, Debug)]
pub struct Buckets<L> {
    entries: Vec<Entry<L>>,
    /// Indices of `entries` that stand for no buffer.
    vacant: Vec<u32>,
    /// By bucket number, the free buffers of each lane.
    free: Vec<Vec<(L, Vec<u32>)>>,
    /// Those that are out, in the order in which they were taken, but for gaps that the last one fills.
    live: Vec<u32>,
    free_count: usize,
    free_bytes: usize,
    in_use_bytes: usize,
    high_water: usize,
    high_water_bytes: usize,
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
    /// All buffers: their index, whether they are out, and their bytes.
    pub(super) fn buffers(&self) -> impl Iterator<Item = (u32, bool, usize)> + '_ {
        let known = (0..).zip(&self.entries).filter(|(index, _)| !self.vacant.contains(index));
        known.map(|(index, entry)| (index, entry.live_at.is_some(), entry.bucket.bytes))
    }

    /// Buffers that are free.
    #[must_use]
    pub const fn free_count(&self) -> usize {
        self.free_count
    }

    /// Bytes of those.
    #[must_use]
    pub const fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    /// Buffers that are out.
    #[must_use]
    pub const fn in_use_count(&self) -> usize {
        self.live.len()
    }

    /// Bytes of those.
    #[must_use]
    pub const fn in_use_bytes(&self) -> usize {
        self.in_use_bytes
    }

    /// The most buffers that were out at once.
    #[must_use]
    pub const fn high_water(&self) -> usize {
        self.high_water
    }

    /// The most bytes that were out at once.
    #[must_use]
    pub const fn high_water_bytes(&self) -> usize {
        self.high_water_bytes
    }

    /// The most buffers and bytes that were out at once, for [`Buckets::set_marks`].
    #[must_use]
    pub const fn marks(&self) -> [usize; 2] {
        [self.high_water, self.high_water_bytes]
    }

    /// Goes back to earlier marks, after what was taken since was given back.
    pub const fn set_marks(&mut self, marks: [usize; 2]) {
        [self.high_water, self.high_water_bytes] = marks;
    }

    /// Takes a free buffer of `bucket` for `lane`, or returns `None`.
    pub fn take(&mut self, bucket: Bucket, lane: L) -> Option<Reused<L>> {
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
        let ticket = self.hand_out(index);
        Some(Reused { ticket, after: (of != lane).then_some(of) })
    }

    /// A new buffer of `bucket`, taken for `lane`.
    pub fn add(&mut self, bucket: Bucket, lane: L) -> Ticket {
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

    fn hand_out(&mut self, index: u32) -> Ticket {
        let entry = &mut self.entries[widen(index)];
        entry.live_at = Some(self.live.len());
        self.live.push(index);
        self.in_use_bytes += entry.bucket.bytes;
        self.high_water = self.high_water.max(self.live.len());
        self.high_water_bytes = self.high_water_bytes.max(self.in_use_bytes);
        Ticket::new(index, entry.generation)
    }

    /// Whether what `ticket` names has not been given back.
    #[must_use]
    pub fn is_live(&self, ticket: Ticket) -> bool {
        let entry = self.entries.get(widen(ticket.index()));
        entry.is_some_and(|entry| entry.generation == ticket.generation() && entry.live_at.is_some())
    }

    /// Gives a buffer back. `false`, and nothing happens, if it was before.
    pub fn release(&mut self, ticket: Ticket) -> bool {
        if !self.is_live(ticket) {
            return false;
        }
        if let Some(at) = self.entries[widen(ticket.index())].live_at {
            self.live.swap_remove(at);
            if let Some(&moved) = self.live.get(at) {
                self.entries[widen(moved)].live_at = Some(at);
            }
        }
        self.put_back(ticket.index());
        true
    }

    /// As [`Buckets::release`], to another lane: that of work which the buffer's next owner must come after.
    pub fn put_back_as(&mut self, ticket: Ticket, lane: L) {
        if self.is_live(ticket) {
            self.entries[widen(ticket.index())].lane = lane;
            self.release(ticket);
        }
    }

    /// Gives every buffer back that is out. The same takes get the same buffers afterwards.
    pub fn reset(&mut self) {
        while let Some(index) = self.live.pop() {
            self.put_back(index);
        }
    }

    fn put_back(&mut self, index: u32) {
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

    /// Forgets every free buffer and names their indices, for their memory to be given back.
    pub fn drain_free(&mut self) -> Vec<u32> {
        let drained: Vec<u32> =
            self.free.iter_mut().flat_map(std::mem::take).flat_map(|(_, free)| free).collect();
        self.vacant.extend(&drained);
        (self.free_count, self.free_bytes) = (0, 0);
        drained
    }

    /// What breaks the invariant, if anything does.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
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
            .map(|(at, index)| format!("buffer {index} does not know that it is number {at} of those in use"))
    }
}
