//! `kvpool.FileStore` and its transfers.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::base::Error;
use crate::cache::PolicyKind;
use crate::memory::HostRows;
use crate::pool::{FileStore as Store, FileStoreConfig, PutAfter, StoreTransfer as Transfer};
use crate::transfer::FileCaching;

use super::args::{self, Access, Arg};
use super::logging;
use super::page_keys::digest;
use super::wait_in_slices;

/// Pages by their keys in files on a local disk, for one process at a time.
///
/// Stored pages survive the process, also a `SIGKILL` at any moment. A checksum covers the key and the bytes
/// of each page: a page that is found has exactly the bytes that were put, and a damaged one is missing. The
/// pages that are worth least, or were used least recently, are evicted; a use is a `put`, a `get`, a `touch`, or
/// an `exists` with `will_use`.
/// Of the pages of a prompt, the last are evicted first, so that the beginning of a prefix stays longest: the
/// pages of one call follow each other, and `parent` of `put` names the page before them.
///
/// Threads read and write, bypassing the page cache where the file system supports it. They report failures
/// in `stats()`, and the first of each kind as a warning of the logger `kvpool` at a later call. If a page
/// cannot be read or written, no other page is lost, except the one that was evicted to make room for it.
///
/// Nothing is flushed: after a power cut the last pages may be missing. Use as a context manager, or call `close`:
/// a store that is dropped without it drops the pages in its queue.
///
/// Args:
///     path: A directory, made if it is missing, with access for its owner only. Others that may read or change
///         its pages are a warning. It is locked by this process; a child of a fork cannot use the store.
///     capacity_bytes: Bytes of pages, each rounded up to 4096. The index takes 64 bytes more for each page. A store
///         can be opened with another capacity: a smaller one keeps the pages used last.
///     page_bytes: Bytes of a page.
///     policy: Which prompt loses its last page: "adaptive", that whose pages are worth least, as in `PrefixCache`;
///         "lru", that which was used least recently; or another policy of `PrefixCache`. What "adaptive" has learned
///         ends with the process.
///     threads: Threads that read and write.
///     queue_bytes: Bytes of pages that wait to be written. Further ones are dropped.
///     direct: Whether to bypass the system's cache, if the file system supports that.
///
/// Raises:
///     ConfigError: If a size does not fit, `policy` is unknown, or the directory is in use by a process, also this
///         one, has a store with other pages or of another version, or cannot be used. The message then has the path
///         and the cause.
///     OutOfMemoryError: If the index does not fit in memory.
#[pyclass(frozen, module = "kvpool", name = "FileStore", weakref)]
pub(super) struct FileStore {
    pub(super) store: Arc<Store>,
}

#[pymethods]
impl FileStore {
    #[new]
    #[pyo3(signature = (
        path, capacity_bytes, *, page_bytes, policy="adaptive", threads=Arg::Missing, queue_bytes=Arg::Missing, direct=true
    ), text_signature = "(path, capacity_bytes, *, page_bytes, policy=\"adaptive\", threads=2, queue_bytes=268435456, \
                          direct=True)")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        capacity_bytes: &Bound<'_, PyAny>,
        page_bytes: &Bound<'_, PyAny>,
        policy: &str,
        threads: Arg<'_>,
        queue_bytes: Arg<'_>,
        direct: bool,
    ) -> PyResult<Self> {
        /// The bytes that a disk writes in a few hundred milliseconds.
        const QUEUE_BYTES: usize = 256 << 20;
        let page_bytes = args::size("page_bytes", page_bytes)?;
        let config = FileStoreConfig {
            capacity_bytes: args::size("capacity_bytes", capacity_bytes)?,
            page_bytes,
            threads: threads.size("threads", 2)?,
            queue_bytes: queue_bytes.size("queue_bytes", QUEUE_BYTES.max(page_bytes))?,
            policy: PolicyKind::parse(policy)?,
            digest,
        };
        let caching = if direct { FileCaching::Direct } else { FileCaching::Cached };
        let store = Self { store: Arc::new(py.detach(|| Store::at(&path, &config, caching))?) };
        store.report(py);
        Ok(store)
    }

    /// Returns the number of keys before the first whose page is not in the store. Reads no file.
    ///
    /// Args:
    ///     keys: A sequence of `bytes` objects of 32 bytes, or a uint8 array or tensor `[n, 32]` in host memory.
    ///     will_use: Whether a prompt begins with these pages and will use them. Then this is a use of those that
    ///         are there, and `put` without `parent` follows them. Otherwise the order of eviction stays as it is,
    ///         however often one asks.
    ///
    /// Raises:
    ///     ArgumentError: If a key does not have 32 bytes.
    ///     TypeError: If `keys` is something else.
    ///     StateError: If the store is closed, or belongs to the process that this one was forked from.
    #[pyo3(signature = (keys, *, will_use=false))]
    fn exists(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, will_use: bool) -> PyResult<usize> {
        let keys = args::page_keys(keys)?;
        self.report(py);
        Ok(if will_use { self.store.look_up(&keys) } else { self.store.exists(&keys) }?)
    }

    /// Returns for each key whether its page is in the store. Reads no file, and records no use.
    ///
    /// Args:
    ///     keys: As in `exists`.
    ///
    /// Raises:
    ///     StateError: As in `exists`.
    fn find(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let keys = args::page_keys(keys)?;
        self.report(py);
        Ok(self.store.find(&keys)?)
    }

    /// Records a use of pages that are in the store or being put, as `get` does. Reads no file.
    ///
    /// Args:
    ///     keys: As in `exists`, in the order of the prompt. Those of other pages are ignored.
    ///
    /// Returns:
    ///     What `find` returns.
    ///
    /// Raises:
    ///     StateError: As in `exists`.
    fn touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let keys = args::page_keys(keys)?;
        self.report(py);
        Ok(self.store.touch(&keys)?)
    }

    /// Reads pages. Returns at once.
    ///
    /// Do not use the memory before the transfer is done, which keeps it alive until then. The row of a page that is
    /// not found keeps its bytes.
    ///
    /// Args:
    ///     keys: As in `exists`.
    ///     pages: A tensor or array in host memory whose dimension 0 counts pages, with `page_bytes` contiguous bytes
    ///         in each, of any dtype.
    ///     rows: The rows of `pages` to use, one for each key and none twice. By default all, in order.
    ///
    /// Returns:
    ///     A `StoreTransfer`.
    ///
    /// Raises:
    ///     ArgumentError: If the numbers of keys and pages differ, or the pages have another size, are not contiguous,
    ///         overlap, are read-only, or are not in host memory.
    ///     IndexError: If there is no such row.
    ///     StateError: As in `exists`.
    #[pyo3(signature = (keys, pages, *, rows=None))]
    fn get(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        rows: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<StoreTransfer> {
        let (keys, rows) = (args::page_keys(keys)?, select_rows(py, pages, rows, Access::Write)?);
        self.report(py);
        Ok(StoreTransfer { transfer: self.store.get(keys, rows)? })
    }

    /// Writes pages. Returns at once: pages for which the queue has no room are dropped and counted, and so are
    /// the last pages of a prompt that does not fit into the store.
    ///
    /// Do not change the memory before the transfer is done, which keeps it alive until then. Pages that are
    /// stored already, or being written, are not written again.
    ///
    /// Args:
    ///     keys: As in `exists`, in the order of the prompt.
    ///     pages: As in `get`; they may be read-only.
    ///     rows: As in `get`.
    ///     parent: The key of the page before the first one; `b""` if it is the first of a prompt. The pages are
    ///         as recent as that page, and evicted before it; if it is not there, they are stored only where there is
    ///         room. By default calls between two look-ups (`exists`, `get`) count as the parts of one prompt,
    ///         behind the pages that the first of these look-ups has found, as long as the store has room for all.
    ///
    /// Returns:
    ///     A `StoreTransfer`.
    ///
    /// Raises:
    ///     ArgumentError: As in `get`; or if `parent` does not have 0 or 32 bytes.
    ///     IndexError: As in `get`.
    ///     StateError: As in `exists`.
    #[pyo3(signature = (keys, pages, *, rows=None, parent=None))]
    fn put(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        rows: Option<&Bound<'_, PyAny>>,
        parent: Option<&[u8]>,
    ) -> PyResult<StoreTransfer> {
        let after = match parent {
            None => PutAfter::PreviousCall,
            Some([]) => PutAfter::Nothing,
            Some(key) => PutAfter::Page(key.try_into().map_err(|_| {
                Error::argument(format!("parent has {} bytes; a key has 32, and no page b\"\"", key.len()))
            })?),
        };
        let (keys, rows) = (args::page_keys(keys)?, select_rows(py, pages, rows, Access::Read)?);
        self.report(py);
        Ok(StoreTransfer { transfer: self.store.put(keys, rows, after)? })
    }

    /// Removes pages, also for later processes. Those that are still being put are stored nevertheless. Writes to the
    /// index, without the GIL.
    ///
    /// Args:
    ///     keys: As in `exists`.
    ///
    /// Returns:
    ///     How many were there.
    ///
    /// Raises:
    ///     StateError: As in `exists`.
    fn remove(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = args::page_keys(keys)?;
        let removed = py.detach(|| self.store.remove(&keys))?;
        self.report(py);
        Ok(removed)
    }

    /// Removes all pages. Otherwise like `remove`.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        let removed = py.detach(|| self.store.clear())?;
        self.report(py);
        Ok(removed)
    }

    /// Waits for the transfers in progress, without the GIL, and closes the files. Other calls raise from then on. May
    /// be called again, also after an interrupt.
    ///
    /// Raises:
    ///     StateError: If the store belongs to the process that this one was forked from.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait_in_slices(py, None, |slice| self.store.close(slice))?;
        self.report(py);
        Ok(())
    }

    /// Returns the statistics: `pages`, `capacity` and `queued` (to be written) in pages; `bytes` of pages; and since
    /// the store was opened `hits` and `misses` of `get`, `evicted`, `damaged` (pages, and entries of the index),
    /// `dropped` pages of `put` (for which there was no room), `errors` of the system, `read_bytes` and `written_bytes`.
    ///
    /// Raises:
    ///     StateError: If the store belongs to the process that this one was forked from.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.report(py);
        let dict = PyDict::new(py);
        for (name, value) in self.store.stats()?.iter() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// The directory, as it was given.
    #[getter]
    fn path(&self) -> &str {
        self.store.name()
    }

    /// Bytes of a page.
    #[getter]
    fn page_bytes(&self) -> usize {
        self.store.config().page_bytes
    }

    /// Bytes of pages that the store was given.
    #[getter]
    fn capacity_bytes(&self) -> usize {
        self.store.config().capacity_bytes
    }

    /// The name of the policy.
    #[getter]
    fn policy(&self) -> &'static str {
        self.store.config().policy.name()
    }

    /// Whether pages pass the system's cache by.
    #[getter]
    fn direct(&self) -> bool {
        self.store.is_direct()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        Ok(self.store.is_closed()?)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.store.len()?)
    }

    /// A store is truthy even when it is empty.
    #[expect(clippy::unused_self, reason = "of Python's protocol")]
    const fn __bool__(&self) -> bool {
        true
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let config = self.store.config();
        let (path, capacity, page) = (self.store.name(), config.capacity_bytes, config.page_bytes);
        format!("FileStore({path:?}, capacity_bytes={capacity}, page_bytes={page})")
    }
}

impl FileStore {
    /// Logs what threads have noted.
    fn report(&self, py: Python<'_>) {
        for note in self.store.take_notes() {
            logging::warn(py, &note);
        }
    }
}

/// Returns the rows to transfer.
fn select_rows(
    py: Python<'_>,
    pages: &Bound<'_, PyAny>,
    rows: Option<&Bound<'_, PyAny>>,
    access: Access,
) -> PyResult<HostRows> {
    let all = args::rows("pages", pages, access)?;
    let Some(rows) = rows else { return Ok(all) };
    let rows = args::indices(rows)?.values(py)?.into_i64()?;
    Ok(all.select(&rows)?)
}

/// Pages that a `FileStore` reads or writes. It can serve as the fence `after` of `TokenToKVPoolAllocator.free`.
#[pyclass(frozen, module = "kvpool", name = "StoreTransfer", weakref)]
pub(super) struct StoreTransfer {
    transfer: Arc<Transfer>,
}

#[pymethods]
impl StoreTransfer {
    /// Returns whether all pages are done. Does not wait.
    ///
    /// Raises:
    ///     StateError: If it belongs to the process that this one was forked from.
    fn query(&self) -> PyResult<bool> {
        Ok(self.transfer.query()?)
    }

    /// Waits until all pages are done, without the GIL. An interrupt ends the wait only.
    ///
    /// Args:
    ///     timeout: Maximum wait in seconds; unlimited by default.
    ///
    /// Returns:
    ///     Whether all pages are done.
    ///
    /// Raises:
    ///     ArgumentError: If `timeout` is negative or NaN.
    ///     StateError: As in `query`.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        wait_in_slices(py, timeout, |slice| self.transfer.wait(slice))
    }

    /// Gives up the pages that are not being read or written yet: they are done soon, and not present. The others go
    /// on: wait before the memory has another use.
    fn cancel(&self) {
        self.transfer.cancel();
    }

    /// Always `None`: a page that could not be read or written is not `present`, and `FileStore.stats()` counts it.
    #[getter]
    #[expect(clippy::unused_self, reason = "as other work in flight has it")]
    const fn error(&self) -> Option<PyErr> {
        None
    }

    /// Whether each page is where it was to go: after a `get` in memory, after a `put` in the store. False for pages
    /// that are not done, and for one that another `put` is still writing.
    ///
    /// Raises:
    ///     StateError: As in `query`.
    #[getter]
    fn present(&self) -> PyResult<Vec<bool>> {
        Ok(self.transfer.present()?)
    }

    /// The number of present pages before the first that is not: the part of a prefix that can be used.
    ///
    /// Raises:
    ///     StateError: As in `query`.
    #[getter]
    fn leading(&self) -> PyResult<usize> {
        Ok(self.transfer.leading()?)
    }
}
