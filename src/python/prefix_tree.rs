//! `kvpool.PrefixTree` and its results.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::base::{Device, Error, Id, IndexVec};
use crate::cache::{NodeHandle, NodeInfo, PolicyKind};
use crate::index::CallGuard;
use crate::memory::Stream;
use crate::pool::{EvictedNodes, Inserted, NodePrefix, PrefixTree as Tree, PrefixTreeConfig};
use crate::tensor::TensorView;

use super::args::{self, Arg};
use super::export::to_tensor;
use super::framework::current_stream;
use super::page_keys::namespace_of;
use super::pool_name::PoolName;
use super::token_to_kv_pool_allocator::TokenToKvPoolAllocator;
use super::tokens::with_tokens;

/// The tree of a prefix cache, with access to its nodes, for engines that hold nodes, lock them and evict by
/// themselves. Otherwise use `PrefixCache`, which has leases and evicts when an allocation is short.
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
///     policy: The order of eviction: "adaptive", "lru", "fifo", "lfu", "slru" or "priority".
///     name: The owner of cached slots in reports. Defaults to the class name and a number.
///
/// Raises:
///     ConfigError: If `page_size` is 0, `policy` is unknown, or the allocator has pages of more than one slot.
#[pyclass(frozen, module = "kvpool", name = "PrefixTree", weakref)]
pub(super) struct PrefixTree {
    tree: Tree,
    allocator: Option<Py<TokenToKvPoolAllocator>>,
    device: Device,
}

impl PrefixTree {
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
impl PrefixTree {
    #[new]
    #[pyo3(signature = (allocator=None, *, page_size=Arg::Missing, policy="lru", name=None),
           text_signature = "(allocator=None, *, page_size=1, policy='lru', name=None)")]
    fn new(
        allocator: Option<Py<TokenToKvPoolAllocator>>,
        page_size: Arg<'_>,
        policy: &str,
        name: Option<String>,
    ) -> PyResult<Self> {
        let config = PrefixTreeConfig {
            page_size: page_size.size("page_size", 1)?,
            policy: PolicyKind::parse(policy)?,
            name: name.unwrap_or_else(|| PoolName::next("PrefixTree").to_string()),
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
    ///     limit: Maximum length in tokens.
    ///
    /// Raises:
    ///     ArgumentError: If a token is outside of [0, 2**31), or `limit` is negative.
    ///     TypeError: If `tokens` are not ints, or `namespace` is of another type.
    #[pyo3(signature = (tokens, *, namespace=None, limit=None))]
    fn r#match(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        limit: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<TreeMatch> {
        let namespace = namespace_of(namespace)?;
        let limit = limit.map_or(Ok(usize::MAX), |limit| args::count("limit", limit))?;
        let stream = self.stream(py)?;
        with_tokens(tokens, |tokens| Ok(TreeMatch(self.tree.find(&namespace, tokens, limit, stream)?)))
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
    ) -> PyResult<TreeInsertion> {
        let namespace = namespace_of(namespace)?;
        let slots = args::indices(slots)?.values(py)?;
        let _acting = self.begin(py)?;
        let stream = self.stream(py)?;
        with_tokens(tokens, |tokens| Ok(TreeInsertion(self.tree.insert(&namespace, tokens, &slots, stream)?)))
    }

    /// Keeps a node and its ancestors from being evicted. Locks of a node are counted.
    ///
    /// Raises:
    ///     StaleError: If the node was evicted.
    fn lock(&self, py: Python<'_>, node: &Bound<'_, PyAny>) -> PyResult<()> {
        Ok(self.tree.lock(node_of(node)?, self.stream(py)?)?)
    }

    /// Undoes one `lock` of a node.
    ///
    /// Raises:
    ///     StaleError: If the node was evicted.
    ///     IndexOwnershipError: If the node has no lock. Nothing is changed.
    fn unlock(&self, py: Python<'_>, node: &Bound<'_, PyAny>) -> PyResult<()> {
        Ok(self.tree.unlock(node_of(node)?, self.stream(py)?)?)
    }

    /// Evicts whole nodes, ends of prefixes first, until at least `tokens` slots became free or nothing is
    /// evictable. Their slots are freed at once, in one call.
    ///
    /// Raises:
    ///     ArgumentError: If `tokens` is negative.
    fn evict(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<TreeEviction> {
        let tokens = args::count("tokens", tokens)?;
        let _acting = self.begin(py)?;
        Ok(TreeEviction(self.tree.evict(tokens, self.stream(py)?)))
    }

    /// Gives up every node, locked or not, and frees the slots.
    fn clear(&self, py: Python<'_>) -> PyResult<TreeEviction> {
        let _acting = self.begin(py)?;
        Ok(TreeEviction(self.tree.clear(self.stream(py)?)))
    }

    /// Returns the slots of a prefix: 1-D in the allocator's `index_dtype`, on its device, or in host memory
    /// without one. A copy.
    ///
    /// Args:
    ///     node: The node at the end of the prefix.
    ///     start: The position of the first slot.
    ///
    /// Raises:
    ///     StaleError: If the node was evicted.
    ///     ArgumentError: If `start` is negative.
    #[pyo3(signature = (node, start=Arg::Missing), text_signature = "($self, node, start=0)")]
    fn slots(&self, py: Python<'_>, node: &Bound<'_, PyAny>, start: Arg<'_>) -> PyResult<Py<PyAny>> {
        let (node, start) = (node_of(node)?, start.count("start", 0)?);
        to_tensor(py, &self.tree.slots(node, start, self.stream(py)?)?)
    }

    /// Describes a node as it is now. This is a call for debugging, because it looks at every node.
    ///
    /// Raises:
    ///     StaleError: If the node was evicted.
    fn node(&self, py: Python<'_>, node: &Bound<'_, PyAny>) -> PyResult<TreeNode> {
        let name = node_of(node)?;
        Ok(TreeNode { name, info: self.tree.info(name, self.stream(py)?)? })
    }

    /// The root node, which is the end of the empty prefix. It changes when the tree is cleared.
    #[getter]
    fn root(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.tree.root(self.stream(py)?).number())
    }

    /// Returns the number of cached tokens.
    fn cached_size(&self, py: Python<'_>) -> PyResult<usize> {
        let sizes = self.tree.sizes(self.stream(py)?);
        Ok(sizes.evictable + sizes.locked)
    }

    /// Returns the number of cached tokens that no lock keeps, those of inner nodes included.
    fn evictable_size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.tree.sizes(self.stream(py)?).evictable)
    }

    /// Returns the number of cached tokens that locks keep.
    fn locked_size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.tree.sizes(self.stream(py)?).locked)
    }

    /// Returns the statistics of the tree: `cached`, `evictable` and `locked` in tokens, `nodes`, and the
    /// `bytes` of the bookkeeping.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.tree.tree_stats(self.stream(py)?);
        let all = PyDict::new(py);
        all.set_item("cached", stats.cached)?;
        all.set_item("evictable", stats.evictable)?;
        all.set_item("locked", stats.locked)?;
        all.set_item("nodes", stats.nodes)?;
        all.set_item("bytes", stats.bytes)?;
        Ok(all)
    }

    /// Checks every invariant of the tree.
    ///
    /// Raises:
    ///     IndexOwnershipError: If a check fails, with a description.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.tree.verify(self.stream(py)?)?)
    }

    /// The allocator of the slots, if there is one.
    #[getter]
    fn allocator(&self, py: Python<'_>) -> Option<Py<TokenToKvPoolAllocator>> {
        self.allocator.as_ref().map(|allocator| allocator.clone_ref(py))
    }

    /// Tokens that are found together.
    #[getter]
    fn page_size(&self) -> usize {
        self.tree.config().page_size
    }

    /// The name of the policy.
    #[getter]
    fn policy(&self) -> &'static str {
        self.tree.config().policy.name()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let sizes = self.tree.sizes(self.stream(py)?);
        Ok(format!(
            "PrefixTree(page_size={}, policy='{}', cached={}, locked={}, device='{}')",
            self.page_size(),
            self.policy(),
            sizes.evictable + sizes.locked,
            sizes.locked,
            self.device
        ))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.allocator.as_ref().map_or(Ok(()), |allocator| visit.call(allocator))
    }
}

/// A prefix that `PrefixTree.match` found.
#[pyclass(frozen, module = "kvpool", name = "TreeMatch")]
pub(super) struct TreeMatch(NodePrefix);

#[pymethods]
impl TreeMatch {
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

    fn __repr__(&self) -> String {
        format!("TreeMatch(node={}, length={})", self.node(), self.length())
    }
}

/// The result of `PrefixTree.insert`.
#[pyclass(frozen, module = "kvpool", name = "TreeInsertion")]
pub(super) struct TreeInsertion(Inserted);

#[pymethods]
impl TreeInsertion {
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

    fn __repr__(&self) -> String {
        format!("TreeInsertion(node={}, cached={}, length={})", self.node(), self.cached(), self.length())
    }
}

/// The result of `PrefixTree.evict` and `PrefixTree.clear`.
#[pyclass(frozen, module = "kvpool", name = "TreeEviction")]
pub(super) struct TreeEviction(EvictedNodes);

#[pymethods]
impl TreeEviction {
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

    fn __repr__(&self) -> String {
        format!("TreeEviction(tokens={}, removed_nodes={})", self.tokens(), self.0.removed_nodes.len())
    }
}

/// A node of a `PrefixTree` at the time of `PrefixTree.node`.
#[pyclass(frozen, module = "kvpool", name = "TreeNode")]
pub(super) struct TreeNode {
    name: NodeHandle,
    info: NodeInfo,
}

#[pymethods]
impl TreeNode {
    /// The number of the node.
    #[getter]
    const fn node(&self) -> u64 {
        self.name.number()
    }

    /// The parent node; `None` for a root.
    #[getter]
    fn parent(&self) -> Option<u64> {
        self.info.parent.map(NodeHandle::number)
    }

    /// The child nodes.
    #[getter]
    fn children(&self) -> Vec<u64> {
        numbers(&self.info.children)
    }

    /// The node's own tokens, without those of its ancestors.
    #[getter]
    fn tokens(&self) -> Vec<i32> {
        self.info.tokens.clone()
    }

    /// The slots of its own tokens.
    #[getter]
    fn slots(&self) -> Vec<u32> {
        self.info.pages.iter().map(|page| page.number()).collect()
    }

    /// Locks of the node and of all its descendants.
    #[getter]
    const fn locks(&self) -> usize {
        self.info.locks
    }

    fn __repr__(&self) -> String {
        format!("TreeNode(node={}, tokens={}, locks={})", self.node(), self.info.tokens.len(), self.locks())
    }
}
