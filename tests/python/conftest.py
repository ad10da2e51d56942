"""Fixtures that several test files share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

settings.register_profile(
    "kvpool",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("kvpool")


class RunSnippet(Protocol):
    """Runs Python code in a fresh interpreter and returns what it printed."""

    def __call__(
        self, code: str, *, hidden: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> str: ...


@pytest.fixture
def run_snippet() -> RunSnippet:
    """A fresh interpreter in which the `hidden` modules can't be imported, and every warning is an error."""

    def run(code: str, *, hidden: Sequence[str] = (), env: dict[str, str] | None = None) -> str:
        hide = "".join(f"sys.modules[{name!r}] = None\n" for name in hidden)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", f"import sys\n{hide}{textwrap.dedent(code)}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **(env or {})},
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def _every_other(values: Sequence[int]) -> list[int]:
    return [x for value in values for x in (value, -99)]


INDEX_KINDS: dict[str, Callable[[Sequence[int]], Any]] = {
    "torch_int32": lambda values: torch.tensor(values, dtype=torch.int32),
    "torch_int64": lambda values: torch.tensor(values, dtype=torch.int64),
    "torch_strided_int32": lambda values: torch.tensor(_every_other(values), dtype=torch.int32)[::2],
    "torch_strided_int64": lambda values: torch.tensor(_every_other(values), dtype=torch.int64)[::2],
    "torch_column": lambda values: torch.tensor(_every_other(values), dtype=torch.int64).reshape(-1, 2)[
        :, :1
    ],
    "torch_row": lambda values: torch.tensor(values, dtype=torch.int32).reshape(1, len(values)),
    "numpy_int32": lambda values: np.array(values, dtype=np.int32),
    "numpy_int64": lambda values: np.array(values, dtype=np.int64),
    "numpy_reversed": lambda values: np.array(values[::-1], dtype=np.int64)[::-1],
    "numpy_column": lambda values: np.array(values, dtype=np.int32).reshape(len(values), 1),
    "numpy_read_only": lambda values: np.broadcast_to(np.array(values, dtype=np.int64), (1, len(values))),
    "list": list,
    "tuple": tuple,
    "numpy_scalars": lambda values: [np.int64(value) for value in values],
}


@pytest.fixture(params=sorted(INDEX_KINDS))
def as_index(request: pytest.FixtureRequest) -> Callable[[Sequence[int]], Any]:
    """Every form in which indices may be given."""
    kind: str = request.param
    return INDEX_KINDS[kind]


BAD_INDICES: dict[str, Any] = {
    "torch_float": torch.tensor([1.0, 2.0]),
    "torch_bool": torch.tensor([True, False]),
    "torch_int16": torch.tensor([1, 2], dtype=torch.int16),
    "torch_uint8": torch.tensor([1, 2], dtype=torch.uint8),
    "numpy_float": np.array([1.0, 2.0]),
    "numpy_bool": np.array([True, False]),
    "numpy_int16": np.array([1, 2], dtype=np.int16),
    "numpy_big_endian": np.array([1, 2], dtype=">i4"),
    "bools": [True, False],
    "floats": [1.0, 2.0],
    "nan": [float("nan")],
    "strings": ["1", "2"],
    "text": "12",
    "none": None,
    "nested": [[1], [2]],
    "object": object(),
}


@pytest.fixture(params=sorted(BAD_INDICES))
def bad_index(request: pytest.FixtureRequest) -> object:
    """Things that are no indices, and that every method refuses with `TypeError`."""
    kind: str = request.param
    bad: object = BAD_INDICES[kind]
    return bad
