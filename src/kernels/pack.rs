//! Copies of a tensor with any strides, on any device, to or from contiguous memory.

use std::ops::Range;
use std::sync::Arc;

use crate::base::bounded::{distance, unsigned};
use crate::base::{DType, Dims, Error, Result};
use crate::memory::{BorrowedTensor, Gpu, Stream};

use super::threads::run_in_parts;

/// The direction of a copy between a tensor and contiguous memory.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::DType;
/// use kvpool::kernels::Direction;
/// use kvpool::memory::{Backend, Host, Region, Stream};
/// use kvpool::pool::{Attempt, ChunkConfig, ChunkPool};
/// let config = ChunkConfig {
///     num_chunks: 2, chunk_shape: vec![4], dtype: DType::I32, pin_memory: false, page_lock_threads: 1,
///     strict: false,
/// };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let pool = ChunkPool::new(&config, &host).unwrap();
/// let Attempt::Taken(chunks) = pool.try_allocate(1).unwrap() else { panic!("there are two") };
/// let region = Arc::new(Region::copy_of(&[1, 2, 3, 4]).unwrap());
/// let tensor = kvpool::tensor::TensorView::contiguous(region, 0, DType::I32, &[4]).unwrap();
/// // From the tensor to the chunk.
/// pool.copy(chunks[0], &tensor.borrow(), Direction::Pack, Stream::DEFAULT).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Copies from the tensor to contiguous memory.
    Pack,
    /// Copies from contiguous memory to the tensor.
    Unpack,
}

/// Copies the elements of `tensor`, in order, to or from `packed`, which is contiguous with as many elements
/// of the same dtype.
///
/// Without a `gpu` both are in host memory, and several threads share the work. Otherwise `gpu` can access
/// both, and copies are enqueued on `stream`: one per set of equally spaced runs of contiguous elements. A
/// tensor with gaps along one dimension thus takes one copy, and any other as many as there are indices of
/// the dimensions before that.
///
/// # Errors
/// [`ErrorKind::Argument`] when they do not match, or when elements of a target
/// may overlap; nothing is copied then. [`ErrorKind::Driver`] when a driver
/// call fails.
///
/// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
/// [`ErrorKind::Driver`]: crate::base::ErrorKind::Driver
pub(crate) fn pack(
    packed: &BorrowedTensor<'_>,
    tensor: &BorrowedTensor<'_>,
    direction: Direction,
    gpu: Option<&Arc<Gpu>>,
    stream: Stream,
) -> Result<()> {
    if packed.shape().numel() != tensor.shape().numel()
        || packed.dtype() != tensor.dtype()
        || !packed.is_contiguous()
    {
        return Err(Error::argument(
            "packed memory must be contiguous, and have the dtype and the number of elements of the tensor",
        ));
    }
    if direction == Direction::Unpack && may_overlap(tensor) {
        return Err(Error::argument("elements of the tensor overlap, so it cannot be written to"));
    }
    let runs = Runs::of(tensor);
    let total = tensor.shape().numel() * tensor.dtype().size();
    let each = |bytes: Range<usize>, copy: &mut dyn FnMut(*mut u8, *mut u8, usize) -> Result<()>| {
        runs.within(bytes, |at, run, bytes| {
            let strided = tensor.address().as_ptr().wrapping_offset(run);
            copy(packed.address().as_ptr().wrapping_add(at), strided, bytes)
        })
    };
    let Some(gpu) = gpu else {
        run_in_parts(total, |part, parts| {
            let range =
                total / parts * part..if part + 1 == parts { total } else { total / parts * (part + 1) };
            let copied = each(range, &mut |packed, strided, bytes| {
                let (target, source) =
                    if direction == Direction::Pack { (packed, strided) } else { (strided, packed) };
                // SAFETY: both tensors are valid for these bytes, as `BorrowedTensor` guarantees; they may be
                // the same.
                unsafe { target.copy_from(source, bytes) };
                Ok(())
            });
            debug_assert!(copied.is_ok(), "copies on the host cannot fail");
        });
        return Ok(());
    };
    if total == 0 {
        return Ok(());
    }
    let (rows, pitch) = runs.rows();
    let bytes = runs.run_bytes;
    for first in (0..total / bytes).step_by(rows) {
        let packed_at = packed.address().as_ptr().wrapping_add(first * bytes);
        let strided_at = tensor.address().as_ptr().wrapping_offset(runs.start(first));
        // SAFETY: the rows lie within `packed`, which is valid for the call.
        let packed = unsafe { flat(packed_at, [rows, bytes], bytes, packed) }?;
        // SAFETY: the rows lie within `tensor`, which is valid for the call.
        let strided = unsafe { flat(strided_at, [rows, bytes], pitch, tensor) }?;
        let (target, source) =
            if direction == Direction::Pack { (packed, strided) } else { (strided, packed) };
        if rows == 1 {
            gpu.copy(&target, &source, stream)?;
        } else {
            gpu.copy_2d(&target, &source, stream)?;
        }
    }
    Ok(())
}

/// Returns whether two elements of a tensor may share memory: each dimension must step over all that the
/// dimensions with shorter strides span.
fn may_overlap(tensor: &BorrowedTensor<'_>) -> bool {
    let dims = tensor.shape().as_slice().iter().zip(tensor.strides().as_slice());
    let mut dims: Vec<(u64, u64)> = dims
        .filter(|(extent, _)| **extent > 1)
        .map(|(extent, stride)| (stride.unsigned_abs(), extent.unsigned_abs()))
        .collect();
    dims.sort_unstable();
    let mut span: u64 = 1;
    dims.into_iter().any(|(stride, extent)| {
        let steps_into_it = stride < span;
        span = span.saturating_add(stride.saturating_mul(extent - 1));
        steps_into_it
    })
}

/// Rows of bytes at `address`, `pitch` bytes apart.
///
/// # Safety
/// They lie within `whole`.
unsafe fn flat<'a>(
    address: *mut u8,
    [rows, bytes]: [usize; 2],
    pitch: usize,
    whole: &BorrowedTensor<'a>,
) -> Result<BorrowedTensor<'a>> {
    let address = std::ptr::NonNull::new(address).unwrap_or(whole.address());
    let [rows, bytes, pitch] = [rows, bytes, pitch]
        .map(|number| i64::try_from(number).expect("memory is no longer than an address counts"));
    let (shape, strides) = (Dims::new(&[rows, bytes])?, Dims::new(&[pitch, 1])?);
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { BorrowedTensor::new(address, DType::U8, whole.device(), shape, strides) })
}

/// A tensor as runs of contiguous elements.
struct Runs {
    run_bytes: usize,
    /// Extent and stride in bytes of each dimension outside of the runs, innermost first.
    outer: Vec<(usize, isize)>,
}

impl Runs {
    fn of(tensor: &BorrowedTensor<'_>) -> Self {
        let size = tensor.dtype().size();
        let mut runs = Self { run_bytes: size, outer: Vec::new() };
        let dims = tensor.shape().as_slice().iter().zip(tensor.strides().as_slice()).rev();
        for (&extent, &stride) in dims.filter(|(extent, _)| **extent != 1) {
            let (extent, stride) = (unsigned(extent), distance(stride).wrapping_mul(size.cast_signed()));
            if runs.outer.is_empty() && usize::try_from(stride) == Ok(runs.run_bytes) {
                runs.run_bytes *= extent;
                continue;
            }
            match runs.outer.last_mut() {
                Some((rows, pitch)) if rows.cast_signed().checked_mul(*pitch) == Some(stride) => {
                    *rows *= extent;
                }
                _ => runs.outer.push((extent, stride)),
            }
        }
        runs
    }

    /// Returns the number of runs in one copy, and the distance between them in bytes: the runs of the
    /// innermost dimension outside, unless they overlap or are too far apart.
    fn rows(&self) -> (usize, usize) {
        let apart = |&(extent, stride): &(usize, isize)| Some((extent, usize::try_from(stride).ok()?));
        self.outer
            .first()
            .and_then(apart)
            .filter(|(_, pitch)| (self.run_bytes..=Gpu::MAX_PITCH).contains(pitch))
            .unwrap_or((1, self.run_bytes))
    }

    /// Returns the offset of run `number` in the tensor, in bytes.
    fn start(&self, mut number: usize) -> isize {
        let mut start = 0;
        for &(extent, stride) in &self.outer {
            start += (number % extent).cast_signed() * stride;
            number /= extent;
        }
        start
    }

    /// Calls `visit(packed, strided, len)` for the parts of runs that make up `bytes` of the packed elements.
    fn within(
        &self,
        bytes: Range<usize>,
        mut visit: impl FnMut(usize, isize, usize) -> Result<()>,
    ) -> Result<()> {
        let mut at = bytes.start;
        while at < bytes.end {
            let (number, inside) = (at / self.run_bytes, at % self.run_bytes);
            let len = (self.run_bytes - inside).min(bytes.end - at);
            visit(at, self.start(number) + inside.cast_signed(), len)?;
            at += len;
        }
        Ok(())
    }
}
