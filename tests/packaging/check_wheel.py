"""Checks wheels as an index and an empty environment take them.

    python tests/packaging/check_wheel.py WHEEL...

What is wrong is printed, and then an error. The tools are those of the dependency group `wheels`.
"""

from __future__ import annotations

import email.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from linked import LICENCES, ROOT, linked

LARGEST = 12_000_000  # bytes
KERNELS = ROOT / "src" / "kernels"
# The number of each machine in an ELF file.
MACHINES = {"x86_64": 62, "aarch64": 183}
# The interpreters that load the wheels of an ABI, as they are named on PATH; this one loads `abi3`.
INTERPRETERS = {
    "abi3": (sys.executable,),
    "cp314t": ("python3.14t",),
    "abi3.abi3t": ("python3.15t", "python3.15"),
}
# The first calls of a user, without PyTorch and NumPy.
FIRST_CALLS = """
import kvpool
allocator = kvpool.TokenToKVPoolAllocator(8, device="cpu")
slots = allocator.alloc(3)
assert type(slots) is kvpool.Tensor, type(slots)
assert (tuple(slots.shape), allocator.available_size()) == ((3,), 5), slots
allocator.free(slots)
assert allocator.available_size() == 8
print(kvpool.__version__)
"""


class Wheel:
    """A wheel, and what its name says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name, self.version, _, self.abi, platform = path.stem.split("-")
        self.platforms = platform.split(".")
        self.machine = next(machine for machine in MACHINES if platform.endswith(machine))
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist()}
        self.info = f"{self.name}-{self.version}.dist-info"
        [self.extension] = [name for name in self.files if name.endswith(".so")]


def problems_of_size(wheel: Wheel) -> list[str]:
    size = wheel.path.stat().st_size
    return [f"{size:,} bytes, more than {LARGEST:,}"] if size > LARGEST else []


def problems_of_extension(wheel: Wheel) -> list[str]:
    """The machine of the extension, and the kernels in it."""
    data = wheel.files[wheel.extension]
    machine = int.from_bytes(data[18:20], "little")
    wrong = [] if machine == MACHINES[wheel.machine] else [f"{wheel.extension} is for ELF machine {machine}"]
    kernels = [*KERNELS.rglob("*.ptx"), *KERNELS.rglob("*.cubin")]
    assert len(kernels) > 10
    return wrong + [
        f"{kernel.relative_to(ROOT)} is not in it" for kernel in kernels if kernel.read_bytes() not in data
    ]


def problems_of_paths(wheel: Wheel) -> list[str]:
    """Places of the machine that built it, in any file."""
    rust = subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout
    cargo = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    places = {str(Path.home()), str(ROOT), cargo, rust.strip(), tempfile.gettempdir() + "/pip-"}
    return [
        f"{name} names {place}: {data[max(at - 20, 0) : at + 80]!r}"
        for name, data in wheel.files.items()
        for place in sorted(places)
        if (at := data.find(place.encode() + b"/" * (not place.endswith("-")))) >= 0
    ]


def problems_of_contents(wheel: Wheel) -> list[str]:
    """Metadata, licences, the bill of materials, and what does not belong there."""
    wrong = [f"lacks {name}" for name in ("kvpool/py.typed", "kvpool/_kvpool.pyi") if name not in wheel.files]
    metadata = email.parser.BytesParser().parsebytes(wheel.files[f"{wheel.info}/METADATA"])
    fields = ("Requires-Python", "License-Expression", "Author", "Summary")
    wrong += [f"its metadata lacks {name}" for name in fields if name not in metadata]
    if re.search(r"\]\((?!https:)", str(metadata.get_payload())):
        wrong.append("its page has relative links")
    wrong += [
        f"lacks {file.relative_to(ROOT)}"
        for file in (ROOT / "LICENSE", LICENCES)
        if wheel.files.get(f"{wheel.info}/licenses/{file.relative_to(ROOT)}") != file.read_bytes()
    ]
    outside = [name for name in wheel.files if not name.startswith(("kvpool/", wheel.info))]
    wrong += [f"has {name}" for name in outside]
    boms = [data for name, data in wheel.files.items() if name.startswith(f"{wheel.info}/sboms/")]
    if len(boms) != 1:
        return [*wrong, f"has {len(boms)} bills of materials"]
    listed = {component["purl"] for component in json.loads(boms[0])["components"]}
    expected = {crate.purl for crate in linked(f"{wheel.machine}-unknown-linux-gnu")[1:]}
    wrong += [f"its bill of materials lacks {purl}" for purl in sorted(expected - listed)]
    return wrong + [f"its bill of materials lists {purl}" for purl in sorted(listed - expected)]


def output_of(*command: str) -> tuple[bool, str]:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True, cwd=ROOT
    )
    return done.returncode == 0, done.stdout


def problems_of_tools(wheel: Wheel) -> list[str]:
    """The problems that `twine check` and `auditwheel show` find."""
    passed, text = output_of(sys.executable, "-m", "twine", "check", "--strict", str(wheel.path))
    wrong = [] if passed else [text]
    passed, text = output_of(sys.executable, "-m", "auditwheel", "show", str(wheel.path))
    if not passed:
        return [*wrong, text]
    found = re.search(r'platform tag:\s+"([^"]+)"', text)
    if found is None or found[1] not in wheel.platforms:
        wrong.append(f"is not {', '.join(wheel.platforms)}: {' '.join(text.split())}")
    return wrong


def installed(wheel: Wheel) -> tuple[list[str], str]:
    """Installs it into an empty environment. Returns what is wrong, and what was done or why not."""
    if wheel.machine != os.uname().machine:
        return [], f"not installed, as this machine is no {wheel.machine}"
    names = INTERPRETERS[wheel.abi]
    python = next(filter(None, map(shutil.which, names)), None)
    if python is None:
        return [], f"not installed, as there is no {' or '.join(names)}"
    with tempfile.TemporaryDirectory() as folder:
        passed, text = output_of(python, "-m", "venv", "--without-pip", folder)
        inside = f"{folder}/bin/python"
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", inside)
        for command in (
            (*pip, "install", "--quiet", "--no-index", "--no-compile", str(wheel.path)),
            (inside, "-I", "-W", "error", "-c", FIRST_CALLS),
            (inside, "-I", "-m", "kvpool", "doctor", "--json"),
        ):
            if passed:
                passed, text = output_of(*command)
    return ([] if passed else [text]), f"runs in an empty environment of {Path(python).name}"


def main(paths: list[str]) -> None:
    failed = not paths
    for path in map(Path, paths):
        wheel = Wheel(path)
        wrong, what = installed(wheel)
        for check in (
            problems_of_size,
            problems_of_extension,
            problems_of_paths,
            problems_of_contents,
            problems_of_tools,
        ):
            wrong += check(wheel)
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {what}")
        for problem in wrong:
            print(f"  {problem}")
        failed |= bool(wrong)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
