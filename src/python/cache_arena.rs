//! `kvpool.CacheArena`.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySequence};

use crate::base::{Error, try_with_capacity};
use crate::index::Slabs;
use crate::layout::{Plane, SlabOptions};
use crate::pool::{CacheArena as Pool, CacheArenaConfig};

use super::args::{self, Arg};
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::cache_layout::{CacheLayout, SlabLayout};
use super::debug::Debug;
use super::export::{BufferLists, buffer_lists, to_tensor};
use super::framework::{backend, current_stream};
use super::logging::Reporter;
use super::pool_name::PoolName;

/// Pages and states of all groups of a layout, in one region that is not split between them.
///
/// The region is cut into slabs of equal size. A slab belongs to one group while a unit in it is in use, then to whoever
/// needs it. Units never move. Every plane of every layer is one tensor over the whole region, in which a unit has the
/// same number in all layers, unless it is a state that is placed layer by layer (`slabs.by_layer`), which has a number
/// for each: kernels see a large page table with gaps in its numbers. Tensors of different groups overlap as
/// descriptions, never in units that are in use. The first slab is padding: unit 0 of every group is in it, and padded
/// tokens may be written there.
///
/// Units are numbers on the host, as those of `ReqToTokenPool` are. Calls are thread-safe and atomic, and make no CUDA
/// call, but for `copy`. The memory is zeroed at construction, on the stream that is current then; units are not zeroed
/// again.
///
/// Args:
///     layout: The groups that share the arena.
///     arena_bytes: Bytes of the arena; what is behind the last whole slab is not allocated.
///     device: Device of the memory.
///     floors: Slabs that other groups leave to a group, by its name.
///     granularity: What the bytes of a slab are a multiple of.
///     strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.
///
/// Raises:
///     ConfigError: If the arena is too small for the layout, or floors are more than there is.
///     OutOfMemoryError: If there is not enough memory.
///     BackendUnavailableError: If `device` is not available.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "CacheArena")]
pub(super) struct CacheArena {
    pub(super) pool: Arc<Pool>,
    reporter: Reporter,
}

impl PoolClass for CacheArena {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&*self.pool);
    }
}

impl CacheArena {
    /// Returns the number of a group.
    pub(super) fn group(&self, name: &str) -> PyResult<usize> {
        Ok(self.pool.layout().group_number(name)?)
    }

    /// Returns the groups and the numbers that `units` has by their names. Runs Python code, and only before anything
    /// is taken.
    fn named(&self, units: &Bound<'_, PyDict>) -> PyResult<Vec<(usize, usize)>> {
        let named = units.items().iter().map(|item| {
            let (name, count): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
            Ok((self.group(&name_of(&name)?)?, args::count("a number of units", &count)?))
        });
        named.collect()
    }

    /// Returns the number of units of each group that these name, 0 for the others.
    fn wanted(&self, named: &[(usize, usize)]) -> Vec<usize> {
        let mut wanted = vec![0; self.pool.layout().groups().len()];
        for &(group, count) in named {
            wanted[group] = count;
        }
        wanted
    }

    /// Returns taken units as lists, by the name of each group in `named`.
    fn lists<'py>(
        &self,
        py: Python<'py>,
        named: &[(usize, usize)],
        taken: &[Vec<u32>],
    ) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for &(group, _) in named {
            let (numbers, each) = (&taken[group], self.pool.numbers_of_unit(group));
            let list = if self.pool.slabs().groups()[group].by_layer {
                let mut lists = try_with_capacity(numbers.len() / each)?;
                for numbers in numbers.chunks(each) {
                    lists.push(PyList::new(py, numbers)?);
                }
                PyList::new(py, lists)?
            } else {
                PyList::new(py, numbers)?
            };
            found.set_item(self.pool.layout().groups()[group].name(), list)?;
        }
        Ok(found)
    }
}

/// Returns the numbers of units, as ints or, for states that are placed layer by layer, as lists of them.
pub(super) fn flattened<'py>(units: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let Ok(lists) = units.cast::<PyList>() else { return Ok(units.clone()) };
    if !lists.iter().next().is_some_and(|first| first.is_instance_of::<PyList>()) {
        return Ok(units.clone());
    }
    let flat = PyList::empty(units.py());
    for list in lists {
        flat.as_sequence().in_place_concat(list.cast::<PySequence>()?)?;
    }
    Ok(flat.into_any())
}

pub(super) fn name_of(name: &Bound<'_, PyAny>) -> PyResult<String> {
    name.extract()
        .map_err(|_| PyTypeError::new_err(format!("a group is named by a str, not {}", args::kind_of(name))))
}

#[pymethods]
impl CacheArena {
    #[new]
    #[pyo3(signature = (layout, arena_bytes, device=None, *, floors=None, granularity=Arg::Missing, strict=false),
           text_signature = "(layout, arena_bytes, device=\"cuda\", *, floors=None, granularity=1, strict=False)")]
    fn new(
        py: Python<'_>,
        layout: PyRef<'_, CacheLayout>,
        arena_bytes: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        floors: Option<&Bound<'_, PyDict>>,
        granularity: Arg<'_>,
        strict: bool,
    ) -> PyResult<PyClassInitializer<Self>> {
        let layout = layout.layout().clone();
        let mut by_group = vec![0; layout.groups().len()];
        for item in floors.map(PyDictMethods::items).iter().flatten() {
            let (name, slabs): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
            by_group[layout.group_number(&name_of(&name)?)?] = args::size("a floor", &slabs)?;
        }
        let slabs =
            SlabOptions { granularity: granularity.size("granularity", 1)?, ..SlabOptions::default() };
        let arena_bytes = args::size("arena_bytes", arena_bytes)?;
        let config = CacheArenaConfig { layout, arena_bytes, floors: by_group, slabs, strict };
        let backend = backend(py, args::device(py, device)?)?;
        let pool = Arc::new(py.detach(|| Pool::new(&config, &backend))?);
        let name = PoolName::next("CacheArena");
        let pool = Self { pool, reporter: Reporter::new(&name) };
        Ok(BasePool::named(name, Debug::OFF, pool))
    }

    /// Takes units of several groups, or none: those of the fullest slabs first. Where a prefix cache has to give units up
    /// that are being copied to its tier, the call waits for that copy.
    ///
    /// Args:
    ///     units: Numbers of units by the name of the group.
    ///
    /// Returns:
    ///     The numbers of the units, by the name of each group that `units` names, or None if one of them is short. A
    ///     state that is placed layer by layer (`slabs.by_layer`) has a list of numbers, one a layer.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group, or a number is negative.
    fn alloc<'py>(
        &self,
        py: Python<'py>,
        units: &Bound<'py, PyDict>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let named = self.named(units)?;
        let Some(taken) = self.pool.alloc(&self.wanted(&named))? else { return Ok(None) };
        let lists = self.lists(py, &named, &taken);
        if lists.is_err() {
            // Nobody else has these units.
            for (group, numbers) in taken.iter().enumerate() {
                let numbers: Vec<i64> = numbers.iter().map(|&number| number.into()).collect();
                let _ = self.pool.free(group, &numbers);
            }
        }
        lists.map(Some)
    }

    /// Returns whether `alloc` of these units would succeed.
    ///
    /// Raises:
    ///     ArgumentError: As `alloc`.
    fn fits(&self, units: &Bound<'_, PyDict>) -> PyResult<bool> {
        Ok(self.pool.fits(&self.wanted(&self.named(units)?))?)
    }

    /// Frees units of a group. A slab whose last unit is freed can be any group's.
    ///
    /// Args:
    ///     group: Name of the group.
    ///     units: Their numbers: ints, a tensor or array of them, of any shape, whose values are on the host, or what
    ///         `alloc` gave for the group.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    ///     IndexOwnershipError: If the arena is strict and a number is not in use, or named twice. Nothing is changed.
    fn free(&self, py: Python<'_>, group: &str, units: &Bound<'_, PyAny>) -> PyResult<()> {
        let number = self.group(group)?;
        let units: Vec<i64> = args::indices(&flattened(units)?)?.values(py)?.iter().collect();
        let bad = self.pool.free(number, &units)?;
        self.reporter.bad_frees(py, &bad, "unit", units.len(), Debug::OFF);
        Ok(())
    }

    /// Copies whole units of a group, `src[i]` to `dst[i]`, as if all were read before any is written: the state of a
    /// request to a snapshot, say. On a GPU it is one launch on the current stream.
    ///
    /// Nothing is copied if the call raises.
    ///
    /// Args:
    ///     group: Name of the group.
    ///     dst: The units that are written, as `free` takes them.
    ///     src: The units that are read, as many.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group, the numbers of units differ, or there are more than 8192. A state
    ///         that is placed layer by layer counts once for each layer.
    ///     IndexError: If there is no such unit in `src`.
    ///     IndexOwnershipError: If a unit of `dst` is not in use, or is a planner's or a prefix cache's.
    ///     DriverError: If a driver call fails, or the stream is being captured.
    fn copy(
        &self,
        py: Python<'_>,
        group: &str,
        dst: &Bound<'_, PyAny>,
        src: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let number = self.group(group)?;
        let units = |units: &Bound<'_, PyAny>| -> PyResult<Vec<i64>> {
            Ok(args::indices(&flattened(units)?)?.values(py)?.iter().collect())
        };
        let (dst, src) = (units(dst)?, units(src)?);
        let stream = current_stream(py, self.pool.device())?;
        Ok(self.pool.copy(number, &dst, &src, stream)?)
    }

    /// Frees all units of all groups, those of prefix caches and planners too: their leases end. Waits for loads from a tier
    /// that are copying to some of them.
    fn clear(&self) {
        self.pool.clear();
    }

    /// Returns a plane of a layer as one tensor over the arena, without a copy.
    ///
    /// Args:
    ///     group: Name of the group.
    ///     plane: Name of the plane.
    ///     layer: Layer of the model; an alias gives the entries that it reads.
    ///
    /// Returns:
    ///     `[units, entries, *shape]`, or `[units, *shape]` for states; one tensor for all layers of a state that is placed
    ///     layer by layer. Dimension 0 is indexed by the numbers of units; its stride is the bytes of a unit, larger where
    ///     planes lie side by side. Units of other groups are in it too: do not write where this group has none.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group or plane.
    ///     IndexError: If the group has no such layer.
    fn buffer(
        &self,
        py: Python<'_>,
        group: &str,
        plane: &str,
        layer: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let number = self.group(group)?;
        let planes = self.pool.layout().groups()[number].planes();
        let found = planes.iter().position(|known| known.name() == plane).ok_or_else(|| {
            let names: Vec<_> = planes.iter().map(Plane::name).collect();
            Error::argument(format!(
                "group {group} has no plane {plane:?}; its planes are {}",
                names.join(", ")
            ))
        })?;
        to_tensor(py, &self.pool.buffer(number, found, args::size("layer", layer)?)?)
    }

    /// Returns what a group has: `slabs`, `in_use`, `ready` (free units in its slabs), `available` (units that it could
    /// take now), `high_water` and `dropped_frees`, all but the first in units; in units of single layers, if the group
    /// is placed layer by layer.
    ///
    /// Raises:
    ///     ArgumentError: If there is no such group.
    fn group_stats<'py>(&self, py: Python<'py>, group: &str) -> PyResult<Bound<'py, PyDict>> {
        let (counts, available) = self.pool.group_counts(self.group(group)?)?;
        let stats = PyDict::new(py);
        stats.set_item("slabs", counts.slabs)?;
        stats.set_item("in_use", counts.in_use)?;
        stats.set_item("ready", counts.ready)?;
        stats.set_item("available", available)?;
        stats.set_item("high_water", counts.high_water)?;
        stats.set_item("dropped_frees", counts.dropped_frees)?;
        Ok(stats)
    }

    /// Checks the bookkeeping.
    ///
    /// Raises:
    ///     StateError: If it is inconsistent.
    fn verify(&self) -> PyResult<()> {
        Ok(self.pool.verify()?)
    }

    /// Returns the addresses, the bytes and the bytes of an item of the memory, for transfer engines: one buffer, whose
    /// items are slabs.
    fn get_contiguous_buf_infos(&self) -> BufferLists {
        buffer_lists(self.pool.buffer_infos())
    }

    /// Bytes of all slabs.
    fn mem_bytes(&self) -> usize {
        self.pool.mem_bytes()
    }

    /// The groups that share the arena.
    #[getter]
    fn layout(&self) -> CacheLayout {
        CacheLayout::new_of(self.pool.layout().clone())
    }

    /// Bytes that the arena was asked for; `mem_bytes()` is those of whole slabs.
    #[getter]
    fn arena_bytes(&self) -> usize {
        self.pool.config().arena_bytes
    }

    /// Slabs that other groups leave to a group, by its name.
    #[getter]
    fn floors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let floors = PyDict::new(py);
        for (group, slabs) in self.pool.layout().groups().iter().zip(&self.pool.config().floors) {
            if *slabs > 0 {
                floors.set_item(group.name(), slabs)?;
            }
        }
        Ok(floors)
    }

    /// What the bytes of a slab are a multiple of.
    #[getter]
    fn granularity(&self) -> usize {
        self.pool.config().slabs.granularity
    }

    /// How often the arena was cleared: units from before the last time are somebody else's.
    #[getter]
    fn clears(&self) -> u64 {
        self.pool.clears()
    }

    /// Number of slabs that no group has.
    #[getter]
    fn slabs_free(&self) -> usize {
        self.pool.with_slabs(Slabs::empty)
    }

    /// How the groups lie in slabs.
    #[getter]
    fn slabs(&self) -> SlabLayout {
        SlabLayout::of(self.pool.layout().clone(), self.pool.slabs().clone())
    }

    fn __repr__(&self) -> String {
        format!(
            "CacheArena({} slabs of {} bytes, device='{}')",
            self.pool.slabs().slabs(),
            self.pool.slabs().slab_bytes(),
            self.pool.device()
        )
    }
}
