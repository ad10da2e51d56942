//! Export of views as PyTorch tensors or, without PyTorch, as `kvpool.Tensor`.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use pyo3::prelude::*;

use crate::base::{DType, Device};
use crate::kernels::BufferInfo;
use crate::pool::{Grant, GrantedSlots};
use crate::tensor::TensorView;
use crate::tensor::dlpack::{Versioned, export_versioned};

use super::capsule::legacy_capsule;
use super::framework::{Exchange, Torch, fetch, torch};
use super::tensor::Tensor;

/// Wraps `view` as a `torch.Tensor` or, without PyTorch, as a [`Tensor`], without a copy. The tensor keeps
/// the memory alive.
pub(super) fn to_tensor(py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
    match torch(py)? {
        Some(torch) => torch.import(py, view),
        None => Ok(Py::new(py, Tensor::new(view.clone()))?.into_any()),
    }
}

/// Wraps `view`, of host memory, as a read-only NumPy array or, without NumPy, as a [`Tensor`], without a copy.
pub(super) fn to_host_array(py: Python<'_>, view: TensorView) -> PyResult<Bound<'_, PyAny>> {
    let tensor = Bound::new(py, Tensor::new(view))?.into_any();
    if py.import("numpy").is_err() {
        return Ok(tensor);
    }
    let array = tensor.call_method0("numpy")?;
    array.call_method1("setflags", (false,))?;
    Ok(array)
}

/// Works like [`to_tensor`], for slots.
pub(super) fn slots_to_tensor(py: Python<'_>, grant: &mut Grant<'_>) -> PyResult<Py<PyAny>> {
    let Some(torch) = torch(py)? else { return to_tensor(py, &grant.aligned_view()?) };
    if let GrantedSlots::Tensor(view) = grant.granted() {
        return torch.import(py, view);
    }
    let Some(import) = torch.importer() else { return torch.import(py, &grant.aligned_view()?) };
    match grant.take_export() {
        Some(export) => import(py, export.into_managed()),
        None => torch.import(py, &grant.aligned_view()?),
    }
}

/// Works like [`to_tensor`], for a cached tensor, which may be returned again outside of inference mode: it
/// is never an inference tensor.
pub(super) fn to_lasting_tensor(py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
    match torch(py)? {
        Some(torch) => torch.import_outside(py, view),
        None => to_tensor(py, view),
    }
}

/// Returns whether `tensor` still equals a tensor that [`to_lasting_tensor`] would make of `view`.
pub(super) fn is_unchanged(tensor: &Bound<'_, PyAny>, view: &TensorView) -> bool {
    match torch(tensor.py()) {
        Ok(Some(torch)) => torch.is_unchanged(tensor, view).unwrap_or(false),
        // Without PyTorch it is a `kvpool.Tensor`, which is immutable.
        _ => tensor.cast::<Tensor>().is_ok_and(|tensor| tensor.get().view().is_same_view(view)),
    }
}

/// Returns whether the caller holds the only reference to `tensor`.
pub(super) fn has_single_reference(tensor: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the tensor is live, and the GIL is held.
    let references = unsafe { pyo3::ffi::Py_REFCNT(tensor.as_ptr()) };
    references == 1
}

/// Wraps two views as a tuple of tensors.
pub(super) fn to_tensors(py: Python<'_>, views: &[TensorView; 2]) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
    Ok((to_tensor(py, &views[0])?, to_tensor(py, &views[1])?))
}

impl Torch {
    /// Imports `view` as a tensor. On a device it is never an inference tensor, because PyTorch counts no
    /// writes to those.
    fn import(&self, py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
        if view.device() == Device::Cpu { self.import_now(py, view) } else { self.import_outside(py, view) }
    }

    /// Imports `view` as a tensor that is not an inference tensor.
    fn import_outside(&self, py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
        if !self.is_inference.bind(py).call0()?.is_truthy()? {
            return self.import_now(py, view);
        }
        let guard = self.module.bind(py).call_method1("inference_mode", (false,))?;
        guard.call_method0("__enter__")?;
        let tensor = self.import_now(py, view);
        guard.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
        tensor
    }

    fn import_now(&self, py: Python<'_>, view: &TensorView) -> PyResult<Py<PyAny>> {
        match &self.exchange {
            Exchange::Table(_) => match self.importer() {
                Some(import) => import(py, export_versioned(view)),
                None => unreachable!("a table without it is not used"),
            },
            Exchange::Capsules { from_capsule, .. } => self.import_capsule(py, from_capsule, view),
        }
    }

    /// Returns a function that makes a tensor of a managed one, if there is an exchange table.
    #[inline]
    fn importer(&self) -> Option<impl Fn(Python<'_>, NonNull<Versioned>) -> PyResult<Py<PyAny>> + use<>> {
        let import = self.table()?.object_from_managed?;
        Some(move |py: Python<'_>, managed: NonNull<Versioned>| {
            let mut object: *mut c_void = ptr::null_mut();
            // SAFETY: the GIL is held, `managed` is ours to give away, and `object` is room for one reference.
            if unsafe { import(managed.as_ptr(), &raw mut object) } != 0 {
                return Err(fetch(py));
            }
            // SAFETY: the function succeeded, so `object` is a new reference.
            Ok(unsafe { Bound::from_owned_ptr(py, object.cast()) }.unbind())
        })
    }

    /// Imports through a capsule, which every version reads.
    fn import_capsule(
        &self,
        py: Python<'_>,
        from_capsule: &Py<PyAny>,
        view: &TensorView,
    ) -> PyResult<Py<PyAny>> {
        let dtype = view.dtype();
        if !dtype.is_fp8() {
            return from_capsule.call1(py, (legacy_capsule(py, view)?,));
        }
        // Some PyTorch versions have 8-bit floats but cannot import them.
        let bytes = from_capsule.call1(py, (legacy_capsule(py, &view.reinterpret(DType::U8)?)?,))?;
        bytes.call_method1(py, "view", (self.dtype(py, dtype)?,))
    }

    /// Returns whether `tensor` still equals the tensor that [`to_lasting_tensor`] made of `view`: same
    /// shape, memory and class, and no gradients. Attributes that the caller added are not checked.
    fn is_unchanged(&self, tensor: &Bound<'_, PyAny>, view: &TensorView) -> PyResult<bool> {
        let is_plain = tensor.get_type_ptr() == self.tensor_type.as_ptr().cast();
        if !is_plain {
            return Ok(false);
        }
        let is_same = self.describe(tensor)?.is_view(view);
        if view.dtype().is_integer() {
            return Ok(is_same); // PyTorch lets these record nothing
        }
        Ok(is_same
            && !tensor.getattr(pyo3::intern!(tensor.py(), "requires_grad"))?.is_truthy()?
            && tensor.getattr(pyo3::intern!(tensor.py(), "grad"))?.is_none())
    }
}

/// Addresses, bytes, and bytes of a row of several buffers.
pub(super) type BufferLists = (Vec<usize>, Vec<usize>, Vec<usize>);

/// Buffers, as SGLang's pools describe theirs to transfer engines.
pub(super) fn buffer_lists(infos: impl Iterator<Item = BufferInfo>) -> BufferLists {
    infos.map(|info| (info.address, info.bytes, info.row_bytes)).collect()
}
