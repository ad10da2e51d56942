//! `kvpool.Pool`, what all pools have in common.

use std::collections::HashMap;
use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::base::{Device, Error};

use super::debug::Debug;
use super::framework::current_stream;
use super::{args, lock};

/// The pools that were made and live, and maybe some that do no more.
static POOLS: Mutex<Vec<Py<PyWeakrefReference>>> = Mutex::new(Vec::new());

/// Gives the module of `kvpool` that reports on leaks.
static REPORTER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// What all pools have in common: a name, numbers (`stats()`), and who holds what.
///
/// Cannot be made itself: see `KVPool`, `TokenToKVPoolAllocator`, `ReqToTokenPool`, `GDNPool`, `ChunkPool`, `BufferPool`,
/// `PagePool` and `Workspace`.
#[pyclass(frozen, subclass, weakref, module = "kvpool", name = "Pool")]
pub(super) struct Pool {
    name: Mutex<String>,
    unit: &'static str,
    debug: Debug,
}

impl Pool {
    /// The common part of a pool of `class`, which hands out `unit`s.
    pub(super) fn new(class: &'static str, unit: &'static str, debug: Debug) -> Self {
        static MADE: Mutex<Option<HashMap<&'static str, usize>>> = Mutex::new(None);
        let mut made = lock(&MADE);
        let number = made.get_or_insert_default().entry(class).or_default();
        let name = format!("{class}-{number}");
        *number += 1;
        Self { name: Mutex::new(name), unit, debug }
    }

    /// What the function `name` of the module that reports on leaks answers of this pool.
    fn reported<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let reporter = REPORTER.get(py).expect("`kvpool/__init__.py` registers it before a pool can be made");
        reporter.bind(py).call0()?.call_method1(name, (slf,))
    }
}

/// Registers a function that gives the module with `leaks` and `ExpectBalanced`.
///
/// Args:
///     reporter: Called for each report, so that the module is imported by the first.
#[pyfunction]
pub(super) fn _report_leaks_with(py: Python<'_>, reporter: Py<PyAny>) {
    // Later ones are the same function of a module that was reloaded.
    let _ = REPORTER.set(py, reporter);
}

/// All pools of this process that are alive, in the order in which they were made.
#[pyfunction]
pub(super) fn _pools(py: Python<'_>) -> Vec<Bound<'_, PyAny>> {
    let known: Vec<_> = lock(&POOLS).iter().map(|pool| pool.clone_ref(py)).collect();
    known.iter().filter_map(|pool| pool.bind(py).upgrade()).collect()
}

#[pymethods]
impl Pool {
    #[pyo3(signature = (*_arguments, **_more))]
    fn __init__(
        slf: &Bound<'_, Self>,
        _arguments: &Bound<'_, PyTuple>,
        _more: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let py = slf.py();
        let this = PyWeakrefReference::new(slf)?.unbind();
        let mut pools = lock(&POOLS);
        // Before the list grows, those that are gone make room. With the GIL held, no pool dies in here.
        if pools.len() == pools.capacity() {
            pools.retain(|pool| pool.bind(py).upgrade().is_some());
        }
        pools.push(this);
        Ok(())
    }

    /// How metrics and reports name it: its class and a number, unless it is set. Pools whose metrics are exported need
    /// names of their own.
    #[getter]
    fn name(&self) -> String {
        lock(&self.name).clone()
    }

    #[setter]
    fn set_name(&self, name: String) {
        *lock(&self.name) = name;
    }

    /// What it hands out, such as "slot".
    #[getter]
    const fn unit(&self) -> &'static str {
        self.unit
    }

    /// Whether it notes who takes and gives what: `debug=True`, or `KVPOOL_DEBUG=1` in the environment of the constructor.
    #[getter]
    const fn debug(&self) -> bool {
        self.debug.is_on()
    }

    /// Notes that work of others on a stream uses memory of a pool, so that it goes back to the driver after that work only,
    /// also when pool and tensors are gone before. Calls of kvpool note it themselves. A CUDA graph uses memory wherever it is
    /// replayed; `Tensor.record_stream` has no effect on memory that is not PyTorch's own.
    ///
    /// Args:
    ///     tensor: A tensor over memory of a pool that a GPU reaches, on the GPU or page-locked.
    ///     stream: A `torch.cuda.Stream`, or the handle of a stream; by default the current one of the tensor's device. It must
    ///         live as long as the pool.
    ///
    /// Raises:
    ///     ConfigError: If the memory is none of a pool that a GPU reaches, or is in host memory and no stream is named.
    #[pyo3(signature = (tensor, stream=None))]
    fn used_on(
        _slf: &Bound<'_, Self>,
        tensor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let given = args::tensor("tensor", tensor)?;
        let borrowed = given.borrow()?;
        let stream = match (stream, borrowed.device()) {
            (Some(stream), _) => args::stream(stream)?,
            (None, Device::Cpu) => return Err(Error::config("name the stream that uses host memory").into()),
            (None, device) => current_stream(tensor.py(), device)?,
        };
        let users = borrowed.users();
        let users = users
            .ok_or_else(|| Error::config("the tensor is over no memory of a pool that a GPU reaches"))?;
        users.note(stream);
        Ok(())
    }

    /// Live units by owner and place in the program, the most first.
    ///
    /// A unit with several owners counts for each of them. What waits for a fence is not live.
    ///
    /// Returns:
    ///     A list of `kvpool.Leak`: `owner`, `site`, `count`, `age_s` of the oldest in seconds, and `spans`, the units as
    ///     (first, end).
    ///
    /// Raises:
    ///     ConfigError: If the pool does not debug.
    ///     TypeError: If the pool hands nothing out, or is a `Workspace`, of which nobody holds a part.
    fn leaks<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::reported(slf, "leaks")
    }

    /// A context manager at whose end no more units may be live than at its begin. What the body raises goes on as it is.
    /// Where the pool debugs, a unit with several owners counts for each of them.
    ///
    /// Raises:
    ///     IndexOwnershipError: At its end, if more are live: how many more and, where the pool debugs, a table of those that
    ///         were taken within it.
    ///     TypeError: If the pool hands nothing out.
    fn expect_balanced<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::reported(slf, "ExpectBalanced")
    }
}
