//! `kvpool.Pool`, what all pools have in common.

use std::collections::HashMap;
use std::sync::Mutex;

use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyDict, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::base::{Device, Error};
pub(super) use crate::pool::Pool as Contract;

use super::debug::{self, Debug, OccupancyTuple};
use super::framework::current_stream;
use super::{args, lock};

/// The pools that were made and live, and maybe some that do no more.
static POOLS: Mutex<Vec<Py<PyWeakrefReference>>> = Mutex::new(Vec::new());

/// Gives the module of `kvpool` that reports on leaks.
static LEAKS_MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Is called with a pool.
pub(super) type Look<'a> = &'a mut dyn FnMut(&dyn Contract);

/// What a class of pools has to say for the methods of [`Pool`].
pub(super) trait PoolClass:
    PyClass<BaseType = BasePool, Frozen = pyo3::pyclass::boolean_struct::True> + Sync
{
    /// Calls `look` with the pool, under its lock if it has one.
    fn look(&self, look: Look<'_>);

    /// What is due before its numbers are read.
    fn before_stats(&self, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }

    /// What is due before its units are looked at.
    fn before_occupancy(&self, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }
}

/// What all pools have in common: a name, numbers (`stats()`), and who holds what.
///
/// Cannot be made itself: see `KVPool`, `TokenToKVPoolAllocator`, `ReqToTokenPool`, `GDNPool`, `ChunkPool`, `BufferPool`,
/// `PagePool` and `Workspace`.
#[pyclass(frozen, subclass, weakref, module = "kvpool", name = "Pool")]
pub(super) struct BasePool {
    name: Mutex<String>,
    unit: &'static str,
    hands_out: bool,
    debug: Debug,
    class: Class,
}

/// The methods of a [`PoolClass`], as functions of the common part.
struct Class {
    look: fn(&Bound<'_, BasePool>, Look<'_>),
    before_stats: fn(&Bound<'_, BasePool>) -> PyResult<()>,
    before_occupancy: fn(&Bound<'_, BasePool>) -> PyResult<()>,
}

impl Class {
    const fn of<C: PoolClass>() -> Self {
        Self {
            look: |slf, look| class::<C>(slf).look(look),
            before_stats: |slf| class::<C>(slf).before_stats(slf.py()),
            before_occupancy: |slf| class::<C>(slf).before_occupancy(slf.py()),
        }
    }
}

fn class<'a, C: PoolClass>(slf: &'a Bound<'_, BasePool>) -> &'a C {
    slf.cast::<C>().expect("made by `initializer` together with its class").get()
}

impl BasePool {
    /// A pool of Python, with its common part. It is named after `name`.
    pub(super) fn initializer<C: PoolClass>(
        name: &'static str,
        debug: Debug,
        pool: C,
    ) -> PyClassInitializer<C> {
        static MADE: Mutex<Option<HashMap<&'static str, usize>>> = Mutex::new(None);
        let (mut unit, mut hands_out) = ("", false);
        pool.look(&mut |pool| (unit, hands_out) = (pool.unit(), pool.hands_out()));
        let mut made = lock(&MADE);
        let number = made.get_or_insert_default().entry(name).or_default();
        let name = Mutex::new(format!("{name}-{number}"));
        *number += 1;
        PyClassInitializer::from(Self { name, unit, hands_out, debug, class: Class::of::<C>() })
            .add_subclass(pool)
    }

    /// What `look` says of the pool.
    fn look<R: Default>(slf: &Bound<'_, Self>, look: impl Fn(&dyn Contract) -> R) -> R {
        let mut answer = R::default();
        (slf.get().class.look)(slf, &mut |pool| answer = look(pool));
        answer
    }

    /// What the function `name` of the module that reports on leaks answers of this pool.
    fn reported<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let reporter =
            LEAKS_MODULE.get(py).expect("`kvpool/__init__.py` registers it before a pool can be made");
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
    let _ = LEAKS_MODULE.set(py, reporter);
}

/// All pools of this process that are alive, in the order in which they were made.
#[pyfunction]
pub(super) fn _pools(py: Python<'_>) -> Vec<Bound<'_, PyAny>> {
    let known: Vec<_> = lock(&POOLS).iter().map(|pool| pool.clone_ref(py)).collect();
    known.iter().filter_map(|pool| pool.bind(py).upgrade()).collect()
}

#[pymethods]
impl BasePool {
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

    /// Where its memory or its index tensors are, as PyTorch writes it.
    #[getter]
    fn device(slf: &Bound<'_, Self>) -> String {
        Self::look(slf, |pool| pool.device().to_string())
    }

    /// Whether a bad free raises.
    #[getter]
    fn strict(slf: &Bound<'_, Self>) -> bool {
        Self::look(slf, |pool| pool.strict())
    }

    /// The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
    /// memory; of the bookkeeping where the pool has no memory of its own.
    ///
    /// Of some classes there is more:
    ///
    /// - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
    ///   but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
    ///   strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
    /// - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
    /// - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
    ///   `stale_uses`, calls with a buffer that had been given back.
    /// - `Workspace`: no `dropped_frees`.
    /// - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
    fn stats<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        (slf.get().class.before_stats)(slf)?;
        Self::look(slf, |pool| pool.stats()).iter().into_py_dict(slf.py())
    }

    /// What stands in the pool: (first, end, state, bytes, holders) of each span, and lifetimes.
    fn _occupancy<'py>(slf: &Bound<'py, Self>) -> PyResult<OccupancyTuple<'py>> {
        (slf.get().class.before_occupancy)(slf)?;
        debug::occupancy(slf.py(), Self::look(slf, |pool| pool.occupancy()))
    }

    /// Whether it hands units out, which are free or in use.
    #[getter]
    const fn _hands_out(&self) -> bool {
        self.hands_out
    }

    /// Bytes of a unit; `None` where it has no memory, or units of several sizes.
    #[getter]
    fn _unit_bytes(slf: &Bound<'_, Self>) -> Option<usize> {
        Self::look(slf, |pool| pool.unit_bytes())
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
