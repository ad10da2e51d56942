"""vLLM's offloading: its manager gives chunks of host memory out, its worker copies blocks there and back.

A chunk has two blocks, so that requests begin and end within one.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.errors import StateError
from kvpool.verify.driver import Driver, LeftOutError
from kvpool.verify.drivers.vllm_blocks import Blocks, page_bytes, part_of
from kvpool.verify.pattern import Pattern
from kvpool.verify.requests import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from kvpool._kvpool import CacheLayout
    from kvpool.verify.pattern import Array
    from kvpool.verify.requests import Request

    Bytes = NDArray[np.uint8]

BLOCKS_PER_CHUNK = 2
_MOST_HOST_BYTES = 1 << 30


class VllmOffloadDriver(Driver):
    """vLLM's `CPUOffloadingManager` and `CPUOffloadingWorker`.

    Without a GPU the worker's addresses are its own, and `memmove` copies what it would have a kernel copy.
    Every request is stored and loaded into other blocks; those that it had are overwritten.

    Args:
        layout: The layout.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the blocks.

    Raises:
        LeftOutError: If vLLM or PyTorch is not installed, or vLLM has no such worker.
    """

    def __init__(self, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> None:
        for package in ("torch", "vllm"):
            if importlib.util.find_spec(package) is None:
                raise LeftOutError(f"{package} is not installed")
        groups = sorted(layout.groups, key=lambda group: page_bytes(layout, group))
        # A chunk has a place for the pages of all groups, which large states would make as large.
        while len(groups) > 1 and _host_bytes(part_of(layout, groups), tokens) > _MOST_HOST_BYTES:
            groups.pop()
        super().__init__(part_of(layout, groups))
        left_out = [group.name for group in layout.groups if group not in groups]
        self.notes += [f"without {', '.join(left_out)}"] if left_out else []
        self._pattern = Pattern(self.layout)
        load = Workload(self._pattern, tokens)
        self._engine = Blocks(self.layout, load, device)
        self._blocks: dict[int, list[list[int]]] = {}
        chunks = _chunks(load, self.layout)
        self._replaced: list[tuple[Any, str, object]] = []
        try:
            self._manager, self._worker = self._make(chunks, device)
        except LeftOutError:
            raise
        except Exception as error:
            self._restore()
            raise LeftOutError(f"vLLM has no such worker here: {error!r}") from error
        self._requests: dict[int, Request] = {}
        self._job = 0

    def _make(self, chunks: int, device: str) -> tuple[Any, Any]:
        """Return a manager and a worker over the blocks."""
        import torch  # noqa: PLC0415 - it is there
        from vllm.v1.kv_offload.cpu import gpu_worker  # noqa: PLC0415 - of an engine
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: PLC0415

        is_on_host = torch.device(device).type == "cpu"
        if is_on_host:
            self._replace(gpu_worker, current_platform=_Platform(), PIN_MEMORY=False)
        caches = canonical(self._engine, on_device=is_on_host)
        worker = gpu_worker.CPUOffloadingWorker(caches, BLOCKS_PER_CHUNK, chunks)
        if is_on_host:
            for name in ("_store_handler", "_load_handler", "_expedited_load_handler"):
                handler = getattr(worker, name)
                handler._swap_blocks_batch = _copy  # noqa: SLF001 - what a kernel of vLLM does
                handler._event_pool += [_Event(), _Event()]  # noqa: SLF001
        return CPUOffloadingManager(chunks), worker

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        self._requests[request.number] = request
        blocks = self._blocks[request.number] = self._engine.alloc(request)
        self._engine.write(blocks, data)

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        return self._engine.read(self._blocks[request.number])

    def move(self) -> None:
        for number, old in self._blocks.items():
            request = self._requests[number]
            for job in self._jobs(request, old):
                self._store(job)
            new = self._blocks[number] = self._engine.alloc(request)
            for job in self._jobs(request, new):
                self._load(job)
            self._engine.free(old)

    def drop(self, request: Request) -> None:
        del self._requests[request.number]
        self._engine.free(self._blocks.pop(request.number))

    def close(self) -> None:
        self._worker.shutdown()
        self._restore()

    def _replace(self, module: Any, **names: object) -> None:  # noqa: ANN401 - of vLLM
        """Give names of a module other values until the driver is closed."""
        for name, value in names.items():
            self._replaced.append((module, name, getattr(module, name)))
            setattr(module, name, value)

    def _restore(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _jobs(self, request: Request, blocks: list[list[int]]) -> list[list[_Run]]:
        """Return what is copied at once: of each group at most one run of pages that follow each other."""
        runs: list[list[_Run]] = []
        for number, group in enumerate(self._engine.groups):
            pages = request.pages(group.name)
            ends = [at + 1 for at in range(len(pages)) if pages[at + 1 : at + 2] != [pages[at] + 1]]
            of_group = []
            for begin, end in zip([0, *ends], ends, strict=False):
                run = _Run(number, pages[begin], blocks[number][begin:end])
                run.keys = [self._key(request, number, run, chunk) for chunk in run.chunks()]
                of_group.append(run)
            runs.append(of_group)
        most = max(len(of_group) for of_group in runs)
        return [[of_group[at] for of_group in runs if at < len(of_group)] for at in range(most)]

    def _key(self, request: Request, number: int, run: _Run, chunk: int) -> bytes:
        """Return the key of a chunk, which says all that its blocks follow from."""
        from vllm.v1.kv_offload.base import make_offload_key  # noqa: PLC0415 - of an engine

        group = self._engine.groups[number]
        each = self._pattern.unit_tokens(group.name) or len(request.tokens)
        begin, end = run.pages_of(chunk)
        text = np.array([begin, end, *request.tokens[: end * each]], np.int64).tobytes()
        key: bytes = make_offload_key(hashlib.blake2b(text, digest_size=32).digest(), number)
        return key

    def _store(self, job: list[_Run]) -> None:
        keys = [key for run in job for key in run.keys]
        with _request(self._manager, self._next()) as context:
            output = self._manager.prepare_store(keys, context)
            if output is None:
                raise StateError("vLLM's manager has no room for what is stored")
            stored = [run.only(set(output.keys_to_store)) for run in job]
            if output.keys_to_store:
                blocks = self._spec(stored)
                self._wait(self._worker.submit_store(self._job, blocks, output.store_spec))
            self._manager.complete_store(output.keys_to_store, context)

    def _load(self, job: list[_Run]) -> None:
        keys = [key for run in job for key in run.keys]
        with _request(self._manager, self._next()) as context:
            chunks = self._manager.prepare_load(keys, context)
            self._wait(self._worker.submit_load(self._job, chunks, self._spec(job)))
            self._manager.complete_load(keys, context)

    def _spec(self, job: list[_Run]) -> Any:  # noqa: ANN401 - of vLLM
        """Return the blocks of a job, as vLLM's scheduler lists them."""
        from vllm.v1.kv_offload.base import GPULoadStoreSpec  # noqa: PLC0415 - of an engine

        by_group = {run.group: run for run in job}
        runs = [by_group.get(number, _Run(number, 0, [])) for number in range(len(self._engine.groups))]
        return GPULoadStoreSpec(
            [block for run in runs for block in run.blocks],
            [len(run.blocks) for run in runs],
            [run.first for run in runs],
        )

    def _next(self) -> int:
        self._job += 1
        return self._job

    def _wait(self, is_submitted: object) -> None:
        """Wait for the last job."""
        self._worker.wait({self._job})
        [result] = self._worker.get_finished()
        if not is_submitted or not result.success:
            raise StateError(f"vLLM's worker has not copied job {self._job}")


def _chunks(load: Workload, layout: CacheLayout) -> int:
    """Return chunks for all requests of a proof, of which a run of pages has one more than its pages fill."""
    return sum(2 + len(request.pages(group.name)) for request in load for group in layout.groups)


def _host_bytes(layout: CacheLayout, tokens: int | None) -> int:
    """Return the bytes of all chunks: each has a page for every tensor."""
    most: dict[int, int] = {}
    for group in layout.groups:
        size = page_bytes(layout, group)
        most[size] = max(most.get(size, 0), len(group.layers))
    chunk = BLOCKS_PER_CHUNK * sum(size * count for size, count in most.items())
    return chunk * _chunks(Workload(Pattern(layout), tokens), layout)


class _Run:
    """Pages of a group that follow each other, with their blocks and the keys of their chunks."""

    def __init__(self, group: int, first: int, blocks: list[int], keys: list[bytes] | None = None) -> None:
        self.group = group
        self.first = first
        self.blocks = blocks
        self.keys = keys or []

    def chunks(self) -> range:
        return range(self.first // BLOCKS_PER_CHUNK, -(-(self.first + len(self.blocks)) // BLOCKS_PER_CHUNK))

    def pages_of(self, chunk: int) -> tuple[int, int]:
        """Return the first page of a chunk that is in the run, and the end of the last."""
        begin, end = chunk * BLOCKS_PER_CHUNK, (chunk + 1) * BLOCKS_PER_CHUNK
        return max(begin, self.first), min(end, self.first + len(self.blocks))

    def only(self, keys: set[bytes]) -> _Run:
        """Return the end of the run that has these keys: what comes before is stored already."""
        left = [(chunk, key) for chunk, key in zip(self.chunks(), self.keys, strict=True) if key in keys]
        if not left:
            return _Run(self.group, 0, [])
        begin, _ = self.pages_of(left[0][0])
        return _Run(self.group, begin, self.blocks[begin - self.first :], [key for _, key in left])


@contextmanager
def _request(manager: Any, number: int) -> Iterator[Any]:  # noqa: ANN401 - of vLLM
    """Make a request of vLLM's that has one job."""
    from vllm.v1.kv_offload.base import ReqContext  # noqa: PLC0415 - of an engine

    context = ReqContext(req_id=str(number))
    manager.on_new_request(context)
    yield context
    manager.on_request_finished(context)


def canonical(engine: Blocks, *, on_device: bool) -> Any:  # noqa: ANN401 - of vLLM
    """Return blocks as vLLM describes them to a worker; `on_device` says that they are on a GPU."""
    from vllm.v1.kv_offload.base import (  # noqa: PLC0415 - of an engine
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    return CanonicalKVCaches(
        [
            CanonicalKVCacheTensor(_on_device(tensor) if on_device else tensor, tensor.shape[1])
            for tensor in engine.tensors
        ],
        [[CanonicalKVCacheRef(*ref) for ref in of_group] for of_group in engine.refs()],
    )


def _on_device(tensor: Any) -> Any:  # noqa: ANN401 - a tensor
    """Return a tensor that says it is on a GPU, which the worker asks for."""
    import torch  # noqa: PLC0415 - it is there

    kind = type("_DeviceTensor", (torch.Tensor,), {"is_cuda": property(lambda _: True)})
    return tensor.as_subclass(kind)


class _Platform:
    """A device without streams, in the place of vLLM's platform."""

    @staticmethod
    def is_xpu() -> bool:
        return False

    is_rocm = is_xpu

    @staticmethod
    def Stream() -> _Stream:  # noqa: N802 - vLLM's name
        return _Stream()

    @staticmethod
    def current_stream() -> _Stream:
        return _Stream()

    @staticmethod
    def stream(_stream: object) -> AbstractContextManager[None]:
        return nullcontext()


class _Stream:
    """A stream whose work is done when it is enqueued."""

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...


class _Event:
    """An event that is over."""

    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, _event: object) -> float:
        return 0.0


def _copy(sources: Any, targets: Any, sizes: Any, **_: object) -> None:  # noqa: ANN401 - tensors
    """Copy pieces from addresses to addresses."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
