//! 32-bit index newtypes, one for each index space.
//!
//! A page is a different type from a slot, so neither can be passed for the other.

use std::borrow::Cow;
use std::fmt;

use super::{DType, Error, Result, try_to_vec, try_with_capacity};

/// The padding index of every index space. Padded tokens write to it; it is never handed out.
pub const PADDING: u32 = 0;

/// A 32-bit index into one index space. Values that go into index tensors, which are int32, stay within
/// `i32`.
pub trait Id: Copy + Eq + Ord + fmt::Debug + fmt::Display {
    /// The name of one index in messages.
    const NOUN: &'static str;

    /// Makes an index from its number.
    fn new(number: u32) -> Self;

    /// Returns the number of this index.
    fn number(self) -> u32;
}

/// Declares the type of an index.
macro_rules! id {
    ($(#[$doc:meta])* $visible:vis $name:ident, $noun:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        $visible struct $name(u32);

        impl $crate::base::Id for $name {
            const NOUN: &'static str = $noun;

            fn new(number: u32) -> Self {
                Self(number)
            }

            fn number(self) -> u32 {
                self.0
            }
        }

        impl From<$name> for i64 {
            fn from(index: $name) -> Self {
                index.0.into()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

pub(crate) use id;

id!(
    /// One token's place along dim 0 of a KV buffer.
    pub Slot,
    "slot"
);
id!(
    /// An aligned run of `page_size` slots.
    pub Page,
    "page"
);
id!(
    /// A row of the request table.
    pub RequestRow,
    "row"
);
id!(
    /// A place for one linear-attention state.
    pub StateSlot,
    "track slot"
);
id!(
    /// A chunk of a chunk pool.
    pub ChunkId,
    "chunk"
);
id!(
    /// A page of a page pool, which is not a [`Page`] of slots.
    pub PoolPage,
    "page"
);
id!(
    /// A block that an engine counts and hashes itself.
    pub BlockId,
    "block"
);
id!(
    /// A place in a pool that an engine keeps itself: of the K and V of a token, or of a state.
    pub EngineSlot,
    "slot"
);
id!(
    /// A place of host memory for a chunk that an engine offloads.
    pub OffloadSlot,
    "place"
);
id!(
    /// A buffer of a buffer pool.
    pub BufferId,
    "buffer"
);

/// Converts a 32-bit number to an array index.
///
/// ```
/// use kvpool::base::widen;
/// assert_eq!([10, 20, 30][widen(2)], 30);
/// ```
#[must_use]
pub const fn widen(number: u32) -> usize {
    number as usize
}

/// The element type of an index tensor.
///
/// ```
/// use kvpool::base::{DType, IndexNumber, IndexVec};
/// fn tensor_of<T: IndexNumber>(indices: &[u32]) -> (DType, IndexVec) {
///     (T::DTYPE, T::values(indices.iter().map(|&index| T::of(index)).collect()))
/// }
/// assert_eq!(tensor_of::<i64>(&[3, 4]), (DType::I64, IndexVec::I64(vec![3, 4])));
/// ```
pub trait IndexNumber: Copy + Default + PartialEq + Into<i64> {
    /// The dtype of its tensors.
    const DTYPE: DType;

    /// Converts an index, which is within `i32`.
    fn of(index: u32) -> Self;

    /// Returns the index that [`IndexNumber::of`] was given.
    fn number(self) -> u32;

    /// Wraps values of this type.
    fn values(values: Vec<Self>) -> IndexVec;
}

impl IndexNumber for i32 {
    const DTYPE: DType = DType::I32;

    #[inline]
    fn of(index: u32) -> Self {
        index.cast_signed()
    }

    #[inline]
    fn number(self) -> u32 {
        self.cast_unsigned()
    }

    fn values(values: Vec<Self>) -> IndexVec {
        IndexVec::I32(values)
    }
}

impl IndexNumber for i64 {
    const DTYPE: DType = DType::I64;

    #[inline]
    fn of(index: u32) -> Self {
        index.into()
    }

    #[inline]
    fn number(self) -> u32 {
        u32::try_from(self).expect("it was made of an index")
    }

    fn values(values: Vec<Self>) -> IndexVec {
        IndexVec::I64(values)
    }
}

/// Index values from a caller: int32 or int64, copied and unchecked.
///
/// The values are copied once, so they cannot change between their check and their use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexVec {
    /// Values from an int32 tensor.
    I32(Vec<i32>),
    /// Values from an int64 tensor or a sequence of ints.
    I64(Vec<i64>),
}

impl IndexVec {
    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::I32(values) => values.len(),
            Self::I64(values) => values.len(),
        }
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the values, widened to `i64`.
    pub fn iter(&self) -> impl Iterator<Item = i64> + '_ {
        let (narrow, wide): (&[i32], &[i64]) = match self {
            Self::I32(values) => (values, &[]),
            Self::I64(values) => (&[], values),
        };
        narrow.iter().copied().map(i64::from).chain(wide.iter().copied())
    }

    /// Converts the values to numbers below `count`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](super::ErrorKind::Index) with the first value outside `0..count`.
    ///
    /// ```
    /// use kvpool::base::IndexVec;
    /// assert_eq!(IndexVec::I32(vec![0, 3]).below(4, "column").unwrap(), [0, 3]);
    /// assert!(IndexVec::I64(vec![4]).below(4, "column").is_err());
    /// ```
    pub fn below(&self, count: usize, noun: &str) -> Result<Vec<u32>> {
        match self {
            Self::I32(values) => checked(values, noun, count, |number| number),
            Self::I64(values) => checked(values, noun, count, |number| number),
        }
    }

    /// Converts the values to indices below `count`.
    ///
    /// # Errors
    /// See [`Self::below`].
    ///
    /// ```
    /// use kvpool::base::{Id, IndexVec, RequestRow};
    /// let rows = IndexVec::I64(vec![0, 3]).ids::<RequestRow>(4).unwrap();
    /// assert_eq!(rows, [0, 3].map(RequestRow::new));
    /// ```
    pub fn ids<I: Id>(&self, count: usize) -> Result<Vec<I>> {
        match self {
            Self::I32(values) => checked(values, I::NOUN, count, I::new),
            Self::I64(values) => checked(values, I::NOUN, count, I::new),
        }
    }

    /// Converts the values to int32, as index tensors store them.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](super::ErrorKind::Argument) with the first value that does not fit int32.
    pub fn into_i32(self) -> Result<Vec<i32>> {
        match self {
            Self::I32(values) => Ok(values),
            Self::I64(values) => narrowed(&values),
        }
    }

    /// Works like [`IndexVec::into_i32`]. Values that are int32 already are not copied.
    ///
    /// # Errors
    /// Same as [`IndexVec::into_i32`].
    pub fn as_i32(&self) -> Result<Cow<'_, [i32]>> {
        match self {
            Self::I32(values) => Ok(Cow::Borrowed(values)),
            Self::I64(values) => narrowed(values).map(Cow::Owned),
        }
    }

    /// Returns the address of the first value.
    #[must_use]
    pub(crate) fn address(&self) -> usize {
        match self {
            Self::I32(values) => values.as_ptr().addr(),
            Self::I64(values) => values.as_ptr().addr(),
        }
    }

    /// Returns the first and the last value, if there are any.
    #[must_use]
    pub fn ends(&self) -> Option<(i64, i64)> {
        match self {
            Self::I32(values) => Some(((*values.first()?).into(), (*values.last()?).into())),
            Self::I64(values) => Some((*values.first()?, *values.last()?)),
        }
    }

    /// Returns whether the last value is as far from the first as in a run of values that ascend by one.
    #[must_use]
    pub fn ends_like_a_run(&self) -> bool {
        self.ends().is_none_or(|(first, last)| {
            usize::try_from(last.wrapping_sub(first)).is_ok_and(|distance| distance + 1 == self.len())
        })
    }

    /// Returns the dtype of a tensor of the values.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        match self {
            Self::I32(_) => DType::I32,
            Self::I64(_) => DType::I64,
        }
    }

    /// Returns a copy.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](super::ErrorKind::OutOfMemory) when the host has no room for it.
    pub fn try_clone(&self) -> Result<Self> {
        match self {
            Self::I32(values) => try_to_vec(values).map(Self::I32),
            Self::I64(values) => try_to_vec(values).map(Self::I64),
        }
    }

    /// Converts the values to int64.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](super::ErrorKind::OutOfMemory) when the host has no room for them.
    pub fn into_i64(self) -> Result<Vec<i64>> {
        match self {
            Self::I32(values) => widened(&values),
            Self::I64(values) => Ok(values),
        }
    }

    /// Works like [`IndexVec::into_i64`]. Values that are int64 already are not copied.
    ///
    /// # Errors
    /// Same as [`IndexVec::into_i64`].
    pub fn as_i64(&self) -> Result<Cow<'_, [i64]>> {
        match self {
            Self::I32(values) => widened(values).map(Cow::Owned),
            Self::I64(values) => Ok(Cow::Borrowed(values)),
        }
    }
}

fn widened(values: &[i32]) -> Result<Vec<i64>> {
    let mut wide = try_with_capacity(values.len())?;
    wide.extend(values.iter().copied().map(i64::from));
    Ok(wide)
}

fn narrowed(values: &[i64]) -> Result<Vec<i32>> {
    let mut narrow = try_with_capacity(values.len())?;
    for &value in values {
        let fits = i32::try_from(value);
        narrow
            .push(fits.map_err(|_| Error::argument(format!("value {value} does not fit an int32 tensor")))?);
    }
    Ok(narrow)
}

fn checked<T: Copy + Into<i64>, N>(
    values: &[T],
    noun: &str,
    count: usize,
    make: impl Fn(u32) -> N,
) -> Result<Vec<N>> {
    let mut ids = try_with_capacity(values.len())?;
    for (position, &value) in values.iter().enumerate() {
        let value = value.into();
        match u32::try_from(value) {
            Ok(number) if widen(number) < count => ids.push(make(number)),
            _ => {
                return Err(Error::index(format!(
                    "{noun} {value} at position {position} is outside [0, {count})"
                ))
                .with_index(value));
            }
        }
    }
    Ok(ids)
}
