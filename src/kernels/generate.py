"""Compiles the kernels to PTX and to machine code, and checks the committed files.

The compiler is NVRTC 12.0, whose PTX every driver from CUDA 12.0 on can load; it needs no GPU. Kernels with
more than 4 KiB of parameters need NVRTC 12.1, and a driver that is not older. Each module is compiled for
every device, and again for compute capability 9.0 and later. The PTX is assembled for the most used devices,
so that their drivers need not compile it. The compilers and the assemblers come from PyPI:
`pip install --no-deps --target TOOLS nvidia-cuda-nvrtc-cu12==12.0.76 nvidia-cuda-nvcc-cu12==12.9.86
nvidia-cuda-nvcc==13.0.88` and
`pip install --no-deps --target TOOLS/cuda-12.1 nvidia-cuda-nvrtc-cu12==12.1.55`.

    python src/kernels/generate.py --tools TOOLS           writes the .ptx and .cubin files
    python src/kernels/generate.py --tools TOOLS --check   compares them

Only PTX that every architecture takes without spills is committed. To see that takes a minute, so
registers.json keeps what was found, with the digests of the PTX: the same PTX and assemblers give the same
answer.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The modules, with the versions of their PTX.
MODULES = {"plan": "8.0", "plan_long": "8.1", "rows": "8.0", "table": "8.0"}
HEADERS = ("convert.cuh", "params.cuh", "plan.cuh", "unit_plan.cuh")
# The conversions rely on IEEE 754: no fused or approximate operations, no subnormals flushed to zero.
OPTIONS = (
    "--std=c++14",
    "--fmad=false",
    "--prec-div=true",
    "--ftz=false",
)
# The architecture of the PTX for every device, and of the one with instructions for 8-bit floats: the modules
# that use these are compiled for both.
OLDEST_TARGET, NEWER_TARGET = 70, 90
WITH_NEWER = ("rows",)
# The compiler for each version of PTX: what the oldest supported driver accepts, and the oldest one with long
# parameters.
COMPILERS = {
    "8.0": "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "8.1": "cuda-12.1/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
}
HEAD = "\n.version {}\n.target sm_{}\n"
ASSEMBLERS = ("nvidia/cuda_nvcc/bin/ptxas", "nvidia/cu13/bin/ptxas")
# What is assembled with the first of them.
CUBINS = (80, 90, 100, 120)
OLDEST = 75
NEWEST = 121
# What the assemblers said of the committed PTX.
RECORD = HERE / "registers.json"


class GenerateError(Exception):
    """A tool is missing, or the kernels fail a check."""


class Compiler:
    """NVRTC for a version of PTX, loaded from the folder of its pip package."""

    def __init__(self, tools: Path, version: str) -> None:
        self._version = version
        path = tool(tools, COMPILERS[version])
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise GenerateError(f"{path} cannot be loaded: {error}") from None
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise GenerateError(f"{name}: {self._lib.nvrtcGetErrorString(status).decode()}")

    def _output(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        output = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, output)
        return output.value

    def ptx(self, module: str, target: int) -> bytes:
        """The PTX of a module for a target.

        Raises:
            GenerateError: If it does not compile, or compiles with a warning.
        """
        headers = [(HERE / name).read_bytes() for name in HEADERS]
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            (HERE / f"{module}.cu").read_bytes(),
            f"{module}.cu".encode(),
            len(HEADERS),
            (ctypes.c_char_p * len(HEADERS))(*headers),
            (ctypes.c_char_p * len(HEADERS))(*(name.encode() for name in HEADERS)),
        )
        try:
            given = [f"--gpu-architecture=compute_{target}", *OPTIONS]
            options = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
            status = self._lib.nvrtcCompileProgram(program, len(given), options)
            log = self._output("ProgramLog", program).decode().strip()
            if status or log:
                raise GenerateError(f"{module}.cu does not compile cleanly:\n{log}")
            ptx = self._output("PTX", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))
        head = HEAD.format(self._version, target)
        if head.encode() not in ptx:
            raise GenerateError(f"the PTX of {module}.cu is not of{head.replace(chr(10), ' ')}")
        return ptx


def tool(tools: Path, name: str) -> Path:
    """A file of a pip package in `tools`.

    Raises:
        GenerateError: If it is missing.
    """
    path = tools / name
    if not path.is_file():
        raise GenerateError(f"{path} is missing; the head of {Path(__file__).name} says where it comes from")
    return path


def run(*command: str | Path) -> str:
    """The output of a command.

    Raises:
        GenerateError: If it fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise GenerateError(f"{command[0]} cannot be run: {error}") from None
    printed = done.stdout + done.stderr
    if done.returncode:
        raise GenerateError(f"{' '.join(map(str, command))}:\n{printed}")
    return printed


def architectures(assembler: Path) -> list[int]:
    """The architectures from `OLDEST` to `NEWEST` that an assembler supports."""
    known = {int(number) for number in re.findall(r"\bsm_(\d+)", run(assembler, "--help"))}
    return sorted(number for number in known if OLDEST <= number <= NEWEST)


def registers(assembler: Path, architecture: int, ptx: Path) -> dict[str, int]:
    """Assembles a module, and returns the registers of each of its kernels.

    Raises:
        GenerateError: If it cannot be assembled, or a kernel spills registers or uses a stack.
    """
    where = f"{ptx.name} for sm_{architecture} with {assembler}"
    report = run(assembler, f"--gpu-name=sm_{architecture}", "--verbose", "-o", "/dev/null", ptx)
    if "warning" in report:
        raise GenerateError(f"{where}:\n{report}")
    found = {}
    for part in report.split("Compiling entry function '")[1:]:
        kernel = part.partition("'")[0]
        memory = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        used = re.search(r"Used (\d+) registers", part)
        if memory is None or used is None:
            raise GenerateError(f"{where}: the report does not mention {kernel}:\n{report}")
        if any(int(number) for number in memory.groups()):
            raise GenerateError(f"{where}: {kernel} does not fit its registers: {memory.group(0)}")
        found[kernel] = int(used.group(1))
    if not found:
        raise GenerateError(f"{where}: no kernels:\n{report}")
    return found


def cubin(assembler: Path, architecture: int, ptx: Path) -> bytes:
    """A module in machine code for the devices of one architecture.

    Raises:
        GenerateError: If it cannot be assembled.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cubin"
        run(assembler, f"--gpu-name=sm_{architecture}", "-o", out, ptx)
        return out.read_bytes()


def sources(module: str) -> dict[int, Path]:
    """The PTX of a module by its architecture."""
    found = {OLDEST_TARGET: HERE / f"{module}.ptx"}
    if module in WITH_NEWER:
        found[NEWER_TARGET] = HERE / f"{module}.sm_{NEWER_TARGET}.ptx"
    return found


def source(module: str, architecture: int) -> Path:
    """The PTX that a device of an architecture gets: the newest that it can run."""
    return max((target, path) for target, path in sources(module).items() if target <= architecture)[1]


def cubins(tools: Path) -> dict[Path, bytes]:
    """All modules in machine code, assembled from the committed PTX."""
    assembler = tool(tools, ASSEMBLERS[0])
    return {
        HERE / "cubin" / f"{module}.sm_{architecture}.cubin": cubin(
            assembler, architecture, source(module, architecture)
        )
        for module in MODULES
        for architecture in CUBINS
    }


def same(generated: dict[Path, bytes]) -> None:
    """Compares files with their expected contents.

    Raises:
        GenerateError: If one differs or is missing.
    """
    for path, content in generated.items():
        if not path.is_file() or path.read_bytes() != content:
            raise GenerateError(f"{path} does not match the sources; run this script without --check")


def assembled(tools: Path, compiled: dict[Path, bytes]) -> dict[str, object]:
    """The report of each assembler about all modules, which are written already, on every architecture.

    Raises:
        GenerateError: If one does not take them, or a kernel does not fit.
    """
    used: dict[str, list[int]] = {}
    known: dict[str, list[int]] = {}
    for name in ASSEMBLERS:
        assembler = tool(tools, name)
        known[name] = architectures(assembler)
        if not known[name]:
            raise GenerateError(f"{assembler} names no architecture from sm_{OLDEST} to sm_{NEWEST}")
        for path in compiled:
            oldest = NEWER_TARGET if path.name.endswith(f".sm_{NEWER_TARGET}.ptx") else OLDEST_TARGET
            for architecture in known[name]:
                if architecture >= oldest:
                    for kernel, count in registers(assembler, architecture, path).items():
                        used.setdefault(kernel, []).append(count)
    return {
        "ptx": digests(compiled),
        "assemblers": versions(tools),
        "architectures": known,
        "registers": {kernel: [min(counts), max(counts)] for kernel, counts in sorted(used.items())},
    }


def versions(tools: Path) -> dict[str, str]:
    """The release of each assembler."""
    return {name: run(tool(tools, name), "--version").splitlines()[-1] for name in ASSEMBLERS}


def digests(compiled: dict[Path, bytes]) -> dict[str, str]:
    """The SHA-256 of each module."""
    return {path.name: hashlib.sha256(ptx).hexdigest() for path, ptx in compiled.items()}


def check(tools: Path, compiled: dict[Path, bytes]) -> None:
    """Compares the compiled kernels with the committed ones, and with the record, as well as the assemblers.

    Raises:
        GenerateError: If anything differs or is missing.
    """
    same(compiled)
    same(cubins(tools))
    record = json.loads(RECORD.read_text(encoding="ascii")) if RECORD.is_file() else {}
    if (record.get("ptx"), record.get("assemblers")) != (digests(compiled), versions(tools)):
        raise GenerateError(f"{RECORD} is of other kernels or assemblers; run this script without --check")
    for name, known in record["architectures"].items():
        print(f"{name}: sm_{', sm_'.join(map(str, known))}")
    for kernel, (least, most) in record["registers"].items():
        print(f"{kernel:24} {least:3} to {most:3} registers, no spills")


def main() -> None:
    """Writes or checks the PTX and the machine code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, required=True, help="folder of the compilers' pip packages")
    parser.add_argument("--check", action="store_true", help="change nothing; fail on any difference")
    arguments = parser.parse_args()
    try:
        compilers = {version: Compiler(arguments.tools, version) for version in COMPILERS}
        compiled = {
            path: compilers[version].ptx(module, target)
            for module, version in MODULES.items()
            for target, path in sources(module).items()
        }
        if arguments.check:
            check(arguments.tools, compiled)
        else:
            for path, ptx in compiled.items():
                path.write_bytes(ptx)
            (HERE / "cubin").mkdir(exist_ok=True)
            for path, code in cubins(arguments.tools).items():
                path.write_bytes(code)
            record = assembled(arguments.tools, compiled)
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    except GenerateError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
