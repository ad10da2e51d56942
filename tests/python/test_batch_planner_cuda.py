"""BatchPlanner on a GPU: one launch a step, no waiting, late streams, failures of the driver."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import (
    MEMORY,
    NEVER,
    WAITS,
    Fence,
    assert_refused_after_fork,
    failing,
    needs_fork,
    on_stream,
    some,
)
from planner_pair import TENSORS, Pair, compare_plans

import kvpool
from kvpool import (
    BatchPlanner,
    ConfigError,
    DriverError,
    KVPool,
    ReqToTokenPool,
    StaleBufferError,
    TokenToKVPoolAllocator,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shared_fixtures import RunSnippet
    from software import Driver

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    with devices.on("cuda"):
        yield


def assert_no_wait(driver: Driver) -> None:
    assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 7
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 0


def one_launch(driver: Driver, *, copies: int = 0) -> None:
    assert driver.calls("cuMemcpyHtoDAsync_v2") == driver.calls("cuEventRecord") == copies
    assert driver.calls("cuLaunchKernel") == 1
    assert_no_wait(driver)


class Scene:
    """Requests in the middle of their work, and what may come next."""

    def __init__(self, page_size: int, **options: Any) -> None:  # noqa: ANN401
        self.size = size = page_size
        self.pair = Pair(
            40 * size, size, strict=True, max_context_len=5 * size + 20, max_tokens=1024, **options
        )
        self.one, self.two, self.three = self.pair.start(size + 1, 3 * size, 2)
        self.cached = self.pair.slots(2 * size).tolist()
        self.pair.truncate([self.two], [size])
        self.pair.decode([self.three], [3])
        self.new, self.other = self.pair.rows(2)
        planner = self.pair.planner
        one, two, new, other = self.one, self.two, self.new, self.other
        # The real call, and what it does to the requests: row, tokens before, tokens after.
        self.steps: dict[str, tuple[Callable[[], Any], list[tuple[int, int, int]], int]] = {
            "extend": (
                lambda: planner.extend([new, other], [0, 0], [2 * size + 3, 1]),
                [(new, 0, 2 * size + 3), (other, 0, 1)],
                0,
            ),
            "chunk": (
                lambda: planner.extend([two, one], [size, size + 1], [3 * size, size + 4]),
                [(two, size, 3 * size), (one, size + 1, size + 4)],
                0,
            ),
            "prefix": (
                lambda: planner.extend(
                    [new, one], [2 * size, size + 1], [3 * size, size + 2], [self.cached, None]
                ),
                [(new, 2 * size, 3 * size), (one, size + 1, size + 2)],
                0,
            ),
            "decode": (
                lambda: planner.decode([one, two], [size + 2, size + 1]),
                [(one, size + 1, size + 2), (two, size, size + 1)],
                0,
            ),
            "padded": (
                lambda: planner.decode([two, one], [size + 3, size + 4], 3, pad_to=[1, 6]),
                [(two, size, size + 3), (one, size + 1, size + 4)],
                3,
            ),
        }

    def observed_state(self) -> dict[str, Any]:
        """The state that a failed call must not change: owners, lengths, and the used part of the table."""
        state = self.pair.observed_state()
        state["slots"] = sorted(state.pop("free") + state.pop("released"))
        state["table"] = {row: state["table"][row][:length] for row, length in state["lens"].items()}
        del state["plans"], state["high_water"]
        return state

    def check(self, plan: Any, real: list[tuple[int, int, int]], tokens: int) -> None:  # noqa: ANN401
        """The plan is what follows from the table, in which no page is twice."""
        compare_plans(plan, self.pair.describe(real, 4 if tokens else 0, tokens), "cuda")
        assert [self.pair.planner.seq_len(row) for row, _, _ in real] == [seq for _, _, seq in real]
        table = self.pair.table.req_to_token.tolist()
        slots = [slot for row, _, seq in real for slot in table[row][:seq]]
        assert len(set(slots)) == len(slots)
        assert self.pair.allocator.is_allocated(slots).all()


STEPS = ["extend", "chunk", "prefix", "decode", "padded"]


# Driver calls


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_step_is_one_launch_and_waits_for_nothing(driver: Driver, page_size: int) -> None:
    for step in STEPS:
        scene = Scene(page_size)
        call, real, tokens = scene.steps[step]
        driver.run()
        driver.set_patience(NEVER)
        driver.reset_calls()
        plan = call()
        one_launch(driver)
        driver.reset_calls()
        for name in TENSORS:
            assert getattr(plan, name) is not None
            assert getattr(plan.host, name) is not None
        assert driver.calls() == 0
        driver.set_patience(3)
        scene.check(plan, real, tokens)


def test_a_long_run_of_steps_waits_for_nothing(driver: Driver) -> None:
    pair = Pair(4096, 4, max_context_len=600)
    rows = pair.start(5, 1, 9, 30)
    lens = [5, 1, 9, 30]
    for _ in range(10):
        lens = [length + 1 for length in lens]
        pair.planner.decode(rows, lens)
    driver.run()
    before = driver.device_bytes(), driver.page_locked_bytes()
    driver.reset_calls()
    for _ in range(200):
        # A device that is never more than a step behind.
        driver.run()
        lens = [length + 2 for length in lens]
        assert pair.planner.decode(rows, lens, 2, pad_to=8) is not None
        pair.planner.truncate(rows[:1], [lens[0] - 1])
        lens[0] -= 1
    assert driver.calls("cuMemcpyHtoDAsync_v2") == driver.calls("cuEventRecord") == 0
    assert driver.calls("cuLaunchKernel") == 200
    assert_no_wait(driver)
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


def batch(requests: int) -> tuple[Pair, list[int], list[int]]:
    """Requests that have decoded one token."""
    size = max(4096, 12 * requests)
    tokens = max(1024, 5 * requests)
    pair = Pair(size, 1, max_reqs=requests, max_context_len=16, max_batch_size=requests, max_tokens=tokens)
    lens = [1 + row % 5 for row in range(requests)]
    rows = pair.start(*lens)
    lens = [length + 1 for length in lens]
    pair.decode(rows, lens)
    return pair, rows, lens


KERNELS = {
    "kvpool_plan_listed": (4096 - 136) // 4,
    "kvpool_plan_long": (12_288 - 136) // 4,
    "kvpool_plan_longest": (32_760 - 136) // 4,
}
"""The numbers that the kernels of a step have room for, behind their parameters: nine for each request, and
its new pages."""


def kernel_of(numbers: int, *, has_long: bool = True) -> str:
    """The kernel that takes a step of so many numbers, with its launch or else copied."""
    fits = [name for name, room in KERNELS.items() if numbers <= room and (has_long or room < 1024)]
    return fits[0] if fits else "kvpool_plan"


@pytest.mark.parametrize("requests", [64, 256, 815])
def test_a_decode_step_is_four_driver_calls(driver: Driver, requests: int) -> None:
    pair, rows, lens = batch(requests)
    driver.run()
    driver.reset_calls()
    plan = some(pair.planner.decode(rows, [length + 1 for length in lens]))
    names = {"cuCtxGetCurrent": 2, "cuStreamIsCapturing": 1, "cuLaunchKernel": 1}
    assert {name: driver.calls(name) for name in names} == names
    assert driver.calls(f"launch:{kernel_of(10 * requests)}") == 1
    assert driver.calls() == sum(names.values())
    compare_plans(plan, pair.describe([(row, n, n + 1) for row, n in zip(rows, lens, strict=True)]), "cuda")


def compare_large_steps(driver: Driver, requests: int, *, has_long: bool = True) -> None:
    """Whatever takes their numbers to the device, the plans of many requests are right."""
    pair, rows, lens = batch(requests)
    driver.run()
    for tokens in (1, 2, 5):
        lens = [length + tokens for length in lens]
        driver.reset_calls()
        plan = some(pair.planner.decode(rows, lens, tokens))
        kernel = kernel_of(requests * (9 + tokens), has_long=has_long)
        one_launch(driver, copies=int(kernel == "kvpool_plan"))
        assert driver.calls(f"launch:{kernel}") == 1
        real = [(row, n - tokens, n) for row, n in zip(rows, lens, strict=True)]
        compare_plans(plan, pair.describe(real), "cuda")


def compare_long_prompts(driver: Driver, *, has_long: bool = True) -> None:
    """The same of prompts whose pages fill the parameters, or are one too many."""
    pair = Pair(8192, 1, max_context_len=8192, max_tokens=8192)
    for room in KERNELS.values():
        for numbers in (room, room + 1):
            [row], tokens = pair.rows(1), numbers - 9
            driver.run()
            driver.reset_calls()
            plan = some(pair.planner.extend([row], [0], [tokens]))
            kernel = kernel_of(numbers, has_long=has_long)
            one_launch(driver, copies=int(kernel == "kvpool_plan"))
            assert driver.calls(f"launch:{kernel}") == 1
            compare_plans(plan, pair.describe([(row, 0, tokens)]), "cuda")
            pair.planner.finish([row])


@pytest.mark.parametrize("requests", [1, 98, 99, 100, 217, 218, 256, 303, 304, 582, 583, 815, 816])
def test_a_large_step_travels_with_the_launch_or_is_copied(driver: Driver, requests: int) -> None:
    compare_large_steps(driver, requests)


def test_a_long_prompt_travels_with_the_launch_or_is_copied(driver: Driver) -> None:
    compare_long_prompts(driver)


@pytest.mark.parametrize("version", [12_000, 12_010])
def test_older_drivers_get_the_parameters_that_they_accept(
    driver: Driver, run_snippet: RunSnippet, version: int
) -> None:
    driver.run()
    has_long = version >= 12_010
    code = f"""
    import os
    os.environ["KVPOOL_SOFTWARE_VERSION"] = "{version}"
    sys.path[:0] = {[path for path in sys.path if path.startswith(str(Path(__file__).parent))]}
    import devices, test_batch_planner_cuda as tests
    from software import Driver, SoftwareTorch

    with SoftwareTorch(), devices.on("cuda"):
        driver = Driver()
        for requests in (99, 100, 256, 303, 304, 815, 816):
            tests.compare_large_steps(driver, requests, has_long={has_long})
        tests.compare_long_prompts(driver, has_long={has_long})
        print(driver.calls())
    """
    assert int(run_snippet(code, has_torch=True)) > 0


@pytest.mark.parametrize("requests", [256, 815])
def test_a_large_step_that_cannot_be_launched_changes_nothing(driver: Driver, requests: int) -> None:
    pair, rows, lens = batch(requests)
    after = [length + 1 for length in lens]
    driver.run()
    driver.fail("cuLaunchKernel")
    with pytest.raises(DriverError, match="cuLaunchKernel failed"):
        pair.planner.decode(rows, after)
    assert driver.planned() == 0
    assert [pair.planner.seq_len(row) for row in rows] == lens
    plan = some(pair.planner.decode(rows, after))
    real = [(row, n - 1, n) for row, n in zip(rows, after, strict=True)]
    compare_plans(plan, pair.describe(real), "cuda")


def test_a_large_step_within_a_capture_is_refused_as_a_small_one(driver: Driver) -> None:
    for requests in (2, 256, 815):
        pair, rows, lens = batch(requests)
        driver.run()
        stream = driver.stream()
        with on_stream(stream):
            driver.begin_capture(stream)
            with pytest.raises(DriverError, match="of which the host keeps a copy, cannot be captured"):
                pair.planner.decode(rows, [length + 1 for length in lens])
            driver.end_capture(stream)
        assert [pair.planner.seq_len(row) for row in rows] == lens


def test_truncate_makes_no_driver_call(driver: Driver) -> None:
    scene = Scene(4)
    driver.reset_calls()
    scene.pair.planner.truncate([scene.one, scene.two], [1, 0])
    assert driver.calls() == 0


def test_finish_and_fork_wait_for_nothing(driver: Driver) -> None:
    scene = Scene(16)
    driver.run()
    driver.set_patience(NEVER)
    driver.reset_calls()
    scene.pair.planner.fork(scene.one, scene.new, 17)
    # One for the row, and one for each of the two tensors.
    assert driver.calls("cuLaunchKernel") <= 3
    scene.pair.planner.finish([scene.one, scene.new])
    assert driver.calls("cuLaunchKernel") <= 4
    assert driver.calls("cuMemcpyHtoDAsync_v2") == driver.calls("cuEventRecord") == 0
    assert_no_wait(driver)


@pytest.mark.parametrize("requests", [3, 8, 28])
def test_a_batch_of_long_cached_prefixes_is_one_launch(driver: Driver, requests: int) -> None:
    pair = Pair(16_384, 1, max_reqs=28, max_batch_size=28, max_context_len=300, max_tokens=32)
    cached = pair.slots(290).tolist()
    rows = pair.rows(requests)
    driver.run()
    driver.reset_calls()
    lens = [290] * requests, [291] * requests
    plan = some(pair.planner.extend(rows, *lens, [cached] * requests))
    one_launch(driver, copies=int(300 * requests > KERNELS["kvpool_plan_longest"]))
    compare_plans(plan, pair.describe([(row, 290, 291) for row in rows]), "cuda")
    assert all(pair.row_of(row, 290) == cached for row in rows)


def test_slices_of_the_table_are_freed_without_asking_the_device(driver: Driver) -> None:
    pair = Pair(64, 1)
    row = pair.start(20)[0]
    pair.decode([row], [21])
    driver.reset_calls()
    pair.allocator.free(pair.table.req_to_token[row, 10:21])
    assert driver.calls() == 0
    assert pair.allocator.stats()["dropped_frees"] == 0
    assert pair.allocator.available_size() == 54


# Late devices


def test_steps_that_wait_on_the_device_keep_their_arrays(driver: Driver) -> None:
    pair = Pair(256, 4, max_context_len=60)
    kv = KVPool(256, 1, 1, 1, "cuda", torch.float32, page_size=4)
    rows = pair.start(3, 1, 6)
    values = [torch.full((3, 1, 1), 100.0 + step).cuda() for step in range(24)]
    driver.run()
    driver.set_patience(NEVER)
    lens = [3, 1, 6]
    for value in values:
        lens = [length + 1 for length in lens]
        plan = some(pair.planner.decode(rows, lens))
        kv.set_kv_buffer(0, plan.out_cache_loc, value, value)
    assert driver.pending() > 0
    driver.run()
    driver.set_patience(3)
    buffer = kv.k_buffer[0].cpu().flatten()
    for row, start in zip(rows, (3, 1, 6), strict=True):
        slots = pair.row_of(row, start + 24)
        assert buffer[slots[start:]].tolist() == [100.0 + step for step in range(24)]
    kv.check()


def test_work_goes_to_the_current_stream(driver: Driver) -> None:
    scene = Scene(4)
    driver.run()
    stream = driver.stream()
    planner = scene.pair.planner
    calls: list[Callable[[], object]] = [
        *(scene.steps[name][0] for name in ("extend", "decode")),
        lambda: planner.finish([scene.new]),
        lambda: planner.fork(scene.one, scene.pair.table.alloc()[0], 5),  # type: ignore[index]
    ]
    for call in calls:
        driver.run()
        with on_stream(stream):
            call()
        assert driver.pending(stream) > 0
        assert driver.pending() == driver.pending(stream)


def test_a_batch_that_would_not_fit_waits_for_frees_that_land(driver: Driver) -> None:
    allocator, table = TokenToKVPoolAllocator(64, "cuda", 4), ReqToTokenPool(4, 64, "cuda")
    planner = BatchPlanner(table, allocator, 4, 64)
    foreign = some(allocator.alloc(64)).to(torch.int64)
    driver.set_patience(NEVER)
    allocator.free(foreign)
    rows = some(table.alloc(2))
    assert some(planner.extend(rows, [0, 0], [32, 32])).num_tokens == 64
    assert planner.decode(rows, [33, 33]) is None


def test_arguments_that_only_the_device_knows_are_waited_for(driver: Driver) -> None:
    pair = Pair(page_size=4)
    rows = pair.start(3, 5)
    given = torch.tensor(rows).cuda(), torch.tensor([4, 6]).cuda()
    driver.set_patience(NEVER)
    assert some(pair.planner.decode(*given)).host.seq_lens.tolist() == [4, 6]


# Graphs


def test_a_captured_kernel_reads_the_plan_of_each_step(driver: Driver) -> None:
    pair = Pair(256, 4)
    kv = KVPool(256, 1, 1, 1, "cuda", torch.float32, page_size=4)
    rows = pair.start(3, 6)
    value = torch.zeros(4, 1, 1).cuda()
    plan = some(pair.planner.decode(rows, [4, 7], pad_to=4))
    driver.run()
    stream = driver.stream()
    with on_stream(stream):
        driver.begin_capture(stream)
        kv.set_kv_buffer(0, plan.slot_mapping, value, value)
        graph = driver.end_capture(stream)
        for step in range(1, 6):
            value.fill_(float(step))
            some(pair.planner.decode(rows, [4 + step, 7 + step], pad_to=4))
            driver.replay(graph, stream)
            driver.run()
    buffer = kv.k_buffer[0].cpu().flatten()
    for row, start in zip(rows, (4, 7), strict=True):
        assert buffer[pair.row_of(row, start + 5)[start:]].tolist() == [1, 2, 3, 4, 5]
    # Padded tokens are written nowhere.
    assert buffer.count_nonzero() == 10


# Failures


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_step_whose_driver_call_fails_changes_nothing_and_works_again(
    driver: Driver, page_size: int
) -> None:
    scene, answers = Scene(page_size), list[Any]()
    for step in STEPS:
        before, failures = scene.observed_state(), 0

        def call(step: str = step) -> None:
            answers[:] = [scene.steps[step][0]()]  # noqa: B023 - the scene of the moment

        for error in failing(driver, call):
            _, real, tokens = scene.steps[step]
            if error is not None:
                failures += 1
                assert "failed with CUDA_ERROR" in str(error)
                assert scene.observed_state() == before
                call()
            scene.check(answers[0], real, tokens)
            scene = Scene(page_size)
        assert failures > 1


@pytest.mark.parametrize("step", ["extend", "fork"])
def test_a_failed_step_leaves_the_owners_of_shared_slots(driver: Driver, step: str) -> None:
    allocator = TokenToKVPoolAllocator(16, debug=True)
    table = ReqToTokenPool(2, 8, padding_row=True)
    planner = BatchPlanner(table, allocator, max_batch_size=2, max_tokens=8)
    one, two = some(table.alloc(2))
    cached = some(allocator.alloc(2, owner="cache"))
    planner.extend([one], [2], [3], [cached])

    def owners() -> Counter[Any]:
        return Counter(leak.owner for leak in allocator.leaks() for _ in range(leak.count))

    def call() -> object:
        return planner.fork(one, two, 3) if step == "fork" else planner.extend([two], [2], [3], [cached])

    before = owners()
    for left in range(2):  # a launch that fails is repeated in the device's context
        driver.fail("cuLaunchKernel", left)
    with pytest.raises(DriverError):
        call()
    driver.forget_plans()
    assert owners() == before
    call()
    assert owners() == before + Counter({"row 2": 3})


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_fork_whose_driver_call_fails_changes_nothing_and_works_again(
    driver: Driver, page_size: int
) -> None:
    scene = Scene(page_size)
    before, failures = scene.observed_state(), 0

    def call() -> object:
        return scene.pair.planner.fork(scene.one, scene.new, page_size + 1)

    for error in failing(driver, call):
        if error is not None:
            failures += 1
            assert scene.observed_state() == before
            assert call() is not None
        rows = scene.pair.row_of(scene.one, page_size), scene.pair.row_of(scene.new, page_size)
        assert rows[0] == rows[1]
        assert scene.pair.planner.seq_len(scene.new) == page_size + 1
        assert scene.pair.allocator.stats()["shared"] == page_size * (2 if page_size == 1 else 1)
        scene.pair.planner.finish([scene.one, scene.new])
        scene = Scene(page_size)
    assert failures > 0


@pytest.mark.parametrize("fenced", [False, True])
def test_a_finish_whose_driver_call_fails_gives_everything_back(
    driver: Driver, fenced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(4)
    fence = Fence()

    def call() -> None:
        scene.pair.planner.finish([scene.one, scene.two, scene.three], after=fence if fenced else None)

    for error in failing(driver, call):
        assert error is None
        fence.done = True
        assert scene.pair.planner.stats()["tokens"] == 0
        assert scene.pair.table.available_size() == 6
        assert scene.pair.allocator.stats()["in_use"] == 8
        rows = some(scene.pair.table.alloc(6))
        assert not scene.pair.table.req_to_token[rows].any()
        some(scene.pair.planner.extend(rows, [0] * 6, [5] * 6))
        scene, fence = Scene(4), Fence()
    assert "zeroed when they are handed out again" in caplog.text


def test_a_step_after_a_failed_one_shows_no_old_blocks(driver: Driver) -> None:
    pair = Pair(256, 4)
    one, two = pair.start(30, 1)
    driver.fail("cuLaunchKernel")
    with pytest.raises(DriverError):
        pair.planner.decode([one, two], [31, 2])
    plan = some(pair.planner.decode([two], [2]))
    assert some(plan.block_table).count_nonzero() == 1
    plan = some(pair.planner.decode([one, two], [31, 3]))
    assert some(plan.block_table).count_nonzero() == 9


# Construction and lifetime


def test_pools_on_different_devices() -> None:
    tables = {where: ReqToTokenPool(4, 32, where) for where in ("cpu", "cuda")}
    allocators = {where: TokenToKVPoolAllocator(64, where) for where in ("cpu", "cuda")}
    for one, two in (("cpu", "cuda"), ("cuda", "cpu")):
        with pytest.raises(ConfigError, match=r"(?s)(cpu.*cuda:0|cuda:0.*cpu)"):
            BatchPlanner(tables[one], allocators[two], 4, 32)


def test_a_planner_that_has_no_memory_leaves_nothing(driver: Driver) -> None:
    table, allocator = ReqToTokenPool(4, 1 << 16, "cuda"), TokenToKVPoolAllocator(64, "cuda")
    gc.collect()
    before = driver.device_bytes(), driver.page_locked_bytes()
    driver.set_capacity(before[0] + (1 << 20))
    with pytest.raises(kvpool.OutOfMemoryError, match=r"\d"):
        BatchPlanner(table, allocator, 64, 64)
    gc.collect()
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


def test_tensors_of_a_plan_outlive_their_planner_and_then_give_everything_back(driver: Driver) -> None:
    gc.collect()
    before = driver.device_bytes(), driver.page_locked_bytes()
    pair = Pair(page_size=4)
    plan: Any = pair.extend(pair.rows(2), [0, 0], [5, 2])
    kept, host = plan.seq_lens, plan.host.kv_indices
    del pair, plan
    gc.collect()
    assert kept.tolist() == [5, 2]
    assert host.tolist() == [1, 2, 3]
    assert driver.device_bytes() > before[0]
    del kept, host
    gc.collect()
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_planner_cannot_be_used_after_a_fork() -> None:
    scene = Scene(4)
    planner = scene.pair.planner
    calls: list[Callable[[], object]] = [
        *(call for call, _, _ in scene.steps.values()),
        lambda: planner.fork(scene.one, scene.new, 2),
        lambda: planner.finish([scene.one]),
    ]
    assert_refused_after_fork(calls, lambda: planner.stats()["requests"] != 3)
    scene.pair.finish([scene.one])


def test_without_pytorch_the_fields_are_ours(driver: Driver, run_snippet: RunSnippet) -> None:
    assert driver.calls() == 0
    code = """
        import kvpool
        table = kvpool.ReqToTokenPool(4, 32, "cuda")
        planner = kvpool.BatchPlanner(table, kvpool.TokenToKVPoolAllocator(64, "cuda", 4), 4, 32)
        rows = table.alloc(2)
        plan = planner.extend(rows, [0, 0], [5, 3])
        print(type(plan.seq_lens).__name__, plan.seq_lens.device, plan.kv_indices.cpu().numpy().tolist())
        print(plan.host.out_cache_loc.tolist(), plan.slot_mapping.cpu().numpy().tolist())
        print(plan.block_table.cpu().numpy()[:, :3].tolist(), plan.host.block_table[:, :3].tolist())
    """
    assert run_snippet(code, hidden=["torch"]).splitlines() == [
        "Tensor cuda:0 [1, 2, 3]",
        "[4, 5, 6, 7, 8, 12, 13, 14] [4, 5, 6, 7, 8, 12, 13, 14]",
        "[[1, 2, 0], [3, 0, 0]] [[1, 2, 0], [3, 0, 0]]",
    ]


def test_a_plan_whose_row_is_another_requests_is_stale_on_the_host() -> None:
    pair, rows, lens = batch(2)
    plan = some(pair.planner.decode(rows, [length + 1 for length in lens]))
    assert plan.host.kv_indices is not None
    pair.table.clear()
    again = some(pair.table.alloc(2))
    assert [pair.planner.seq_len(row) for row in again] == [0, 0]
    for name in ("kv_indices", "block_table"):
        with pytest.raises(StaleBufferError, match="is not the last any more"):
            getattr(plan.host, name)
    assert plan.host.seq_lens.tolist() == [length + 1 for length in lens]
