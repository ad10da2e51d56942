//! An engine's blocks, which it counts and hashes itself: `Block`, `BlockQueue` and `BlockMap`.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use pyo3::exceptions::{PyAssertionError, PyOverflowError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::base::sync::lock;
use crate::base::{BlockId, Error, ErrorKind, Id, widen};
use crate::cache::engines::{
    BlockHash, BlockMap as Map, BlockTable, EvictionQueue, HashedBlocks, HashedTokens, NotTaken, TakenBlocks,
};

use super::args;
use super::debug::Debug;
use super::logging::Reporter;

/// Bytes of a hash and of the group behind it that need no allocation.
const SHORT: usize = 64;

/// The objects of all blocks of a queue, and of its ends.
#[derive(Debug)]
struct Objects {
    blocks: Vec<Py<Block>>,
    front: Py<Block>,
    back: Py<Block>,
}

/// Where a block stands.
#[derive(Clone, Copy, Debug)]
enum BlockPlace {
    /// It is one of the blocks of its queue.
    At(BlockId),
    /// It stands before the first, or behind the last.
    Front,
    Back,
}

/// A block of an engine, by vLLM's names: its number, how many requests use it, and its hash. `BlockQueue` makes it.
#[pyclass(frozen, module = "kvpool._kvpool", name = "Block")]
#[derive(Debug)]
pub(super) struct Block {
    place: BlockPlace,
    table: Arc<Mutex<BlockTable>>,
    /// Empty until all are made, and gone with the queue.
    objects: Weak<OnceLock<Objects>>,
    /// A weak reference to the pool of the engine.
    pool: Option<Py<PyAny>>,
}

impl Block {
    const fn number(&self) -> Option<BlockId> {
        match self.place {
            BlockPlace::At(number) => Some(number),
            BlockPlace::Front | BlockPlace::Back => None,
        }
    }

    /// Its number, which an end of a queue has not.
    fn own_number(&self) -> PyResult<BlockId> {
        self.number().ok_or_else(|| ownership("the end of a queue is no block".to_owned()))
    }

    /// Its number in the queue of a table.
    fn number_in(&self, table: &Arc<Mutex<BlockTable>>) -> Option<BlockId> {
        self.number().filter(|_| Arc::ptr_eq(&self.table, table))
    }

    fn lock(&self) -> MutexGuard<'_, BlockTable> {
        lock(&self.table)
    }

    /// What stands beside it, as long as there is the queue.
    fn beside(
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
    fn at(&self, place: BlockPlace) -> &Py<Block> {
        match place {
            BlockPlace::At(number) => &self.blocks[widen(number.number())],
            BlockPlace::Front => &self.front,
            BlockPlace::Back => &self.back,
        }
    }
}

fn ownership(message: String) -> PyErr {
    Error::new(ErrorKind::IndexOwnership, message).into()
}

/// An object in words, for messages.
fn shown(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| args::kind_of(object), |text| text.to_string())
}

#[pymethods]
impl Block {
    /// Its number, from 0 on; -1 at the ends of a queue.
    #[getter]
    fn block_id(&self) -> i64 {
        self.number().map_or(-1, i64::from)
    }

    /// How many requests use it.
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

    /// Whether it stands for no memory. It is never freed.
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

    /// The pool that its queue was made for; `None` if there was none, or it is gone.
    #[getter]
    fn pool(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let Some(pool) = &self.pool else { return Ok(None) };
        let pool = pool.call0(py)?;
        Ok((!pool.is_none(py)).then_some(pool))
    }

    /// Its hash, bytes; `None` if it has none.
    #[getter]
    fn block_hash<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let hash = self.lock().hashed(self.number()?)?.hash.clone();
        Some(PyBytes::new(py, hash.as_bytes()))
    }

    /// How many tokens of the prompt its hash covers.
    #[getter]
    fn block_hash_num_tokens(&self) -> Option<u64> {
        self.lock().hashed(self.number()?)?.tokens
    }

    /// Gives it a hash.
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

    /// Takes its hash.
    fn reset_hash(&self) {
        if let Some(number) = self.number() {
            self.lock().take_hash(number);
        }
    }

    /// The free block before it, or the front of the queue; `None` if it is not free.
    #[getter]
    fn prev_free_block(&self, py: Python<'_>) -> Option<Py<Self>> {
        self.beside(py, |queue| {
            let before = match self.place {
                BlockPlace::Front => return None,
                BlockPlace::At(number) => queue.contains(number).then(|| queue.before(number))?,
                BlockPlace::Back => queue.back(),
            };
            Some(before.map_or(BlockPlace::Front, BlockPlace::At))
        })
    }

    /// The free block behind it, or the end of the queue; `None` if it is not free.
    #[getter]
    fn next_free_block(&self, py: Python<'_>) -> Option<Py<Self>> {
        self.beside(py, |queue| {
            let behind = match self.place {
                BlockPlace::Back => return None,
                BlockPlace::At(number) => queue.contains(number).then(|| queue.behind(number))?,
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

/// Free blocks in the order in which they are used again, and all blocks: the numbers from 0 to `count`, all free,
/// the lowest in front.
///
/// The methods by vLLM's names do what those of its `FreeKVCacheBlockQueue` do; `alloc`, `free` and `retain` are calls
/// for many blocks at once. Calls are atomic and thread-safe. A block of another queue is never taken in.
///
/// Args:
///     count: Blocks, below 2**31.
///     pool: The pool of the engine, which blocks name. It is not kept alive.
///
/// Raises:
///     ConfigError: If `count` is 0, negative, or too large.
#[pyclass(frozen, module = "kvpool._kvpool", name = "BlockQueue")]
pub(super) struct BlockQueue {
    table: Arc<Mutex<BlockTable>>,
    objects: Arc<OnceLock<Objects>>,
    debug: Debug,
    reporter: Reporter,
}

/// Blocks of a call: the numbers of those of this queue, and what else was given.
struct GivenBlocks<'py> {
    own: Vec<BlockId>,
    others: Vec<Bound<'py, PyAny>>,
}

impl BlockQueue {
    fn lock(&self) -> MutexGuard<'_, BlockTable> {
        lock(&self.table)
    }

    fn objects(&self) -> &Objects {
        self.objects.get().expect("a queue is made with its blocks")
    }

    fn object(&self, py: Python<'_>, number: BlockId) -> Py<Block> {
        self.objects().at(BlockPlace::At(number)).clone_ref(py)
    }

    /// Sorts what is given. Iterating may run Python code.
    fn given<'py>(&self, blocks: &Bound<'py, PyAny>) -> PyResult<GivenBlocks<'py>> {
        let mut given =
            GivenBlocks { own: Vec::with_capacity(blocks.len().unwrap_or(0)), others: Vec::new() };
        for item in blocks.try_iter()? {
            let item = item?;
            match item.cast::<Block>().ok().and_then(|block| block.get().number_in(&self.table)) {
                Some(number) => given.own.push(number),
                None => given.others.push(item),
            }
        }
        Ok(given)
    }

    /// The numbers of blocks that must all be of this queue.
    fn numbers(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
        let given = self.given(blocks)?;
        match given.others.first() {
            Some(other) => Err(ownership(format!("{} is no block of this queue", shown(other)))),
            None => Ok(given.own),
        }
    }

    /// Adds blocks that are not free, all or none.
    fn add(&self, numbers: &[BlockId], push: impl Fn(&mut EvictionQueue, BlockId) -> bool) -> PyResult<()> {
        let mut table = self.lock();
        let queue = table.queue_mut();
        for (at, &number) in numbers.iter().enumerate() {
            if !push(queue, number) {
                for &added in &numbers[..at] {
                    queue.remove(added);
                }
                drop(table);
                return Err(ownership(format!("block {number} is free already")));
            }
        }
        Ok(())
    }
}

#[pymethods]
impl BlockQueue {
    #[new]
    #[pyo3(signature = (count, pool=None))]
    fn new(py: Python<'_>, count: &Bound<'_, PyAny>, pool: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let asked = args::size("count", count)?;
        let count = u32::try_from(asked)
            .ok()
            .filter(|count| (1..1 << 31).contains(count))
            .ok_or_else(|| Error::config(format!("count is {asked}; it must be 1 to 2**31 - 1 blocks")))?;
        let pool = pool.map(|pool| py.import("weakref")?.call_method1("ref", (pool,)).map(Bound::unbind));
        let pool = pool.transpose()?;
        let table = Arc::new(Mutex::new(BlockTable::new(count)));
        let objects = Arc::new(OnceLock::new());
        let block = |place| {
            let pool = pool.as_ref().map(|pool| pool.clone_ref(py));
            Py::new(py, Block { place, table: Arc::clone(&table), objects: Arc::downgrade(&objects), pool })
        };
        let made = Objects {
            blocks: (0..count)
                .map(|number| block(BlockPlace::At(BlockId::new(number))))
                .collect::<PyResult<_>>()?,
            front: block(BlockPlace::Front)?,
            back: block(BlockPlace::Back)?,
        };
        objects.set(made).expect("it is new");
        Ok(Self { table, objects, debug: Debug::without_ledger(None), reporter: Reporter::default() })
    }

    /// All blocks by their numbers, free or not: a new list.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.objects().blocks)
    }

    /// The number of free blocks.
    #[getter]
    fn num_free_blocks(&self) -> usize {
        self.lock().queue().len()
    }

    /// What stands before the first free block.
    #[getter]
    fn fake_free_list_head(&self, py: Python<'_>) -> Py<Block> {
        self.objects().front.clone_ref(py)
    }

    /// What stands behind the last free block.
    #[getter]
    fn fake_free_list_tail(&self, py: Python<'_>) -> Py<Block> {
        self.objects().back.clone_ref(py)
    }

    /// Takes the first free block, whatever is counted of it.
    ///
    /// Raises:
    ///     ValueError: If none is free.
    fn popleft(&self, py: Python<'_>) -> PyResult<Py<Block>> {
        let number = self.lock().queue_mut().pop_front();
        number
            .map(|number| self.object(py, number))
            .ok_or_else(|| PyValueError::new_err("No free blocks available"))
    }

    /// Takes the first `n` free blocks, whatever is counted of them.
    ///
    /// Raises:
    ///     ValueError: If there are fewer. Nothing is taken.
    fn popleft_n(&self, py: Python<'_>, n: usize) -> PyResult<Vec<Py<Block>>> {
        let mut table = self.lock();
        let free = table.queue().len();
        if n > free {
            return Err(too_few(n, free));
        }
        let numbers: Vec<BlockId> = (0..n).map_while(|_| table.queue_mut().pop_front()).collect();
        drop(table);
        Ok(numbers.into_iter().map(|number| self.object(py, number)).collect())
    }

    /// Takes a block out.
    ///
    /// Raises:
    ///     IndexOwnershipError: If it is of another queue.
    ///     RuntimeError: If it is not free.
    fn remove(&self, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let numbers = self.numbers(PyList::new(block.py(), [block])?.as_any())?;
        let was = numbers.iter().all(|&number| self.lock().queue_mut().remove(number));
        if was { Ok(()) } else { Err(not_free(block)) }
    }

    /// Adds a block at the end, whatever is counted of it.
    ///
    /// Raises:
    ///     IndexOwnershipError: If it is of another queue, or free already. Nothing is changed.
    fn append(&self, block: &Bound<'_, PyAny>) -> PyResult<()> {
        self.append_n(PyList::new(block.py(), [block])?.as_any())
    }

    /// Adds blocks at the end, in their order; the rest as `append`.
    fn append_n(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        self.add(&self.numbers(blocks)?, EvictionQueue::push_back)
    }

    /// Adds blocks in front, in their order; the rest as `append`.
    fn prepend_n(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut numbers = self.numbers(blocks)?;
        numbers.reverse();
        self.add(&numbers, EvictionQueue::push_front)
    }

    /// Returns the free blocks, the first one in front.
    fn get_all_free_blocks(&self, py: Python<'_>) -> Vec<Py<Block>> {
        let numbers: Vec<BlockId> = self.lock().queue().iter().collect();
        numbers.into_iter().map(|number| self.object(py, number)).collect()
    }

    /// Returns an iterator over the free blocks behind a block, or all. It ends where the queue ends, or at a block
    /// that is taken meanwhile.
    #[pyo3(signature = (cursor))]
    fn iter_blocks_after(&self, py: Python<'_>, cursor: Option<Py<Block>>) -> BlockIterator {
        let here = cursor.unwrap_or_else(|| self.fake_free_list_head(py));
        BlockIterator { here: Mutex::new(Some(here)) }
    }

    /// Takes the first free blocks for one user, who counts 1 of each. Their hashes are taken from them.
    ///
    /// Args:
    ///     count: How many.
    ///     cached: The map with the hashes.
    ///     more_hashes: By the number of a block, a set of hashes that it has beside its own. Those of taken blocks go.
    ///     events: Whether to return the hashes.
    ///
    /// Returns:
    ///     The blocks, and the hashes that are in the map no more, in order; none without `events`.
    ///
    /// Raises:
    ///     ValueError: If there are fewer free blocks. Nothing is taken.
    ///     AssertionError: If one of them is counted as used. Nothing is taken.
    ///     TypeError: If `more_hashes` has what is not bytes. Nothing is taken.
    #[pyo3(signature = (count, cached, more_hashes, *, events=false))]
    fn alloc<'py>(
        &self,
        py: Python<'py>,
        count: usize,
        cached: &BlockMap,
        more_hashes: &Bound<'py, PyDict>,
        events: bool,
    ) -> PyResult<(Bound<'py, PyList>, Vec<Bound<'py, PyBytes>>)> {
        let taken = TakenBlocks::take(&self.table, count).map_err(|why| match why {
            NotTaken::Short { free } => too_few(count, free),
            NotTaken::InUse { block, uses } => {
                PyAssertionError::new_err(format!("block {block} is free, and counted {uses} times"))
            }
        })?;
        let all = &self.objects().blocks;
        let blocks = PyList::new(py, taken.blocks().iter().map(|block| &all[widen(block.number())]))?;
        let removed = cached.take_hashes(&self.table, taken.blocks(), more_hashes)?;
        taken.keep();
        let removed = if events { removed } else { Vec::new() };
        Ok((blocks, removed.iter().map(|hash| PyBytes::new(py, hash.as_bytes())).collect()))
    }

    /// Gives back one use of each block. Those that are no longer used are free: the ones with a hash at the end, the
    /// others in front, both in the order given. Null blocks are left out.
    ///
    /// A block that is not used is dropped, and logged.
    ///
    /// Args:
    ///     blocks: The blocks, of any kind.
    ///     keep_hashed: Whether a hash makes a difference.
    ///
    /// Returns:
    ///     What are not blocks of this queue, as they were given.
    #[pyo3(signature = (blocks, *, keep_hashed=true))]
    fn free<'py>(
        &self,
        py: Python<'py>,
        blocks: &Bound<'py, PyAny>,
        keep_hashed: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let given = self.given(blocks)?;
        let hashed = if keep_hashed { HashedBlocks::Last } else { HashedBlocks::First };
        let bad = self.lock().release(&given.own, hashed);
        self.reporter.bad_frees(py, &bad, "block", given.own.len(), self.debug);
        Ok(given.others)
    }

    /// Adds one use of each block, and takes those that were free out of the queue. Null blocks are left out.
    ///
    /// Returns:
    ///     What are not blocks of this queue, as they were given.
    ///
    /// Raises:
    ///     RuntimeError: If a block is neither used nor free. Nothing is changed.
    fn retain<'py>(&self, blocks: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let given = self.given(blocks)?;
        let retained = self.lock().retain(&given.own);
        retained.map_err(|lost| not_free(self.objects().at(BlockPlace::At(lost)).bind(blocks.py())))?;
        Ok(given.others)
    }

    fn __len__(&self) -> usize {
        self.num_free_blocks()
    }
}

fn too_few(asked: usize, free: usize) -> PyErr {
    PyValueError::new_err(format!("{asked} blocks asked for, {free} are free"))
}

fn not_free(block: &Bound<'_, PyAny>) -> PyErr {
    PyRuntimeError::new_err(format!("{} is not free", shown(block)))
}

/// Free blocks in their order.
#[pyclass(frozen, module = "kvpool._kvpool", name = "_BlockIterator")]
pub(super) struct BlockIterator {
    here: Mutex<Option<Py<Block>>>,
}

#[pymethods]
impl BlockIterator {
    const fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Option<Py<Block>> {
        let mut here = lock(&self.here);
        let next = here.take()?.get().next_free_block(py)?;
        if matches!(next.get().place, BlockPlace::Back) {
            return None;
        }
        *here = Some(next.clone_ref(py));
        Some(next)
    }
}

/// An engine's blocks by their hashes: bytes of any length that end with the group of layers, 4 bytes, the highest
/// first, as vLLM's `BlockHashWithGroupId` has them. Several blocks may have one hash.
///
/// The methods by vLLM's names do what those of its `BlockHashToBlockMap` do; `find`, `find_prefix` and `cache` are
/// calls for groups and for many blocks. Calls are atomic and thread-safe.
#[pyclass(frozen, module = "kvpool._kvpool", name = "BlockMap", subclass)]
#[derive(Default)]
pub(super) struct BlockMap {
    map: Mutex<Map<Py<PyAny>>>,
}

impl BlockMap {
    fn lock(&self) -> MutexGuard<'_, Map<Py<PyAny>>> {
        lock(&self.map)
    }

    /// Takes all hashes from blocks of a table, and returns those that the map had of them, by block in their
    /// order. If `more` has what is no hash, nothing is done.
    fn take_hashes(
        &self,
        table: &Mutex<BlockTable>,
        blocks: &[BlockId],
        more: &Bound<'_, PyDict>,
    ) -> PyResult<Vec<BlockHash>> {
        let mut others = take_more(more, blocks)?.into_iter().peekable();
        let mut hashes = Vec::new();
        let mut table = lock(table);
        for &block in blocks {
            hashes.extend(table.take_hash(block).map(|hashed| (block, hashed.hash)));
            if let Some((_, found)) = others.next_if(|(of, _)| *of == block) {
                hashes.extend(found.into_iter().map(|hash| (block, hash)));
            }
        }
        drop(table);
        let mut map = self.lock();
        let gone: Vec<_> = hashes
            .iter()
            .map(|(block, hash)| map.remove(hash.as_bytes(), i64::from(block.number())))
            .collect();
        drop(map);
        let was = |((_, hash), value): (_, Option<Py<PyAny>>)| value.map(|_| hash); // may run Python code
        Ok(hashes.into_iter().zip(gone).filter_map(was).collect())
    }
}

/// Takes from `more` the hashes of those of the blocks that have some there, in their order.
fn take_more(more: &Bound<'_, PyDict>, blocks: &[BlockId]) -> PyResult<Vec<(BlockId, Vec<BlockHash>)>> {
    let mut found = Vec::new();
    if more.is_empty() {
        return Ok(found);
    }
    for &block in blocks {
        if let Some(set) = more.get_item(block.number())? {
            let hash =
                |hash: PyResult<Bound<'_, PyAny>>| Ok(BlockHash::from(hash?.cast::<PyBytes>()?.as_bytes()));
            found.push((block, set.try_iter()?.map(hash).collect::<PyResult<_>>()?));
        }
    }
    for (block, _) in &found {
        more.del_item(block.number())?;
    }
    Ok(found)
}

/// Calls `work` with the hash of a block in a group of layers.
fn in_group<R>(hash: &[u8], group: u32, work: impl FnOnce(&[u8]) -> R) -> R {
    let end = hash.len() + 4;
    if end <= SHORT {
        let mut bytes = [0; SHORT];
        bytes[..hash.len()].copy_from_slice(hash);
        bytes[hash.len()..end].copy_from_slice(&group.to_be_bytes());
        work(&bytes[..end])
    } else {
        work(&[hash, &group.to_be_bytes()].concat())
    }
}

/// Adds a block of each group that has the hash, and says whether each group has one.
fn find(
    py: Python<'_>,
    map: &Map<Py<PyAny>>,
    hash: &[u8],
    groups: &[u32],
    found: &mut Vec<Py<PyAny>>,
) -> bool {
    groups.iter().all(|&group| {
        let block = in_group(hash, group, |key| map.first(key));
        found.extend(block.map(|block| block.clone_ref(py)));
        block.is_some()
    })
}

/// Blocks of several groups.
type ByGroup<'py> = Vec<Bound<'py, PyList>>;

#[pymethods]
impl BlockMap {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Returns the block that has had a hash for longest; `None` if none has it.
    fn get_one_block(&self, py: Python<'_>, key: &Bound<'_, PyBytes>) -> Option<Py<PyAny>> {
        self.lock().first(key.as_bytes()).map(|block| block.clone_ref(py))
    }

    /// Returns whether the block with a number has a hash.
    fn contain(&self, key: &Bound<'_, PyBytes>, block_id: i64) -> bool {
        self.lock().contains(key.as_bytes(), block_id)
    }

    /// Gives a block a hash.
    fn insert(&self, key: &Bound<'_, PyBytes>, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let number = match block.cast::<Block>() {
            Ok(block) => block.get().block_id(),
            Err(_) => block.getattr("block_id")?.extract()?,
        };
        let old = self.lock().insert(key.as_bytes(), number, block.clone().unbind());
        drop(old); // may run Python code
        Ok(())
    }

    /// Takes a hash from the block with a number, and returns the block; `None` if it has it not.
    fn pop(&self, key: &Bound<'_, PyBytes>, block_id: i64) -> Option<Py<PyAny>> {
        self.lock().remove(key.as_bytes(), block_id)
    }

    /// Takes all hashes from all blocks.
    fn clear(&self) {
        let old = std::mem::take(&mut *self.lock());
        drop(old); // may run Python code
    }

    /// Returns pairs of a hash and the list of its blocks, those that got it first in front.
    fn items<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyBytes>, Vec<Py<PyAny>>)> {
        let map = self.lock();
        let blocks =
            |hash: &BlockHash| map.blocks(hash.as_bytes()).map(|(_, block)| block.clone_ref(py)).collect();
        map.hashes().map(|hash| (PyBytes::new(py, hash.as_bytes()), blocks(hash))).collect()
    }

    /// Returns a block of each group that has a hash there; `None` unless each group has one.
    ///
    /// Args:
    ///     block_hash: The hash without a group.
    ///     group_ids: The groups.
    fn find<'py>(
        &self,
        py: Python<'py>,
        block_hash: &Bound<'py, PyBytes>,
        group_ids: Vec<u32>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let mut found = Vec::with_capacity(group_ids.len());
        let is_found = find(py, &self.lock(), block_hash.as_bytes(), &group_ids, &mut found);
        if is_found { PyList::new(py, found).map(Some) } else { Ok(None) }
    }

    /// Returns the blocks of each group for the hashes from the first on, up to one that a group has no block of.
    ///
    /// Args:
    ///     block_hashes: The hashes without groups.
    ///     group_ids: The groups.
    fn find_prefix<'py>(
        &self,
        py: Python<'py>,
        block_hashes: &Bound<'py, PyAny>,
        group_ids: Vec<u32>,
    ) -> PyResult<ByGroup<'py>> {
        let hashes = block_hashes.try_iter()?.map(|hash| Ok(hash?.cast_into::<PyBytes>()?));
        let hashes: Vec<Bound<'py, PyBytes>> = hashes.collect::<PyResult<_>>()?;
        // The groups of the first hash, then those of the next.
        let mut found: Vec<Py<PyAny>> = Vec::with_capacity(hashes.len() * group_ids.len());
        let map = self.lock();
        let is_found = |hash: &&Bound<'py, PyBytes>| find(py, &map, hash.as_bytes(), &group_ids, &mut found);
        let count = hashes.iter().take_while(is_found).count();
        drop(map);
        let groups = group_ids.len();
        let of_group =
            |group: usize| PyList::new(py, (0..count).map(|block| found[block * groups + group].bind(py)));
        (0..groups).map(of_group).collect()
    }

    /// Gives full blocks their hashes in a group. A block that has a hash of fewer tokens loses that and all others.
    ///
    /// Args:
    ///     blocks: The blocks. Null blocks are left out.
    ///     block_hashes: As many hashes without a group.
    ///     group_id: The group.
    ///     num_tokens: The tokens of the prompt that the first hash covers.
    ///     block_size: How many more the next one covers.
    ///     block_mask: Which of them to hash; all, if it is `None`.
    ///     more_hashes: As in `BlockQueue.alloc`.
    ///
    /// Returns:
    ///     False, and nothing is done, if there are objects that are not blocks of a `BlockQueue`.
    ///
    /// Raises:
    ///     AssertionError: If a block has a hash of as many tokens, or the lengths differ. Nothing is done.
    ///     OverflowError: If a block ends above 2**64 tokens. Nothing is done.
    fn cache(
        &self,
        blocks: Vec<Bound<'_, PyAny>>,
        block_hashes: Vec<Bound<'_, PyBytes>>,
        group_id: u32,
        num_tokens: u64,
        block_size: u64,
        block_mask: Option<Vec<bool>>,
        more_hashes: &Bound<'_, PyDict>,
    ) -> PyResult<bool> {
        let masked = block_mask.as_ref().map_or(blocks.len(), Vec::len);
        if block_hashes.len() < blocks.len() || masked != blocks.len() {
            let (count, hashes) = (blocks.len(), block_hashes.len());
            let message = format!("{count} blocks were given with {hashes} hashes, and a mask of {masked}");
            return Err(PyAssertionError::new_err(message));
        }
        let mut full = Vec::with_capacity(blocks.len());
        for (at, (object, hash)) in blocks.iter().zip(&block_hashes).enumerate() {
            let Ok(object) = object.cast::<Block>() else { return Ok(false) };
            let block = object.get();
            let Some(number) = block.number() else { return Ok(false) };
            let table = block.lock();
            if table.is_null(number) || block_mask.as_ref().is_some_and(|mask| !mask[at]) {
                continue;
            }
            let tokens = u64::try_from(at)
                .ok()
                .and_then(|at| at.checked_mul(block_size)?.checked_add(num_tokens))
                .ok_or_else(|| {
                    PyOverflowError::new_err(format!(
                        "block {at} of {block_size} tokens each ends above 2**64 tokens"
                    ))
                })?;
            if let Some(HashedTokens { tokens: known, .. }) = table.hashed(number)
                && known.is_none_or(|known| known >= tokens)
            {
                let known = known.map_or_else(|| "unknown".to_owned(), |known| known.to_string());
                let message = format!("block {number} has a hash of {known} tokens, not fewer than {tokens}");
                return Err(PyAssertionError::new_err(message));
            }
            full.push((object, number, hash.as_bytes(), tokens));
        }
        for (object, number, hash, tokens) in full {
            let block = object.get();
            if block.lock().hashed(number).is_some() {
                self.take_hashes(&block.table, &[number], more_hashes)?;
            }
            let old = in_group(hash, group_id, |key| {
                block.lock().set_hash(number, HashedTokens { hash: key.into(), tokens: Some(tokens) });
                self.lock().insert(key, i64::from(number.number()), object.clone().into_any().unbind())
            });
            drop(old); // may run Python code
        }
        Ok(true)
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }
}
