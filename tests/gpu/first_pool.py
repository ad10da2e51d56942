"""How long the first pool of a process takes, beside the second: the kernels are loaded for the first.

With `KVPOOL_KERNELS=ptx` the driver compiles them, with `CUDA_CACHE_DISABLE=1` also if it did so before.
"""

from __future__ import annotations

import os
import time

import records
import torch
from backend import is_software

from kvpool import KVPool


def seconds() -> float:
    """The time that a pool takes until it is ready."""
    start = time.perf_counter()
    KVPool(64, 1, 1, 8, "cuda", torch.float32)
    return time.perf_counter() - start


def main() -> None:
    """Makes the context, which is not kvpool's time, and two pools."""
    start = time.perf_counter()
    if not is_software():
        torch.zeros(1).cuda()
        torch.cuda.synchronize()
    context, first, second = time.perf_counter() - start, seconds(), seconds()
    cache = "disabled" if os.environ.get("CUDA_CACHE_DISABLE") == "1" else "enabled"
    kernels = os.environ.get("KVPOOL_KERNELS") or "best"
    print(
        f"PyTorch's context {context:.3f} s, first pool {first:.3f} s, second {second:.3f} s, "
        f"kernels {kernels}, cache {cache}"
    )
    records.add("first pool", kernels=kernels, cache=cache, context=context, first=first, second=second)


if __name__ == "__main__":
    main()
