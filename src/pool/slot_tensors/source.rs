//! Where values were read, and whether the tensor there was written to since it was made.

use std::fmt;

use crate::base::{IndexVec, widen};
use crate::kernels::Indices;

/// The tensor from which the values of a call were read.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::IndexVec;
/// use kvpool::kernels::Indices;
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{AllocatorConfig, TensorOrigin, TokenToKvPoolAllocator, Writes};
/// let (host, stream): (Arc<dyn Backend>, _) = (Arc::new(Host), Stream::DEFAULT);
/// let slots = TokenToKvPoolAllocator::new(&AllocatorConfig::new(8), &host).unwrap();
/// let taken = slots.alloc(3, stream).unwrap().expect("8 are free").keep();
/// let free = || {
///     let origin = TensorOrigin {
///         address: taken.address().addr(), step: Some(1), writes: &|| Writes::None,
///     };
///     let indices = Indices::of(taken.borrow(), None).unwrap();
///     slots.free_keeping(&indices, Some(origin), None, || None, stream).unwrap().dropped()
/// };
/// assert_eq!(free(), 0);
/// // The slots are handed out again, but not in this tensor.
/// let _again = slots.alloc(3, stream).unwrap().expect("all are free").keep();
/// assert_eq!(free(), 3);
/// ```
#[derive(Clone, Copy)]
pub struct TensorOrigin<'a> {
    /// The address of the first value.
    pub address: usize,
    /// The number of elements from one value to the next, if they are evenly spaced.
    pub step: Option<usize>,
    /// Returns whether the tensor was written to since it was made. Called without locks, and only if it
    /// matters.
    pub writes: &'a dyn Fn() -> Writes,
}

impl fmt::Debug for TensorOrigin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorOrigin").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Whether a tensor was written to since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// Its framework has counted none.
    None,
    /// Its framework has counted some.
    Some,
    /// Nobody counts them.
    Uncounted,
}

/// Where the host has read values, and whether their tensor was written to, if that is known.
#[derive(Clone, Copy)]
pub(in crate::pool) struct Source<'a> {
    pub(in crate::pool) origin: TensorOrigin<'a>,
    pub(in crate::pool) writes: Option<Writes>,
}

impl<'a> Source<'a> {
    /// Returns the source of values that a call has read, before it locks the slots: it asks the framework whether
    /// the tensor was written to, if that will probably be needed.
    #[inline]
    pub(in crate::pool) fn new(origin: TensorOrigin<'a>, given: &Indices<'_>) -> Self {
        let is_needed = matches!(given, Indices::Host(values) if needs_proof(values));
        Self { origin, writes: is_needed.then(|| (origin.writes)()) }
    }

    /// Asks the framework whether the tensor was written to.
    pub(in crate::pool) fn prove(&mut self) {
        self.writes = Some((self.origin.writes)());
    }
}

impl Source<'static> {
    /// Returns the source of values of a tensor on a device, if its framework has counted no write to it.
    pub(in crate::pool) fn of(given: &Indices<'_>) -> Option<Self> {
        let Indices::Device { tensor, version: Some(0) } = given else { return None };
        let address = tensor.address().as_ptr().addr();
        let step = tensor.even_step();
        Some(Self {
            origin: TensorOrigin { address, step, writes: &|| Writes::None },
            writes: Some(Writes::None),
        })
    }
}

/// Returns whether a free of values, if they are a whole tensor, has to know whether that was written to: to
/// ask the framework costs less than to record the free of values that lie in many words.
#[inline]
pub(super) fn needs_proof(values: &IndexVec) -> bool {
    /// The number of words.
    const MANY: u32 = 48;
    let lie_apart = |(first, last): (i64, i64)| last.abs_diff(first) / 64 >= MANY.into();
    values.len() >= widen(MANY) && !values.ends_like_a_run() && values.ends().is_some_and(lie_apart)
}
