"""`sgl_kernel.mamba` for a machine without it: the kernels that Qwen3-Next calls on a CPU, in plain PyTorch.

They go token by token and request by request, in float32, so that an answer depends on no other request of
the batch. A state is [value head, key, value]; the one of a slot below zero is neither read nor written.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from sglang.kernels.ops.attention.fla import fused_norm_gate
from sglang.kernels.ops.elementwise import elementwise
from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter
from sglang.srt.arg_groups import mamba_hook
from torch.nn.functional import normalize, silu, softplus

CHUNK = 64
"""SGLang wants the state at the beginning of every so many tokens of a prefill."""


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    conv_states: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """A causal convolution of every channel of `x` [channels, tokens], which continues from the states."""
    out = torch.zeros_like(x)
    for slot, goes_on, (begin, end) in zip(
        cache_indices.tolist(), has_initial_state.tolist(), _spans(query_start_loc), strict=True
    ):
        if slot < 0:
            continue
        before = conv_states[slot] if goes_on else torch.zeros_like(conv_states[slot])
        window = torch.cat((before, x[:, begin:end].to(before.dtype)), dim=1)
        out[:, begin:end] = _convolve(window, weight, bias)
        conv_states[slot] = window[:, window.shape[1] - before.shape[1] :]
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: object = None,  # noqa: ARG001 - always silu
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """The same for one token of each request, `x` [requests, channels]."""
    out = torch.zeros_like(x)
    for request, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        window = torch.cat((conv_states[slot], x[request, :, None].to(conv_states.dtype)), dim=1)
        out[request] = _convolve(window, weight, bias)[:, 0]
        conv_states[slot] = window[:, 1:]
    return out


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The outputs of a prefill, and the states at the beginning of its chunks. Slots get the last states."""
    out = torch.zeros_like(v)
    begins = []
    for slot, (begin, end) in zip(initial_state_indices.tolist(), _spans(cu_seqlens), strict=True):
        state = initial_state[slot].float()
        for token in range(begin, end):
            if (token - begin) % CHUNK == 0:
                begins.append(state)
            out[0, token], state = _step(
                state, q[0, token], k[0, token], v[0, token], g[0, token], beta[0, token]
            )
        if slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return out, None, torch.stack(begins)[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,  # noqa: N803 - as it is called
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """The outputs of one token of each request."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out = torch.zeros_like(v)
    for request, slot in enumerate(initial_state_indices.tolist()):
        if slot < 0:
            continue
        state = initial_state_source[slot].float()
        out[0, request], state = _step(
            state, q[0, request], k[0, request], v[0, request], g[0, request], beta[0, request]
        )
        initial_state_source[slot] = state.to(initial_state_source.dtype)
    return out


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,  # noqa: N803
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the decay, and the strength of an update, of each token and value head."""
    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def fused_rmsnorm_gated_cpu(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm, times the gate."""
    values = x.float()
    values *= (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (values * weight.float() * silu(gate.float())).to(x.dtype)


def fused_gate_sigmoid_mul_add(
    hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """Adds what the shared expert gives, times its gate."""
    gate = (hidden.float() @ weight.float()).sigmoid()
    out += (gate[:, None] * shared.float()).to(out.dtype)


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    **_: object,
) -> None:
    """Copies the states of the requests in the mask to the slots where the prefix cache looks for them."""
    track_mamba_states_all_layers(
        conv_states[None], ssm_states[None], cache_indices, mamba_track_mask, mamba_track_indices, batch_size
    )


def track_mamba_states_all_layers(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    **_: object,
) -> None:
    """The same for all layers."""
    tracked = mamba_track_mask[:batch_size].nonzero()[:, 0]
    source, target = cache_indices[tracked].long(), mamba_track_indices[tracked].long()
    for states in (conv_states, ssm_states):
        states[:, target] = states[:, source]


def _spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(starts.tolist()))


def _convolve(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    width = weight.shape[-1]
    out = (window.float().unfold(1, width, 1) * weight.float().view(-1, 1, width)).sum(-1)
    return silu(out if bias is None else out + bias.float()[:, None]).to(window.dtype)


def _step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of one request: the output, and the next state."""
    share = v.shape[0] // k.shape[0]
    query, key = (
        normalize(each.float(), dim=-1, eps=1e-6).repeat_interleave(share, dim=0) for each in (q, k)
    )
    state = state * g.exp()[:, None, None]
    seen = torch.einsum("hkv,hk->hv", state, key)
    state = state + torch.einsum("hk,hv->hkv", key, (v.float() - seen) * beta[:, None])
    out = torch.einsum("hkv,hk->hv", state, query * k.shape[-1] ** -0.5)
    return out.to(v.dtype), state


for _kernel in (
    fused_gdn_gating_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)
# SGLang has these kernels where a CPU has AMX, and a Triton kernel otherwise.
fused_norm_gate._use_cpu = True
elementwise.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add
scatter.track_mamba_states_if_needed = track_mamba_states_if_needed
scatter.track_mamba_states_all_layers = track_mamba_states_all_layers
# With these it could keep states beside those in use, which pages and two batches in flight need.
mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
# A PyTorch with CUDA gives its modules for CUDA also where there is no device.
torch.get_device_module = lambda _=None: torch.cpu  # type: ignore[assignment]
# Nor can that one lock pages without a device.
torch.Tensor.pin_memory = lambda tensor, _=None: tensor  # type: ignore[method-assign, assignment, return-value]
