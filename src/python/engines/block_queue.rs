//! `kvpool._kvpool.BlockQueue`: the blocks of an engine, and the order in which free ones are taken.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use pyo3::exceptions::{PyAssertionError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::base::sync::lock;
use crate::base::{BlockId, Error, Id, try_with_capacity, widen};
use crate::cache::{PolicyKind, WaitingId, WaitingRank};
use crate::engines::{BlockTable, HashedBlocks, NotTaken, QueueEnd, TakenBlocks};

use super::block::{Block, BlockPlace, Objects, description_of, ownership_error};
use super::block_map::BlockMap;
use super::turns::{after_turn, session_of};
use crate::python::args;
use crate::python::debug::Debug;
use crate::python::logging::Reporter;
use crate::python::pool_name::PoolName;

/// Free blocks in the order in which they are used again, and all blocks: the numbers from 0 to `count`, all free,
/// the lowest in front.
///
/// The methods with vLLM's names work like those of its `FreeKVCacheBlockQueue`; `alloc`, `free` and `retain`
/// are calls for many blocks at once. Calls are atomic and thread-safe. A block of another queue is never
/// added.
///
/// Args:
///     count: Blocks, below 2**31.
///     pool: The pool of the engine, which blocks name. It is not kept alive.
///
/// Raises:
///     ConfigError: If `count` is 0, negative, or too large.
#[pyclass(frozen, module = "kvpool._kvpool", name = "BlockQueue")]
pub(in crate::python) struct BlockQueue {
    table: Arc<Mutex<BlockTable>>,
    objects: Arc<OnceLock<Objects>>,
    debug: Debug,
    reporter: Reporter,
}

/// The blocks of a call: the numbers of those of this queue, and the other objects.
struct BlockArgs<'py> {
    own: Vec<BlockId>,
    others: Vec<Bound<'py, PyAny>>,
}

/// A request in the waiting queue: its rank, and its number among those of that rank.
type Waiting = (i64, i64, i64);

const fn waiting_id((priority, arrival, number): Waiting) -> WaitingId {
    WaitingId::new(WaitingRank { priority, arrival }, number)
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

    /// Separates the blocks of this queue from other objects. Iterating may run Python code.
    fn given<'py>(&self, blocks: &Bound<'py, PyAny>) -> PyResult<BlockArgs<'py>> {
        let mut given = BlockArgs { own: Vec::with_capacity(blocks.len().unwrap_or(0)), others: Vec::new() };
        for item in blocks.try_iter()? {
            let item = item?;
            match item.cast::<Block>().ok().and_then(|block| block.get().number_in(&self.table)) {
                Some(number) => given.own.push(number),
                None => given.others.push(item),
            }
        }
        Ok(given)
    }

    /// Returns the numbers of blocks, all of which must be of this queue.
    fn numbers(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
        let given = self.given(blocks)?;
        match given.others.first() {
            Some(other) => {
                Err(ownership_error(format!("{} is no block of this queue", description_of(other))))
            }
            None => Ok(given.own),
        }
    }

    /// Adds blocks that are not free, all or none.
    fn add(&self, numbers: &[BlockId], end: QueueEnd) -> PyResult<()> {
        let added = self.lock().push_free(numbers, end);
        added.map_err(|number| ownership_error(format!("block {number} is free already")))
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
        let reporter = Reporter::new(&PoolName::next("BlockQueue"));
        Ok(Self { table, objects, debug: Debug::without_ledger(None), reporter })
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

    /// Takes free blocks with a hash by a policy of `PrefixCache` from now on, and not in the order of the queue: first the
    /// block that is worth least of those that no block with a hash follows, by what `add_prompt` says. Blocks without a
    /// hash are taken first, as before. Call this before the first block is taken.
    ///
    /// Args:
    ///     policy: One of `PrefixCache`, such as "adaptive".
    ///     block_size: Tokens in a block, below 2**20.
    ///
    /// Raises:
    ///     ConfigError: If there is no such policy, or the block size is 0, negative, or too large.
    fn evict_by(&self, policy: &str, block_size: &Bound<'_, PyAny>) -> PyResult<()> {
        let kind = PolicyKind::parse(policy)?;
        let asked = args::size("block_size", block_size)?;
        let tokens =
            u32::try_from(asked).ok().filter(|tokens| (1..1 << 20).contains(tokens)).ok_or_else(|| {
                Error::config(format!("block_size is {asked}; it must be 1 to 2**20 - 1 tokens"))
            })?;
        self.lock().evict_by(kind, tokens);
        Ok(())
    }

    /// Tells the policy that a request has looked up a prompt: the time by which it counts. The request is compared to others
    /// by what `set_user` has said was not found, so this comes before the next `set_user`.
    ///
    /// Args:
    ///     tokens: Tokens of the prompt.
    ///     session: The session of which the request is a turn, by its name; `None` for none.
    #[pyo3(signature = (tokens, session=None))]
    fn look_up(&self, tokens: u64, session: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let session = session.map(session_of).transpose()?;
        self.lock().look_up(tokens, session);
        Ok(())
    }

    /// Tells the policy which request uses blocks from now on, by `retain` and `remove`, and adds some, by `add_prompt`;
    /// at first it is none. Blocks that one session alone has used are those that its turns and its end can leave. How
    /// many tokens of a request were not found, compared to other requests, tells something of whether it will be
    /// continued.
    ///
    /// Args:
    ///     session: The name of the session of which the request is a turn; `None` for none.
    ///     tokens: Tokens of its prompt, in each of the steps that compute it; 0 in others, in which blocks that are added are as
    ///         new as those before them.
    ///     found: Those of them that were found in the beginning.
    #[pyo3(signature = (session, tokens=0, found=0))]
    fn set_user(&self, session: Option<&Bound<'_, PyAny>>, tokens: u32, found: u32) -> PyResult<()> {
        let session = session.map(session_of).transpose()?;
        self.lock().set_user(session, found.min(tokens)..tokens);
        Ok(())
    }

    /// Tells the policy that blocks follow each other in a prompt. Those it knows stay as they are; a block without a
    /// hash, and what is behind it, is left out.
    ///
    /// Args:
    ///     blocks: The blocks.
    ///     before: The block before them; `None` at the beginning of a prompt.
    ///     session: The name of the session of which the request is a turn; `None` for none.
    ///
    /// Raises:
    ///     IndexOwnershipError: If one is of another queue. Nothing is changed.
    #[pyo3(signature = (blocks, before=None, session=None))]
    fn add_prompt(
        &self,
        blocks: &Bound<'_, PyAny>,
        before: Option<&Bound<'_, PyAny>>,
        session: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let numbers = self.numbers(blocks)?;
        let before =
            before.map(|block| self.numbers(PyList::new(block.py(), [block])?.as_any())).transpose()?;
        let session = session.map(session_of).transpose()?;
        self.lock().add_prompt(before.and_then(|before| before.first().copied()), &numbers, session);
        Ok(())
    }

    /// Tells the policy that a turn of a session is over, before its blocks are freed. If it does not continue the turn
    /// before, what only this session has used of that is taken first, down to the block where they part.
    ///
    /// Args:
    ///     session: The name of the session.
    ///     blocks: The blocks of the turn; none to say only what follows.
    ///     pause: What the session waits for, such as "bash" or "user". The policy "adaptive" learns how long pauses of
    ///         each kind are, in tokens looked up. 256 kinds are told apart.
    ///     is_last: Whether the session ends: what only it has used is taken first.
    ///
    /// Raises:
    ///     ValueError: If a session that ends pauses. Nothing is changed.
    ///     IndexOwnershipError: If a block is of another queue. Nothing is changed.
    #[pyo3(signature = (session, blocks, *, pause=None, is_last=false))]
    fn end_turn(
        &self,
        session: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        pause: Option<&str>,
        is_last: bool,
    ) -> PyResult<()> {
        let (after, session) = (after_turn(pause, is_last)?, session_of(session)?);
        let numbers = self.numbers(blocks)?;
        self.lock().end_turn(session, &numbers, after);
        Ok(())
    }

    /// Adds a request to the engine's waiting queue, for which blocks were found: they are taken after all others with a hash,
    /// those of the last request first, until the request is removed. A block that several waiting requests need counts as
    /// of the first of them in the queue. Without a policy nothing changes.
    ///
    /// Args:
    ///     blocks: The blocks, in the order of the prompt. Those that no prompt has named are left out.
    ///     is_next: Whether the request is the next one, as after it was preempted, and not the last one.
    ///     rank: Two numbers, such as a priority and a time of arrival, of a queue that is not served by arrival: the
    ///         request is behind those of lower ranks, and is the next or the last one among those of the same.
    ///
    /// Returns:
    ///     The request in the queue: the rank, and a number, which is lower for earlier requests of that rank.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a block is of another queue. Nothing is changed.
    #[pyo3(signature = (blocks, *, is_next=false, rank=(0, 0)))]
    fn add_waiting(&self, blocks: &Bound<'_, PyAny>, is_next: bool, rank: (i64, i64)) -> PyResult<Waiting> {
        let numbers = self.numbers(blocks)?;
        let end = if is_next { QueueEnd::Front } else { QueueEnd::Back };
        let (priority, arrival) = rank;
        let request = self.lock().add_waiting(&numbers, WaitingRank { priority, arrival }, end);
        Ok((priority, arrival, request.number()))
    }

    /// Records that blocks were found, too, for a request that is in the waiting queue: others have computed them.
    ///
    /// Args:
    ///     request: What `add_waiting` returned. One that was removed needs nothing.
    ///     blocks: The blocks, as in `add_waiting`. Those that were found before may be among them.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a block is of another queue. Nothing is changed.
    fn extend_waiting(&self, request: Waiting, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let numbers = self.numbers(blocks)?;
        self.lock().extend_waiting(waiting_id(request), &numbers);
        Ok(())
    }

    /// Removes a request from the waiting queue, because it runs now or does not go on.
    ///
    /// Args:
    ///     request: What `add_waiting` returned. One that is not in the queue changes nothing.
    fn remove_waiting(&self, request: Waiting) {
        self.lock().remove_waiting(waiting_id(request));
    }

    /// The object before the first free block.
    #[getter]
    fn fake_free_list_head(&self, py: Python<'_>) -> Py<Block> {
        self.objects().front.clone_ref(py)
    }

    /// The object after the last free block.
    #[getter]
    fn fake_free_list_tail(&self, py: Python<'_>) -> Py<Block> {
        self.objects().back.clone_ref(py)
    }

    /// Takes the first free block, regardless of its reference count.
    ///
    /// Raises:
    ///     ValueError: If none is free.
    fn popleft(&self, py: Python<'_>) -> PyResult<Py<Block>> {
        let number = self.lock().pop();
        number
            .map(|number| self.object(py, number))
            .ok_or_else(|| PyValueError::new_err("No free blocks available"))
    }

    /// Takes the first `n` free blocks, regardless of their reference counts.
    ///
    /// Raises:
    ///     ValueError: If there are fewer. Nothing is taken.
    fn popleft_n(&self, py: Python<'_>, n: usize) -> PyResult<Vec<Py<Block>>> {
        let mut table = self.lock();
        let free = table.queue().len();
        if n > free {
            return Err(too_few_blocks_error(n, free));
        }
        let mut numbers: Vec<BlockId> = try_with_capacity(n)?;
        numbers.extend((0..n).map_while(|_| table.pop()));
        drop(table);
        Ok(numbers.into_iter().map(|number| self.object(py, number)).collect())
    }

    /// Removes a block from the queue.
    ///
    /// Raises:
    ///     IndexOwnershipError: If it is of another queue.
    ///     RuntimeError: If it is not free.
    fn remove(&self, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let numbers = self.numbers(PyList::new(block.py(), [block])?.as_any())?;
        let was = numbers.iter().all(|&number| self.lock().remove_free(number));
        if was { Ok(()) } else { Err(not_free_error(block)) }
    }

    /// Adds a block at the end, regardless of its reference count.
    ///
    /// Raises:
    ///     IndexOwnershipError: If it is of another queue, or free already. Nothing is changed.
    fn append(&self, block: &Bound<'_, PyAny>) -> PyResult<()> {
        self.append_n(PyList::new(block.py(), [block])?.as_any())
    }

    /// Adds blocks at the end, in their order; the rest as `append`.
    fn append_n(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        self.add(&self.numbers(blocks)?, QueueEnd::Back)
    }

    /// Adds blocks in front, in their order; the rest as `append`.
    fn prepend_n(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut numbers = self.numbers(blocks)?;
        numbers.reverse();
        self.add(&numbers, QueueEnd::Front)
    }

    /// Returns the free blocks, the first one in front.
    fn get_all_free_blocks(&self, py: Python<'_>) -> Vec<Py<Block>> {
        let numbers: Vec<BlockId> = self.lock().queue().iter().collect();
        numbers.into_iter().map(|number| self.object(py, number)).collect()
    }

    /// Returns an iterator over the free blocks after a block, or over all. It ends where the queue ends, or
    /// at a block that is taken meanwhile.
    #[pyo3(signature = (cursor))]
    fn iter_blocks_after(&self, py: Python<'_>, cursor: Option<Py<Block>>) -> BlockIterator {
        let here = cursor.unwrap_or_else(|| self.fake_free_list_head(py));
        BlockIterator { here: Mutex::new(Some(here)) }
    }

    /// Takes the first free blocks, with a reference count of 1 each. They lose their hashes.
    ///
    /// Args:
    ///     count: The number of blocks.
    ///     cached: The map of the hashes.
    ///     more_hashes: By the number of a block, a set of hashes that it has beside its own. Those of taken blocks are removed.
    ///     events: Whether to return the hashes.
    ///
    /// Returns:
    ///     The blocks, and the hashes that are no longer in the map, in order; none without `events`.
    ///
    /// Raises:
    ///     ValueError: If there are fewer free blocks. Nothing is taken.
    ///     AssertionError: If one of them is counted as used. Nothing is taken.
    ///     TypeError: If `more_hashes` has an object that is not bytes. Nothing is taken.
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
            NotTaken::Short { free } => too_few_blocks_error(count, free),
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
    ///     The objects that are not blocks of this queue, unchanged.
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

    /// Adds one use of each block, and removes those that were free from the queue. Null blocks are left out.
    ///
    /// Returns:
    ///     The objects that are not blocks of this queue, unchanged.
    ///
    /// Raises:
    ///     RuntimeError: If a block is neither used nor free. Nothing is changed.
    fn retain<'py>(&self, blocks: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let given = self.given(blocks)?;
        let retained = self.lock().retain(&given.own);
        retained.map_err(|lost| not_free_error(self.objects().at(BlockPlace::At(lost)).bind(blocks.py())))?;
        Ok(given.others)
    }

    /// Returns how many of these blocks no request uses, null blocks left out.
    ///
    /// Args:
    ///     blocks: The blocks, of any kind.
    fn count_unused(&self, blocks: &Bound<'_, PyAny>) -> PyResult<usize> {
        let given = self.given(blocks)?;
        let table = self.lock();
        let own = given.own.iter().filter(|&&block| table.uses(block) == 0 && !table.is_null(block)).count();
        drop(table);
        let is_unused = |block: &Bound<'_, PyAny>| {
            Ok(block.getattr("ref_cnt")?.eq(0)? && !block.getattr("is_null")?.is_truthy()?)
        };
        let others = given.others.iter().map(is_unused).collect::<PyResult<Vec<bool>>>()?;
        Ok(own + others.into_iter().filter(|&unused| unused).count())
    }

    fn __len__(&self) -> usize {
        self.num_free_blocks()
    }
}

fn too_few_blocks_error(asked: usize, free: usize) -> PyErr {
    PyValueError::new_err(format!("{asked} blocks asked for, {free} are free"))
}

fn not_free_error(block: &Bound<'_, PyAny>) -> PyErr {
    PyRuntimeError::new_err(format!("{} is not free", description_of(block)))
}

/// Free blocks in their order.
#[pyclass(frozen, module = "kvpool._kvpool", name = "_BlockIterator")]
pub(in crate::python) struct BlockIterator {
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
