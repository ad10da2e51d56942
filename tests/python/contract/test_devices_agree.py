"""A pool on a GPU does what one in host memory does.

Of those in host memory Rust compares random histories with naive models: `tests/rust/histories`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Protocol

import devices
import pytest
import torch
from common import cuda_only
from pool_table import CASES

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("device")

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
STEPS = 120


class SteppedPool:
    """One of two pools to which the same is done, with what it needs to know between the steps."""

    def __init__(self, name: str, device: str, seed: int, **options: Any) -> None:  # noqa: ANN401
        self.device = device
        self.choose = random.Random(seed)  # noqa: S311
        self.pool: Any = None
        self.held: list[Any] = []
        with devices.on(device):
            self.pool = CASES[name].make(**options)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        with devices.on(self.device):
            return devices.to_current(tensor)

    def numbers(self, count: int, low: int, high: int) -> list[int]:
        return [self.choose.randint(low, high) for _ in range(count)]

    def indices(self, values: list[int]) -> Any:  # noqa: ANN401
        """Indices of the host, or such as a GPU knows."""
        how = self.choose.randrange(3)
        if how == 0:
            return values
        tensor = torch.tensor(values, dtype=self.choose.choice((torch.int32, torch.int64)))
        return tensor if how == 1 else self.on_device(tensor)

    def moves(self, count: int, places: int) -> tuple[Any, Any]:
        """Places to move from and to: any that the host knows; apart, where only a GPU may know them."""
        if self.choose.random() < 0.5:
            return self.numbers(count, 0, places - 1), self.numbers(count, 0, places)
        apart = self.choose.sample(range(places), min(2 * count, places // 2 * 2))
        half = len(apart) // 2
        return self.indices(apart[:half]), self.indices(apart[half:])

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values of a random layout."""
        generator = torch.Generator().manual_seed(self.choose.randrange(1 << 30))
        spread = self.choose.choice((1, 2))
        wide = torch.randn(*shape[:-1], shape[-1] * spread, generator=generator).to(dtype)
        return self.on_device(wide)[..., ::spread]


def step_kv(twin: SteppedPool) -> object:
    pool, choose = twin.pool, twin.choose
    rows, count, layer = pool.stats()["rows"], choose.randrange(9), choose.randrange(2)
    what = choose.randrange(5)
    if what < 3:
        dtype = choose.choice(FLOATS)
        k, v = (twin.values(count, 2, 4, dtype=dtype) for _ in range(2))
        # Which of two rows for one slot comes last is not said for slots that only a GPU has.
        slots = choose.sample(range(-1, rows), count)
        pool.set_kv_buffer(layer, twin.indices(slots), k, v)
        if choose.random() < 0.2:
            pool.set_kv_buffer(layer, [*slots, rows], k, v)
    elif what == 3:
        slots = twin.numbers(count, 0, rows - 1)
        return [rows.float().tolist() for rows in pool.gather_kv(layer, twin.indices(slots))]
    else:
        src, dst = twin.moves(count, rows)
        pool.move_kv(dst, src)
    return None


def step_table(twin: SteppedPool) -> object:  # noqa: PLR0911 - one for each thing to do
    pool, choose = twin.pool, twin.choose
    rows, columns = pool.req_to_token.shape
    what = choose.randrange(8)
    if what < 2:
        return pool.alloc(choose.randrange(3))
    if what == 2:
        return pool.free(twin.numbers(choose.randrange(3), -1, rows))
    start = choose.randrange(columns)
    stop = choose.randrange(start, columns + 1)
    if what < 5:
        values = twin.indices(twin.numbers(stop - start, -(2**31), 2**31 - 1))
        return pool.write((choose.randrange(rows), slice(start, stop)), values)
    if what == 5:
        cells = choose.sample([(i, j) for i in range(rows) for j in range(columns)], 5)
        at = [twin.indices([cell[axis] for cell in cells]) for axis in range(2)]
        return pool.write((at[0], at[1]), twin.indices(twin.numbers(5, 0, 99)))
    if what == 6:
        row = choose.randrange(rows)
        pool.req_to_token[row, start] = 77
        return pool.mark_modified([row])
    if choose.random() < 0.3:
        return pool.clear()
    return pool.read(choose.randrange(rows + 1), stop).tolist()


def step_gdn(twin: SteppedPool) -> object:
    pool, choose = twin.pool, twin.choose
    slots = pool.pool_size
    what = choose.randrange(6)
    if what == 0:
        slot = choose.randrange(slots)
        for state in (pool.recurrent_state, pool.conv_state):
            state[:, slot] = twin.values(*state[:, slot].shape).to(state.dtype)
    elif what == 1:
        pool.reset_states(twin.indices(twin.numbers(choose.randrange(4), 0, slots - 1)))
    elif what == 2:
        pool.reset_states(twin.numbers(2, -1, slots))
    elif what == 3:
        pool.copy_states(*twin.moves(3, slots))
    elif what == 4:
        return pool.alloc_track_slot()
    else:
        return pool.free_track_slot(choose.randint(-1, slots))
    return None


def step_pages(twin: SteppedPool) -> object:
    pool, choose = twin.pool, twin.choose
    what = choose.randrange(4)
    if what == 0:
        return pool.alloc() if pool.total_pages < 20 else None
    if what == 1:
        return pool.free(choose.randint(-1, pool.total_pages))
    page = pool.page(choose.randint(-1, pool.total_pages))
    if what == 2:
        page[choose.randrange(4)] = choose.randrange(100)
    return page.tolist()


def step_chunks(twin: SteppedPool) -> object:
    pool, choose = twin.pool, twin.choose
    what = choose.randrange(8)
    if what < 2:
        taken = pool.allocate_batch(choose.randrange(3)) or []
        twin.held += taken
        return [chunk.index for chunk in taken]
    if not twin.held:
        return None
    chunk = choose.choice(twin.held)
    if what == 2:
        pool.free(chunk)
    elif what == 3:
        chunk.release()
    elif what == 4:
        chunk.retain()
    elif what == 5:
        chunk.tensor(choose.randrange(14)).fill_(choose.randrange(100))
    elif what == 6:
        source = twin.values(choose.randrange(14))
        chunk.copy_from(source if choose.random() < 0.5 else source.cpu()).wait()
    else:
        target = twin.values(choose.randrange(14))
        chunk.copy_to(target).wait()
        return target.tolist()
    return chunk.index


def step_buffers(twin: SteppedPool) -> object:
    pool, choose = twin.pool, twin.choose
    what = choose.randrange(8)
    taken = []
    if what < 2:
        taken = [
            pool.alloc(
                choose.choice([(8,), (2, 4), (5,), (3, 0), (-1,)]), choose.choice(["int32", "bfloat16"])
            )
        ]
    elif what == 2:
        taken = [pool.alloc_bytes(choose.choice([0, 9, 16, 17, 29, 100]))]
    elif what == 3:
        taken = pool.alloc_batch([((choose.randrange(9),), "int32") for _ in range(choose.randrange(4))])
    elif what == 4:
        (pool.reset if choose.random() < 0.7 else pool.clear)()
    elif twin.held:
        buffer = choose.choice(twin.held)
        # A stale one is told, and counted.
        return [buffer.release, lambda: buffer.tensor, lambda: pool.release(buffer)][what - 5]() is None
    for buffer in taken:
        twin.held.append(buffer)
        buffer.tensor.fill_(len(twin.held) % 100)
    return [(buffer.nbytes, buffer.capacity, tuple(buffer.tensor.shape)) for buffer in taken]


def live_chunks(pool: Any, held: list[Any]) -> list[torch.Tensor]:  # noqa: ANN401
    assert pool.num_chunks
    return [chunk.tensor() for chunk in held if chunk.references]


def live_buffers(pool: Any, held: list[Any]) -> list[torch.Tensor]:  # noqa: ANN401
    found = []
    for buffer in held:
        try:
            found.append(buffer.tensor)
        except kvpool.StaleBufferError:
            continue
    assert len(found) == pool.in_use_count
    return found


class TensorsOf(Protocol):
    """The tensors of a pool, and of what was taken from it."""

    def __call__(self, pool: Any, held: list[Any], /) -> list[torch.Tensor]: ...  # noqa: ANN401


HISTORIES: dict[str, tuple[Callable[[SteppedPool], object], TensorsOf, list[dict[str, Any]]]] = {
    "KVPool": (
        step_kv,
        lambda pool, _held: [*pool.k_buffer, *pool.v_buffer],
        [{"dtype": dtype, "page_size": page_size} for dtype in FLOATS for page_size in (1, 4)],
    ),
    "ReqToTokenPool": (
        step_table,
        lambda pool, _held: [pool.req_to_token],
        [{"padding_row": row, "max_context_len": n} for row in (True, False) for n in (2, 9, 70)],
    ),
    "GDNPool": (
        step_gdn,
        lambda pool, _held: [pool.recurrent_state, pool.conv_state],
        [{"dtype": dtype, "max_track_slots": n} for dtype in (torch.float32, torch.bfloat16) for n in (0, 3)],
    ),
    "PagePool": (
        step_pages,
        lambda pool, _held: [pool.page(i) for i in range(pool.total_pages)],
        [{"grow": grow, "dtype": dtype} for grow in (0, 2) for dtype in (torch.float32, torch.int8)],
    ),
    "ChunkPool": (step_chunks, live_chunks, [{"num_chunks": n} for n in (1, 3, 5)]),
    "BufferPool": (step_buffers, live_buffers, [{"rounding": rounding} for rounding in ("pow2", "fine")]),
}


def answer(step: Callable[[SteppedPool], object], twin: SteppedPool) -> object:
    try:
        return step(twin)
    except (TypeError, IndexError, kvpool.KvPoolError) as error:
        return type(error)


def picture(twin: SteppedPool, look: TensorsOf) -> object:
    stats = twin.pool.stats()
    memory = {"bytes", "page_locked"}
    numbers = {key: value for key, value in stats.items() if key not in memory}
    return numbers, [
        tensor.cpu().contiguous().view(torch.uint8).tolist() for tensor in look(twin.pool, twin.held)
    ]


@cuda_only
@pytest.mark.parametrize("name", sorted(HISTORIES))
def test_random_histories_agree(name: str) -> None:
    step, look, shapes = HISTORIES[name]
    for seed, options in enumerate(shapes):
        strict = {"strict": seed % 2 == 1} if CASES[name].take else {}
        twins = [SteppedPool(name, device, seed, **options, **strict) for device in ("cpu", "cuda")]
        # On a GPU, a later call reports skipped indices; so indices that only a GPU has are right here.
        for number in range(STEPS):
            host, device = (answer(step, twin) for twin in twins)
            assert host == device, (options, number)
            assert picture(twins[0], look) == picture(twins[1], look), (options, number)
