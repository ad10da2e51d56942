"""`PoolAttention`: attention over a pool, against plain attention in float64, request by request."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from devices import to_current
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvpool import (
    BatchPlan,
    BatchPlanner,
    ConfigError,
    KVPool,
    ReqToTokenPool,
    StaleBufferError,
    TokenToKVPoolAllocator,
)
from kvpool.attention import PoolAttention

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_SIZES = [1, 4, 16]


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Every test runs on every device; without PyTorch kernels (software driver), with the formula."""
    with sdpa_kernel(SDPBackend.MATH) if request.config.getoption("--software") else nullcontext():
        yield device


@dataclass
class Options:
    """The options of a model's attention."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> torch.Tensor:
    """Attention of the last tokens over all tokens, head by head: `[tokens, heads, elements]`."""
    query, key, value = (x.double() for x in (query, key, value))
    ends = torch.arange(len(key) - len(query), len(key))[:, None]
    tokens = torch.arange(len(key))
    sees = (tokens <= ends) & (tokens > ends - (options.window or len(key)))
    scale = query.shape[2] ** -0.5 if options.scale is None else options.scale
    heads = []
    for head in range(query.shape[1]):
        kv_head = head * key.shape[1] // query.shape[1]
        scores = query[:, head] @ key[:, kv_head].T * scale
        if options.softcap is not None:
            scores = options.softcap * (scores / options.softcap).tanh()
        weights = scores.exp() * sees
        sink = 0 if options.sinks is None else options.sinks[head].double().exp()
        heads.append(weights / (weights.sum(1, keepdim=True) + sink) @ value[:, kv_head])
    return torch.stack(heads, 1)


@dataclass
class Scene:
    """A pool with requests, and the values written for each."""

    page_size: int = 1
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    dtype: torch.dtype = torch.float32
    size: int = 1024
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = devices.current()
        torch.manual_seed(self.page_size)
        self.allocator = TokenToKVPoolAllocator(self.size, where, self.page_size)
        self.table = ReqToTokenPool(32, 512, where)
        self.planner = BatchPlanner(self.table, self.allocator, 32, 1024)
        self.pool = KVPool(
            self.size,
            self.layers,
            self.kv_heads,
            self.k_dim,
            where,
            self.dtype,
            self.kv_heads,
            self.v_dim,
            page_size=self.page_size,
        )
        # Masked positions would show in the result.
        for buffer in [*self.pool.k_buffer, *self.pool.v_buffer]:
            rows = buffer[self.page_size :]
            rows.copy_(to_current(torch.full(rows.shape, float("nan"), dtype=self.dtype)))

    def rows(self, n: int) -> list[int]:
        rows = self.table.alloc(n)
        assert rows is not None
        return rows

    def extend(self, rows: list[int], lens: list[int]) -> BatchPlan:
        """Extend requests by tokens with random K and V."""
        before = [self.planner.seq_len(row) for row in rows]
        plan = self.planner.extend(rows, before, [b + n for b, n in zip(before, lens, strict=True)])
        assert plan is not None
        self.write(plan, rows, lens)
        return plan

    def write(self, plan: BatchPlan, rows: list[int], lens: list[int]) -> None:
        """K and V of a plan's new tokens, in the last layer; of the padding, zeros."""
        shape = (plan.padded_num_tokens, self.kv_heads)
        key, value = torch.zeros(*shape, self.k_dim), torch.zeros(*shape, self.v_dim)
        key[: plan.num_tokens].normal_()
        value[: plan.num_tokens].normal_()
        key, value = key.to(self.dtype), value.to(self.dtype)
        self.pool.set_kv_buffer(self.layers - 1, plan.out_cache_loc, to_current(key), to_current(value))
        for row, new_key, new_value in zip(
            rows,
            torch.split(key[: plan.num_tokens], lens),
            torch.split(value[: plan.num_tokens], lens),
            strict=True,
        ):
            self.keys[row] = torch.cat((self.keys.get(row, key[:0]), new_key))
            self.values[row] = torch.cat((self.values.get(row, value[:0]), new_value))

    def check(  # noqa: PLR0913
        self,
        plan: BatchPlan,
        rows: list[int],
        lens: list[int],
        *,
        options: Options = Options(),  # noqa: B008 - read only
        dtype: torch.dtype = torch.float32,
        attention: PoolAttention | None = None,
    ) -> None:
        """Attention of a plan's new tokens equals plain attention of each request."""
        query = torch.randn(plan.padded_num_tokens, self.heads, self.k_dim).to(dtype)
        attention = attention or PoolAttention(plan, self.pool)
        out = attention(
            to_current(query),
            self.layers - 1,
            scale=options.scale,
            sliding_window=options.window,
            softcap=options.softcap,
            sinks=None if options.sinks is None else to_current(options.sinks),
        )
        assert out.dtype is dtype
        assert out.device.type == devices.current()
        assert out.shape == (plan.padded_num_tokens, self.heads, self.v_dim)
        assert bool(out.isfinite().all())
        tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
        real = torch.split(out[: plan.num_tokens].cpu(), lens)
        for row, q, found in zip(rows, torch.split(query[: plan.num_tokens], lens), real, strict=True):
            wanted = one_by_one(q, self.keys[row], self.values[row], options)
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_prefill_chunks_and_decode(page_size: int, heads: int, kv_heads: int) -> None:
    scene = Scene(page_size, heads=heads, kv_heads=kv_heads)
    rows = scene.rows(5)
    for lens in ([1, 5, 16, 17, 40], [30, 1, 20, 33, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]):
        scene.check(scene.extend(rows, lens), rows, lens)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("v_dim", [8, 24])
def test_values_of_another_length(page_size: int, v_dim: int) -> None:
    scene = Scene(page_size, v_dim=v_dim)
    rows = scene.rows(4)
    for lens in ([3, 40, 18, 1], [20, 1, 2, 1], [1, 1, 1, 1]):
        scene.check(scene.extend(rows, lens), rows, lens)


SINKS = torch.tensor([-2.0, 0.5, 3.0, 6.0])


@pytest.mark.parametrize(
    "options",
    [
        Options(0.05, None),
        Options(1.0, 1),
        Options(2.5, 7),
        Options(0.5, 1000),
        Options(sinks=SINKS),
        Options(softcap=1.5),
        Options(2.5, 7, 3.0, SINKS),
        Options(window=1, softcap=0.5, sinks=SINKS),
    ],
    ids=str,
)
def test_every_option_gives_what_pytorch_gives(options: Options) -> None:
    scene = Scene(4)
    rows = scene.rows(4)
    for lens in ([3, 40, 18, 1], [20, 1, 2, 1], [1, 1, 1, 1]):
        plan = scene.extend(rows, lens)
        attention = PoolAttention(plan, scene.pool)
        scene.check(plan, rows, lens, options=options, attention=attention)
        scene.check(plan, rows, lens, attention=attention)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_histories(page_size: int) -> None:
    """Requests start, grow by any number of tokens in any order, and end; slots are reused."""
    chance = random.Random(page_size)  # noqa: S311 - no secrets
    scene = Scene(page_size)
    running: list[int] = []
    for _ in range(12):
        if len(running) < 8:
            running += scene.rows(chance.randint(1, 3))
        rows = chance.sample(running, chance.randint(1, len(running)))
        lens = [chance.choice([1, 1, 2, chance.randint(1, 40)]) for _ in rows]
        scene.check(scene.extend(rows, lens), rows, lens)
        gone = chance.sample(running, chance.randint(0, len(running) // 2))
        scene.planner.finish(gone)
        for row in gone:
            scene.keys.pop(row, None)
            scene.values.pop(row, None)
        running = [row for row in running if row not in gone]


@pytest.mark.parametrize("tokens_per_req", [1, 3])
def test_a_decode_step_padded_for_a_graph_is_right(tokens_per_req: int) -> None:
    scene = Scene(4)
    rows = scene.rows(3)
    scene.extend(rows, [5, 30, 12])
    lens = [tokens_per_req] * 3
    seq_lens = [scene.planner.seq_len(row) + tokens_per_req for row in rows]
    plan = scene.planner.decode(rows, seq_lens, tokens_per_req, pad_to=[2, 8])
    assert plan is not None
    assert plan.padded_batch_size == 8
    scene.write(plan, rows, lens)
    scene.check(plan, rows, lens)


def test_requests_that_share_a_prefix_read_the_same_slots() -> None:
    scene = Scene(4)
    first, second = scene.rows(2)
    scene.extend([first], [20])
    plan = scene.planner.extend([second], [16], [25], [scene.table.read(first, 16)])
    assert plan is not None
    scene.keys[second], scene.values[second] = scene.keys[first][:16], scene.values[first][:16]
    scene.write(plan, [second], [9])
    scene.check(plan, [second], [9])


def test_requests_without_new_tokens_are_left_out() -> None:
    scene = Scene()
    rows = scene.rows(3)
    scene.extend(rows, [4, 6, 30])
    for lens in ([0, 1, 0], [0, 0, 20], [1, 0, 20], [0, 0, 0]):
        plan = scene.extend(rows, lens)
        scene.check(plan, rows, lens)
        requests = [int(r) for group in PoolAttention(plan, scene.pool).groups for r in group.requests.cpu()]
        assert sorted(requests) == [i for i, n in enumerate(lens) if n]


def test_requests_with_as_many_new_tokens_are_one_group() -> None:
    """Requests with few new tokens are grouped by their number; a longer prompt chunk stays alone."""
    scene = Scene()
    rows = scene.rows(7)
    plan = scene.extend(rows, [1, 2, 1, 20, 20, 2, 1])
    groups = {
        tuple(group.requests.tolist()): (group.extend_len, group.tokens.tolist())
        for group in PoolAttention(plan, scene.pool).groups
    }
    assert groups == {
        (0, 2, 6): (1, [0, 3, 46]),
        (1, 5): (2, [1, 2, 44, 45]),
        (3,): (20, list(range(4, 24))),
        (4,): (20, list(range(24, 44))),
    }


def test_decode_of_many_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401
        calls.append(args)
        return sdpa(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    scene = Scene()
    rows = scene.rows(20)
    plan = scene.extend(rows, list(range(1, 21)))
    calls.clear()
    lens = [1] * 20
    plan = scene.extend(rows, lens)
    scene.check(plan, rows, lens)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_what_pytorch_gives(dtype: torch.dtype) -> None:
    scene = Scene(4, dtype=dtype)
    rows = scene.rows(4)
    for lens in ([3, 40, 18, 1], [20, 1, 2, 1], [1, 1, 1, 1]):
        scene.check(scene.extend(rows, lens), rows, lens, dtype=dtype)


def test_pool_of_another_dtype_than_the_query() -> None:
    scene = Scene(4, dtype=torch.float8_e4m3fn)
    rows = scene.rows(3)
    for lens in ([3, 40, 1], [1, 1, 1]):
        scene.check(scene.extend(rows, lens), rows, lens, dtype=torch.float32)


def test_attention_outlives_the_plan() -> None:
    scene = Scene(4)
    rows, lens = scene.rows(2), [5, 9]
    plan = scene.extend(rows, lens)
    attention = PoolAttention(plan, scene.pool)
    query = to_current(torch.randn(14, 4, 16))
    before = attention(query, 1)
    other = scene.rows(1)
    scene.extend(other, [30])
    assert torch.equal(attention(query, 1).cpu(), before.cpu())
    with pytest.raises(StaleBufferError):
        PoolAttention(plan, scene.pool)


def test_computes_no_gradients() -> None:
    scene = Scene(4)
    plan = scene.extend(scene.rows(2), [5, 1])
    query = to_current(torch.randn(6, 4, 16)).requires_grad_()
    assert not PoolAttention(plan, scene.pool)(query, 1).requires_grad


def test_query_with_any_strides() -> None:
    scene = Scene(4)
    rows = scene.rows(3)
    scene.extend(rows, [5, 30, 12])
    plan = scene.extend(rows, [1, 1, 1])
    query = to_current(torch.randn(4, 3, 16)).transpose(0, 1)
    attention = PoolAttention(plan, scene.pool)
    assert torch.equal(attention(query, 1).cpu(), attention(query.contiguous(), 1).cpu())


def test_rejects_bad_queries() -> None:
    scene = Scene()
    plan = scene.extend(scene.rows(2), [3, 2])
    attention = PoolAttention(plan, scene.pool)
    for shape in ((4, 4, 16), (6, 4, 16), (5, 3, 16), (5, 0, 16), (5, 4, 15), (5, 64), (1, 5, 4, 16)):
        with pytest.raises(ConfigError, match=r"\(5, n \* 2, 16\)"):
            attention(to_current(torch.zeros(shape)), 1)
    for layer in (2, -1):
        with pytest.raises(IndexError):
            attention(to_current(torch.zeros(5, 4, 16)), layer)


def test_rejects_mismatched_pools_and_plans() -> None:
    scene = Scene()
    where = devices.current()
    with pytest.raises(ConfigError, match="a key has 2 heads, a value 1"):
        PoolAttention(scene.extend(scene.rows(1), [3]), KVPool(8, 1, 2, 16, where, torch.float32, 1, 16))
    planner = BatchPlanner(scene.table, scene.allocator, 2, 8, block_table=False)
    plan = planner.extend(scene.rows(1), [0], [3])
    assert plan is not None
    with pytest.raises(ConfigError, match="block_table=False"):
        PoolAttention(plan, scene.pool)
