"""kvpool.lmcache: LMCache's names and rounding, misuse, and a backend that puts, evicts, gets, overwrites."""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import cuda_only, some
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ConfigError, OutOfMemoryError, lmcache
from kvpool.lmcache import (
    BasePool,
    KVObj,
    LMCacheMemPoolMetadata,
    LocalCPUBufferPool,
    LocalCPUPool,
    LocalGPUPool,
    LocalPool,
)

if TYPE_CHECKING:
    from software import Driver


GB = 1024**3
# Layers, keys and values, tokens of a chunk, heads, elements of a head.
SHAPE = (2, 2, 8, 2, 4)
CHUNK_BYTES = math.prod(SHAPE) * 2
POOLS: list[type[LocalPool]] = [LocalPool, LocalCPUPool, LocalCPUBufferPool, LocalGPUPool]

every_pool = pytest.mark.parametrize(
    ("device", "cls"),
    [
        ("cpu", LocalPool),
        ("cpu", LocalCPUPool),
        ("cpu", LocalCPUBufferPool),
        pytest.param("cuda", LocalCPUPool, marks=pytest.mark.cuda),
        pytest.param("cuda", LocalGPUPool, marks=pytest.mark.cuda),
    ],
    indirect=["device"],
)
"""Every class, and tensors on the device of the test."""

pytestmark = pytest.mark.usefixtures("device")


def metadata(
    chunks: int = 4, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float16
) -> LMCacheMemPoolMetadata:
    """A pool of so many chunks."""
    size = (chunks - 1) * math.prod(shape) * dtype.itemsize / GB
    return LMCacheMemPoolMetadata(shape, dtype, size)  # type: ignore[arg-type]


def tokens(count: int = SHAPE[2], start: float = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A chunk of so many tokens, whose elements differ."""
    layers, pair, _, heads, head_dim = SHAPE
    flat = (torch.arange(math.prod(SHAPE) // SHAPE[2] * count) + start) % 1000
    return devices.to_current(flat.view(layers, pair, count, heads, head_dim).to(dtype))


def take(pool: BasePool, count: int) -> list[KVObj]:
    return [some(pool.allocate(tokens())) for _ in range(count)]


def indices(objects: list[KVObj]) -> list[int]:
    return [kv_obj.chunk_idx for kv_obj in objects]


# Names


@devices.cpu_only
def test_the_classes_are_there() -> None:
    assert sorted(lmcache.__all__) == [
        "BasePool",
        "KVObj",
        "LMCacheMemPoolMetadata",
        "LocalCPUBufferPool",
        "LocalCPUPool",
        "LocalGPUPool",
        "LocalPool",
    ]
    for name in lmcache.__all__:
        assert getattr(lmcache, name).__doc__
    assert issubclass(LocalPool, BasePool)
    for cls in (LocalCPUPool, LocalCPUBufferPool, LocalGPUPool):
        assert issubclass(cls, LocalPool)
    assert issubclass(LocalCPUBufferPool, LocalCPUPool)
    assert not issubclass(LocalGPUPool, LocalCPUPool)


@devices.cpu_only
def test_fields_are_those_of_lmcache() -> None:
    fields = {
        cls: [field.name for field in dataclasses.fields(cls)] for cls in (LMCacheMemPoolMetadata, KVObj)
    }
    assert fields == {
        LMCacheMemPoolMetadata: ["kv_shape", "kv_dtype", "max_local_cache_size"],
        KVObj: ["chunk_idx", "size", "data"],
    }
    for cls, names in fields.items():
        assert list(inspect.signature(cls).parameters) == names
    given_by_name = LMCacheMemPoolMetadata(kv_shape=SHAPE, kv_dtype=torch.float16, max_local_cache_size=0.5)
    assert given_by_name == LMCacheMemPoolMetadata(SHAPE, torch.float16, 0.5)
    kv_obj = KVObj(3, 4, None)
    assert (kv_obj.chunk_idx, kv_obj.size, kv_obj.data) == (3, 4, None)
    assert kv_obj == KVObj(chunk_idx=3, size=4, data=None)


@devices.cpu_only
def test_signatures_are_those_of_lmcache() -> None:
    for cls in (BasePool, *POOLS):
        for name, arguments in (
            ("init_max_chunk_num", ["self", "metadata"]),
            ("allocate", ["self", "kv_chunk"]),
            ("free", ["self", "kv_obj"]),
        ):
            assert list(inspect.signature(getattr(cls, name)).parameters) == arguments
    for cls in POOLS:
        assert list(inspect.signature(cls).parameters) == ["metadata"]


@devices.cpu_only
def test_the_base_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BasePool()  # type: ignore[abstract]
    assert BasePool.__abstractmethods__ == {"init_max_chunk_num", "allocate", "free"}


@every_pool
def test_arguments_by_their_names(cls: type[LocalPool]) -> None:
    meta = metadata(3)
    pool = cls(metadata=meta)
    assert pool.init_max_chunk_num(metadata=meta) == pool.max_chunk_num == 3
    assert pool.chunk_size == SHAPE[2]
    kv_obj = some(pool.allocate(kv_chunk=tokens()))
    assert pool.free(kv_obj=kv_obj) is None  # type: ignore[func-returns-value]


# How many chunks


@devices.cpu_only
@pytest.mark.parametrize("chunk_tokens", [1, 8, 13])
@given(size=st.floats(0, 2e-4) | st.integers(0, 50).map(lambda n: n * 1e-6) | st.just(0))
def test_the_number_of_chunks_is_rounded_as_in_lmcache(chunk_tokens: int, size: float) -> None:
    shape = (1, 2, chunk_tokens, 3, 37)
    meta = LMCacheMemPoolMetadata(shape, torch.int8, size)
    pool = LocalCPUPool(meta)
    expected = int(size * 1024**3) // math.prod(shape) + 1
    assert pool.max_chunk_num == pool.init_max_chunk_num(meta) == expected
    assert type(pool.max_chunk_num) is int


@every_pool
@pytest.mark.parametrize("chunks", [0, 1, 3, 3.999, 4])
def test_there_is_one_more_than_fit(cls: type[LocalPool], chunks: float) -> None:
    pool = cls(LMCacheMemPoolMetadata(SHAPE, torch.float16, chunks * CHUNK_BYTES / GB))
    number = int(chunks) + 1
    assert pool.max_chunk_num == number
    objects = take(pool, number)
    assert sorted(indices(objects)) == list(range(number))
    assert pool.allocate(tokens()) is None


@devices.cpu_only
@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        *[
            ({"max_local_cache_size": size}, ConfigError, rf"max_local_cache_size.*{size}")
            for size in (-1, -1e-9, float("nan"), float("inf"), -math.inf)
        ],
        *[
            (
                {"kv_shape": (8, 2, 1 << 16, 8, 128), "max_local_cache_size": size},
                (OutOfMemoryError, ConfigError),
                r"\d{10}",
            )
            for size in (2.0**40, 1e30)
        ],
        *[
            ({"kv_shape": shape}, ConfigError, r"\d|\(\)")
            for shape in ((2, 2, 8, 2), (2, 2, 8, 2, 4, 1), (), (2, 0, 8, 2, 4), (2, 2, -8, 2, 4))
        ],
        *[({"kv_dtype": dtype}, TypeError, None) for dtype in (torch.float64, torch.int64, "text", 3)],
        *[({"max_local_cache_size": size}, TypeError, None) for size in ("1", None, [1])],
        *[({"kv_shape": shape}, TypeError, None) for shape in (None, 5)],
    ],
    ids=str,
)
def test_rejects_bad_metadata(fields: dict[str, Any], error: Any, words: str | None) -> None:  # noqa: ANN401
    good = LMCacheMemPoolMetadata(SHAPE, torch.float16, 0.0001)
    with pytest.raises(error, match=words):
        LocalCPUPool(dataclasses.replace(good, **fields))


def test_a_shape_may_be_a_torch_size_or_a_list() -> None:
    for shape in (torch.Size(SHAPE), list(SHAPE)):
        pool = LocalCPUPool(LMCacheMemPoolMetadata(shape, torch.float16, 0))  # type: ignore[arg-type]
        assert some(pool.allocate(tokens())).data.shape == SHAPE


# allocate and free


@every_pool
def test_a_chunk_for_as_many_tokens_as_are_given(cls: type[LocalPool]) -> None:
    pool = cls(metadata(10))
    where = "cuda" if cls is LocalGPUPool else "cpu"
    seen = set()
    for count in range(SHAPE[2] + 1):
        kv_obj = some(pool.allocate(tokens(count)))
        assert type(kv_obj) is KVObj
        assert type(kv_obj.chunk_idx) is int
        assert 0 <= kv_obj.chunk_idx < pool.max_chunk_num
        assert kv_obj.size == CHUNK_BYTES
        assert type(kv_obj.data) is torch.Tensor
        assert kv_obj.data.shape == (2, 2, count, 2, 4)
        assert kv_obj.data.dtype is torch.float16
        assert kv_obj.data.device.type == where
        seen.add(kv_obj.chunk_idx)
    assert len(seen) == SHAPE[2] + 1


@every_pool
def test_allocate_copies_nothing(cls: type[LocalPool]) -> None:
    pool = cls(metadata(2))
    kv_chunk = tokens(start=1)
    before = kv_chunk.cpu().clone()
    kv_obj = some(pool.allocate(kv_chunk))
    assert not kv_obj.data.any()
    kv_obj.data.copy_(kv_chunk)
    assert torch.equal(kv_obj.data.cpu(), before)
    pool.free(kv_obj)
    assert torch.equal(kv_chunk.cpu(), before)


@every_pool
def test_the_values_of_a_chunk_do_not_matter(cls: type[LocalPool]) -> None:
    pool = cls(metadata(3))
    strided = tokens().permute(0, 1, 2, 4, 3).contiguous().permute(0, 1, 2, 4, 3)
    for kv_chunk in (strided, tokens(16)[:, :, ::2], torch.empty(SHAPE, dtype=torch.float16, device="meta")):
        assert some(pool.allocate(kv_chunk)).data.shape == SHAPE


@every_pool
def test_a_full_pool_answers_none(cls: type[LocalPool]) -> None:
    pool = cls(metadata(3))
    objects = take(pool, 3)
    for _ in range(3):
        assert pool.allocate(tokens(1)) is None
    pool.free(objects[1])
    again = some(pool.allocate(tokens(2)))
    assert again.chunk_idx == objects[1].chunk_idx
    assert pool.allocate(tokens(1)) is None
    assert pool.stats()["dropped_frees"] == 0


@every_pool
@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 8, 2, 4),
        (2, 1, 8, 2, 4),
        (2, 2, 9, 2, 4),
        (2, 2, 8, 3, 4),
        (2, 2, 8, 2, 5),
        (2, 2, 8, 4, 2),
        (2, 2, 8, 8),
        (1, 2, 2, 8, 2, 4),
        (128,),
        (),
    ],
)
def test_chunks_that_do_not_fit(cls: type[LocalPool], shape: tuple[int, ...]) -> None:
    pool = cls(metadata(2))
    with pytest.raises(ConfigError) as caught:
        pool.allocate(devices.to_current(torch.zeros(shape, dtype=torch.float16)))
    for extent in (*shape, *SHAPE):
        assert str(extent) in str(caught.value)
    assert pool.stats()["in_use"] == 0


@every_pool
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float64])
def test_chunks_of_another_dtype(cls: type[LocalPool], dtype: torch.dtype) -> None:
    pool = cls(metadata(2))
    with pytest.raises(TypeError, match=rf"(?=.*{str(dtype)[6:]})(?=.*float16)"):
        pool.allocate(tokens(dtype=dtype))
    assert pool.stats()["in_use"] == 0


@every_pool
def test_a_full_pool_checks_all_the_same(cls: type[LocalPool]) -> None:
    pool = cls(metadata(1))
    take(pool, 1)
    with pytest.raises(ConfigError):
        pool.allocate(tokens(9))
    with pytest.raises(TypeError):
        pool.allocate(tokens(dtype=torch.float32))


@devices.cpu_only
@pytest.mark.parametrize("bad", [None, 3, "text", [1.0]])
def test_rejects_chunks_that_are_not_tensors(bad: Any) -> None:  # noqa: ANN401
    pool = LocalCPUPool(metadata(2))
    with pytest.raises((TypeError, AttributeError)):
        pool.allocate(bad)
    with pytest.raises((TypeError, AttributeError)):
        pool.free(bad)
    assert pool.stats()["in_use"] == 0


@devices.cpu_only
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
)
def test_objects_hold_every_dtype(dtype: torch.dtype) -> None:
    pool = LocalCPUPool(metadata(2, dtype=dtype))
    kv_obj = some(pool.allocate(tokens(3).to(dtype)))
    assert kv_obj.size == math.prod(SHAPE) * dtype.itemsize
    kv_obj.data.copy_(tokens(3).to(dtype))
    assert torch.equal(kv_obj.data.float(), tokens(3).to(dtype).float())


@every_pool
def test_within_inference_mode(cls: type[LocalPool]) -> None:
    with torch.inference_mode():
        pool = cls(metadata(2))
        kv_chunk = tokens(5, start=2)
        kv_obj = some(pool.allocate(kv_chunk))
        kv_obj.data.copy_(kv_chunk)
        assert torch.equal(kv_obj.data.cpu(), kv_chunk.cpu())
        pool.free(kv_obj)
    assert pool.stats()["in_use"] == 0


# Bad frees


@every_pool
def test_a_chunk_freed_after_it_was_handed_out_again(cls: type[LocalPool]) -> None:
    pool = cls(metadata(1))
    stale = take(pool, 1)[0]
    pool.free(stale)
    live = take(pool, 1)[0]
    live.data.fill_(3)
    pool.free(stale)
    assert pool.stats()["dropped_frees"] == 1
    assert pool.allocate(tokens()) is None
    assert live.data.eq(3).all()


@every_pool
def test_a_chunk_of_another_pool(cls: type[LocalPool]) -> None:
    pool, other = cls(metadata(3)), LocalCPUPool(metadata(3))
    theirs = take(other, 2)[1]
    ours = take(pool, 2)
    pool.free(theirs)
    assert (pool.stats()["dropped_frees"], pool.stats()["in_use"]) == (1, 2)
    assert other.stats()["in_use"] == 2
    other.free(theirs)
    pool.free(ours[1])
    assert (pool.stats()["in_use"], other.stats()["in_use"]) == (1, 1)


@every_pool
def test_reports_a_chunk_that_was_not_allocated(cls: type[LocalPool]) -> None:
    for index in (-1, 0, 1, 2, 3, 99, 2**40):
        pool = cls(metadata(3))
        objects = take(pool, 2)
        pool.free(objects[0])
        pool.free(KVObj(index, CHUNK_BYTES, objects[1].data))
        # LMCache goes by the number, so the one chunk that is in use may be freed by it.
        answers = {(1, 1), (0, 0)} if index == objects[1].chunk_idx else {(1, 1)}
        stats = pool.stats()
        assert (stats["dropped_frees"], stats["in_use"]) in answers
        left = stats["capacity"] - stats["in_use"]
        assert len(set(indices(take(pool, left)))) == left
        assert pool.allocate(tokens()) is None


# Memory


@cuda_only
def test_chunks_are_page_locked_and_given_back(driver: Driver) -> None:
    before = driver.device_bytes(), driver.page_locked_bytes()
    for cls in POOLS:
        pool = cls(metadata(100))
        held = driver.page_locked_bytes() - before[1], driver.device_bytes() - before[0]
        on_device = cls is LocalGPUPool
        assert held[on_device] >= 100 * CHUNK_BYTES
        assert held[not on_device] == 0
        del pool
        assert (driver.device_bytes(), driver.page_locked_bytes()) == before


@cuda_only
def test_a_pool_is_one_region(driver: Driver) -> None:
    pool = LocalCPUPool(metadata(200))
    assert driver.calls("cuMemHostRegister_v2") == 1
    assert driver.calls("cuMemHostAlloc") == 0
    device = LocalGPUPool(metadata(200))
    assert driver.calls("cuMemAlloc_v2") == 1
    kv_chunk = tokens()
    driver.reset_calls()
    for each in (pool, device):
        for kv_obj in [some(each.allocate(kv_chunk)) for _ in range(200)]:
            each.free(kv_obj)
    assert driver.calls() == 0


# A local backend


class LocalBackend:
    """LMCache's backend in host memory, in short: a dict of chunks that evicts what was used longest ago."""

    def __init__(self, pool: BasePool, chunks: int) -> None:
        self.pool = pool
        self.most = chunks
        self.objects: OrderedDict[str, KVObj] = OrderedDict()

    def put(self, key: str, kv_chunk: torch.Tensor) -> None:
        # The new chunk is taken before an old one of that name is freed: this is what the extra chunk is for.
        old = self.objects.pop(key, None)
        while len(self.objects) + (old is not None) > self.most - 1:
            _, victim = self.objects.popitem(last=False)
            self.pool.free(victim)
        kv_obj = some(self.pool.allocate(kv_chunk))
        kv_obj.data.copy_(kv_chunk)
        if old is not None:
            self.pool.free(old)
        self.objects[key] = kv_obj

    def get(self, key: str) -> torch.Tensor | None:
        kv_obj = self.objects.get(key)
        if kv_obj is None:
            return None
        self.objects.move_to_end(key)
        found: torch.Tensor = kv_obj.data.clone()
        return found

    def remove(self, key: str) -> None:
        kv_obj = self.objects.pop(key, None)
        if kv_obj is not None:
            self.pool.free(kv_obj)


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left.cpu(), right.cpu())


@every_pool
@pytest.mark.parametrize("chunks", [2, 7])
def test_a_backend_agrees_with_a_dict(cls: type[LocalPool], chunks: int) -> None:
    choose = random.Random(chunks)  # noqa: S311
    pool = cls(metadata(chunks))
    backend = LocalBackend(pool, chunks)
    copies: dict[str, torch.Tensor] = {}
    keys = [f"key{number}" for number in range(2 * chunks)]
    operations = 4000 if devices.current() == "cpu" else 1000
    chunk = tokens(SHAPE[2])
    for number in range(operations):
        key, action = choose.choice(keys), choose.random()
        if action < 0.5:
            kv_chunk = chunk[:, :, : choose.randrange(SHAPE[2] + 1)]
            if number % 3 == 0:
                kv_chunk = kv_chunk + number % 100
            backend.put(key, kv_chunk)
            copies[key] = kv_chunk.cpu().clone()
        elif action < 0.9:
            assert same(backend.get(key), copies.get(key))
        else:
            backend.remove(key)
        # Evicted chunks are gone.
        copies = {key: copies[key] for key in backend.objects}
        assert pool.stats()["in_use"] == len(copies) <= chunks
    for key in keys:
        assert same(backend.get(key), copies.get(key))
        backend.remove(key)
    stats = pool.stats()
    assert (stats["in_use"], stats["dropped_frees"]) == (0, 0)
    assert stats["high_water"] == chunks


@devices.cpu_only
def test_numbers_of_numpy_are_numbers() -> None:
    shape = tuple(np.int64(extent) for extent in SHAPE)
    pool = LocalCPUPool(LMCacheMemPoolMetadata(shape, torch.float16, np.float64(0)))
    assert pool.max_chunk_num == 1
    assert some(pool.allocate(tokens())).size == CHUNK_BYTES
