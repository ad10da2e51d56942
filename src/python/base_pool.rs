//! `kvpool.Pool`, the base class of every pool.

use std::sync::{Mutex, OnceLock};

use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyWeakrefMethods, PyWeakrefReference};

use crate::base::{Device, Error};
use crate::memory::MemoryLimit;
pub(super) use crate::pool::Pool as Contract;

use super::debug::{self, Debug, OccupancyTuple};
use super::framework::current_stream;
use super::pickling::refuse;
use super::pool_name::PoolName;
use super::{args, lock, logging};

/// Every pool that is alive, and possibly some that are not.
static POOLS: Mutex<Vec<Py<PyWeakrefReference>>> = Mutex::new(Vec::new());

/// The module of `kvpool` that reports leaks; imported at the first report.
static LEAKS_MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// A function that reads a pool.
pub(super) type PoolVisitor<'a> = &'a mut dyn FnMut(&dyn Contract);

/// The functions that a pool class supplies for the methods of [`BasePool`].
pub(super) trait PoolClass:
    PyClass<BaseType = BasePool, Frozen = pyo3::pyclass::boolean_struct::True> + Sync
{
    /// Calls `visitor` with the pool, under its lock if it has one.
    fn visit(&self, visitor: PoolVisitor<'_>);

    /// Runs before `stats()` reads the numbers.
    fn before_stats(&self, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }

    /// Runs before the units are listed.
    fn before_occupancy(&self, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }
}

/// The base class of every pool: a name, statistics (`stats()`), and the owners of its units.
///
/// Not constructed directly: see `KVPool`, `TokenToKVPoolAllocator`, `ReqToTokenPool`, `GDNPool`, `CacheArena`,
/// `ChunkPool`, `BufferPool`, `PagePool`, `Workspace`, `PrefixCache`, `ArenaPrefixCache` and `HostTier`.
///
/// A pool cannot be pickled or copied: `pickle` and `copy` raise `TypeError`. `KVPool`,
/// `TokenToKVPoolAllocator` and `ReqToTokenPool` can be base classes of Python classes. As with `tuple`,
/// their arguments go to `__new__`; `__init__` takes any, and lists the pool in `kvpool.pools()`. kvpool's
/// own classes never call methods that a Python class overrides.
#[pyclass(frozen, subclass, weakref, module = "kvpool", name = "Pool")]
pub(super) struct BasePool {
    name: PoolName,
    unit: &'static str,
    hands_out: bool,
    debug: Debug,
    /// The names of the statistics.
    names: OnceLock<Vec<Py<PyString>>>,
    class: Class,
}

/// The methods of a [`PoolClass`], as functions of the base.
struct Class {
    visit: fn(&Bound<'_, BasePool>, PoolVisitor<'_>),
    before_stats: fn(&Bound<'_, BasePool>) -> PyResult<()>,
    before_occupancy: fn(&Bound<'_, BasePool>) -> PyResult<()>,
}

impl Class {
    const fn of<C: PoolClass>() -> Self {
        Self {
            visit: |slf, visitor| class::<C>(slf).visit(visitor),
            before_stats: |slf| class::<C>(slf).before_stats(slf.py()),
            before_occupancy: |slf| class::<C>(slf).before_occupancy(slf.py()),
        }
    }
}

fn class<'a, C: PoolClass>(slf: &'a Bound<'_, BasePool>) -> &'a C {
    slf.cast::<C>().expect("made by `initializer` together with its class").get()
}

impl BasePool {
    /// Creates a Python object of class `C` with its base. The pool is called `name` and a number.
    pub(super) fn initializer<C: PoolClass>(
        name: &'static str,
        debug: Debug,
        pool: C,
    ) -> PyClassInitializer<C> {
        Self::named(PoolName::next(name), debug, pool)
    }

    /// Works like [`Self::initializer`], with the whole name of the pool.
    pub(super) fn named<C: PoolClass>(name: PoolName, debug: Debug, pool: C) -> PyClassInitializer<C> {
        let (mut unit, mut hands_out) = ("", false);
        pool.visit(&mut |pool| (unit, hands_out) = (pool.unit(), pool.hands_out()));
        PyClassInitializer::from(Self {
            name,
            unit,
            hands_out,
            debug,
            names: OnceLock::new(),
            class: Class::of::<C>(),
        })
        .add_subclass(pool)
    }

    /// Calls `read` with the pool and returns the result.
    fn read<R: Default>(slf: &Bound<'_, Self>, read: impl Fn(&dyn Contract) -> R) -> R {
        let mut answer = R::default();
        (slf.get().class.visit)(slf, &mut |pool| answer = read(pool));
        answer
    }

    /// Warns if the pool has more host memory than the process may use: it is made nevertheless, because memory
    /// counts when it is touched.
    fn check_memory(slf: &Bound<'_, Self>) {
        let (device, bytes) =
            Self::read(slf, |pool| Some((pool.device(), pool.stats().get("bytes")?))).unzip();
        if device != Some(Device::Cpu) {
            return;
        }
        let bytes = bytes.map_or(0, |bytes| bytes as u64);
        let Some(limit) = MemoryLimit::now().filter(|limit| bytes > limit.bytes()) else { return };
        let whose = match limit {
            MemoryLimit::Container(_) => "memory limit of this container",
            MemoryLimit::Machine(_) => "memory of this machine",
        };
        let (name, own, most) = (slf.get().name(), mebibytes(bytes), mebibytes(limit.bytes()));
        logging::warn(
            slf.py(),
            &format!(
                "{name} has {own} MiB, more than the {whose}, {most} MiB: when it has touched as much, the system kills the process without an error"
            ),
        );
    }

    /// Calls function `name` of the module that reports leaks with this pool.
    fn reported<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let reporter =
            LEAKS_MODULE.get(py).expect("`kvpool/__init__.py` registers it before a pool can be made");
        reporter.bind(py).call0()?.call_method1(name, (slf,))
    }
}

/// Returns a number of bytes in MiB, rounded down.
const fn mebibytes(bytes: u64) -> u64 {
    bytes >> 20
}

/// Registers a function that returns the module with `leaks` and `ExpectBalanced`.
///
/// Args:
///     reporter: Called for each report, so that the first report imports the module.
#[pyfunction]
pub(super) fn _report_leaks_with(py: Python<'_>, reporter: Py<PyAny>) {
    // A later call passes the same function of a reloaded module.
    let _ = LEAKS_MODULE.set(py, reporter);
}

/// The pools of this process that are alive, in the order of their construction.
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
        let known: Vec<_> = {
            let mut pools = lock(&POOLS);
            // A pool is listed once, however often it is initialised: it has one weak reference without a callback.
            if pools.iter().any(|pool| pool.is(&this)) {
                return Ok(());
            }
            if pools.len() < pools.capacity() {
                pools.push(this);
                drop(pools);
                Self::check_memory(slf);
                return Ok(());
            }
            pools.iter().map(|pool| pool.clone_ref(py)).collect()
        };
        // Dropped pools are removed before the list grows. They are looked for without the lock: the last reference
        // to a pool may be dropped here.
        let gone: Vec<_> = known.iter().filter(|pool| pool.bind(py).upgrade().is_none()).collect();
        let mut pools = lock(&POOLS);
        pools.retain(|pool| !gone.iter().any(|gone| pool.is(*gone)));
        pools.push(this);
        drop(pools);
        Self::check_memory(slf);
        Ok(())
    }

    /// Raises, also for a class derived in Python, whose objects `copyreg` does not refuse.
    fn __reduce_ex__(slf: &Bound<'_, Self>, _protocol: &Bound<'_, PyAny>) -> PyResult<()> {
        refuse(slf)
    }

    /// The name of the pool in metrics and reports. Defaults to the class name and a number, such as
    /// "KVPool-0". In metrics, pools of one class with the same name count as one.
    #[getter]
    fn name(&self) -> String {
        self.name.to_string()
    }

    #[setter]
    fn set_name(&self, name: String) {
        self.name.set(name);
    }

    /// The unit that the pool hands out, such as "slot".
    #[getter]
    const fn unit(&self) -> &'static str {
        self.unit
    }

    /// The device of the memory or the index tensors, in PyTorch's notation, such as "cuda:0".
    #[getter]
    fn device(slf: &Bound<'_, Self>) -> String {
        Self::read(slf, |pool| pool.device().to_string())
    }

    /// Whether an invalid free raises instead of being dropped, counted and reported.
    #[getter]
    fn strict(slf: &Bound<'_, Self>) -> bool {
        Self::read(slf, |pool| pool.strict())
    }

    /// Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
    /// `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
    /// out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
    /// `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
    fn stats<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        (slf.get().class.before_stats)(slf)?;
        let (py, stats) = (slf.py(), Self::read(slf, |pool| pool.stats()));
        // The names of a class stay the same, and making them costs more than the numbers.
        let make = || stats.iter().map(|(name, _)| PyString::intern(py, name).unbind()).collect();
        let names: &Vec<_> = slf.get().names.get_or_init(make);
        let dict = PyDict::new(py);
        for (name, (_, value)) in names.iter().zip(stats.iter()) {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// The spans of the pool, each as (first, end, state, bytes, holders), and the histogram of lifetimes.
    fn _occupancy<'py>(slf: &Bound<'py, Self>) -> PyResult<OccupancyTuple<'py>> {
        (slf.get().class.before_occupancy)(slf)?;
        debug::occupancy(slf.py(), Self::read(slf, |pool| pool.occupancy()))
    }

    /// Whether the pool hands out units, which are then free or in use.
    #[getter]
    const fn _hands_out(&self) -> bool {
        self.hands_out
    }

    /// Bytes of one unit. `None` if the pool has no memory or its units differ in size.
    #[getter]
    fn _unit_bytes(slf: &Bound<'_, Self>) -> Option<usize> {
        Self::read(slf, |pool| pool.unit_bytes())
    }

    /// Whether the pool records owners and call sites: `debug=True`, or `KVPOOL_DEBUG=1` in the environment
    /// at construction.
    #[getter]
    const fn debug(&self) -> bool {
        self.debug.is_on()
    }

    /// Records that work on a stream uses memory of a pool. The memory returns to the driver only after that
    /// work, even if the pool and its tensors are dropped first.
    ///
    /// kvpool's own calls record their streams; call this for your own kernels and for every stream on which
    /// you replay a CUDA graph. `Tensor.record_stream` has no effect on memory that PyTorch does not own.
    ///
    /// Args:
    ///     tensor: A tensor over pool memory that a GPU can access: on the GPU, or page-locked.
    ///     stream: A `torch.cuda.Stream`, an object with `__cuda_stream__` (`cuda.core`, CuPy, Numba), or a stream
    ///         handle; not 2, the default stream of the calling thread, for which no other thread can wait. Defaults
    ///         to the current stream of the tensor's device. It must outlive the pool. It may be a stream of another
    ///         GPU that accesses the memory, if it is an object that says so. A handle names a stream of the tensor's
    ///         GPU or, for host memory, of PyTorch's current GPU; without PyTorch, of the first GPU.
    ///
    /// Raises:
    ///     ArgumentError: If the memory does not belong to a pool that a GPU can access, or is host memory and
    ///         `stream` is omitted; if `stream` is 2.
    ///     DriverError: If the GPU has no such stream.
    #[pyo3(signature = (tensor, stream=None))]
    fn used_on(
        _slf: &Bound<'_, Self>,
        tensor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let given = args::tensor("tensor", tensor)?;
        let borrowed = given.borrow()?;
        let stream = match (stream, borrowed.device()) {
            (Some(stream), device) => args::stream(stream, device)?,
            (None, Device::Cpu) => {
                return Err(Error::argument("name the stream that uses host memory").into());
            }
            (None, device) => current_stream(tensor.py(), device)?,
        };
        let users = borrowed.users();
        let users = users
            .ok_or_else(|| Error::argument("the tensor is over no memory of a pool that a GPU reaches"))?;
        Ok(users.keep(stream)?)
    }

    /// Lists live units by owner and call site, largest count first, and after them those that only a prefix
    /// cache holds.
    ///
    /// A unit with several owners counts once for each. Units that wait for a fence are not live.
    ///
    /// Returns:
    ///     A list of `kvpool.Leak`: `owner`, `site`, `count`, `age_s` (age of the oldest unit in seconds),
    ///     `spans`, the units as (first, end) pairs, and `state`: "live", or for units that a prefix cache
    ///     alone holds "evictable" or, with leases, "locked".
    ///
    /// Raises:
    ///     StateError: If the pool does not debug.
    ///     TypeError: If the pool hands nothing out, or is a `Workspace`, which records no owners.
    fn leaks<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::reported(slf, "leaks")
    }

    /// The pool as a notebook shows it: how full it is, its statistics and, if it debugs, the owners of its units.
    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::reported(slf, "to_html")
    }

    /// Returns a context manager that checks that no more units are live at exit than at entry. An exception
    /// of the body propagates unchanged. If the pool debugs, a unit with several owners counts once for each.
    ///
    /// Raises:
    ///     IndexOwnershipError: At exit, if more units are live. The message has their number and, if the
    ///         pool debugs, a table of the units taken in the body.
    ///     TypeError: If the pool hands nothing out.
    fn expect_balanced<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::reported(slf, "ExpectBalanced")
    }
}
