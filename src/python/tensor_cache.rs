//! A cache of tensor objects: creating one costs more than the rest of a call.

use std::sync::Mutex;

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::tensor::TensorView;

use super::export::{has_single_reference, is_unchanged, to_lasting_tensor};
use super::lock;

/// The tensor made last at each place. Most steps ask for the same tensors as the step before, and creating a
/// tensor costs more than the rest of the call. A tensor that is still referenced elsewhere or was changed is
/// not reused for another owner.
#[derive(Debug)]
pub(super) struct TensorCache<O>(Mutex<Vec<Option<CachedTensor<O>>>>);

#[derive(Debug)]
struct CachedTensor<O> {
    owner: O,
    tensor: Py<PyAny>,
}

impl<O: PartialEq> CachedTensor<O> {
    fn matches(&self, py: Python<'_>, owner: &O, view: &TensorView) -> bool {
        let tensor = self.tensor.bind(py);
        (self.owner == *owner || has_single_reference(tensor)) && is_unchanged(tensor, view)
    }
}

impl<O> Default for TensorCache<O> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<O: PartialEq> TensorCache<O> {
    /// Returns `view` as the tensor of place `at`. The same owner gets the same tensor. A new owner gets the
    /// tensor made there last if that tensor matches `view` and has no other references, and a new one
    /// otherwise.
    pub(super) fn tensor(
        &self,
        py: Python<'_>,
        at: usize,
        owner: O,
        view: &TensorView,
    ) -> PyResult<Py<PyAny>> {
        let before = lock(&self.0).get_mut(at).and_then(Option::take);
        let tensor = match &before {
            Some(made) if made.matches(py, &owner, view) => made.tensor.clone_ref(py),
            _ => to_lasting_tensor(py, view)?,
        };
        let made = CachedTensor { owner, tensor: tensor.clone_ref(py) };
        let mut tensors = lock(&self.0);
        if tensors.len() <= at {
            tensors.resize_with(at + 1, || None);
        }
        let after = tensors[at].replace(made);
        drop(tensors);
        // Dropping a tensor may run Python code, and is done without the lock.
        drop((before, after));
        Ok(tensor)
    }

    /// Drops the tensors whose owners `is_gone` names.
    pub(super) fn forget(&self, mut is_gone: impl FnMut(&O) -> bool) {
        let mut tensors = lock(&self.0);
        let gone: Vec<_> =
            tensors.iter_mut().filter_map(|made| made.take_if(|made| is_gone(&made.owner))).collect();
        drop(tensors);
        drop(gone);
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.0.try_lock() {
            Ok(tensors) => tensors.iter().flatten().try_for_each(|made| visit.call(&made.tensor)),
            Err(_) => Ok(()),
        }
    }
}
