"""`Workspace`: one arena for everything that a forward pass allocates."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import MIB, cuda_only
from software import Driver, is_preloaded, memory_of_pytorch

import kvpool
from kvpool import ConfigError, Workspace, WorkspaceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared_fixtures import RunSnippet


@pytest.fixture(autouse=True)
def _device(device: str) -> Iterator[str]:
    """Every test runs on every device."""
    yield device
    gc.collect()


def make(arena_bytes: int = MIB, **options: Any) -> Workspace:  # noqa: ANN401
    return Workspace(devices.current(), arena_bytes, **options)


# Tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "float64"])
@pytest.mark.parametrize("shape", [(), 7, (3, 4), [2, 0, 3], torch.Size([1, 2, 3, 4])])
def test_tensors_are_what_was_asked_for(shape: Any, dtype: str) -> None:  # noqa: ANN401
    workspace = make()
    for tensor in (workspace.empty(shape, dtype), workspace.zeros(shape, getattr(torch, dtype))):
        assert tensor.shape == torch.empty(shape).shape
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.device.type == devices.current()
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % 256 == 0
    assert not workspace.zeros(shape, dtype).cpu().to(torch.float32).any()


def test_zeros_are_zero_where_something_was() -> None:
    workspace = make(4096)
    workspace.empty(1024, "float32").fill_(3)
    assert workspace.reset()
    assert not workspace.zeros(1024, "float32").cpu().any()


def test_a_workspace_tells_its_sizes_and_high_water() -> None:
    workspace = make(num_threads=3)
    assert (workspace.arena_bytes, workspace.num_threads, workspace.closed) == (MIB, 3, False)
    assert torch.device(workspace.device).type == devices.current()
    workspace.empty(1000, "float32")
    assert workspace.used_bytes == workspace.high_water_bytes == 4096
    assert workspace.stats() == {
        "capacity": MIB,
        "available": MIB - 4096,
        "in_use": 4096,
        "high_water": 4096,
        "bytes": MIB,
    }
    assert repr(workspace) == f"Workspace(device='{workspace.device}', arena_bytes={MIB}, used_bytes=4096)"
    workspace.reset()
    assert (workspace.used_bytes, workspace.high_water_bytes) == (0, 4096)
    assert Workspace("cpu").arena_bytes == 512 * MIB


def test_reset_gives_the_same_addresses_again() -> None:
    workspace = make()
    first = [workspace.empty(n, "float32").data_ptr() for n in (10, 1000, 3)]
    for _ in range(5):
        assert workspace.reset() is True
        assert [workspace.empty(n, "float32").data_ptr() for n in (10, 1000, 3)] == first


def test_a_tensor_that_was_kept_is_not_the_next_one() -> None:
    workspace = make()
    kept = workspace.empty(10, "float32")
    workspace.reset()
    again = workspace.empty(10, "float32")
    assert again is not kept
    assert again.data_ptr() == kept.data_ptr()
    del again
    workspace.reset()
    workspace.empty(10, "float32").unsqueeze_(0)
    workspace.reset()
    assert workspace.empty(10, "float32").shape == (10,)


# Errors


def test_a_full_arena_is_an_error_with_the_numbers() -> None:
    workspace = make(4096)
    workspace.empty(1024, "uint8")
    with pytest.raises(WorkspaceExhaustedError) as caught:
        workspace.empty(3073, "uint8")
    for word in ("3073", "3072", "1024", "4096", "workspace", str(workspace.device)):
        assert word in str(caught.value)
    with pytest.raises(MemoryError):
        workspace.zeros((1 << 40,), "float64")
    assert workspace.used_bytes == 1024
    workspace.empty(3072, "uint8")
    with pytest.raises(WorkspaceExhaustedError):
        workspace.empty(0, "uint8")


@pytest.mark.parametrize("threads", [0, -3, 1025])
def test_rejects_bad_numbers_of_threads(threads: int) -> None:
    with pytest.raises(ConfigError, match=str(threads)):
        make(num_threads=threads)


def test_bad_shapes_and_dtypes_take_nothing() -> None:
    workspace = make()
    with pytest.raises(ConfigError, match="-2"):
        workspace.empty((3, -2), "float32")
    with pytest.raises(ConfigError, match="bytes"):
        workspace.zeros((2**40, 2**40), "float32")
    for dtype in ("complex64", torch.complex64, None, 3):
        with pytest.raises(TypeError):
            workspace.empty(3, dtype)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        workspace.empty("three", "float32")  # type: ignore[arg-type]
    assert workspace.used_bytes == 0


def test_a_closed_workspace_refuses_calls_and_its_tensors_stay() -> None:
    with make() as workspace:
        tensor = workspace.zeros(100, "float32")
        assert not workspace.closed
    assert workspace.closed
    workspace.close()
    assert workspace.stats()["capacity"] == workspace.used_bytes == 0
    for call in (workspace.empty, workspace.zeros):
        with pytest.raises(RuntimeError, match="closed"):
            call(1, "int8")
    with pytest.raises(RuntimeError, match="closed"):
        workspace.reset()
    with pytest.raises(RuntimeError, match="closed"), workspace.use():
        pass
    del workspace
    gc.collect()
    tensor.fill_(3)
    assert tensor.cpu().eq(3).all()


# Threads


def test_a_workspace_belongs_to_one_thread_until_it_is_reset() -> None:
    workspace = make()
    workspace.empty(10, "float32")
    with ThreadPoolExecutor(1) as other:
        for call in (lambda: workspace.empty(1, "int8"), workspace.reset, workspace.close):
            with pytest.raises(RuntimeError, match="another thread"):
                other.submit(call).result()
        assert workspace.used_bytes == 256
        workspace.reset()
        other.submit(workspace.empty, 10, "float32").result()
        with pytest.raises(RuntimeError, match="another thread"):
            workspace.reset()
        assert other.submit(workspace.reset).result() is True
    assert workspace.empty(1, "int8") is not None


def test_a_failed_call_claims_no_thread() -> None:
    workspace = make()
    with pytest.raises(WorkspaceExhaustedError):
        workspace.empty(2 * MIB, "uint8")
    with ThreadPoolExecutor(1) as other:
        other.submit(workspace.empty, 10, "float32").result()


# Debugging


def test_a_reset_poisons_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, poisoned in (("1", True), ("0", False)):
        monkeypatch.setenv("KVPOOL_DEBUG", value)
        workspace = make(8192)
        stale = [workspace.zeros(99, dtype) for dtype in ("float32", "bfloat16", "float16", "float8_e5m2")]
        number = workspace.zeros(9, "int32")
        workspace.reset()
        for tensor in stale:
            assert tensor.cpu().to(torch.float32).isnan().all().item() is poisoned
        assert number.cpu().eq(-1 if poisoned else 0).all()


# Inference loops


@cuda_only
def test_live_bytes_stay_flat(driver: Driver) -> None:
    before = driver.device_bytes()
    for _ in range(10):
        workspaces = [make(MIB) for _ in range(3)]
        for _ in range(3):
            for workspace in workspaces:
                workspace.zeros(100, "float32")
                with workspace.use():
                    torch.empty(100, device="cuda")
                assert workspace.reset()
        assert driver.device_bytes() - before == 3 * MIB
        for workspace in workspaces:
            workspace.close()
        del workspaces, workspace
        gc.collect()
        assert driver.device_bytes() == before


# PyTorch's own allocations


@pytest.fixture
def _pytorch() -> Iterator[None]:
    """PyTorch allocates as it does on a GPU."""
    with memory_of_pytorch():
        yield


of_pytorch = pytest.mark.usefixtures("_pytorch")


class Block(torch.nn.Module):
    """A transformer block as anybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


def taken_from_the_driver() -> tuple[int, int]:
    """How a new allocation shows.

    Bytes that the device has left, unless other processes use it, too, and PyTorch's allocations or, without
    the driver made of software, the bytes that PyTorch has taken beside those of memory pools.
    """
    if is_preloaded():
        return torch.cuda.mem_get_info(0)[0], Driver().calls("cudaMalloc")
    is_shared = "PYTEST_XDIST_WORKER" in os.environ
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    taken = sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == (0, 0))
    return 0 if is_shared else torch.cuda.mem_get_info(0)[0], taken


@cuda_only
@of_pytorch
def test_an_unmodified_model_allocates_nothing_from_the_driver() -> None:
    torch.manual_seed(0)
    model = Block().cuda().eval()
    workspace = make(64 * MIB)
    for length in (16, 40, 7, 33):
        x = torch.randn(2, length, 64).cuda()
        with torch.no_grad():
            alone = model(x).cpu()
            before = taken_from_the_driver()
            with workspace.use() as used:
                assert used is workspace
                first = model(x)
                again = model(x)
            assert taken_from_the_driver() == before
        assert torch.equal(first.cpu(), alone)
        assert torch.equal(again.cpu(), alone)
        assert workspace.used_bytes > 0
        assert workspace.reset() is False
        del first, again
        assert workspace.reset() is True
        assert workspace.used_bytes == 0


@cuda_only
@of_pytorch
def test_pytorch_takes_from_the_arena_and_only_within_use() -> None:
    workspace = make(64 * MIB)
    start = workspace.empty(1, "uint8").data_ptr()
    with workspace.use():
        inside = torch.empty(1000, device="cuda")
        with workspace.use():
            nested = torch.empty(1000, device="cuda")
        later = torch.empty(1000, device="cuda")
    outside = torch.empty(1000, device="cuda")
    arena = range(start, start + workspace.arena_bytes)
    assert all(tensor.data_ptr() in arena for tensor in (inside, nested, later))
    assert outside.data_ptr() not in arena
    inside.fill_(1)
    nested.fill_(2)
    later.fill_(3)
    for value, tensor in enumerate((inside, nested, later), 1):
        assert tensor.cpu().eq(value).all()


@cuda_only
@of_pytorch
def test_several_workspaces_side_by_side() -> None:
    first, second = make(32 * MIB), make(32 * MIB)
    with first.use():
        a = torch.full((1000,), 1.0, device="cuda")
        with second.use():
            b = torch.full((1000,), 2.0, device="cuda")
        c = torch.full((1000,), 3.0, device="cuda")
    assert [int(t.cpu()[0]) for t in (a, b, c)] == [1, 2, 3]
    assert (first.used_bytes > 0, second.used_bytes > 0) == (True, True)
    del b
    assert (first.reset(), second.reset()) == (False, True)


@cuda_only
@of_pytorch
def test_a_pass_that_needs_more_is_an_error_that_names_the_arena() -> None:
    workspace = make(24 * MIB)
    with pytest.raises(WorkspaceExhaustedError, match="workspace arena on cuda:0") as caught, workspace.use():
        torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)
    assert str(24 * MIB) in str(caught.value)
    del caught
    # It can be used again, by what fits.
    with workspace.use():
        fits = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    assert not fits.cpu().any()
    with pytest.raises(ZeroDivisionError), workspace.use():
        raise ZeroDivisionError
    del fits
    assert workspace.reset()


@cuda_only
@of_pytorch
def test_memory_lent_to_pytorch_is_exhausted_until_reset() -> None:
    workspace = make(24 * MIB)
    with workspace.use():
        torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(WorkspaceExhaustedError):
        workspace.empty(16 * MIB, "uint8")
    assert workspace.reset()
    workspace.empty(16 * MIB, "uint8")


@cuda_only
@of_pytorch
def test_within_use_it_cannot_be_reset_or_closed() -> None:
    workspace = make(8 * MIB)
    with workspace.use():
        tensor = torch.full((10,), 4.0, device="cuda")
        for call in (workspace.reset, workspace.close):
            with pytest.raises(RuntimeError, match=r"use\(\)"):
                call()
        with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="another thread"):
            other.submit(workspace.empty, 1, "int8").result()
    assert tensor.cpu().eq(4).all()


@cuda_only
@of_pytorch
def test_tensors_of_pytorch_outlive_the_workspace(driver: Driver) -> None:
    # Arenas whose tensors outlived them elsewhere are PyTorch's until it gives them back.
    torch._C._cuda_emptyCache()
    before = driver.device_bytes()
    workspace = make(8 * MIB)
    with workspace.use():
        tensor = torch.full((10,), 4.0, device="cuda")
    workspace.close()
    del workspace
    gc.collect()
    assert driver.device_bytes() - before >= 8 * MIB
    assert tensor.cpu().eq(4).all()
    del tensor
    torch._C._cuda_emptyCache()
    assert driver.device_bytes() == before


def test_use_sets_threads_and_puts_them_back() -> None:
    threads = torch.get_num_threads()
    workspace = make(8 * MIB, num_threads=1)
    with workspace.use():
        assert torch.get_num_threads() == 1
        assert workspace.empty(3, "float32") is not None
    assert torch.get_num_threads() == threads


def test_use_keeps_threads_that_it_did_not_set() -> None:
    threads = torch.get_num_threads()
    try:
        with make(8 * MIB).use():
            torch.set_num_threads(threads + 1)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


# Streams


@cuda_only
def test_another_stream_waits_on_the_device_before_it_uses_what_was_given_back(driver: Driver) -> None:
    workspace = make(4096)
    first, second = driver.stream(), driver.stream()
    workspace.reset()
    driver.set_patience(1 << 30)
    kvpool._kvpool._use_stream(first)
    try:
        workspace.zeros(1024, "float32")
        workspace.reset()
        driver.reset_calls()
        workspace.empty(10, "float32")
        workspace.reset()
        assert driver.calls("cuStreamWaitEvent") == 0
        kvpool._kvpool._use_stream(second)
        workspace.empty(10, "float32")
        workspace.empty(10, "float32")
        assert driver.calls("cuStreamWaitEvent") == 1
        assert driver.pending(first) > 0
        workspace.reset()
        workspace.empty(10, "float32")
        assert driver.calls("cuStreamWaitEvent") == 1
        kvpool._kvpool._use_stream(first)
        workspace.empty(10, "float32")
        assert driver.calls("cuStreamWaitEvent") == 2
    finally:
        kvpool._kvpool._use_stream(None)


@cuda_only
def test_tensors_cost_no_driver_call(driver: Driver) -> None:
    workspace = make(MIB)
    workspace.empty(10, "float32")
    driver.reset_calls()
    for _ in range(5):
        for _ in range(20):
            workspace.empty((4, 5), "float32")
        workspace.reset()
    assert driver.calls() == 0


@cuda_only
def test_a_driver_that_fails_leaves_the_arena_whole(driver: Driver) -> None:
    workspace = make(4096)
    workspace.empty(10, "float32")
    for name in ("cuMemsetD8Async", "cuCtxGetCurrent"):
        driver.fail(name)
        with pytest.raises(kvpool.DriverError, match=name):
            workspace.zeros(10, "float32")
        assert workspace.used_bytes == 256
    assert workspace.reset()


def test_a_workspace_works_without_pytorch(run_snippet: RunSnippet) -> None:
    code = f"""
        import kvpool
        workspace = kvpool.Workspace("{devices.current()}", 4096)
        first = workspace.zeros((3, 4), "float32")
        print(type(first).__name__, first.shape, workspace.used_bytes)
        address = first.data_ptr()
        print(workspace.reset(), workspace.empty((3, 4), "float32").data_ptr() == address)
        try:
            with workspace.use():
                pass
        except ModuleNotFoundError:
            print("no torch")
    """
    assert run_snippet(code, hidden=["torch"]).splitlines() == [
        "Tensor (3, 4) 256",
        "True True",
        "no torch",
    ]
