"""ChunkPool: copies between chunks and tensors of every layout, dtype and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from chunk_pools import LAYOUTS, counts, fill, make, numbers, put, read, same, take
from common import STORAGE, some

import kvpool
from kvpool import ChunkCopy, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


between = pytest.mark.parametrize(
    ("device", "there"),
    [
        ("cpu", "cpu"),
        pytest.param("cpu", "cuda", marks=pytest.mark.cuda),
        pytest.param("cuda", "cpu", marks=pytest.mark.cuda),
        pytest.param("cuda", "cuda", marks=pytest.mark.cuda),
    ],
    indirect=["device"],
)
"""Chunks on the device of the test, and tensors `there`."""

pytestmark = pytest.mark.usefixtures("device")


READ_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **LAYOUTS,
    "expanded": lambda x: x[:3].expand(4, 3),
    "expanded_inside": lambda x: x[:4].view(4, 1).expand(4, 3),
    "sliding": lambda x: x.as_strided((5, 4), (2, 1)),
}


@between
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_copy_from_every_layout(there: str, dtype: torch.dtype) -> None:
    nines = torch.full((72,), 9.0).to(dtype)
    for layout, look in READ_LAYOUTS.items():
        pool = make(3, 72, dtype)
        chunks = take(pool, 3)
        for chunk in chunks:
            fill(chunk, 9)
        origin = put(numbers(72, dtype), there)
        source = look(origin)
        copy = chunks[1].copy_from(source)
        assert type(copy) is ChunkCopy
        assert copy.wait() is True
        assert copy.query() is True
        count = source.numel()
        assert same(chunks[1].tensor(count), look(numbers(72, dtype))), layout
        assert same(chunks[1].tensor()[count:], nines[count:]), layout
        assert same(chunks[0].tensor(), nines), layout
        assert same(chunks[2].tensor(), nines), layout
        assert same(origin, numbers(72, dtype)), layout


@between
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_copy_to_every_layout(there: str, dtype: torch.dtype) -> None:
    pool = make(3, 72, dtype)
    chunk = take(pool, 2)[1]
    chunk.tensor().copy_(numbers(72, dtype))
    nines = torch.full((72,), 9.0).to(dtype)
    for layout, look in LAYOUTS.items():
        origin = put(nines.clone(), there)
        target = look(origin)
        copy = chunk.copy_to(target)
        copy.wait()
        assert copy.query() is True
        expected = nines.clone()
        look(expected).copy_(numbers(72, dtype)[: target.numel()].view(target.shape))
        assert same(origin, expected), layout
        assert same(chunk.tensor(), numbers(72, dtype)), layout


@between
def test_copies_by_name_and_of_every_dtype(there: str) -> None:
    for dtype in STORAGE:
        chunk = some(make(2, (3, 5), dtype).allocate())
        source, target = put(numbers(15, dtype), there), put(torch.zeros(15, dtype=dtype), there)
        chunk.copy_from(tensor=source, stream=None).wait()
        chunk.copy_to(tensor=target, stream=None).wait()
        assert same(target, numbers(15, dtype))


@devices.cpu_only
def test_a_copy_in_host_memory_is_done_when_the_call_returns() -> None:
    chunk = some(make(2, 6).allocate())
    source, target = numbers(6), torch.zeros(6)
    copy = chunk.copy_from(source)
    source.fill_(50)
    assert copy.query() is True
    assert same(chunk.tensor(), numbers(6))
    copy = chunk.copy_to(target)
    fill(chunk, 60)
    assert copy.query() is True
    assert same(target, numbers(6))
    for _ in range(3):
        copy.wait()
        assert copy.query() is True


@between
def test_from_chunk_to_chunk(there: str) -> None:
    pool, other = make(2, (4, 6)), make(2, (4, 6), where=there)
    first, second = some(pool.allocate()), some(other.allocate())
    first.tensor().copy_(numbers(24).view(4, 6))
    second.copy_from(first.tensor()).wait()
    assert same(second.tensor(), numbers(24))
    fill(second, 5)
    second.copy_to(first.tensor((4, 6))[1:3]).wait()
    assert read(first) == [*numbers(6).tolist(), *[5.0] * 12, *numbers(24)[18:].tolist()]


@devices.cpu_only
def test_a_copy_of_a_chunk_to_itself_changes_nothing() -> None:
    chunk = some(make(1, (4, 4)).allocate())
    chunk.tensor().copy_(numbers(16).view(4, 4))
    chunk.copy_from(chunk.tensor()).wait()
    chunk.copy_to(chunk.tensor()).wait()
    assert same(chunk.tensor(), numbers(16))


@devices.cpu_only
def test_arrays_of_numpy_and_tensors_of_ours() -> None:
    chunk = some(make(2, (3, 4)).allocate())
    array = np.arange(24, dtype=np.float32).reshape(3, 8)[:, ::2]
    chunk.copy_from(array).wait()
    assert chunk.tensor().numpy().tolist() == array.tolist()
    target = np.zeros((4, 6), dtype=np.float32)
    chunk.copy_to(target[:, 3:]).wait()
    assert target[:, :3].sum() == 0
    assert target[:, 3:].reshape(-1).tolist() == array.reshape(-1).tolist()
    array.flags.writeable = False
    chunk.copy_from(array).wait()
    with pytest.raises(ConfigError, match="read-only"):
        chunk.copy_to(array)


@devices.cpu_only
def test_negative_strides_are_right_or_refused() -> None:
    chunk = some(make(2, 6).allocate())
    fill(chunk, 9)
    array = np.arange(12, dtype=np.float32)
    for view in (array[5::-1], array[10::-2], array.reshape(2, 6)[::-1, 2:4]):
        before = chunk.tensor().tolist()
        try:
            chunk.copy_from(view).wait()
        except (ConfigError, ValueError):
            assert chunk.tensor().tolist() == before
        else:
            assert chunk.tensor(view.size).tolist() == view.reshape(-1).tolist()


@devices.cpu_only
def test_views_that_pytorch_negates_and_tensors_with_gradients() -> None:
    chunk = some(make(2, 6).allocate())
    chunk.copy_from(torch._neg_view(numbers(6))).wait()
    assert same(chunk.tensor(), -numbers(6))
    chunk.copy_from(numbers(6).requires_grad_()).wait()
    assert same(chunk.tensor(), numbers(6))


@between
def test_more_elements_than_a_chunk_has(there: str) -> None:
    pool = make(2, (2, 6))
    chunk = some(pool.allocate())
    fill(chunk, 9)
    large = put(numbers(26).view(2, 13), there)
    for call in (chunk.copy_from, chunk.copy_to):
        for tensor, size in (
            (large[:1], 52),
            (large, 104),
            (large[:, ::2], 56),
            (large[:1].expand(5, 13), 260),
        ):
            with pytest.raises(ConfigError, match=rf"{size}.*48"):
                call(tensor)
    assert read(chunk) == [9] * 12
    assert same(large, numbers(26))


@between
def test_copies_of_another_dtype(there: str) -> None:
    chunk = some(make(2, 12).allocate())
    fill(chunk, 9)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool):
        tensor = put(torch.ones(4, dtype=dtype), there)
        for call in (chunk.copy_from, chunk.copy_to):
            with pytest.raises(TypeError, match=rf"(?s)(?=.*{str(dtype)[6:]})(?=.*float32)"):
                call(tensor)
        assert tensor.cpu().eq(1).all()
    assert read(chunk) == [9] * 12


@pytest.mark.parametrize("bad", [None, 3, "text", [1.0, 2.0], object()])
def test_copies_reject_non_tensors(bad: Any) -> None:  # noqa: ANN401
    chunk = some(make().allocate())
    for call in (chunk.copy_from, chunk.copy_to):
        with pytest.raises(TypeError, match=type(bad).__name__):
            call(bad)
    assert read(chunk) == [0] * 12


@between
def test_elements_on_top_of_each_other_are_not_written_to(there: str) -> None:
    chunk = some(make(2, 12).allocate())
    origin = put(numbers(4), there)
    strided = [origin.as_strided((3, 2), (1, 1)), origin.as_strided((2, 2), (1, 1))]
    for tensor in (origin[:3].expand(4, 3), origin.view(4, 1).expand(4, 3), *strided):
        with pytest.raises(ConfigError, match="overlap"):
            chunk.copy_to(tensor)
    assert same(origin, numbers(4))
    target = origin[:1].expand(1)
    chunk.copy_to(target).wait()
    assert origin.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", ["text", 1.5, object(), -1, [1]])
def test_rejects_bad_streams(bad: Any) -> None:  # noqa: ANN401
    pool = make()
    chunk = some(pool.allocate())
    value = put(numbers(12, start=1), devices.current())
    for call in (chunk.copy_from, chunk.copy_to):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            call(value, bad)
    assert read(chunk) == [0] * 12
    assert same(value, numbers(12, start=1))
    pool.free(chunk)
    assert counts(pool) == (3, 0, 1, 0)


def test_slots_freed_after_a_copy_return_when_it_is_done() -> None:
    chunk = some(make().allocate())
    value = put(numbers(12), devices.current())
    allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
    slots = some(allocator.alloc(4))
    copy = chunk.copy_from(value)
    allocator.free(slots, after=copy)
    copy.wait()
    assert allocator.available_size() == 16


@devices.cpu_only
def test_large_copies_are_shared_among_threads() -> None:
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(0, 256, (3, 1000, 1777), generator=generator, dtype=torch.uint8)
    for view in (source, source.permute(0, 2, 1), source[:, 1:, 3:1700], source[:, ::3]):
        chunk = some(make(1, view.numel(), torch.uint8).allocate())
        chunk.copy_from(view).wait()
        assert torch.equal(chunk.tensor(tuple(view.shape)), view)
        origin = torch.zeros_like(source)
        target = origin.as_strided(view.shape, view.stride(), view.storage_offset())
        chunk.copy_to(target).wait()
        assert torch.equal(target, view)
        assert int(origin.count_nonzero()) == int(view.count_nonzero())
