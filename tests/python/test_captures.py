"""Every public call of all pools beside captures of CUDA graphs: it works, or it refuses and changes nothing.

Nobody's capture is spoilt by it in either case. The calls are those of `capture_calls`, where none may be
missing; `tests/gpu/captures.py` makes them within the capture of their own stream, beside one of another
thread or of another stream, and as the first of a process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import captures
import pytest
from backend import SoftwareGpu
from capture_calls import ENTRIES, INSTANCES, all_entries
from capture_surface import surface

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet
    from software import Driver

TABLE = all_entries()
KINDS = sorted({re.split(r"[.(: ]", name)[0] for name in TABLE})
each_kind = pytest.mark.parametrize("kind", KINDS)


def test_every_public_call_has_an_entry() -> None:
    calls, properties = surface()
    named = {name.partition(":")[0] for name in TABLE}
    named |= {name for name in properties if name.split(".")[0] in INSTANCES}
    missing = sorted(calls - named)
    assert not missing, f"capture_calls.ENTRIES says nothing of {missing}"
    gone = sorted(name for name in ENTRIES if name.partition(":")[0] not in calls and "dropped" not in name)
    assert not gone, f"capture_calls.ENTRIES has {gone}, which are no calls"


@pytest.mark.cuda
@pytest.mark.parametrize("case", captures.CASES)
@each_kind
def test_a_call_spoils_no_capture_and_works_or_changes_nothing(driver: Driver, kind: str, case: str) -> None:
    device = SoftwareGpu(driver)
    failed = []
    for name, entry in TABLE.items():
        if re.split(r"[.(: ]", name)[0] == kind:
            found = captures.try_call(device, entry, case)
            if not found["ok"]:
                failed.append(captures.line_of(captures.Item(name, case), found))
    assert not failed, "\n".join(failed)


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_the_first_call_of_a_process_beside_a_capture() -> None:
    done = subprocess.run(
        [sys.executable, Path(captures.__file__), "--first"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(captures.items(first=True)) + 1


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_a_tensor_without_pytorch_is_not_read_within_a_capture(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import ctypes
        import kvpool
        soft = ctypes.CDLL(None)
        soft.soft_stream.restype = ctypes.c_size_t
        tensor = kvpool._kvpool._zeros([4], "float32", "cuda")
        calls = {
            "shape": lambda: tensor.shape, "dtype": lambda: tensor.dtype, "device": lambda: tensor.device,
            "data_ptr": tensor.data_ptr, "__len__": lambda: len(tensor), "ndim": lambda: tensor.ndim,
            "cpu": tensor.cpu, "tolist": tensor.tolist, "__getitem__": lambda: tensor[1],
            "slice": lambda: tensor[1:], "__iter__": lambda: iter(tensor), "__repr__": lambda: repr(tensor),
            "__array__": tensor.__array__, "__buffer__": lambda: tensor.__buffer__(0),
            "__dlpack_device__": tensor.__dlpack_device__, "__dlpack__": lambda: tensor.__dlpack__(stream=-1),
            "numpy": tensor.numpy,
        }
        public = {name for name in vars(kvpool.Tensor) if not name.startswith("_")}
        assert public <= set(calls), public - set(calls)
        for name, call in calls.items():
            stream = ctypes.c_size_t(soft.soft_stream(0))
            kvpool._kvpool._use_stream(stream.value)
            assert soft.soft_begin_capture(stream) == 0
            try:
                call()
                said = "works"
            except (kvpool.KvPoolError, TypeError, BufferError) as error:
                said = type(error).__name__
            end = soft.soft_end_capture(stream)
            expected = dict.fromkeys(["cpu", "tolist", "__getitem__", "__iter__"], "DriverError")
            expected.update(dict.fromkeys(["numpy", "__array__", "__buffer__"], "BufferError"))
            assert (said, end > 0) == (expected.get(name, "works"), True), (name, said, end)
        """,
        hidden=["torch"],
    )
