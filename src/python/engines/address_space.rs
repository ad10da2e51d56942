//! `AddressSpace`: ranges of memory that others own.

use std::sync::{Mutex, MutexGuard};

use pyo3::exceptions::PyAssertionError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::index::{AddressSpace as Space, OnBadFree, on_bad_frees};

use crate::python::debug::Debug;
use crate::python::logging::Reporter;
use crate::python::pool_name::PoolName;
use crate::python::{args, with};

/// Records which byte ranges of some memory are taken. The lowest range that is long enough is handed out
/// first.
///
/// It hands out offsets from 0 on, and does not access the memory. Calls are atomic and thread-safe. Their
/// cost is one step for each 64 gaps.
///
/// Args:
///     capacity: Bytes, below 2**63.
///     alignment: Lengths are rounded up to a multiple of it, a power of two.
///     strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.
///
/// Raises:
///     ConfigError: If `capacity` is negative or too large, or `alignment` is no power of two.
#[pyclass(frozen, module = "kvpool._kvpool", name = "AddressSpace", weakref)]
pub(in crate::python) struct AddressSpace {
    space: Mutex<Space>,
    strict: bool,
    reporter: Reporter,
}

impl AddressSpace {
    fn lock(&self) -> MutexGuard<'_, Space> {
        lock(&self.space)
    }

    fn free(&self, py: Python<'_>, starts: &[usize], bytes: usize) -> PyResult<()> {
        let bad = with(&self.space, |space| {
            if self.strict {
                let bad = space.refused(starts, bytes);
                drop(on_bad_frees(bad, OnBadFree::Fail, "range", starts.len(), space.capacity())?);
            }
            Ok(space.give_back_many(starts, bytes))
        })?;
        self.reporter.bad_frees(py, &bad, "range", starts.len(), Debug::OFF);
        Ok(())
    }
}

#[pymethods]
impl AddressSpace {
    #[new]
    #[pyo3(signature = (capacity, *, alignment=args::Arg::Missing, strict=false),
           text_signature = "(capacity, *, alignment=1, strict=False)")]
    fn new(capacity: &Bound<'_, PyAny>, alignment: args::Arg<'_>, strict: bool) -> PyResult<Self> {
        let space = Space::new(args::count("capacity", capacity)?, alignment.size("alignment", 1)?)?;
        let reporter = Reporter::new(&PoolName::next("AddressSpace"));
        Ok(Self { space: Mutex::new(space), strict, reporter })
    }

    /// Takes a range.
    ///
    /// Args:
    ///     size: Bytes, at least 1, which are rounded up to the alignment.
    ///
    /// Returns:
    ///     Where it begins. `None` if no gap is long enough.
    ///
    /// Raises:
    ///     ArgumentError: If `size` is below 1.
    fn take(&self, size: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        let size = at_least_one(size)?;
        Ok(self.lock().take(size).map(|taken| taken.start))
    }

    /// Takes ranges of one size, or none of them.
    ///
    /// Args:
    ///     size: Bytes of each, as in `take`.
    ///     count: The number of ranges.
    ///
    /// Returns:
    ///     Where they begin, in order. `None` if the gaps do not hold all of them.
    ///
    /// Raises:
    ///     ArgumentError: If `size` is below 1, or `count` is negative.
    ///     OutOfMemoryError: If there is not enough memory for the list.
    fn take_many(&self, size: &Bound<'_, PyAny>, count: &Bound<'_, PyAny>) -> PyResult<Option<Vec<usize>>> {
        let (size, count) = (at_least_one(size)?, args::count("count", count)?);
        with(&self.space, |space| space.take_many(size, count))
    }

    /// Frees a range, all bytes of which are taken: one that was taken, several that touch, or a part.
    ///
    /// A range with a byte that is not taken is dropped as a whole, counted in `stats`, and reported.
    ///
    /// Raises:
    ///     ArgumentError: If a number is negative, or `size` is 0.
    ///     IndexOwnershipError: If the space is strict and the range cannot be freed. Nothing is changed.
    fn give_back(&self, py: Python<'_>, start: &Bound<'_, PyAny>, size: &Bound<'_, PyAny>) -> PyResult<()> {
        self.free(py, &[address(start)?], at_least_one(size)?)
    }

    /// Frees ranges of one size, each as `give_back` does.
    ///
    /// Args:
    ///     starts: Where they begin.
    ///     size: Bytes of each.
    ///
    /// Raises:
    ///     ArgumentError: If a number is negative, or `size` is 0.
    ///     IndexOwnershipError: If the space is strict and one of them cannot be freed. Nothing is changed.
    fn give_back_many(
        &self,
        py: Python<'_>,
        starts: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let starts: Vec<usize> = starts.try_iter()?.map(|start| address(&start?)).collect::<PyResult<_>>()?;
        self.free(py, &starts, at_least_one(size)?)
    }

    /// Adds bytes at the end.
    ///
    /// Args:
    ///     size: Bytes, which are rounded up to the alignment.
    ///
    /// Raises:
    ///     ArgumentError: If `size` is below 1, or the capacity would be 2**63 or more.
    fn grow(&self, size: &Bound<'_, PyAny>) -> PyResult<()> {
        let size = at_least_one(size)?;
        with(&self.space, |space| space.grow(rounded(space, size)?))
    }

    /// Returns `size`, rounded up to the alignment.
    ///
    /// Raises:
    ///     ArgumentError: If `size` is negative, or an address cannot name as many bytes.
    fn rounded(&self, size: &Bound<'_, PyAny>) -> PyResult<usize> {
        let bytes = args::size("size", size)?;
        with(&self.space, |space| rounded(space, bytes))
    }

    /// All bytes, taken or free.
    #[getter]
    fn capacity(&self) -> usize {
        self.lock().capacity()
    }

    /// The number of bytes that lengths are rounded up to a multiple of.
    #[getter]
    fn alignment(&self) -> usize {
        self.lock().alignment()
    }

    /// Bytes that are taken.
    #[getter]
    fn in_use(&self) -> usize {
        self.lock().used()
    }

    /// Bytes that are free.
    #[getter]
    fn available(&self) -> usize {
        let space = self.lock();
        space.capacity() - space.used()
    }

    /// Returns the capacity, the bytes available and in use, the most bytes that were in use at once, the bytes of the
    /// longest gap, and the frees that were dropped.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let space = self.lock();
        let counts = [
            ("capacity", space.capacity()),
            ("available", space.capacity() - space.used()),
            ("in_use", space.used()),
            ("high_water", space.high_water()),
            ("longest", space.longest()),
            ("dropped_frees", space.dropped_frees()),
        ];
        drop(space);
        counts.into_py_dict(py)
    }

    /// Raises `AssertionError` if the bookkeeping is not consistent.
    fn verify(&self) -> PyResult<()> {
        self.lock().broken_invariant().map_or(Ok(()), |fault| Err(PyAssertionError::new_err(fault)))
    }
}

/// Converts a number of bytes, which must be positive.
fn at_least_one(size: &Bound<'_, PyAny>) -> PyResult<usize> {
    match args::count("size", size)? {
        0 => Err(Error::argument("size is 0; it must be at least 1").into()),
        bytes => Ok(bytes),
    }
}

/// Rounds `bytes` up to the alignment of `space`.
fn rounded(space: &Space, bytes: usize) -> Result<usize> {
    let too_much = || Error::argument(format!("size is {bytes}, more than an address can name"));
    space.rounded(bytes).ok_or_else(too_much)
}

/// Converts an address, which must be below 2**63.
fn address(start: &Bound<'_, PyAny>) -> PyResult<usize> {
    let start = args::int(start)?;
    let negative = |_| Error::argument(format!("start is {start}; it must not be negative"));
    Ok(usize::try_from(start).map_err(negative)?)
}
