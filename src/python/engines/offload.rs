//! Chunks that an engine offloads by keys of its own: `OffloadTable`, `OffloadRequest` and `OffloadOrder`.

use std::sync::{Mutex, MutexGuard};

use numpy::PyArray1;
use pyo3::PyTraverseError;
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::base::sync::lock;
use crate::base::{Error, Id, OffloadSlot};
use crate::engines::{
    NamedChunk, OffloadChange, OffloadConfig, OffloadEvent, OffloadId, OffloadKey, OffloadOrder as Order,
    OffloadRequest as Request, OffloadStage, OffloadTable as Table, RequestRank,
};

use crate::python::args::{self, Arg};
use crate::python::page_keys::digest;
use crate::python::with;

/// Keys of a call. They keep their bytes.
struct Keys<'py>(Vec<Bound<'py, PyBytes>>);

impl<'py> Keys<'py> {
    fn of(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let key = |item: Bound<'py, PyAny>| {
            let wrong = |item: &Bound<'_, PyAny>| {
                PyTypeError::new_err(format!("a key must be bytes, not {}", args::kind_of(item)))
            };
            item.cast_into::<PyBytes>().map_err(|error| wrong(error.into_inner().as_any()))
        };
        object.try_iter()?.map(|item| key(item?)).collect::<PyResult<_>>().map(Self)
    }

    fn bytes(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(PyBytesMethods::as_bytes)
    }

    /// Returns the keys with their positions, which Python code may give.
    fn with_positions(&self, position: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<NamedChunk<'_>>> {
        let place = |key: &'_ Bound<'py, PyBytes>| {
            position.map_or(Ok(None), |position| position.call1((key,))?.extract::<Option<i64>>())
        };
        let placed = |key| Ok(NamedChunk { key: PyBytesMethods::as_bytes(key), position: place(key)? });
        self.0.iter().map(placed).collect()
    }
}

/// The keys to store, their places, and the keys that were evicted.
type Stored<'py> = (Bound<'py, PyList>, Bound<'py, PyArray1<i32>>, Bound<'py, PyList>);

/// A chunk that was evicted.
type Pair<'py> = (Bound<'py, PyBytes>, Py<PyAny>);

fn keys_to_list<'py>(py: Python<'py>, keys: &[OffloadKey]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, keys.iter().map(|key| PyBytes::new(py, key)))
}

/// Places as a NumPy array.
fn array(py: Python<'_>, places: Vec<OffloadSlot>) -> PyResult<Bound<'_, PyArray1<i32>>> {
    py.import("numpy")?; // without it the next call would panic
    let number = |place: OffloadSlot| i32::try_from(place.number()).expect("a table has no more places");
    let places = places.into_iter().map(number);
    Ok(PyArray1::from_vec(py, places.collect()))
}

/// The chunks that a request has used, for an `OffloadTable`. If it is passed to another table, or the table
/// was cleared, the request starts over.
#[pyclass(frozen, module = "kvpool._kvpool", name = "OffloadRequest")]
pub(in crate::python) struct OffloadRequest(Mutex<Request>);

#[pymethods]
impl OffloadRequest {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }
}

/// Records the place of each chunk in host memory, for an engine that chooses the keys of chunks and moves
/// them itself.
///
/// Keys are bytes of any length, compared whole; their last four bytes are the group of layers, as vLLM's
/// `OffloadKey` has it. Of the chunks that no transfer uses, those of the least recently active request are
/// evicted first and, of one request, the end of its prompt before the beginning.
///
/// `position`, where a call takes it, is called with each key and gives where the chunk ends in the prompt, or `None`.
/// Arrays of places are int32 in host memory, in the order of the keys. Calls are atomic and thread-safe.
///
/// Args:
///     capacity: Places, below 2**31.
///     store_threshold: How often a chunk is offered until it is stored. Up to 1, each is stored at once.
///     max_tracked: Chunks whose offers are counted: those offered lately.
///     events: Whether to record events for `take_events`.
///
/// Raises:
///     ConfigError: If `capacity` is 2**31 or more, or a number is negative.
#[pyclass(frozen, module = "kvpool._kvpool", name = "OffloadTable", weakref)]
pub(in crate::python) struct OffloadTable {
    table: Mutex<Table>,
}

impl OffloadTable {
    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

#[pymethods]
impl OffloadTable {
    #[new]
    #[pyo3(signature = (capacity, *, store_threshold=Arg::Missing, max_tracked=Arg::Missing, events=false),
           text_signature = "(capacity, *, store_threshold=0, max_tracked=64000, events=False)")]
    fn new(
        capacity: &Bound<'_, PyAny>,
        store_threshold: Arg<'_>,
        max_tracked: Arg<'_>,
        events: bool,
    ) -> PyResult<Self> {
        let asked = args::count("capacity", capacity)?;
        let capacity = u32::try_from(asked)
            .ok()
            .filter(|&count| count < 1 << 31)
            .ok_or_else(|| Error::config(format!("capacity is {asked}; chunks are numbered below 2**31")))?;
        let config = OffloadConfig {
            capacity,
            store_threshold: store_threshold.count("store_threshold", 0)?,
            max_tracked: max_tracked.count("max_tracked", 64_000)?,
            events,
        };
        Ok(Self { table: Mutex::new(Table::new(config)) })
    }

    /// Returns whether a chunk can be read: `None` if it is not here, False while it is being stored.
    fn find(&self, key: &Bound<'_, PyBytes>) -> Option<bool> {
        self.lock().find(key.as_bytes()).map(|chunk| chunk.stage == OffloadStage::Ready)
    }

    /// Returns the place of a chunk, and how many loads read it, -1 while it is being stored. `None` if it is not here.
    fn place(&self, key: &Bound<'_, PyBytes>) -> Option<(u32, i64)> {
        let chunk = self.lock().find(key.as_bytes())?;
        let loads = if chunk.stage == OffloadStage::Ready { i64::from(chunk.loads) } else { -1 };
        Some((chunk.place.number(), loads))
    }

    /// Returns how often a chunk was offered, of those whose offers are counted.
    fn offers(&self, key: &Bound<'_, PyBytes>) -> usize {
        self.lock().offers_of(key.as_bytes())
    }

    /// Takes places for the chunks that are not here, and evicts other chunks, never one of `keys`, if
    /// necessary.
    ///
    /// Args:
    ///     keys: Keys of the request, in the order of its prompt. A key that is listed again is left out.
    ///     request: The request. It uses the chunks that it stores, and those of the others that can be read.
    ///     position: As above.
    ///
    /// Returns:
    ///     The keys to store, their places, and the keys that were evicted. `None` if there are not enough places;
    ///     then nothing is evicted.
    ///
    /// Raises:
    ///     StateError: If the request is finished, and has not used one of them before.
    ///     TypeError: If a key is not bytes.
    #[pyo3(signature = (keys, request, position=None))]
    fn begin_store<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        request: &OffloadRequest,
        position: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Stored<'py>>> {
        let keys = Keys::of(keys)?;
        let chunks = keys.with_positions(position)?;
        let storing = with(&request.0, |request| self.lock().begin_store(&chunks, request))?;
        let Some(storing) = storing else { return Ok(None) };
        let chosen = PyList::new(py, storing.chosen.iter().map(|&at| &keys.0[at]))?;
        Ok(Some((chosen, array(py, storing.places)?, keys_to_list(py, &storing.evicted)?)))
    }

    /// Ends the store of chunks: they can be read or, if `success` is False, are removed. Chunks that are not
    /// being stored are left as they are.
    #[pyo3(signature = (keys, success=true))]
    fn end_store(&self, keys: &Bound<'_, PyAny>, success: bool) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        let mut table = self.lock();
        if success {
            table.end_store(keys.bytes());
        } else {
            table.fail_store(keys.bytes());
        }
        Ok(())
    }

    /// Keeps chunks until `end_load`.
    ///
    /// Args:
    ///     keys: Their keys.
    ///     request: The request that uses them; `None` for a copy that is no use.
    ///     position: As above.
    ///
    /// Returns:
    ///     Their places.
    ///
    /// Raises:
    ///     StaleError: If a chunk is not here, or is being stored. Nothing is changed.
    ///     StateError: As in `begin_store`.
    ///     TypeError: As in `begin_store`.
    #[pyo3(signature = (keys, request=None, position=None))]
    fn begin_load<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        request: Option<&OffloadRequest>,
        position: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let keys = Keys::of(keys)?;
        let chunks = keys.with_positions(position)?;
        let places = match request {
            Some(request) => with(&request.0, |request| self.lock().begin_load(&chunks, Some(request)))?,
            None => self.lock().begin_load(&chunks, None)?,
        };
        array(py, places)
    }

    /// Ends a load of chunks.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a chunk is not loaded so often. Nothing is changed.
    ///     TypeError: As in `begin_store`.
    fn end_load(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        let keys: Vec<&[u8]> = keys.bytes().collect();
        Ok(self.lock().end_load(&keys)?)
    }

    /// Records a use of chunks: the first of them is evicted last.
    fn touch(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        let keys: Vec<&[u8]> = keys.bytes().collect();
        self.lock().touch(&keys);
        Ok(())
    }

    /// Ends a request: the chunks that it used count as used now, the beginning of its prompt last.
    fn finish(&self, request: &OffloadRequest) {
        let mut request = lock(&request.0);
        self.lock().finish(&mut request);
    }

    /// Removes all chunks, also those that transfers use.
    fn clear(&self) {
        self.lock().clear();
    }

    /// Returns the changes since the last call, in order: pairs of "stored", "evicted" or "failed", and keys.
    /// A store that failed is left out if the chunk is here again.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Vec<(&'static str, Bound<'py, PyList>)>> {
        let events = self.lock().take_events();
        let event = |event: &OffloadEvent| Ok((name_of(event.change), keys_to_list(py, &event.keys)?));
        events.iter().map(event).collect()
    }

    /// Returns how many chunks each call of `begin_store` was to store, for the calls since the last time.
    fn take_asked(&self) -> Vec<usize> {
        self.lock().take_asked()
    }

    /// Returns how many chunks were not stored as they were not offered often enough, since the last time.
    fn take_skipped(&self) -> usize {
        self.lock().take_skipped()
    }

    /// Returns the statistics in chunks: `capacity`, `arriving` (being stored), `loading` and `idle`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.lock().counts();
        let dict = PyDict::new(py);
        dict.set_item("capacity", counts.capacity)?;
        dict.set_item("arriving", counts.arriving)?;
        dict.set_item("loading", counts.loading)?;
        dict.set_item("idle", counts.idle)?;
        Ok(dict)
    }

    /// Raises `AssertionError` if the bookkeeping is not consistent.
    fn verify(&self) -> PyResult<()> {
        self.lock()
            .broken_invariant()
            .map_or(Ok(()), |fault| Err(pyo3::exceptions::PyAssertionError::new_err(fault)))
    }
}

const fn name_of(change: OffloadChange) -> &'static str {
    match change {
        OffloadChange::Stored => "stored",
        OffloadChange::Evicted => "evicted",
        OffloadChange::Failed => "failed",
    }
}

/// The turn of a request in an `OffloadOrder`.
#[pyclass(frozen, module = "kvpool._kvpool", name = "OffloadTurn")]
pub(in crate::python) struct OffloadTurn(Mutex<RequestRank>);

#[pymethods]
impl OffloadTurn {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }
}

/// The order in which offloaded chunks are evicted, and an object of the engine for each chunk.
/// `OffloadTable` contains one; use this class if the engine keeps places and counts of loads itself.
///
/// Keys and positions are those of `OffloadTable`.
#[pyclass(frozen, module = "kvpool._kvpool", name = "OffloadOrder", weakref)]
pub(in crate::python) struct OffloadOrder {
    order: Mutex<Order<Py<PyAny>>>,
}

impl OffloadOrder {
    fn lock(&self) -> MutexGuard<'_, Order<Py<PyAny>>> {
        lock(&self.order)
    }

    fn find(order: &Order<Py<PyAny>>, key: &Bound<'_, PyBytes>) -> PyResult<OffloadId> {
        order.find(key.as_bytes()).ok_or_else(|| PyKeyError::new_err(key.clone().unbind()))
    }
}

#[pymethods]
impl OffloadOrder {
    #[new]
    fn new() -> Self {
        Self { order: Mutex::default() }
    }

    /// Returns the object of a chunk; `None` if it is not here.
    fn get(&self, py: Python<'_>, key: &Bound<'_, PyBytes>) -> Option<Py<PyAny>> {
        let order = self.lock();
        order.find(key.as_bytes()).map(|chunk| order.get(chunk).clone_ref(py))
    }

    /// Adds a chunk with its object, in the turn of the request if the position is known, or as the one used last. It
    /// is not evicted before `set_evictable`.
    #[pyo3(signature = (key, chunk, turn, position=None))]
    fn insert(&self, key: &Bound<'_, PyBytes>, chunk: Py<PyAny>, turn: &OffloadTurn, position: Option<i64>) {
        let mut turn = lock(&turn.0);
        let mut order = self.lock();
        let before = order.find(key.as_bytes()).map(|chunk| order.remove(chunk));
        order.insert(key.as_bytes(), chunk, position, &mut turn);
        drop((order, turn));
        drop(before); // may run Python code
    }

    /// Removes a chunk, and returns its object.
    ///
    /// Raises:
    ///     KeyError: If it is not here.
    fn remove(&self, key: &Bound<'_, PyBytes>) -> PyResult<Py<PyAny>> {
        let mut order = self.lock();
        let chunk = Self::find(&order, key)?;
        Ok(order.remove(chunk))
    }

    /// Allows or prevents the eviction of a chunk.
    ///
    /// Raises:
    ///     KeyError: If it is not here.
    fn set_evictable(&self, key: &Bound<'_, PyBytes>, is_evictable: bool) -> PyResult<()> {
        let mut order = self.lock();
        let chunk = Self::find(&order, key)?;
        order.set_evictable(chunk, is_evictable);
        Ok(())
    }

    /// Records a use of chunks: the first of them is evicted last. Chunks that are not here are ignored.
    fn touch(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        let mut order = self.lock();
        for key in keys.0.iter().rev() {
            if let Some(chunk) = order.find(key.as_bytes()) {
                order.touch(chunk);
            }
        }
        Ok(())
    }

    /// Records that an active request uses chunks, which counts as its turn. Chunks that are not here, have
    /// no position, or were used later are left as they are.
    fn access(
        &self,
        keys: &Bound<'_, PyAny>,
        turn: &OffloadTurn,
        position: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        let chunks = keys.with_positions(Some(position))?;
        let mut turn = lock(&turn.0);
        let mut order = self.lock();
        order.assign_rank(&mut turn);
        for chunk in chunks {
            if let (Some(id), Some(position)) = (order.find(chunk.key), chunk.position) {
                order.access(id, position, &mut turn);
            }
        }
        Ok(())
    }

    /// Removes the chunks that are first in the order, except the spared ones. Returns pairs of keys and
    /// objects. If there are not enough chunks, returns `None` and changes nothing.
    fn evict<'py>(
        &self,
        py: Python<'py>,
        count: usize,
        spared: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Vec<Pair<'py>>>> {
        let spared = Keys::of(spared)?;
        let evicted = self.lock().evict(count, spared.bytes());
        let pair = |(key, chunk): (OffloadKey, _)| (PyBytes::new(py, &key), chunk);
        Ok(evicted.map(|evicted| evicted.into_iter().map(pair).collect()))
    }

    /// Removes all chunks.
    fn clear(&self) {
        let before = self.lock().drain();
        drop(before); // may run Python code
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }

    /// An order is truthy even when it is empty.
    #[expect(clippy::unused_self, reason = "of Python's protocol")]
    const fn __bool__(&self) -> bool {
        true
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Another thread cannot have the lock, since it would have the GIL.
        self.order.try_lock().map_or(Ok(()), |order| order.values().try_for_each(|chunk| visit.call(chunk)))
    }

    fn __clear__(&self) {
        drop(self.lock().drain());
    }
}

/// Returns names of 32 bytes for a store, for chunks of one space: BLAKE3 of the length of the space as
/// uint64 in little endian, the space, and the key.
///
/// Args:
///     space: Everything else that the bytes of a chunk depend on: the model, its dtype, the layout.
///     keys: Bytes of any length.
///
/// Raises:
///     TypeError: If one of them is not bytes.
#[pyfunction]
pub(in crate::python) fn _store_keys<'py>(
    py: Python<'py>,
    space: &Bound<'py, PyBytes>,
    keys: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyList>> {
    let (space, keys) = (space.as_bytes(), Keys::of(keys)?);
    let length = u64::try_from(space.len()).expect("a length has 64 bits").to_le_bytes();
    PyList::new(py, keys.bytes().map(|key| PyBytes::new(py, &digest(&[&length, space, key]))))
}
