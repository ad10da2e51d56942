//! `kvpool.KVPool`.

use std::sync::Arc;

use pyo3::PyTraverseError;
use pyo3::exceptions::PyTypeError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::base::{DType, Device, Dims, Error, try_with_capacity};
use crate::memory::{Backend, MappedHost, Stream};
use crate::pool::{KvConfig, KvLayout, KvPool as Pool, Scales, make_room};

use super::args::{self, Arg};
use super::base_pool::{BasePool, PoolClass, PoolVisitor};
use super::cache_layout::CacheLayout;
use super::copying;
use super::debug::Debug;
use super::export::{BufferLists, buffer_lists, to_tensors};
use super::framework::{backend, current_stream, to_dtype, torch};

/// K and V storage of every layer, in one region.
///
/// Each buffer is `[rows, head_num, head_dim]`, zero at first. Usable slots are `1..=size`; slot 0 is the
/// padding slot, written by padded tokens and never allocated. `rows` is `size + page_size`, rounded up to a
/// multiple of 8, so that every slot of a paged allocator of the same `size` has a row. Ordinary host memory
/// is committed on first touch, in pages of 2 MiB if the system provides them. Calls are thread-safe and
/// atomic with respect to each other, but not with respect to direct writes to the tensors.
///
/// On a GPU each call is one launch on the current stream, which orders calls, without allocations. A call
/// waits only if the host is so far ahead that its staging memory for indices is full. The kernel reads index
/// tensors on the GPU; the host never does. A slot outside of the pool is skipped, and a later call or
/// `check()` raises the error. Indices in host memory are checked first, as on the CPU, and copied, so such a
/// call cannot be captured into a CUDA graph; `set_kv_buffer` with tensors on the GPU can. The memory is
/// zeroed on the stream that is current at construction.
///
/// Args:
///     size: Number of usable slots.
///     layer_num: Number of layers.
///     k_head_num: Number of key heads.
///     k_head_dim: Elements of a key head.
///     device: Device of the buffers.
///     dtype: float32, float16 (default), bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8.
///     v_head_num: Number of value heads. Defaults to `k_head_num`.
///     v_head_dim: Elements of a value head. Defaults to `k_head_dim`.
///     pin_memory: Whether to page-lock host memory if an NVIDIA driver is present, through a device in use
///         or else the first. Page-locked memory is committed whole at construction.
///     page_size: Slots per page of the allocator.
///     layout: "split": keys of all layers, then values. "fused": keys and values of each layer together, the
///         values a whole number of pages behind the keys, for kernels that reach both from one address.
///
/// Raises:
///     ConfigError: If a size is below 1, a slot does not fit int32, the size in bytes overflows, or `layout`
///         is "fused" and rows of keys and values differ in shape.
///     TypeError: If `dtype` is not a storage dtype.
///     OutOfMemoryError: If there is not enough memory.
///     BackendUnavailableError: If `device` is not available.
#[pyclass(extends = BasePool, frozen, subclass, module = "kvpool", name = "KVPool")]
pub(super) struct KvPool {
    pool: Arc<Pool>,
    k_buffer: Vec<Py<PyAny>>,
    v_buffer: Vec<Py<PyAny>>,
    k_list: Py<PyList>,
    v_list: Py<PyList>,
}

impl KvPool {
    /// Returns the pool, for an allocator that poisons its rows.
    pub(super) const fn shared(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Runs `work`, which copies `rows` rows of K and V.
    fn run<R: Send>(
        &self,
        py: Python<'_>,
        rows: usize,
        work: impl FnOnce() -> crate::base::Result<R> + Send,
    ) -> PyResult<R> {
        copying(py, self.pool.device(), rows.saturating_mul(self.pool.token_bytes()), work)
    }

    /// Returns the stream for a call that sends `numbers` numbers from the host.
    fn stream(&self, py: Python<'_>, numbers: usize) -> PyResult<Stream> {
        make_room(numbers, |numbers| self.pool.backpressure_event(numbers))?;
        current_stream(py, self.pool.device())
    }

    /// Creates uninitialized PyTorch tensors for `count` rows of K and V on the pool's GPU.
    fn empty_rows<'py>(&self, py: Python<'py>, count: usize) -> PyResult<[Bound<'py, PyAny>; 2]> {
        let Some(torch) = torch(py)? else {
            return Err(PyTypeError::new_err(
                "out is required: without PyTorch there is no allocator of GPU memory for the result",
            ));
        };
        let config = self.pool.config();
        let empty = |heads: usize, dim: usize| {
            let shape = Dims::of(&[count, heads, dim])?;
            torch.empty(py, &shape, config.dtype, self.pool.device())
        };
        Ok([empty(config.k_head_num, config.k_head_dim)?, empty(config.v_head_num, config.v_head_dim)?])
    }
}

const SPLIT: &str = "split";
const FUSED: &str = "fused";

/// Returns the layout called `name`.
fn layout_of(name: &str) -> crate::base::Result<KvLayout> {
    match name {
        SPLIT => Ok(KvLayout::Split),
        FUSED => Ok(KvLayout::Fused),
        _ => Err(Error::config(format!("layout {name:?} is neither \"split\" nor \"fused\""))),
    }
}

/// Returns the tensor of one layer.
fn layer_tensor(py: Python<'_>, tensors: &[Py<PyAny>], layer_id: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    Ok(tensors[args::layer(layer_id, tensors.len())?].clone_ref(py))
}

impl PoolClass for KvPool {
    fn visit(&self, visitor: PoolVisitor<'_>) {
        visitor(&*self.pool);
    }
}

#[pymethods]
impl KvPool {
    #[new]
    #[pyo3(signature = (size, layer_num, k_head_num, k_head_dim, device=None, dtype=None, v_head_num=None,
                        v_head_dim=None, pin_memory=true, *, page_size=Arg::Missing, layout="split"),
           text_signature = "(size, layer_num, k_head_num, k_head_dim, device=\"cuda\", dtype=\"float16\", \
                             v_head_num=None, v_head_dim=None, pin_memory=True, *, page_size=1, layout=\"split\")")]
    #[expect(clippy::too_many_arguments, reason = "the signature is that of the classes it replaces")]
    fn new(
        py: Python<'_>,
        size: &Bound<'_, PyAny>,
        layer_num: &Bound<'_, PyAny>,
        k_head_num: &Bound<'_, PyAny>,
        k_head_dim: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        v_head_num: Option<&Bound<'_, PyAny>>,
        v_head_dim: Option<&Bound<'_, PyAny>>,
        pin_memory: bool,
        page_size: Arg<'_>,
        layout: &str,
    ) -> PyResult<PyClassInitializer<Self>> {
        let k_head_num = args::size("k_head_num", k_head_num)?;
        let k_head_dim = args::size("k_head_dim", k_head_dim)?;
        let config = KvConfig {
            size: args::size("size", size)?,
            layer_num: args::size("layer_num", layer_num)?,
            k_head_num,
            k_head_dim,
            v_head_num: v_head_num.map_or(Ok(k_head_num), |value| args::size("v_head_num", value))?,
            v_head_dim: v_head_dim.map_or(Ok(k_head_dim), |value| args::size("v_head_dim", value))?,
            dtype: args::dtype(dtype, DType::F16)?,
            page_size: page_size.size("page_size", 1)?,
            layout: layout_of(layout)?,
            pin_memory,
        };
        let backend: Arc<dyn Backend> = match args::device(py, device)? {
            Device::Cpu if pin_memory => Arc::new(MappedHost::default()),
            device => backend(py, device)?,
        };
        let pool = Arc::new(py.detach(|| Pool::new(&config, &backend))?);
        let (mut k_buffer, mut v_buffer) =
            (try_with_capacity(config.layer_num)?, try_with_capacity(config.layer_num)?);
        for layer in 0..config.layer_num {
            let (k, v) = to_tensors(py, &pool.kv_buffer(layer)?)?;
            k_buffer.push(k);
            v_buffer.push(v);
        }
        let list = |of: &[Py<PyAny>]| PyList::new(py, of.iter().map(|tensor| tensor.clone_ref(py)));
        let (k_list, v_list) = (list(&k_buffer)?.unbind(), list(&v_buffer)?.unbind());
        let pool = Self { pool, k_buffer, v_buffer, k_list, v_list };
        Ok(BasePool::initializer("KVPool", Debug::OFF, pool))
    }

    /// The keys of every layer: a list of `layer_num` tensors `[rows, k_head_num, k_head_dim]`, without a
    /// copy.
    #[getter]
    fn k_buffer(&self, py: Python<'_>) -> Py<PyList> {
        self.k_list.clone_ref(py)
    }

    /// The values of every layer: a list of `layer_num` tensors `[rows, v_head_num, v_head_dim]`, without a
    /// copy.
    #[getter]
    fn v_buffer(&self, py: Python<'_>) -> Py<PyList> {
        self.v_list.clone_ref(py)
    }

    /// Returns the keys of a layer, `[rows, k_head_num, k_head_dim]`, without a copy.
    ///
    /// Raises:
    ///     IndexError: If the layer does not exist.
    fn get_key_buffer(&self, py: Python<'_>, layer_id: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        layer_tensor(py, &self.k_buffer, layer_id)
    }

    /// Returns the values of a layer, `[rows, v_head_num, v_head_dim]`, without a copy.
    ///
    /// Raises:
    ///     IndexError: If the layer does not exist.
    fn get_value_buffer(&self, py: Python<'_>, layer_id: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        layer_tensor(py, &self.v_buffer, layer_id)
    }

    /// Returns the keys and values of a layer, without a copy.
    ///
    /// Raises:
    ///     IndexError: If the layer does not exist.
    fn get_kv_buffer(&self, py: Python<'_>, layer_id: &Bound<'_, PyAny>) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
        Ok((self.get_key_buffer(py, layer_id)?, self.get_value_buffer(py, layer_id)?))
    }

    /// Writes `k` and `v` to the rows that `indices` lists, in one call.
    ///
    /// Negative indices are skipped. For a row listed twice, the last value wins; with indices on a GPU, such
    /// a row may end up with K of one value and V of another, or with words of several values in each. The
    /// values are read in place, with any strides; do not resize their storage during the call. Large copies
    /// on the CPU release the GIL and use several threads.
    ///
    /// Values of another float dtype become float32, are divided by the scale, and are rounded once, to
    /// nearest, ties to even: the numbers of `(x.float() / scale).to(dtype)` in PyTorch, if `scale` is a
    /// tensor. (On a GPU PyTorch multiplies with the reciprocal of a Python number, which is rounded.) Values
    /// beyond float8_e4m3fn, infinities too, become its largest number, 448 or -448; in older versions of
    /// PyTorch they become NaN. A NaN stays one. In an 8-bit float it is 0x7f or 0xff, by its sign, which a
    /// float64 may lose; PyTorch's on a GPU may have other bits.
    ///
    /// Args:
    ///     layer_id: Index of the layer.
    ///     indices: `n` slots, int32 or int64, of any shape.
    ///     k: Leading dimensions whose product is `n`, then `[k_head_num, k_head_dim]` or `[k_head_num *
    ///         k_head_dim]`.
    ///     v: The values, shaped like `k` with the value heads.
    ///     k_scale: Divisor of keys before conversion to an 8-bit float. Keys that are already in the pool's
    ///         dtype are stored unchanged. A pool of another dtype accepts only `None` or 1.
    ///     v_scale: Divisor of values, like `k_scale`.
    ///
    /// Raises:
    ///     IndexError: If a slot or the layer is outside of the pool. Nothing is written. With indices on a
    ///         GPU, invalid ones are skipped and a later call raises this error.
    ///     ArgumentError: If a shape, device or scale is invalid. Nothing is written.
    ///     TypeError: If a dtype cannot be converted. Nothing is written.
    #[pyo3(signature = (layer_id, indices, k, v, k_scale=None, v_scale=None))]
    fn set_kv_buffer(
        &self,
        py: Python<'_>,
        layer_id: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        k_scale: Option<f32>,
        v_scale: Option<f32>,
    ) -> PyResult<()> {
        let layer = args::layer(layer_id, self.pool.config().layer_num)?;
        let mut indices = args::indices(indices)?;
        let (k, v) = (args::values("k", k)?, args::values("v", v)?);
        let stream = self.stream(py, indices.host_len())?;
        let (indices, k, v) = (indices.take()?, k.borrow()?, v.borrow()?);
        let scales = Scales { k: k_scale, v: v_scale };
        self.run(py, indices.len(), || self.pool.set_kv(layer, &indices, [k, v], scales, stream))
    }

    /// Copies the rows that `indices` lists.
    ///
    /// Args:
    ///     layer_id: Index of the layer.
    ///     indices: `n` slots, int32 or int64, of any shape.
    ///     out: A pair of contiguous output tensors `[n, head_num, head_dim]` of the pool's dtype.
    ///
    /// Returns:
    ///     Keys `[n, k_head_num, k_head_dim]` and values `[n, v_head_num, v_head_dim]`, contiguous copies;
    ///     `out` if given. On a GPU, PyTorch allocates them if `out` is omitted, within `torch.cuda.graph`
    ///     from the memory of the graph; without PyTorch `out` is required.
    ///
    /// Raises:
    ///     IndexError: If a slot or the layer is outside of the pool. With indices on a GPU, the row of an
    ///         invalid index is zero and a later call raises this error.
    ///     ArgumentError: If `out` has another shape, device or layout.
    ///     TypeError: If `out` has another dtype.
    #[pyo3(signature = (layer_id, indices, out=None))]
    fn gather_kv(
        &self,
        py: Python<'_>,
        layer_id: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
        let layer = args::layer(layer_id, self.pool.config().layer_num)?;
        let mut indices = args::indices(indices)?;
        let [k, v] = match out {
            Some(out) => args::outputs(out)?,
            None if self.pool.device() == Device::Cpu => {
                let indices = indices.take()?;
                let pair = self.run(py, indices.len(), || self.pool.gather_kv(layer, &indices))?;
                return to_tensors(py, &pair);
            }
            None => self.empty_rows(py, indices.len()?)?,
        };
        let tensors = [args::output(&k)?, args::output(&v)?];
        let stream = self.stream(py, indices.host_len())?;
        let indices = indices.take()?;
        let out = [tensors[0].borrow()?, tensors[1].borrow()?];
        self.run(py, indices.len(), || self.pool.gather_kv_into(layer, &indices, &out, stream))?;
        Ok((k.clone().unbind(), v.clone().unbind()))
    }

    /// Moves row `src_indices[i]` to row `dst_indices[i]` in all layers, as if all were read before any is
    /// written.
    ///
    /// This holds for indices in host memory. With index tensors on a GPU, the contents of a row that is both
    /// read and written, or written twice, are undefined.
    ///
    /// Args:
    ///     dst_indices: `n` slots, int32 or int64. For a slot listed twice, the last move wins.
    ///     src_indices: `n` slots.
    ///
    /// Raises:
    ///     IndexError: If a slot is outside of the pool. Nothing is moved.
    ///     ArgumentError: If the arguments differ in length.
    fn move_kv(
        &self,
        py: Python<'_>,
        dst_indices: &Bound<'_, PyAny>,
        src_indices: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (mut dst, mut src) = (args::indices(dst_indices)?, args::indices(src_indices)?);
        let stream = self.stream(py, dst.host_len() + src.host_len())?;
        let (dst, src) = (dst.take()?, src.take()?);
        let rows = dst.len().saturating_mul(self.pool.config().layer_num);
        self.run(py, rows, || self.pool.move_kv(&dst, &src, stream))
    }

    /// Returns the keys and values of a layer in the layout of paged attention kernels, without a copy.
    ///
    /// Returns:
    ///     Two views `[num_pages, page_size, head_num, head_dim]`; page 0 is the padding page.
    ///
    /// Raises:
    ///     IndexError: If the layer does not exist.
    fn page_view(&self, py: Python<'_>, layer_id: &Bound<'_, PyAny>) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
        to_tensors(py, &self.pool.page_view(args::layer(layer_id, self.pool.config().layer_num)?)?)
    }

    /// Returns the buffers for registration with a transfer engine: keys of all layers, then values, in any layout.
    ///
    /// Returns:
    ///     Three lists of `2 * layer_num` ints: addresses, bytes of each buffer, bytes of one of its rows.
    fn get_contiguous_buf_infos(&self) -> BufferLists {
        buffer_lists(self.pool.buffer_infos())
    }

    /// Waits for the current stream and raises the errors of earlier calls on it whose indices only the GPU
    /// knew. Does nothing on the CPU, where each call raises its own errors.
    ///
    /// Raises:
    ///     IndexError: If a slot was outside of the pool; its row was skipped.
    ///     DriverError: If work on the GPU has failed.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let stream = self.stream(py, 0)?;
        Ok(py.detach(|| self.pool.check(stream))?)
    }

    /// Returns the bytes of all buffers.
    fn mem_bytes(&self) -> usize {
        self.pool.mem_bytes()
    }

    /// `mem_bytes()`, under the name that pymllm calls.
    fn _mem_bytes(&self) -> usize {
        self.pool.mem_bytes()
    }

    /// Number of usable slots.
    #[getter]
    fn size(&self) -> usize {
        self.pool.config().size
    }

    /// Slots per page.
    #[getter]
    fn page_size(&self) -> usize {
        self.pool.config().page_size
    }

    /// Layout of the buffers: "split" or "fused".
    #[getter]
    fn layout(&self) -> &'static str {
        match self.pool.config().layout {
            KvLayout::Split => SPLIT,
            KvLayout::Fused => FUSED,
        }
    }

    /// Number of layers.
    #[getter]
    fn num_layers(&self) -> usize {
        self.pool.config().layer_num
    }

    /// Number of key heads.
    #[getter]
    fn num_k_heads(&self) -> usize {
        self.pool.config().k_head_num
    }

    /// Number of value heads.
    #[getter]
    fn num_v_heads(&self) -> usize {
        self.pool.config().v_head_num
    }

    /// Another name of `num_layers`, as the constructor has it.
    #[getter]
    fn layer_num(&self) -> usize {
        self.num_layers()
    }

    /// Another name of `num_k_heads`, as the constructor has it.
    #[getter]
    fn k_head_num(&self) -> usize {
        self.num_k_heads()
    }

    /// Elements of a key head.
    #[getter]
    fn k_head_dim(&self) -> usize {
        self.pool.config().k_head_dim
    }

    /// Another name of `num_v_heads`, as the constructor has it.
    #[getter]
    fn v_head_num(&self) -> usize {
        self.num_v_heads()
    }

    /// Elements of a value head.
    #[getter]
    fn v_head_dim(&self) -> usize {
        self.pool.config().v_head_dim
    }

    /// Dtype of the elements: a `torch.dtype`, or its name if PyTorch is not installed.
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
        let config = self.pool.config();
        format!(
            "KVPool(size={}, layer_num={}, k=[{}, {}], v=[{}, {}], device='{}', dtype={}, page_size={})",
            config.size,
            config.layer_num,
            config.k_head_num,
            config.k_head_dim,
            config.v_head_num,
            config.v_head_dim,
            self.pool.device(),
            config.dtype,
            config.page_size
        )
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for tensor in self.k_buffer.iter().chain(&self.v_buffer) {
            visit.call(tensor)?;
        }
        visit.call(&self.k_list)?;
        visit.call(&self.v_list)
    }
}
