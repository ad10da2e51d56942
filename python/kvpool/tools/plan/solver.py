"""The most tokens and requests of a model within a memory budget, and the pools that hold them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import ConfigError
from kvpool.models.fields import MOST_INT32
from kvpool.models.model import KvLayers, Model, States
from kvpool.models.sharding import shard, shard_states
from kvpool.tools.plan.pool_bytes import Footprint, Shapes, footprint

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
MLA_FORMS = ("latent", "fused", "expanded")
STEP_TOKENS = 8192
PAGE_SIZE = 16


@dataclass(frozen=True)
class PlanConfig:
    """Configuration of a plan.

    Attributes:
        memory_bytes: Memory of each GPU.
        reserve_bytes: Memory that is not for the pools.
        tp: GPUs that share each layer (tensor parallelism).
        dtype: Data type of keys and values; None takes the model's.
        context_len: The most tokens of a request; None takes the model's.
        mean_context: Tokens of a request on average; None for `context_len`.
        page_size: Slots in a page.
        max_requests: The most requests at once; None for as many as fit with `mean_context` tokens each.
        step_tokens: The most new tokens in a step of the planner.
        host_tier: Whether there is a `HostTier` below, which copies through a staging area on a GPU.
        state_dtype: Data type of recurrent states in an arena.
        mla: Storage form of latent attention, one of `MLA_FORMS`.
        device: Device of the pools, in PyTorch's notation.
    """

    memory_bytes: int
    reserve_bytes: int = 0
    tp: int = 1
    dtype: str | None = None
    context_len: int | None = None
    mean_context: int | None = None
    page_size: int = PAGE_SIZE
    max_requests: int | None = None
    step_tokens: int = STEP_TOKENS
    host_tier: bool = False
    state_dtype: str = "float32"
    mla: str = "latent"
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("tp", "context_len", "mean_context", "page_size", "max_requests", "step_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST_INT32:
                raise ConfigError(f"{name} must be between 1 and {MOST_INT32:,}, not {value}")
        if self.reserve_bytes > self.memory_bytes:
            raise ConfigError(
                f"--reserve, {self.reserve_bytes:,} bytes, exceeds --memory, {self.memory_bytes:,} bytes"
            )
        if self.dtype is not None and self.storage_dtype not in _STORAGE_DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_STORAGE_DTYPES)}, not {self.dtype!r}")
        if self.state_dtype not in _STORAGE_DTYPES:
            raise ConfigError(
                f"state_dtype must be one of {', '.join(_STORAGE_DTYPES)}, not {self.state_dtype!r}"
            )
        if self.mla not in MLA_FORMS:
            raise ConfigError(f"mla must be one of {', '.join(MLA_FORMS)}, not {self.mla!r}")
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise ConfigError(f"device must be cpu, cuda or cuda:N, not {self.device!r}")

    @property
    def storage_dtype(self) -> str | None:
        """Data type of keys and values by its full name; None for the model's."""
        return self.dtype and DTYPE_ALIASES.get(self.dtype, self.dtype)

    @property
    def budget_bytes(self) -> int:
        """Memory for the pools."""
        return self.memory_bytes - self.reserve_bytes


@dataclass(frozen=True)
class Plan:
    """The pools that fit.

    Attributes:
        model: The model.
        config: The configuration.
        dtype: Data type of keys and values.
        conv_dtype: Data type of convolution states.
        shapes: Shapes of the pools of each GPU.
        size: Token slots.
        max_reqs: Request rows, and working slots of states.
        full_requests: Requests of `context_len` tokens that fit at once.
        mean_requests: Requests of `mean_context` tokens that fit at once.
        footprint: Bytes of each pool.
        mla_token_bytes: Bytes of a token on one GPU, by form of latent attention; empty without.
        notes: Assumptions and advice.
    """

    model: Model
    config: PlanConfig
    dtype: str
    conv_dtype: str
    shapes: Shapes
    size: int
    max_reqs: int
    full_requests: int
    mean_requests: int
    footprint: Footprint
    mla_token_bytes: dict[str, int]
    notes: tuple[str, ...]

    @property
    def context_len(self) -> int:
        """The most tokens of a request."""
        return self.shapes.max_context_len

    @property
    def spare_bytes(self) -> int:
        """The unused part of the budget."""
        return self.config.budget_bytes - self.footprint.total_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values; bytes and heads are those of one GPU."""
        shapes = self.shapes
        return {
            "model_type": self.model.model_type,
            "config": asdict(self.config),
            "dtype": self.dtype,
            "context_len": self.context_len,
            "kv": [asdict(group) for group in shapes.kv],
            "token_bytes": shapes.token_bytes,
            "mla_token_bytes": self.mla_token_bytes,
            "states": None if shapes.states is None else asdict(shapes.states),
            "request_state_bytes": shapes.recurrent_bytes + shapes.conv_bytes,
            "size": self.size,
            "max_reqs": self.max_reqs,
            "full_requests": self.full_requests,
            "mean_requests": self.mean_requests,
            **asdict(self.footprint),
            "total_bytes": self.footprint.total_bytes,
            "spare_bytes": self.spare_bytes,
            "notes": list(self.notes),
            "code": self.code(),
        }

    def code(self) -> str:
        """Return Python code that creates the pools of one GPU."""
        shapes, device = self.shapes, f'"{self.config.device}"'
        pages = f"page_size={shapes.page_size}"
        first, *others = shapes.kv
        lines = [
            "import kvpool",
            "",
            *_layers_comment(first, self.model),
            "kv, allocator = kvpool.make_full_attention_net_mem_pool(",
            f"    size={self.size}, layer_num={len(first.layers)},",
            f"    {_heads(first)},",
            f'    device={device}, dtype="{self.dtype}", {pages},',
            ")",
        ]
        for number, group in enumerate(others, 2):
            lines += [
                *_layers_comment(group, self.model),
                f"kv_{number} = kvpool.KVPool(",
                f"    size={self.size}, layer_num={len(group.layers)},",
                f"    {_heads(group)},",
                f'    device={device}, dtype="{self.dtype}", {pages},',
                ")",
            ]
        lines += [
            "table = kvpool.make_req_to_token_pool(",
            f"    max_reqs={self.max_reqs}, max_context_len={self.context_len}, device={device},",
            ")",
        ]
        if shapes.states is not None:
            lines += self._states_code(shapes.states)
        tokens = max(shapes.step_tokens, self.max_reqs)
        lines += [
            "planner = kvpool.BatchPlanner(",
            f"    table, allocator, max_batch_size={self.max_reqs}, max_tokens={tokens},",
            ")",
        ]
        return "\n".join(lines)

    def _states_code(self, states: States) -> list[str]:
        dims = f"head_k_dim={states.head_k_dim}, head_v_dim={states.head_v_dim}"
        return [
            f"# {states.kind}: {_ranges(states.layers)}",
            "states = kvpool.GDNPool(",
            f"    max_reqs={self.max_reqs}, num_gdn_layers={len(states.layers)},",
            f"    num_v_heads={states.head_num}, {dims},",
            f"    conv_dim={states.conv_dim}, conv_kernel_size={states.conv_kernel_size},",
            f'    device="{self.config.device}", dtype="{self.conv_dtype}",',
            ")",
        ]


def make_plan(model: Model, config: PlanConfig) -> Plan:
    """Find the largest pools that fit.

    Raises:
        ConfigError: If no pools hold the model, heads cannot be divided among GPUs, no dtype or context is
            known, or no page fits.
    """
    reason = needs_arena(model)
    if reason is not None:
        raise ConfigError(
            f"{model.model_type} keeps {reason}: a CacheArena holds it, no KVPool and GDNPool do"
        )
    dtype, conv_dtype, notes = _dtypes(model, config)
    context_len = config.context_len or model.max_context_len
    if context_len is None:
        raise ConfigError(f"the configuration of {model.model_type} has no context length; give --context")
    mean_context = config.mean_context or context_len
    if mean_context > context_len:
        raise ConfigError(
            f"--mean-context, {mean_context:,} tokens, exceeds the context of {context_len:,} tokens"
        )
    tp = config.tp
    if model.query_head_num % tp:
        raise ConfigError(f"{model.query_head_num} query heads cannot be divided among {tp} GPUs")
    forms = _mla_forms(model, tp)
    kv = forms[config.mla] if forms else tuple(shard(group, tp) for group in model.attention)
    shapes = Shapes(
        kv=kv,
        dtype=dtype,
        states=None if model.states is None else shard_states(model.states, tp),
        conv_dtype=conv_dtype,
        page_size=config.page_size,
        max_context_len=context_len,
        step_tokens=config.step_tokens,
        host_tier=config.host_tier,
        device=config.device,
    )
    mean_pages = -(-mean_context // config.page_size)
    size, max_reqs = _solve(shapes, config, mean_pages)
    pages = size // config.page_size
    plan = Plan(
        model=model,
        config=config,
        dtype=dtype,
        conv_dtype=conv_dtype,
        shapes=shapes,
        size=size,
        max_reqs=max_reqs,
        full_requests=min(max_reqs, pages // shapes.context_pages),
        mean_requests=min(max_reqs, pages // mean_pages),
        footprint=footprint(shapes, size, max_reqs),
        mla_token_bytes={name: replace(shapes, kv=form).token_bytes for name, form in forms.items()},
        notes=notes,
    )
    return replace(plan, notes=(*model.notes, *notes, *_notes(plan)))


def needs_arena(model: Model) -> str | None:
    """Return what a model keeps that the pools have no place for."""
    if model.chains:
        return "compressed entries beside windows"
    if model.index_dim:
        return "an index key beside the latent vector"
    if model.states is not None and model.states.head_num == 0:
        return "states of convolutions alone"
    return None


def _dtypes(model: Model, config: PlanConfig) -> tuple[str, str, tuple[str, ...]]:
    """Return the data types of keys and values and of convolution states, and notes."""
    asked = config.storage_dtype
    dtype = asked or model.dtype
    if dtype is None:
        raise ConfigError(f"the configuration of {model.model_type} has no dtype; give --dtype")
    if dtype not in _STORAGE_DTYPES:
        where = "" if asked else " of the configuration (--dtype overrides it)"
        raise ConfigError(
            f"dtype {dtype!r}{where} must be one of {', '.join((*_STORAGE_DTYPES, *DTYPE_ALIASES))}"
        )
    if model.states is None:
        return dtype, dtype, ()
    if model.dtype in _STORAGE_DTYPES:
        return dtype, model.dtype, ()
    return (
        dtype,
        "bfloat16",
        ("the configuration has no dtype: convolution states are assumed to be bfloat16",),
    )


def _mla_forms(model: Model, tp: int) -> dict[str, tuple[KvLayers, ...]]:
    """Return the storage forms of latent attention, on one GPU."""
    if model.mla is None:
        return {}
    mla = model.mla
    heads, latent, rotated = mla.head_num // tp, mla.kv_lora_rank, mla.qk_rope_head_dim
    k_dim = mla.qk_nope_head_dim + rotated
    shapes = {
        "latent": (1, latent, 1, rotated),
        # A `KVPool` has V of at least one element, which is unused here.
        "fused": (1, latent + rotated, 1, 1),
        "expanded": (heads, k_dim, heads, mla.v_head_dim),
    }
    return {name: (KvLayers(mla.layers, *shape),) for name, shape in shapes.items()}


def _solve(shapes: Shapes, config: PlanConfig, mean_pages: int) -> tuple[int, int]:
    """Return token slots and requests: by default as many requests as fit with `mean_pages` pages each."""
    budget, page = config.budget_bytes, config.page_size
    most_pages = (MOST_INT32 - 2 * page) // page

    def fits(pages: int, requests: int) -> bool:
        try:
            return footprint(shapes, pages * page, requests).total_bytes <= budget
        except ConfigError:  # beyond int32
            return False

    requests = config.max_requests
    # Page tables of a whole batch are indexed in int32.
    most_requests = max(1, MOST_INT32 // shapes.context_pages - 1)
    if requests is None:
        most = min(most_requests, most_pages // mean_pages)
        requests = max(1, _largest(most, lambda count: fits(count * mean_pages, count)))
    elif requests > most_requests:
        raise ConfigError(
            f"{requests} requests of {shapes.context_pages} pages have more pages than fit int32; at most "
            f"{most_requests} do"
        )
    pages = _largest(most_pages, lambda count: fits(count, requests))
    if pages == 0:
        needed = footprint(shapes, page, requests).total_bytes
        raise ConfigError(
            f"{budget:,} bytes are not enough for one page with {requests} "
            f"request{'s' if requests > 1 else ''}, which takes {needed:,} bytes"
        )
    return pages * page, requests


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` that fits, or 0; `fits` is monotonic."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _notes(plan: Plan) -> list[str]:
    """Return assumptions and advice."""
    notes: list[str] = []
    model, config, shapes = plan.model, plan.config, plan.shapes
    if model.max_context_len is not None and plan.context_len > model.max_context_len:
        notes.append(
            f"requests of {plan.context_len:,} tokens are longer than the {model.max_context_len:,} of the "
            "configuration"
        )
    if plan.full_requests == 0:
        notes.append(
            f"no request of {plan.context_len:,} tokens fits; the longest has {plan.size:,}: reduce "
            "--context, or use more memory"
        )
    elif config.max_requests is None:
        notes.append(
            "as many request rows as requests with full context; shorter ones need more: --mean-context"
            if config.mean_context is None
            else f"as many request rows as requests of {config.mean_context:,} tokens; if they are longer, "
            "slots are short before rows"
        )
    if plan.size + 3 * config.page_size + 8 > MOST_INT32:
        notes.append("slots are int32: more memory would not give more slots")
    if model.mla is not None:
        notes.append(_mla_note(plan))
    elif config.tp > min(group.k_head_num for group in model.attention):
        notes.append(f"{config.tp} GPUs are more than KV heads: each stores one, and heads are replicated")
    if len(shapes.kv) > 1:
        notes.append(
            f"attention layers have {len(shapes.kv)} shapes of K and V: one KVPool for each, with one "
            "allocator, whose slots are rows of all"
        )
    if model.windowed:
        notes.append(_window_note(model))
    if shapes.states is not None:
        notes.append(_states_note(shapes.states, config.tp))
    return notes


def _mla_note(plan: Plan) -> str:
    assert plan.model.mla is not None  # noqa: S101 - for the type checker
    latent, rotated = plan.model.mla.kv_lora_rank, plan.model.mla.qk_rope_head_dim
    shared = ", the same on every GPU" if plan.config.tp > 1 else ""
    return {
        "latent": f"K holds the latent vector [1, {latent}] and V the rotated part of the key [1, {rotated}]"
        f"{shared}; for kernels that need both in one row: --mla fused; kvpool's own integration of "
        "transformers stores the expanded form: --mla expanded",
        "fused": f"K holds the latent vector and the rotated part of the key, [1, {latent + rotated}]"
        f"{shared}; V has the minimum of one element, which is unused",
        "expanded": "K and V of every head, the form of transformers' attention functions and of kvpool's "
        "integration; engines with kernels for latent attention store less: --mla latent",
    }[plan.config.mla]


def _window_note(model: Model) -> str:
    return (
        f"{len(set(model.windowed))} of {model.layer_num} layers attend to the last {model.window or 0:,} "
        "tokens only; the pools store all tokens for them, too"
    )


def _states_note(states: States, tp: int) -> str:
    shared = " (replicated groups counted)" if tp > 1 and states.group_num == 1 else ""
    if states.kind == "Gated DeltaNet":
        return f"recurrent states are float32 [value heads, V, K], the layout of GDNPool{shared}"
    if states.kind == "Mamba-2":
        return (
            f"kvpool has no pool of its own for Mamba-2; GDNPool has the same shapes{shared}: "
            "recurrent_state as [heads, head_dim, state], always float32, and conv_state "
            "[channels, taps - 1]; kvpool's integration of transformers supports Gated DeltaNet only"
        )
    return (
        "kvpool has no pool of its own for Mamba; GDNPool holds its states as heads of one channel: "
        "recurrent_state [channels, 1, state], always float32, where squeeze(-2) gives the layout of "
        "kernels, and conv_state [channels, taps - 1]; kvpool's integration of transformers supports Gated "
        "DeltaNet only"
    )


def _heads(group: KvLayers) -> str:
    return (
        f"k_head_num={group.k_head_num}, k_head_dim={group.k_head_dim}, "
        f"v_head_num={group.v_head_num}, v_head_dim={group.v_head_dim}"
    )


def _layers_comment(group: KvLayers, model: Model) -> list[str]:
    if len(group.layers) == model.layer_num:
        return []
    return [f"# attention: {_ranges(group.layers)}"]


def _ranges(layers: tuple[int, ...]) -> str:
    """Format layers as ranges; long lists are shortened."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > 8:  # noqa: PLR2004 - the most that fit a line
        texts = [*texts[:3], "...", texts[-1]]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(texts)}"
