//! `kvpool.GDNPool`.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::base::{DType, Id, StateSlot};
use crate::memory::Stream;
use crate::pool::{GdnConfig, GdnPool as Pool, make_room};

use super::args::{self, Arg};
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::cache_layout::CacheLayout;
use super::copying;
use super::debug::Debug;
use super::export::{BufferLists, buffer_lists, to_tensor, to_tensors};
use super::framework::{backend, current_stream, to_dtype};
use super::logging::Reporter;
use super::pool_name::PoolName;

/// States of Gated DeltaNet layers, one for each request, indexed like the rows of `ReqToTokenPool`.
///
/// Index 0 is padding. Working slots are `1..=max_reqs`. Track slots, which hold snapshots for a prefix
/// cache, follow in `[max_reqs + 1, max_reqs + 1 + max_track_slots)`. Both states are zero at first and share
/// one region.
///
/// On a GPU each call is one launch on the current stream, without temporaries or allocations. A call waits
/// only if the host is so far ahead that its staging memory for indices is full. The kernel reads index
/// tensors on the GPU: a slot outside of the pool is skipped, and a later call raises the error.
///
/// Args:
///     max_reqs: Number of working slots.
///     num_gdn_layers: Number of linear-attention layers.
///     num_v_heads: Number of value heads.
///     head_k_dim: Elements of a key head.
///     head_v_dim: Elements of a value head.
///     conv_dim: Channels of the causal convolution.
///     conv_kernel_size: Taps of the causal convolution; the state holds one fewer.
///     device: Device of the states.
///     dtype: Dtype of the convolution state, bfloat16 by default. The recurrent state is float32.
///     max_track_slots: Number of track slots.
///     strict: Whether an invalid free of a track slot raises; otherwise it is dropped, counted and reported.
///     debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
///         variable `KVPOOL_DEBUG`.
///
/// Raises:
///     ConfigError: If a size is below 1 (`max_track_slots`: below 0), or the size in bytes overflows.
///     TypeError: If `dtype` is not a storage dtype.
///     OutOfMemoryError: If there is not enough memory.
///     BackendUnavailableError: If `device` is not available.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "GDNPool")]
pub(super) struct GdnPool {
    pub(super) pool: Arc<Pool>,
    recurrent_state: Py<PyAny>,
    conv_state: Py<PyAny>,
    debug: Debug,
    reporter: Reporter,
}

impl GdnPool {
    /// Returns the stream for a call that sends `numbers` numbers from the host.
    fn stream(&self, py: Python<'_>, numbers: usize) -> PyResult<Stream> {
        make_room(numbers, |numbers| self.pool.backpressure_event(numbers))?;
        current_stream(py, self.pool.device())
    }

    /// Runs `work`, which writes the states of `slots` slots.
    fn run(
        &self,
        py: Python<'_>,
        slots: usize,
        work: impl FnOnce() -> crate::base::Result<()> + Send,
    ) -> PyResult<()> {
        let bytes = slots.saturating_mul(self.pool.mem_bytes() / self.pool.pool_size());
        copying(py, self.pool.device(), bytes, work)
    }
}

impl PoolClass for GdnPool {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&*self.pool);
    }
}

#[pymethods]
impl GdnPool {
    #[new]
    #[pyo3(signature = (max_reqs, num_gdn_layers, num_v_heads, head_k_dim, head_v_dim, conv_dim, conv_kernel_size,
                        device=None, dtype=None, max_track_slots=Arg::Missing, *, strict=false, debug=None),
           text_signature = "(max_reqs, num_gdn_layers, num_v_heads, head_k_dim, head_v_dim, conv_dim, \
                             conv_kernel_size, device=\"cuda\", dtype=\"bfloat16\", max_track_slots=0, *, \
                             strict=False, debug=None)")]
    #[expect(clippy::too_many_arguments, reason = "the signature is that of the classes it replaces")]
    fn new(
        py: Python<'_>,
        max_reqs: &Bound<'_, PyAny>,
        num_gdn_layers: &Bound<'_, PyAny>,
        num_v_heads: &Bound<'_, PyAny>,
        head_k_dim: &Bound<'_, PyAny>,
        head_v_dim: &Bound<'_, PyAny>,
        conv_dim: &Bound<'_, PyAny>,
        conv_kernel_size: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        max_track_slots: Arg<'_>,
        strict: bool,
        debug: Option<bool>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let config = GdnConfig {
            max_reqs: args::size("max_reqs", max_reqs)?,
            num_gdn_layers: args::size("num_gdn_layers", num_gdn_layers)?,
            num_v_heads: args::size("num_v_heads", num_v_heads)?,
            head_k_dim: args::size("head_k_dim", head_k_dim)?,
            head_v_dim: args::size("head_v_dim", head_v_dim)?,
            conv_dim: args::size("conv_dim", conv_dim)?,
            conv_kernel_size: args::size("conv_kernel_size", conv_kernel_size)?,
            dtype: args::dtype(dtype, DType::BF16)?,
            max_track_slots: max_track_slots.size("max_track_slots", 0)?,
            strict,
        };
        let device = args::device(py, device)?;
        let backend = backend(py, device)?;
        let pool = py.detach(|| Pool::new(&config, &backend))?;
        let recurrent_state = to_tensor(py, pool.recurrent_state())?;
        let conv_state = to_tensor(py, pool.conv_state())?;
        let debug = Debug::new(debug, &pool);
        let (name, pool) = (PoolName::next("GDNPool"), Arc::new(pool));
        let pool = Self { pool, recurrent_state, conv_state, debug, reporter: Reporter::new(&name) };
        Ok(BasePool::named(name, debug, pool))
    }

    /// Recurrent states, float32 `[num_gdn_layers, pool_size, num_v_heads, head_v_dim, head_k_dim]`, without
    /// a copy. V comes before K, as in FlashInfer's GDN kernels.
    #[getter]
    fn recurrent_state(&self, py: Python<'_>) -> Py<PyAny> {
        self.recurrent_state.clone_ref(py)
    }

    /// Convolution states, `dtype` `[num_gdn_layers, pool_size, conv_dim, conv_kernel_size - 1]`, without a
    /// copy.
    #[getter]
    fn conv_state(&self, py: Python<'_>) -> Py<PyAny> {
        self.conv_state.clone_ref(py)
    }

    /// Returns the recurrent and convolution states of a layer: the two tensors without their first
    /// dimension, without a copy.
    ///
    /// Raises:
    ///     IndexError: If the layer does not exist.
    fn get_layer_state(&self, py: Python<'_>, i: &Bound<'_, PyAny>) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
        to_tensors(py, &self.pool.layer_state(args::layer(i, self.pool.config().num_gdn_layers)?)?)
    }

    /// Returns the buffers for registration with a transfer engine: recurrent states of all layers, then convolution
    /// states. A row is the state of a slot.
    ///
    /// Returns:
    ///     Three lists of `2 * num_gdn_layers` ints: addresses, bytes of each buffer, bytes of one of its rows.
    fn get_contiguous_buf_infos(&self) -> BufferLists {
        buffer_lists(self.pool.buffer_infos())
    }

    /// Zeroes both states of slots, in all layers.
    ///
    /// Args:
    ///     indices: An int, or ints in a tensor, an array or a sequence.
    ///
    /// Raises:
    ///     IndexError: If a slot is outside of the pool. Nothing is zeroed.
    ///     IndexOwnershipError: If a slot has a snapshot of a prefix cache. Nothing is zeroed. Tensors on a GPU
    ///         are not checked for it.
    fn reset_states(&self, py: Python<'_>, indices: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut indices = args::index_or_indices(indices)?;
        let stream = self.stream(py, indices.host_len())?;
        let indices = indices.take()?;
        self.run(py, indices.len(), || self.pool.reset_states(&indices, stream))
    }

    /// Copies both states of slot `src[i]` to slot `dst[i]`, in all layers, as if all were read before any is
    /// written, without a temporary.
    ///
    /// This holds for indices in host memory. With index tensors on a GPU, the contents of a slot that is
    /// both read and written, or written twice, are undefined.
    ///
    /// Args:
    ///     src: An int, or ints in a tensor, an array or a sequence.
    ///     dst: Indices, as many as `src`. For a slot listed twice, the last copy wins.
    ///
    /// Raises:
    ///     IndexError: If a slot is outside of the pool. Nothing is copied.
    ///     IndexOwnershipError: If a slot of `dst` has a snapshot of a prefix cache. Nothing is copied. Tensors
    ///         on a GPU are not checked for it.
    ///     ArgumentError: If `src` and `dst` differ in length.
    fn copy_states(&self, py: Python<'_>, src: &Bound<'_, PyAny>, dst: &Bound<'_, PyAny>) -> PyResult<()> {
        let (mut src, mut dst) = (args::index_or_indices(src)?, args::index_or_indices(dst)?);
        let stream = self.stream(py, src.host_len() + dst.host_len())?;
        let (src, dst) = (src.take()?, dst.take()?);
        self.run(py, src.len(), || self.pool.copy_states(&src, &dst, stream))
    }

    /// Takes the track slot that has been free longest, or returns `None`. Its states are unchanged.
    #[pyo3(signature = (*, owner=None))]
    fn alloc_track_slot(&self, py: Python<'_>, owner: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u32>> {
        let _acting = self.debug.begin(py, owner)?;
        Ok(self.pool.alloc_track_slot().map(StateSlot::number))
    }

    /// Frees a track slot. One that has a snapshot of a prefix cache is the cache's: freeing it is an invalid
    /// free.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and the slot is not in use, or a prefix cache has it.
    #[pyo3(signature = (slot, *, owner=None))]
    fn free_track_slot(
        &self,
        py: Python<'_>,
        slot: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _acting = self.debug.begin(py, owner)?;
        let bad = self.pool.free_track_slot(args::int(slot)?)?;
        self.reporter.bad_frees(py, &bad, "track slot", 1, self.debug);
        Ok(())
    }

    /// Returns the bytes of both states.
    fn mem_bytes(&self) -> usize {
        self.pool.mem_bytes()
    }

    /// Number of slots in each layer: padding, working and track slots.
    #[getter]
    fn pool_size(&self) -> usize {
        self.pool.pool_size()
    }

    /// Number of working slots.
    #[getter]
    fn max_reqs(&self) -> usize {
        self.pool.config().max_reqs
    }

    /// Number of linear-attention layers.
    #[getter]
    fn num_gdn_layers(&self) -> usize {
        self.pool.config().num_gdn_layers
    }

    /// Number of value heads.
    #[getter]
    fn num_v_heads(&self) -> usize {
        self.pool.config().num_v_heads
    }

    /// Elements of a key head.
    #[getter]
    fn head_k_dim(&self) -> usize {
        self.pool.config().head_k_dim
    }

    /// Elements of a value head.
    #[getter]
    fn head_v_dim(&self) -> usize {
        self.pool.config().head_v_dim
    }

    /// Channels of the causal convolution.
    #[getter]
    fn conv_dim(&self) -> usize {
        self.pool.config().conv_dim
    }

    /// Taps of the causal convolution.
    #[getter]
    fn conv_kernel_size(&self) -> usize {
        self.pool.config().conv_kernel_size
    }

    /// Number of track slots.
    #[getter]
    fn max_track_slots(&self) -> usize {
        self.pool.config().max_track_slots
    }

    /// Dtype of the convolution state: a `torch.dtype`, or its name if PyTorch is not installed.
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_dtype(py, self.pool.config().dtype)
    }

    /// What the pool keeps, as a layout of one group.
    #[getter]
    fn cache_layout(&self) -> CacheLayout {
        CacheLayout::new_of(self.pool.cache_layout().clone())
    }

    fn __repr__(&self) -> String {
        format!(
            "GDNPool(max_reqs={}, num_gdn_layers={}, max_track_slots={}, device='{}')",
            self.pool.config().max_reqs,
            self.pool.config().num_gdn_layers,
            self.pool.config().max_track_slots,
            self.pool.device()
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.recurrent_state)?;
        visit.call(&self.conv_state)
    }
}
