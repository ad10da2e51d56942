//! DLPack structures against another translation of the header, and round trips of tensors.

use std::mem::{offset_of, size_of};
use std::sync::Arc;

use dlpack_ffi as ffi;
use kvpool::base::{DType, Device, ErrorKind};
use kvpool::kernels::read_indices;
use kvpool::memory::{Backend, Count, Host, Region};
use kvpool::tensor::TensorView;
use kvpool::tensor::dlpack::{
    ExchangeApi, Import, Legacy, RawDType, RawTensor, VERSION, Version, Versioned, dtype_of, export_legacy,
    export_versioned, raw_device, raw_dtype,
};

#[test]
fn layouts_agree() {
    type Theirs = ffi::DLPackExchangeAPI;

    assert_eq!(size_of::<RawTensor>(), size_of::<ffi::DLTensor>());
    assert_eq!(offset_of!(RawTensor, data), offset_of!(ffi::DLTensor, data));
    assert_eq!(offset_of!(RawTensor, device), offset_of!(ffi::DLTensor, device));
    assert_eq!(offset_of!(RawTensor, ndim), offset_of!(ffi::DLTensor, ndim));
    assert_eq!(offset_of!(RawTensor, dtype), offset_of!(ffi::DLTensor, dtype));
    assert_eq!(offset_of!(RawTensor, shape), offset_of!(ffi::DLTensor, shape));
    assert_eq!(offset_of!(RawTensor, strides), offset_of!(ffi::DLTensor, strides));
    assert_eq!(offset_of!(RawTensor, byte_offset), offset_of!(ffi::DLTensor, byte_offset));
    assert_eq!(size_of::<Legacy>(), size_of::<ffi::DLManagedTensor>());
    assert_eq!(offset_of!(Legacy, context), offset_of!(ffi::DLManagedTensor, manager_ctx));
    assert_eq!(offset_of!(Legacy, deleter), offset_of!(ffi::DLManagedTensor, deleter));
    assert_eq!(size_of::<Versioned>(), size_of::<ffi::DLManagedTensorVersioned>());
    assert_eq!(offset_of!(Versioned, context), offset_of!(ffi::DLManagedTensorVersioned, manager_ctx));
    assert_eq!(offset_of!(Versioned, deleter), offset_of!(ffi::DLManagedTensorVersioned, deleter));
    assert_eq!(offset_of!(Versioned, flags), offset_of!(ffi::DLManagedTensorVersioned, flags));
    assert_eq!(offset_of!(Versioned, tensor), offset_of!(ffi::DLManagedTensorVersioned, dl_tensor));
    assert_eq!(size_of::<ExchangeApi>(), size_of::<Theirs>());
    assert_eq!(offset_of!(ExchangeApi, previous), offset_of!(ffi::DLPackExchangeAPIHeader, prev_api));
    assert_eq!(offset_of!(ExchangeApi, allocate), offset_of!(Theirs, managed_tensor_allocator));
    assert_eq!(
        offset_of!(ExchangeApi, managed_from_object),
        offset_of!(Theirs, managed_tensor_from_py_object_no_sync)
    );
    assert_eq!(
        offset_of!(ExchangeApi, object_from_managed),
        offset_of!(Theirs, managed_tensor_to_py_object_no_sync)
    );
    assert_eq!(offset_of!(ExchangeApi, describe_object), offset_of!(Theirs, dltensor_from_py_object_no_sync));
    assert_eq!(offset_of!(ExchangeApi, current_work_stream), offset_of!(Theirs, current_work_stream));
}

#[test]
fn every_dtype_has_its_code() {
    for dtype in DType::STORAGE.into_iter().chain([DType::I32, DType::I64, DType::F64, DType::Bool]) {
        assert_eq!(dtype_of(raw_dtype(dtype)).expect("our own code"), dtype);
    }
    assert_eq!(raw_dtype(DType::F8E4M3), RawDType { code: 10, bits: 8, lanes: 1 });
    assert_eq!(raw_dtype(DType::F8E5M2), RawDType { code: 12, bits: 8, lanes: 1 });
    for (code, bits, lanes, word) in [(0, 16, 1, "int16"), (5, 64, 1, "code 5"), (2, 32, 4, "float32")] {
        let error = dtype_of(RawDType { code, bits, lanes }).expect_err("unknown");
        assert_eq!(error.kind(), ErrorKind::Type);
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(raw_device(Device::Cuda(3)).ordinal, 3);
}

#[test]
fn an_int64_tensor_is_described_as_one() {
    let region = Arc::new(Region::new(Arc::new(Host), 64).expect("memory"));
    let view = TensorView::contiguous(region, 16, DType::I64, &[2, 3]).expect("inside");
    let import = Import::Versioned(export_versioned(&view));
    let tensor = import.borrow().expect("our own tensor");
    assert_eq!((tensor.dtype(), tensor.address().as_ptr()), (DType::I64, view.address()));
    assert_eq!(tensor.strides().as_slice(), [3, 1]);
}

fn counted() -> (Arc<Count>, TensorView) {
    let backend = Arc::new(Count::new(Arc::new(Host)));
    let region = Arc::new(Region::new(backend.clone() as Arc<dyn Backend>, 64).expect("memory"));
    region.write(0, &[0i32, 1, 2, 3, 4, 5]).expect("inside");
    let view = TensorView::contiguous(region, 4, DType::I32, &[5]).expect("inside");
    (backend, view)
}

#[test]
fn a_tensor_crosses_and_comes_back() {
    let (backend, view) = counted();
    for import in [Import::Versioned(export_versioned(&view)), Import::Legacy(export_legacy(&view))] {
        let tensor = import.borrow().expect("our own tensor");
        assert_eq!(tensor.address().as_ptr(), view.address());
        assert_eq!(tensor.shape().as_slice(), [5]);
        assert_eq!(tensor.strides().as_slice(), [1]);
        let values: Vec<i64> = read_indices(&tensor).expect("indices").iter().collect();
        assert_eq!(values, [1, 2, 3, 4, 5]);
    }
    drop(view);
    assert_eq!(backend.live_blocks(), 0);
}

#[test]
fn deleter_frees_memory_on_any_thread() {
    let (backend, view) = counted();
    let managed = export_versioned(&view);
    drop(view);
    assert_eq!(backend.live_blocks(), 1);
    let address = managed.as_ptr().expose_provenance();
    let delete = move || {
        let managed = std::ptr::with_exposed_provenance_mut(address);
        drop(Import::Versioned(std::ptr::NonNull::new(managed).expect("it was exported")));
    };
    std::thread::spawn(delete).join().expect("no panic");
    assert_eq!(backend.live_blocks(), 0);
}

#[test]
fn other_major_versions_are_refused_and_freed() {
    let (backend, view) = counted();
    let mut managed = export_versioned(&view);
    drop(view);
    // SAFETY: we own the managed tensor.
    unsafe { managed.as_mut() }.version = Version { major: VERSION.major + 1, minor: 0 };
    let import = Import::Versioned(managed);
    assert_eq!(import.borrow().expect_err("too new").kind(), ErrorKind::Type);
    drop(import);
    assert_eq!(backend.live_blocks(), 0);
}

#[test]
fn foreign_tensors_are_read_or_refused() {
    let (_backend, view) = counted();
    let borrowed = |change: &dyn Fn(&mut RawTensor)| {
        let mut managed = export_versioned(&view);
        // SAFETY: we own the managed tensor.
        change(&mut unsafe { managed.as_mut() }.tensor);
        let import = Import::Versioned(managed);
        import
            .borrow()
            .and_then(|tensor| read_indices(&tensor))
            .map(|values| values.iter().collect::<Vec<_>>())
    };
    let null_strides = borrowed(&|tensor| tensor.strides = std::ptr::null_mut());
    assert_eq!(null_strides.expect("contiguous"), [1, 2, 3, 4, 5]);
    assert_eq!(borrowed(&|tensor| tensor.byte_offset = 4).expect("inside"), [2, 3, 4, 5, 0]);
    assert_eq!(borrowed(&|tensor| tensor.ndim = 0).expect("a scalar"), [1]);
    assert_eq!(borrowed(&|tensor| tensor.device.kind = 3).expect("page-locked"), [1, 2, 3, 4, 5]);
    assert_eq!(borrowed(&|tensor| tensor.device.kind = 2).expect_err("CUDA").kind(), ErrorKind::Config);
    assert_eq!(borrowed(&|tensor| tensor.device.kind = 8).expect_err("Metal").kind(), ErrorKind::Config);
    assert_eq!(borrowed(&|tensor| tensor.ndim = 9).expect_err("too many").kind(), ErrorKind::Config);
    assert_eq!(borrowed(&|tensor| tensor.ndim = -1).expect_err("too few").kind(), ErrorKind::Config);
    let shapeless = borrowed(&|tensor| tensor.shape = std::ptr::null_mut());
    assert_eq!(shapeless.expect_err("no shape").kind(), ErrorKind::Config);
    for extent in [-1, i64::MAX] {
        // SAFETY: the shape is ours, and one element long.
        let stretched = borrowed(&|tensor| unsafe { *tensor.shape = extent });
        assert_eq!(stretched.expect_err("no tensor has it").kind(), ErrorKind::Config);
    }
    assert_eq!(borrowed(&|tensor| tensor.dtype.code = 2).expect_err("float").kind(), ErrorKind::Type);
    let backwards = borrowed(&|tensor| {
        // SAFETY: the strides are ours, and one element long.
        unsafe { *tensor.strides = -1 };
        tensor.byte_offset = 16;
    });
    assert_eq!(backwards.expect("negative strides"), [5, 4, 3, 2, 1]);
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
