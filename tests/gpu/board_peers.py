"""The peers that kvpool is timed beside: FlashInfer, files of SGLang, vLLM's scheme of writing rows.

Each function fails where its peer is missing; `Board.peer` names it then.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SGLANG = ROOT / ".gpu" / "peers"
# Set where FlashInfer could not be compiled: why.
NO_FLASHINFER = "KVPOOL_BOARD_NO_FLASHINFER"
FLASHINFER_UNUSED = ("requests", "tqdm", "pynvml", "tabulate", "einops", "click")
# Blocks of one token each, threads over its pieces of 16 bytes, and a slot divided into block and offset.
RESHAPE_AND_CACHE = r"""
extern "C" __global__ void write_rows(const uint4* k, const uint4* v, uint4* k_cache, uint4* v_cache,
                                      const long long* slots, long long pieces, long long page) {
  const long long slot = slots[blockIdx.x];
  if (slot < 0) return;
  const long long to = (slot / page * page + slot % page) * pieces, from = blockIdx.x * pieces;
  for (long long i = threadIdx.x; i < pieces; i += blockDim.x) k_cache[to + i] = k[from + i];
  for (long long i = threadIdx.x; i < pieces; i += blockDim.x) v_cache[to + i] = v[from + i];
}
extern "C" __global__ void nothing() {}
"""


def _new_pages(
    seq_lens: torch.Tensor, page_size: int, prefix_lens: torch.Tensor | None = None, *, decode: bool = False
) -> int:
    """The utility that SGLang's allocators call: the number of pages that lengths begin."""
    if decode or prefix_lens is None:
        return int((seq_lens % page_size == 1).sum())
    return int(((seq_lens + page_size - 1) // page_size - (prefix_lens + page_size - 1) // page_size).sum())


def _try_interpreter(kv_indices: Any) -> None:  # noqa: ANN401
    """Fails where Triton's interpreter does, which not every NumPy suits."""
    table, one = torch.tensor([[5]], dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    out = torch.zeros(1, dtype=torch.int32)
    try:
        kv_indices[(1,)](table, one - 1, one, torch.tensor([0, 1], dtype=torch.int32), None, out, 1)
    except Exception as error:
        raise RuntimeError(f"Triton's interpreter does not work here: {error}") from error


@cache
def sglang() -> SimpleNamespace:
    """SGLang's allocators and Triton kernels, from its files alone."""
    if not SGLANG.is_dir():
        raise ModuleNotFoundError(f"there is no {SGLANG.relative_to(ROOT)}: make gpu-package")
    triton = SimpleNamespace(capabilities=SimpleNamespace(supports_triton=True))
    given: dict[str, dict[str, Any]] = {
        "sglang.srt.platforms": {"current_platform": triton},
        "sglang.srt.utils": {
            "get_bool_env_var": lambda *_: False,
            "get_num_new_pages": _new_pages,
            "is_hip": lambda: False,
            "next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
        },
    }
    for name, members in given.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    sys.path.insert(0, str(SGLANG))
    try:
        memory = importlib.import_module("sglang.srt.mem_cache.allocator.token")
        paged = importlib.import_module("sglang.srt.mem_cache.allocator.paged")
        common = importlib.import_module("sglang.kernels.ops.memory.common")
        indices = importlib.import_module("sglang.kernels.ops.attention.kv_indices")
    finally:
        sys.path.remove(str(SGLANG))
    if os.environ.get("TRITON_INTERPRET") == "1":
        _try_interpreter(indices.create_flashinfer_kv_indices_triton)
    return SimpleNamespace(
        token=memory.TokenToKVPoolAllocator,
        paged=paged.PagedTokenToKVPoolAllocator,
        write_table=common.write_req_to_token_pool_triton,
        kv_indices=indices.create_flashinfer_kv_indices_triton,
    )


def sglang_allocator(size: int, page: int, device: str, *, is_sorted: bool = True) -> Any:  # noqa: ANN401
    """An allocator of SGLang's."""
    if page == 1:
        return sglang().token(size, torch.bfloat16, device, None, is_sorted)
    return sglang().paged(size, page, torch.bfloat16, device, None, is_sorted)


@cache
def flashinfer_page() -> Any:  # noqa: ANN401
    """FlashInfer's module of pages, compiled, without the rest of the package."""
    if os.environ.get(NO_FLASHINFER):
        raise RuntimeError(os.environ[NO_FLASHINFER])
    sys.path.insert(0, str(ROOT / "benches"))
    from peers import stand_ins

    spec = importlib.machinery.PathFinder.find_spec("flashinfer")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("FlashInfer is not installed")
    stand_ins.install(FLASHINFER_UNUSED)
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}a")
    package = types.ModuleType("flashinfer")
    package.__path__ = list(spec.submodule_search_locations)
    package.__file__ = spec.origin
    package.__spec__ = spec
    sys.modules["flashinfer"] = package
    page = importlib.import_module("flashinfer.page")
    page.get_page_module()
    return page


class Raw:
    """Kernels through CuPy, on PyTorch's current stream."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        module = self._cupy.RawModule(code=RESHAPE_AND_CACHE)
        self._write, self._nothing = module.get_function("write_rows"), module.get_function("nothing")
        self._handle: int | None = None

    def _follow(self) -> None:
        handle = torch.cuda.current_stream().cuda_stream
        if handle != self._handle:
            self._stream = self._cupy.cuda.ExternalStream(handle)
            self._stream.use()
            self._handle = handle

    def write(
        self, caches: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """vLLM's scheme: writes a row of K and V for each slot, an int64."""
        self._follow()
        pieces = k[0].numel() * k.element_size() // 16
        pointers = [tensor.data_ptr() for tensor in (k, v, *caches, slots)]
        self._write((len(slots),), (min(k[0].numel(), 512),), (*pointers, pieces, 16))

    def nothing(self) -> None:
        """An empty kernel."""
        self._follow()
        self._nothing((1,), (32,), ())
