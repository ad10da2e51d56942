//! DLPack structures against another translation of the header, and round trips of tensors.

use std::mem::{offset_of, size_of};
use std::sync::Arc;

use dlpack_ffi as ffi;
use kvpool::base::{DType, Device, ErrorKind, IndexVec};
use kvpool::kernels::read_indices;
use kvpool::memory::{Backend, CountingBackend, Host, Region};
use kvpool::tensor::TensorView;
use kvpool::tensor::dlpack::{
    ExchangeApi, Import, IndexExport, Legacy, RawDType, RawTensor, Version, Versioned, dtype_of,
    export_versioned, packed_indices, raw_device, raw_dtype,
};

/// Checks that a structure is as large as another, and has its fields where the other has those named beside them.
macro_rules! same {
    ($ours:ty, $theirs:ty, $($field:ident: $other:ident),*) => {
        assert_eq!(size_of::<$ours>(), size_of::<$theirs>());
        $(assert_eq!(offset_of!($ours, $field), offset_of!($theirs, $other));)*
    };
}

#[test]
fn layouts_agree() {
    same!(RawTensor, ffi::DLTensor, data: data, device: device, ndim: ndim, dtype: dtype, shape: shape);
    same!(RawTensor, ffi::DLTensor, strides: strides, byte_offset: byte_offset);
    same!(Legacy, ffi::DLManagedTensor, context: manager_ctx, deleter: deleter);
    same!(Versioned, ffi::DLManagedTensorVersioned, context: manager_ctx, deleter: deleter);
    same!(Versioned, ffi::DLManagedTensorVersioned, flags: flags, tensor: dl_tensor);
    same!(ExchangeApi, ffi::DLPackExchangeAPI, allocate: managed_tensor_allocator);
    same!(ExchangeApi, ffi::DLPackExchangeAPI, managed_from_object: managed_tensor_from_py_object_no_sync);
    same!(ExchangeApi, ffi::DLPackExchangeAPI, object_from_managed: managed_tensor_to_py_object_no_sync);
    same!(ExchangeApi, ffi::DLPackExchangeAPI, describe_object: dltensor_from_py_object_no_sync);
    same!(ExchangeApi, ffi::DLPackExchangeAPI, current_work_stream: current_work_stream);
    assert_eq!(offset_of!(ExchangeApi, previous), offset_of!(ffi::DLPackExchangeAPIHeader, prev_api));
}

#[test]
fn every_dtype_has_its_code() {
    for dtype in DType::ALL.into_iter().chain([DType::I16, DType::U16, DType::U32, DType::U64]) {
        assert_eq!(dtype_of(raw_dtype(dtype)).expect("our own code"), dtype);
    }
    assert_eq!(raw_dtype(DType::F8E4M3), RawDType { code: 10, bits: 8, lanes: 1 });
    assert_eq!(raw_dtype(DType::F8E5M2), RawDType { code: 12, bits: 8, lanes: 1 });
    for (code, bits, lanes, word) in [(0, 24, 1, "int24"), (5, 64, 1, "code 5"), (2, 32, 4, "float32")] {
        let error = dtype_of(RawDType { code, bits, lanes }).expect_err("unknown");
        assert_eq!(error.kind(), ErrorKind::Type);
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(raw_device(Device::Cuda(3)).ordinal, 3);
}

#[test]
fn deleter_frees_memory_on_any_thread() {
    let backend = Arc::new(CountingBackend::new(Arc::new(Host)));
    let region = Arc::new(Region::new(backend.clone() as Arc<dyn Backend>, 64).expect("memory"));
    let view = TensorView::contiguous(region, 4, DType::I32, &[5]).expect("inside");
    let managed = export_versioned(&view);
    drop(view);
    assert_eq!(backend.live_blocks(), 1);
    let address = managed.as_ptr().expose_provenance();
    let delete = move || {
        let managed = std::ptr::with_exposed_provenance_mut(address);
        let managed = std::ptr::NonNull::new(managed).expect("it was exported");
        // SAFETY: it was exported, and is imported once.
        drop(unsafe { Import::of_versioned(managed) });
    };
    std::thread::spawn(delete).join().expect("no panic");
    assert_eq!(backend.live_blocks(), 0);
}

#[test]
fn indices_are_exported_and_read() {
    // SAFETY: it was exported just now.
    let import = unsafe { Import::of_versioned(IndexExport::new(7_i64).into_managed()) };
    let described = import.borrow().expect("valid");
    assert_eq!((described.dtype(), described.shape().as_slice()), (DType::I64, &[1_i64][..]));
    assert_eq!(read_indices(&described).expect("on the host"), IndexVec::I64(vec![7]));
    // SAFETY: as above.
    let import = unsafe { Import::of_versioned(IndexExport::new(-3_i32).into_managed()) };
    assert_eq!(read_indices(&import.borrow().expect("valid")).expect("on the host"), IndexVec::I32(vec![-3]));

    let (mut index, mut extent) = (5_i32, 1_i64);
    let raw = |data: *mut i32, shape: *mut i64, ndim, dtype| RawTensor {
        data: data.cast(),
        device: raw_device(Device::Cpu),
        ndim,
        dtype: raw_dtype(dtype),
        shape,
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    // SAFETY: each of these describes `index`, or is refused before its memory is read.
    let read = |tensor: RawTensor| unsafe { packed_indices(&tensor) }.expect("there is memory");
    assert_eq!(read(raw(&raw mut index, &raw mut extent, 1, DType::I32)), Some(IndexVec::I32(vec![5])));
    assert_eq!(read(raw(&raw mut index, &raw mut extent, 1, DType::F32)), None);
    assert_eq!(read(raw(&raw mut index, &raw mut extent, 0, DType::I32)), None);
    assert_eq!(read(raw(&raw mut index, std::ptr::null_mut(), 1, DType::I32)), None);
    assert_eq!(read(raw(std::ptr::null_mut(), &raw mut extent, 1, DType::I32)), None);
    let on_gpu = RawTensor {
        device: raw_device(Device::Cuda(0)),
        ..raw(&raw mut index, &raw mut extent, 1, DType::I32)
    };
    assert_eq!(read(on_gpu), None);
    let (mut three, mut extent, mut one, mut two, mut negative) = ([4, 5, 6], 3_i64, 1_i64, 2_i64, -1_i64);
    let list = raw(three.as_mut_ptr(), &raw mut extent, 1, DType::I32);
    let with_stride = |strides| RawTensor { strides, ..list };
    for strides in [std::ptr::null_mut(), &raw mut one] {
        assert_eq!(read(with_stride(strides)), Some(IndexVec::I32(vec![4, 5, 6])));
    }
    assert_eq!(
        read(RawTensor { byte_offset: 4, shape: &raw mut two, ..list }),
        Some(IndexVec::I32(vec![5, 6]))
    );
    for other in [with_stride(&raw mut two), RawTensor { shape: &raw mut negative, ..list }] {
        assert_eq!(read(other), None);
    }
    let mut long = i64::MAX;
    let endless = RawTensor { shape: &raw mut long, ..list };
    // SAFETY: there is no memory for the copy, so none is read.
    let error = unsafe { packed_indices(&endless) }.expect_err("too many");
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
}

#[test]
fn incomplete_exchange_tables_are_unusable() {
    let table = |major, complete: bool| {
        unsafe extern "C" fn describe(_: *mut std::ffi::c_void, _: *mut RawTensor) -> i32 {
            -1
        }
        unsafe extern "C" fn import(_: *mut Versioned, _: *mut *mut std::ffi::c_void) -> i32 {
            -1
        }
        ExchangeApi {
            version: Version { major, minor: 3 },
            previous: std::ptr::null_mut(),
            allocate: std::ptr::null(),
            managed_from_object: std::ptr::null(),
            object_from_managed: Some(import),
            describe_object: complete.then_some(describe as _),
            current_work_stream: None,
        }
    };
    assert!(table(1, true).is_usable());
    assert!(!table(1, false).is_usable());
    assert!(!table(2, true).is_usable());
}
