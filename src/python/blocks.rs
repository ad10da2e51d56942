//! An engine's blocks, which it counts and hashes itself: `Block`, `BlockQueue` and `BlockMap`.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use pyo3::exceptions::{PyAssertionError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, widen};
use crate::cache::{BlockHash, BlockMap as Map, EvictionQueue};
use crate::index::{BadFree, BadFrees};

use super::args;
use super::debug::Debug;
use super::logging::Reporter;

/// Bytes of a hash and of the group behind it that need no allocation.
const SHORT: usize = 64;

/// The free blocks, and the objects of all blocks.
#[derive(Debug)]
struct Shared {
    queue: Mutex<EvictionQueue>,
    /// Set when the queue is made, as each block knows of it.
    blocks: OnceLock<Vec<Py<Block>>>,
    ends: OnceLock<[Py<Block>; 2]>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, EvictionQueue> {
        lock(&self.queue)
    }

    fn blocks(&self) -> &[Py<Block>] {
        self.blocks.get().expect("a queue is made with its blocks")
    }

    fn block(&self, number: u32) -> &Py<Block> {
        &self.blocks()[widen(number)]
    }

    fn ends(&self) -> &[Py<Block>; 2] {
        self.ends.get().expect("a queue is made with its ends")
    }
}

fn ownership(message: String) -> PyErr {
    Error::new(ErrorKind::IndexOwnership, message).into()
}

/// Where a block stands.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// It is one of the blocks of its queue.
    At(u32),
    /// It stands before the first, or behind the last.
    Front,
    Back,
}

#[derive(Debug)]
struct Hashed {
    hash: BlockHash,
    tokens: Option<u64>,
}

/// A block of an engine, by vLLM's names: its number, how many requests use it, and its hash. `BlockQueue` makes it.
#[pyclass(frozen, module = "kvpool", name = "Block")]
#[derive(Debug)]
pub(super) struct Block {
    place: Place,
    queue: Weak<Shared>,
    /// A weak reference to the pool of the engine.
    pool: Option<Py<PyAny>>,
    uses: AtomicI64,
    is_null: AtomicBool,
    hashed: Mutex<Option<Hashed>>,
    /// Whether there is a hash: to see without the lock that there is none.
    has_hash: AtomicBool,
}

impl Block {
    fn new(
        py: Python<'_>,
        place: Place,
        queue: &Arc<Shared>,
        pool: Option<&Py<PyAny>>,
    ) -> PyResult<Py<Self>> {
        let block = Self {
            place,
            queue: Arc::downgrade(queue),
            pool: pool.map(|pool| pool.clone_ref(py)),
            uses: AtomicI64::new(0),
            is_null: AtomicBool::new(false),
            hashed: Mutex::new(None),
            has_hash: AtomicBool::new(false),
        };
        Py::new(py, block)
    }

    const fn number(&self) -> i64 {
        match self.place {
            Place::At(number) => number as i64,
            Place::Front | Place::Back => -1,
        }
    }

    /// Its number in this queue.
    fn number_in(&self, queue: &Arc<Shared>) -> Option<u32> {
        let Place::At(number) = self.place else { return None };
        std::ptr::eq(self.queue.as_ptr(), Arc::as_ptr(queue)).then_some(number)
    }

    fn is_null(&self) -> bool {
        self.is_null.load(Relaxed)
    }

    fn take_hash(&self) -> Option<Hashed> {
        let mut hashed = lock(&self.hashed);
        self.has_hash.store(false, Relaxed);
        hashed.take()
    }

    fn set_hash(&self, hash: BlockHash, tokens: Option<u64>) -> PyResult<()> {
        let mut hashed = lock(&self.hashed);
        if hashed.is_some() {
            let message = format!("block {} already has a hash", self.number());
            return Err(PyAssertionError::new_err(message));
        }
        *hashed = Some(Hashed { hash, tokens });
        self.has_hash.store(true, Relaxed);
        Ok(())
    }
}

#[pymethods]
impl Block {
    /// Its number, from 0 on; -1 at the ends of a queue.
    #[getter]
    const fn block_id(&self) -> i64 {
        self.number()
    }

    /// How many requests use it.
    #[getter]
    fn ref_cnt(&self) -> i64 {
        self.uses.load(Relaxed)
    }

    #[setter]
    fn set_ref_cnt(&self, count: i64) {
        self.uses.store(count, Relaxed);
    }

    /// Whether it stands for no memory. It is never freed.
    #[getter(is_null)]
    fn get_is_null(&self) -> bool {
        self.is_null()
    }

    #[setter]
    fn set_is_null(&self, is_null: bool) {
        self.is_null.store(is_null, Relaxed);
    }

    /// The pool that its queue was made for; `None` if there was none, or it is gone.
    #[getter]
    fn pool(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.pool
            .as_ref()
            .map_or(Ok(None), |pool| pool.call0(py).map(|pool| (!pool.is_none(py)).then_some(pool)))
    }

    /// Its hash, bytes; `None` if it has none.
    #[getter]
    fn block_hash<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        lock(&self.hashed).as_ref().map(|hashed| PyBytes::new(py, hashed.hash.as_bytes()))
    }

    /// How many tokens of the prompt its hash covers.
    #[getter]
    fn block_hash_num_tokens(&self) -> Option<u64> {
        lock(&self.hashed).as_ref().and_then(|hashed| hashed.tokens)
    }

    /// Gives it a hash.
    ///
    /// Raises:
    ///     AssertionError: If it has one.
    #[pyo3(signature = (block_hash, num_tokens=None))]
    fn set_block_hash(&self, block_hash: &Bound<'_, PyBytes>, num_tokens: Option<u64>) -> PyResult<()> {
        self.set_hash(block_hash.as_bytes().into(), num_tokens)
    }

    /// Takes its hash.
    fn reset_hash(&self) {
        self.take_hash();
    }

    /// The free block before it, or the front of the queue; `None` if it is not free.
    #[getter]
    fn prev_free_block(&self, py: Python<'_>) -> Option<Py<Self>> {
        let shared = self.queue.upgrade()?;
        let queue = shared.lock();
        let before = match self.place {
            Place::Front => return None,
            Place::At(number) if !queue.contains(number) => return None,
            Place::At(number) => queue.before(number),
            Place::Back => queue.back(),
        };
        drop(queue);
        Some(before.map_or(&shared.ends()[0], |number| shared.block(number)).clone_ref(py))
    }

    /// The free block behind it, or the end of the queue; `None` if it is not free.
    #[getter]
    fn next_free_block(&self, py: Python<'_>) -> Option<Py<Self>> {
        let shared = self.queue.upgrade()?;
        let queue = shared.lock();
        let behind = match self.place {
            Place::Back => return None,
            Place::At(number) if !queue.contains(number) => return None,
            Place::At(number) => queue.behind(number),
            Place::Front => queue.front(),
        };
        drop(queue);
        Some(behind.map_or(&shared.ends()[1], |number| shared.block(number)).clone_ref(py))
    }

    fn __repr__(&self) -> String {
        let (number, uses) = (self.number(), self.uses.load(Relaxed));
        let hashed = if self.has_hash.load(Relaxed) { ", with a hash" } else { "" };
        format!("<Block {number}: ref_cnt {uses}{hashed}>")
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
#[pyclass(frozen, module = "kvpool", name = "BlockQueue")]
pub(super) struct BlockQueue {
    shared: Arc<Shared>,
    reporter: Reporter,
}

/// Blocks of a call: those of this queue with their numbers, and what else was given.
struct Given<'py> {
    own: Vec<(Bound<'py, Block>, u32)>,
    others: Vec<Bound<'py, PyAny>>,
}

impl BlockQueue {
    /// The blocks that are given, without null blocks. Iterating may run Python code.
    fn given<'py>(&self, blocks: &Bound<'py, PyAny>) -> PyResult<Given<'py>> {
        let mut given = Given { own: Vec::with_capacity(blocks.len().unwrap_or(0)), others: Vec::new() };
        for item in blocks.try_iter()? {
            let item = item?;
            match item.cast::<Block>().ok().map(|block| (block.get(), block.get().number_in(&self.shared))) {
                Some((block, _)) if block.is_null() => {}
                Some((_, Some(number))) => given.own.push((item.cast_into()?, number)),
                _ => given.others.push(item),
            }
        }
        Ok(given)
    }

    /// The numbers of blocks that must all be of this queue.
    fn numbers(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let number = |item: PyResult<Bound<'_, PyAny>>| {
            let item = item?;
            let number = item.cast::<Block>().ok().and_then(|block| block.get().number_in(&self.shared));
            number.ok_or_else(|| {
                let shown = item.repr().map_or_else(|_| args::kind_of(&item), |text| text.to_string());
                ownership(format!("{shown} is no block of this queue"))
            })
        };
        blocks.try_iter()?.map(number).collect()
    }

    /// Adds blocks that are not free, all or none.
    fn add(&self, numbers: &[u32], push: impl Fn(&mut EvictionQueue, u32) -> bool) -> PyResult<()> {
        let mut queue = self.shared.lock();
        let mut added = Vec::with_capacity(numbers.len());
        for &number in numbers {
            if !push(&mut queue, number) {
                for number in added {
                    queue.remove(number);
                }
                drop(queue);
                return Err(ownership(format!("block {number} is free already")));
            }
            added.push(number);
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
        let shared = Arc::new(Shared {
            queue: Mutex::new(EvictionQueue::full(count)),
            blocks: OnceLock::new(),
            ends: OnceLock::new(),
        });
        let block = |place| Block::new(py, place, &shared, pool.as_ref());
        let blocks = (0..count).map(|number| block(Place::At(number))).collect::<PyResult<_>>()?;
        shared.blocks.set(blocks).expect("it is new");
        shared.ends.set([block(Place::Front)?, block(Place::Back)?]).expect("it is new");
        Ok(Self { shared, reporter: Reporter::default() })
    }

    /// All blocks by their numbers, free or not: a new list.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.shared.blocks())
    }

    /// The number of free blocks.
    #[getter]
    fn num_free_blocks(&self) -> usize {
        self.shared.lock().len()
    }

    /// What stands before the first free block.
    #[getter]
    fn fake_free_list_head(&self, py: Python<'_>) -> Py<Block> {
        self.shared.ends()[0].clone_ref(py)
    }

    /// What stands behind the last free block.
    #[getter]
    fn fake_free_list_tail(&self, py: Python<'_>) -> Py<Block> {
        self.shared.ends()[1].clone_ref(py)
    }

    /// Takes the first free block, whatever is counted of it.
    ///
    /// Raises:
    ///     ValueError: If none is free.
    fn popleft(&self, py: Python<'_>) -> PyResult<Py<Block>> {
        let number = self.shared.lock().pop_front();
        let number = number.ok_or_else(|| PyValueError::new_err("No free blocks available"))?;
        Ok(self.shared.block(number).clone_ref(py))
    }

    /// Takes the first `n` free blocks, whatever is counted of them.
    ///
    /// Raises:
    ///     ValueError: If there are fewer. Nothing is taken.
    fn popleft_n(&self, py: Python<'_>, n: usize) -> PyResult<Vec<Py<Block>>> {
        let mut queue = self.shared.lock();
        let free = queue.len();
        if n > free {
            return Err(PyValueError::new_err(format!("{n} blocks asked for, {free} are free")));
        }
        let numbers: Vec<u32> = (0..n).map_while(|_| queue.pop_front()).collect();
        drop(queue);
        Ok(numbers.into_iter().map(|number| self.shared.block(number).clone_ref(py)).collect())
    }

    /// Takes a block out.
    ///
    /// Raises:
    ///     IndexOwnershipError: If it is of another queue.
    ///     RuntimeError: If it is not free.
    fn remove(&self, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let numbers = self.numbers(PyList::new(block.py(), [block])?.as_any())?;
        let was = numbers.iter().all(|&number| self.shared.lock().remove(number));
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
        let numbers: Vec<u32> = self.shared.lock().iter().collect();
        numbers.into_iter().map(|number| self.shared.block(number).clone_ref(py)).collect()
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
        let all = self.shared.blocks();
        let mut queue = self.shared.lock();
        let free = queue.len();
        if count > free {
            return Err(PyValueError::new_err(format!("{count} blocks asked for, {free} are free")));
        }
        if let Some(used) =
            queue.iter().take(count).find(|&number| all[widen(number)].get().uses.load(Relaxed) != 0)
        {
            let count = all[widen(used)].get().uses.load(Relaxed);
            return Err(PyAssertionError::new_err(format!(
                "block {used} is free, and counted {count} times"
            )));
        }
        let taken: Vec<u32> = (0..count).map_while(|_| queue.pop_front()).collect();
        let blocks = || taken.iter().map(|&number| &all[widen(number)]);
        for block in blocks() {
            block.get().uses.store(1, Relaxed);
        }
        drop(queue);
        let mut removed = Vec::new();
        let has_more = !more_hashes.is_empty();
        for block in blocks().map(Py::get).filter(|block| has_more || block.has_hash.load(Relaxed)) {
            if let Err(error) = cached.take_hashes(block, more_hashes, &mut removed) {
                let mut queue = self.shared.lock();
                for &number in taken.iter().rev() {
                    all[widen(number)].get().uses.store(0, Relaxed);
                    queue.push_front(number);
                }
                return Err(error);
            }
        }
        let removed = if events { removed } else { Vec::new() };
        let removed = removed.iter().map(|hash| PyBytes::new(py, hash.as_bytes())).collect();
        Ok((PyList::new(py, blocks())?, removed))
    }

    /// Gives back one use of each block. Those that nobody uses any more are free: the ones with a hash at the end, the
    /// others in front, both in the order given. Null blocks are left out.
    ///
    /// A block that nobody uses is dropped, and logged.
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
        let (mut first, mut bad) = (Vec::new(), BadFrees::default());
        let mut queue = self.shared.lock();
        for (block, number) in &given.own {
            let block = block.get();
            let uses = block.uses.load(Relaxed);
            if uses <= 0 {
                bad.add(i64::from(*number), BadFree::AlreadyFree, 1);
                continue;
            }
            block.uses.store(uses - 1, Relaxed);
            if uses > 1 {
                continue;
            }
            if keep_hashed && block.has_hash.load(Relaxed) {
                queue.push_back(*number);
            } else {
                first.push(*number);
            }
        }
        for number in first.into_iter().rev() {
            queue.push_front(number);
        }
        drop(queue);
        self.reporter.bad_frees(py, &bad, "block", given.own.len(), Debug::without_ledger(None));
        Ok(given.others)
    }

    /// Adds one use of each block, and takes those that were free out of the queue. Null blocks are left out.
    ///
    /// Returns:
    ///     What are not blocks of this queue, as they were given.
    ///
    /// Raises:
    ///     RuntimeError: If nobody uses a block, and it is not free either. Nothing is changed.
    fn retain<'py>(&self, blocks: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let given = self.given(blocks)?;
        let mut queue = self.shared.lock();
        let lost = |(block, number): &&(Bound<'py, Block>, u32)| {
            block.get().uses.load(Relaxed) <= 0 && !queue.contains(*number)
        };
        if let Some((block, _)) = given.own.iter().find(lost) {
            drop(queue);
            return Err(not_free(block.as_any()));
        }
        for (block, number) in &given.own {
            let uses = &block.get().uses;
            let before = uses.load(Relaxed);
            if before <= 0 {
                queue.remove(*number);
            }
            uses.store(before.max(0) + 1, Relaxed);
        }
        Ok(given.others)
    }

    fn __len__(&self) -> usize {
        self.num_free_blocks()
    }
}

fn not_free(block: &Bound<'_, PyAny>) -> PyErr {
    let shown = block.repr().map_or_else(|_| args::kind_of(block), |text| text.to_string());
    PyRuntimeError::new_err(format!("{shown} is not free"))
}

/// Free blocks in their order.
#[pyclass(frozen, module = "kvpool", name = "_BlockIterator")]
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
        if matches!(next.get().place, Place::Back) {
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
#[pyclass(frozen, module = "kvpool", name = "BlockMap", subclass)]
#[derive(Default)]
pub(super) struct BlockMap {
    map: Mutex<Map<Py<PyAny>>>,
}

impl BlockMap {
    fn lock(&self) -> MutexGuard<'_, Map<Py<PyAny>>> {
        lock(&self.map)
    }

    /// Takes all hashes from a block, and adds those that the map had of it to `removed`.
    fn take_hashes(
        &self,
        block: &Block,
        more: &Bound<'_, PyDict>,
        removed: &mut Vec<BlockHash>,
    ) -> PyResult<()> {
        let (number, mut others) = (block.number(), Vec::new());
        if let Some(set) = more.get_item(number)? {
            for hash in set.try_iter()? {
                others.push(BlockHash::from(hash?.cast::<PyBytes>()?.as_bytes()));
            }
            more.del_item(number)?;
        }
        let own = block.take_hash().map(|hashed| hashed.hash);
        for hash in own.into_iter().chain(others) {
            let value = self.lock().remove(hash.as_bytes(), number);
            if value.is_some() {
                removed.push(hash);
            }
            drop(value); // may run Python code
        }
        Ok(())
    }
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
            Ok(block) => block.get().number(),
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
            let Ok(block) = object.cast::<Block>() else { return Ok(false) };
            let is_chosen = block_mask.as_ref().is_none_or(|mask| mask[at]);
            if is_chosen && !block.get().is_null() {
                full.push((block, hash.as_bytes(), num_tokens + at as u64 * block_size));
            }
        }
        for (block, _, tokens) in &full {
            let hashed = lock(&block.get().hashed);
            if let Some(known) =
                hashed.as_ref().filter(|known| known.tokens.is_none_or(|known| known >= *tokens))
            {
                let message = format!(
                    "block {} has a hash of {:?} tokens, not fewer than {tokens}",
                    block.get().number(),
                    known.tokens
                );
                return Err(PyAssertionError::new_err(message));
            }
        }
        for (object, hash, tokens) in full {
            let block = object.get();
            if block.has_hash.load(Relaxed) {
                self.take_hashes(block, more_hashes, &mut Vec::new())?;
            }
            in_group(hash, group_id, |key| {
                block.set_hash(key.into(), Some(tokens))?;
                let old = self.lock().insert(key, block.number(), object.clone().into_any().unbind());
                drop(old); // may run Python code
                Ok::<_, PyErr>(())
            })?;
        }
        Ok(true)
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }
}
