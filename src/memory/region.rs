//! Owned, contiguous memory, freed on drop.
//!
//! A region is the only owner of its bytes. Everything that can reach them holds an `Arc<Region>`, so they
//! outlive every view. It may be used and dropped on any thread; concurrent access to the bytes is up to the
//! caller.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::{DType, Device, Dims, Error, Id, IndexVec, Result, contiguous_strides, reserve};

use super::users::{register, unregister};
use super::{Backend, Block, Borrowed, Contents, Gpu, Stream, Users};

/// Contiguous memory that returns to its backend on drop.
///
/// It is never cloned; views hold an `Arc<Region>`. Tensors of other frameworks share the bytes behind it, so
/// they are accessed through raw addresses and bounds-checked copies only, never as references.
#[derive(Debug)]
pub struct Region {
    /// Its address and length, for every kind of owner; valid until this drops.
    block: Block,
    device: Device,
    owner: Origin,
}

/// Bytes of a region, within its bounds.
#[derive(Clone, Copy, Debug)]
pub struct RegionRange<'a> {
    region: &'a Region,
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is a borrow of a region, whose memory is shared in any case, and two numbers.
unsafe impl Send for RegionRange<'_> {}
// SAFETY: as above.
unsafe impl Sync for RegionRange<'_> {}

impl RegionRange<'_> {
    /// The address of the first byte.
    #[must_use]
    pub const fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// The length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Calls [`Region::used_on`].
    pub fn used_on(&self, stream: Stream) {
        self.region.used_on(stream);
    }
}

/// An element type without padding.
pub trait Plain: Copy + sealed::Sealed {}

impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for bool {}
// `repr(transparent)` over a `u32`.
impl Plain for crate::base::Page {}

/// An element type for which every bit pattern is valid.
pub trait Number: Plain {}

impl Number for i32 {}
impl Number for i64 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for i32 {}
    impl Sealed for i64 {}
    impl Sealed for bool {}
    impl Sealed for crate::base::Page {}
}

/// A cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct CacheLine {
    _bytes: [u8; 64],
}

#[derive(Debug)]
enum Origin {
    /// The block belongs to this backend, and is freed after the work of these streams.
    Backend(Arc<dyn Backend>, Arc<Users>),
    /// Indices on the host, as an allocator wrote them.
    Indices(IndexVec),
    /// Host memory for results, in cache lines; the last one may be partly used. It is uninitialised.
    Scratch { _lines: Vec<MaybeUninit<CacheLine>> },
    /// Bytes of a larger region; dropping them adds their range to `returned`.
    Part { whole: Arc<Region>, range: Range<usize>, returned: Arc<ReturnedParts> },
}

/// The ranges of a region whose parts were dropped, in the order of dropping.
///
/// Dropping a part only records its range here: that may happen on any thread, at any time.
#[derive(Debug, Default)]
pub struct ReturnedParts(Mutex<Vec<Range<usize>>>);

impl ReturnedParts {
    /// The ranges since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<Range<usize>> {
        std::mem::take(&mut *self.ranges())
    }

    fn ranges(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        lock(&self.0)
    }
}

impl Region {
    /// `bytes` zeros from `backend`.
    ///
    /// # Errors
    /// The backend's, when it has not enough.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use kvpool::memory::{Host, Region};
    /// let region = Region::new(Arc::new(Host), 1 << 30).unwrap();
    /// assert_eq!(region.bytes(), 1 << 30);
    /// assert_eq!(region.address().as_ptr() as usize % 256, 0);
    /// ```
    pub fn new(backend: Arc<dyn Backend>, bytes: usize) -> Result<Self> {
        Self::with(backend, bytes, Contents::Zeros, Arc::default())
    }

    /// `bytes` from `backend` with `contents`; `users` are the streams that use the memory.
    ///
    /// # Errors
    /// Same as [`Region::new`].
    pub fn with(
        backend: Arc<dyn Backend>,
        bytes: usize,
        contents: Contents,
        users: Arc<Users>,
    ) -> Result<Self> {
        let block = backend.allocate(bytes, contents)?;
        if backend.is_reached_by_devices() && bytes > 0 {
            let start = block.address().as_ptr().addr();
            register(&(start..start + bytes), &users);
        }
        Ok(Self { block, device: backend.device(), owner: Origin::Backend(backend, users) })
    }

    /// A region that takes over `indices`, without a copy.
    #[must_use]
    pub fn from_indices(indices: IndexVec) -> Self {
        let block = match &indices {
            IndexVec::I32(values) => Block::new(address_of(values.as_ptr()), size_of_val(&values[..])),
            IndexVec::I64(values) => Block::new(address_of(values.as_ptr()), size_of_val(&values[..])),
        };
        Self { block, device: Device::Cpu, owner: Origin::Indices(indices) }
    }

    /// The indices of a region that was made [of them](Region::from_indices). Nothing else may write to the
    /// region meanwhile.
    #[must_use]
    pub const fn indices(&self) -> Option<&IndexVec> {
        match &self.owner {
            Origin::Indices(indices) => Some(indices),
            _ => None,
        }
    }

    /// `bytes` of host memory from the heap, for a result that will be overwritten as a whole: the initial
    /// contents are undefined.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn scratch(bytes: usize) -> Result<Self> {
        let count = bytes.div_ceil(size_of::<CacheLine>());
        let mut lines = reserve(count)?;
        lines.resize(count, MaybeUninit::uninit());
        let block = Block::new(address_of(lines.as_ptr()), bytes);
        Ok(Self { block, device: Device::Cpu, owner: Origin::Scratch { _lines: lines } })
    }

    /// The bytes `range` of `whole`. Dropping it adds the range to `returned`.
    ///
    /// # Errors
    /// Same as [`Region::at`]; nothing is returned then.
    pub fn part(whole: &Arc<Self>, range: Range<usize>, returned: &Arc<ReturnedParts>) -> Result<Self> {
        let block = Block::new(whole.at(range.start, range.len())?, range.len());
        let (whole, returned) = (Arc::clone(whole), Arc::clone(returned));
        Ok(Self { block, device: whole.device, owner: Origin::Part { whole, range, returned } })
    }

    /// The device of the memory.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }

    /// The GPU of the memory, or `None` for host memory.
    #[must_use]
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.backend()?.gpu()
    }

    /// The backend that allocated the memory, if one did.
    #[must_use]
    pub fn backend(&self) -> Option<&Arc<dyn Backend>> {
        match &self.owner {
            Origin::Backend(backend, _) => Some(backend),
            Origin::Indices(_) | Origin::Scratch { .. } => None,
            Origin::Part { whole, .. } => whole.backend(),
        }
    }

    /// The streams that use the memory, if a backend allocated it.
    #[must_use]
    pub fn users(&self) -> Option<&Arc<Users>> {
        match &self.owner {
            Origin::Backend(_, users) => Some(users),
            Origin::Indices(_) | Origin::Scratch { .. } => None,
            Origin::Part { whole, .. } => whole.users(),
        }
    }

    /// Records that work on `stream` uses the memory: it is freed only after that work.
    #[inline]
    pub fn used_on(&self, stream: Stream) {
        if let Some(users) = self.users() {
            users.note(stream);
        }
    }

    /// The address of the first byte.
    #[must_use]
    pub const fn address(&self) -> NonNull<u8> {
        self.block.address()
    }

    /// The length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.block.bytes()
    }

    /// The address of `bytes` bytes at `offset`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not within the region.
    #[inline]
    pub fn at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes()) {
            return Err(self.outside(offset, bytes));
        }
        // SAFETY: `offset` is at most the length of the region, which is one allocation.
        Ok(unsafe { self.address().add(offset) })
    }

    #[cold]
    fn outside(&self, offset: usize, bytes: usize) -> Error {
        Error::index(format!("{bytes} bytes at {offset} are outside a region of {} bytes", self.bytes()))
    }

    /// `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// Same as [`Region::at`].
    pub fn range(&self, offset: usize, bytes: usize) -> Result<RegionRange<'_>> {
        let address = self.at(offset, bytes)?;
        Ok(RegionRange { region: self, address, bytes })
    }

    /// Page-locks bytes of the region until it is dropped.
    ///
    /// # Errors
    /// Same as [`Backend::lock_pages`]; [`ErrorKind::Config`](crate::base::ErrorKind::Config) if no backend
    /// allocated it.
    pub fn lock_pages(&self, gpu: &Arc<Gpu>, bytes: &Range<usize>) -> Result<()> {
        let Some(backend) = self.backend() else {
            return Err(Error::config("memory that came from no backend cannot be page-locked in place"));
        };
        backend.lock_pages(gpu, self, bytes)
    }

    /// A tensor within this region that begins at byte `offset`.
    ///
    /// # Errors
    /// Same as [`Region::at`], for the farthest element.
    pub fn borrow(&self, offset: usize, dtype: DType, shape: Dims, strides: Dims) -> Result<Borrowed<'_>> {
        let address = self.at(offset, reach(dtype, &shape, &strides)?)?;
        // SAFETY: the elements lie within this region, which outlives the borrow.
        Ok(unsafe { Borrowed::new(address, dtype, self.device(), shape, strides) })
    }

    /// `bytes` bytes from `offset` on, as a tensor.
    ///
    /// # Errors
    /// Same as [`Region::at`].
    pub fn bytes_at(&self, offset: usize, bytes: usize) -> Result<Borrowed<'_>> {
        let extent =
            i64::try_from(bytes).map_err(|_| Error::index(format!("{bytes} bytes are in no region")))?;
        let shape = Dims::new(&[extent])?;
        self.borrow(offset, DType::U8, shape, contiguous_strides(&shape))
    }

    /// Like [`Region::at`], and checks that the host can access the memory.
    #[inline]
    fn on_host(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>> {
        if self.device() != Device::Cpu {
            return Err(self.not_on_host());
        }
        self.at(offset, bytes)
    }

    #[cold]
    fn not_on_host(&self) -> Error {
        Error::config(format!("memory of {} cannot be reached by the host", self.device()))
    }

    /// Writes `values` at byte `offset` of host memory.
    ///
    /// # Errors
    /// Same as [`Region::at`]; [`ErrorKind::Config`](crate::base::ErrorKind::Config) for device memory.
    pub fn write<T: Plain>(&self, offset: usize, values: &[T]) -> Result<()> {
        let address = self.on_host(offset, size_of_val(values))?;
        if let [only] = values {
            // The common case of a decode step: a store without a call to `memcpy`.
            // SAFETY: as below.
            unsafe { address.cast::<T>().write_unaligned(*only) };
            return Ok(());
        }
        // SAFETY: `on_host` checked that the bytes lie in this region, which is live host memory; `values` is
        // a Rust slice and so not part of it; a `Plain` value has no padding.
        unsafe { address.as_ptr().copy_from_nonoverlapping(values.as_ptr().cast(), size_of_val(values)) };
        Ok(())
    }

    /// Copies values to byte `offset` of host memory, each as an int64.
    ///
    /// # Errors
    /// Same as [`Region::write`].
    pub fn write_wide<I: Id>(&self, offset: usize, values: &[I]) -> Result<()> {
        let address = self.on_host(offset, values.len().saturating_mul(size_of::<i64>()))?.cast::<i64>();
        for (at, &value) in values.iter().enumerate() {
            // SAFETY: `on_host` checked that as many elements as there are values lie in this region, which is
            // live host memory.
            unsafe { address.as_ptr().wrapping_add(at).write_unaligned(i64::from(value.number())) };
        }
        Ok(())
    }

    /// The `count` elements at byte `offset` of host memory, copied.
    ///
    /// # Errors
    /// Same as [`Region::write`], and [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when
    /// the copy cannot be allocated.
    pub fn read<T: Number>(&self, offset: usize, count: usize) -> Result<Vec<T>> {
        let address = self.on_host(offset, count.saturating_mul(size_of::<T>()))?;
        let mut values: Vec<T> = reserve(count)?;
        let target: *mut u8 = values.as_mut_ptr().cast();
        // SAFETY: `on_host` checked that the bytes lie in this region; the vector is ours and has room for
        // them.
        unsafe { target.copy_from_nonoverlapping(address.as_ptr(), count * size_of::<T>()) };
        // SAFETY: so many were just written, and any bytes make a `Number`.
        unsafe { values.set_len(count) };
        Ok(values)
    }

    /// Fills `bytes` bytes at `offset` of host memory with `value`.
    ///
    /// # Errors
    /// Same as [`Region::write`].
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()> {
        let address = self.on_host(offset, bytes)?;
        // SAFETY: `on_host` checked that the bytes lie in this region, which is live host memory.
        unsafe { address.as_ptr().write_bytes(value, bytes) };
        Ok(())
    }
}

/// The address of a vector's elements. Every holder of a view may write through it.
fn address_of<T>(elements: *const T) -> NonNull<u8> {
    NonNull::new(elements.cast_mut().cast()).unwrap_or(NonNull::dangling())
}

/// Bytes from the first element of a tensor to the end of the farthest one. Strides are not negative.
fn reach(dtype: DType, shape: &Dims, strides: &Dims) -> Result<usize> {
    if shape.numel() == 0 {
        return Ok(0);
    }
    let last = shape.as_slice().iter().zip(strides.as_slice()).try_fold(0i64, |last, (extent, stride)| {
        (*stride >= 0).then_some(())?;
        last.checked_add(extent.checked_sub(1)?.checked_mul(*stride)?)
    });
    last.and_then(|last| usize::try_from(last).ok()?.checked_add(1)?.checked_mul(dtype.size())).ok_or_else(
        || {
            Error::index(format!(
                "shape {:?} with strides {:?} reaches too far",
                shape.as_slice(),
                strides.as_slice()
            ))
        },
    )
}

impl Drop for Region {
    fn drop(&mut self) {
        match &self.owner {
            Origin::Backend(backend, users) => {
                if backend.is_reached_by_devices() && self.block.bytes() > 0 {
                    unregister(self.block.address().as_ptr().addr());
                }
                let block = Block::new(self.block.address(), self.block.bytes());
                // SAFETY: `Region::with` took the block from this backend, this is the drop of its only owner, and
                // every view keeps the region alive; enqueued work was recorded in `users`.
                unsafe { backend.deallocate(block, users) };
            }
            Origin::Part { range, returned, .. } => returned.ranges().push(range.clone()),
            Origin::Indices(_) | Origin::Scratch { .. } => (),
        }
    }
}
