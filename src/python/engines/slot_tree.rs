//! `SlotTree` and its results, for the adapter of pymllm's prefix cache.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::base::{Device, Error, Id, IndexVec};
use crate::cache::NodeHandle;
use crate::engines::{EvictedNodes, Inserted, NodePrefix, SlotNode, SlotTree as Tree, SlotTreeConfig};
use crate::index::CallGuard;
use crate::memory::Stream;
use crate::python::args::{self, Arg};
use crate::python::export::to_tensor;
use crate::python::framework::current_stream;
use crate::python::page_keys::namespace_of;
use crate::python::pool_name::PoolName;
use crate::python::token_to_kv_pool_allocator::TokenToKvPoolAllocator;
use crate::python::tokens::with_tokens;
use crate::tensor::TensorView;

/// Finds slots by tokens for an engine that holds nodes, locks them and evicts by itself, and owns the slots.
///
/// A node is a run of tokens with their slots. Its number is an int below 2**63 that no other node of the
/// tree ever has. When a node is split, the deeper half keeps its number, its end and its locks. Prefixes are
/// found in whole pages, and compared token by token. Tokens and namespaces are those of `PrefixCache`.
///
/// Slots that are inserted belong to the tree until they are evicted: freeing them through the allocator is
/// an invalid free. An insertion frees nothing; slots of tokens that were cached before stay the caller's.
/// The slots of an insertion after its last whole page are kept, too, in a node that no look-up finds. The
/// next insertion of the same slots takes this node over, and it is not evicted while its parent is locked.
/// If its parent is the root, it is not evicted until the same slots are inserted again.
///
/// All calls are atomic and thread-safe. They wait for a GPU only for the values of an argument that the host
/// does not have. Clearing the allocator empties the tree. Slots are valid, and reused, in the order of the
/// current stream.
///
/// Args:
///     allocator: The allocator of the slots, with `page_size` 1. With `None`, slots are plain ints of the
///         caller, and evicted ones are only listed; then only `verify` checks that slots differ, not each
///         insertion.
///     page_size: Tokens that are found together.
///     name: The owner of cached slots in reports. Defaults to the class name and a number.
///
/// Raises:
///     ConfigError: If `page_size` is 0, or the allocator has pages of more than one slot.
#[pyclass(frozen, module = "kvpool._kvpool", name = "SlotTree", weakref)]
pub(in crate::python) struct SlotTree {
    tree: Tree,
    allocator: Option<Py<TokenToKvPoolAllocator>>,
    device: Device,
}

impl SlotTree {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        current_stream(py, self.device)
    }

    /// Records the caller's line for the allocator, if it debugs.
    fn begin(&self, py: Python<'_>) -> PyResult<Option<CallGuard>> {
        self.allocator.as_ref().map_or(Ok(None), |allocator| allocator.get().debug.begin(py, None))
    }
}

/// Converts an argument that names a node.
fn node_of(object: &Bound<'_, PyAny>) -> PyResult<NodeHandle> {
    let number = args::int(object)?;
    let node = u64::try_from(number).map(NodeHandle::new);
    node.map_err(|_| Error::stale(format!("no node has the number {number}")).into())
}

fn numbers(nodes: &[NodeHandle]) -> Vec<u64> {
    nodes.iter().map(|node| node.number()).collect()
}

#[pymethods]
impl SlotTree {
    #[new]
    #[pyo3(signature = (allocator=None, *, page_size=Arg::Missing, name=None),
           text_signature = "(allocator=None, *, page_size=1, name=None)")]
    fn new(
        allocator: Option<Py<TokenToKvPoolAllocator>>,
        page_size: Arg<'_>,
        name: Option<String>,
    ) -> PyResult<Self> {
        let config = SlotTreeConfig {
            page_size: page_size.size("page_size", 1)?,
            name: name.unwrap_or_else(|| PoolName::next("SlotTree").to_string()),
        };
        let pool = allocator.as_ref().map(|allocator| Arc::clone(&allocator.get().pool));
        let device = pool.as_ref().map_or(Device::Cpu, |pool| pool.device());
        Ok(Self { tree: Tree::new(config, pool)?, allocator, device })
    }

    /// Finds the longest cached prefix, in whole pages, and refreshes it. Splits a node if none ends there.
    ///
    /// Args:
    ///     tokens: Token ids of the prompt.
    ///     namespace: A str, bytes or an int; `None` is a namespace of its own.
    ///
    /// Raises:
    ///     ArgumentError: If a token is outside of [0, 2**31).
    ///     TypeError: If `tokens` are not ints, or `namespace` is of another type.
    #[pyo3(signature = (tokens, *, namespace=None))]
    fn r#match(
        &self,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<SlotTreeMatch> {
        let namespace = namespace_of(namespace)?;
        with_tokens(tokens, |tokens| Ok(SlotTreeMatch(self.tree.find(&namespace, tokens)?)))
    }

    /// Adds tokens with their slots, up to the first slot that is 0 or not allocated.
    ///
    /// Args:
    ///     tokens: Token ids, from the first on.
    ///     slots: Their slots, ints of the same length. The caller's ownership of those that were not cached
    ///         before passes to the tree. The values are copied.
    ///     namespace: As in `match`.
    ///
    /// Raises:
    ///     ArgumentError: If a token or slot is outside of [0, 2**31), or `tokens` and `slots` differ in length.
    ///     IndexOwnershipError: If a slot is listed twice, or cached with other tokens. Nothing is changed.
    ///     StaleError: If another thread clears the allocator meanwhile. Nothing is changed.
    ///     TypeError: As in `match`.
    #[pyo3(signature = (tokens, slots, *, namespace=None))]
    fn insert(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<SlotTreeInsertion> {
        let namespace = namespace_of(namespace)?;
        let slots = args::indices(slots)?.values(py)?;
        let _acting = self.begin(py)?;
        let stream = self.stream(py)?;
        with_tokens(tokens, |tokens| {
            Ok(SlotTreeInsertion(self.tree.insert(&namespace, tokens, &slots, stream)?))
        })
    }

    /// Keeps a node and its ancestors from being evicted. Locks of a node are counted.
    ///
    /// Raises:
    ///     StaleError: If the node was evicted.
    fn lock(&self, node: &Bound<'_, PyAny>) -> PyResult<()> {
        Ok(self.tree.lock(node_of(node)?)?)
    }

    /// Undoes one `lock` of a node.
    ///
    /// Raises:
    ///     StaleError: If the node was evicted.
    ///     IndexOwnershipError: If the node has no lock. Nothing is changed.
    fn unlock(&self, node: &Bound<'_, PyAny>) -> PyResult<()> {
        Ok(self.tree.unlock(node_of(node)?)?)
    }

    /// Evicts whole nodes, ends of prefixes first, until at least `tokens` slots became free or nothing is
    /// evictable. The tokens of insertions after their last whole page go first, then the least recently used nodes.
    ///
    /// Raises:
    ///     ArgumentError: If `tokens` is negative.
    fn evict(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<SlotTreeEviction> {
        let tokens = args::count("tokens", tokens)?;
        let _acting = self.begin(py)?;
        Ok(SlotTreeEviction(self.tree.evict(tokens, self.stream(py)?)))
    }

    /// Gives up every node, locked or not, and frees the slots.
    fn clear(&self, py: Python<'_>) -> PyResult<SlotTreeEviction> {
        let _acting = self.begin(py)?;
        Ok(SlotTreeEviction(self.tree.clear(self.stream(py)?)))
    }

    /// Returns the slots of a prefix: 1-D in the allocator's `index_dtype`, on its device, or in host memory
    /// without one. A copy.
    ///
    /// Args:
    ///     node: The node at the end of the prefix.
    ///
    /// Raises:
    ///     StaleError: If the node was evicted.
    fn slots(&self, py: Python<'_>, node: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &self.tree.slots(node_of(node)?, self.stream(py)?)?)
    }

    /// Describes a node as it is now. This is a call for debugging, because it looks at every node.
    ///
    /// Raises:
    ///     StaleError: If the node was evicted.
    fn node(&self, node: &Bound<'_, PyAny>) -> PyResult<SlotTreeNode> {
        Ok(SlotTreeNode(self.tree.info(node_of(node)?)?))
    }

    /// The root node, which is the end of the empty prefix. It changes when the tree is cleared.
    #[getter]
    fn root(&self) -> u64 {
        self.tree.root().number()
    }

    /// Returns the number of cached tokens.
    fn cached_size(&self) -> usize {
        let sizes = self.tree.sizes();
        sizes.evictable + sizes.locked
    }

    /// Returns the number of cached tokens that no lock keeps, those of inner nodes included.
    fn evictable_size(&self) -> usize {
        self.tree.sizes().evictable
    }

    /// Returns the number of cached tokens that locks keep.
    fn locked_size(&self) -> usize {
        self.tree.sizes().locked
    }

    /// Returns the statistics of the tree: `cached`, `evictable` and `locked` in tokens, `nodes`, and the
    /// `bytes` of the bookkeeping. Looks at every node.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.tree.stats();
        let all = PyDict::new(py);
        all.set_item("cached", stats.sizes.evictable + stats.sizes.locked)?;
        all.set_item("evictable", stats.sizes.evictable)?;
        all.set_item("locked", stats.sizes.locked)?;
        all.set_item("nodes", stats.nodes)?;
        all.set_item("bytes", stats.bytes)?;
        Ok(all)
    }

    /// Checks every invariant of the tree.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a check fails, with a description.
    fn verify(&self) -> PyResult<()> {
        Ok(self.tree.verify()?)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.allocator.as_ref().map_or(Ok(()), |allocator| visit.call(allocator))
    }
}

/// A prefix that `SlotTree.match` found.
#[pyclass(frozen, module = "kvpool._kvpool", name = "SlotTreeMatch")]
pub(in crate::python) struct SlotTreeMatch(NodePrefix);

#[pymethods]
impl SlotTreeMatch {
    /// The node that ends where the prefix ends; the root if nothing was found.
    #[getter]
    const fn node(&self) -> u64 {
        self.0.node.number()
    }

    /// Tokens of the prefix, in whole pages.
    #[getter]
    const fn length(&self) -> usize {
        self.0.len
    }
}

/// The result of `SlotTree.insert`.
#[pyclass(frozen, module = "kvpool._kvpool", name = "SlotTreeInsertion")]
pub(in crate::python) struct SlotTreeInsertion(Inserted);

#[pymethods]
impl SlotTreeInsertion {
    /// The node that ends where the inserted tokens end.
    #[getter]
    const fn node(&self) -> u64 {
        self.0.node.number()
    }

    /// Tokens that were cached before, in whole pages. Slots that the caller owned for them are the caller's
    /// still.
    #[getter]
    const fn cached(&self) -> usize {
        self.0.cached
    }

    /// Tokens inserted: those before the first slot that is 0 or not allocated.
    #[getter]
    const fn length(&self) -> usize {
        self.0.len
    }

    /// Nodes that no longer exist: tails that became part of another node.
    #[getter]
    fn removed_nodes(&self) -> Vec<u64> {
        numbers(&self.0.removed_nodes)
    }
}

/// The result of `SlotTree.evict` and `SlotTree.clear`.
#[pyclass(frozen, module = "kvpool._kvpool", name = "SlotTreeEviction")]
pub(in crate::python) struct SlotTreeEviction(EvictedNodes);

#[pymethods]
impl SlotTreeEviction {
    /// Slots that became free.
    #[getter]
    const fn tokens(&self) -> usize {
        self.0.freed
    }

    /// Nodes that no longer exist, in the order of their removal, with those that a `clear` of the allocator
    /// removed before.
    #[getter]
    fn removed_nodes(&self) -> Vec<u64> {
        numbers(&self.0.removed_nodes)
    }

    /// The slots evicted: 1-D int32 in host memory, a new tensor each time.
    #[getter]
    fn slots(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_tensor(py, &TensorView::from_indices(IndexVec::I32(self.0.slots.clone())))
    }
}

/// A node of a `SlotTree` at the time of `SlotTree.node`.
#[pyclass(frozen, module = "kvpool._kvpool", name = "SlotTreeNode")]
pub(in crate::python) struct SlotTreeNode(SlotNode);

#[pymethods]
impl SlotTreeNode {
    /// The parent node; `None` for the root.
    #[getter]
    fn parent(&self) -> Option<u64> {
        self.0.parent.map(NodeHandle::number)
    }

    /// The child nodes.
    #[getter]
    fn children(&self) -> Vec<u64> {
        numbers(&self.0.children)
    }

    /// The node's own tokens, without those of its ancestors.
    #[getter]
    fn tokens(&self) -> Vec<i32> {
        self.0.tokens.clone()
    }

    /// The slots of its own tokens.
    #[getter]
    fn slots(&self) -> Vec<u32> {
        self.0.slots.iter().map(|slot| slot.number()).collect()
    }

    /// Locks of the node and of all its descendants.
    #[getter]
    const fn locks(&self) -> usize {
        self.0.locks
    }
}
