//! Tensors from other frameworks: read correctly or refused, never read out of bounds, and deleted once.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kvpool::base::{DType, ErrorKind, IndexVec};
use kvpool::kernels::read_indices;
use kvpool::memory::{Backend, BorrowedTensor, CountingBackend, Host, Region};
use kvpool::tensor::TensorView;
use kvpool::tensor::dlpack::{
    Import, Legacy, RawDType, RawDevice, RawTensor, VERSION, Version, Versioned, borrow, dtype_of,
    export_legacy, export_versioned, is_view, raw_dtype,
};

use super::guarded::Guarded;
use super::{Source, Verdict, agree, dims, ensure};

const DTYPES: [DType; 5] = [DType::I32, DType::I64, DType::U8, DType::F32, DType::Bool];

/// An incoming tensor, and the memory behind its pointers.
struct IncomingTensor {
    memory: Guarded,
    shape: Guarded,
    strides: Guarded,
    tensor: RawTensor,
    /// Whether its elements lie in its memory, and its pointers are valid DLPack.
    is_honest: bool,
    /// Whether kvpool accepts everything that a consumer can check.
    readable: Verdict,
}

pub(super) fn run(source: &mut Source<'_>) {
    while source.next_step() {
        match source.below(8) {
            0 => cross(source),
            _ => receive(source),
        }
    }
}

/// Numbers in an allocation of exactly their length.
fn list(values: &[i64]) -> Guarded {
    let mut list = Guarded::new(size_of_val(values), true);
    for (place, value) in list.content().chunks_exact_mut(8).zip(values) {
        place.copy_from_slice(&value.to_ne_bytes());
    }
    list
}

/// The range of bytes that the elements occupy, relative to the first element; `None` without elements.
fn reach(shape: &[i64], strides: &[i64], size: usize) -> Option<(i128, i128)> {
    if shape.contains(&0) {
        return None;
    }
    let size = i128::try_from(size).expect("small");
    let far = shape
        .iter()
        .zip(strides)
        .map(|(&extent, &stride)| (i128::from(extent - 1) * i128::from(stride)).saturating_mul(size));
    let (low, high) = far.fold((0i128, 0i128), |(low, high), far| {
        (low.saturating_add(far.min(0)), high.saturating_add(far.max(0)))
    });
    Some((low, high.saturating_add(size)))
}

fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis].max(1));
    }
    strides
}

impl IncomingTensor {
    fn new(source: &mut Source<'_>) -> Self {
        let ndim = if source.rarely(8) { source.below(12) } else { source.below(4) };
        let shape: Vec<i64> = (0..ndim)
            .map(|_| if source.rarely(32) { source.index(9) } else { source.within(0, 5) })
            .collect();
        let dtype = source.of(&DTYPES);
        let has_strides = source.flip();
        let strides: Vec<i64> = match source.below(4) {
            _ if !has_strides => contiguous(&shape),
            0 => shape.iter().map(|_| source.within(-3, 6)).collect(),
            1 => shape.iter().map(|_| source.index(6)).collect(),
            _ => contiguous(&shape),
        };
        let is_shape = shape.iter().all(|extent| *extent >= 0);
        let reach = if is_shape { reach(&shape, &strides, dtype.size()) } else { None };
        let room = reach.map_or(0, |(low, high)| high.saturating_sub(low));
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        // Extents with stride zero may be many elements in little memory.
        let elements = shape.iter().fold(1i64, |count, &extent| count.saturating_mul(extent));
        let is_small = room <= 1 << 16 && elements <= 1 << 16;
        let mut memory = Guarded::new(if is_small { room } else { 64 }, source.flip());
        for (byte, at) in memory.content().iter_mut().zip((1u8..=255).cycle()) {
            *byte = at;
        }
        let first = reach.filter(|_| is_small).map_or(0, |(low, _)| usize::try_from(-low).expect("small"));
        // A part of the distance to the first element is passed as an offset.
        let offset = source.below(first + 1);
        let data = memory.address().wrapping_add(first - offset);
        let (shape_list, stride_list) = (list(&shape), list(&strides));
        let tensor = RawTensor {
            data: data.cast(),
            device: RawDevice { kind: 1, ordinal: 0 },
            ndim: i32::try_from(ndim).expect("small"),
            dtype: raw_dtype(dtype),
            shape: shape_list.address().cast(),
            strides: if has_strides { stride_list.address().cast() } else { ptr::null_mut() },
            byte_offset: u64::try_from(offset).expect("small"),
        };
        let size = i64::try_from(dtype.size()).expect("small");
        let bytes = shape.iter().try_fold(size, |bytes, &extent| bytes.checked_mul(extent));
        let is_readable = is_shape && ndim <= 8 && bytes.is_some();
        let mut sent = Self {
            memory,
            shape: shape_list,
            strides: stride_list,
            tensor,
            is_honest: is_shape && is_small,
            readable: ensure(is_readable, ErrorKind::Argument),
        };
        if source.rarely(3) {
            sent.spoil(source);
        }
        sent
    }

    /// Is readable only if `is_right`.
    fn require(&mut self, is_right: bool) {
        self.readable = self.readable.and(ensure(is_right, ErrorKind::Argument));
    }

    /// Makes the tensor one that a producer should not send, but can.
    fn spoil(&mut self, source: &mut Source<'_>) {
        let tensor = &mut self.tensor;
        match source.below(8) {
            0 => {
                let has_elements = self.memory.bytes() > 0;
                tensor.data = ptr::null_mut();
                tensor.byte_offset = 0;
                self.is_honest = !has_elements;
                self.require(!has_elements);
            }
            1 => {
                tensor.shape = ptr::null_mut();
                let has_no_extent = tensor.ndim == 0;
                self.is_honest &= has_no_extent;
                self.require(has_no_extent);
            }
            2 => {
                tensor.ndim = source.of(&[i32::MIN, -1, 9, 64, i32::MAX]);
                self.is_honest = false;
                self.require(false);
            }
            3 if self.is_honest => {
                let [code, bits, lanes] = [source.below(20), source.below(130), source.below(4)];
                let narrow = |number: usize| u8::try_from(number).expect("small");
                let lanes = u16::try_from(lanes).expect("small");
                tensor.dtype = RawDType { code: narrow(code), bits: narrow(bits), lanes };
                // The dtype is looked at first.
                self.readable = ensure(dtype_of(tensor.dtype).is_ok(), ErrorKind::Type).and(self.readable);
                // Its elements may now be larger than its memory allows.
                self.is_honest = false;
            }
            4 => {
                tensor.device.kind = source.of(&[i32::MIN, -1, 0, 3, 4, 7, 8, 10, 13, 14, 15, i32::MAX]);
                // Page-locked memory is host memory.
                let is_on_host = tensor.device.kind == 3;
                self.require(is_on_host);
            }
            5 => tensor.device.ordinal = source.of(&[i32::MIN, -1, 1, i32::MAX]),
            6 => {
                tensor.byte_offset = source.of(&[u64::MAX, 1 << 63, 1 << 40]);
                self.is_honest &= self.memory.bytes() == 0;
            }
            _ => {
                tensor.device.kind = 2;
                self.is_honest = false;
            }
        }
    }
}

/// Imports a tensor, described or owned, and reads it.
fn receive(source: &mut Source<'_>) {
    thread_local! {
        /// The number of deleted tensors.
        static ENDED: Cell<usize> = const { Cell::new(0) };
    }
    unsafe extern "C" fn end_versioned(_: *mut Versioned) {
        ENDED.set(ENDED.get() + 1);
    }
    unsafe extern "C" fn end_legacy(_: *mut Legacy) {
        ENDED.set(ENDED.get() + 1);
    }
    let sent = IncomingTensor::new(source);
    let flags = source.of(&[0, 1, 2, 3, 4, u64::MAX]);
    let has_deleter = !source.rarely(8);
    let version = if source.rarely(8) {
        let number = |source: &mut Source<'_>| source.of(&[0, 2, 77, u32::MAX]);
        Version { major: number(source), minor: number(source) }
    } else {
        Version { major: VERSION.major, minor: source.of(&[0, 1, 3, u32::MAX]) }
    };
    let IncomingTensor { memory, shape, strides, tensor, is_honest, readable } = sent;
    let before = ENDED.get();
    let context: *mut c_void = ptr::null_mut();
    match source.below(3) {
        0 => {
            // SAFETY: its pointers are valid until the end of this call, and are only followed where it is
            // honest.
            let answer = unsafe { borrow(&tensor, PhantomData) };
            if let Some(borrowed) = agree(answer, &readable) {
                read(&borrowed, is_honest, &tensor);
            }
        }
        1 => {
            let deleter = has_deleter.then_some(end_versioned as unsafe extern "C" fn(*mut Versioned));
            let mut managed = Versioned { version, context, deleter, flags, tensor };
            // SAFETY: it lives until the import is dropped; its pointers are only followed where it is honest.
            let import = unsafe { Import::of_versioned(NonNull::from(&mut managed)) };
            let is_known = ensure(version.major == VERSION.major, ErrorKind::Type);
            if let Some(is_writable) = agree(import.is_writable(), &is_known) {
                // Neither read-only nor copied.
                assert_eq!(is_writable, flags.trailing_zeros() >= 2);
            }
            let expected = is_known.and(readable);
            if let Some(borrowed) = agree(import.borrow(), &expected) {
                // SAFETY: the managed tensor is on the stack of this call.
                read(&borrowed, is_honest, unsafe { &(*ptr::from_ref(&managed)).tensor });
            }
            drop(import);
            assert_eq!(ENDED.get() - before, usize::from(has_deleter));
        }
        _ => {
            let deleter = has_deleter.then_some(end_legacy as unsafe extern "C" fn(*mut Legacy));
            let mut managed = Legacy { tensor, context, deleter };
            // SAFETY: as above.
            let import = unsafe { Import::of_legacy(NonNull::from(&mut managed)) };
            assert!(import.is_writable().expect("it has no version"));
            if let Some(borrowed) = agree(import.borrow(), &readable) {
                // SAFETY: as above.
                read(&borrowed, is_honest, unsafe { &(*ptr::from_ref(&managed)).tensor });
            }
            drop(import);
            assert_eq!(ENDED.get() - before, usize::from(has_deleter));
        }
    }
    drop((memory, shape, strides));
}

/// Checks what is read from a tensor. A tensor that lies about its memory is only described.
fn read(borrowed: &BorrowedTensor<'_>, is_honest: bool, tensor: &RawTensor) {
    let (shape, strides) = (borrowed.shape().as_slice(), borrowed.strides().as_slice());
    assert_eq!(i32::try_from(shape.len()), Ok(tensor.ndim));
    let count: i64 = shape.iter().product();
    let _ = (borrowed.is_contiguous(), borrowed.expanded(3));
    if !is_honest {
        return;
    }
    let is_index = matches!(borrowed.dtype(), DType::I32 | DType::I64);
    let Some(values) = agree(read_indices(borrowed), &ensure(is_index, ErrorKind::Type)) else { return };
    let mut expected = Vec::new();
    for position in 0..count {
        let (mut left, mut lying) = (position, 0i64);
        for (&extent, &stride) in shape.iter().zip(strides).rev() {
            lying += left % extent * stride;
            left /= extent;
        }
        let size = i64::try_from(borrowed.dtype().size()).expect("small");
        let at = isize::try_from(lying * size).expect("small");
        let address = borrowed.address().as_ptr().wrapping_offset(at);
        expected.push(match borrowed.dtype() {
            // SAFETY: an honest tensor has its elements in its memory.
            DType::I32 => i64::from(unsafe { address.cast::<i32>().read_unaligned() }),
            // SAFETY: as above.
            _ => unsafe { address.cast::<i64>().read_unaligned() },
        });
    }
    assert!(values.iter().eq(expected));
    assert_eq!(matches!(values, IndexVec::I64(_)), borrowed.dtype() == DType::I64);
}

/// Exports and imports a tensor of ours; its memory is freed with the last owner.
fn cross(source: &mut Source<'_>) {
    /// Smaller than some of the tensors.
    const BYTES: usize = 256;
    let backend = Arc::new(CountingBackend::new(Arc::new(Host)));
    let region = Arc::new(Region::new(backend.clone() as Arc<dyn Backend>, BYTES).expect("memory"));
    let shape: Vec<usize> = (0..source.below(9)).map(|_| source.below(3)).collect();
    let (dtype, offset) = (source.of(&DTYPES), source.below(64));
    let is_inside = offset + dims(&shape).bytes(dtype).expect("small") <= BYTES;
    let expected = ensure(is_inside, ErrorKind::Index);
    let view = agree(TensorView::contiguous(region, offset, dtype, &shape), &expected);
    let Some(view) = view else { return };
    let mut imports = Vec::new();
    for _ in 0..source.below(4) {
        imports.push(match source.below(2) {
            // SAFETY: it was exported just now.
            0 => unsafe { Import::of_versioned(export_versioned(&view)) },
            // SAFETY: as above.
            _ => unsafe { Import::of_legacy(export_legacy(&view)) },
        });
    }
    for import in &imports {
        let tensor = import.tensor().expect("our own");
        // SAFETY: we made it, and it lives.
        assert!(unsafe { is_view(&tensor, &view) });
        let back = import.borrow().expect("our own");
        assert_eq!((back.dtype(), back.shape(), back.strides()), (dtype, view.shape(), view.strides()));
        assert_eq!(back.address().as_ptr(), view.address());
    }
    drop(view);
    while !imports.is_empty() {
        assert_eq!(backend.live_blocks(), 1);
        drop(imports.swap_remove(source.below(imports.len())));
    }
    assert_eq!(backend.live_blocks(), 0);
}
