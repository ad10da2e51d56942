"""Every dtype crosses to PyTorch and NumPy at the same address, and the tensor keeps its memory."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING

import pytest
import torch

from kvpool import _kvpool

if TYPE_CHECKING:
    from conftest import RunSnippet

DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "int32",
    "int64",
    "bool",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_in_torch(dtype: str) -> None:
    tensor = _kvpool._zeros([3, 4], dtype)
    assert type(tensor) is torch.Tensor
    assert tensor.dtype is getattr(torch, dtype)
    assert (tensor.shape, tensor.stride()) == ((3, 4), (4, 1))
    size = tensor.nbytes
    tensor.view(torch.uint8).fill_(1)
    others = [_kvpool._zeros([3, 4], dtype) for _ in range(50)]
    gc.collect()
    assert len({other.data_ptr() for other in [tensor, *others]}) == 51
    assert int(tensor.view(torch.uint8).sum()) == size


def test_without_the_exchange_table_the_same_arrives(run_snippet: RunSnippet) -> None:
    run_snippet(
        f"""
        import torch
        del torch.Tensor.__dlpack_c_exchange_api__
        from kvpool import _kvpool

        for dtype in {json.dumps(DTYPES)}:
            tensor = _kvpool._zeros([3, 4], dtype)
            assert type(tensor) is torch.Tensor
            assert tensor.dtype is getattr(torch, dtype), dtype
            assert (tensor.shape, tensor.stride()) == ((3, 4), (4, 1))
            tensor.view(torch.uint8).fill_(1)
        """,
        has_torch=True,
    )


def test_without_torch_numpy_reads_the_same_memory(run_snippet: RunSnippet) -> None:
    run_snippet(
        f"""
        import numpy as np
        from kvpool import _kvpool

        for dtype in {json.dumps(DTYPES)}:
            tensor = _kvpool._zeros([3, 4], dtype)
            array = tensor.numpy()
            assert str(array.dtype) == tensor.dtype == dtype
            assert array.__array_interface__["data"][0] == tensor.data_ptr()
            assert array.shape == tensor.shape == (3, 4)
            array.view(np.uint8)[:] = 1
            again = tensor.numpy()
            del tensor
            assert (again.view(np.uint8) == 1).all()
        """,
        hidden=["torch"],
    )
