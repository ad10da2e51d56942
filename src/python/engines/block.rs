//! `kvpool._kvpool.Block`: a block of an engine, which counts and hashes it itself.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use pyo3::exceptions::PyAssertionError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::base::sync::lock;
use crate::base::{BlockId, Error, ErrorKind, Id, widen};
use crate::engines::{BlockTable, EvictionQueue, HashedTokens};

use crate::python::args;

/// The objects of all blocks of a queue, and of its ends.
#[derive(Debug)]
pub(in crate::python) struct Objects {
    pub(in crate::python) blocks: Vec<Py<Block>>,
    pub(in crate::python) front: Py<Block>,
    pub(in crate::python) back: Py<Block>,
}

/// The position of a block object in its queue.
#[derive(Clone, Copy, Debug)]
pub(in crate::python) enum BlockPlace {
    /// A block of the queue.
    At(BlockId),
    /// The end before the first block.
    Front,
    /// The end after the last block.
    Back,
}

/// A block of an engine, by vLLM's names: its number, how many requests use it, and its hash. `BlockQueue` makes it.
#[pyclass(frozen, module = "kvpool._kvpool", name = "Block")]
#[derive(Debug)]
pub(in crate::python) struct Block {
    pub(in crate::python) place: BlockPlace,
    pub(in crate::python) table: Arc<Mutex<BlockTable>>,
    /// Empty until all objects are made, and after the queue is dropped.
    pub(in crate::python) objects: Weak<OnceLock<Objects>>,
    /// A weak reference to the pool of the engine.
    pub(in crate::python) pool: Option<Py<PyAny>>,
}

impl Block {
    pub(in crate::python) const fn number(&self) -> Option<BlockId> {
        match self.place {
            BlockPlace::At(number) => Some(number),
            BlockPlace::Front | BlockPlace::Back => None,
        }
    }

    /// Returns the number of the block. An end of a queue has none.
    pub(in crate::python) fn own_number(&self) -> PyResult<BlockId> {
        self.number().ok_or_else(|| ownership_error("the end of a queue is no block".to_owned()))
    }

    /// Returns the number of the block in the queue of a table.
    pub(in crate::python) fn number_in(&self, table: &Arc<Mutex<BlockTable>>) -> Option<BlockId> {
        self.number().filter(|_| Arc::ptr_eq(&self.table, table))
    }

    pub(in crate::python) fn lock(&self) -> MutexGuard<'_, BlockTable> {
        lock(&self.table)
    }

    /// Returns the neighbouring object, or `None` once the queue is dropped.
    fn neighbour(
        &self,
        py: Python<'_>,
        find: impl FnOnce(&EvictionQueue) -> Option<BlockPlace>,
    ) -> Option<Py<Self>> {
        let objects = self.objects.upgrade()?;
        let objects = objects.get()?;
        let found = find(self.lock().queue())?;
        Some(objects.at(found).clone_ref(py))
    }
}

impl Objects {
    pub(in crate::python) fn at(&self, place: BlockPlace) -> &Py<Block> {
        match place {
            BlockPlace::At(number) => &self.blocks[widen(number.number())],
            BlockPlace::Front => &self.front,
            BlockPlace::Back => &self.back,
        }
    }
}

pub(in crate::python) fn ownership_error(message: String) -> PyErr {
    Error::new(ErrorKind::IndexOwnership, message).into()
}

/// Describes an object for messages.
pub(in crate::python) fn description_of(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| args::kind_of(object), |text| text.to_string())
}

#[pymethods]
impl Block {
    /// The number of the block, from 0 on; -1 at the ends of a queue.
    #[getter]
    pub(in crate::python) fn block_id(&self) -> i64 {
        self.number().map_or(-1, i64::from)
    }

    /// The number of requests that use it.
    #[getter]
    fn ref_cnt(&self) -> i64 {
        self.number().map_or(0, |number| self.lock().uses(number))
    }

    #[setter]
    fn set_ref_cnt(&self, count: i64) -> PyResult<()> {
        let number = self.own_number()?;
        self.lock().set_uses(number, count);
        Ok(())
    }

    /// Whether this is a null block, which stands for no memory and is never freed.
    #[getter]
    fn is_null(&self) -> bool {
        self.number().is_some_and(|number| self.lock().is_null(number))
    }

    #[setter]
    fn set_is_null(&self, is_null: bool) -> PyResult<()> {
        let number = self.own_number()?;
        self.lock().set_null(number, is_null);
        Ok(())
    }

    /// The pool that the queue was made for; `None` if there was none, or it no longer exists.
    #[getter]
    fn pool(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let Some(pool) = &self.pool else { return Ok(None) };
        let pool = pool.call0(py)?;
        Ok((!pool.is_none(py)).then_some(pool))
    }

    /// The hash of the block, as bytes; `None` if it has none.
    #[getter]
    fn block_hash<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let hash = self.lock().hashed(self.number()?)?.hash.clone();
        Some(PyBytes::new(py, hash.as_bytes()))
    }

    /// The number of tokens of the prompt that its hash covers.
    #[getter]
    fn block_hash_num_tokens(&self) -> Option<u64> {
        self.lock().hashed(self.number()?)?.tokens
    }

    /// Sets the hash of the block.
    ///
    /// Raises:
    ///     AssertionError: If it has one.
    #[pyo3(signature = (block_hash, num_tokens=None))]
    fn set_block_hash(&self, block_hash: &Bound<'_, PyBytes>, num_tokens: Option<u64>) -> PyResult<()> {
        let number = self.own_number()?;
        let hashed = HashedTokens { hash: block_hash.as_bytes().into(), tokens: num_tokens };
        if self.lock().set_hash(number, hashed) {
            Ok(())
        } else {
            Err(PyAssertionError::new_err(format!("block {number} already has a hash")))
        }
    }

    /// Removes the hash of the block.
    fn reset_hash(&self) {
        if let Some(number) = self.number() {
            self.lock().take_hash(number);
        }
    }

    /// The free block before it, or the front of the queue; `None` if it is not free.
    #[getter]
    fn prev_free_block(&self, py: Python<'_>) -> Option<Py<Self>> {
        self.neighbour(py, |queue| {
            let before = match self.place {
                BlockPlace::Front => return None,
                BlockPlace::At(number) => queue.contains(number).then(|| queue.before(number))?,
                BlockPlace::Back => queue.back(),
            };
            Some(before.map_or(BlockPlace::Front, BlockPlace::At))
        })
    }

    /// The free block after it, or the end of the queue; `None` if it is not free.
    #[getter]
    pub(in crate::python) fn next_free_block(&self, py: Python<'_>) -> Option<Py<Self>> {
        self.neighbour(py, |queue| {
            let behind = match self.place {
                BlockPlace::Back => return None,
                BlockPlace::At(number) => queue.contains(number).then(|| queue.after(number))?,
                BlockPlace::Front => queue.front(),
            };
            Some(behind.map_or(BlockPlace::Back, BlockPlace::At))
        })
    }

    fn __repr__(&self) -> String {
        let Some(number) = self.number() else { return "<Block at an end of its queue>".to_owned() };
        let table = self.lock();
        let hashed = if table.hashed(number).is_some() { ", with a hash" } else { "" };
        format!("<Block {number}: ref_cnt {}{hashed}>", table.uses(number))
    }
}
