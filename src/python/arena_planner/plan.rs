//! `kvpool.ArenaPlan` and `kvpool.GroupPlan`.

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::base::Error;
use crate::pool::{ArenaPlan as Plan, PlanArray};

use super::ArenaPlanner;
use crate::python::export::to_host_array;

/// A planned step over a layout: the arrays that do not depend on a group, and those of each group.
///
/// The tensors are int32 views of the planner's memory, on its device and at the same addresses in every plan. They are
/// valid on the stream that was current in the planning call. The next plan of the planner overwrites them, and getters
/// of this plan then raise `StaleError`. `B` is the padded number of requests, `T` the padded number of new tokens.
#[pyclass(frozen, module = "kvpool", name = "ArenaPlan", weakref)]
pub(in crate::python) struct ArenaPlan {
    planner: Py<ArenaPlanner>,
    plan: Plan,
}

/// The arrays of a group in a planned step: those of pages, or those of states.
///
/// The tensors are as those of `ArenaPlan`, int32 (`slot_mapping`: int64). A slot is an entry of a unit:
/// `unit * entries + entry`, the row of the group's buffers with the first two dimensions flattened. An entry of
/// several tokens is complete with its last token, and has its slot there.
#[pyclass(frozen, module = "kvpool", name = "GroupPlan", weakref)]
pub(in crate::python) struct GroupPlan {
    planner: Py<ArenaPlanner>,
    plan: Plan,
    group: usize,
}

/// The place of an array among the cached tensors.
const fn place(array: PlanArray) -> usize {
    const COMMON: usize = 4;
    const OF_A_GROUP: usize = 7;
    let (group, at) = match array {
        PlanArray::Positions => return 0,
        PlanArray::ReqPoolIndices => return 1,
        PlanArray::SeqLens => return 2,
        PlanArray::QoIndptr => return 3,
        PlanArray::OutCacheLoc(group) => (group, 0),
        PlanArray::SlotMapping(group) => (group, 1),
        PlanArray::KvIndptr(group) => (group, 2),
        PlanArray::KvLastPageLen(group) => (group, 3),
        PlanArray::KvIndices(group) => (group, 4),
        PlanArray::BlockTable(group) => (group, 5),
        PlanArray::StateIndices(group) => (group, 6),
    };
    COMMON + group * OF_A_GROUP + at
}

fn tensor(
    py: Python<'_>,
    planner: &ArenaPlanner,
    plan: &Plan,
    array: PlanArray,
) -> PyResult<Option<Py<PyAny>>> {
    let view = planner.planner.array(plan, array)?;
    view.map(|view| planner.tensors.tensor(py, place(array), (), &view)).transpose()
}

fn host_array<'py>(
    py: Python<'py>,
    planner: &ArenaPlanner,
    plan: &Plan,
    array: PlanArray,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    planner.planner.host_array(plan, array)?.map(|view| to_host_array(py, view)).transpose()
}

fn unknown_array_error(name: &str, names: &[&str]) -> PyErr {
    Error::argument(format!("there is no array {name:?}; the arrays are {}", names.join(", "))).into()
}

/// The getters of the arrays of both classes, and their names.
macro_rules! arrays {
    (
        plan { $($(#[doc = $doc:tt])+ $name:ident: $array:ident,)* }
        group { $($(#[doc = $group_doc:tt])+ $group_name:ident: $group_array:ident,)* }
    ) => {
        #[pymethods]
        impl ArenaPlan {
            $(
                $(#[doc = $doc])+
                #[getter]
                fn $name(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
                    tensor(py, self.planner.get(), &self.plan, PlanArray::$array)
                }
            )*

            /// Returns an array of this plan in host memory, a read-only NumPy array: on the CPU over the planner's
            /// memory, from a GPU a copy that needs no transfer. Without NumPy it is a `kvpool.Tensor`.
            ///
            /// Args:
            ///     name: Name of the array.
            ///
            /// Raises:
            ///     ArgumentError: If there is no such array.
            ///     StaleError: After a later plan.
            fn host<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
                let array = match name {
                    $(stringify!($name) => PlanArray::$array,)*
                    _ => return Err(unknown_array_error(name, &[$(stringify!($name)),*])),
                };
                host_array(py, self.planner.get(), &self.plan, array)
            }

            /// Returns the arrays of a group.
            ///
            /// Args:
            ///     name: Name of the group.
            ///
            /// Raises:
            ///     ArgumentError: If there is no such group.
            fn group(&self, py: Python<'_>, name: &str) -> PyResult<GroupPlan> {
                let group = self.planner.get().arena.get().group(name)?;
                Ok(GroupPlan { planner: self.planner.clone_ref(py), plan: self.plan, group })
            }

            /// Number of requests, without padding.
            #[getter]
            fn batch_size(&self) -> usize {
                self.plan.batch_size
            }

            /// Number of requests, including padding: `B`.
            #[getter]
            fn padded_batch_size(&self) -> usize {
                self.plan.padded_batch_size
            }

            /// Number of new tokens, without padding.
            #[getter]
            fn num_tokens(&self) -> usize {
                self.plan.num_tokens
            }

            /// Number of new tokens, including padding: `T`.
            #[getter]
            fn padded_num_tokens(&self) -> usize {
                self.plan.padded_num_tokens
            }

            /// Largest number of new tokens of a request (FlashAttention's name).
            #[getter]
            fn max_seqlen_q(&self) -> usize {
                self.plan.max_seqlen_q
            }

            /// Largest number of tokens of a request (FlashAttention's name).
            #[getter]
            fn max_seqlen_k(&self) -> usize {
                self.plan.max_seqlen_k
            }

            fn __repr__(&self) -> String {
                format!(
                    "ArenaPlan(batch_size={}, num_tokens={}, max_seqlen_q={}, max_seqlen_k={}, padded_batch_size={})",
                    self.plan.batch_size,
                    self.plan.num_tokens,
                    self.plan.max_seqlen_q,
                    self.plan.max_seqlen_k,
                    self.plan.padded_batch_size
                )
            }

            fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
                visit.call(&self.planner)
            }
        }

        #[pymethods]
        impl GroupPlan {
            $(
                $(#[doc = $group_doc])+
                #[getter]
                fn $group_name(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
                    tensor(py, self.planner.get(), &self.plan, PlanArray::$group_array(self.group))
                }
            )*

            /// Returns an array of this group in host memory, as `ArenaPlan.host`; `None` where the tensor is `None`.
            ///
            /// Args:
            ///     name: Name of the array.
            ///
            /// Raises:
            ///     ArgumentError: If there is no such array.
            ///     StaleError: After a later plan; on a GPU also after `truncate` and `finish`.
            fn host<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
                let array = match name {
                    $(stringify!($group_name) => PlanArray::$group_array(self.group),)*
                    _ => return Err(unknown_array_error(name, &[$(stringify!($group_name)),*])),
                };
                host_array(py, self.planner.get(), &self.plan, array)
            }

            fn __repr__(&self) -> String {
                let planner = self.planner.get();
                let name = planner.planner.arena().layout().groups()[self.group].name();
                format!("GroupPlan('{name}', batch_size={})", self.plan.batch_size)
            }

            fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
                visit.call(&self.planner)
            }
        }
    };
}

arrays! {
    plan {
        /// Positions of the new tokens in their requests, `[T]`.
        positions: Positions,
        /// Rows of the requests, `[B]`; 0 for padding.
        req_pool_indices: ReqPoolIndices,
        /// Tokens of each request, including the new ones, `[B]`.
        seq_lens: SeqLens,
        /// The same tensor as `seq_lens`, by FlashAttention's name (`flash_attn_with_kvcache`).
        cache_seqlens: SeqLens,
        /// Offsets of the new tokens of each request, ending with their total, `[B + 1]` (FlashInfer).
        qo_indptr: QoIndptr,
        /// The same tensor as `qo_indptr`, by FlashAttention's name (`flash_attn_varlen_func`).
        cu_seqlens_q: QoIndptr,
    }
    group {
        /// Slots of the entries that the new tokens complete, `[T]`, one request after the other; 0 for the other
        /// tokens and for padding (SGLang's name). `None` for states.
        out_cache_loc: OutCacheLoc,
        /// The same slots, int64 `[T]`; -1 in place of 0, which vLLM's kernels skip. `None` for states.
        slot_mapping: SlotMapping,
        /// Offsets of the units of each request in `kv_indices`, ending with their total, `[B + 1]` (FlashInfer).
        /// `None` for states.
        kv_indptr: KvIndptr,
        /// The units with entries of all requests, one request after the other, `[kv_indptr[-1]]`: sinks, then those
        /// that the new tokens see (FlashInfer); of a request that publishes to a prefix cache, those that the token
        /// behind its last whole page before them sees. `None` for states, and if the planner does not build it.
        kv_indices: KvIndices,
        /// Entries in the last unit of each request, `[B]`; 0 for a request without entries (FlashInfer). `None` for
        /// states.
        kv_last_page_len: KvLastPageLen,
        /// The units of each request by position, `[B, ceil(max_context_len / tokens of a unit)]`, 0 for those that it
        /// does not have or has no more (FlashAttention and vLLM). `None` for states, and if the planner does not build
        /// it.
        block_table: BlockTable,
        /// The unit of each request's state, `[N, B]`; 0 for padding. `N` is 1, or the number of layers if the group is
        /// placed layer by layer (`SlabLayout.by_layer`). `None` for pages.
        state_indices: StateIndices,
    }
}

impl ArenaPlan {
    pub(super) fn new(planner: &Bound<'_, ArenaPlanner>, plan: Plan) -> Self {
        Self { planner: planner.clone().unbind(), plan }
    }
}
