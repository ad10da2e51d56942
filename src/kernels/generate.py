"""Compiles the kernels to PTX, and checks that what is committed is what the sources give.

The compiler is NVRTC 12.0, whose PTX every driver from CUDA 12.0 on can load; it needs no GPU. It and the
assemblers come from PyPI: `pip install --no-deps --target TOOLS nvidia-cuda-nvrtc-cu12==12.0.76
nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-nvcc==13.0.88`.

    python src/kernels/generate.py --tools TOOLS           writes the .ptx files
    python src/kernels/generate.py --tools TOOLS --check   compares them, and assembles them everywhere
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODULES = ("rows", "table")
HEADERS = ("convert.cuh", "params.cuh")
OPTIONS = ("--gpu-architecture=compute_70", "--std=c++14", "--fmad=false", "--prec-div=true", "--ftz=false")
NVRTC = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
ASSEMBLERS = ("nvidia/cuda_nvcc/bin/ptxas", "nvidia/cu13/bin/ptxas")
OLDEST = 75
NEWEST = 121


class GenerateError(Exception):
    """A tool is missing, or the kernels are not as they should be."""


class Compiler:
    """NVRTC, loaded from where pip put it."""

    def __init__(self, tools: Path) -> None:
        path = tools / NVRTC
        if not path.is_file():
            raise GenerateError(f"{path} is missing; see the head of this file")
        self._lib = ctypes.CDLL(str(path))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise GenerateError(f"{name}: {self._lib.nvrtcGetErrorString(status).decode()}")

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.value.decode()

    def ptx(self, module: str) -> str:
        """The PTX of a module."""
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
            options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
            try:
                self._call("nvrtcCompileProgram", program, len(OPTIONS), options)
            except GenerateError as error:
                raise GenerateError(f"{module}.cu: {error}\n{self._text('ProgramLog', program)}") from None
            log = self._text("ProgramLog", program).strip()
            if log:
                raise GenerateError(f"{module}.cu: {log}")
            return self._text("PTX", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))


def architectures(assembler: Path) -> list[int]:
    """The architectures from `OLDEST` to `NEWEST` that an assembler knows."""
    help_text = subprocess.run([assembler, "--help"], capture_output=True, text=True, check=True).stdout
    known = {int(number) for number in re.findall(r"'?sm_(\d+)'?", help_text)}
    return sorted(number for number in known if OLDEST <= number <= NEWEST)


def registers(assembler: Path, architecture: int, ptx: Path) -> dict[str, int]:
    """Assembles a module, and returns the registers of each of its kernels.

    Raises:
        GenerateError: If it cannot be assembled, or a kernel spills registers or uses a stack.
    """
    command: list[str | Path] = [
        assembler,
        f"--gpu-name=sm_{architecture}",
        "--verbose",
        "--warn-on-spills",
        "-o",
        "/dev/null",
        ptx,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    where = f"{ptx.name} for sm_{architecture} with {assembler}"
    if done.returncode or "warning" in report:
        raise GenerateError(f"{where}:\n{report}")
    found = {}
    for kernel, body in re.findall(
        r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", report, re.DOTALL
    ):
        numbers = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", body
        )
        used = re.search(r"Used (\d+) registers", body)
        if numbers is None or used is None:
            raise GenerateError(f"{where}: nothing is said about {kernel}:\n{report}")
        if any(int(number) for number in numbers.groups()):
            raise GenerateError(f"{where}: {kernel} does not fit its registers: {numbers.group(0)}")
        found[kernel] = int(used.group(1))
    if not found:
        raise GenerateError(f"{where}: no kernels:\n{report}")
    return found


def check(tools: Path, compiled: dict[str, str]) -> None:
    """Compares what was compiled with what is committed, and assembles it for every architecture."""
    for module, ptx in compiled.items():
        path = HERE / f"{module}.ptx"
        if not path.is_file() or path.read_text() != ptx:
            raise GenerateError(f"{path} is not what {module}.cu gives; run this script without --check")
    used: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ASSEMBLERS:
            assembler = tools / name
            if not assembler.is_file():
                raise GenerateError(f"{assembler} is missing; see the head of this file")
            known = architectures(assembler)
            for module, ptx in compiled.items():
                path = Path(folder) / f"{module}.ptx"
                path.write_text(ptx)
                for architecture in known:
                    for kernel, count in registers(assembler, architecture, path).items():
                        used.setdefault(kernel, []).append(count)
            print(f"{name}: sm_{', sm_'.join(map(str, known))}")
    for kernel, counts in used.items():
        print(f"{kernel:24} {min(counts):3} to {max(counts):3} registers, no spills")


def main() -> None:
    """Writes or checks the PTX."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, required=True, help="where pip put the compilers")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if anything is wrong")
    arguments = parser.parse_args()
    try:
        compiler = Compiler(arguments.tools)
        compiled = {module: compiler.ptx(module) for module in MODULES}
        if arguments.check:
            check(arguments.tools, compiled)
        else:
            for module, ptx in compiled.items():
                (HERE / f"{module}.ptx").write_text(ptx)
    except GenerateError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
