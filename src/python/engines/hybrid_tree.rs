//! `HybridTree`, for the adapter of SGLang's prefix cache.

mod arguments;

use std::sync::{Mutex, MutexGuard};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::base::bounded::signed;
use crate::base::sync::lock;
use crate::base::{EngineSlot, Error, Id};
use crate::cache::{NodeHandle, WaitingId, WaitingRank};
use crate::engines::hybrid::{
    Boundary, EvictionOrder, HybridConfig, HybridTree as Tree, Insert, LockResult, NegativeSize, PageDigest,
    Part, QueuedRequest, StateConfig, StateRelease, Victim, WindowConfig, WindowRelease,
};

use super::hybrid_names::name_of;
use super::hybrid_results::{
    HybridFrees, HybridMatch, HybridNode, HybridStep, Pairs, actions_to_py, pair, tensor_of_ints,
    tensor_of_slots, tensor_or_none, view_of,
};
use super::turns::{after_turn, session_of};
use crate::python::args;
use crate::python::export::to_tensor;
use crate::python::tokens::{with_keys, with_slots};
use arguments::{
    handle_of, no_eviction_error, no_such_node_error, not_locked_error, part_of, receipt_of, skipped_of,
    slots_in,
};

/// Finds slots by tokens for an engine that drives eviction itself, with values of several kinds of attention.
///
/// Every node of the tree has the slots of its tokens for full attention (part 0). Models with sliding-window
/// attention have windows beside them (part 1, one slot a token), those with linear attention states (part 2,
/// one value a node). A prefix is found up to the deepest node that all parts accept: sliding-window
/// attention needs the slots of the whole last window, linear attention only the state of the node itself.
///
/// The tree owns no slots: the engine frees the values that an eviction returns, and those that the actions
/// of an insertion name. Nodes are ints that are never used again. When a node is split, the deeper part
/// keeps the number.
///
/// Tokens are 64-bit ints; an `array.array("q")` is read in place. Slots are ints in `[0, 2**31)`; a contiguous
/// int32 or int64 tensor in host memory is read in place, one on a GPU is copied first, which waits for the GPU.
/// Tensors that are returned are int64, on the host, and copies.
///
/// A namespace keeps prefixes apart: `None`, a str, bytes, an int, or a tuple of these. Calls are atomic and
/// thread-safe. A node that no longer exists raises `KeyError`.
///
/// Args:
///     page_size: Tokens that are found together.
///     policy: The order of eviction: "lru", "mru", "fifo", "filo", "lfu", "priority", "slru", "tlru" or "adaptive".
///     protected_uses: With "slru", the number of uses from which on a node is evicted after the others.
///     tail: With "tlru", leaves go before the others that are within this many tokens of the end of the longest
///         prompt that went through them.
///     capacity: With "adaptive", tokens that there is room for, below 2**31. That policy learns from insertions, whose
///         `inserted` tells how much of a request was counted before; look-ups and locks count nothing.
///     window: Tokens of history that sliding-window attention reads; `None` for models without it.
///     window_gates: Whether a prefix is found only with its window.
///     state_grid: The number of tokens between places where states can be taken; `None` for models without
///         states.
///     states_per_path: How many states `evict_excess_states` leaves on a path; `None` leaves all.
///
/// Raises:
///     ConfigError: If `policy` is unknown, a size is not positive, or "adaptive" has no `capacity`.
#[pyclass(frozen, module = "kvpool._kvpool", name = "HybridTree")]
pub(in crate::python) struct HybridTree {
    tree: Mutex<Tree>,
}

/// A node of a path: itself, the one before it, tokens before it and up to its end, and children.
type PathTuple = (u64, u64, usize, usize, usize);

impl HybridTree {
    fn lock(&self) -> MutexGuard<'_, Tree> {
        lock(&self.tree)
    }
}

#[pymethods]
impl HybridTree {
    #[new]
    #[pyo3(signature = (page_size, *, policy="lru", protected_uses=2, tail=0, capacity=None, window=None, window_gates=true, state_grid=None, states_per_path=None))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of a Python call")]
    fn new(
        page_size: &Bound<'_, PyAny>,
        policy: &str,
        protected_uses: u32,
        tail: usize,
        capacity: Option<&Bound<'_, PyAny>>,
        window: Option<&Bound<'_, PyAny>>,
        window_gates: bool,
        state_grid: Option<&Bound<'_, PyAny>>,
        states_per_path: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let positive = |name: &str, value: &Bound<'_, PyAny>| match args::count(name, value)? {
            0 => Err(PyErr::from(Error::config(format!("{name} must be at least 1, not 0")))),
            size => Ok(size),
        };
        let below_2_31 = |name: &str, value: &Bound<'_, PyAny>| match positive(name, value)? {
            size if size < 1 << 31 => Ok(size),
            size => Err(PyErr::from(Error::config(format!("{name} is {size}; it must be below 2**31")))),
        };
        let order = match policy {
            "lru" => EvictionOrder::Lru,
            "mru" => EvictionOrder::Mru,
            "fifo" => EvictionOrder::Fifo,
            "filo" => EvictionOrder::Filo,
            "lfu" => EvictionOrder::Lfu,
            "priority" => EvictionOrder::Priority,
            "slru" => EvictionOrder::Slru(protected_uses),
            "tlru" => EvictionOrder::Tlru(tail),
            "adaptive" => {
                let capacity = capacity.map(|tokens| below_2_31("capacity", tokens)).transpose()?;
                EvictionOrder::Adaptive(capacity.ok_or_else(|| {
                    Error::config("the policy 'adaptive' needs a capacity: tokens that there is room for")
                })?)
            }
            _ => {
                let known = "lru, mru, fifo, filo, lfu, priority, slru, tlru, adaptive";
                return Err(Error::config(format!("unknown policy '{policy}'; use one of {known}")).into());
            }
        };
        let window = window.map(|size| positive("window", size)).transpose()?;
        let grid = state_grid.map(|grid| positive("state_grid", grid)).transpose()?;
        let max_per_path = states_per_path.map(|most| args::count("states_per_path", most)).transpose()?;
        let config = HybridConfig {
            page_size: match order {
                EvictionOrder::Adaptive(_) => below_2_31("page_size", page_size)?,
                _ => positive("page_size", page_size)?,
            },
            order,
            window: window.map(|size| WindowConfig { size, gates: window_gates }),
            state: grid.map(|grid| StateConfig { grid, max_per_path }),
        };
        Ok(Self { tree: Mutex::new(Tree::new(config)) })
    }

    /// Removes all nodes, locked or not. No later node has the number of an earlier one.
    fn reset(&self) {
        self.lock().reset();
    }

    /// Returns the root node, which is the end of the empty prefix.
    fn root(&self) -> u64 {
        self.lock().root().number()
    }

    /// Finds the longest prefix that all parts accept, in whole pages, and refreshes it.
    ///
    /// Args:
    ///     tokens: Token ids.
    ///     start: The position of the first one that counts.
    ///     end: One past the position of the last one; `None` for all.
    ///     namespace: See the class.
    ///
    /// Raises:
    ///     ArgumentError: If `start` and `end` are not within the tokens.
    #[pyo3(signature = (tokens, start=0, end=None, namespace=None))]
    fn r#match(
        &self,
        tokens: &Bound<'_, PyAny>,
        start: usize,
        end: Option<usize>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<HybridMatch> {
        let name = name_of(namespace)?;
        with_keys(tokens, start, end, |keys| Ok(HybridMatch(self.lock().find(&name, keys))))
    }

    /// Returns how many tokens have slots for full attention, whatever the other parts say, the deepest node
    /// with some of them, and the tokens up to its end. Changes nothing.
    ///
    /// Args:
    ///     tokens: Token ids, as in `match`.
    ///     start: The position of the first token that counts.
    ///     end: One past the position of the last one; `None` for all.
    ///     namespace: As in `match`.
    ///
    /// Raises:
    ///     ArgumentError: As in `match`.
    #[pyo3(signature = (tokens, start=0, end=None, namespace=None))]
    fn peek(
        &self,
        tokens: &Bound<'_, PyAny>,
        start: usize,
        end: Option<usize>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(usize, u64, usize)> {
        let name = name_of(namespace)?;
        with_keys(tokens, start, end, |keys| {
            let peek = self.lock().peek(&name, keys);
            Ok((peek.len, peek.node.number(), peek.end))
        })
    }

    /// Inserts the whole pages of tokens with their slots, up to the first step after which the engine must
    /// act.
    ///
    /// Args:
    ///     tokens: Token ids, as in `match`. How many there are in all, those after `end` included, tells the policy "adaptive"
    ///         how much of the request is new.
    ///     slots: One for each token at least.
    ///     start: The position of the first token that counts.
    ///     end: One past the position of the last one; `None` for all.
    ///     namespace: As in `match`.
    ///     found: Tokens that the request had found in the tree, and has locked since: their slots are the tree's
    ///         already, and most of them are not compared again. Slots of later ones that are there are to be
    ///         freed.
    ///     inserted: Tokens that the request has inserted before: they do not count as used again.
    ///     window_freed: Tokens whose windows are free already, a whole number of pages.
    ///     priority: Nodes of higher priority are evicted later, with the policy "priority".
    ///     state: The state at the end of the tokens, required where nodes have states.
    ///     branch: The number of tokens at which the request branches off from a window.
    ///     session: The name of the session of which the request is a turn, for the policy "adaptive"; `None` for none.
    ///
    /// Raises:
    ///     ArgumentError: As in `match`; if there are fewer slots than tokens, a slot is outside of [0, 2**31),
    ///         another insertion is in progress, or the state is missing.
    #[pyo3(signature = (tokens, slots, start=0, end=None, namespace=None, *, found=0, inserted=0, window_freed=0, priority=0, state=None, branch=None, session=None))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of a Python call")]
    fn insert(
        &self,
        tokens: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        start: usize,
        end: Option<usize>,
        namespace: Option<&Bound<'_, PyAny>>,
        found: usize,
        inserted: usize,
        window_freed: usize,
        priority: i64,
        state: Option<&Bound<'_, PyAny>>,
        branch: Option<usize>,
        session: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<HybridStep> {
        let (name, session) = (name_of(namespace)?, session.map(session_of).transpose()?);
        let state = state.map_or(Ok(Vec::new()), slots_in)?;
        let prompt = tokens.len().unwrap_or(0).saturating_sub(start);
        let insert = Insert { found, inserted, prompt, window_freed, priority, state, branch, session };
        with_slots(slots, |slots, count| {
            with_keys(tokens, start, end, |keys| {
                if count < keys.count() {
                    let text = format!("{count} slots for {} tokens", keys.count());
                    return Err(Error::argument(text).into());
                }
                Ok(HybridStep(self.lock().begin(&name, keys, slots, insert)?))
            })
        })
    }

    /// Continues an insertion of the same tokens and slots, after the actions of the previous step.
    ///
    /// Args:
    ///     tokens: The tokens of the insertion.
    ///     slots: The slots of the insertion.
    ///     start: The position of the first token that counts.
    ///     end: One past the position of the last one; `None` for all.
    ///     namespace: As in `match`.
    ///
    /// Raises:
    ///     ArgumentError: If it began with other tokens or in another namespace.
    ///     StaleError: If the node that it has reached was evicted since.
    ///     StateError: If no insertion is in progress, or it has failed.
    #[pyo3(signature = (tokens, slots, start=0, end=None, namespace=None))]
    fn advance(
        &self,
        tokens: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        start: usize,
        end: Option<usize>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<HybridStep> {
        let name = name_of(namespace)?;
        with_slots(slots, |slots, _| {
            with_keys(tokens, start, end, |keys| Ok(HybridStep(self.lock().advance(&name, keys, slots)?)))
        })
    }

    /// Tells the policy "adaptive" that a turn of a session is over. If it does not continue the turn before, what only
    /// this session has used of that, and no lock keeps, is evicted first, down to where they part.
    ///
    /// Args:
    ///     session: The name of the session.
    ///     node: The node at the end of the tokens of the turn; the root to say only what follows.
    ///     pause: What the session waits for, such as "bash" or "user". How long pauses of each kind are is learned, in
    ///         tokens inserted. 256 kinds are told apart.
    ///     is_last: Whether the session ends: what only it has used is evicted first.
    ///
    /// Raises:
    ///     ValueError: If a session that ends pauses. Nothing is changed.
    ///     KeyError: If the node no longer exists.
    #[pyo3(signature = (session, node, *, pause=None, is_last=false))]
    fn end_turn(
        &self,
        session: &Bound<'_, PyAny>,
        node: u64,
        pause: Option<&str>,
        is_last: bool,
    ) -> PyResult<()> {
        let (after, session, node) = (after_turn(pause, is_last)?, session_of(session)?, handle_of(node));
        self.lock().end_turn(session, node, after).ok_or_else(|| no_such_node_error(node))
    }

    /// Tells the policy "adaptive" what the engine's waiting queue is, from the request on that is served next. What the
    /// requests need, tokens up to a node, is evicted after all else, that of the last request first. What several need
    /// counts as of the first of them. A request that is not in the queue any more needs nothing. Nothing is locked, and
    /// windows and states go by recency. With another policy nothing changes.
    ///
    /// Args:
    ///     requests: For each, its number if it was in the queue before, or `None`; and the node at the end of what was
    ///         found for it, or `None`. With `None`, or a node that no longer exists, it needs what it needed before, as far
    ///         as that is cached.
    ///
    /// Returns:
    ///     The number of each request from now on.
    #[expect(clippy::needless_pass_by_value, reason = "the argument of a Python call")]
    fn set_waiting(&self, requests: Vec<(Option<i64>, Option<u64>)>) -> Vec<i64> {
        let request = |&(known, found): &(Option<i64>, Option<u64>)| QueuedRequest {
            known: known.map(|number| WaitingId::new(WaitingRank::default(), number)),
            found: found.map(handle_of),
        };
        let queue: Vec<QueuedRequest> = requests.iter().map(request).collect();
        self.lock().set_waiting(&queue).into_iter().map(WaitingId::number).collect()
    }

    /// Returns whether an insertion is in progress.
    fn is_inserting(&self) -> bool {
        self.lock().is_inserting()
    }

    /// Gives up the insertion in progress, if there is one, and returns the remaining actions, as
    /// `HybridStep.actions`.
    fn end_insertion<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let actions = self.lock().end_insertion();
        actions_to_py(py, &actions)
    }

    /// Locks a node: its slots for full attention up to its end, those of its last window, and its state.
    /// Returns how many slots for full attention were without locks, and the `boundary` to pass to `unlock_node`.
    ///
    /// Args:
    ///     node: The node.
    ///     skip: Parts that are not locked.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    #[pyo3(signature = (node, skip=Vec::new()))]
    #[expect(clippy::needless_pass_by_value, reason = "the argument of a Python call")]
    fn lock_node(&self, node: u64, skip: Vec<usize>) -> PyResult<(usize, Option<u64>)> {
        let (node, skipped) = (handle_of(node), skipped_of(&skip)?);
        let LockResult { receipt, newly_locked } =
            self.lock().lock(node, skipped).ok_or_else(|| no_such_node_error(node))?;
        Ok((newly_locked, receipt.boundary.map(Boundary::number)))
    }

    /// Undoes one `lock_node`.
    ///
    /// Args:
    ///     node: The node.
    ///     boundary: The result of `lock_node`.
    ///     skip: The parts that were not locked.
    ///     window_done: Whether `unlock_window` has released window and state. After a call of it without
    ///         the state, leave the window out by `skip` instead.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    ///     IndexOwnershipError: If it has no such lock. Nothing is changed.
    #[pyo3(signature = (node, boundary=None, skip=Vec::new(), *, window_done=false))]
    #[expect(clippy::needless_pass_by_value, reason = "the argument of a Python call")]
    fn unlock_node(
        &self,
        node: u64,
        boundary: Option<u64>,
        skip: Vec<usize>,
        window_done: bool,
    ) -> PyResult<()> {
        let (node, receipt) = (handle_of(node), receipt_of(boundary, &skip)?);
        let released = if window_done { WindowRelease::WithState } else { WindowRelease::NotYet };
        self.lock()
            .unlock(node, receipt, released)
            .ok_or_else(|| no_such_node_error(node))?
            .map_err(not_locked_error)
    }

    /// Releases the window of one `lock_node` early, and the state with it, because the request has moved
    /// past it. Returns the windows that are no longer locked and that no other prefix needs.
    ///
    /// Args:
    ///     node: The node.
    ///     boundary: The result of `lock_node`.
    ///     skip: The parts that were not locked.
    ///     with_state: Whether the state is released, too.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    ///     IndexOwnershipError: If it has no such lock. Nothing is changed.
    #[pyo3(signature = (node, boundary=None, skip=Vec::new(), *, with_state=true))]
    #[expect(clippy::needless_pass_by_value, reason = "the argument of a Python call")]
    fn unlock_window(
        &self,
        node: u64,
        boundary: Option<u64>,
        skip: Vec<usize>,
        with_state: bool,
    ) -> PyResult<HybridFrees> {
        let (node, receipt) = (handle_of(node), receipt_of(boundary, &skip)?);
        let state = if with_state { StateRelease::Release } else { StateRelease::Keep };
        let frees =
            self.lock().unlock_window(node, receipt, state).ok_or_else(|| no_such_node_error(node))?;
        frees.map(HybridFrees).map_err(not_locked_error)
    }

    /// Locks only the slots for full attention up to the end of a node.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    fn pin(&self, node: u64) -> PyResult<()> {
        let node = handle_of(node);
        self.lock().pin(node).ok_or_else(|| no_such_node_error(node))
    }

    /// Undoes one `pin`.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    ///     IndexOwnershipError: If it has no lock. Nothing is changed.
    fn unpin(&self, node: u64) -> PyResult<()> {
        let node = handle_of(node);
        self.lock().unpin(node).ok_or_else(|| no_such_node_error(node))?.map_err(not_locked_error)
    }

    /// Returns the slots for full attention behind `until` up to the end of `node`, a 1-D int64 tensor.
    ///
    /// Raises:
    ///     KeyError: If a node no longer exists, or `until` is not on the way to `node`.
    fn slots(&self, py: Python<'_>, node: u64, until: u64) -> PyResult<Py<PyAny>> {
        let (node, until) = (handle_of(node), handle_of(until));
        let tree = self.lock();
        for handle in [node, until] {
            if !tree.contains(handle) {
                return Err(no_such_node_error(handle));
            }
        }
        let runs = tree.slot_runs(node, until).ok_or_else(|| no_such_node_error(until))?;
        let view = view_of(runs.count(), runs.iter())?;
        drop(runs);
        // The import may run Python code.
        drop(tree);
        to_tensor(py, &view)
    }

    /// Begins to evict values of a part, `wanted` of them.
    ///
    /// Raises:
    ///     StateError: If an eviction of the part is in progress.
    fn begin_eviction(&self, part: usize, wanted: usize) -> PyResult<()> {
        if self.lock().begin_eviction(part_of(part)?, wanted) {
            return Ok(());
        }
        Err(Error::state(format!("an eviction of part {part} is going on; end it first")).into())
    }

    /// Returns the next step of an eviction: an int, the leaf to evict with `evict_leaf`; or values that were
    /// removed already, of a node that stays; or `None`, if enough was evicted or nothing evictable is left.
    ///
    /// Args:
    ///     part: The part.
    ///     evicted: Values of the part that were evicted until now.
    ///
    /// Raises:
    ///     StateError: If no eviction of the part has begun.
    fn next_victim<'py>(
        &self,
        py: Python<'py>,
        part: usize,
        evicted: usize,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(victim) = self.lock().next_victim(part_of(part)?, evicted) else {
            return Err(no_eviction_error(part));
        };
        Ok(match victim {
            Victim::Leaf(node) => Some(node.number().into_pyobject(py)?.into_any()),
            Victim::Value(frees) => Some(Bound::new(py, HybridFrees(frees))?.into_any()),
            Victim::Nothing => None,
        })
    }

    /// Evicts a leaf with all its values.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    ///     IndexOwnershipError: If it is no leaf, or is locked.
    fn evict_leaf(&self, node: u64) -> PyResult<HybridFrees> {
        let node = handle_of(node);
        let frees = self.lock().evict_leaf(node).ok_or_else(|| no_such_node_error(node))?;
        frees.map(HybridFrees).ok_or_else(|| {
            let text = format!("node {} is no leaf without locks", node.number());
            Error::new(crate::base::ErrorKind::IndexOwnership, text).into()
        })
    }

    /// Ends an eviction.
    ///
    /// Raises:
    ///     StateError: If no eviction of the part has begun.
    fn end_eviction(&self, part: usize) -> PyResult<()> {
        if self.lock().end_eviction(part_of(part)?) { Ok(()) } else { Err(no_eviction_error(part)) }
    }

    /// Evicts leaves until at least `wanted` slots for full attention were given up, in one call.
    fn evict(&self, wanted: usize) -> HybridFrees {
        HybridFrees(self.lock().evict_full(wanted))
    }

    /// Evicts the states of ancestors of a node that exceed the number that a path keeps, those nearest to
    /// the root first. Nodes with several children, locked nodes and leaves keep their states.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    fn evict_excess_states(&self, node: u64) -> PyResult<HybridFrees> {
        let node = handle_of(node);
        self.lock().evict_excess_states(node).map(HybridFrees).ok_or_else(|| no_such_node_error(node))
    }

    /// Returns how many values of a part have no locks.
    fn evictable_size(&self, part: usize) -> PyResult<usize> {
        Ok(self.lock().sizes(part_of(part)?).evictable)
    }

    /// Returns how many values of a part are locked.
    fn locked_size(&self, part: usize) -> PyResult<usize> {
        Ok(self.lock().sizes(part_of(part)?).locked)
    }

    /// Changes what a part counts on a node whose values the engine backs with more or fewer rows than values.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    ///     ArgumentError: If the size would become negative.
    fn adjust_size(&self, node: u64, part: usize, delta: i64) -> PyResult<()> {
        let node = handle_of(node);
        let adjusted =
            self.lock().adjust(node, part_of(part)?, delta).ok_or_else(|| no_such_node_error(node))?;
        adjusted.map_err(|NegativeSize(size)| Error::argument(format!("the size would become {size}")).into())
    }

    /// Returns the value of a node, a 1-D int64 tensor; `None` if it has none.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    fn value(&self, py: Python<'_>, node: u64, part: usize) -> PyResult<Option<Py<PyAny>>> {
        let (node, part) = (handle_of(node), part_of(part)?);
        let value = self
            .lock()
            .value(node, part)
            .map(<[EngineSlot]>::to_vec)
            .ok_or_else(|| no_such_node_error(node))?;
        tensor_or_none(py, &value)
    }

    /// Gives a node a window or a state that it does not have.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    ///     ArgumentError: If the part is 0 or nodes do not have it, the node has a value, or the length is wrong.
    fn set_value(&self, node: u64, part: usize, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (node, part, value) = (handle_of(node), part_of(part)?, slots_in(value)?);
        Ok(self.lock().set_value(node, part, value).ok_or_else(|| no_such_node_error(node))??)
    }

    /// Returns the hash of the page that ends at `end` tokens on the way to a node, 32 bytes; `None` if it has
    /// none.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    fn hash_at<'py>(&self, py: Python<'py>, node: u64, end: usize) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let node = handle_of(node);
        let hash = self.lock().hash_at(node, end).ok_or_else(|| no_such_node_error(node))?;
        Ok(hash.map(|hash| PyBytes::new(py, &hash.0)))
    }

    /// Sets the hashes of the pages from the token `start` up to the end of a node, for engines that publish
    /// the contents of the tree. `HybridFrees.removed` has the hashes of removed nodes.
    ///
    /// Args:
    ///     node: The node.
    ///     start: The position where a node on the way to it begins.
    ///     hashes: 32 bytes for each page.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    ///     ArgumentError: If there are not as many hashes as pages, or no node begins at `start`. Nothing is
    ///         changed.
    fn set_hashes(&self, node: u64, start: usize, hashes: &[u8]) -> PyResult<()> {
        let node = handle_of(node);
        let (hashes, rest) = hashes.as_chunks();
        if !rest.is_empty() {
            return Err(Error::argument(format!("hashes of 32 bytes, and {} bytes more", rest.len())).into());
        }
        let hashes: Vec<_> = hashes.iter().copied().map(PageDigest).collect();
        Ok(self.lock().set_hashes(node, start, &hashes).ok_or_else(|| no_such_node_error(node))??)
    }

    /// Returns the ranges of tokens within `begin..limit` that are in the tree without a window.
    #[pyo3(signature = (tokens, begin, limit, start=0, end=None, namespace=None))]
    fn window_gaps(
        &self,
        tokens: &Bound<'_, PyAny>,
        begin: usize,
        limit: usize,
        start: usize,
        end: Option<usize>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pairs> {
        let name = name_of(namespace)?;
        with_keys(tokens, start, end, |keys| {
            Ok(self.lock().window_gaps(&name, keys, begin, limit).iter().map(pair).collect())
        })
    }

    /// Gives tokens from `begin` on, which are there without a window, the windows `values`.
    ///
    /// Raises:
    ///     ArgumentError: If they are no whole pages, or some of them are not there or have a window. Nothing is
    ///         changed.
    #[pyo3(signature = (tokens, begin, values, start=0, end=None, namespace=None))]
    fn attach_window(
        &self,
        tokens: &Bound<'_, PyAny>,
        begin: usize,
        values: &Bound<'_, PyAny>,
        start: usize,
        end: Option<usize>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (name, values) = (name_of(namespace)?, slots_in(values)?);
        with_keys(tokens, start, end, |keys| Ok(self.lock().attach_window(&name, keys, begin, &values)?))
    }

    /// Returns positions in `nodes`, ordered so that nodes with common prefixes are next to each other, larger
    /// groups first.
    ///
    /// Raises:
    ///     KeyError: If a node no longer exists.
    #[expect(clippy::needless_pass_by_value, reason = "the argument of a Python call")]
    fn by_common_prefix(&self, nodes: Vec<u64>) -> PyResult<Vec<usize>> {
        let handles: Vec<_> = nodes.iter().copied().map(handle_of).collect();
        let tree = self.lock();
        tree.by_common_prefix(&handles).ok_or_else(|| {
            let missing = handles.iter().find(|&&node| !tree.contains(node));
            no_such_node_error(*missing.expect("one of them is gone"))
        })
    }

    /// Returns the path to a node, the root left out: node, parent, tokens before it, tokens up to its end, and
    /// children of each.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    fn path(&self, node: u64) -> PyResult<Vec<PathTuple>> {
        let node = handle_of(node);
        let path = self.lock().path_to(node).ok_or_else(|| no_such_node_error(node))?;
        let flat =
            path.iter().map(|at| (at.node.number(), at.parent.number(), at.start, at.end, at.children));
        Ok(flat.collect())
    }

    /// Returns all values of a part, a 1-D int64 tensor.
    fn values(&self, py: Python<'_>, part: usize) -> PyResult<Py<PyAny>> {
        let values = self.lock().values(part_of(part)?);
        tensor_of_slots(py, &values)
    }

    /// Returns the slots for full attention, the positions of their tokens, and the slots before them (-1 for
    /// none): three 1-D int64 tensors.
    ///
    /// Args:
    ///     unlocked: Leave out nodes with locks: of windows if `windows`, else of full attention.
    ///     windows: Leave out nodes without a window.
    #[pyo3(signature = (*, unlocked=false, windows=false))]
    fn slot_rows(
        &self,
        py: Python<'_>,
        unlocked: bool,
        windows: bool,
    ) -> PyResult<(Py<PyAny>, Py<PyAny>, Py<PyAny>)> {
        let lock_of = usize::from(windows);
        let rows = self
            .lock()
            .slot_rows(|locks, has_window| (!unlocked || locks[lock_of] == 0) && (!windows || has_window));
        let (mut slots, mut positions, mut before) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            slots.push(i64::from(row.slot.number()));
            positions.push(signed(row.position));
            before.push(row.before.map_or(-1, i64::from));
        }
        Ok((tensor_of_ints(py, &slots)?, tensor_of_ints(py, &positions)?, tensor_of_ints(py, &before)?))
    }

    /// Returns whether a node exists.
    fn contains(&self, node: u64) -> bool {
        self.lock().contains(handle_of(node))
    }

    /// Returns all nodes, the root first.
    fn nodes(&self) -> Vec<u64> {
        self.lock().handles().into_iter().map(NodeHandle::number).collect()
    }

    /// Returns the children of a node, in the order of their insertion. Looks at every node.
    ///
    /// Raises:
    ///     KeyError: If the node no longer exists.
    fn children(&self, node: u64) -> PyResult<Vec<u64>> {
        let node = handle_of(node);
        let children = self.lock().children(node).ok_or_else(|| no_such_node_error(node))?;
        Ok(children.into_iter().map(NodeHandle::number).collect())
    }

    /// Returns the nodes with a window (part 1) or a state (part 2), the most recent first.
    fn listed(&self, part: usize) -> PyResult<Vec<u64>> {
        match part_of(part)? {
            Part::Full => Err(PyTypeError::new_err("full attention has no list of nodes")),
            part => Ok(self.lock().listed(part).into_iter().map(NodeHandle::number).collect()),
        }
    }

    /// Returns a node as it is now.
    ///
    /// Raises:
    ///     KeyError: If it no longer exists.
    fn info(&self, node: u64) -> PyResult<HybridNode> {
        let node = handle_of(node);
        self.lock().state(node).map(HybridNode).ok_or_else(|| no_such_node_error(node))
    }

    /// Checks every invariant.
    ///
    /// Raises:
    ///     IndexOwnershipError: With the first broken one.
    fn verify(&self) -> PyResult<()> {
        let fault = self.lock().broken_invariant();
        fault.map_or(Ok(()), |fault| {
            let text = format!("the hybrid tree is inconsistent: {fault}");
            Err(Error::new(crate::base::ErrorKind::IndexOwnership, text).into())
        })
    }

    /// Returns how often a slot for full attention was found to have two owners, and the slot that was found last.
    /// A slot is found when it is inserted while a node has it, or is to be freed as a duplicate of another one:
    /// two requests have written to it, and what one of them finds there is wrong.
    fn second_owners(&self) -> (usize, Option<u32>) {
        let found = self.lock().second_owners();
        (found.count, found.last.map(EngineSlot::number))
    }

    /// Returns the size of the bookkeeping in bytes. Looks at every node.
    fn memory_size(&self) -> usize {
        self.lock().bytes()
    }
}
