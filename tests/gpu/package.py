"""Packs what a machine with a GPU lacks: wheels, and files of SGLang that kvpool is timed beside.

    python tests/gpu/package.py .gpu [SGLANG.whl]    # where the package is made

Wheels stay packed in `.gpu/wheels`, since the working tree and `.gpu` together may have 64 MiB on their way;
`run.py` unpacks them into the machine's folder for temporary files. The files of SGLang are taken from its
wheel, and are in no repository. It ends with 1 if the package has become too large to be brought.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60 << 20
SGLANG = (
    "sglang/kernels/ops/memory/allocator.py",
    "sglang/kernels/ops/memory/common.py",
    "sglang/kernels/ops/attention/kv_indices.py",
    "sglang/srt/mem_cache/allocator/base.py",
    "sglang/srt/mem_cache/allocator/paged.py",
    "sglang/srt/mem_cache/allocator/token.py",
)


def take_peers(wheel: Path, folder: Path) -> None:
    """Puts the files of SGLang into a folder."""
    with zipfile.ZipFile(wheel) as packed:
        for name in SGLANG:
            packed.extract(name, folder)


def unpack(package: Path, base: Path | None = None) -> tuple[list[Path], list[Path]]:
    """Unpacks the wheels, unless they are there from an earlier run.

    Args:
        package: The folder of the package.
        base: Where to, by default a folder of this machine.

    Returns:
        Folders of modules, and folders of programs.
    """
    wheels = sorted((package / "wheels").glob("*.whl"))
    if not wheels:
        return [], []
    named = "".join(f"{wheel.name} {wheel.stat().st_size}\n" for wheel in wheels)
    base = base or Path(tempfile.gettempdir()) / f"kvpool-gpu-{os.getuid()}"
    target = base / hashlib.sha256(named.encode()).hexdigest()[:16]
    if not target.exists():
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=base))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(new)
        for program in new.glob("*.data/scripts/*"):
            program.chmod(0o755)
        try:
            new.rename(target)
        except OSError:  # another run was first
            shutil.rmtree(new)
    return [target], sorted(target.glob("*.data/scripts"))


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tracked_bytes(root: Path) -> int:
    """The bytes of all files that git tracks."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout  # noqa: S607
    paths = [root / os.fsdecode(name) for name in names.split(b"\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def size_report(package: Path, tree: int, most: int = MOST_BYTES) -> tuple[str, bool]:
    """The sizes in words, and whether they fit."""
    parts = {
        path.name: bytes_below(path) if path.is_dir() else path.stat().st_size for path in package.iterdir()
    }
    parts["tracked files"] = tree
    total = sum(parts.values())
    words = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sorted(parts.items()))
    return f"{total / 2**20:.1f} of at most {most / 2**20:.0f} MiB: {words}", total <= most


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", type=Path, help="the folder of the package")
    parser.add_argument("sglang", type=Path, nargs="?", help="SGLang's wheel")
    arguments = parser.parse_args()
    if arguments.sglang:
        take_peers(arguments.sglang, arguments.package / "peers")
    words, fits = size_report(arguments.package, tracked_bytes(ROOT))
    print(words if fits else f"the package is too large: {words}", file=sys.stdout if fits else sys.stderr)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
