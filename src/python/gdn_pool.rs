//! `kvpool.GDNPool`.

use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::base::DType;
use crate::memory::Stream;
use crate::pool::{GdnConfig, GdnPool as Pool};

use super::args::{self, Arg};
use super::base_pool::{BasePool, Look, PoolClass};
use super::copying;
use super::debug::Debug;
use super::export::{to_tensor, to_tensors};
use super::framework::{backend, current_stream, to_dtype};
use super::logging::Reporter;

/// States of Gated DeltaNet layers, one for each request, indexed like the rows of `ReqToTokenPool`.
///
/// Index 0 is padding. Working slots are `1..=max_reqs`; track slots, which hold snapshots for a prefix cache, follow
/// in `[max_reqs + 1, max_reqs + 1 + max_track_slots)`. Both states are zero at first and lie in one region.
///
/// On a GPU calls are enqueued on the current stream as one launch each, without a temporary; they allocate nothing and
/// wait for nothing, unless the host is so far ahead that the memory through which its numbers go is all in use. Index
/// tensors there are read by the kernel: a slot outside of the pool is left out, and raised by
/// a later call.
///
/// Args:
///     max_reqs: Working slots.
///     num_gdn_layers: Linear-attention layers.
///     num_v_heads: Value heads.
///     head_k_dim: Elements of a key head.
///     head_v_dim: Elements of a value head.
///     conv_dim: Channels of the causal convolution.
///     conv_kernel_size: Taps of the causal convolution; the state holds one less.
///     device: Where the states are.
///     dtype: Of the convolution state, bfloat16 by default; the recurrent state is float32.
///     max_track_slots: Snapshots.
///     strict: Whether a bad free of a track slot raises; otherwise it is dropped, counted and reported.
///
/// Raises:
///     ConfigError: If a size is below 1 (`max_track_slots` below 0), or bytes overflow.
///     TypeError: If `dtype` cannot be stored.
///     OutOfMemoryError: If the memory cannot be had.
///     BackendUnavailableError: If `device` cannot be used here.
#[pyclass(extends = BasePool, frozen, module = "kvpool", name = "GDNPool")]
pub(super) struct GdnPool {
    pool: Pool,
    recurrent_state: Py<PyAny>,
    conv_state: Py<PyAny>,
    debug: Debug,
    reporter: Reporter,
}

impl GdnPool {
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
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
    fn look(&self, look: Look<'_>) {
        look(&self.pool);
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
        let device = args::device(device)?;
        let backend = backend(py, device)?;
        let mut pool = py.detach(|| Pool::new(&config, &backend))?;
        let recurrent_state = to_tensor(py, pool.recurrent_state())?;
        let conv_state = to_tensor(py, pool.conv_state())?;
        let debug = Debug::new(debug, &mut pool);
        let pool = Self { pool, recurrent_state, conv_state, debug, reporter: Reporter::default() };
        Ok(BasePool::initializer("GDNPool", debug, pool))
    }

    /// float32 `[num_gdn_layers, pool_size, num_v_heads, head_v_dim, head_k_dim]`, no copy. V stands before K, as
    /// FlashInfer's GDN kernels take it.
    #[getter]
    fn recurrent_state(&self, py: Python<'_>) -> Py<PyAny> {
        self.recurrent_state.clone_ref(py)
    }

    /// `dtype` `[num_gdn_layers, pool_size, conv_dim, conv_kernel_size - 1]`, no copy.
    #[getter]
    fn conv_state(&self, py: Python<'_>) -> Py<PyAny> {
        self.conv_state.clone_ref(py)
    }

    /// Recurrent and convolution state of a layer: the two tensors without their first dimension, no copy.
    ///
    /// Raises:
    ///     IndexError: If there is no such layer.
    fn get_layer_state(&self, py: Python<'_>, i: &Bound<'_, PyAny>) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
        to_tensors(py, &self.pool.layer_state(args::layer(i, self.pool.config().num_gdn_layers)?)?)
    }

    /// Zeroes both states of some slots, in all layers.
    ///
    /// Args:
    ///     indices: An int, or ints in a tensor, an array or a sequence.
    ///
    /// Raises:
    ///     IndexError: If a slot is outside of the pool. Nothing is zeroed.
    fn reset_states(&self, py: Python<'_>, indices: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut indices = args::index_or_indices(indices)?;
        let stream = self.stream(py)?;
        let indices = indices.take()?;
        self.run(py, indices.len(), || self.pool.reset_states(&indices, stream))
    }

    /// Copies both states of slot `src[i]` to slot `dst[i]`, in all layers, as if all were read before any is
    /// written, and without a temporary.
    ///
    /// That holds for indices of the host. Of tensors on a GPU no slot may be both written and read, or written twice:
    /// what it holds then is not defined.
    ///
    /// Args:
    ///     src: An int, or ints in a tensor, an array or a sequence.
    ///     dst: As many. Of a slot that is named twice, the last copy counts.
    ///
    /// Raises:
    ///     IndexError: If a slot is outside of the pool. Nothing is copied.
    ///     ConfigError: If there are not as many of both.
    fn copy_states(&self, py: Python<'_>, src: &Bound<'_, PyAny>, dst: &Bound<'_, PyAny>) -> PyResult<()> {
        let (mut src, mut dst) = (args::index_or_indices(src)?, args::index_or_indices(dst)?);
        let stream = self.stream(py)?;
        let (src, dst) = (src.take()?, dst.take()?);
        self.run(py, src.len(), || self.pool.copy_states(&src, &dst, stream))
    }

    /// Takes a track slot, the longest free first, or returns `None`. Its states are what they were.
    #[pyo3(signature = (*, owner=None))]
    fn alloc_track_slot(&self, py: Python<'_>, owner: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u32>> {
        let _acting = self.debug.begin(py, owner)?;
        Ok(self.pool.alloc_track_slot())
    }

    /// Gives a track slot back.
    ///
    /// Raises:
    ///     IndexOwnershipError: If the pool is strict and it is not the caller's to free.
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

    /// Bytes of both states.
    fn mem_bytes(&self) -> usize {
        self.pool.mem_bytes()
    }

    /// Slots of every layer: padding, working and track slots.
    #[getter]
    fn pool_size(&self) -> usize {
        self.pool.pool_size()
    }

    /// Working slots.
    #[getter]
    fn max_reqs(&self) -> usize {
        self.pool.config().max_reqs
    }

    /// Linear-attention layers.
    #[getter]
    fn num_gdn_layers(&self) -> usize {
        self.pool.config().num_gdn_layers
    }

    /// Value heads.
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

    /// Snapshots.
    #[getter]
    fn max_track_slots(&self) -> usize {
        self.pool.config().max_track_slots
    }

    /// Of the convolution state: a `torch.dtype`, or its name where PyTorch is not installed.
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_dtype(py, self.pool.config().dtype)
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
