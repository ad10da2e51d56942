//! Mirrors: copies in host memory of index tensors on a device, from which values are read without a
//! transfer.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use crate::base::{DType, Device, IndexVec, Result};
use crate::index::SlotList;
use crate::kernels::{Indices, read_indices, read_now};
use crate::memory::{BorrowedTensor, Gpu, Stream};

/// The host's mirror of a region of indices on a device.
pub(super) trait Mirror: Debug + Send + Sync {
    /// Returns the addresses of the region.
    fn addresses(&self) -> Range<usize>;

    /// Returns the dtype of the region.
    fn dtype(&self) -> DType;

    /// Returns the elements `first`, `first + step`, ... (`count` of them) of the region, if the host knows
    /// them.
    ///
    /// `version` is the framework's count of writes to the tensor that names them.
    fn values(&self, first: usize, step: usize, count: usize, version: u64) -> Option<Vec<i32>>;

    /// Works like [`Self::values`] for consecutive elements, if the host has them as a few runs.
    fn runs(&self, _first: usize, _count: usize, _version: u64) -> Option<SlotList> {
        None
    }
}

/// The mirrors of this process.
static MIRRORS: RwLock<Vec<Weak<dyn Mirror>>> = RwLock::new(Vec::new());

/// Registers `mirror` until it is dropped.
pub(super) fn publish(mirror: &Arc<dyn Mirror>) {
    let mut mirrors = MIRRORS.write().unwrap_or_else(PoisonError::into_inner);
    mirrors.retain(|mirror| mirror.strong_count() > 0);
    mirrors.push(Arc::downgrade(mirror));
}

/// Returns the values of an index tensor on a device, if a mirror has them: the tensor lies in the stage of
/// an allocator or in a request table, and has not been written to since.
///
/// `version` is the framework's count of writes to the tensor, `None` if it has no count.
pub(super) fn known_values(tensor: &BorrowedTensor<'_>, version: Option<u64>) -> Option<IndexVec> {
    if tensor.shape().numel() == 0 {
        return Some(IndexVec::I32(Vec::new()));
    }
    let (version, step) = (version?, tensor.even_step()?);
    let (mirror, first) = mirror_of(tensor)?;
    mirror.values(first, step, tensor.shape().numel(), version).map(IndexVec::I32)
}

/// Works like [`known_values`], for slots that a mirror has as a few runs.
pub(super) fn known_runs(tensor: &BorrowedTensor<'_>, version: Option<u64>) -> Option<SlotList> {
    let version = version.filter(|_| tensor.even_step() == Some(1))?;
    let (mirror, first) = mirror_of(tensor)?;
    mirror.runs(first, tensor.shape().numel(), version)
}

/// Returns the mirror that has the elements of `tensor`, and the position of the first one.
fn mirror_of(tensor: &BorrowedTensor<'_>) -> Option<(Arc<dyn Mirror>, usize)> {
    let address = tensor.address().as_ptr().addr();
    let mirrors = MIRRORS.read().unwrap_or_else(PoisonError::into_inner);
    let mirror =
        mirrors.iter().filter_map(Weak::upgrade).find(|mirror| mirror.addresses().contains(&address))?;
    drop(mirrors);
    let (offset, size) = (address - mirror.addresses().start, mirror.dtype().size());
    (tensor.dtype() == mirror.dtype() && offset.is_multiple_of(size)).then(|| (mirror, offset / size))
}

/// Returns the values of indices on any device. Values that only a device has are copied in the order of
/// `stream` and waited for.
///
/// # Errors
/// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the device has failed.
///
/// ```
/// use kvpool::base::IndexVec;
/// use kvpool::kernels::Indices;
/// use kvpool::memory::Stream;
/// use kvpool::pool::values_now;
/// let values = IndexVec::I32(vec![7, 8]);
/// assert_eq!(values_now(Indices::Host(values.clone()), Stream::DEFAULT).unwrap(), values);
/// ```
pub fn values_now(indices: Indices<'_>, stream: Stream) -> Result<IndexVec> {
    match indices {
        Indices::Host(values) => Ok(values),
        Indices::Device { tensor, version } => match (known_values(&tensor, version), tensor.device()) {
            (Some(values), _) => Ok(values),
            (None, Device::Cuda(ordinal)) => read_now(&Gpu::open(ordinal)?, &tensor, stream),
            (None, Device::Cpu) => read_indices(&tensor),
        },
    }
}

/// Returns the elements `first`, `first + step`, ... of `values`, if they are all there.
pub(super) fn stepped(values: &[i32], first: usize, step: usize, count: usize) -> Option<Vec<i32>> {
    if count == 0 {
        return Some(Vec::new());
    }
    let last = step.checked_mul(count - 1)?.checked_add(first)?;
    let found = values.get(first..=last)?;
    if step == 1 {
        return Some(found.to_vec());
    }
    Some((0..count).map(|position| found[position * step]).collect())
}
