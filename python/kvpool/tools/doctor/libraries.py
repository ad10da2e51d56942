"""Checks of this package, PyTorch and other libraries."""

from __future__ import annotations

import importlib
import platform
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.integrations.seams import numbers_of, version_of
from kvpool.integrations.versions import TRANSFORMERS
from kvpool.tools.doctor.report import BROKEN, MISSING, NOTE, OK, Finding

PACKAGE = "package"
TORCH = "PyTorch"
LIBRARIES = "other libraries"

EXCHANGE = "__dlpack_c_exchange_api__"
"""The table of functions for creating and reading tensors in PyTorch 2.10 and later."""

LEAST_TORCH, EXCHANGE_TORCH = (2, 4), (2, 10)
TOOLS = ("rich", "matplotlib")

_WITHOUT_CUDA = "built without the `cuda` feature"


class TorchState(NamedTuple):
    """The state of PyTorch.

    Attributes:
        findings: The findings.
        problem: The reason why tensors cannot be views of pools; empty if they can.
        advice: The remedy.
    """

    findings: list[Finding]
    problem: str = ""
    advice: str = ""


def package(cuda_reason: str) -> list[Finding]:
    """Check this package and its interpreter.

    Args:
        cuda_reason: kvpool's answer to a request for a GPU.
    """
    import kvpool  # noqa: PLC0415 - this file must load even if kvpool does not
    from kvpool import _kvpool as extension  # noqa: PLC0415

    path = Path(str(extension.__file__))
    stable = (f"stable ABI ({kind})" for kind in ("abi3t", "abi3") if f".{kind}" in path.name)
    abi = next(stable, sysconfig.get_config_var("SOABI"))
    without = _WITHOUT_CUDA in cuda_reason
    threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    linux = sys.platform == "linux"
    return [
        Finding(PACKAGE, "kvpool", OK, f"{kvpool.__version__}, {path}"),
        Finding(PACKAGE, "extension", OK, f"{abi}, {path.stat().st_size:,} bytes"),
        Finding(
            PACKAGE,
            "CUDA support",
            MISSING if without else OK,
            "not built in" if without else "built in: kernels as PTX, libcuda loaded on first use",
            "install a wheel, or build with the features python and cuda" if without else "",
        ),
        Finding(
            PACKAGE,
            "Python",
            OK,
            f"{platform.python_implementation()} {platform.python_version()}, "
            f"{'free-threaded' if threaded else 'with the GIL'}, {sys.executable}",
        ),
        Finding(
            PACKAGE,
            "platform",
            OK if linux else NOTE,
            f"{platform.platform()}, {platform.machine()}",
            "" if linux else "kvpool is tested on Linux only",
        ),
    ]


def load(name: str) -> tuple[Any, str]:
    """Import a module. Returns it and an empty text, or None and the reason, empty if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name), ""
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything
        absent = isinstance(error, ModuleNotFoundError) and error.name == name
        return None, "" if absent else f"{type(error).__name__}: {error}"


def torch_state(devices: int) -> TorchState:
    """Check PyTorch, and whether its tensors are views of pools.

    Args:
        devices: Number of GPUs that the driver reports.
    """
    torch, problem = load("torch")
    if torch is None:
        advice = "pip install 'kvpool[torch]'"
        if problem:
            found = Finding(
                TORCH, "torch", BROKEN, f"importing it failed: {problem}", f"reinstall it: {advice}"
            )
            return TorchState([found], f"importing PyTorch failed: {problem}", found.advice)
        text = "not installed; pools return kvpool.Tensor, which NumPy, CuPy and JAX accept (DLPack)"
        return TorchState(
            [Finding(TORCH, "torch", MISSING, text, advice)], "PyTorch is not installed", advice
        )
    findings = [_torch_version(str(torch.__version__)), _exchange(torch), _torch_cuda(torch, devices)]
    problem = _why_not_shared(torch)
    if problem:
        advice = "report it, with the output of kvpool doctor --json"
        findings.append(Finding(TORCH, "zero-copy", BROKEN, problem, advice))
        return TorchState(findings, problem, advice)
    return TorchState(findings)


def _torch_version(version: str) -> Finding:
    if numbers_of(version) < LEAST_TORCH:
        return Finding(TORCH, "torch", NOTE, version, "kvpool supports 2.4 and later: pip install -U torch")
    return Finding(TORCH, "torch", OK, version)


def _exchange(torch: Any) -> Finding:  # noqa: ANN401 - a module
    name = "DLPack exchange table"
    if hasattr(torch.Tensor, EXCHANGE):
        return Finding(TORCH, name, OK, "available: tensors cost 0.1 to 0.4 us each")
    text = "not available: tensors are made and read through capsules, about 1 us each"
    advice = "pip install 'torch>=2.10'"
    if LEAST_TORCH <= numbers_of(str(torch.__version__)) < EXCHANGE_TORCH:
        advice += ", or torch-c-dlpack-ext, and import torch_c_dlpack_ext before the first pool"
    return Finding(TORCH, name, NOTE, text, advice)


def _torch_cuda(torch: Any, devices: int) -> Finding:  # noqa: ANN401 - a module
    built = torch.version.cuda
    if built:
        return Finding(TORCH, "CUDA build", OK, f"CUDA {built}")
    if torch.version.hip:
        return Finding(
            TORCH,
            "CUDA build",
            NOTE,
            f"none: built for ROCm {torch.version.hip}",
            "kvpool does not support ROCm",
        )
    advice = (
        "install a CUDA build of PyTorch (pytorch.org), or its tensors cannot be on the GPU"
        if devices
        else ""
    )
    return Finding(TORCH, "CUDA build", NOTE if devices else OK, "none: for the CPU only", advice)


def _why_not_shared(torch: Any) -> str:  # noqa: ANN401 - a module
    """Return the reason why tensors of pools on the CPU do not share memory; empty if they do."""
    import kvpool  # noqa: PLC0415

    try:
        pool = kvpool.KVPool(8, 1, 1, 4, "cpu", "float32")
        keys = pool.get_key_buffer(0)
        if not isinstance(keys, torch.Tensor):
            return f"pools return {type(keys).__module__}.{type(keys).__name__}, not torch.Tensor"
        keys[3] = 1.5
        address, seen = pool.get_contiguous_buf_infos()[0][0], pool.gather_kv(0, [3])[0]
        if keys.data_ptr() != address or not torch.equal(seen[0], keys[3]) or not keys[3].all():
            return "a tensor of a pool does not share its memory"
    except Exception as error:  # noqa: BLE001 - any error is the result
        return f"{type(error).__name__}: {error}"
    return ""


def libraries() -> list[Finding]:
    """Check NumPy, transformers, the libraries of the tools, and engines that are installed."""
    return [_numpy(), _ml_dtypes(), _transformers(), *(_tool(name) for name in TOOLS), *_sglang()]


def _numpy() -> Finding:
    module, problem = load("numpy")
    if module is not None:
        return Finding(LIBRARIES, "numpy", OK, str(module.__version__))
    if problem:
        return Finding(LIBRARIES, "numpy", BROKEN, f"importing it failed: {problem}", "reinstall numpy")
    text = "not installed; BatchPlan.host and Tensor.numpy() need it"
    return Finding(LIBRARIES, "numpy", MISSING, text, "pip install numpy")


def _ml_dtypes() -> Finding:
    found = version_of("ml_dtypes")
    if found:
        return Finding(LIBRARIES, "ml_dtypes", OK, found)
    text = "not installed; NumPy needs it for bfloat16 and 8-bit floats (PyTorch has its own)"
    return Finding(LIBRARIES, "ml_dtypes", MISSING, text, "pip install ml_dtypes")


def _transformers() -> Finding:
    problem, advice = TRANSFORMERS.why_not(), "pip install 'kvpool[transformers]'"
    if not problem:
        return Finding(LIBRARIES, "transformers", OK, str(version_of("transformers")))
    status = MISSING if version_of("transformers") is None else NOTE
    return Finding(LIBRARIES, "transformers", status, f"{problem} (PooledModel, PooledCache)", advice)


def _sglang() -> list[Finding]:
    """Return whether an installed SGLang can run on kvpool, and does."""
    found = version_of("sglang")
    if found is None:
        return []
    from kvpool.integrations import sglang  # noqa: PLC0415 - this file must load even if kvpool does not

    if found not in sglang.TESTED_VERSIONS:
        text = f"{found}; tested are {', '.join(sglang.TESTED_VERSIONS)}"
        return [Finding(LIBRARIES, "sglang", NOTE, text, f"pip install sglang=={sglang.TESTED_VERSIONS[-1]}")]
    switch = "on kvpool's pools" if sglang.is_switched_on() else "on its own pools; SGLANG_PLUGINS=kvpool"
    return [Finding(LIBRARIES, "sglang", OK, f"{found}, {switch}")]


def _tool(name: str) -> Finding:
    found = version_of(name)
    if found:
        return Finding(LIBRARIES, name, OK, found)
    return Finding(
        LIBRARIES, name, MISSING, "not installed (kvpool's commands)", "pip install 'kvpool[tools]'"
    )
