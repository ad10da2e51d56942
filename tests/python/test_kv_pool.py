"""KVPool: storage, conversions, strided sources, moves, views, misuse, and random histories."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import needs_statm, resident_bytes

import kvpool
from kvpool import ConfigError, KVPool, TokenToKVPoolAllocator, make_full_attention_net_mem_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, *FP8]
DTYPES = [*FLOATS, torch.int8, torch.uint8]
PAGE_SIZES = [1, 4, 16]
GIB = 1 << 30

pytestmark = pytest.mark.usefixtures("device")


def make(  # noqa: PLR0913 - what a test does not name is small
    size: int = 16,
    layer_num: int = 2,
    heads: int = 2,
    dim: int = 4,
    *,
    dtype: torch.dtype = torch.float32,
    v_heads: int | None = None,
    v_dim: int | None = None,
    page_size: int = 1,
) -> KVPool:
    return KVPool(size, layer_num, heads, dim, devices.current(), dtype, v_heads, v_dim, page_size=page_size)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return devices.to_current(torch.randn(*shape, generator=generator).to(dtype))
    return devices.to_current(torch.randint(0, 127, shape, generator=generator, dtype=dtype))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return devices.to_current(torch.ones(shape, dtype=dtype))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return devices.to_current(torch.zeros(shape, dtype=dtype))


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.cpu(), right.cpu())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, one row for each element, with every NaN made the same one."""
    raw = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    raw = raw.view(tensor.numel(), tensor.dtype.itemsize)
    if tensor.dtype.is_floating_point:
        raw[tensor.float().isnan().flatten()] = 255
    return raw


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bit for bit, but for the many kinds of NaN."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    found, wanted = found.cpu(), wanted.cpu()
    different = (bits(found) != bits(wanted)).any(dim=1)
    pairs = list(
        zip(found.flatten()[different][:5].tolist(), wanted.flatten()[different][:5].tolist(), strict=True)
    )
    assert not pairs, f"{int(different.sum())} of {found.numel()} differ: (found, wanted) = {pairs}"


def contents(pool: KVPool) -> list[torch.Tensor]:
    return [
        buffer.cpu().contiguous().view(torch.uint8).clone() for buffer in [*pool.k_buffer, *pool.v_buffer]
    ]


def unchanged(pool: KVPool, before: list[torch.Tensor]) -> bool:
    return all(equal(left, right) for left, right in zip(contents(pool), before, strict=True))


@pytest.fixture(params=[1, 4], ids=["one_thread", "four_threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = kvpool.get_num_threads()
    kvpool.set_num_threads(request.param)
    yield request.param
    kvpool.set_num_threads(before)


# Construction


def test_buffers_have_the_heads_of_k_and_of_v() -> None:
    pool = make(16, 3, 2, 4, v_heads=1, v_dim=6)
    for buffers, shape in ((pool.k_buffer, (2, 4)), (pool.v_buffer, (1, 6))):
        assert isinstance(buffers, list)
        assert [buffer.shape[1:] for buffer in buffers] == [shape] * 3


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize(
    ("size", "page_size", "heads", "dim"), [(70, 16, 2, 8), (64, 1, 1, 3), (100, 24, 3, 5)]
)
def test_fused_values_lie_whole_pages_behind_their_keys(
    size: int, page_size: int, heads: int, dim: int, pin_memory: bool
) -> None:
    fused, split = (
        KVPool(
            size,
            3,
            heads,
            dim,
            devices.current(),
            "float32",
            None,
            None,
            pin_memory,
            page_size=page_size,
            layout=layout,
        )
        for layout in ("fused", "split")
    )
    ends = []
    for k, v in zip(fused.k_buffer, fused.v_buffer, strict=True):
        page = page_size * heads * dim * 4
        assert (v.data_ptr() - k.data_ptr()) % page == 0
        assert v.data_ptr() >= k.data_ptr() + k.numel() * 4
        assert k.data_ptr() % 256 == v.data_ptr() % 256 == 0
        assert k.is_contiguous()
        assert v.is_contiguous()
        ends += [k.data_ptr(), k.data_ptr() + k.numel() * 4, v.data_ptr(), v.data_ptr() + v.numel() * 4]
    assert ends == sorted(ends)
    assert fused.stats()["rows"] == split.stats()["rows"]
    for pool in (fused, split):
        for layer in range(3):
            pool.set_kv_buffer(
                layer, [size, 1], values(2, heads, dim, seed=layer), values(2, heads, dim, seed=9)
            )
        pool.move_kv([2, 3], [size, 1])
    for layer in range(3):
        for buffers in ((fused.k_buffer, split.k_buffer), (fused.v_buffer, split.v_buffer)):
            assert equal(buffers[0][layer], buffers[1][layer])
        assert equal(fused.page_view(layer)[1], split.page_view(layer)[1])
    assert fused.get_contiguous_buf_infos()[0] == [t.data_ptr() for t in (*fused.k_buffer, *fused.v_buffer)]


def test_fused_buffers_have_rows_of_one_shape_and_layouts_have_names() -> None:
    with pytest.raises(ConfigError, match=r"\[2, 8\].*\[2, 4\]"):
        KVPool(8, 1, 2, 8, devices.current(), v_head_dim=4, layout="fused")
    with pytest.raises(ConfigError, match='layout "nhd"'):
        KVPool(8, 1, 2, 8, devices.current(), layout="nhd")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 7, 8, 15, 16, 60, 64, 70, 1000])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_rows_hold_every_slot_of_an_allocator_of_the_same_size(size: int, page_size: int) -> None:
    pool = make(size, 1, 1, 2, page_size=page_size)
    rows = pool.k_buffer[0].shape[0]
    assert rows == pool.v_buffer[0].shape[0] == pool.stats()["rows"]
    assert rows == -(-(size + page_size) // 8) * 8
    allocator = TokenToKVPoolAllocator(size, devices.current(), page_size)
    slots = allocator.alloc(allocator.available_size())
    assert slots is not None
    assert slots.numel() == size // page_size * page_size
    pool.set_kv_buffer(0, slots, ones(len(slots), 1, 2), ones(len(slots), 1, 2))
    assert int(pool.k_buffer[0].sum()) == 2 * len(slots)


def test_buffers_stay_where_they_are() -> None:
    pool = make()
    addresses = [buffer.data_ptr() for buffer in [*pool.k_buffer, *pool.v_buffer]]
    assert len(set(addresses)) == 4
    pool.move_kv([3], [2])
    assert [buffer.data_ptr() for buffer in [*pool.k_buffer, *pool.v_buffer]] == addresses
    for layer in range(2):
        assert pool.get_key_buffer(layer).data_ptr() == addresses[layer]
        assert pool.get_value_buffer(layer).data_ptr() == addresses[2 + layer]
        k, v = pool.get_kv_buffer(layer)
        assert (k.data_ptr(), v.data_ptr()) == (addresses[layer], addresses[2 + layer])
        assert k.shape == pool.k_buffer[layer].shape
    pool.k_buffer[1][3] = 5
    assert pool.get_key_buffer(1)[3].eq(5).all()


@pytest.mark.parametrize("layer", [2, -1, 2**40, 10**30, 1.0, "0", None])
def test_rejects_missing_layers(layer: Any) -> None:  # noqa: ANN401
    pool = make()
    one = zeros(1, 2, 4)
    calls: list[Callable[[], object]] = [
        lambda: pool.get_key_buffer(layer),
        lambda: pool.get_value_buffer(layer),
        lambda: pool.get_kv_buffer(layer),
        lambda: pool.page_view(layer),
        lambda: pool.set_kv_buffer(layer, [1], one, one),
        lambda: pool.gather_kv(layer, [1]),
    ]
    is_number = isinstance(layer, int)
    words = (str(layer) if layer < 2**63 else r"\d") if is_number else None
    for call in calls:
        with pytest.raises(IndexError if is_number else TypeError, match=words):
            call()


@devices.cpu_only
@needs_statm
def test_huge_pools_cost_what_is_touched() -> None:
    before = resident_bytes()
    pool = make(2**20 - 8, 50, 4, 128, dtype=torch.bfloat16)
    assert 100 * GIB <= pool.mem_bytes() <= 101 * GIB
    pool.set_kv_buffer(49, [1, 2**20 - 8], ones(2, 4, 128), ones(2, 4, 128))
    k, v = pool.gather_kv(49, [1, 2, 2**20 - 8])
    assert k.sum() == v.sum() == 2 * 4 * 128
    assert resident_bytes() - before < GIB


# set_kv_buffer


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_and_gather_in_every_dtype(dtype: torch.dtype, threads: int) -> None:
    assert kvpool.get_num_threads() == threads
    pool = make(40, 1, 3, 5, dtype=dtype, v_heads=2, v_dim=7)
    indices = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:20] + 1
    k, v = values(20, 3, 5, dtype=dtype), values(20, 2, 7, dtype=dtype, seed=1)
    pool.set_kv_buffer(0, indices, k, v)
    found_k, found_v = pool.gather_kv(0, indices)
    assert_same(found_k, k)
    assert_same(found_v, v)


def test_writing_no_tokens_changes_nothing() -> None:
    pool = make()
    before = contents(pool)
    for shape in ((0, 2, 4), (0, 8), (0, 3, 2, 4)):
        pool.set_kv_buffer(0, [], zeros(*shape), zeros(*shape))
        pool.set_kv_buffer(0, torch.empty(0, dtype=torch.int32), zeros(*shape), zeros(*shape))
    assert unchanged(pool, before)


def test_of_several_writes_to_a_slot_the_last_stays() -> None:
    pool = make()
    k = values(4, 2, 4)
    pool.set_kv_buffer(0, [3, 5, 3, 3], k, -k)
    assert equal(pool.k_buffer[0][3], k[3])
    assert equal(pool.v_buffer[0][3], -k[3])


def sources() -> dict[str, Callable[[int, int, int], torch.Tensor]]:
    """Tensors of `n` rows of `heads` times `dim` as a model produces them."""

    def fused(n: int, heads: int, dim: int) -> torch.Tensor:
        return values(n, 3 * heads * dim + 5)[:, heads * dim : 2 * heads * dim].view(n, heads, dim)

    def interleaved(n: int, heads: int, dim: int) -> torch.Tensor:
        return values(n, heads, 3, dim)[:, :, 1]

    def expanded(n: int, heads: int, dim: int) -> torch.Tensor:
        return values(1, heads, dim).expand(n, heads, dim)

    return {
        "contiguous": values,
        "flat": lambda n, heads, dim: values(n, heads * dim),
        "fused": fused,
        "fused_flat": lambda n, heads, dim: values(n, 3 * heads * dim)[:, -heads * dim :],
        "fused_batch": lambda n, heads, dim: fused(n, heads, dim).view(2, n // 2, heads, dim),
        "interleaved": interleaved,
        "every_other_row": lambda n, heads, dim: values(2 * n, heads, dim)[::2],
        "heads_first": lambda n, heads, dim: values(heads, n, dim).transpose(0, 1),
        "batch_heads_first": lambda n, heads, dim: values(2, heads, n // 2, dim).transpose(1, 2),
        "sequence_first": lambda n, heads, dim: values(n // 2, 2, heads, dim).transpose(0, 1),
        "batch_sequence": lambda n, heads, dim: values(2, n // 2, heads, dim),
        "batch_sequence_flat": lambda n, heads, dim: values(2, n // 2, heads * dim),
        "one_more_dimension": lambda n, heads, dim: values(n, 1, heads, dim),
        "expanded": expanded,
        "dim_first": lambda n, heads, dim: values(n, dim, heads).transpose(1, 2),
        "offset": lambda n, heads, dim: values(n * heads * dim + 3)[3:].view(n, heads, dim),
    }


def with_strides_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same in another dtype, its elements as far apart, unless some are one."""
    if 0 in tensor.stride():
        return tensor.to(dtype)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device).copy_(tensor)


# A head of no whole run of elements, one of one run, and rows that a GPU stores in two pieces.
@pytest.mark.parametrize(("heads", "dim"), [(3, 5), (3, 8), (5, 136)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("source", sorted(sources()))
def test_strided_tensors_are_written_in_every_dtype(
    source: str, dtype: torch.dtype, heads: int, dim: int
) -> None:
    pool = make(30, 1, heads, dim, dtype=dtype)
    k = sources()[source](12, heads, dim)
    v = k.flip(-1) if source == "contiguous" else with_strides_of(k, dtype)
    before = k.clone()
    indices = torch.arange(24, 0, -2)
    pool.set_kv_buffer(0, indices, k, v)
    assert_same(pool.k_buffer[0].cpu()[indices], k.reshape(12, heads, dim).to(dtype))
    assert_same(pool.v_buffer[0].cpu()[indices], v.reshape(12, heads, dim).to(dtype))
    assert equal(k, before)


def test_leading_dimensions_of_indices_and_values_are_free() -> None:
    pool = make()
    k, v = values(6, 2, 4), values(6, 2, 4, seed=1)
    pool.set_kv_buffer(0, torch.arange(1, 7).view(3, 2), k.view(2, 3, 8), v.view(1, 6, 2, 4))
    assert equal(pool.k_buffer[0][1:7], k)
    assert equal(pool.v_buffer[0][1:7], v)


def test_one_token_needs_no_leading_dimension() -> None:
    pool = make()
    k = values(2, 4)
    pool.set_kv_buffer(0, [3], k, k)
    pool.set_kv_buffer(0, torch.tensor(4), k.view(1, 2, 4), k.view(8))
    assert equal(pool.k_buffer[0][3:5], k.expand(2, 2, 4))
    assert equal(pool.v_buffer[0][3:5], k.expand(2, 2, 4))


@devices.cpu_only
def test_values_that_are_numpy_arrays() -> None:
    pool = make()
    k = np.arange(16, dtype=np.float32).reshape(2, 2, 4)
    pool.set_kv_buffer(0, [1, 2], k, k.astype(np.float16))
    assert np.array_equal(pool.k_buffer[0][1:3].numpy(), k)
    assert np.array_equal(pool.v_buffer[0][1:3].numpy(), k)


def test_values_that_record_gradients() -> None:
    pool = make()
    k = devices.to_current(torch.ones(1, 2, 4)).requires_grad_()
    v = devices.to_current(torch.full((1, 2, 4), 2.0)).requires_grad_()
    pool.set_kv_buffer(0, [1], k, v)
    assert pool.k_buffer[0][1].eq(1).all()
    assert pool.v_buffer[0][1].eq(2).all()
    assert not pool.k_buffer[0].requires_grad


def test_rows_of_one_buffer_written_to_another() -> None:
    pool = make()
    k = values(3, 2, 4)
    pool.set_kv_buffer(0, [1, 2, 3], k, k)
    pool.set_kv_buffer(1, [4, 5, 6], pool.k_buffer[0][1:4], pool.v_buffer[0][1:4])
    assert equal(pool.k_buffer[1][4:7], k)


@devices.cpu_only
def test_the_number_of_threads_can_be_set() -> None:
    before = kvpool.get_num_threads()
    try:
        kvpool.set_num_threads(3)
        assert kvpool.get_num_threads() == 3
        kvpool.set_num_threads(0)
        assert 1 <= kvpool.get_num_threads() <= (os.cpu_count() or 1)
    finally:
        kvpool.set_num_threads(before)


@devices.cpu_only
@pytest.mark.parametrize("number", [-1, -(10**30)])
def test_rejects_bad_numbers_of_threads(number: int) -> None:
    before = kvpool.get_num_threads()
    with pytest.raises(ConfigError):
        kvpool.set_num_threads(number)
    assert kvpool.get_num_threads() == before
    with pytest.raises(TypeError):
        kvpool.set_num_threads(1.5)  # type: ignore[arg-type]


def assert_refused_everywhere(pool: KVPool, first: Any, second: Any, index: int) -> None:  # noqa: ANN401
    """Indices `first`, of which `index` is bad, lead to no write, alone or with `second`, which are good."""
    before = contents(pool)
    k = ones(3, 2, 4)
    calls: list[Callable[[], object]] = [
        lambda: pool.set_kv_buffer(0, first, k, k),
        lambda: pool.gather_kv(0, first),
        lambda: pool.move_kv(first, second),
        lambda: pool.move_kv(second, first),
    ]
    for call in calls:
        with pytest.raises(IndexError, match=str(index) if index < 2**63 else r"\d"):
            call()
    assert unchanged(pool, before)


@pytest.mark.parametrize("index", [24, 25, 2**31 - 1])
def test_out_of_range_raises_before_anything_is_written(
    as_host_index: Callable[[Sequence[int]], Any], index: int
) -> None:
    pool = make()
    assert pool.k_buffer[0].shape[0] == 24
    assert_refused_everywhere(pool, as_host_index([1, index, 2]), as_host_index([2, 3, 4]), index)


@pytest.mark.parametrize(
    ("index", "forms"),
    [
        *[(index, (torch.tensor, np.array, list)) for index in (2**31, 2**32 + 1, 2**63 - 1)],
        *[(index, (list,)) for index in (2**63, 2**64 + 1, 10**30)],
    ],
)
def test_no_index_is_too_large_to_be_out_of_range(index: int, forms: Sequence[Any]) -> None:
    for form in forms:
        assert_refused_everywhere(make(), form([1, index, 2]), form([2, 3, 4]), index)


@pytest.mark.parametrize(
    ("k_shape", "v_shape"),
    [
        ((2, 2, 4), (3, 2, 4)),
        ((3, 2, 4), (2, 2, 4)),
        ((3, 2, 4), (3, 4, 2)),
        ((3, 2, 5), (3, 2, 4)),
        ((3, 7), (3, 8)),
        ((3, 8), (3, 2, 2, 2)),
        ((24,), (24,)),
        ((3,), (3,)),
        ((), ()),
        ((0, 2, 4), (0, 2, 4)),
        ((4, 2, 3), (4, 2, 3)),
    ],
)
def test_values_of_a_wrong_shape(k_shape: tuple[int, ...], v_shape: tuple[int, ...]) -> None:
    pool = make()
    before = contents(pool)
    with pytest.raises(ConfigError, match=r"\d"):
        pool.set_kv_buffer(0, [1, 2, 3], ones(*k_shape), ones(*v_shape))
    assert unchanged(pool, before)


@pytest.mark.parametrize("bad", [None, 1.0, "k", [[1.0] * 8], object()])
def test_rejects_values_that_are_not_tensors(bad: Any) -> None:  # noqa: ANN401
    pool = make()
    one = ones(1, 2, 4)
    for k, v in ((bad, one), (one, bad)):
        with pytest.raises(TypeError):
            pool.set_kv_buffer(0, [1], k, v)
    assert not pool.k_buffer[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "source", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float32]
)
def test_rejects_values_of_other_dtypes(dtype: torch.dtype, source: torch.dtype) -> None:
    if dtype == source or (dtype.is_floating_point and source.is_floating_point):
        return
    pool = make(dtype=dtype)
    with pytest.raises(TypeError, match=r"int|bool|float"):
        pool.set_kv_buffer(0, [1], ones(1, 2, 4, dtype=source), ones(1, 2, 4, dtype=source))
    assert not pool.k_buffer[0].view(torch.uint8).any()


def test_values_on_another_device() -> None:
    pool = make()
    with pytest.raises((ConfigError, TypeError)):
        pool.set_kv_buffer(0, [1], torch.ones(1, 2, 4, device="meta"), torch.ones(1, 2, 4, device="meta"))
    assert not pool.k_buffer[0].any()


# Conversion


EDGES = [
    *[0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")],
    # The largest float8_e4m3fn, float8_e5m2, float16 and bfloat16, and what lies half a step beyond.
    *[448.0, 449.0, 463.9, 464.0, 464.1, 479.9, 480.0, -480.0, 512.0],
    *[57344.0, 61439.0, 61440.0, 61441.0],
    *[65504.0, 65519.0, 65520.0, 65536.0],
    *[3.3e38, 3.4028234e38, 3.3895314e38, 3.3961776e38],
    # The smallest, and halves between two of them.
    *[2.0**-n for n in (6, 7, 9, 10, 11, 14, 16, 17, 18, 24, 25, 26, 126, 133, 134, 149)],
    *[1.5 * 2.0**-n for n in (10, 17, 25, 134)],
    0.75 * 2**-9,
    # Ties, to an even and to an odd number.
    *[1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-9, 1.0 + 2**-11, 1.0 + 3 * 2**-11],
    *[1.0625, 1.1875, 1.125, 1.375],
]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of a small float; for float32 the edges of the small ones and random bit patterns."""
    if dtype is torch.float32:
        generator = torch.Generator().manual_seed(11)
        patterns = torch.randint(-(2**31), 2**31, (40_000,), generator=generator, dtype=torch.int64)
        edges = torch.tensor([*EDGES, *(-edge for edge in EDGES)], dtype=torch.float64).float()
        around = edges.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
        return torch.cat(
            [patterns.to(torch.int32).view(torch.float32), around.flatten().view(torch.float32), halves]
        )
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The result of `tensor.to(dtype)`, also where PyTorch is old and float8_e4m3fn overflows to NaN."""
    if dtype is torch.float8_e4m3fn and tensor.dtype is not dtype:
        tensor = tensor.float().clamp(-448, 448)
    return tensor.to(dtype)


def rows_of(flat: torch.Tensor, width: int) -> torch.Tensor:
    """The values as rows of one head, repeated to fill the last row."""
    rows = -(-flat.numel() // width)
    repeated = torch.cat([flat.view(torch.uint8).view(flat.numel(), -1)] * (1 + rows * width // flat.numel()))
    return devices.to_current(repeated[: rows * width].reshape(-1).view(flat.dtype).view(rows, 1, width))


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [64, 13])
def test_conversion_is_what_torch_does(dtype: torch.dtype, source: torch.dtype, width: int) -> None:
    k = rows_of(every_value(source), width)
    tokens = k.shape[0]
    pool = make(tokens, 1, 1, width, dtype=dtype)
    pool.set_kv_buffer(0, torch.arange(1, tokens + 1), k, k)
    assert_same(pool.k_buffer[0][1 : tokens + 1], converted(k, dtype))
    assert_same(pool.v_buffer[0][1 : tokens + 1], converted(k, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_conversion_from_float64(dtype: torch.dtype) -> None:
    floats = every_value(torch.float32).double()
    k = rows_of(torch.cat([floats, floats * (1 + 2**-40), floats * 1e-20, floats * 1e200]), 64)
    tokens = k.shape[0]
    pool = make(tokens, 1, 1, 64, dtype=dtype)
    pool.set_kv_buffer(0, torch.arange(1, tokens + 1), k, k)
    assert_same(pool.k_buffer[0][1 : tokens + 1], converted(k, dtype))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("k_scale", "v_scale"), [(0.37, 3.7), (2.0, 0.25), (1.0, None), (None, 12.5), (1e-3, 1e3)]
)
def test_scales_divide_before_the_conversion(
    dtype: torch.dtype, source: torch.dtype, k_scale: float | None, v_scale: float | None
) -> None:
    k = rows_of(every_value(source), 64)
    tokens = k.shape[0]
    pool = make(tokens, 1, 1, 64, dtype=dtype)
    pool.set_kv_buffer(0, torch.arange(1, tokens + 1), k, k, k_scale=k_scale, v_scale=v_scale)
    for buffer, scale in ((pool.k_buffer[0], k_scale), (pool.v_buffer[0], v_scale)):
        # By a number PyTorch divides on a GPU as it multiplies with the reciprocal, which is rounded.
        divisor = torch.full_like(k, 1.0 if scale is None else scale, dtype=torch.float32)
        assert_same(buffer[1 : tokens + 1], converted(k.float() / divisor, dtype))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("apart", [64, 72, 65])
def test_heads_that_lie_apart_are_divided_before_the_conversion(
    dtype: torch.dtype, source: torch.dtype, apart: int
) -> None:
    """Of one projection, say: whole runs of each head, or single elements."""
    k = rows_of(every_value(source), 3 * 64).view(-1, 3, 64)
    tokens = len(k)
    wide = torch.zeros(tokens, 3, apart, dtype=source, device=k.device)
    wide[..., :64] = k
    pool = make(tokens, 1, 3, 64, dtype=dtype)
    pool.set_kv_buffer(0, torch.arange(1, tokens + 1), wide[..., :64], k, k_scale=0.37, v_scale=0.37)
    expected = converted(k.float() / torch.full_like(k, 0.37, dtype=torch.float32), dtype)
    for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
        assert_same(buffer[1 : tokens + 1], expected)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, *FP8])
@pytest.mark.parametrize("scale", [None, 0.37])
def test_a_nan_keeps_its_sign_and_nothing_else(
    dtype: torch.dtype, source: torch.dtype, scale: float | None
) -> None:
    if dtype == source:
        return
    values = every_value(source)
    nans = values[values.float().isnan()]
    signs = nans.view(torch.uint8).view(len(nans), -1)[:, -1] & 0x80
    k = rows_of(nans, 64)
    pool = make(len(k), 1, 1, 64, dtype=dtype)
    pool.set_kv_buffer(0, torch.arange(1, len(k) + 1), k, k, k_scale=scale, v_scale=scale)
    found = pool.k_buffer[0][1 : len(k) + 1].cpu().view(torch.uint8).flatten()[: len(nans)]
    assert set((signs | 0x7F).tolist()) == {0x7F, 0xFF}
    assert torch.equal(found, signs | 0x7F)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        *[(scale, ConfigError) for scale in (0.0, -1.0, float("nan"), float("inf"), -0.0)],
        *[(wrong, TypeError) for wrong in ("1.0", object(), [1.0])],
    ],
)
def test_rejects_bad_scales(scale: Any, error: type[Exception]) -> None:  # noqa: ANN401
    pool = make(dtype=torch.float8_e4m3fn)
    one = ones(1, 2, 4)
    for scales in ({"k_scale": scale}, {"v_scale": scale}):
        with pytest.raises(error):
            pool.set_kv_buffer(0, [1], one, one, **scales)
    assert not pool.k_buffer[0].view(torch.uint8).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_scales_are_for_fp8_only(dtype: torch.dtype) -> None:
    pool = make(dtype=dtype)
    one = ones(1, 2, 4).to(dtype)
    pool.set_kv_buffer(0, [1], one, one, k_scale=1.0, v_scale=1.0)
    assert_same(pool.k_buffer[0][1:2], one)
    with pytest.raises(ConfigError, match="2"):
        pool.set_kv_buffer(0, [2], one, one, k_scale=2.0)
    assert not pool.k_buffer[0][2].any()


def test_values_that_are_stored_as_they_are_are_not_scaled() -> None:
    pool = make(dtype=torch.float8_e4m3fn)
    one = ones(1, 2, 4).to(torch.float8_e4m3fn)
    pool.set_kv_buffer(0, [1], one, one, k_scale=2.0, v_scale=0.5)
    assert_same(pool.k_buffer[0][1:2], one)
    assert_same(pool.v_buffer[0][1:2], one)
    with pytest.raises(ConfigError):
        pool.set_kv_buffer(0, [2], one, one, k_scale=-2.0)


# gather_kv


def test_gather_reads_slots_of_a_layer() -> None:
    pool = make(v_heads=1, v_dim=3)
    for buffer in (pool.k_buffer[1], pool.v_buffer[1]):
        buffer.copy_(values(*buffer.shape))
    picked = [5, 0, 16, 5]
    k, v = pool.gather_kv(1, picked)
    assert k.shape == (4, 2, 4)
    assert v.shape == (4, 1, 3)
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert equal(k, pool.k_buffer[1].cpu()[picked])
    assert equal(v, pool.v_buffer[1].cpu()[picked])
    assert equal(pool.gather_kv(0, picked)[0], zeros(4, 2, 4))


def test_gather_gives_a_copy() -> None:
    pool = make()
    k, _ = pool.gather_kv(0, [1, 2])
    k.fill_(3)
    assert not pool.k_buffer[0].any()


def test_gathering_no_slots_gives_empty_tensors() -> None:
    k, v = make(v_heads=1, v_dim=3).gather_kv(0, [])
    assert k.shape == (0, 2, 4)
    assert v.shape == (0, 1, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_into_given_tensors(dtype: torch.dtype) -> None:
    pool = make(dtype=dtype, v_heads=1, v_dim=3)
    k, v = values(3, 2, 4, dtype=dtype), values(3, 1, 3, dtype=dtype)
    pool.set_kv_buffer(0, [2, 4, 6], k, v)
    out = zeros(3, 2, 4).to(dtype), zeros(3, 1, 3).to(dtype)
    found = pool.gather_kv(0, [2, 4, 6], out=out)
    assert [tensor.data_ptr() for tensor in found] == [tensor.data_ptr() for tensor in out]
    assert_same(out[0], k)
    assert_same(out[1], v)


@pytest.mark.parametrize(
    "shapes",
    [((2, 2, 4), (3, 2, 4)), ((3, 2, 4), (4, 2, 4)), ((3, 4, 2), (3, 2, 4)), ((3, 2, 4), (3, 2, 5))],
)
def test_gather_into_tensors_of_a_wrong_shape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    pool = make()
    pool.k_buffer[0].fill_(1)
    out = zeros(*shapes[0]), zeros(*shapes[1])
    with pytest.raises(ConfigError, match=r"\d"):
        pool.gather_kv(0, [1, 2, 3], out=out)
    assert not out[0].any()
    assert not out[1].any()


@pytest.mark.parametrize(
    "out",
    [
        (zeros(1, 2, 4, dtype=torch.float16), zeros(1, 2, 4)),
        (zeros(1, 2, 4),),
        (zeros(1, 2, 4), zeros(1, 2, 4), zeros(1, 2, 4)),
        (None, zeros(1, 2, 4)),
        "out",
        3,
    ],
    ids=["dtype", "one", "three", "none", "text", "number"],
)
def test_gather_into_wrong_things(out: Any) -> None:  # noqa: ANN401
    with pytest.raises((TypeError, ConfigError)):
        make().gather_kv(0, [1], out=out)


@devices.cpu_only
def test_gather_into_numpy_arrays() -> None:
    pool = make()
    pool.k_buffer[0].fill_(3)
    out = np.zeros((2, 2, 4), dtype=np.float32), np.ones((2, 2, 4), dtype=np.float32)
    pool.gather_kv(0, [1, 2], out=out)
    assert (out[0] == 3).all()
    assert (out[1] == 0).all()


@devices.cpu_only
def test_rejects_read_only_outputs() -> None:
    pool = make()
    pool.k_buffer[0].fill_(3)
    read_only = np.zeros((2, 2, 4), dtype=np.float32)
    read_only.setflags(write=False)
    good = zeros(2, 2, 4)
    for bad in (read_only, zeros(1, 2, 4).expand(2, 2, 4), zeros(2, 4, 4)[:, ::2]):
        with pytest.raises(ConfigError):
            pool.gather_kv(0, [1, 2], out=(bad, good))
        with pytest.raises(ConfigError):
            pool.gather_kv(0, [1, 2], out=(good, bad))
        assert not bad.any()
        assert not good.any()


@pytest.mark.parametrize("index", [-1, 24, -(2**40)])
def test_gather_out_of_range(index: int) -> None:
    out = devices.to_current(torch.full((2, 2, 4), 9.0)), devices.to_current(torch.full((2, 2, 4), 9.0))
    with pytest.raises(IndexError, match=str(index)):
        make().gather_kv(0, [1, index], out=out)
    assert out[0].eq(9).all()


# move_kv


MOVES = {
    "chain_up": ([2, 3, 4, 5], [1, 2, 3, 4]),
    "chain_down": ([1, 2, 3, 4], [2, 3, 4, 5]),
    "swap": ([1, 2], [2, 1]),
    "cycle": ([1, 2, 3, 4], [4, 1, 2, 3]),
    "two_cycles_and_a_tail": ([1, 2, 3, 4, 5, 6, 9], [2, 1, 4, 5, 3, 3, 6]),
    "fan_out": ([5, 6, 7], [1, 1, 1]),
    "in_place": ([3, 4], [3, 4]),
    "nothing": ([], []),
    "later_wins": ([5, 5, 5], [1, 2, 3]),
    "later_wins_in_a_cycle": ([1, 2, 1], [2, 1, 7]),
    "same_pair_twice": ([2, 2, 3], [1, 1, 2]),
    "padding": ([0, 1], [1, 0]),
}


def filled(dtype: torch.dtype = torch.float32, size: int = 16) -> KVPool:
    pool = make(size, 3, 2, 4, dtype=dtype, v_heads=1, v_dim=6)
    for i, buffer in enumerate([*pool.k_buffer, *pool.v_buffer]):
        buffer.copy_(values(*buffer.shape, dtype=dtype, seed=i))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("move", sorted(MOVES))
def test_move_copies_slots_of_every_layer(move: str, dtype: torch.dtype, threads: int) -> None:
    assert threads in {1, 4}
    dst, src = MOVES[move]
    pool = filled(dtype)
    expected = [buffer.cpu().clone() for buffer in [*pool.k_buffer, *pool.v_buffer]]
    for buffer in expected:
        before = buffer.clone()
        for to, origin in zip(dst, src, strict=True):
            buffer[to] = before[origin]
    assert pool.move_kv(dst, src) is None  # type: ignore[func-returns-value]
    for found, wanted in zip([*pool.k_buffer, *pool.v_buffer], expected, strict=True):
        assert_same(found, wanted)


def test_moves_may_overlap_in_every_form_of_indices_that_the_host_knows(
    as_host_index: Callable[[Sequence[int]], Any],
) -> None:
    pool = filled()
    before = pool.k_buffer[2].cpu().clone()
    pool.move_kv(as_host_index([7, 2, 9]), as_host_index([2, 7, 7]))
    assert equal(pool.k_buffer[2].cpu()[[7, 2, 9]], before[[2, 7, 7]])


@pytest.mark.parametrize(("dst", "src"), [([1, 2], [3]), ([1], [2, 3]), ([], [1]), ([1], [])])
def test_moves_of_different_lengths(dst: list[int], src: list[int]) -> None:
    pool = filled()
    before = contents(pool)
    with pytest.raises(ConfigError, match=r"\d"):
        pool.move_kv(dst, src)
    assert unchanged(pool, before)


@pytest.mark.parametrize("index", [-1, 24])
def test_a_move_out_of_range_changes_nothing(index: int) -> None:
    pool = filled()
    before = contents(pool)
    for dst, src in (([1, index], [2, 3]), ([2, 3], [1, index])):
        with pytest.raises(IndexError, match=str(index)):
            pool.move_kv(dst, src)
    assert unchanged(pool, before)


# Views and addresses


@pytest.mark.parametrize("size", [16, 60, 64, 70])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_views_are_the_rows_of_a_layer_by_pages(size: int, page_size: int) -> None:
    pool = make(size, 2, 3, 5, v_heads=1, v_dim=2, page_size=page_size)
    for layer in range(2):
        k, v = pool.page_view(layer)
        rows = pool.k_buffer[layer].shape[0]
        assert k.shape == (rows // page_size, page_size, 3, 5)
        assert v.shape == (rows // page_size, page_size, 1, 2)
        assert k.shape[0] > size // page_size
        assert k.data_ptr() == pool.k_buffer[layer].data_ptr()
        assert v.data_ptr() == pool.v_buffer[layer].data_ptr()
        pool.k_buffer[layer][page_size + page_size - 1] = 7
        assert k[1, page_size - 1].eq(7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_contiguous_buf_infos(dtype: torch.dtype) -> None:
    pool = make(60, 3, 2, 5, dtype=dtype, v_heads=1, v_dim=7)
    addresses, lengths, row_bytes = pool.get_contiguous_buf_infos()
    buffers = [*pool.k_buffer, *pool.v_buffer]
    assert addresses == [buffer.data_ptr() for buffer in buffers]
    assert lengths == [buffer.numel() * dtype.itemsize for buffer in buffers]
    assert row_bytes == [10 * dtype.itemsize] * 3 + [7 * dtype.itemsize] * 3
    assert all(type(number) is int for numbers in (addresses, lengths, row_bytes) for number in numbers)


def test_mem_bytes_and_stats() -> None:
    pool = make(60, 3, 2, 5, dtype=torch.bfloat16, page_size=4)
    _, lengths, _ = pool.get_contiguous_buf_infos()
    assert type(pool.mem_bytes()) is int
    assert sum(lengths) <= pool.mem_bytes() < sum(lengths) + 6 * 4096 + 4096
    assert pool._mem_bytes() == pool.mem_bytes()
    stats = pool.stats()
    assert type(stats) is dict
    assert (stats["capacity"], stats["layer_num"], stats["page_size"]) == (60, 3, 4)
    assert stats["rows"] == 64
    assert stats["bytes"] == pool.mem_bytes()


# The factory


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_factory_makes_two_pools_that_fit(page_size: int) -> None:
    pool, allocator = make_full_attention_net_mem_pool(
        60, 2, 3, 4, 1, 6, devices.current(), torch.bfloat16, page_size=page_size, need_sort=False
    )
    assert isinstance(pool, KVPool)
    assert isinstance(allocator, TokenToKVPoolAllocator)
    assert (pool.size, pool.page_size, pool.dtype) == (60, page_size, torch.bfloat16)
    assert (allocator.size, allocator.page_size, allocator.need_sort) == (60, page_size, False)
    assert (pool.k_head_num, pool.k_head_dim, pool.v_head_num, pool.v_head_dim) == (3, 4, 1, 6)
    slots = allocator.alloc(allocator.available_size())
    assert slots is not None
    pool.set_kv_buffer(1, slots, ones(len(slots), 12), ones(len(slots), 6))
    assert pool.k_buffer[1].cpu()[slots.cpu()].eq(1).all()


@devices.cpu_only
def test_the_factory_has_the_signature_of_its_model() -> None:
    parameters = inspect.signature(make_full_attention_net_mem_pool).parameters
    sizes = "size layer_num k_head_num k_head_dim v_head_num v_head_dim"
    assert " ".join(parameters) == f"{sizes} device dtype page_size need_sort pin_memory"
    defaults = [parameter.default for parameter in parameters.values()]
    assert defaults[6:] == ["cuda", "float16", 1, True, True]
    pool, allocator = make_full_attention_net_mem_pool(16, 1, 1, 2, 1, 2, "cpu")
    assert pool.dtype is torch.float16
    assert (pool.page_size, allocator.page_size, allocator.need_sort) == (1, 1, True)
