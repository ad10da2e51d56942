"""Options and fixtures of all tests, a plugin of pytest.

Tests with a `device` run on the CPU and, marked `cuda`, on a GPU or, with `--software`, on the preloaded
software driver. Without either they are deselected; `KVPOOL_REQUIRE_CUDA=1` makes that an error.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Protocol

import devices
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from software import Driver, SoftwareTorch, is_preloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

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


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that says what `cuda` tests run on."""
    parser.addoption("--software", action="store_true", help="the software driver is preloaded")


def pytest_configure(config: pytest.Config) -> None:
    """Sets up signals, and PyTorch, for the software driver if there is one."""
    restore_interrupts()
    # Tensors here are so small that threads would only wait for each other, for long on a busy machine.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not config.getoption("--software"):
        return
    if not is_preloaded():
        raise pytest.UsageError("--software needs the software driver: LD_PRELOAD=.../libcuda.so.1")
    # There is no runtime to initialise: the driver has what is needed of it.
    torch.cuda._lazy_init = lambda: None
    torch._C._cuda_init()
    # A tensor is shown without its values, which PyTorch would read past `SoftwareTorch`.
    shown: Callable[..., str] = torch.Tensor.__repr__

    def show(tensor: torch.Tensor, **options: Any) -> str:  # noqa: ANN401
        return f"<{tuple(tensor.shape)} on {tensor.device}>" if tensor.is_cuda else shown(tensor, **options)

    torch.Tensor.__repr__ = show  # type: ignore[method-assign, assignment]


def restore_interrupts() -> None:
    """Lets SIGINT interrupt the tests and the processes that they start.

    A shell without job control starts commands in the background with SIGINT ignored. Python leaves it so,
    and a child inherits it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def why_no_cuda(config: pytest.Config) -> str | None:
    """Why a test on a GPU cannot run here."""
    if config.getoption("--software") or torch.cuda.is_available():
        return None
    return "no NVIDIA GPU that PyTorch can use; `pytest --software` runs this on the software driver"


def pytest_unconfigure() -> None:
    """Lets the interpreter take PyTorch down as it likes."""
    gc.unfreeze()


LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a GPU where there is none, in one line instead of one a test."""
    unlike = [item.nodeid for item in items if " at 0x" in item.name]
    if unlike:
        raise pytest.UsageError(f"names with addresses differ between the processes of `-n`: {unlike}")
    reason = why_no_cuda(config)
    if reason is None:
        return
    cuda = [item for item in items if item.get_closest_marker("cuda") is not None]
    if cuda and os.environ.get("KVPOOL_REQUIRE_CUDA") == "1":
        raise pytest.UsageError(f"KVPOOL_REQUIRE_CUDA=1, but there is {reason}")
    items[:] = [item for item in items if item.get_closest_marker("cuda") is None]
    config.stash[LEFT_OUT] = len(cuda)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what was left out, and why."""
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"SKIPPED [{count}] tests marked cuda: {why_no_cuda(config)}")


@pytest.fixture(autouse=True, scope="module")
def _without_older_objects() -> None:
    """Has collections of garbage look at what a file's tests make, and not at all of PyTorch each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _software(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets PyTorch work on the software driver."""
    if not request.config.getoption("--software"):
        yield
        return
    with SoftwareTorch():  # type: ignore[no-untyped-call]
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where pools are made, also by those who ask `devices.current()`."""
    name: str = request.param
    with devices.on(name):
        yield name


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """The software driver, with no failures planned and all work done before and after."""
    if not request.config.getoption("--software"):
        pytest.skip("it needs the software driver: `pytest --software`")
    driver = Driver()
    # An object that is collected while calls are counted would return its memory.
    gc.collect()
    gc.disable()
    driver.run()
    driver.reset_calls()
    yield driver
    gc.enable()
    driver.restore()
    driver.run()


class RunSnippet(Protocol):
    """Runs Python code in an interpreter of its own and returns what it printed."""

    def __call__(
        self,
        code: str,
        *,
        hidden: Sequence[str] = (),
        env: dict[str, str] | None = None,
        has_torch: bool = False,
    ) -> str: ...


# Forks for each snippet, whose code then is that of the main module until the interpreter ends. With PyTorch
# out of the sight of its collector that takes a third of the time.
WITH_TORCH = """
import gc, json, os, sys, warnings
import torch
gc.freeze()
for line in sys.stdin:
    code, *names = json.loads(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        for fd, name in enumerate(names):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), fd)
        del gc, line, names, child, fd, name
        exec(compile(code, "<snippet>", "exec"))
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[int, str, str]]]:
    """Runs code in a fork of an interpreter that has imported PyTorch, which takes long, and nothing else."""
    folder = tmp_path_factory.mktemp("snippets")
    process: subprocess.Popen[str] | None = None

    def run(code: str) -> tuple[int, str, str]:
        nonlocal process
        if process is None:
            command = [sys.executable, "-W", "error", "-c", WITH_TORCH]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        out, err = folder / "out", folder / "err"
        for file in (out, err):
            file.unlink(missing_ok=True)
        print(json.dumps([code, os.devnull, str(out), str(err)]), file=process.stdin, flush=True)
        return int(process.stdout.readline()), out.read_text(), err.read_text()

    yield run
    if process is not None:
        process.communicate()


@pytest.fixture
def run_snippet(with_torch: Callable[[str], tuple[int, str, str]]) -> RunSnippet:
    """An interpreter in which the `hidden` modules can't be imported, and every warning is an error."""

    def run(
        code: str, *, hidden: Sequence[str] = (), env: dict[str, str] | None = None, has_torch: bool = False
    ) -> str:
        hide = "".join(f"sys.modules[{name!r}] = None\n" for name in hidden)
        code = f"import sys\n{hide}{textwrap.dedent(code)}"
        if has_torch:
            assert not env
            status, out, err = with_torch(code)
        else:
            command = [sys.executable, "-W", "error", "-c", code]
            environment = {**os.environ, **(env or {})}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=120, check=False, env=environment
            )
            status, out, err = done.returncode, done.stdout, done.stderr
        assert status == 0, f"exit status {status}\n{out}\n{err}"
        return out

    return run


def _every_other(values: Sequence[int]) -> list[int]:
    return [x for value in values for x in (value, -99)]


def _narrow(values: Sequence[int]) -> torch.Tensor:
    """A tensor as narrow as the values allow."""
    dtype = torch.int16 if all(abs(value) < 1 << 15 for value in values) else torch.int64
    return torch.tensor(values, dtype=dtype)


def _unsigned(values: Sequence[int]) -> npt.NDArray[Any]:
    """An array of unsigned integers, unless a value is negative."""
    return np.array(values, dtype=np.int64 if min(values, default=0) < 0 else np.uint32)


class Series:
    """As series of Polars and pandas and chunked arrays of Arrow: NumPy makes arrays of them."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:  # noqa: ANN401 - as in NumPy
        return np.array(self.values, dtype=dtype, copy=copy)


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
    "torch_int16": _narrow,
    "numpy_uint32": _unsigned,
    "numpy_big_endian": lambda values: np.array(values, dtype=">i4"),
    "series": lambda values: Series(np.array(values, dtype=np.int64)),
    "numpy_read_only": lambda values: np.broadcast_to(np.array(values, dtype=np.int64), (1, len(values))),
    "list": list,
    "tuple": tuple,
    "numpy_scalars": lambda values: [np.int64(value) for value in values],
}


@pytest.fixture(params=sorted(INDEX_KINDS))
def as_index(request: pytest.FixtureRequest) -> Callable[[Sequence[int]], Any]:
    """Every form in which indices may be given; tensors of PyTorch are on the device of the test."""
    kind: str = request.param
    make = INDEX_KINDS[kind]
    return (lambda values: devices.to_current(make(values))) if kind.startswith("torch") else make


@pytest.fixture(params=sorted(INDEX_KINDS))
def as_host_index(request: pytest.FixtureRequest) -> Callable[[Sequence[int]], Any]:
    """Every form in which indices may be given that the host knows."""
    kind: str = request.param
    return INDEX_KINDS[kind]


BAD_INDICES: dict[str, Any] = {
    "torch_float": torch.tensor([1.0, 2.0]),
    "torch_bool": torch.tensor([True, False]),
    "torch_uint8": torch.tensor([1, 2], dtype=torch.uint8),
    "numpy_float": np.array([1.0, 2.0]),
    "numpy_bool": np.array([True, False]),
    "numpy_int8": np.array([1, 2], dtype=np.int8),
    "numpy_big_endian_float": np.array([1, 2], dtype=">f4"),
    "series_with_gaps": Series(np.array([1, np.nan])),
    "bools": [True, False],
    "floats": [1.0, 2.0],
    "mixed": [1, 2.0],
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
