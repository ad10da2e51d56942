//! Numbers of a batch as kernel parameters: in device tensors, computed, or host arrays that are passed with
//! the launch or through a ring.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use crate::base::bounded::{int32, signed};
use crate::base::{DType, Dims, Error, Result};
use crate::kernels::indices::{Numbers, check_ints};
use crate::memory::RegionRange;

/// The place of a batch's numbers: `INDEX_...` of `params.cuh`.
#[repr(i32)]
#[derive(Clone, Copy)]
enum IndexKind {
    /// The numbers are in an int32 tensor of one dimension.
    Narrow = 0,
    /// The numbers are in an int64 tensor of one dimension.
    Wide = 1,
    /// The numbers are in the list that is passed with the launch.
    Listed = 2,
    /// The numbers are computed.
    Computed = 3,
    /// The numbers are in an int32 tensor of several dimensions.
    NarrowTensor = 4,
    /// The numbers are in an int64 tensor of several dimensions.
    WideTensor = 5,
}

/// `Index` of `params.cuh`: the numbers of a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Index {
    data: *const c_void,
    value: i64,
    step: i64,
    kind: IndexKind,
    ndim: i32,
    strides: [i64; 8],
    shape: [i64; 8],
}

/// The kernel parameters that every driver accepts, in words of four bytes.
pub(super) const PARAMS: usize = 4096 / size_of::<i32>();

/// The version of CUDA from which on a driver accepts 32,764 bytes of kernel parameters.
pub(super) const LONG_PARAMS_SINCE: (u32, u32) = (12, 1);

/// Longer parameters, in words: those of a token more for each of 300 requests. A launch copies all that its
/// kernel declares, so the usual large batches do not take the longest.
pub(super) const LONG_PARAMS: usize = 12_288 / size_of::<i32>();

/// The longest parameters, in words: a structure with addresses has a multiple of eight bytes.
pub(super) const LONGEST_PARAMS: usize = 32_760 / size_of::<i32>();

/// `WithList`: kernel parameters followed by numbers from the host. Together they are the kernel's `WORDS`
/// words; this structure is longer.
#[repr(C)]
pub(super) struct WithList<P, const WORDS: usize = PARAMS> {
    params: P,
    list: [MaybeUninit<i32>; WORDS],
}

impl<P, const WORDS: usize> WithList<P, WORDS> {
    /// The numbers that fit.
    pub(super) const ROOM: usize = WORDS - size_of::<P>() / size_of::<i32>();

    /// Returns whether `arrays`, concatenated, fit behind the parameters.
    pub(super) fn fits(arrays: &[&[i32]]) -> bool {
        arrays.iter().map(|array| array.len()).sum::<usize>() <= Self::ROOM
    }

    /// Calls `work` with `params` followed by `arrays`, which fit, concatenated. To return them would move up to
    /// 32 KiB.
    #[inline]
    pub(super) fn with<R>(params: P, arrays: &[&[i32]], work: impl FnOnce(&Self) -> R) -> R {
        let mut made = Self { params, list: [const { MaybeUninit::uninit() }; WORDS] };
        let mut rest = &mut made.list[..Self::ROOM];
        for array in arrays {
            let (places, behind) = rest.split_at_mut(array.len());
            for (place, number) in places.iter_mut().zip(*array) {
                place.write(*number);
            }
            rest = behind;
        }
        // The launch copies the rest, too.
        rest.fill(MaybeUninit::new(0));
        work(&made)
    }
}

/// The place of host arrays that a kernel reads.
#[derive(Clone, Copy)]
pub(super) enum Arrays<'a> {
    /// The arrays are in the list of the launch, concatenated.
    Listed,
    /// Each one copied to the device.
    Copied(&'a [RegionRange<'a>]),
}

impl Arrays<'_> {
    /// Returns the address of array `which`; null when it is passed with the launch.
    pub(super) fn address<T>(&self, which: usize) -> *const T {
        match self {
            Self::Listed => ptr::null(),
            Self::Copied(ranges) => ranges[which].address().as_ptr().cast_const().cast(),
        }
    }

    /// Returns the kernel parameters for the numbers of every batch of a call; these are the arrays of their
    /// lists.
    pub(super) fn indices(&self, numbers: &[Numbers<'_>]) -> Result<Vec<Index>> {
        let (mut which, mut begin) = (0, 0);
        let index = |numbers: &Numbers<'_>| {
            let Numbers::List(list) = numbers else { return Index::new(numbers) };
            let index = match self {
                Self::Listed => Index::listed(begin, list.len()),
                Self::Copied(_) => Index::at(self.address(which), list.len()),
            };
            which += 1;
            begin += list.len();
            Ok(index)
        };
        numbers.iter().map(index).collect()
    }
}

impl Index {
    const fn computed(value: i64, step: i64) -> Self {
        Self {
            data: ptr::null(),
            value,
            step,
            kind: IndexKind::Computed,
            ndim: 1,
            strides: [0; 8],
            shape: [1; 8],
        }
    }

    /// Creates `len` numbers of the list that is passed with a launch, from `begin` on.
    fn listed(begin: usize, len: usize) -> Self {
        Self { kind: IndexKind::Listed, shape: first(signed(len), 1), ..Self::computed(signed(begin), 0) }
    }

    /// Creates `len` numbers at a device address.
    fn at(data: *const c_void, len: usize) -> Self {
        let (shape, strides) = (first(signed(len), 1), first(1, 0));
        Self { data, kind: IndexKind::Narrow, shape, strides, ..Self::computed(0, 0) }
    }

    /// Returns the numbers in device memory, or computed. A list from the host is an error.
    pub(super) fn new(numbers: &Numbers<'_>) -> Result<Self> {
        match numbers {
            Numbers::Constant(value) => Ok(Self::computed(*value, 0)),
            Numbers::Arange(value) => Ok(Self::computed(*value, 1)),
            Numbers::List(_) => Err(Error::argument("numbers of the host are not on the device")),
            Numbers::Tensor(tensor) => {
                check_ints(tensor.dtype())?;
                let (ndim, shape, strides) = collapsed(tensor.shape(), tensor.strides());
                let kind = match (tensor.dtype() == DType::I64, ndim) {
                    (false, 1) => IndexKind::Narrow,
                    (true, 1) => IndexKind::Wide,
                    (false, _) => IndexKind::NarrowTensor,
                    (true, _) => IndexKind::WideTensor,
                };
                let data = tensor.address().as_ptr().cast_const().cast();
                Ok(Self { data, kind, ndim, strides, shape, ..Self::computed(0, 0) })
            }
        }
    }
}

/// Returns `value` followed by seven times `rest`.
const fn first(value: i64, rest: i64) -> [i64; 8] {
    [value, rest, rest, rest, rest, rest, rest, rest]
}

/// Returns a description of the same elements in the same order with as few dimensions as possible, at least
/// one.
pub(super) fn collapsed(shape: &Dims, strides: &Dims) -> (i32, [i64; 8], [i64; 8]) {
    let (mut extents, mut steps) = (first(1, 1), [0i64; 8]);
    let mut ndim = 0;
    for (&extent, &stride) in shape.as_slice().iter().zip(strides.as_slice()) {
        if extent == 1 {
            continue;
        }
        if ndim > 0 && Some(steps[ndim - 1]) == stride.checked_mul(extent) {
            extents[ndim - 1] *= extent;
            steps[ndim - 1] = stride;
        } else {
            (extents[ndim], steps[ndim]) = (extent, stride);
            ndim += 1;
        }
    }
    (int32(ndim.max(1)), extents, steps)
}
