//! The bytes of the pools of a model, for `kvpool plan`.

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::base::{DType, Device};
use crate::pool::{
    AllocatorConfig, Footprint, GdnConfig, KvConfig, KvLayout, PlannerConfig, ReqToTokenConfig,
};

use super::host_tier::staging_bytes;

/// `kvpool.models.model.KvLayers`.
#[derive(FromPyObject)]
struct KvLayers {
    layers: Vec<usize>,
    k_head_num: usize,
    k_head_dim: usize,
    v_head_num: usize,
    v_head_dim: usize,
}

/// `kvpool.models.model.States`.
#[derive(FromPyObject)]
struct States {
    layers: Vec<usize>,
    head_num: usize,
    head_k_dim: usize,
    head_v_dim: usize,
    conv_dim: usize,
    conv_kernel_size: usize,
}

/// `kvpool.tools.plan.pool_bytes.Shapes`.
#[derive(FromPyObject)]
struct Shapes {
    kv: Vec<KvLayers>,
    dtype: String,
    states: Option<States>,
    conv_dtype: String,
    page_size: usize,
    max_context_len: usize,
    step_tokens: usize,
    host_tier: bool,
    device: String,
}

/// Returns the bytes of the pools of a model: the arguments of `kvpool.tools.plan.pool_bytes.Footprint`.
///
/// Args:
///     shapes: Shapes of the pools.
///     size: Token slots.
///     max_reqs: The most requests at once.
///
/// Raises:
///     ArgumentError: If no pool can be that large.
#[pyfunction]
pub(super) fn _footprint<'py>(
    py: Python<'py>,
    shapes: &Bound<'py, PyAny>,
    size: usize,
    max_reqs: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let Shapes { kv, dtype, states, conv_dtype, page_size, max_context_len, step_tokens, host_tier, device } =
        shapes.extract()?;
    let (dtype, device) = (DType::parse(&dtype)?, Device::parse(&device)?);
    let (mut transfer, mut kv_bytes) = (0, 0);
    let mut pool = |footprint: Footprint| {
        transfer += footprint.transfer;
        footprint.pool
    };
    for KvLayers { layers, k_head_num, k_head_dim, v_head_num, v_head_dim } in kv {
        let (layer_num, pin_memory) = (layers.len(), false);
        let config = KvConfig {
            size,
            layer_num,
            k_head_num,
            k_head_dim,
            v_head_num,
            v_head_dim,
            dtype,
            page_size,
            layout: KvLayout::Split,
            pin_memory,
        };
        kv_bytes += pool(config.footprint(device)?);
    }
    let mut states_bytes = 0;
    if let Some(States { layers, head_num, head_k_dim, head_v_dim, conv_dim, conv_kernel_size }) = states {
        let config = GdnConfig {
            max_reqs,
            num_gdn_layers: layers.len(),
            num_v_heads: head_num,
            head_k_dim,
            head_v_dim,
            conv_dim,
            conv_kernel_size,
            dtype: DType::parse(&conv_dtype)?,
            max_track_slots: 0,
            strict: false,
        };
        states_bytes = pool(config.footprint(device)?);
    }
    let table = ReqToTokenConfig::new(max_reqs, max_context_len);
    let slots = AllocatorConfig { page_size, ..AllocatorConfig::new(size) };
    // A step in which every request decodes one token must fit.
    let max_tokens = step_tokens.max(max_reqs);
    let plan = PlannerConfig::new(max_reqs, max_tokens);
    let staging = if host_tier && device != Device::Cpu { staging_bytes()? } else { 0 };
    let bytes = [
        ("kv_bytes", kv_bytes),
        ("states_bytes", states_bytes),
        ("table_bytes", pool(table.footprint(device)?)),
        ("allocator_bytes", pool(slots.footprint(device)?)),
        ("planner_bytes", pool(plan.footprint(&table, &slots, device)?)),
        ("staging_bytes", staging),
    ];
    let found = bytes.into_py_dict(py)?;
    found.set_item("transfer_bytes", transfer)?;
    Ok(found)
}
