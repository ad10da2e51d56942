//! `kvpool._kvpool.BlockMap`: the blocks of an engine by their hashes.

use std::sync::{Mutex, MutexGuard};

use pyo3::exceptions::{PyAssertionError, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::base::sync::lock;
use crate::base::{BlockId, Id};
use crate::engines::{BlockHash, BlockMap as Map, BlockTable, HashedTokens, RunEnds, last_run};

use super::block::Block;

/// Bytes of a hash and of the group behind it that need no allocation.
const SHORT: usize = 64;

/// An engine's blocks by their hashes: bytes of any length that end with the group of layers, 4 bytes, the highest
/// first, as vLLM's `BlockHashWithGroupId` has them. Several blocks may have one hash.
///
/// The methods with vLLM's names work like those of its `BlockHashToBlockMap`; `find`, `find_prefix` and
/// `cache` are calls for groups and for many blocks. Calls are atomic and thread-safe.
#[pyclass(frozen, module = "kvpool._kvpool", name = "BlockMap", subclass)]
#[derive(Default)]
pub(in crate::python) struct BlockMap {
    map: Mutex<Map<Py<PyAny>>>,
}

impl BlockMap {
    fn lock(&self) -> MutexGuard<'_, Map<Py<PyAny>>> {
        lock(&self.map)
    }

    /// Removes all hashes of blocks of a table, and returns those that were in the map, by block in their
    /// order. If `more` has an object that is not a hash, nothing is changed.
    pub(in crate::python) fn take_hashes(
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

/// Removes the hashes of these blocks from `more`, and returns them in the order of the blocks.
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

/// Appends the block of each group with the hash to `found`, up to the first group without one. Returns whether all
/// had one.
fn extend_with_groups(
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

/// Separates blocks that stand group after group for each hash.
fn by_group<'py>(py: Python<'py>, found: &[Py<PyAny>], groups: usize) -> PyResult<ByGroup<'py>> {
    let of_group = |group: usize| {
        PyList::new(py, found.chunks_exact(groups).map(|of_hash| of_hash[group].bind(py)).collect::<Vec<_>>())
    };
    (0..groups).map(of_group).collect()
}

fn hashes_of<'py>(hashes: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    hashes.try_iter()?.map(|hash| Ok(hash?.cast_into::<PyBytes>()?)).collect()
}

#[pymethods]
impl BlockMap {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Returns the block that has had this hash for the longest time; `None` if no block has it.
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

    /// Removes a hash of the block with a number, and returns the block; `None` if the block does not have
    /// it.
    fn pop(&self, key: &Bound<'_, PyBytes>, block_id: i64) -> Option<Py<PyAny>> {
        self.lock().remove(key.as_bytes(), block_id)
    }

    /// Removes all hashes of all blocks.
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
        let is_found = extend_with_groups(py, &self.lock(), block_hash.as_bytes(), &group_ids, &mut found);
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
        let hashes = hashes_of(block_hashes)?;
        let mut found: Vec<Py<PyAny>> = Vec::with_capacity(hashes.len() * group_ids.len());
        let map = self.lock();
        let count = hashes
            .iter()
            .take_while(|hash| extend_with_groups(py, &map, hash.as_bytes(), &group_ids, &mut found))
            .count();
        drop(map);
        found.truncate(count * group_ids.len());
        by_group(py, &found, group_ids.len())
    }

    /// Returns the last `need` hashes in a row of which each group has a block, as the position of the first and the
    /// blocks of each group. If there are none, returns those from position 0 on: fewer than `need`, perhaps none.
    ///
    /// Args:
    ///     block_hashes: The hashes without groups.
    ///     group_ids: The groups.
    ///     need: How many blocks a window needs; 1 for a state.
    ///     period: A run ends where the number of hashes up to its end is `first` and a multiple of this.
    ///     first: As above.
    #[pyo3(signature = (block_hashes, group_ids, need, *, period=1, first=0))]
    fn find_last_run<'py>(
        &self,
        py: Python<'py>,
        block_hashes: &Bound<'py, PyAny>,
        group_ids: Vec<u32>,
        need: usize,
        period: usize,
        first: usize,
    ) -> PyResult<(usize, ByGroup<'py>)> {
        let hashes = hashes_of(block_hashes)?;
        let map = self.lock();
        let run = last_run(hashes.len(), need, RunEnds { period, first }, |at| {
            let hash = hashes[at].as_bytes();
            group_ids.iter().all(|&group| in_group(hash, group, |key| map.first(key).is_some()))
        });
        let mut found: Vec<Py<PyAny>> = Vec::with_capacity(run.len() * group_ids.len());
        for hash in &hashes[run.clone()] {
            extend_with_groups(py, &map, hash.as_bytes(), &group_ids, &mut found);
        }
        drop(map);
        Ok((run.start, by_group(py, &found, group_ids.len())?))
    }

    /// Gives full blocks their hashes in a group. A block that has a hash of fewer tokens loses that and all others.
    ///
    /// Args:
    ///     blocks: The blocks. Null blocks are left out.
    ///     block_hashes: As many hashes without a group.
    ///     group_id: The group.
    ///     num_tokens: The tokens of the prompt that the first hash covers.
    ///     block_size: The number of tokens that each further hash covers in addition.
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
