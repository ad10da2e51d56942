"""BufferPool: tensors of memory that is handed out again, and buffers that were given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from buffer_pools import address, are_apart, free, holds, in_use, make, mark

from kvpool import Buffer, BufferPool, ConfigError, IndexOwnershipError, StaleBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.typing import DTypeLike

pytestmark = pytest.mark.usefixtures("device")


# Tensors of memory that is handed out again


class Sub(torch.Tensor):
    """A subclass of tensors, as somebody may make it."""


def is_as_new(buffer: Buffer) -> bool:
    tensor = buffer.tensor
    return bool(
        type(tensor) is torch.Tensor
        and tensor.shape == (4, 3)
        and tensor.stride() == (3, 1)
        and tensor.dtype is torch.float32
        and tensor.storage_offset() == 0
        and not tensor.requires_grad
        and tensor.grad_fn is None
        and tensor.grad is None
        and not tensor.is_inference()
        and not vars(tensor)
    )


def become_sub(tensor: torch.Tensor) -> None:
    tensor.__class__ = Sub


def become_a_leaf_of_old(tensor: torch.Tensor) -> None:
    tensor.requires_grad_()
    (tensor * 2).sum().backward()  # type: ignore[no-untyped-call]
    tensor.requires_grad_(False)


SHAPE_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "unsqueezed": lambda tensor: tensor.unsqueeze_(0),
    "transposed": lambda tensor: tensor.t_(),
    "resized": lambda tensor: tensor.resize_(2),
    "set": lambda tensor: tensor.set_(torch.zeros(9).untyped_storage()),
    "other_data": lambda tensor: setattr(tensor, "data", torch.zeros(7)),
}
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    **SHAPE_CHANGES,
    "records_gradients": lambda tensor: tensor.requires_grad_(),
    "has_a_gradient": become_a_leaf_of_old,
    "class": become_sub,
}


@devices.cpu_only
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("how", sorted(CHANGES))
def test_changes_to_a_tensor_end_with_its_buffer(how: str, kept: bool) -> None:
    pool = make()
    buffer = pool.alloc((4, 3), torch.float32)
    where = address(buffer)
    assert is_as_new(buffer)
    tensor = buffer.tensor
    CHANGES[how](tensor)
    held = [tensor] if kept else []
    del tensor
    pool.reset()
    again = pool.alloc((4, 3), torch.float32)
    assert is_as_new(again)
    assert address(again) == where
    assert len(held) == kept


@devices.cpu_only
@pytest.mark.parametrize("how", sorted(SHAPE_CHANGES))
def test_a_buffer_has_the_shape_that_was_asked_for_whatever_is_done_to_its_tensors(how: str) -> None:
    buffer = make().alloc((4, 3), torch.float32)
    where = address(buffer)
    SHAPE_CHANGES[how](buffer.tensor)
    assert is_as_new(buffer)
    assert address(buffer) == where


def test_a_kept_tensor_is_not_the_next_owners() -> None:
    pool = make()
    kept = pool.alloc((4, 3), torch.float32).tensor
    pool.reset()
    again = pool.alloc((4, 3), torch.float32).tensor
    assert again is not kept
    assert again.data_ptr() == kept.data_ptr()


@devices.cpu_only
@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_ends_with_its_block(first: bool) -> None:
    pool, weights = make(), torch.ones(4, 3, requires_grad=True)
    for is_inference in (first, not first, first):
        with torch.inference_mode(is_inference), pool.step():
            buffer = pool.alloc((4, 3), torch.float32)
            buffer.tensor.fill_(2)
            if not is_inference:
                assert is_as_new(buffer)
                weights.grad = None
                torch.autograd.backward((weights * buffer.tensor).sum())
                assert weights.grad is not None
                assert weights.grad.eq(2).all()


@devices.cpu_only
def test_a_view_of_a_former_tensor_does_not_reach_the_next() -> None:
    pool, weights = make(), torch.ones(3, requires_grad=True)
    view = pool.alloc((4, 3), torch.float32).tensor[1]
    pool.reset()
    buffer = pool.alloc((4, 3), torch.float32)
    tensor = buffer.tensor
    # Autograd notes this in what the view is a view of.
    view.mul_(weights)
    assert is_as_new(buffer)
    assert not tensor.requires_grad


BAD_SHAPES: list[tuple[Any, type[Exception], str]] = [
    ((-1,), ConfigError, "-1"),
    ((4, -7), ConfigError, "-7"),
    ((0, -7), ConfigError, "-7"),
    ((-(10**30),), ConfigError, ""),
    ((1,) * 9, ConfigError, "9"),
    ((1 << 62, 8), ConfigError, str(1 << 62)),
    ((1 << 31, 1 << 31, 1 << 31), ConfigError, str(1 << 31)),
    ((10**30,), ConfigError, ""),
    ((1.0,), TypeError, ""),
    (("1",), TypeError, ""),
    ((None,), TypeError, ""),
    (((1,),), TypeError, ""),
    (None, TypeError, ""),
    (1.5, TypeError, ""),
]


@pytest.mark.parametrize(("shape", "error", "words"), BAD_SHAPES, ids=repr)
def test_rejects_bad_shapes(shape: Any, error: type[Exception], words: str) -> None:  # noqa: ANN401
    pool = make()
    pool.alloc((4,), torch.int32).release()
    before = pool.stats()
    for call in (
        lambda: pool.alloc(shape, torch.int32),
        lambda: pool.alloc_batch([((4,), torch.int32), (shape, torch.int32)]),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)
        assert error is TypeError or any(c.isdigit() for c in str(caught.value))
    assert pool.stats() == before


@pytest.mark.parametrize(
    "dtype", ["complex64", torch.complex64, torch.int16, "int", "text", 3, None, np.uint16]
)
def test_rejects_unknown_dtypes(dtype: DTypeLike) -> None:
    pool = make()
    before = pool.stats()
    with pytest.raises(TypeError):
        pool.alloc((4,), dtype)
    with pytest.raises(TypeError):
        pool.alloc_batch([((4,), torch.int32), ((4,), dtype)])
    assert pool.stats() == before


# Stale buffers


def end_step(pool: BufferPool, _buffer: Buffer) -> None:
    with pool.step():
        pass


def release_and_reset(pool: BufferPool, buffer: Buffer) -> None:
    buffer.release()
    pool.reset()


def release_and_clear(pool: BufferPool, buffer: Buffer) -> None:
    buffer.release()
    pool.clear()


ENDS: dict[str, Callable[[BufferPool, Buffer], object]] = {
    "released": lambda _pool, buffer: buffer.release(),
    "reset": lambda pool, _buffer: pool.reset(),
    "released and reset": release_and_reset,
    "step": end_step,
    "left": lambda _pool, buffer: buffer.__exit__(None, None, None),
    "released and cleared": release_and_clear,
}
USES: dict[str, Callable[[BufferPool, Buffer], object]] = {
    "tensor": lambda _pool, buffer: buffer.tensor,
    "release": lambda _pool, buffer: buffer.release(),
    "pool_release": lambda pool, buffer: pool.release(buffer),
}


@pytest.mark.parametrize("taken_again", [False, True])
@pytest.mark.parametrize("use", sorted(USES))
@pytest.mark.parametrize("end", sorted(ENDS))
def test_a_buffer_raises_after_its_end_and_harms_nobody(end: str, use: str, taken_again: bool) -> None:
    pool = make()
    stale = pool.alloc((6,), torch.float32)
    ENDS[end](pool, stale)
    taken = [pool.alloc((6,), torch.float32)] if taken_again else []
    for buffer in taken:
        mark(buffer, 5)
    before = pool.stats()
    for uses in (1, 2, 3):
        with pytest.raises(StaleBufferError, match=r"\d"):
            USES[use](pool, stale)
        assert pool.stats() == {**before, "stale_uses": uses}
    assert (stale.nbytes, stale.capacity) == (24, 32)
    assert all(holds(buffer, 5) for buffer in taken)
    assert are_apart([*taken, *(pool.alloc((6,), torch.float32) for _ in range(3))])


def test_a_buffer_stays_stale_however_often_its_memory_is_used() -> None:
    pool = make()
    stale = pool.alloc_bytes(8)
    where = address(stale)
    stale.release()
    for _ in range(70_000):
        pool.alloc_bytes(8).release()
    last = pool.alloc_bytes(8)
    assert address(last) == where
    with pytest.raises(StaleBufferError):
        stale.release()
    with pytest.raises(StaleBufferError):
        _ = stale.tensor
    assert in_use(pool) == (1, 8)


@pytest.mark.parametrize("bad", [None, 3, "buffer", object(), torch.zeros(3), [1]])
def test_release_rejects_non_buffers(bad: Any) -> None:  # noqa: ANN401
    pool = make()
    pool.alloc_bytes(8)
    before = pool.stats()
    with pytest.raises(TypeError):
        pool.release(bad)
    assert pool.stats() == before


def test_a_buffer_of_another_pool() -> None:
    pool, other = make(), make()
    mine, theirs = pool.alloc_bytes(64), other.alloc_bytes(64)
    before = pool.stats(), other.stats()
    with pytest.raises(IndexOwnershipError):
        pool.release(theirs)
    with pytest.raises(IndexOwnershipError):
        other.release(mine)
    assert (pool.stats(), other.stats()) == before
    assert are_apart([mine, theirs])
    # It goes where it came from.
    theirs.release()
    mine.release()
    assert (free(pool), free(other)) == ((1, 64), (1, 64))


def test_a_buffer_of_a_pool_that_is_gone() -> None:
    buffer, pool = make().alloc_bytes(64), make()
    with pytest.raises(IndexOwnershipError):
        pool.release(buffer)
    buffer.tensor.fill_(3)
    assert holds(buffer, 3)
    buffer.release()
    with pytest.raises(StaleBufferError):
        buffer.release()
    assert set(pool.stats().values()) == {0}
