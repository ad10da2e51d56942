//! `kvpool.PagePool`.

use pyo3::prelude::*;

use crate::base::{DType, Device, Id};
use crate::pool::{PageConfig, PagePool as Pool};

use super::args::{self, Arg};
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::debug::Debug;
use super::export::to_tensor;
use super::framework::{backend, current_stream, to_dtype};
use super::logging::Reporter;
use super::pool_name::PoolName;

/// Fixed-size pages of elements, numbered from 0, with a free list.
///
/// Pages are zero at first and are not zeroed again. The pool never shrinks, and no page moves when it grows.
/// On a GPU a page is valid on the stream that was current when its memory was allocated, in the constructor
/// or in the `alloc` that grew the pool; another stream needs an event.
///
/// Args:
///     page_size: Elements per page.
///     initial_pages: Initial number of pages.
///     dtype: Storage dtype of the elements, float32 by default.
///     device: Device of the pages.
///     grow: Number of pages that `alloc` adds when all are in use; 0 for a fixed size.
///     strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.
///     debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
///         variable `KVPOOL_DEBUG`.
///
/// Raises:
///     ConfigError: If `page_size` is below 1, another number is below 0, or the size in bytes overflows.
///     TypeError: If `dtype` is not a storage dtype.
///     OutOfMemoryError: If there is not enough memory.
///     BackendUnavailableError: If `device` is not available.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "PagePool")]
pub(super) struct PagePool {
    pool: Pool,
    config: PageConfig,
    device: Device,
    debug: Debug,
    reporter: Reporter,
}

impl PoolClass for PagePool {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&self.pool);
    }
}

#[pymethods]
impl PagePool {
    #[new]
    #[pyo3(signature = (page_size, initial_pages, dtype=None, device=None, *, grow=Arg::Missing, strict=false,
                        debug=None),
           text_signature = "(page_size, initial_pages, dtype=\"float32\", device=\"cpu\", *, grow=0, strict=False, \
                             debug=None)")]
    fn new(
        py: Python<'_>,
        page_size: &Bound<'_, PyAny>,
        initial_pages: &Bound<'_, PyAny>,
        dtype: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
        grow: Arg<'_>,
        strict: bool,
        debug: Option<bool>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let device = args::host_or(device)?;
        let config = PageConfig {
            page_size: args::size("page_size", page_size)?,
            initial_pages: args::size("initial_pages", initial_pages)?,
            dtype: args::dtype(dtype, DType::F32)?,
            grow: grow.size("grow", 0)?,
            strict,
        };
        let backend = backend(py, device)?;
        let pool = py.detach(|| Pool::new(&config, &backend))?;
        let debug = Debug::new(debug, &pool);
        let name = PoolName::next("PagePool");
        let pool = Self { pool, config, device, debug, reporter: Reporter::new(&name) };
        Ok(BasePool::named(name, debug, pool))
    }

    /// Takes the page freed last, else the lowest that was never taken.
    ///
    /// Args:
    ///     owner: An owner for reports and `leaks`, a str or an int. Recorded only if the pool debugs.
    ///
    /// Returns:
    ///     The index of the page, or `None` if all are in use and the pool does not grow. The page keeps its
    ///     last contents.
    ///
    /// Raises:
    ///     OutOfMemoryError: If there is not enough memory for more pages. Nothing is changed.
    #[pyo3(signature = (*, owner=None))]
    fn alloc(&self, py: Python<'_>, owner: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u32>> {
        let _acting = self.debug.begin(py, owner)?;
        let stream = current_stream(py, self.device)?;
        Ok(self.pool.alloc(stream)?.map(Id::number))
    }

    /// Frees a page.
    ///
    /// Args:
    ///     page: Index of the page.
    ///     owner: As in `alloc`.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and the page is not in use. Nothing is changed.
    #[pyo3(signature = (page, *, owner=None))]
    fn free(
        &self,
        py: Python<'_>,
        page: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let page = args::int(page)?;
        let _acting = self.debug.begin(py, owner)?;
        let bad = self.pool.free(page)?;
        self.reporter.bad_frees(py, &bad, "page", 1, self.debug);
        Ok(())
    }

    /// Returns the elements of a page, `dtype` `[page_size]`, in use or not, without a copy.
    ///
    /// Raises:
    ///     IndexError: If the page does not exist.
    fn page(&self, py: Python<'_>, i: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let page = args::int(i)?;
        let view = self.pool.page(page)?;
        to_tensor(py, &view)
    }

    /// Elements per page.
    #[getter]
    fn page_size(&self) -> usize {
        self.config.page_size
    }

    /// Number of pages, free and in use.
    #[getter]
    fn total_pages(&self) -> usize {
        self.pool.with_pages(|pages| pages.capacity())
    }

    /// Number of free pages.
    #[getter]
    fn pages_free(&self) -> usize {
        self.pool.with_pages(|pages| pages.available())
    }

    /// Another name of `pages_free`.
    #[getter]
    fn free_pages(&self) -> usize {
        self.pages_free()
    }

    /// Number of pages in use.
    #[getter]
    fn used_pages(&self) -> usize {
        self.pool.with_pages(|pages| pages.in_use())
    }

    /// Number of pages that `alloc` adds when all are in use.
    #[getter]
    fn grow(&self) -> usize {
        self.config.grow
    }

    /// Dtype of the elements: a `torch.dtype`, or its name if PyTorch is not installed.
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_dtype(py, self.config.dtype)
    }

    fn __repr__(&self) -> String {
        format!(
            "PagePool(page_size={}, total_pages={}, dtype={}, device='{}')",
            self.config.page_size,
            self.total_pages(),
            self.config.dtype,
            self.device
        )
    }
}
