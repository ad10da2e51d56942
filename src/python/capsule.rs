//! Capsules in which tensors of DLPack go from one library to another.

use std::ffi::CStr;
use std::ptr::NonNull;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::tensor::TensorView;
use crate::tensor::dlpack::{
    Import, LEGACY, LEGACY_USED, Legacy, VERSIONED, VERSIONED_USED, Versioned, export_legacy,
    export_versioned,
};

/// Creates a capsule over the memory of `view`.
pub(super) fn versioned_capsule<'py>(py: Python<'py>, view: &TensorView) -> PyResult<Bound<'py, PyCapsule>> {
    let managed = export_versioned(view).cast();
    // SAFETY: the pointer is a managed tensor that the capsule owns until it is renamed.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, managed, VERSIONED, Some(drop_versioned)) }
}

/// Creates a capsule over the memory of `view`, without a version.
pub(super) fn legacy_capsule<'py>(py: Python<'py>, view: &TensorView) -> PyResult<Bound<'py, PyCapsule>> {
    // SAFETY: the pointer is a managed tensor that the capsule owns until it is renamed.
    unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, export_legacy(view).cast(), LEGACY, Some(drop_legacy))
    }
}

/// Takes over the tensor of a capsule.
pub(super) fn take_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Import> {
    let py = capsule.py();
    // SAFETY: `capsule` is a live object; the call returns 0 for any other object.
    let is = |name: &CStr| unsafe { pyo3::ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 1;
    let (name, used) = if is(VERSIONED) {
        (VERSIONED, VERSIONED_USED)
    } else if is(LEGACY) {
        (LEGACY, LEGACY_USED)
    } else {
        return Err(PyTypeError::new_err("__dlpack__ did not return an unused DLPack capsule"));
    };
    // SAFETY: the capsule is valid under `name`.
    let Some(managed) =
        NonNull::new(unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) })
    else {
        return Err(PyErr::fetch(py));
    };
    // SAFETY: the capsule is live, and the new name is a constant.
    if unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    // A renamed capsule does not free the tensor: it is ours.
    Ok(if name == VERSIONED {
        // SAFETY: it is ours, and the capsule had the name of this kind.
        unsafe { Import::of_versioned(managed.cast()) }
    } else {
        // SAFETY: as above.
        unsafe { Import::of_legacy(managed.cast()) }
    })
}

/// Frees the tensor of a capsule that was not consumed.
unsafe extern "C" fn drop_versioned(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: called by Python on the capsule, with the GIL.
    if let Some(managed) = unsafe { unconsumed::<Versioned>(capsule, VERSIONED) } {
        // SAFETY: nobody has consumed it, so it is ours.
        drop(unsafe { Import::of_versioned(managed) });
    }
}

/// Works like [`drop_versioned`], for a legacy capsule.
unsafe extern "C" fn drop_legacy(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: called by Python on the capsule, with the GIL.
    if let Some(managed) = unsafe { unconsumed::<Legacy>(capsule, LEGACY) } {
        // SAFETY: as above.
        drop(unsafe { Import::of_legacy(managed) });
    }
}

/// Returns the pointer of a capsule that still has its first name.
unsafe fn unconsumed<T>(capsule: *mut pyo3::ffi::PyObject, name: &CStr) -> Option<NonNull<T>> {
    // SAFETY: the caller passes a live capsule.
    if unsafe { pyo3::ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: it is valid under that name, so this neither fails nor sets an exception.
    NonNull::new(unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) }.cast())
}
