//! Stores as arguments.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::base::Error;
use crate::pool::{LowerStore, Store};

use super::args;
use super::file_store::FileStore;
use super::store_queue::StoreQueue;

/// A store as its user gave it.
enum StoreArg<'a, 'py> {
    Files(&'a Bound<'py, FileStore>),
    Python { store: &'a Bound<'py, PyAny>, queue: Bound<'py, StoreQueue> },
}

impl<'a, 'py> StoreArg<'a, 'py> {
    fn of(object: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(files) = object.cast::<FileStore>() {
            return Ok(Self::Files(files));
        }
        let queue = object.getattr_opt("_queue")?.and_then(|queue| queue.cast_into::<StoreQueue>().ok());
        let queue = queue.ok_or_else(|| {
            let kind = args::kind_of(object);
            PyTypeError::new_err(format!("tiers[1] must be a FileStore or another Store, not {kind}"))
        })?;
        Ok(Self::Python { store: object, queue })
    }

    /// Returns the store, after telling it the memory of the tier above it: the address and the bytes of each region.
    fn attached(self, memory: Vec<(usize, usize)>) -> PyResult<Arc<dyn Store>> {
        match self {
            Self::Files(files) => Ok(Arc::clone(&files.get().store) as _),
            Self::Python { store, queue } => {
                store.call_method1("attach", (memory,))?;
                Ok(Arc::clone(&queue.get().store) as _)
            }
        }
    }
}

/// Returns the store below a tier with this memory, if one is given.
///
/// # Errors
/// A `ConfigError` if only one of store and model is given.
pub(super) fn lower_store(
    store: Option<&Bound<'_, PyAny>>,
    model: Option<&str>,
    memory: impl FnOnce() -> Vec<(usize, usize)>,
) -> PyResult<Option<LowerStore>> {
    match (store.map(StoreArg::of).transpose()?, model) {
        (None, None) => Ok(None),
        (Some(store), Some(model)) => {
            Ok(Some(LowerStore { store: store.attached(memory())?, model: model.to_owned() }))
        }
        (Some(_), None) => {
            Err(Error::config("a store needs the name of the model whose pages it has: model").into())
        }
        (None, Some(model)) => {
            let text = format!("model is {model:?}, but there is no store whose pages it would name");
            Err(Error::config(text).into())
        }
    }
}
