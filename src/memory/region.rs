//! Owned, contiguous memory, freed on drop.
//!
//! A region is the only owner of its bytes. Everything that can reach them holds an `Arc<Region>`, so they
//! outlive every view. It may be used and dropped on any thread; concurrent access to the bytes is up to the
//! caller.

use std::fmt::{self, Debug, Formatter};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::{DType, Device, Dims, Error, IndexVec, Life, Result, try_with_capacity};

use super::stream_set::{register, unregister};
use super::{Backend, Block, BorrowedTensor, Contents, Gpu, RegionRange, Stream, StreamSet};

/// Contiguous memory that returns to its backend on drop.
///
/// It is never cloned; views hold an `Arc<Region>`.
///
/// # Contents
/// The bytes are shared with tensors of other libraries, with other threads and with devices, as
/// those of a NumPy array are. Rust therefore never refers to them: they are accessed through raw addresses
/// and copies within bounds. A writer has to exclude other accesses: a pool does so with the `&mut` of its
/// `RegionWriter`, kernels with the locks of their executor or the order of a stream. Therefore only this
/// crate writes and reads the contents of a region. Numbers that decide about memory are checked in the copy,
/// which nothing else can change.
pub struct Region {
    /// The address and length of the memory, for every kind of owner. Valid until the region is dropped.
    block: Block,
    device: Device,
    origin: Origin,
    /// Ends with the region, if somebody has to know.
    life: Option<Life>,
}

/// An element type without padding.
pub trait Plain: Copy + sealed::Sealed {}

impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for bool {}
// `repr(transparent)` over a `u32`.
impl Plain for crate::base::Page {}

/// An element type for which every bit pattern is valid.
///
/// ```
/// use kvpool::memory::{Number, Plain, Region};
/// fn bytes_of_copy<T: Plain>(values: &[T]) -> usize {
///     Region::copy_of(values).unwrap().bytes()
/// }
/// fn zero<T: Number + From<bool>>() -> T {
///     T::from(false)
/// }
/// assert_eq!(bytes_of_copy(&[zero::<i64>(), 1]), 16);
/// assert_eq!(bytes_of_copy(&[true, false]), 2);
/// ```
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

enum Origin {
    /// The block belongs to this backend, and is freed after the work of these streams.
    Backend(Arc<dyn Backend>, Arc<StreamSet>),
    /// Indices on the host, as an allocator wrote them. They are read through the address only.
    Indices { elements: IndexVec },
    /// Host memory for results, in cache lines; the last one may be partly used. It is uninitialised.
    Scratch { _lines: Vec<MaybeUninit<CacheLine>> },
    /// Bytes of a larger region; dropping them adds their range to `returned`.
    Part { whole: Arc<Region>, range: Range<usize>, returned: Arc<ReturnedParts> },
}

/// The ranges of a region whose parts were dropped, in the order of dropping.
///
/// Dropping a part only records its range here: that may happen on any thread, at any time.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::memory::{Host, Region, ReturnedParts};
/// let whole = Arc::new(Region::new(Arc::new(Host), 4096).unwrap());
/// let returned = Arc::new(ReturnedParts::default());
/// let part = Region::part(&whole, 1024..2048, &returned).unwrap();
/// assert_eq!((part.bytes(), returned.take()), (1024, vec![]));
/// drop(part);
/// assert_eq!(returned.take(), [1024..2048]);
/// ```
#[derive(Debug, Default)]
pub struct ReturnedParts(Mutex<Vec<Range<usize>>>);

impl ReturnedParts {
    /// Returns the ranges since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<Range<usize>> {
        std::mem::take(&mut *self.ranges())
    }

    fn ranges(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        lock(&self.0)
    }
}

impl Region {
    /// Creates `bytes` zeros from `backend`.
    ///
    /// # Errors
    /// The error of the backend when there is not enough memory.
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

    /// Creates `bytes` from `backend` with `contents`; `users` are the streams that use the memory.
    ///
    /// # Errors
    /// Same as [`Region::new`].
    pub fn with(
        backend: Arc<dyn Backend>,
        bytes: usize,
        contents: Contents,
        users: Arc<StreamSet>,
    ) -> Result<Self> {
        let block = backend.allocate(bytes, contents)?;
        if backend.is_device_accessible() && bytes > 0 {
            let start = block.address().as_ptr().addr();
            register(&(start..start + bytes), &users);
        }
        Ok(Self { block, device: backend.device(), origin: Origin::Backend(backend, users), life: None })
    }

    /// Creates a region that takes over `indices`, without a copy.
    #[must_use]
    pub fn from_indices(indices: IndexVec) -> Self {
        Self::from_living_indices(indices, None)
    }

    /// Works like [`Region::from_indices`], and keeps `life` until the region is dropped.
    pub(crate) fn from_living_indices(mut indices: IndexVec, life: Option<Life>) -> Self {
        let block = match &mut indices {
            IndexVec::I32(values) => block_of(values),
            IndexVec::I64(values) => block_of(values),
        };
        Self { block, device: Device::Cpu, origin: Origin::Indices { elements: indices }, life }
    }

    /// Returns whether the region was made [of indices](Region::from_indices).
    pub(crate) const fn is_from_indices(&self) -> bool {
        matches!(self.origin, Origin::Indices { .. })
    }

    /// Returns the indices that the region was made [of](Region::from_indices), as they are now, without a
    /// copy. Only code that has a tensor of the region could write to it, and that must not meanwhile.
    pub(crate) fn indices(&self) -> Option<impl Iterator<Item = i64> + '_> {
        let Origin::Indices { elements } = &self.origin else { return None };
        let (first, is_wide) = (self.address(), elements.dtype() == DType::I64);
        let (wide, narrow) = (first.cast::<i64>().as_ptr(), first.cast::<i32>().as_ptr());
        Some((0..elements.len()).map(move |at| {
            if is_wide {
                // SAFETY: the region is a vector of that many `i64`, which is initialised.
                unsafe { wide.wrapping_add(at).read() }
            } else {
                // SAFETY: as above, of `i32`.
                i64::from(unsafe { narrow.wrapping_add(at).read() })
            }
        }))
    }

    /// Creates `bytes` of host memory from the heap, at the start of a cache line, for a result that will be
    /// overwritten as a whole: the initial contents are undefined.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub(crate) fn scratch(bytes: usize) -> Result<Self> {
        let count = bytes.div_ceil(size_of::<CacheLine>());
        let mut lines = try_with_capacity(count)?;
        lines.resize(count, MaybeUninit::uninit());
        let block = Block::new(block_of(&mut lines).address(), bytes);
        Ok(Self { block, device: Device::Cpu, origin: Origin::Scratch { _lines: lines }, life: None })
    }

    /// Creates a copy of `values` in host memory from the heap, at the start of a cache line.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate it.
    pub fn copy_of<T: Plain>(values: &[T]) -> Result<Self> {
        let region = Self::scratch(size_of_val(values))?;
        // SAFETY: nothing else has the new region.
        unsafe { region.write(0, values) }?;
        Ok(region)
    }

    /// Creates a copy of this region of the host, at the start of a cache line.
    ///
    /// # Errors
    /// Same as [`Region::copy_of`]; [`ErrorKind::Config`](crate::base::ErrorKind::Config) for device memory.
    pub(crate) fn try_clone(&self) -> Result<Self> {
        let source = self.host_address(0, self.bytes())?;
        let region = Self::scratch(self.bytes())?;
        // SAFETY: both are live host memory of that many bytes, and nothing else refers to the new one.
        unsafe { region.address().copy_from_nonoverlapping(source, self.bytes()) };
        Ok(region)
    }

    /// Returns the bytes `range` of `whole`. Dropping it adds the range to `returned`.
    ///
    /// # Errors
    /// Same as [`Region::at`]; in that case nothing is added to `returned`.
    pub fn part(whole: &Arc<Self>, range: Range<usize>, returned: &Arc<ReturnedParts>) -> Result<Self> {
        let block = Block::new(whole.at(range.start, range.len())?, range.len());
        let (whole, returned) = (Arc::clone(whole), Arc::clone(returned));
        Ok(Self { block, device: whole.device, origin: Origin::Part { whole, range, returned }, life: None })
    }

    /// Keeps `life` until the region is dropped.
    pub(crate) fn keep_life(&mut self, life: Life) {
        self.life = Some(life);
    }

    /// Returns whether the region keeps a life.
    pub(crate) const fn has_life(&self) -> bool {
        self.life.is_some()
    }

    /// Returns the device of the memory.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Returns the GPU of the memory, or `None` for host memory.
    #[must_use]
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.backend()?.gpu()
    }

    /// Returns the backend that allocated the memory, if one did.
    #[must_use]
    pub fn backend(&self) -> Option<&Arc<dyn Backend>> {
        match &self.origin {
            Origin::Backend(backend, _) => Some(backend),
            Origin::Indices { .. } | Origin::Scratch { .. } => None,
            Origin::Part { whole, .. } => whole.backend(),
        }
    }

    /// Returns the streams that use the memory, if a backend allocated it.
    #[must_use]
    pub fn users(&self) -> Option<&Arc<StreamSet>> {
        match &self.origin {
            Origin::Backend(_, users) => Some(users),
            Origin::Indices { .. } | Origin::Scratch { .. } => None,
            Origin::Part { whole, .. } => whole.users(),
        }
    }

    /// Records that work on `stream` uses the memory: it is freed only after that work. See [`StreamSet::record`].
    #[inline]
    pub fn record_stream(&self, stream: Stream) {
        if let Some(users) = self.users() {
            users.record(stream);
        }
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub const fn address(&self) -> NonNull<u8> {
        self.block.address()
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.block.bytes()
    }

    /// Returns the address of `bytes` bytes at `offset`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when they are not within the region.
    #[inline]
    pub fn at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes()) {
            return Err(self.out_of_bounds_error(offset, bytes));
        }
        // SAFETY: `offset` is at most the length of the region, which is one allocation.
        Ok(unsafe { self.address().add(offset) })
    }

    #[cold]
    fn out_of_bounds_error(&self, offset: usize, bytes: usize) -> Error {
        Error::index(format!("{bytes} bytes at {offset} are outside a region of {} bytes", self.bytes()))
    }

    /// Returns `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// Same as [`Region::at`].
    pub fn range(&self, offset: usize, bytes: usize) -> Result<RegionRange<'_>> {
        let address = self.at(offset, bytes)?;
        // SAFETY: they lie within this region, which outlives the borrow.
        Ok(unsafe { RegionRange::new(address, bytes, self.device(), self.users()) })
    }

    /// Page-locks bytes of the region until it is dropped.
    ///
    /// # Errors
    /// Same as [`Backend::page_lock`]; [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) if no backend
    /// allocated it.
    pub fn page_lock(&self, gpu: &Arc<Gpu>, bytes: &Range<usize>) -> Result<()> {
        let Some(backend) = self.backend() else {
            return Err(Error::argument("memory that came from no backend cannot be page-locked in place"));
        };
        backend.page_lock(gpu, self.range(bytes.start, bytes.len())?)
    }

    /// Returns a tensor within this region that begins at byte `offset`.
    ///
    /// # Errors
    /// Same as [`Region::at`], for the farthest element.
    pub fn borrow(
        &self,
        offset: usize,
        dtype: DType,
        shape: Dims,
        strides: Dims,
    ) -> Result<BorrowedTensor<'_>> {
        let address = self.at(offset, span_bytes(dtype, &shape, &strides)?)?;
        // SAFETY: the elements lie within this region, which outlives the borrow.
        Ok(unsafe { BorrowedTensor::new(address, dtype, self.device(), shape, strides) })
    }

    /// Returns `bytes` bytes from `offset` on, as a tensor.
    ///
    /// # Errors
    /// Same as [`Region::at`].
    pub fn bytes_at(&self, offset: usize, bytes: usize) -> Result<BorrowedTensor<'_>> {
        self.range(offset, bytes)?.tensor()
    }

    /// Works like [`Region::at`], and checks that the host can access the memory.
    #[inline]
    fn host_address(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>> {
        if self.device() != Device::Cpu {
            return Err(self.not_on_host_error());
        }
        self.at(offset, bytes)
    }

    #[cold]
    fn not_on_host_error(&self) -> Error {
        Error::argument(format!("memory of {} cannot be reached by the host", self.device()))
    }

    /// Writes `values` at byte `offset` of host memory.
    ///
    /// # Errors
    /// Same as [`Region::at`]; [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for device memory.
    ///
    /// # Safety
    /// Nothing else accesses these bytes during the call.
    #[inline]
    pub(crate) unsafe fn write<T: Plain>(&self, offset: usize, values: &[T]) -> Result<()> {
        let address = self.host_address(offset, size_of_val(values))?;
        if let [only] = values {
            // The common case of a decode step: a store without a call to `memcpy`.
            // SAFETY: as below.
            unsafe { address.cast::<T>().write_unaligned(*only) };
            return Ok(());
        }
        // SAFETY: `host_address` checked that the bytes lie in this region, which is live host memory; no
        // Rust slice is part of a region, so `values` is not; a `Plain` value has no padding; the caller
        // excludes races.
        unsafe { address.as_ptr().copy_from_nonoverlapping(values.as_ptr().cast(), size_of_val(values)) };
        Ok(())
    }

    /// Writes computed values at byte `offset` of host memory.
    ///
    /// # Errors
    /// Same as [`Region::write`].
    ///
    /// # Safety
    /// Same as [`Region::write`].
    #[inline]
    pub(crate) unsafe fn write_each<T: Plain>(
        &self,
        offset: usize,
        values: impl ExactSizeIterator<Item = T>,
    ) -> Result<()> {
        let count = values.len();
        let address = self.host_address(offset, count.saturating_mul(size_of::<T>()))?.cast::<T>();
        for (position, value) in values.take(count).enumerate() {
            // SAFETY: `host_address` checked that all `count` lie in this region, which is live host memory.
            let address = unsafe { address.add(position) };
            // SAFETY: as above; a `Plain` value has no padding; the caller excludes races.
            unsafe { address.write_unaligned(value) };
        }
        Ok(())
    }

    /// Returns a copy of the `count` elements at byte `offset` of host memory.
    ///
    /// # Errors
    /// Same as [`Region::write`], and [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when
    /// the copy cannot be allocated.
    ///
    /// # Safety
    /// They are initialised, and nothing writes them during the call.
    pub(crate) unsafe fn read<T: Number>(&self, offset: usize, count: usize) -> Result<Vec<T>> {
        let address = self.host_address(offset, count.saturating_mul(size_of::<T>()))?;
        let mut values: Vec<T> = try_with_capacity(count)?;
        let target: *mut u8 = values.as_mut_ptr().cast();
        // SAFETY: `host_address` checked that the bytes lie in this region, which is live host memory; the
        // vector is ours and has room for them; the caller excludes races.
        unsafe { target.copy_from_nonoverlapping(address.as_ptr(), count * size_of::<T>()) };
        // SAFETY: that many were just written; the source was initialised, and any such bytes make a
        // `Number`.
        unsafe { values.set_len(count) };
        Ok(values)
    }

    /// Fills `bytes` bytes at `offset` of host memory with `value`.
    ///
    /// # Errors
    /// Same as [`Region::write`].
    ///
    /// # Safety
    /// Same as [`Region::write`].
    pub(crate) unsafe fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()> {
        let address = self.host_address(offset, bytes)?;
        // SAFETY: `host_address` checked that the bytes lie in this region, which is live host memory; the
        // caller excludes races.
        unsafe { address.as_ptr().write_bytes(value, bytes) };
        Ok(())
    }
}

/// Returns the block of a vector's elements. The address is taken for writing, and stays valid for it when the vector
/// moves.
fn block_of<T>(elements: &mut Vec<T>) -> Block {
    let bytes = size_of_val(&elements[..]);
    Block::new(NonNull::new(elements.as_mut_ptr().cast()).unwrap_or(NonNull::dangling()), bytes)
}

impl Debug for Region {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("block", &self.block)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// Returns the bytes from the first element of a tensor to the end of the farthest one. Strides are not
/// negative.
fn span_bytes(dtype: DType, shape: &Dims, strides: &Dims) -> Result<usize> {
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
        // Before the memory can be used again.
        drop(self.life.take());
        match &self.origin {
            Origin::Backend(backend, users) => {
                if backend.is_device_accessible() && self.block.bytes() > 0 {
                    unregister(self.block.address().as_ptr().addr());
                }
                let block = Block::new(self.block.address(), self.block.bytes());
                // SAFETY: `Region::with` took the block from this backend, this is the drop of its only
                // owner, and every view keeps the region alive; enqueued work was recorded in `users`.
                unsafe { backend.deallocate(block, users) };
            }
            Origin::Part { range, returned, .. } => returned.ranges().push(range.clone()),
            Origin::Indices { .. } | Origin::Scratch { .. } => (),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Region;
    use crate::base::{Device, ErrorKind, IndexVec, Result};
    use crate::memory::{Backend, Block, Contents, Host, RegionWriter, StreamSet};

    /// Host memory that reports a device as its owner.
    #[derive(Debug)]
    struct Elsewhere;

    // SAFETY: its blocks are those of `Host`, and no device works on them.
    unsafe impl Backend for Elsewhere {
        fn device(&self) -> Device {
            Device::Cuda(0)
        }

        fn allocate(&self, bytes: usize, contents: Contents) -> Result<Block> {
            Host.allocate(bytes, contents)
        }

        unsafe fn deallocate(&self, block: Block, users: &StreamSet) {
            // SAFETY: `allocate` took it from `Host`; the caller guarantees the rest.
            unsafe { Host.deallocate(block, users) };
        }
    }

    /// Returns the errors of every access to two int32 at `offset`.
    fn refusals(writer: &mut RegionWriter, offset: usize) -> Vec<ErrorKind> {
        let answers = [
            writer.write(offset, &[1i32, 2]),
            writer.write(offset, &[1i64]),
            writer.fill(offset, 8, 0),
            read(writer.region(), offset, 2).map(drop),
        ];
        answers.into_iter().filter_map(Result::err).map(|error| error.kind()).collect()
    }

    fn read(region: &Region, offset: usize, count: usize) -> Result<Vec<i32>> {
        // SAFETY: the tests write their regions before, and each has one thread.
        unsafe { region.read(offset, count) }
    }

    #[test]
    fn accesses_end_at_the_bounds() {
        let mut writer = RegionWriter::new(Region::new(Arc::new(Host), 16).expect("memory"));
        assert_eq!(refusals(&mut writer, 8), []);
        for offset in [9, 16, usize::MAX] {
            assert_eq!(refusals(&mut writer, offset), [ErrorKind::Index; 4]);
        }
        let too_long = read(writer.region(), 0, usize::MAX);
        assert_eq!(too_long.expect_err("outside").kind(), ErrorKind::Index);
    }

    #[test]
    fn the_host_cannot_reach_device_memory() {
        let region = Region::new(Arc::new(Elsewhere), 64).expect("memory");
        let mut writer = RegionWriter::new(region);
        assert_eq!(refusals(&mut writer, 0), [ErrorKind::Argument; 4]);
        assert_eq!(writer.region().try_clone().expect_err("refused").kind(), ErrorKind::Argument);
    }

    #[test]
    fn indices_are_those_written_last() {
        for indices in [IndexVec::I32(vec![4, 5, 6]), IndexVec::I64(vec![4, 5, 6])] {
            let mut writer = RegionWriter::new(Region::from_indices(indices));
            let listed = |writer: &RegionWriter| writer.region().indices().map(Iterator::collect::<Vec<_>>);
            assert_eq!(listed(&writer), Some(vec![4, 5, 6]));
            let bytes = writer.region().bytes();
            writer.fill(0, bytes, 0).expect("inside");
            assert_eq!(listed(&writer), Some(vec![0; 3]));
        }
        assert!(Region::copy_of(&[1i32]).expect("memory").indices().is_none());
    }

    #[test]
    fn copies_begin_at_a_cache_line() {
        let region = Region::from_indices(IndexVec::I32((0..100).collect()));
        let copy = region.try_clone().expect("memory");
        assert_eq!(copy.address().as_ptr().addr() % 64, 0);
        assert_eq!(read(&copy, 0, 100).expect("inside"), (0..100).collect::<Vec<_>>());
        assert_eq!(Region::copy_of(&[false, true]).expect("memory").bytes(), 2);
        assert_eq!(Region::copy_of::<i64>(&[]).expect("memory").bytes(), 0);
    }
}
