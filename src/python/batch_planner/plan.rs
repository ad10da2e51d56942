//! `kvpool.BatchPlan` and `kvpool.HostPlan`.

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::pool::{Field, Plan};

use super::BatchPlanner;
use crate::python::export::to_host_array;

/// A planned step: the arrays that attention kernels and samplers read.
///
/// The tensors are int32 (`slot_mapping`: int64) views of the planner's memory, on its device and at the same
/// addresses in every plan. They are valid on the stream that was current in the planning call. The next plan
/// of the planner overwrites them, and getters of this plan then raise `StaleError`. `B` is the padded
/// number of requests, `T` the padded number of new tokens.
#[pyclass(frozen, module = "kvpool", name = "BatchPlan", weakref)]
pub(in crate::python) struct BatchPlan {
    planner: Py<BatchPlanner>,
    plan: Plan,
}

impl BatchPlan {
    pub(super) fn new(planner: &Bound<'_, BatchPlanner>, plan: Plan) -> Self {
        Self { planner: planner.clone().unbind(), plan }
    }

    fn tensor(&self, py: Python<'_>, field: Field) -> PyResult<Option<Py<PyAny>>> {
        let planner = self.planner.get();
        let view = planner.planner.field(&self.plan, field)?;
        view.map(|view| planner.tensors.tensor(py, field as usize, (), &view)).transpose()
    }
}

/// The arrays of a `BatchPlan` in host memory: read-only NumPy arrays over the planner's memory, which the
/// next plan overwrites.
///
/// On a GPU `kv_indices` and `block_table` are built on access, which raises `StaleError` after
/// `truncate`, `finish` or `fork`. Without NumPy the arrays are `kvpool.Tensor`s.
#[pyclass(frozen, module = "kvpool", name = "HostPlan")]
pub(in crate::python) struct HostPlan {
    planner: Py<BatchPlanner>,
    plan: Plan,
}

impl HostPlan {
    fn array<'py>(&self, py: Python<'py>, field: Field) -> PyResult<Option<Bound<'py, PyAny>>> {
        let view = self.planner.get().planner.host_field(&self.plan, field)?;
        view.map(|view| to_host_array(py, view)).transpose()
    }
}

/// The methods of both classes, with a getter for each array.
macro_rules! plan_methods {
    ($($(#[doc = $doc:tt])+ $name:ident: $field:ident,)*) => {
        #[pymethods]
        impl BatchPlan {
            $(
                $(#[doc = $doc])+
                #[getter]
                fn $name(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
                    self.tensor(py, Field::$field)
                }
            )*

            /// The arrays of this plan in host memory.
            #[getter]
            fn host(&self, py: Python<'_>) -> HostPlan {
                HostPlan { planner: self.planner.clone_ref(py), plan: self.plan }
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
                    "BatchPlan(batch_size={}, num_tokens={}, max_seqlen_q={}, max_seqlen_k={}, padded_batch_size={})",
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
        impl HostPlan {
            $(
                #[doc = concat!("`BatchPlan.", stringify!($name), "` in host memory.")]
                #[getter]
                fn $name<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
                    self.array(py, Field::$field)
                }
            )*

            fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
                visit.call(&self.planner)
            }
        }
    };
}

plan_methods! {
    /// Slots of the new tokens, `[T]`, one request after the other; 0 for padding (SGLang's name).
    out_cache_loc: OutCacheLoc,
    /// Positions of the new tokens in their requests, `[T]`.
    positions: Positions,
    /// Slots of the new tokens, int64 `[T]`; -1 for padding, which vLLM's kernels skip.
    slot_mapping: SlotMapping,
    /// Rows of the request table, `[B]`; 0 for padding.
    req_pool_indices: ReqPoolIndices,
    /// Tokens of each request, including the new ones, `[B]`.
    seq_lens: SeqLens,
    /// The same tensor as `seq_lens`, by FlashAttention's name (`flash_attn_with_kvcache`).
    cache_seqlens: SeqLens,
    /// Offsets of the new tokens of each request, ending with their total, `[B + 1]` (FlashInfer).
    qo_indptr: QoIndptr,
    /// The same tensor as `qo_indptr`, by FlashAttention's name (`flash_attn_varlen_func`).
    cu_seqlens_q: QoIndptr,
    /// Offsets of the pages of each request in `kv_indices`, ending with their total, `[B + 1]` (FlashInfer).
    kv_indptr: KvIndptr,
    /// The pages of all requests, one request after the other, `[kv_indptr[-1]]` (FlashInfer). With pages of
    /// one slot these are the slots. `None` if the planner does not build it.
    kv_indices: KvIndices,
    /// Tokens in the last page of each request, `[B]`, 1 to `page_size` (FlashInfer); 0 for a request without
    /// tokens.
    kv_last_page_len: KvLastPageLen,
    /// The pages of each request, padded with zeros, `[B, ceil(max_context_len / page_size)]` (FlashAttention
    /// and vLLM). `None` if the planner does not build it.
    block_table: BlockTable,
}
