//! The results of `HybridTree`.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::base::{EngineSlot, Id, IndexVec, try_with_capacity};
use crate::cache::NodeHandle;
use crate::engines::hybrid::{Action, Frees, Match, NodeState, PositionRange, Step};
use crate::tensor::TensorView;

use super::hybrid_names::object_of;
use crate::python::export::to_tensor;

/// Creates a 1-D int64 tensor of `count` slots, run by run. Runs no Python code.
pub(in crate::python) fn view_of<'a>(
    count: usize,
    runs: impl Iterator<Item = &'a [EngineSlot]>,
) -> PyResult<TensorView> {
    let mut values = try_with_capacity(count)?;
    runs.for_each(|run| values.extend(run.iter().map(|slot| i64::from(slot.number()))));
    assert_eq!(values.len(), count, "the runs have as many slots");
    Ok(TensorView::from_indices(IndexVec::I64(values)))
}

pub(in crate::python) fn tensor_of_slots(py: Python<'_>, slots: &[EngineSlot]) -> PyResult<Py<PyAny>> {
    to_tensor(py, &view_of(slots.len(), std::iter::once(slots))?)
}

pub(in crate::python) fn tensor_of_ints(py: Python<'_>, values: &[i64]) -> PyResult<Py<PyAny>> {
    let mut copy = try_with_capacity(values.len())?;
    copy.extend_from_slice(values);
    to_tensor(py, &TensorView::from_indices(IndexVec::I64(copy)))
}

/// A prefix that was found.
#[pyclass(frozen, module = "kvpool._kvpool", name = "HybridMatch")]
pub(in crate::python) struct HybridMatch(pub(in crate::python) Match);

#[pymethods]
impl HybridMatch {
    /// Tokens of the prefix.
    #[getter]
    const fn length(&self) -> usize {
        self.0.len
    }

    /// The node at its end.
    #[getter]
    const fn node(&self) -> u64 {
        self.0.node.number()
    }

    /// The deepest node with tokens of the prompt, accepted or not; `None` if there is none.
    #[getter]
    fn visited(&self) -> Option<u64> {
        self.0.visited.map(NodeHandle::number)
    }

    /// Tokens with slots for full attention.
    #[getter]
    const fn full_length(&self) -> usize {
        self.0.full_len
    }

    /// The end of the whole pages with slots for full attention, if it is after the prefix and nodes have
    /// windows. With a window there, more of the prompt could be used.
    #[getter]
    const fn window_branch(&self) -> Option<usize> {
        self.0.window_branch
    }

    /// The last position of the grid with slots for full attention, if it is after the prefix and nodes have
    /// states. With a state there, more of the prompt could be used.
    #[getter]
    const fn state_branch(&self) -> Option<usize> {
        self.0.state_branch
    }
}

/// Values that the tree has removed, for the engine to free.
#[pyclass(frozen, module = "kvpool._kvpool", name = "HybridFrees")]
pub(in crate::python) struct HybridFrees(pub(in crate::python) Frees);

#[pymethods]
impl HybridFrees {
    /// Slots for full attention, a 1-D int64 tensor; `None` for none.
    #[getter]
    fn full(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        tensor_or_none(py, &self.0.full)
    }

    /// Slots for full attention whose windows are to be freed; `None` for none.
    #[getter]
    fn window(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        tensor_or_none(py, &self.0.window)
    }

    /// States; `None` for none.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        tensor_or_none(py, &self.0.state)
    }

    /// The number of removed values of each part.
    #[getter]
    const fn counts(&self) -> (usize, usize, usize) {
        let [full, window, state] = self.0.counts;
        (full, window, state)
    }

    /// The removed nodes whose pages have hashes: the namespace and the hashes of each, in the order of their
    /// removal. Hashes are bytes, 32 for each page.
    #[getter]
    fn removed<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyBytes>)>> {
        let gone = self.0.removed.iter().map(|removed| {
            let hashes: Vec<u8> = removed.hashes.iter().flat_map(|hash| hash.0).collect();
            Ok((object_of(py, &removed.name)?, PyBytes::new(py, &hashes)))
        });
        gone.collect()
    }
}

pub(in crate::python) fn tensor_or_none(py: Python<'_>, slots: &[EngineSlot]) -> PyResult<Option<Py<PyAny>>> {
    (!slots.is_empty()).then(|| tensor_of_slots(py, slots)).transpose()
}

/// A step of an insertion.
#[pyclass(frozen, module = "kvpool._kvpool", name = "HybridStep")]
pub(in crate::python) struct HybridStep(pub(in crate::python) Step);

/// Ranges, as Python writes them.
pub(in crate::python) type Pairs = Vec<(usize, usize)>;

pub(in crate::python) const fn pair(range: &PositionRange) -> (usize, usize) {
    (range.start, range.end)
}

#[pymethods]
impl HybridStep {
    /// The actions that the engine must take, in this order, as tuples. Ranges are of the inserted slots.
    ///
    /// ("free", start, end): free them with their windows. ("free_full", start, end): free them; their windows
    /// are free already. ("free_old", slots): free these slots; their windows are free. ("rebuild", node,
    /// slots): find the window of these slots and give it to the node with `set_value`. ("recover", node, kept,
    /// start, end): move the windows of the inserted slots to the kept ones, give them to the node, and free
    /// the inserted slots without their windows. ("evict_excess", node): call `evict_excess_states`.
    fn actions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        actions_to_py(py, &self.0.actions)
    }

    /// Whether the insertion is done. If not, call `advance` when the actions are.
    #[getter]
    const fn done(&self) -> bool {
        self.0.result.is_some()
    }

    /// The tokens that this step has added: the node at their end, the first one, and one past the last; `None` if
    /// there are none.
    #[getter]
    fn added(&self) -> Option<(u64, usize, usize)> {
        let added = self.0.added.as_ref()?;
        Some((added.node.number(), added.tokens.start, added.tokens.end))
    }

    /// Tokens that were in the tree before, in whole pages.
    #[getter]
    fn found(&self) -> usize {
        self.0.result.as_ref().map_or(0, |result| result.found)
    }

    /// The node at the end of the inserted tokens; `None` until the insertion is done.
    #[getter]
    fn node(&self) -> Option<u64> {
        self.0.result.as_ref().map(|result| result.node.number())
    }

    /// Whether the node had a state already, so that the inserted one still belongs to the caller.
    #[getter]
    fn had_state(&self) -> bool {
        self.0.result.as_ref().is_some_and(|result| result.had_state)
    }

    /// Whether the tokens reach the branch that `insert` was given.
    #[getter]
    fn reached_branch(&self) -> bool {
        self.0.result.as_ref().is_some_and(|result| result.reached_branch)
    }

    /// The inserted values that the tree has taken over: two lists of ranges, of slots for full attention and of
    /// windows.
    #[getter]
    fn adopted(&self) -> (Pairs, Pairs) {
        let adopted = self.0.result.as_ref().map(|result| &result.adopted);
        let pairs = |ranges: Option<&Vec<PositionRange>>| ranges.into_iter().flatten().map(pair).collect();
        (pairs(adopted.map(|adopted| &adopted.full)), pairs(adopted.map(|adopted| &adopted.window)))
    }
}

pub(in crate::python) fn actions_to_py<'py>(
    py: Python<'py>,
    actions: &[Action],
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for action in actions {
        let action = match action {
            Action::Free(range) => ("free", range.start, range.end).into_pyobject(py)?,
            Action::FreeFull(range) => ("free_full", range.start, range.end).into_pyobject(py)?,
            Action::FreeOld(slots) => ("free_old", tensor_of_slots(py, slots)?).into_pyobject(py)?,
            Action::Rebuild { node, slots } => {
                ("rebuild", node.number(), tensor_of_slots(py, slots)?).into_pyobject(py)?
            }
            Action::Recover { node, kept, incoming } => {
                ("recover", node.number(), tensor_of_slots(py, kept)?, incoming.start, incoming.end)
                    .into_pyobject(py)?
            }
            Action::EvictExcess(node) => ("evict_excess", node.number()).into_pyobject(py)?,
        };
        list.append(action)?;
    }
    Ok(list)
}

/// A node of a `HybridTree` at the time of `HybridTree.node`.
#[pyclass(frozen, module = "kvpool._kvpool", name = "HybridNode")]
pub(in crate::python) struct HybridNode(pub(in crate::python) NodeState);

#[pymethods]
impl HybridNode {
    /// The parent node; `None` for the root.
    #[getter]
    fn parent(&self) -> Option<u64> {
        self.0.parent.map(NodeHandle::number)
    }

    /// The node's own tokens.
    #[getter]
    fn tokens(&self) -> Vec<i64> {
        self.0.tokens.clone()
    }

    /// Tokens up to the end of the node.
    #[getter]
    const fn end(&self) -> usize {
        self.0.end
    }

    /// Locks by part.
    #[getter]
    const fn locks(&self) -> (u32, u32, u32) {
        let [full, window, state] = self.0.locks;
        (full, window, state)
    }

    /// The number of times that the node was inserted.
    #[getter]
    const fn hits(&self) -> u32 {
        self.0.hits
    }

    /// Whether the node may be evicted as a whole.
    #[getter]
    const fn is_leaf(&self) -> bool {
        self.0.is_leaf
    }
}
