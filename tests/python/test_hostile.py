"""Callers that use a pool from inside of its own calls, and arguments that are not what they seem."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from common import some

import kvpool
from kvpool import ConfigError, IndexOwnershipError, OutOfMemoryError

if TYPE_CHECKING:
    from pathlib import Path

    from shared_fixtures import RunSnippet


def small_pool(**kwargs: Any) -> kvpool.KVPool:  # noqa: ANN401
    return kvpool.KVPool(16, 1, 2, 4, "cpu", "float32", **kwargs)


# Python code that runs inside of a call


@pytest.mark.timeout(60)
def test_a_destructor_may_use_the_pool_while_its_exception_is_made(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import faulthandler, gc
        import kvpool

        faulthandler.dump_traceback_later(50, exit=True)
        allocator = kvpool.TokenToKVPoolAllocator(64, "cpu", strict=True)
        table = kvpool.ReqToTokenPool(4, 8, "cpu", strict=True)

        class Cycle:
            def __init__(self):
                self.me = self
            def __del__(self):
                allocator.available_size()
                table.available_size()

        gc.set_threshold(1)
        for _ in range(300):
            Cycle()
            for call in (
                lambda: allocator.free([5]),
                lambda: allocator.free([5], after=type("F", (), {"query": lambda self: True})()),
                lambda: allocator.alloc_extend([1], [0], [0]),
                lambda: table.free(3),
                lambda: table.write((9, 0), 1),
                lambda: table.read(9, 1),
            ):
                try:
                    call()
                except (ValueError, IndexError):
                    pass
                else:
                    raise AssertionError("it had to fail")
        """,
        hidden=["torch"],
    )


class QueryingFence:
    """A fence whose `query` calls the allocator. It passes when `passed` is set."""

    def __init__(self, allocator: kvpool.TokenToKVPoolAllocator) -> None:
        self.allocator = allocator
        self.passed = False
        self.calls = 0

    def query(self) -> bool:
        self.calls += 1
        self.allocator.available_size()
        self.allocator.free([])
        return self.passed


@pytest.mark.timeout(60)
def test_fences_that_use_their_allocator_do_not_multiply() -> None:
    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
    fences = [QueryingFence(allocator) for _ in range(4)]
    for fence in fences:
        allocator.free(some(allocator.alloc(4)), after=fence)
    before = [fence.calls for fence in fences]
    assert allocator.available_size() == 48
    assert [fence.calls for fence in fences] == [calls + 1 for calls in before]
    for fence in fences:
        fence.passed = True
    assert allocator.available_size() == 64


def test_an_interrupt_in_a_fence_is_not_swallowed() -> None:
    class Interrupted:
        def query(self) -> bool:
            raise KeyboardInterrupt

    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
    allocator.free(some(allocator.alloc(4)), after=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        allocator.available_size()
    allocator.clear()
    assert allocator.available_size() == 64


def test_a_value_may_not_change_another_after_it_was_described() -> None:
    pool = small_pool()
    k = torch.ones(2, 2, 4)

    class ShrinkingArgument:
        def __dlpack__(self, **_: object) -> object:
            k.untyped_storage().resize_(0)
            return torch.ones(2, 2, 4).__dlpack__()

    with pytest.raises(ConfigError, match="without memory"):
        pool.set_kv_buffer(0, [1, 2], k, ShrinkingArgument())  # type: ignore[arg-type]
    assert not pool.k_buffer[0].any()


# Arguments that are not what they seem


@pytest.mark.parametrize("call", ["k", "indices", "out"])
def test_rejects_mocks_of_tensors(call: str) -> None:
    pool, fake = small_pool(), Mock(spec=torch.Tensor)
    with pytest.raises((TypeError, ConfigError)):
        if call == "k":
            pool.set_kv_buffer(0, [1], fake, torch.ones(1, 2, 4))
        elif call == "indices":
            pool.gather_kv(0, fake)
        else:
            pool.gather_kv(0, [1], out=(fake, fake))


def test_a_tensor_without_storage_is_refused() -> None:
    pool = small_pool()
    k = torch.ones(1, 2, 4)
    k.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="without memory"):
        pool.set_kv_buffer(0, [1], k, torch.ones(1, 2, 4))


def test_more_indices_than_memory_is_an_error_and_no_abort() -> None:
    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
    huge = torch.zeros(1, dtype=torch.int32).expand(2**45)
    with pytest.raises(OutOfMemoryError, match=str(2**47)):
        allocator.free(huge)
    with pytest.raises(MemoryError):
        kvpool.ReqToTokenPool(4, 8, "cpu").write((1, huge), 1)


@pytest.mark.parametrize(
    ("mib", "call"),
    [
        (64, "allocator.free_slots"),
        (64, "fifo.free_slots"),
        (64, "freed.release_slots"),
        (64, "allocator.free(range(2**40))"),
        (514, "kvpool.KVPool(1, 2**20, 1, 1, 'cpu', 'int8')"),
        (600, "kvpool.KVPool(1, 2**20, 1, 1, 'cpu', 'int8')"),
    ],
)
def test_lists_beyond_the_address_space_are_an_error_and_no_abort(
    run_snippet: RunSnippet, mib: int, call: str
) -> None:
    run_snippet(
        f"""
        import resource
        import kvpool

        make = kvpool.TokenToKVPoolAllocator
        allocator, fifo, freed = (make(2**25, "cpu", 1, sort) for sort in (True, False, True))
        freed.free(freed.alloc(2**25))
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {mib << 20}, -1))
        try:
            {call}
        except kvpool.OutOfMemoryError:
            pass
        else:
            raise AssertionError("it had to fail")
        """,
        hidden=["torch"],
    )


# The world of the calls below; `hog` and `limited` leave a process `room` bytes.
_SHORT_OF_MEMORY = """
    import os, resource, tempfile
    import kvpool
    import numpy as np

    def limited(room, hog):
        with open("/proc/self/statm") as pages:
            used = int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, -1))
        taken = 0
        for size in (1 << 20, 1 << 16, 4096, 600, 200):
            try:
                while True:
                    hog[taken] = bytes(size)
                    taken += 1
            except (MemoryError, IndexError):
                pass
        for at in range(max(0, taken - 60), taken):
            hog[at] = None
        resource.setrlimit(resource.RLIMIT_AS, (used + room, -1))

    def in_a_child(room, call, check):
        pid = os.fork()
        if pid == 0:
            hog, code, answer = [None] * 600_000, 0, None
            limited(room, hog)
            try:
                answer = call()
            except MemoryError:
                code = 1
            except BaseException as error:
                code = 2
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            del hog
            os._exit(code if check(code, answer) else 3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize(
    "options", [(1 << 18, "cpu"), (1 << 18, "cpu", 1, False), (1 << 18, "cpu", 4), (1 << 18, "cpu", 4, False)]
)
def test_slots_that_cannot_be_handed_out_are_not_lost(
    run_snippet: RunSnippet, options: tuple[object, ...]
) -> None:
    run_snippet(
        _SHORT_OF_MEMORY
        + f"""
    make = lambda **more: kvpool.TokenToKVPoolAllocator(*{options!r}, **more)
    for more in ({{}}, {{"index_dtype": "int64"}}):
        pool = make(**more)
        table = kvpool.ReqToTokenPool(4096, 4, "cpu")

        def is_whole(code, answer):
            pool.verify()
            taken = 0 if answer is None else len(answer)
            return pool.stats()["in_use"] == taken

        def has_rows(code, answer):
            return table.stats()["in_use"] == (0 if answer is None else len(answer))

        for room in [*range(0, 1024, 128), 1700, 2500]:
            for count in (60_000, 200_000):
                assert in_a_child(room << 10, lambda: pool.alloc(count), is_whole) in (0, 1), room
            assert in_a_child(room << 10, lambda: table.alloc(4000), has_rows) in (0, 1), room
""",
        hidden=["torch"],
        env={"RUST_BACKTRACE": "0"},
    )


@pytest.mark.timeout(300)
def test_calls_without_memory_are_errors_and_no_aborts(run_snippet: RunSnippet) -> None:
    run_snippet(
        _SHORT_OF_MEMORY
        + """
    size = 1 << 17
    pool = kvpool.TokenToKVPoolAllocator(size, "cpu")
    fifo = kvpool.TokenToKVPoolAllocator(size, "cpu", 1, False)
    cache = kvpool.PrefixCache(pool, events=True)
    kv = kvpool.KVPool(size, 1, 1, 4, device="cpu", dtype="float32")
    table = kvpool.ReqToTokenPool(64, 4096, "cpu")
    planner = kvpool.BatchPlanner(table, pool, 64, 1 << 16)
    tree = kvpool._kvpool.SlotTree(kvpool.TokenToKVPoolAllocator(size, "cpu"))
    rows, slots, numbers = table.alloc(32), pool.alloc(40_000), np.arange(1, 60_001)
    scattered = fifo.alloc(60_000).numpy()[::-2].copy()
    prompt, cached = np.arange(20_000), pool.alloc(20_000)
    cache.insert(prompt, cached)
    found, empty = cache.match(prompt), cache.match(numbers + 1_000_000)
    other = table.alloc(2)
    planner.extend([rows[0]], [0], [4000])
    values = np.ones((20_000, 1, 4), np.float32)
    folder = tempfile.TemporaryDirectory()
    open_store = lambda: kvpool.FileStore(folder.name, 1 << 25, page_bytes=512, queue_bytes=1 << 30)
    store = open_store()
    written = store.put([at.to_bytes(32, "little") for at in range(4000)], np.zeros((4000, 512), np.uint8))
    while not written.query():
        pass
    store.close()

    def state():
        pools = [pool, fifo, table, tree]
        counts = [(one.stats().get("in_use"), one.stats().get("dropped_frees")) for one in pools]
        return counts, cache.cached_size(), tree.cached_size(), planner.seq_len(rows[0])

    before = state()

    def is_as_before(code, answer):
        pool.verify(), fifo.verify(), cache.verify()
        return code == 0 or state() == before

    calls = dict(
        contiguous=lambda: pool.alloc(30_000, contiguous=True),
        alloc_extend=lambda: pool.alloc_extend([0] * 9, [3000] * 9, [-1] * 9),
        free=lambda: pool.free(slots),
        scattered=lambda: fifo.free(scattered),
        fence=lambda: fifo.free(scattered, after=type("F", (), {"query": lambda self: False})()),
        share=lambda: pool.share(slots),
        is_allocated=lambda: pool.is_allocated(numbers),
        runs=lambda: pool.runs(numbers[::-1]),
        free_slots=lambda: (pool.free_slots, fifo.free_slots),
        match=lambda: cache.match(prompt[:10_000]),
        slots=lambda: found.slots,
        publish=lambda: empty.publish(numbers[:40_000] + 1_000_000, slots),
        insert=lambda: cache.insert(numbers[:40_000] + 2_000_000, slots),
        explain=lambda: cache.explain(prompt),
        move=lambda: kv.move_kv(numbers[:20_000], numbers[1:20_001]),
        set_kv=lambda: kv.set_kv_buffer(0, numbers[:20_000], values, values),
        extend=lambda: planner.extend(rows[1:], [0] * 31, [1000] * 31),
        leased=lambda: planner.extend(other[:1], [0], [4000], prefixes=[empty]),
        fork=lambda: planner.fork(rows[0], rows[1], 3999),
        truncate=lambda: planner.truncate([rows[0]], [1]),
        finish=lambda: planner.finish([rows[0]]),
        tree=lambda: tree.insert(numbers[:30_000], numbers[:30_000]),
        clear=lambda: table.clear(),
        cache=lambda: kvpool.PrefixCache(pool),
        resize=lambda: fifo.resize(1 << 20),
        store=open_store,
    )
    for name, call in calls.items():
        for room in (0, 150, 400, 900, 1500, 6000, 40_000):
            code = in_a_child(room << 10, call, is_as_before)
            assert code in (0, 1), (name, room, code)
        assert code == 0, (name, "fails with memory, too")
    for room in (0, 100, 300, 800, 40_000):
        found.release()
        code = in_a_child(room << 10, lambda: cache.evict(20_000), lambda *_: True)
        assert code == 0, room
""",
        hidden=["torch"],
        env={"RUST_BACKTRACE": "0"},
    )


class Numbers:
    """A sequence without an end, whose length may be wrong."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> int:
        return 1


@pytest.mark.parametrize(
    "shape", [range(1 << 40), itertools.repeat(1), itertools.count(1), Numbers(3), (1,) * 9, [1] * 9]
)
def test_no_more_is_read_of_a_shape_than_a_tensor_has_dimensions(shape: Any) -> None:  # noqa: ANN401
    text = r"a tensor of (\d+|more than 8) dimensions; at most 8 are supported"
    for make in (kvpool.BufferPool("cpu").alloc, kvpool.Workspace("cpu", arena_bytes=1 << 16).empty):
        with pytest.raises(ConfigError, match=text):
            make(shape, "float32")


def test_an_interrupt_ends_the_reading_of_indices_without_an_end(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import os, signal, threading
        import kvpool

        class Endless:
            def __len__(self): return 1
            def __getitem__(self, at):
                if at == 1000:
                    os.kill(os.getpid(), signal.SIGINT)
                return 1

        from collections.abc import Sequence
        Sequence.register(Endless)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        allocator = kvpool.TokenToKVPoolAllocator(8, "cpu")
        try:
            allocator.free(Endless())
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError
        """
    )


def test_memory_that_may_not_be_written_is_not() -> None:
    text = b"abcdefgh" * 4

    class ReadOnly:
        def __init__(self) -> None:
            self.array = np.frombuffer(text, dtype=np.float32).reshape(1, 2, 4)

        def __dlpack__(self, **kwargs: Any) -> object:  # noqa: ANN401
            return self.array.__dlpack__(**kwargs)

    pool = small_pool()
    for out in (ReadOnly(), ReadOnly().array):
        with pytest.raises((ConfigError, BufferError)):
            pool.gather_kv(0, [1], out=(out, torch.empty(1, 2, 4)))  # type: ignore[arg-type]
    assert text == b"abcdefgh" * 4


def test_outputs_that_overlap_are_refused() -> None:
    pool = small_pool()
    one = torch.empty(2, 2, 4)
    for out in ((one, one), (pool.k_buffer[0][3:5], one), (one, pool.k_buffer[0][3:5])):
        with pytest.raises(ConfigError, match="overlaps"):
            pool.gather_kv(0, [1, 2], out=out)
    both = torch.empty(4, 2, 4)
    pool.gather_kv(0, [1, 2], out=(both[:2], both[2:]))


def test_a_negated_view_is_stored_with_its_sign() -> None:
    pool = small_pool()
    negated = torch.full((1, 2, 4), 1j).conj().imag
    assert negated.is_neg()
    pool.set_kv_buffer(0, [1], negated, negated)
    assert pool.k_buffer[0][1].eq(-1).all()
    assert pool.v_buffer[0][1].eq(-1).all()


@pytest.mark.parametrize("bad", [b"\x01\x02", bytearray(b"\x01"), "1", "12"])
def test_rejects_text_as_slots(bad: object) -> None:
    with pytest.raises(TypeError):
        kvpool.TokenToKVPoolAllocator(64, "cpu").free(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_indices_may_have_any_number_of_dimensions(make: Any) -> None:  # noqa: ANN401
    allocator = kvpool.TokenToKVPoolAllocator(4096, "cpu")
    allocator.alloc(4096)
    slots = make(1, 4097).reshape([2] * 12)
    allocator.free(slots.swapaxes(0, 11)[..., 0])
    assert allocator.available_size() == 2048
    assert allocator.stats()["dropped_frees"] == 0
    assert allocator.release_slots.tolist() == list(range(1, 2049))


# Failures half-way


def test_a_pytorch_that_does_not_load_is_not_taken_for_absent(
    run_snippet: RunSnippet, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    run_snippet(
        """
        import kvpool

        allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
        try:
            allocator.alloc(4)
        except ImportError as error:
            assert "libcudart" in str(error)
        else:
            raise AssertionError("it had to fail")
        assert allocator.available_size() == 16
        """,
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )


def test_an_extension_that_cannot_be_handed_out_is_taken_back(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import torch
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            del torch.Tensor.__dlpack_c_exchange_api__
        is_failing, original = False, torch._C._from_dlpack
        def from_capsule(capsule):
            if is_failing:
                raise RuntimeError("no tensor today")
            return original(capsule)
        torch._C._from_dlpack = from_capsule
        import kvpool

        allocator = kvpool.TokenToKVPoolAllocator(256, "cpu", 16)
        held = allocator.alloc(20)
        before = allocator.available_size()
        is_failing = True
        for group in (False, True):
            if group:
                allocator.free_group_begin()
            for call in (
                lambda: allocator.alloc(40),
                lambda: allocator.alloc(40, contiguous=True),
                lambda: allocator.alloc_extend([20, 0], [60, 5], [held[-1], -1]),
                lambda: allocator.alloc_decode([21], [held[-1]]),
            ):
                try:
                    call()
                except RuntimeError as error:
                    assert "no tensor today" in str(error)
                else:
                    raise AssertionError("it had to fail")
                assert allocator.available_size() == before
        allocator.free_group_end()
        is_failing = False
        assert allocator.is_allocated(held).all()
        assert allocator.stats()["dropped_frees"] == 0
        allocator.verify()
        """,
        has_torch=True,
    )


def test_the_exception_of_a_group_s_body_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu", strict=True)
    with pytest.raises(KeyError), allocator.free_group():
        allocator.free([7])
        raise KeyError
    assert "group" in caplog.text
    with pytest.raises(IndexOwnershipError), allocator.free_group():
        allocator.free([7])


def test_a_group_may_be_cleared_away() -> None:
    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
    with allocator.free_group():
        allocator.free(some(allocator.alloc(4)))
        allocator.clear()
    assert allocator.available_size() == 64


def test_a_cycle_through_a_group_is_collected() -> None:
    import weakref

    class Fence:
        group: Any = None

        def query(self) -> bool:
            return False

    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
    fence = Fence()
    fence.group = allocator.free_group()
    allocator.free(some(allocator.alloc(1)), after=fence)
    gone = weakref.ref(fence)
    del allocator, fence
    gc.collect()
    assert gone() is None


# Atomic copies


def test_writes_of_several_threads_do_not_mix() -> None:
    pool = kvpool.KVPool(4096, 1, 4, 64, "cpu", "float32")
    slots = torch.arange(1, 4097, dtype=torch.int32)
    mixed = []

    def write(value: float) -> None:
        rows = torch.full((4096, 4, 64), value)
        for _ in range(30):
            pool.set_kv_buffer(0, slots, rows, rows)
            k, v = pool.gather_kv(0, slots)
            if len({k.min().item(), k.max().item(), v.min().item(), v.max().item()}) != 1:
                mixed.append(value)

    threads = [threading.Thread(target=write, args=(float(value),)) for value in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


def test_clearing_a_table_costs_what_was_written() -> None:
    table = kvpool.ReqToTokenPool(1 << 14, 1 << 17, "cpu")  # 8 GiB, of which nothing is touched
    (row,) = table.alloc(1) or [0]
    table.write((row, slice(0, 3)), [1, 2, 3])
    table.write((0, 5), 9)
    table.clear()
    assert not table.req_to_token[row, :8].any()
    assert not table.req_to_token[0, :8].any()
    assert table.available_size() == 1 << 14
